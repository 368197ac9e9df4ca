"""Linear layers from Tucker and CP: some legs of the tensor are inputs, the others outputs."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tnlib import CP, ArgumentError, Tucker
from tnlib._typing import Array
from tnlib._validate import is_list
from tnlib_adapters.transformers_plugin.factored_linear import (
    Borrowed,
    FactoredLinear,
    Factors,
    Multiplications,
    contract,
    count,
    must_agree,
    shapes,
    tensors,
)


class _WithLegs(FactoredLinear):
    """A layer from a tensor of several legs.

    `inputs` and `outputs` are the input and output legs, each one feature axis in the given order. `first` restricts
    leg 0 to some entries: the weights of some projections in a stack of all.
    """

    def __init__(
        self,
        factors: Factors | Borrowed,
        inputs: Sequence[int],
        outputs: Sequence[int] | None = None,
        first: slice | None = None,
    ) -> None:
        d = count(factors, "factor")
        sizes = [shape[0] for shape in shapes(factors, *(f"factor{k}" for k in range(d)))]
        if first is not None:
            sizes[0] = len(range(*first.indices(sizes[0])))
        for leg, rank in enumerate(self.inner(factors, d)):
            must_agree(shapes(factors, f"factor{leg}")[0][1], rank)
        outputs = tuple(leg for leg in range(d) if leg not in inputs) if outputs is None else tuple(outputs)
        features = [math.prod(sizes[leg] for leg in legs) for legs in (inputs, outputs)]
        super().__init__(factors, (features[0], features[1]))
        self.sizes, self.inputs, self.outputs, self.first = tuple(sizes), tuple(inputs), outputs, first

    @staticmethod
    @abstractmethod
    def inner(factors: Factors | Borrowed, d: int) -> tuple[int, ...]:
        """Return the number of columns of the factor of every leg."""

    def factors(self, dtype: torch.dtype | None = None) -> list[Tensor]:
        """Return the factor of every leg, (n, r)."""
        factors = self.parts("factor", dtype)
        return factors if self.first is None else [factors[0][self.first], *factors[1:]]

    def _split(self, x: Tensor) -> Tensor:
        return x.reshape(-1, *(self.sizes[leg] for leg in self.inputs))

    def _as_matrix(self, full: Tensor) -> Tensor:
        return full.permute(*self.inputs, *self.outputs).reshape(self.in_features, self.out_features)


class TuckerLinear(_WithLegs, formats=(Tucker,)):
    """W a Tucker: `core` (r[0], ..., r[d-1]) and `factor<k>` (n[k], r[k])."""

    @staticmethod
    def inner(factors: Factors | Borrowed, d: int) -> tuple[int, ...]:
        """Return the shape of the core."""
        core = tuple(shapes(factors, "core")[0])
        must_agree(len(core), d)
        return core

    @classmethod
    def of(cls, value: Tucker, inputs: Sequence[int] | None) -> TuckerLinear:
        """Return the layer that reads some legs of a Tucker."""
        read = _legs_read(value, inputs)
        return cls(tensors({"core": value.core} | _named(value.factors)), read)

    def product(self, x: Tensor) -> Tensor:
        """Return x W: input factors, then the core, then output factors."""
        core, factors, t = self._core(), self.factors(), self._split(x)
        for leg in self.inputs:
            if self._in_core(leg):
                t = t.movedim(1, -1)
            else:
                t = contract(t, factors[leg], (1,), (0,))  # b [n] rest, [n] r -> b rest r
        k = core.permute(*self.inputs, *self.outputs)
        ranks = k.shape[len(self.inputs) :]
        t = t.flatten(1) @ k.reshape(t.shape[1:].numel(), ranks.numel())  # b [r in], [r in] r out
        t = t.reshape(-1, *ranks)
        for leg in self.outputs:
            if self._in_core(leg):
                t = t.movedim(1, -1)
            else:
                t = contract(t, factors[leg], (1,), (1,))  # b [r] rest, n [r] -> b rest n
        return t.reshape(*x.shape[:-1], self.out_features)

    def matrix(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the core times all factors."""
        full = self._core(dtype)
        for leg, factor in enumerate(self.factors(dtype)):
            if self._in_core(leg):
                full = full.movedim(0, -1)
            else:
                full = contract(full, factor, (0,), (1,))  # [r] rest, n [r] -> rest n
        return self._as_matrix(full)

    def cost(self) -> Multiplications:
        """Return the multiplications of both loops."""
        ranks = list(self._ranks())
        live = [self.sizes[leg] for leg in self.inputs]
        per_row = 0
        for k, leg in enumerate(self.inputs):
            per_row += 0 if self._in_core(leg) else math.prod(live) * ranks[leg]
            live[k] = ranks[leg]
        per_row += math.prod(ranks)
        live = [ranks[leg] for leg in self.outputs]
        for k, leg in enumerate(self.outputs):
            per_row += 0 if self._in_core(leg) else math.prod(live) * self.sizes[leg]
            live[k] = self.sizes[leg]
        forming, live = 0, ranks
        for leg, n in enumerate(self.sizes):
            forming += math.prod(live) * n
            live[leg] = n
        return Multiplications(per_row, forming)

    def _in_core(self, leg: int) -> bool:
        """Test if `_core` includes the factor of a leg."""
        return leg == 0 and self.first is not None

    def _ranks(self) -> tuple[int, ...]:
        (core,) = self.shapes_of("core")
        return core if self.first is None else (self.sizes[0], *core[1:])

    def _core(self, dtype: torch.dtype | None = None) -> Tensor:
        core = self.part("core", dtype)
        if self.first is None:
            return core
        return contract(self.factors(dtype)[0], core, (1,), (0,))  # p [r], [r] rest


class CPLinear(_WithLegs, formats=(CP,)):
    """W a CP: `weights` (R,) and `factor<k>` (n[k], R)."""

    @staticmethod
    def inner(factors: Factors | Borrowed, d: int) -> tuple[int, ...]:
        """Return the number of components, for every leg."""
        return tuple(shapes(factors, "weights")[0]) * d

    @classmethod
    def of(cls, value: CP, inputs: Sequence[int] | None) -> CPLinear:
        """Return the layer that reads some legs of a CP."""
        read = _legs_read(value, inputs)
        weights = value.weights.astype(value.dtype)  # real, even where the factors are complex
        return cls(tensors({"weights": weights} | _named(value.factors)), read)

    def product(self, x: Tensor) -> Tensor:
        """Return x W: the weighted overlap of x with every component, times the output vectors of the components."""
        factors = self.factors()
        *leading, last = self.inputs
        t = self._split(x) @ factors[last]  # b ... [n], [n] R
        for leg in reversed(leading):
            t = (t * factors[leg]).sum(-2)  # b ... [n] R, [n] R
        t = t * self.part("weights")  # b R
        *leading, last = self.outputs
        for leg in leading:
            t = t[..., None, :] * factors[leg]  # b ... 1 R, n R -> b ... n R
        return (t @ factors[last].T).reshape(*x.shape[:-1], self.out_features)  # b ... [R], n [R]

    def matrix(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the sum of all components."""
        factors = self.factors(dtype)
        read = _khatri_rao([factors[leg] for leg in self.inputs])  # in R
        written = _khatri_rao([factors[leg] for leg in self.outputs])  # out R
        return (read * self.part("weights", dtype)) @ written.T  # in [R], out [R]

    def cost(self) -> Multiplications:
        """Return R (in + out) plus the cost of merging legs, and R in out."""
        rank = self.part("weights").shape[0]
        merged = self.in_features // self.sizes[self.inputs[-1]] + self.out_features // self.sizes[self.outputs[-1]]
        both = self.in_features + self.out_features
        return Multiplications(rank * (both + merged), rank * (both + self.in_features * self.out_features))


def _named(factors: Sequence[Array]) -> dict[str, Array]:
    return {f"factor{k}": factor for k, factor in enumerate(factors)}


def _legs_read(value: Tucker | CP, inputs: Sequence[int] | None) -> tuple[int, ...]:
    d = len(value.factors)
    read: tuple[Any, ...] = (0,) if inputs is None else tuple(inputs) if is_list(inputs) else (inputs,)
    if (
        not all(type(leg) is int and 0 <= leg < d for leg in read)
        or len(set(read)) < len(read)
        or not 0 < len(read) < d
    ):
        raise ArgumentError(
            f"FactoredLinear.from_value: inputs must be different legs of {d}, at least one left as output, got "
            f"{inputs!r}; pass for example (0,)."
        )
    return read


def _khatri_rao(factors: Sequence[Tensor]) -> Tensor:
    """Return the columns' Kronecker products, (n0 n1 ..., R)."""
    product, *others = factors
    for factor in others:
        product = (product[:, None] * factor).flatten(0, 1)  # n 1 R, n' R -> (n n') R
    return product
