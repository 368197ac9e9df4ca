"""Linear layers whose weight is a tensor network: a whole array, a low-rank product, a TT-matrix, Tucker or CP.

A network names the axes of every factor; an axis of two factors is summed over. Some axes of the result are the inputs
of the layer, the others its outputs. Rows are multiplied by one factor after the other, in the order of the network.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tnlib import CP, SVD, ArgumentError, LowRank, TTMatrix, Tucker
from tnlib._validate import is_list
from tnlib_adapters.transformers_plugin.factored_linear import FactoredLinear, Factors, Multiplications

Axes = tuple[str, ...]
_Step = tuple[str, Axes]  # a factor, and the axes that occur after it


@dataclass(frozen=True)
class Contraction:
    """Axes of the factors, in the order in which rows are multiplied by them."""

    axes: Mapping[str, Axes]  # factor -> names of its axes
    inputs: Axes  # axes of the weight that are read and written, each one feature axis in this order
    outputs: Axes
    # the factors in the order in which the weight is multiplied out, in groups that are multiplied out one by one and
    # then with each other; () for one group in the order of `axes`
    forming: tuple[tuple[str, ...], ...] = ()


LOW_RANK = Contraction({"left": ("m", "r"), "right": ("r", "n")}, ("m",), ("n",))


def whole(part: str, inputs: Sequence[int] = (0,), outputs: Sequence[int] = (1,)) -> Contraction:
    """Return the network of one array, of which some axes are inputs."""
    return Contraction({part: _numbered("n", range(len(inputs) + len(outputs)))}, *_read_and_written(inputs, outputs))


def tt_matrix(n_cores: int) -> Contraction:
    """Return the network of a TT-matrix: core k (r, m, n, r) with input leg m and output leg n."""
    cores = range(n_cores)
    axes = {f"core{k}": (f"r{k}", f"m{k}", f"n{k}", f"r{k + 1}") for k in cores}
    return Contraction(axes, _numbered("m", cores), _numbered("n", cores))


def tucker(inputs: Sequence[int], outputs: Sequence[int]) -> Contraction:
    """Return the network of a Tucker: `core` (r, r, ...) and `factor<k>` (n, r)."""
    legs = range(len(inputs) + len(outputs))
    factors = {f"factor{k}": (f"n{k}", f"r{k}") for k in legs}
    core = {"core": _numbered("r", legs)}
    first, last = ({name: factors[name] for name in _numbered("factor", side)} for side in (inputs, outputs))
    return Contraction(first | core | last, *_read_and_written(inputs, outputs), (("core", *factors),))


def cp(inputs: Sequence[int], outputs: Sequence[int]) -> Contraction:
    """Return the network of a CP: `weights` (R,) and `factor<k>` (n, R); R is an axis of all factors."""
    first, last = ({f"factor{k}": (f"n{k}", "R") for k in side} for side in (reversed(inputs), outputs))
    groups = (*first, "weights"), tuple(last)  # one product of two Khatri-Rao products
    return Contraction({**first, "weights": ("R",), **last}, *_read_and_written(inputs, outputs), groups)


class ContractedLinear(FactoredLinear, formats=(LowRank, SVD, TTMatrix, Tucker, CP)):
    """A layer whose weight is a tensor network; `first` restricts axis "n0" to some entries, as of a stack.

    Examples
    --------
    >>> import numpy as np, tnlib
    >>> fit = tnlib.ttm_svd(np.ones((6, 4), np.float32), (2, 3), (2, 2))
    >>> FactoredLinear.from_value(fit.value)
    ContractedLinear(in_features=6, out_features=4, parameters=10)
    """

    def __init__(self, factors: Factors, network: Contraction, first: slice | None = None) -> None:
        sizes = dict[str, int]()
        for part, axes in network.axes.items():
            sizes |= zip(axes, factors.shapes[part], strict=True)
        if first is not None:
            sizes["n0"] = len(range(*first.indices(sizes["n0"])))
        n_in, n_out = (math.prod(sizes[axis] for axis in axes) for axes in (network.inputs, network.outputs))
        super().__init__(factors, (n_in, n_out))
        self.network, self._sizes, self._first = network, sizes, first
        self._through = _steps(network, [*network.axes], ("rows", *network.outputs))
        self._forming = _groups(network)
        forming = sum(self._count(network.axes[start], steps) for start, steps in self._forming)
        if len(self._forming) > 1:  # of a CP
            forming += n_in * n_out * sizes["R"]
        self._cost = Multiplications(self._count(network.inputs, self._through), forming)
        # factors that rows are multiplied by as they are, so that they may stay in integers
        bonds = [*network.inputs, *(axes[-1] for axes in network.axes.values())][:-1]
        is_product = all(len(axes) == 2 for axes in network.axes.values())
        self.is_chain = is_product and [axes[0] for axes in network.axes.values()] == bonds

    @classmethod
    def of(cls, value: LowRank | SVD | TTMatrix | Tucker | CP, inputs: Sequence[int] | None) -> ContractedLinear:
        """Return the layer of a value; `inputs` are the legs of a Tucker or CP that are read."""
        if isinstance(value, Tucker | CP):
            read = _legs_read(value, inputs)
            legs = read, tuple(leg for leg in range(len(value.factors)) if leg not in read)
            factors = {f"factor{k}": factor for k, factor in enumerate(value.factors)}
            if isinstance(value, Tucker):
                return cls(Factors.of_arrays({"core": value.core} | factors), tucker(*legs))
            weights = value.weights.astype(value.dtype)  # real, even where the factors are complex
            return cls(Factors.of_arrays({"weights": weights} | factors), cp(*legs))
        if inputs is not None:
            raise ArgumentError(
                f"FactoredLinear.from_value: inputs must be None for a {type(value).__name__}, got {inputs!r}; its "
                "rows are the inputs."
            )
        if isinstance(value, TTMatrix):
            share = float(np.exp(value.log_scale / len(value.cores)))
            cores = {f"core{k}": share * core for k, core in enumerate(value.cores)}
            return cls(Factors.of_arrays(cores), tt_matrix(len(cores)))
        if isinstance(value, LowRank):
            return cls(Factors.of_arrays({"left": value.left, "right": value.right}), LOW_RANK)
        roots = np.sqrt(value.s)
        return cls(Factors.of_arrays({"left": value.u * roots, "right": roots[:, None] * value.vh}), LOW_RANK)

    def product(self, x: Tensor) -> Tensor:
        """Return x W, one factor after the other."""
        network = self.network
        if self.is_chain:
            return reduce(self.times, network.axes, x)
        t = x.reshape(-1, *(self._sizes[axis] for axis in network.inputs))
        t, axes = self._multiplied(t, ("rows", *network.inputs), self._through)
        return _in_order(t, axes, ("rows", *network.outputs)).reshape(*x.shape[:-1], self.out_features)

    def matrix(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return W."""
        network = self.network
        legs = (*network.inputs, *network.outputs)
        (full, axes), *others = [
            self._multiplied(self._array(start, dtype), network.axes[start], steps, dtype)
            for start, steps in self._forming
        ]
        for formed, of_formed in others:
            full, axes = _contract(full, axes, formed, of_formed, legs)
        return _in_order(full, axes, legs).reshape(self.in_features, self.out_features)

    def cost(self) -> Multiplications:
        """Return the multiplications of both orders."""
        return self._cost

    def look_up(self, ids: Tensor) -> Tensor:
        """Return rows of W."""
        if not self.is_chain:
            return super().look_up(ids)
        first, *others = self.network.axes
        return reduce(torch.matmul, map(self.part, others), self.rows_of(first, ids))

    def transposed_product(self, y: Tensor) -> Tensor:
        """Return :math:`y W^T`."""
        if not self.is_chain:
            return super().transposed_product(y)
        return reduce(partial(self.times, transposed=True), reversed([*self.network.axes]), y)

    def _multiplied(
        self, t: Tensor, axes: Axes, steps: Sequence[_Step], dtype: torch.dtype | None = None
    ) -> tuple[Tensor, Axes]:
        """Return a tensor contracted with factors, and its axes."""
        for part, later in steps:
            t, axes = _contract(t, axes, self._array(part, dtype), self.network.axes[part], later)
        return t, axes

    def _count(self, axes: Axes, steps: Sequence[_Step]) -> int:
        """Return the multiplications of `_multiplied` for one row."""
        total = 0
        for part, later in steps:
            union, common = {*axes, *self.network.axes[part]}, {*axes} & {*self.network.axes[part]}
            total += math.prod(self._sizes[axis] for axis in union)
            axes = tuple(union - (common - {*later}))
        return total

    def _array(self, part: str, dtype: torch.dtype | None = None) -> Tensor:
        """Return a factor, restricted to the entries of this layer."""
        array, axes = self.part(part, dtype), self.network.axes[part]
        return array if self._first is None or axes[0] != "n0" else array[self._first]


def _contract(a: Tensor, axes: Axes, b: Tensor, others: Axes, later: Axes) -> tuple[Tensor, Axes]:
    """Contract the common axes that do not occur later; other common axes stay, and entries are multiplied."""
    common = [axis for axis in axes if axis in others]
    summed = [axis for axis in common if axis not in later]
    free_a, free_b = ([axis for axis in side if axis not in common] for side in (axes, others))
    kept = [axis for axis in common if axis in later]
    result = (*kept, *free_a, *free_b)
    if kept:
        letters = {axis: k for k, axis in enumerate(dict.fromkeys((*axes, *others)))}
        lists: list[Any] = [[letters[axis] for axis in side] for side in (axes, others, result)]
        return torch.einsum(a, lists[0], b, lists[1], lists[2]), result
    # einsum takes up to 1.4 times as long, and autocast does not cast the arguments of tensordot
    inner = math.prod([b.shape[others.index(axis)] for axis in summed])
    left = a.permute([axes.index(axis) for axis in (*free_a, *summed)])
    right = b.permute([others.index(axis) for axis in (*summed, *free_b)])
    sizes = [*left.shape[: len(free_a)], *right.shape[len(summed) :]]
    return (left.reshape(-1, inner) @ right.reshape(inner, -1)).reshape(sizes), result  # a [inner], [inner] b


def _in_order(t: Tensor, axes: Axes, result: Axes) -> Tensor:
    """Return a tensor with the axes of the result in order, and those of length 1 last."""
    order = [axes.index(axis) for axis in result]
    return t.permute(*order, *[k for k in range(t.ndim) if k not in order])


def _groups(network: Contraction) -> list[tuple[str, list[_Step]]]:
    """Return the first factor of every group of `forming`, and the steps to the product of the group."""
    steps = []
    for group in network.forming or (tuple(network.axes),):
        elsewhere = [axis for part, axes in network.axes.items() if part not in group for axis in axes]
        steps.append((group[0], _steps(network, group[1:], (*network.inputs, *network.outputs, *elsewhere))))
    return steps


def _steps(network: Contraction, parts: Sequence[str], result: Axes) -> list[_Step]:
    return [
        (part, (*result, *(axis for other in parts[k + 1 :] for axis in network.axes[other])))
        for k, part in enumerate(parts)
    ]


def _numbered(name: str, numbers: Iterable[int]) -> Axes:
    return tuple(f"{name}{k}" for k in numbers)


def _read_and_written(inputs: Sequence[int], outputs: Sequence[int]) -> tuple[Axes, Axes]:
    return _numbered("n", inputs), _numbered("n", outputs)


def _legs_read(value: Tucker | CP, inputs: Sequence[int] | None) -> tuple[int, ...]:
    d = len(value.factors)
    read: tuple[Any, ...] = (0,) if inputs is None else tuple(inputs) if is_list(inputs) else (inputs,)
    known = all(type(leg) is int and 0 <= leg < d for leg in read)
    if not known or len(set(read)) < len(read) or not 0 < len(read) < d:
        raise ArgumentError(
            f"FactoredLinear.from_value: inputs must be different legs of {d}, at least one left as output, got "
            f"{inputs!r}; pass for example (0,)."
        )
    return read
