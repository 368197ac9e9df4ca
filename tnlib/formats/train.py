"""Tensor trains (matrix product states) and TT-matrices (matrix product operators)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, overload

import numpy as np

from tnlib._errors import ArgumentError, ArgumentTypeError
from tnlib._typing import Array
from tnlib.formats.base import Operator, refuse_too_large
from tnlib.formats.chain import Chain
from tnlib.formats.indexing import as_entry, digits, n_kept, per_leg, select
from tnlib.linalg.scale import shift
from tnlib.sweeps.apply import apply_cores
from tnlib.sweeps.arithmetic import multiply_cores
from tnlib.sweeps.contraction import absorb
from tnlib.sweeps.dense import cores_to_dense, fuse_row_and_column, unpair_legs
from tnlib.sweeps.scale import even_out


@dataclass(frozen=True, eq=False, repr=False)
class TensorTrain(Chain):
    """exp(log_scale) times the contraction of a chain of cores.

    Parameters
    ----------
    cores
        Core k of shape (r[k], n[k], r[k+1]), r[0] = r[d] = 1. Bond k lies between cores k - 1 and k.
    center
        The core towards which all others are isometric, taken at your word; None if not known.
    log_scale
        Natural logarithm of a positive factor.

    Raises
    ------
    ArgumentError
        If neighbouring cores do not share their bond, an end is not 1, or `center` is outside.

    Examples
    --------
    >>> import numpy as np, tnlib
    >>> tt = tnlib.TensorTrain([np.ones((1, 2, 3)), np.ones((3, 4, 1))])
    >>> tt.shape, tt.ranks, tt.n_parameters, float(tt.full()[0, 0])
    ((2, 4), (1, 3, 1), 18, 3.0)
    """

    _core_legs = 3

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes (n[0], ..., n[d-1]) of the outer legs."""
        return tuple(core.shape[1] for core in self.cores)

    def full(self) -> Array:
        """Contract to the dense array (n[0], ..., n[d-1])."""
        refuse_too_large(self)
        cores, twos, factor = even_out(self.cores, self.log_scale)
        return _rescale(cores_to_dense(cores), twos, factor).reshape(self.shape)

    @property
    def T(self) -> TensorTrain:
        """The transpose: legs, and so cores, in reverse order."""
        turned = tuple(core.transpose(2, 1, 0) for core in reversed(self.cores))  # r n l
        center = None if self.center is None else len(turned) - 1 - self.center
        return TensorTrain(turned, center, self.log_scale)

    def __getitem__(self, index: Any) -> Any:
        """Fix legs with integers, cut them with slices: a smaller TensorTrain, or a number where no leg is left."""
        given = per_leg("TensorTrain", index, self.shape)
        touched = [k for k, (i, n) in enumerate(zip(given, self.shape, strict=True)) if n_kept(i, n) < n]
        if not touched and not any(isinstance(i, int) for i in given):
            return TensorTrain(select(self.cores, given), self.center, self.log_scale)
        cores, twos, factor = even_out(self.cores, self.log_scale)
        left, more = absorb(select(cores, given))
        if left[0].ndim == 2:
            return as_entry("TensorTrain", left[0][0, 0] * factor, twos + more, self.dtype)
        # what only the centre loses, or a neighbour takes over from it, leaves all others isometric
        alone = self.center is not None and set(touched) <= {self.center}
        dropped = {k for k, i in enumerate(given) if isinstance(i, int)}
        center = min(self.center or 0, len(left) - 1) if alone and dropped <= {self.center} else None
        return TensorTrain(tuple(left), center, (twos + more) * math.log(2) + math.log(factor))

    def __iter__(self) -> Iterator[Any]:
        """Go through the first leg, as numpy does."""
        return (self[k] for k in range(self.shape[0]))

    def _constant(self, number: Any) -> TensorTrain:
        ones = tuple(np.ones((1, n, 1), self.dtype) for n in self.shape)
        return TensorTrain(ones)._times(number)


@dataclass(frozen=True, eq=False, repr=False)
class TTMatrix(Chain, Operator):
    """A matrix as a train whose cores carry a row leg and a column leg (a matrix product operator).

    Parameters
    ----------
    cores
        Core k of shape (r[k], m[k], n[k], r[k+1]), row leg before column leg, r[0] = r[d] = 1.
    center
        The core towards which all others are isometric, taken at your word; None if not known.
    log_scale
        Natural logarithm of a positive factor.

    Raises
    ------
    ArgumentError
        If neighbouring cores do not share their bond, or an end is not 1.

    Examples
    --------
    >>> import numpy as np, tnlib
    >>> identity = tnlib.TTMatrix([np.eye(4).reshape(1, 4, 4, 1)] * 5)
    >>> identity.shape, identity.n_parameters, float(identity.matvec(np.ones(1024)).sum())
    ((1024, 1024), 80, 1024.0)
    """

    _core_legs = 4

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
        cores, twos, factor = even_out(self.cores, self.log_scale)
        paired = cores_to_dense(fuse_row_and_column(cores))
        return _rescale(unpair_legs(paired, self.row_shape, self.col_shape), twos, factor)

    @property
    def T(self) -> TTMatrix:
        """The transpose, core by core."""
        turned = tuple(core.transpose(0, 2, 1, 3) for core in self.cores)  # l n m r
        return TTMatrix(turned, self.center, self.log_scale)

    @property
    def H(self) -> TTMatrix:
        """The adjoint, core by core."""
        return self.T.conj()

    def __getitem__(self, index: Any) -> Any:
        """Return an entry [i, j], a row [i, :] or a column [:, j] as a TensorTrain; i and j may have any size."""
        sides = per_leg("TTMatrix", index, self.shape)
        if all(i == slice(None) for i in sides):
            return self
        if any(isinstance(i, slice) and i != slice(None) for i in sides):
            raise ArgumentTypeError(
                f"TTMatrix: an index must be an integer or : on each side, got {index}; "
                "for parts of legs slice tnlib.convert(value, tnlib.TensorTrain)."
            )
        m, n = (
            digits(i, shape) if isinstance(i, int) else [slice(None)] * len(shape)
            for i, shape in zip(sides, (self.row_shape, self.col_shape), strict=True)
        )
        cores, twos, factor = even_out(self.cores, self.log_scale)
        left, more = absorb([core[:, i, j] for core, i, j in zip(cores, m, n, strict=True)])
        if left[0].ndim == 2:
            return as_entry("TTMatrix", left[0][0, 0] * factor, twos + more, self.dtype)
        return TensorTrain(tuple(left), None, (twos + more) * math.log(2) + math.log(factor))

    @overload
    def __matmul__(self, x: TTMatrix) -> TTMatrix: ...
    @overload
    def __matmul__(self, x: TensorTrain) -> TensorTrain: ...
    @overload
    def __matmul__(self, x: Array) -> Array: ...
    def __matmul__(self, x: Any) -> Any:
        """Multiply with a TTMatrix, a TensorTrain or a dense array; ranks of trains multiply (see `tnlib.apply`)."""
        if isinstance(x, TTMatrix):
            return TTMatrix(*self._product(x))
        if isinstance(x, TensorTrain):
            cores, center, log_scale = self._product(as_column(x))
            return TensorTrain(tuple(fuse_row_and_column(cores)), center, log_scale)
        return super().__matmul__(x)

    @overload
    def __rmatmul__(self, x: TensorTrain) -> TensorTrain: ...
    @overload
    def __rmatmul__(self, x: Array) -> Array: ...
    def __rmatmul__(self, x: Any) -> Any:
        """Multiply from the left with a TensorTrain, a row, or a dense array."""
        return self.T @ x if isinstance(x, TensorTrain) else super().__rmatmul__(x)

    def _product(self, x: TTMatrix) -> tuple[tuple[Array, ...], None, float]:
        refuse_unequal_legs("TTMatrix @", self, x)
        one, two = (even_out(t.cores, t.log_scale) for t in (self, x))
        cores = multiply_cores(one[0], two[0])
        return tuple(cores), None, (one[1] + two[1]) * math.log(2) + math.log(one[2] * two[2])

    def _matmat(self, x: Array) -> Array:
        cores, twos, factor = even_out(self.cores, self.log_scale)
        return _rescale(apply_cores(cores, x), twos, factor)

    def _rmatmat(self, x: Array) -> Array:
        return self.H._matmat(x)


def as_column(x: TensorTrain) -> TTMatrix:
    """Return a train as the one column of a matrix: column legs of size 1."""
    return TTMatrix(tuple(core[:, :, None] for core in x.cores), x.center, x.log_scale)


def refuse_unequal_legs(name: str, a: TTMatrix, x: TTMatrix) -> None:
    """Raise where the column legs of `a` are not the row legs of `x`."""
    if len(a.cores) != len(x.cores):
        raise ArgumentError(
            f"{name}: both must have as many cores, got {len(a.cores)} and {len(x.cores)}; "
            "a core of legs of size 1 can take the place of a missing one."
        )
    for k, (n, m) in enumerate(zip(a.col_shape, x.row_shape, strict=True)):
        if n != m:
            raise ArgumentError(
                f"{name}: leg {k} must have one size, got {n} on the left and {m} on the right; "
                "column legs of the one meet row legs of the other."
            )


def _rescale(x: Array, twos: int, factor: float) -> Array:
    """Return x * factor * 2**twos."""
    return shift(x, twos) if factor == 1.0 else shift(x * x.real.dtype.type(factor), twos)
