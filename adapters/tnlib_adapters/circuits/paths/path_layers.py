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


def weighted_values(heads: FrozenHeads, streams: Array) -> Array:
    """Return the weighted values of streams (m, n, d) without biases, (m, heads, n, d_value)."""
    x = streams if heads.before is None else heads.before.linear(streams)
    values = heads.layer.repeated(np.stack([x @ w for w in heads.layer.W_V]))  # h m n [d] dh
    return np.asarray(heads.weights @ values.swapaxes(0, 1))  # m h n [n'] dh


def head_outputs(heads: FrozenHeads, values: Array) -> Array:
    """Return what each head writes from weighted values (..., heads, n, d_value), (..., heads, n, d)."""
    written = values @ heads.output_weights
    return np.asarray(written if heads.behind is None else written / heads.behind.divisors)


def summed_outputs(heads: FrozenHeads, streams: Array) -> Array:
    """Return what all heads write from streams (m, n, d) without biases, (m, n, d)."""
    values = weighted_values(heads, streams).swapaxes(1, 2)  # m n h dh
    W_O = heads.output_weights
    written = values.reshape(*values.shape[:2], -1) @ W_O.reshape(-1, W_O.shape[2])  # m n [h dh] d
    return np.asarray(written if heads.behind is None else written / heads.behind.divisors)


def streams_of_one_head(layers: Sequence[PathLayer], embedding: Array) -> Iterator[Array]:
    """Yield before every block the stream without heads, then those that one head has written, (1 + heads, n, d)."""
    streams = embedding[None]
    for layer in layers:
        yield streams
        written = [head_outputs(heads, weighted_values(heads, streams[:1])[0]) for _, heads in layer.attentions]
        streams = np.concatenate([layer.around(streams), *written])
        streams = streams if layer.after is None else layer.after.linear(streams)
