"""A chain of cores: what tensor trains and TT-matrices share."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np

from tnlib._errors import ArgumentError, ArgumentTypeError
from tnlib._typing import Array
from tnlib._validate import as_count
from tnlib.formats.base import as_stored_list, refuse_other_kind
from tnlib.formats.linear import Linear, same_legs
from tnlib.sweeps.arithmetic import add_cores, in_one_scale, multiply_entries, times_number
from tnlib.sweeps.dense import fuse_row_and_column
from tnlib.sweeps.scale import even_out, norm_parts


@dataclass(frozen=True, eq=False, repr=False)
class Chain(Linear):
    """Cores, the centre they point to, and a scale."""

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

    def conj(self) -> Self:
        """Return the complex conjugate, core by core."""
        return type(self)(tuple(core.conj() for core in self.cores), self.center, self.log_scale)

    def __mul__(self, other: Any) -> Self:
        """Multiply with a number, or entry by entry with a train of the same legs: ranks multiply."""
        if isinstance(other, type(self)):
            same_legs(f"{type(self).__name__} * {type(other).__name__}", self, other)
            one, two = (even_out(fuse_row_and_column(t.cores), t.log_scale) for t in (self, other))
            cores = self._with_my_legs(multiply_entries(one[0], two[0]))
            return type(self)(cores, None, (one[1] + two[1]) * math.log(2) + math.log(one[2] * two[2]))
        refuse_other_kind("*", self, other)
        return super().__mul__(other)

    def _times(self, number: Any) -> Self:
        k = self.center or 0  # where it leaves the gauge as it is
        core, twos = times_number(self.cores[k], number)
        cores = [*self.cores[:k], core, *self.cores[k + 1 :]]
        return type(self)(_of_one_dtype(cores), self.center, self.log_scale + twos * math.log(2))

    def _plus(self, other: Self) -> Self:
        terms, log_scale = in_one_scale([(fuse_row_and_column(t.cores), t.log_scale) for t in (self, other)])
        return type(self)(self._with_my_legs(add_cores(terms)), None, log_scale)

    @property
    def _legs(self) -> tuple[Any, ...]:
        sizes = (core.shape[1:-1] for core in self.cores)
        return tuple(legs[0] if len(legs) == 1 else legs for legs in sizes)

    def _with_my_legs(self, cores: Sequence[Array]) -> tuple[Array, ...]:
        """Return cores (l, n, r) with the legs of this chain in the place of n."""
        return tuple(
            core.reshape(len(core), *mine.shape[1:-1], core.shape[-1])
            for core, mine in zip(cores, self.cores, strict=True)
        )


def _of_one_dtype(cores: Sequence[Array]) -> tuple[Array, ...]:
    dtype = np.result_type(*cores)
    return tuple(core.astype(dtype, copy=False) for core in cores)
