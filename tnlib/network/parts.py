"""The tensors of a network, found by their open indices and laid out by their bonds."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any, NoReturn

import numpy as np

from tnlib._errors import ArgumentError
from tnlib._typing import Array
from tnlib.network.arguments import arrays_of

Group = Sequence[str]  # indices that become one leg


class Parts:
    """The tensors of `tn` on their way to a format of the name `kind` with open indices `legs`."""

    def __init__(self, tn: Any, kind: str, legs: tuple[str, ...]) -> None:
        self.kind, self.legs, self.exponent = kind, legs, float(tn.exponent)
        tensors = list(tn.tensor_map.values())
        self.arrays = arrays_of("from_network", tensors)
        self.inds = [tuple(tensor.inds) for tensor in tensors]
        self.tags = [frozenset(tensor.tags) for tensor in tensors]

    def holder(self, *legs: str) -> int:
        """Return the tensor that holds all of these open indices."""
        found = [k for k, inds in enumerate(self.inds) if set(legs) <= set(inds)]
        if len(found) != 1:
            self.refuse(f"indices {' and '.join(legs)} in {len(found)} tensors")
        return found[0]

    def holders(self, groups: Sequence[Group]) -> list[int]:
        """Return a tensor per group of open indices, all of them different."""
        found = [self.holder(*group) for group in groups]
        if len(set(found)) < len(found):
            self.refuse("legs of several parts in one tensor")
        return found

    def others(self, known: Collection[int], count: int) -> list[int]:
        """Return the tensors that are not yet known, which must be so many."""
        left = [k for k in range(len(self.inds)) if k not in known]
        if len(left) != count:
            self.refuse(f"{len(self.inds)} tensors in the place of {len(known) + count}")
        return left

    def shared(self, a: int, b: int) -> tuple[str, ...]:
        """Return the indices between two tensors: none for a product, several for a bond not yet fused."""
        return tuple(i for i in self.inds[a] if i in self.inds[b])

    def array(self, k: int, *groups: Group) -> Array:
        """Return tensor k with one leg per group of indices, of size 1 for an empty group."""
        order = [i for group in groups for i in group]
        if sorted(order) != sorted(self.inds[k]):
            self.refuse(f"a tensor with indices {', '.join(self.inds[k]) or 'none'} where {', '.join(order)} are due")
        sizes = dict(zip(self.inds[k], self.arrays[k].shape, strict=True))
        turned = self.arrays[k].transpose([self.inds[k].index(i) for i in order])
        return turned.reshape([math.prod(sizes[i] for i in group) for group in groups])

    def scaled(self, a: Array) -> Array:
        """Return `a` times 10**exponent."""
        if not self.exponent:
            return a
        try:
            return np.asarray(a * a.real.dtype.type(10.0**self.exponent))
        except OverflowError:
            raise ArgumentError(
                f"from_network: exponent must lie in the range of floating point numbers for a {self.kind}, got "
                f"{self.exponent:.1f}; only trains hold a scale of their own."
            ) from None

    def refuse(self, found: str) -> NoReturn:
        """Say that the network is no such format."""
        raise ArgumentError(
            f"from_network: tn must have the structure of a {self.kind}, got {found}; pass another kind, or contract "
            "and split tensors first."
        )
