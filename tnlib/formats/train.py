"""Tensor trains (matrix product states) and TT-matrices (matrix product operators)."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from tnlib._errors import ArgumentError, ArgumentTypeError
from tnlib._typing import Array
from tnlib._validate import as_count
from tnlib.formats.base import Dense, Operator, as_stored_list
from tnlib.linalg.scale import shift
from tnlib.sweeps.apply import apply_cores
from tnlib.sweeps.dense import cores_to_dense, fuse_row_and_column, unpair_legs
from tnlib.sweeps.scale import even_out, norm_parts

_MOST_LEGS = 64  # of a numpy array


@dataclass(frozen=True, eq=False, repr=False)
class _Train(Dense):
    """What both kinds of train share: a chain of cores, its centre and its scale."""

    cores: Sequence[Array]
    center: int | None = None
    log_scale: float = 0.0

    _core_legs: ClassVar[int]

    def __post_init__(self) -> None:
        name = type(self).__name__
        cores = as_stored_list(name, lambda k: f"core {k}", self.cores, ndim=self._core_legs)
        for k in range(1, len(cores)):
            if cores[k - 1].shape[-1] != cores[k].shape[0]:
                raise ArgumentError(
                    f"{name}: bond {k} must have one size, got core {k - 1} of shape {cores[k - 1].shape} and "
                    f"core {k} of shape {cores[k].shape}; make the last leg of one the first of the other."
                )
        ends = cores[0].shape[0], cores[-1].shape[-1]
        if ends != (1, 1):
            raise ArgumentError(
                f"{name}: the outer bonds must have size 1, got {ends[0]} and {ends[1]}; "
                "sum over them or move them into a core (cyclic trains are not supported)."
            )
        center = None if self.center is None else as_count(name, "center", self.center, least=0)
        if center is not None and center >= len(cores):
            raise ArgumentError(f"{name}: center must name one of {len(cores)} cores, got {center}; count from 0.")
        if not isinstance(self.log_scale, numbers.Real):
            raise ArgumentTypeError(f"{name}: log_scale must be a real number, got {self.log_scale!r}; pass a float.")
        if not math.isfinite(self.log_scale):
            raise ArgumentError(f"{name}: log_scale must be finite, got {self.log_scale}; use zero cores for 0.")
        object.__setattr__(self, "cores", cores)
        object.__setattr__(self, "center", center)
        object.__setattr__(self, "log_scale", float(self.log_scale))

    def arrays(self) -> tuple[Array, ...]:
        """Return the cores."""
        return tuple(self.cores)

    @property
    def ranks(self) -> tuple[int, ...]:
        """All d + 1 bond sizes (r[0], ..., r[d])."""
        return (1, *(core.shape[-1] for core in self.cores))

    def norm(self) -> float:
        """Frobenius norm, by triangular factors from the left: no cancellation.

        Raises ArgumentError where it leaves the range of float64; `log_norm` never does.
        """
        try:
            return math.ldexp(*norm_parts(fuse_row_and_column(self.cores), self.log_scale))
        except OverflowError:
            raise ArgumentError(
                f"{type(self).__name__}.norm: the norm must lie below 1.8e308, got exp({self.log_norm():.1f}); "
                "use log_norm()."
            ) from None

    def log_norm(self) -> float:
        """Natural logarithm of the Frobenius norm; -inf for zero."""
        mantissa, twos = norm_parts(fuse_row_and_column(self.cores), self.log_scale)
        return math.log(mantissa) + twos * math.log(2) if mantissa > 0 else -math.inf


@dataclass(frozen=True, eq=False, repr=False)
class TensorTrain(_Train):
    """exp(log_scale) times the contraction of a chain of cores.

    Parameters
    ----------
    cores
        Core k of shape (r[k], n[k], r[k+1]), r[0] = r[d] = 1. Bond k lies between cores k - 1 and k.
    center
        The core towards which all others are isometric; None if not known.
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
        if len(self.cores) > _MOST_LEGS:
            raise ArgumentError(
                f"TensorTrain.full: a dense array must have at most {_MOST_LEGS} legs, got {len(self.cores)}; "
                "contract part of the train first."
            )
        cores, twos, factor = even_out(self.cores, self.log_scale)
        return _rescale(cores_to_dense(cores), twos, factor).reshape(self.shape)


@dataclass(frozen=True, eq=False, repr=False)
class TTMatrix(_Train, Operator):
    """A matrix as a train whose cores carry a row leg and a column leg (a matrix product operator).

    Parameters
    ----------
    cores
        Core k of shape (r[k], m[k], n[k], r[k+1]), row leg before column leg, r[0] = r[d] = 1.
    center
        The core towards which all others are isometric; None if not known.
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
        cores, twos, factor = even_out(self.cores, self.log_scale)
        paired = cores_to_dense(fuse_row_and_column(cores))
        return _rescale(unpair_legs(paired, self.row_shape, self.col_shape), twos, factor)

    @property
    def H(self) -> TTMatrix:
        """The adjoint, core by core."""
        adjoint = tuple(core.conj().transpose(0, 2, 1, 3) for core in self.cores)  # l n m r
        return TTMatrix(adjoint, self.center, self.log_scale)

    def _matmat(self, x: Array) -> Array:
        cores, twos, factor = even_out(self.cores, self.log_scale)
        return _rescale(apply_cores(cores, x), twos, factor)

    def _rmatmat(self, x: Array) -> Array:
        return self.H._matmat(x)


def _rescale(x: Array, twos: int, factor: float) -> Array:
    """Return x * factor * 2**twos."""
    return shift(x, twos) if factor == 1.0 else shift(x * x.real.dtype.type(factor), twos)
