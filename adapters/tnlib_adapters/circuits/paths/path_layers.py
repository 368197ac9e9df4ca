"""Blocks of a frozen model for sums over paths: heads, and the linear maps around them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tnlib._typing import Array
from tnlib_adapters.frozen.frozen_heads import FrozenHeads, FrozenNorm
from tnlib_adapters.frozen.frozen_model import FrozenBlock


@dataclass(frozen=True)
class PathLayer:
    """A block: its heads, what lies between heads, and the norm behind both.

    Parameters
    ----------
    attentions
        Names and attention layers.
    others
        Feed-forward layers.
    after
        Norm behind the block, or None.
    """

    attentions: tuple[tuple[str, FrozenHeads], ...]
    others: tuple[Any, ...]
    after: FrozenNorm | None

    @classmethod
    def of(cls, block: FrozenBlock) -> PathLayer:
        """Return a block of a frozen model."""
        named = list(zip(block.names, block.branches, strict=True))
        attentions = tuple((name, branch) for name, branch in named if isinstance(branch, FrozenHeads))
        others = tuple(branch for _, branch in named if not isinstance(branch, FrozenHeads))
        return cls(attentions, others, block.after)

    @property
    def names(self) -> list[str]:
        """All heads, "layer.head"."""
        return [f"{name}.{h}" for name, heads in self.attentions for h in range(len(heads.patterns))]

    def around(self, streams: Array) -> Array:
        """Return streams (m, n, d) before the block behind it, before the norm, along paths around the heads."""
        out: Array = streams + sum(other.linear(streams) for other in self.others)
        return out

    def pull_back(self, readouts: Array) -> Array:
        """Return the adjoint of `around` for readouts (m, n, d)."""
        out: Array = readouts + sum(other.pull_back(readouts)[0] for other in self.others)
        return out

    def maps(self) -> Array:
        """Return the matrix of `around` at every position, (n, d, d), which acts on rows."""
        out: Array = sum(other.matrices() for other in self.others)  # n d d
        diagonal = np.einsum("nii->ni", out)
        diagonal += 1
        return out


def head_outputs(heads: FrozenHeads, stream: Array) -> Array:
    """Return what each head writes from a stream (n, d) without biases, (heads, n, d)."""
    written = heads.values_of(stream) @ heads.output_weights
    return np.asarray(written if heads.behind is None else written / heads.behind.divisors)


def streams_of_one_head(layers: Sequence[PathLayer], embedding: Array) -> Iterator[Array]:
    """Yield before every block the stream without heads, then those that one head has written, (1 + heads, n, d)."""
    streams = embedding[None]
    for layer in layers:
        yield streams
        written = [head_outputs(heads, streams[0]) for _, heads in layer.attentions]
        streams = np.concatenate([layer.around(streams), *written])
        streams = streams if layer.after is None else layer.after.linear(streams)
