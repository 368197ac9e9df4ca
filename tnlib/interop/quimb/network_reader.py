"""Tensors of a network located by their open indices, with their legs arranged by bonds."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import NoReturn, TypeAlias

import quimb.tensor as qtn

from tnlib._errors import ArgumentError
from tnlib._typing import Array
from tnlib.interop.quimb.network_arguments import as_arrays, binary_exponent
from tnlib.linalg.scaling import shift_in_range

Indices: TypeAlias = tuple[str, ...]  # several of them are fused to one leg


class NetworkReader:
    """The tensors of `tn`, by number, to be read as a format of the name `kind` with the open indices `legs`."""

    def __init__(self, tn: qtn.TensorNetwork, kind: str, legs: Indices) -> None:
        self.tn, self.kind, self.legs = tn, kind, legs
        self.arrays = as_arrays("from_network", tn)
        self.inds = [tuple(tensor.inds) for tensor in tn]
        self.tags = [frozenset(tensor.tags) for tensor in tn]

    def tensor_with(self, *legs: str) -> int:
        """Return the tensor that has all of these open indices."""
        numbers = [k for k, inds in enumerate(self.inds) if set(legs) <= set(inds)]
        if len(numbers) != 1:
            self.refuse(f"indices {' and '.join(legs)} in {len(numbers)} tensors")
        return numbers[0]

    def tensors_with(self, groups: Sequence[Indices]) -> list[int]:
        """Return a tensor per group of open indices, all of them different."""
        numbers = [self.tensor_with(*group) for group in groups]
        if len(set(numbers)) < len(numbers):
            self.refuse("legs of several parts in one tensor")
        return numbers

    def remaining(self, known: Collection[int], count: int) -> list[int]:
        """Return the `count` tensors that are not in `known`."""
        numbers = [k for k in range(len(self.inds)) if k not in known]
        if len(numbers) != count:
            self.refuse(f"{len(self.inds)} tensors instead of {len(known) + count}")
        return numbers

    def bond(self, a: int, b: int) -> Indices:
        """Return the indices between two tensors: none for a product, several for a bond that is not fused."""
        return tuple(i for i in self.inds[a] if i in self.inds[b])

    def array(self, k: int, *groups: Indices) -> Array:
        """Return tensor k with one leg per group of indices, of size 1 for an empty group."""
        order = [i for group in groups for i in group]
        if sorted(order) != sorted(self.inds[k]):
            self.refuse(f"a tensor with indices {', '.join(self.inds[k]) or 'none'} where {', '.join(order)} are due")
        transposed = self.arrays[k].transpose([self.inds[k].index(i) for i in order])
        return transposed.reshape([math.prod(self.tn.ind_size(i) for i in group) for group in groups])

    def scaled(self, a: Array) -> Array:
        """Return `a` times 10**exponent of the network."""
        factor, e = binary_exponent(self.tn)
        advice = "only trains have an exponent of their own"
        return shift_in_range(a * a.real.dtype.type(factor), e, f"from_network: every entry of a {self.kind}", advice)

    def refuse(self, structure: str) -> NoReturn:
        """Raise because the network does not have the structure of the format."""
        raise ArgumentError(
            f"from_network: tn must have the structure of a {self.kind}, got {structure}; pass another kind, or "
            "contract and split tensors first."
        )
