"""TT-matrices (matrix product operators); trains, bonds and leg pairs as arguments of functions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, overload

from tnlib._array_api import reshape
from tnlib._errors import ArgumentError, ArgumentTypeError
from tnlib._fit import refuse_other_arrays, wrong_type
from tnlib._format import Operator, numpy_arrays, refuse_mixed_libraries
from tnlib._operands import refuse_different_sizes
from tnlib._stored_arrays import refuse_too_large
from tnlib._typing import Array
from tnlib._validate import as_integer, as_sizes
from tnlib.formats.train import cores as raw
from tnlib.formats.train.format import TensorTrain, Train
from tnlib.formats.train.indexing import entry_of, flat_to_legs, parse_index
from tnlib.linalg.scaling import Scaled


@dataclass(frozen=True, eq=False, repr=False, init=False)
class TTMatrix(Train, Operator):
    """A matrix as a train whose cores have a row leg and a column leg (a matrix product operator).

    Parameters
    ----------
    cores
        Core k of shape (r[k], m[k], n[k], r[k+1]), row leg before column leg, r[0] = r[d] = 1.
    center, log_scale, exponent
        As for `TensorTrain`.

    References
    ----------
    I. V. Oseledets, "Approximation of 2^d x 2^d matrices using tensor decomposition", SIAM J. Matrix Anal. Appl. 31
    (2010).

    Examples
    --------
    >>> import numpy as np, tnlib
    >>> identity = tnlib.TTMatrix([np.eye(4).reshape(1, 4, 4, 1)] * 5)
    >>> identity.shape, identity.n_parameters, float(identity.matvec(np.ones(1024)).sum())
    ((1024, 1024), 80, 1024.0)
    """

    _core_ndim = 4

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Sizes (m[0], ..., m[d-1]) of the row legs."""
        return tuple(core.shape[1] for core in self.cores)

    @property
    def col_shape(self) -> tuple[int, ...]:
        """Sizes (n[0], ..., n[d-1]) of the column legs."""
        return tuple(core.shape[2] for core in self.cores)

    @property
    def shape(self) -> tuple[int, int]:
        """Shape (prod m, prod n) of the matrix."""
        return math.prod(self.row_shape), math.prod(self.col_shape)

    def full(self) -> Array:
        """Contract to the dense matrix (prod m, prod n)."""
        refuse_too_large(self)
        dense, e = raw.contract_cores(raw.fuse_legs(self.cores))
        return self._in_range("full", raw.unpair_legs(dense, self.row_shape, self.col_shape), e)

    @property
    @numpy_arrays
    def T(self) -> TTMatrix:
        """The transpose, core by core."""
        transposed = [core.transpose(0, 2, 1, 3) for core in self.cores]  # l n m r
        return TTMatrix.from_sweep(transposed, self.center, self.exponent)

    @numpy_arrays
    def __getitem__(self, index: Any) -> Any:
        """Return an entry [i, j], a row [i, :] or a column [:, j] as a TensorTrain; i and j may have any size."""
        sides = parse_index("TTMatrix", index, self.shape)
        if all(i == slice(None) for i in sides):
            return self
        if any(isinstance(i, slice) and i != slice(None) for i in sides):
            raise ArgumentTypeError(
                f"TTMatrix: an index must be an integer or : on each side, got {index}; "
                "for parts of legs slice tnlib.convert(value, tnlib.TensorTrain)."
            )
        rows, columns = (
            flat_to_legs(i, shape) if isinstance(i, int) else [slice(None)] * len(shape)
            for i, shape in zip(sides, (self.row_shape, self.col_shape), strict=True)
        )
        selected = [core[:, i, j] for core, i, j in zip(self.cores, rows, columns, strict=True)]
        cores, e = raw.contract_fixed_legs(selected)
        if cores[0].ndim == 2:
            return entry_of("TTMatrix", Scaled(cores[0], e + self.exponent), self.dtype)
        return TensorTrain.from_sweep(cores, None, e + self.exponent).folded()

    @overload
    def __matmul__(self, x: TTMatrix) -> TTMatrix: ...
    @overload
    def __matmul__(self, x: TensorTrain) -> TensorTrain: ...
    @overload
    def __matmul__(self, x: Array) -> Array: ...
    def __matmul__(self, x: Any) -> Any:
        """Multiply with a TTMatrix, a TensorTrain or a dense array; ranks of trains multiply (see `tnlib.apply`)."""
        if isinstance(x, TTMatrix):
            return self._product(x)
        if isinstance(x, TensorTrain):
            return self._product(as_column(x)).fused()
        return super().__matmul__(x)

    @overload
    def __rmatmul__(self, x: TensorTrain) -> TensorTrain: ...
    @overload
    def __rmatmul__(self, x: Array) -> Array: ...
    def __rmatmul__(self, x: Any) -> Any:
        """Multiply from the left with a TensorTrain, a row, or a dense array."""
        return self.T @ x if isinstance(x, TensorTrain) else super().__rmatmul__(x)

    def _product(self, x: TTMatrix) -> TTMatrix:
        refuse_unequal_legs("TTMatrix @", self, x)
        refuse_mixed_libraries("TTMatrix @", left=self, right=x)
        return TTMatrix.from_products(raw.multiply_matrices(self.cores, x.cores), self.exponent + x.exponent)

    def _matmat(self, x: Array) -> Array:
        product, e = raw.apply_cores(self.cores, x)
        return self._in_range("matmat", product, e)


T = TypeVar("T", TensorTrain, TTMatrix)


def as_column(x: TensorTrain) -> TTMatrix:
    """Return a train as the one column of a matrix: column legs of size 1."""
    return TTMatrix.from_sweep(
        [reshape(core, (*core.shape[:2], 1, core.shape[2])) for core in x.cores], x.center, x.exponent
    )


def split_legs(t: TensorTrain, row_shape: Sequence[int]) -> TTMatrix:
    """Return the TT-matrix whose leg k has row_shape[k] rows and shape[k] / row_shape[k] columns."""
    if len(row_shape) != len(t.cores) or any(n % m for n, m in zip(t.shape, row_shape, strict=False)):
        raise ArgumentError(
            f"convert: row_shape must divide the legs {t.shape} one by one, got {tuple(row_shape)}; "
            "every leg is rows times columns."
        )
    cores = [core.reshape(len(core), m, -1, core.shape[2]) for core, m in zip(t.cores, row_shape, strict=True)]
    return TTMatrix.from_sweep(cores, t.center, t.exponent)


def refuse_unequal_legs(name: str, a: TTMatrix, x: TTMatrix) -> None:
    """Raise where the column legs of `a` are not the row legs of `x`."""
    refuse_different_sizes(name, a.col_shape, x.row_shape, "column legs of the left one meet row legs of the right one")


def as_train(function: str, parameter: str, t: object, *kinds: type, any_library: bool = False) -> Train:
    """Return `t`, a train of one of `kinds`: by default, a TensorTrain or a TTMatrix.

    Its cores are numpy arrays, or with `any_library` those of any library.
    """
    kinds = kinds or (TensorTrain, TTMatrix)
    if not isinstance(t, Train) or not isinstance(t, kinds):
        expected = " or ".join(f"a {kind.__name__}" for kind in kinds)
        raise wrong_type(function, parameter, expected, t, "decompose it first, for example with tnlib.tt_svd")
    if not any_library:
        refuse_other_arrays(function, parameter, t)
    return t


def as_bond(function: str, t: Train, bond: int) -> int:
    """Return the number of a bond between two cores of `t`; bond k has size t.ranks[k], negative ones included."""
    d = len(t.cores)
    if d == 1:
        raise ArgumentError(f"{function}: tt must have at least 2 cores, got 1; it has no bond to cut.")
    k = as_integer(function, "bond", bond, "bond=1")
    k = k + d + 1 if k < 0 else k
    if not 1 <= k < d:
        raise ArgumentError(
            f"{function}: bond must lie between 1 and {d - 1}, or between {-d} and -2, got {bond}; bond k lies between "
            "cores k - 1 and k."
        )
    return k


def as_leg_pairs(
    function: str, row_shape: Any, col_shape: Any, totals: Sequence[int | None] = (None, None)
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the row and column legs of a TT-matrix, equally many, whose products are `totals`."""
    rows = as_sizes(function, "row_shape", row_shape, total=totals[0])
    columns = as_sizes(function, "col_shape", col_shape, total=totals[1])
    if len(rows) != len(columns):
        raise ArgumentError(
            f"{function}: row_shape and col_shape must have as many legs as each other, got {rows} and {columns}; "
            "add legs of size 1."
        )
    return rows, columns
