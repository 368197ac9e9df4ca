"""Tensor trains and TT-matrices with cores of other libraries."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Self

import numpy as np

from tnlib._format import refuse_different_sizes, refuse_too_large, set_fields
from tnlib._validate import as_integer, as_list, as_position
from tnlib.formats.other_arrays import OtherArrays, Verbs, refuse
from tnlib.formats.train import array_api_sweeps as sweeps
from tnlib.formats.train.format import TensorTrain, Train, as_log_scale, check_bonds
from tnlib.formats.train.tt_matrix import TTMatrix
from tnlib.linalg.array_namespace import (
    OtherArray,
    as_other_array,
    dtype_of,
    largest,
    namespace,
    norm,
    refuse_different_libraries,
    shift,
)
from tnlib.linalg.array_truncation import rescale, shift_in_range
from tnlib.linalg.scaling import in_safe_range
from tnlib.linalg.truncation import TruncationBudget


class ArrayTrain(OtherArrays, Train):
    """Base class of trains and TT-matrices with cores of other libraries."""

    numpy_class = Train

    def __init__(
        self, cores: Sequence[Any], center: int | None = None, log_scale: float | None = None, *, exponent: int = 0
    ) -> None:
        name = self.numpy_class.__name__
        checked = as_list(name, "cores", cores, "arrays")
        refuse_different_libraries(name, checked)
        arrays = [as_other_array(name, f"core {k}", a, ndim=self._core_ndim) for k, a in enumerate(checked)]
        check_bonds(name, arrays)
        dtype = namespace(*arrays).result_type(*arrays)
        arrays = [namespace(a).astype(a, dtype, copy=False) for a in arrays]
        center = None if center is None else as_position(name, "center", center, len(arrays), "cores")
        exponent = as_integer(name, "exponent", exponent, "a float as log_scale")
        if log_scale is not None:
            exponent = math.floor(as_log_scale(name, log_scale) / math.log(2))
            arrays[center or 0] = arrays[center or 0] * math.exp(log_scale - exponent * math.log(2))
        for k, a in enumerate(arrays):
            arrays[k], exponent = rescale(a, exponent)
        self._set(arrays, center, exponent)

    def _set(self, cores: Sequence[OtherArray], center: int | None, exponent: int) -> None:
        set_fields(self, cores=tuple(cores), center=center, exponent=exponent)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the cores, as a numpy dtype."""
        return dtype_of(self.cores[0])

    def is_subnormal(self) -> bool:
        """Test if the norm is so small that the rounding of entries is not relative; cores are in range."""
        if self.exponent >= 0 or self.center is None:
            return False
        size = norm(self.cores[self.center])
        return size > 0 and math.log2(size) + self.exponent < math.log2(np.finfo(self.dtype).tiny)

    def folded(self) -> Self:
        """Return the same train with the power of two in the centre, or in core 0, if that array can carry it."""
        if self.exponent == 0:
            return self
        cores, k = list(self.cores), self.center or 0
        top = math.frexp(largest(cores[k]))[1] + self.exponent
        if abs(top) > 1000 or not in_safe_range(math.ldexp(1.0, top), 1, self.dtype):
            return self
        cores[k] = shift(cores[k], self.exponent)
        return self.from_sweep(cores, self.center, 0)

    def _core_rows(self) -> list[OtherArray]:
        """Return the cores as (l, n, r), the two legs of TT-matrix cores as one."""
        return [namespace(a).reshape(a, (a.shape[0], -1, a.shape[-1])) for a in self.cores]

    def _with_legs(self, cores: Sequence[OtherArray], center: int, exponent: int) -> Self:
        """Return a train of cores (l, n, r) with the legs of this one."""
        xp = namespace(*cores)
        split = [
            xp.reshape(core, (core.shape[0], *mine.shape[1:-1], core.shape[2]))
            for core, mine in zip(cores, self.cores, strict=True)
        ]
        return self.from_sweep(split, center, exponent).folded()

    def _dense(self) -> OtherArray:
        """Return the entries of the cores (l, n, r) contracted, (n[0] ... n[d-1],)."""
        refuse_too_large(self)
        dense, e = sweeps.contract_cores(self._core_rows())
        return shift_in_range(
            dense, e + self.exponent, f"{self.numpy_class.__name__}.full: every entry", "lower the log_scale"
        )


def round_array_train(t: ArrayTrain, rtol: float | None, max_rank: int | None) -> tuple[ArrayTrain, TruncationBudget]:
    """Return the rounded train, left-canonical, and its truncations."""
    cores, exponent, budget = sweeps.round_cores(t._core_rows(), t.exponent, rtol, max_rank)
    return t._with_legs(cores, len(cores) - 1, exponent), budget


def canonicalize_array_train(t: ArrayTrain, center: int) -> ArrayTrain:
    """Return the same train with its centre at core `center`."""
    cores, exponent = sweeps.move_center(t._core_rows(), t.exponent, t.center, center)
    return t._with_legs(cores, center, exponent)


def inner_array_trains(a: Any, b: Any) -> OtherArray:
    """Return the sum over all legs of conj(a) times b, an array without legs."""
    refuse_different_libraries("inner", [a.cores[0], b.cores[0]])
    product, e = sweeps.inner_product(a._core_rows(), b._core_rows())
    return shift_in_range(product, e + a.exponent + b.exponent, "inner: the result", "lower the log_scale")


def apply_array_matrix(operator: Any, x: Any, rtol: float | None, max_rank: int | None) -> tuple[Any, TruncationBudget]:
    """Return operator @ x, rounded, and its truncations; `x` is an ArrayTTMatrix, or an ArrayTensorTrain."""
    for parameter, value, other in (("x", x, operator), ("operator", operator, x)):
        if isinstance(value, OtherArrays) and not isinstance(other, OtherArrays):
            refuse("apply", parameter, value)
    refuse_different_libraries("apply", [operator.cores[0], x.cores[0]])
    refuse_different_sizes("apply", operator.col_shape, [core.shape[1] for core in x.cores], "legs must match")
    xp = namespace(*operator.cores, *x.cores)
    right = [core if core.ndim == 4 else core[:, :, None, :] for core in x.cores]
    cores = sweeps.multiply_matrices(operator.cores, right)
    cores = [xp.reshape(c, (c.shape[0], -1, c.shape[-1])) if x.cores[0].ndim == 3 else c for c in cores]
    exponent = operator.exponent + x.exponent
    for k, core in enumerate(cores):
        cores[k], exponent = rescale(core, exponent)
    return round_array_train(type(x).from_sweep(cores, None, exponent), rtol, max_rank)


_VERBS: Verbs = {
    "round": round_array_train,
    "inner": inner_array_trains,
    "canonicalize": canonicalize_array_train,
    "apply": apply_array_matrix,
}


class ArrayTensorTrain(ArrayTrain, TensorTrain):
    """A TensorTrain with cores of another library: `full`, `round`, `inner`, `apply`, `canonicalize`."""

    numpy_class = TensorTrain
    verbs = _VERBS

    def full(self) -> Any:
        """Contract to the dense array (n[0], ..., n[d-1])."""
        dense = self._dense()
        return namespace(dense).reshape(dense, self.shape)


class ArrayTTMatrix(ArrayTrain, TTMatrix):
    """A TTMatrix with cores of another library: `full`, `round`, `inner`, `apply`, `canonicalize`."""

    numpy_class = TTMatrix
    verbs = _VERBS

    def full(self) -> Any:
        """Contract to the dense matrix (prod m, prod n)."""
        dense = self._dense()
        xp, d = namespace(dense), len(self.cores)
        pairs = xp.reshape(dense, tuple(n for core in self.cores for n in core.shape[1:-1]))  # m0 n0 m1 n1 ...
        order = (*range(0, 2 * d, 2), *range(1, 2 * d, 2))  # m0 m1 ... n0 n1 ...
        return xp.reshape(xp.permute_dims(pairs, order), self.shape)
