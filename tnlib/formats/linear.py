"""Sums and multiples of formats: what `+`, `-`, `*` and `/` mean, whatever the format."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Any, Self

import numpy as np

from tnlib._errors import ArgumentError, ArgumentTypeError
from tnlib.formats.base import Dense, refuse_other_kind


class Linear(Dense):
    """A format that can be added to its like and multiplied with numbers, ranks adding up, nothing rounded off."""

    @abstractmethod
    def conj(self) -> Self:
        """Return the complex conjugate."""

    @abstractmethod
    def _times(self, number: Any) -> Self:
        """Return number * self."""

    @abstractmethod
    def _plus(self, other: Self) -> Self:
        """Return self + other, of the same legs."""

    def _constant(self, number: Any) -> Self:
        """Return the array of these legs with `number` in every entry."""
        raise ArgumentTypeError(
            f"{type(self).__name__}: a number cannot be added to an operator, got {number!r}; it could mean every "
            "entry or the identity: add a format of the one you mean."
        )

    @property
    def _legs(self) -> tuple[Any, ...]:
        """Sizes of the legs that must agree."""
        return self.shape

    def __neg__(self) -> Self:
        return self._times(-1)

    def __pos__(self) -> Self:
        return self

    def __mul__(self, other: Any) -> Self:
        number = as_number(type(self).__name__, other)
        return NotImplemented if number is None else self._times(number)

    def __rmul__(self, other: Any) -> Self:
        return self.__mul__(other)

    def __truediv__(self, other: Any) -> Self:
        number = as_number(type(self).__name__, other)
        if number is None:
            return NotImplemented
        if number == 0:
            raise ArgumentError(f"{type(self).__name__}: the divisor must not be zero, got {other!r}; check it first.")
        dtype = np.result_type(self.dtype, number)  # and not the divisor's own, which may be coarser
        return self._times(dtype.type(1 / (complex(number) if np.iscomplexobj(number) else float(number))))

    def __add__(self, other: Any) -> Self:
        if isinstance(other, type(self)):
            same_legs(f"{type(self).__name__} + {type(other).__name__}", self, other)
            return self._plus(other)
        refuse_other_kind("+", self, other)
        number = as_number(type(self).__name__, other)
        if number is None:
            return NotImplemented
        return self if number == 0 else self._plus(self._constant(number))  # sum() begins with 0

    def __radd__(self, other: Any) -> Self:
        return self.__add__(other)

    def __sub__(self, other: Any) -> Self:
        if isinstance(other, type(self)):
            return self.__add__(-other)
        refuse_other_kind("-", self, other)
        number = as_number(type(self).__name__, other)
        return NotImplemented if number is None else self.__add__(-number)

    def __rsub__(self, other: Any) -> Self:
        number = as_number(type(self).__name__, other)
        return NotImplemented if number is None else (-self).__add__(number)


def as_number(name: str, other: Any) -> Any:
    """Return a finite number, Python's or numpy's, or None where `other` is none."""
    if isinstance(other, np.ndarray) and other.ndim == 0:
        other = other[()]
    if isinstance(other, np.ndarray):
        raise ArgumentTypeError(
            f"{name}: the other must be a format or a number, got an array of shape {other.shape}; "
            "decompose it first, or take numpy.asarray of this one."
        )
    if isinstance(other, bool | np.bool_):
        other = int(other)
    if not isinstance(other, int | float | complex | np.number):
        return None
    try:
        finite = math.isfinite(other.real) and math.isfinite(other.imag)
    except OverflowError:  # an integer beyond every float
        finite = False
    if not finite:
        raise ArgumentError(f"{name}: a number must be finite, got {other}; replace NaN and inf first.")
    return float(other) if isinstance(other, int) else other


def same_legs(name: str, a: Linear, b: Linear) -> None:
    """Raise where two formats do not have the same legs, and name the first one that differs."""
    if len(a._legs) != len(b._legs):
        raise ArgumentError(
            f"{name}: both must have as many legs, got {len(a._legs)} and {len(b._legs)}; "
            "a leg of size 1 can take the place of a missing one."
        )
    for k, (n, m) in enumerate(zip(a._legs, b._legs, strict=True)):
        if n != m:
            raise ArgumentError(f"{name}: leg {k} must have one size, got {n} and {m}; legs are not broadcast.")
