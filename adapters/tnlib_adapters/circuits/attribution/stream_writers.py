"""Writers of the residual stream of a frozen model: tokens, positions, heads, feed-forward layers and biases.

The output of the heads of a layer is kept as two factors, values (heads, n, d_head) and W_O (heads, d_head, d_model),
so that a projection of all writers multiplies W_O, not n rows of every head. A norm keeps this form: its divisors
belong to the values, its weight and centring to W_O.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tnlib._typing import Array
from tnlib_adapters.transforms.frozen_heads import FrozenHeads
from tnlib_adapters.transforms.frozen_model import FrozenBlock, FrozenModel
from tnlib_adapters.transforms.frozen_norm import FrozenNorm

BIASES = "output biases"


@dataclass(frozen=True, eq=False)
class WriterGroup:
    """Writers with outputs values[k] @ out[k]; `out` is None where `values` are the outputs.

    Parameters
    ----------
    names
        Of the writers.
    values
        (writers, n, r), or (writers, n, d_model).
    out
        (writers, r, d_model), or None.
    """

    names: tuple[str, ...]
    values: Array
    out: Array | None = None

    def project(self, weight: Array, out: Array) -> None:
        """Write the outputs times a matrix (d_model, columns) into `out` (writers, n, columns)."""
        if self.out is None or self.values.shape[1] < self.out.shape[1]:
            np.matmul(self.outputs(), weight, out=out)  # writer n [d] c
            return
        k, r, d = self.out.shape
        projected = (self.out.reshape(-1, d) @ weight).reshape(k, r, -1)  # (writer r) [d] c
        np.matmul(self.values, projected, out=out)  # writer n [r] c

    def outputs(self) -> Array:
        """Return the outputs, (writers, n, d_model)."""
        return self.values if self.out is None else np.asarray(self.values @ self.out)  # writer n [r] d

    def at(self, positions: Array) -> WriterGroup:
        """Return the writers at some positions."""
        return WriterGroup(self.names, self.values[:, positions], self.out)

    def through(self, norm: FrozenNorm) -> WriterGroup:
        """Return the writers behind a norm, without its bias."""
        if self.out is None:
            return WriterGroup(self.names, norm.linear(self.values))
        out = norm.norm.centre(self.out) * norm.norm.weight
        return WriterGroup(self.names, self.values / norm.divisors, out)


@dataclass(frozen=True, eq=False)
class Writers:
    """All writers of a stream, whose outputs sum to it."""

    groups: tuple[WriterGroup, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the writers, in order of the model."""
        return tuple(name for group in self.groups for name in group.names)

    def project(self, weight: Array, out: Array) -> None:
        """Write the outputs times a matrix (d_model, columns) into `out` (writers, n, columns)."""
        start = 0
        for group in self.groups:
            group.project(weight, out[start : start + len(group.names)])
            start += len(group.names)

    def outputs(self) -> Array:
        """Return the outputs, (writers, n, d_model)."""
        return np.concatenate([group.outputs() for group in self.groups])

    def at(self, positions: Array) -> Writers:
        """Return the writers at some positions."""
        return Writers(tuple(group.at(positions) for group in self.groups))

    def through(self, norm: FrozenNorm | None) -> Writers:
        """Return the writers behind a norm, without its bias; as they are for None."""
        return self if norm is None else Writers(tuple(group.through(norm) for group in self.groups))


def writers_before_attention(model: FrozenModel) -> Iterator[tuple[FrozenHeads, Writers]]:
    """Yield every attention layer with the writers of the stream before it, before its norm.

    The biases of all layers before it, of norms and outputs of attention, are one writer.
    """
    parts = model.embedding_parts
    groups = [WriterGroup(tuple(parts), np.stack(list(parts.values())))]
    biases = np.zeros_like(model.embedding)
    for block in model.blocks:
        constant = [WriterGroup((BIASES,), biases[None])] if biases.any() else []
        yield from ((heads, Writers((*groups, *constant))) for heads in block.heads if heads is not None)
        groups += _written(block)
        biases = biases + sum(heads.constant for heads in block.heads if heads is not None)
        if block.after is not None:
            groups, biases = [group.through(block.after) for group in groups], block.after.apply(biases)


def _written(block: FrozenBlock) -> list[WriterGroup]:
    """Return what heads and feed-forward layers of a block add to the stream."""
    groups = []
    for branch, name, output in zip(block.branches, block.names, block.outputs, strict=True):
        if isinstance(branch, FrozenHeads):
            values = branch.linear_values if branch.behind is None else branch.linear_values / branch.behind.divisors
            names = tuple(f"{name}.{h}" for h in range(len(values)))
            groups.append(WriterGroup(names, values, branch.output_weights))
        else:
            groups.append(WriterGroup((name,), output[None]))
    return groups
