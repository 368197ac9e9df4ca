"""Base classes of formats: what every format offers, arithmetic, and matrices as linear operators."""

from __future__ import annotations

import cmath
import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from tnlib._errors import ArgumentError, ArgumentTypeError
from tnlib._fit import format_html, shorten
from tnlib._registry import implementation
from tnlib._typing import Array
from tnlib._validate import advice_for, as_array, as_dtype, as_list, is_other_array, to_numpy

MAX_NDIM = 64  # of a numpy array


class Format(ABC):
    """A tensor in factored form: arrays whose contraction is a dense array.

    Constructors raise ArgumentError if arrays are not finite or have inconsistent shapes, and ArgumentTypeError if they
    are not arrays of numbers. Arrays are stored as read-only views, without a copy if their dtype is supported.
    """

    def __new__(cls, *arrays: Any, **keywords: Any) -> Any:
        """Return a new object, of the subclass for arrays of other libraries where one of `arrays` is of them."""
        is_other = any(map(_holds_other_array, (*arrays, *keywords.values()) if keywords else arrays))
        is_other = is_other and not hasattr(cls, "verbs")
        kind: Any = implementation("other_arrays", cls) if is_other else None
        if kind is not None and not issubclass(kind, cls):  # Python would not call its __init__
            raise ArgumentTypeError(
                f"{cls.__name__}: a subclass of {kind.numpy_class.__name__} must hold numpy arrays, got those of "
                "another library; convert them with numpy.asarray."
            )
        return object.__new__(kind or cls)

    # Without this numpy would multiply `array @ value` out before __rmatmul__ is called.
    __array_ufunc__ = None
    _repr_html_ = format_html

    def named_arrays(self) -> dict[str, Array]:
        """Return the stored arrays as a dict, with their names in files as keys, in a fixed order.

        These are the names of the dataclass fields, with .0, .1, ... behind them where a field holds several arrays.
        """
        named: dict[str, Array] = {}
        for name in _field_names(type(self)):
            value = getattr(self, name)
            if isinstance(value, np.ndarray):
                named[name] = value
            elif name not in self.attributes():
                named |= {f"{name}.{k}": a for k, a in enumerate(value)}
        return named

    @classmethod
    def from_named_arrays(cls, arrays: Mapping[str, Array], attributes: Mapping[str, Any]) -> Self:
        """Return the value with these `named_arrays` and `attributes`."""
        known = {**arrays, **attributes}
        return cls(**{name: known.get(name, numbered(arrays, name)) for name in _field_names(cls)})

    def attributes(self) -> dict[str, Any]:
        """Return what a value stores beside its arrays, as JSON values."""
        return {}

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """Shape of the dense array."""

    @property
    @abstractmethod
    def ranks(self) -> tuple[int, ...]:
        """Sizes of the inner legs."""

    @abstractmethod
    def full(self) -> Array:
        """Contract to the dense array."""

    @abstractmethod
    def norm(self) -> float:
        """Frobenius norm."""

    def arrays(self) -> tuple[Array, ...]:
        """Return the stored arrays, in a fixed order."""
        return tuple(self.named_arrays().values())

    def promoted_arrays(self) -> list[Array]:
        """Return the stored arrays in their common dtype."""
        arrays = self.arrays()
        dtype = np.result_type(*arrays)
        return [a.astype(dtype, copy=False) for a in arrays]

    @property
    def dtype(self) -> np.dtype[Any]:
        """Common dtype of the stored arrays."""
        return np.result_type(*self.arrays())

    @property
    def ndim(self) -> int:
        """Number of legs."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of entries of the dense array."""
        return math.prod(self.shape)

    @property
    def n_parameters(self) -> int:
        """Number of stored numbers, every factor included."""
        return sum(a.size for a in self.arrays())

    def is_subnormal(self) -> bool:
        """Test if numbers are subnormal: below 2.2e-308 or, in single precision, 1.2e-38."""
        return any(0 < np.abs(a).max(initial=0) < np.finfo(a.dtype).tiny for a in self.arrays())

    def astype(self, dtype: npt.DTypeLike) -> Self:
        """Return the same tensor with arrays of `dtype`: float32, float64, complex64 or complex128.

        Arrays that are real by definition, such as singular values, get the real dtype of the same precision.
        """
        target = self._target_dtype(dtype)
        cast = {name: a.astype(self._dtype_of(name, target)) for name, a in self.named_arrays().items()}
        return self.from_named_arrays(cast, self.attributes())

    def conj(self) -> Self:
        """Return the complex conjugate."""
        conjugate = {name: a.conj() for name, a in self.named_arrays().items()}
        return self.from_named_arrays(conjugate, self.attributes())

    @property
    def real(self) -> Self:
        """The real part, exact and of a real dtype; ranks of complex data grow, real data are returned unchanged."""
        return self._part(imaginary=False) if self.dtype.kind == "c" else self

    @property
    def imag(self) -> Self:
        """The imaginary part, exact and of a real dtype; ranks of complex data grow."""
        return self._part(imaginary=True)

    def _part(self, *, imaginary: bool) -> Self:
        """Return the real or the imaginary part, with arrays of a real dtype."""
        name = type(self).__name__
        raise ArgumentTypeError(
            f"{name}.{'imag' if imaginary else 'real'}: the value must be of a format with a real part, got a {name}; "
            "take that of its .full()."
        )

    def _target_dtype(self, dtype: npt.DTypeLike) -> np.dtype[Any]:
        """Return `dtype` if the arrays can be cast to it."""
        function = f"{type(self).__name__}.astype"
        target = as_dtype(function, dtype)
        if self.dtype.kind == "c" and target.kind != "c":
            raise ArgumentTypeError(
                f"{function}: dtype must be complex for complex arrays, got {target}; take .real for the real part."
            )
        return target

    def _dtype_of(self, name: str, dtype: np.dtype[Any]) -> np.dtype[Any]:
        """Return the dtype of the array `name` in a value of this `dtype`."""
        return dtype

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> Array:
        if copy is False:
            raise ArgumentError(f"{type(self).__name__}: copy must not be False, a dense array of it is always new.")
        return self.full().astype(dtype or self.dtype, copy=False)

    def __repr__(self) -> str:
        sizes = shorten(self.shape, " x ")
        ranks = self.ranks if len(self.ranks) <= 16 else shorten(self.ranks, ", ")
        return f"{type(self).__name__}(shape {sizes}, ranks {ranks}, {self.n_parameters:,} numbers, {self.dtype})"


class LinearFormat(Format):
    """A format with exact sums, whose ranks add, and exact multiples."""

    @property
    def imag(self) -> Self:
        """The imaginary part, exact and of a real dtype; ranks of complex data grow."""
        return super().imag if self.dtype.kind == "c" else self._multiplied(0)

    @abstractmethod
    def _multiplied(self, number: Any) -> Self:
        """Return number * self."""

    @abstractmethod
    def _added(self, other: Self) -> Self:
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
        return self._multiplied(-1)

    def __pos__(self) -> Self:
        return self

    def __mul__(self, other: Any) -> Self:
        number = as_number(type(self).__name__, other)
        return NotImplemented if number is None else self._multiplied(number)

    def __rmul__(self, other: Any) -> Self:
        return self.__mul__(other)

    def __truediv__(self, other: Any) -> Self:
        number = as_number(type(self).__name__, other)
        if number is None:
            return NotImplemented
        if number == 0:
            raise ArgumentError(f"{type(self).__name__}: the divisor must not be zero, got {other!r}; check it first.")
        inverse = 1 / (complex(number) if np.iscomplexobj(number) else float(number))
        if not cmath.isfinite(inverse):
            raise ArgumentError(
                f"{type(self).__name__}: the divisor must have a finite inverse, got {other!r}; scale it."
            )
        dtype = np.result_type(self.dtype, number)  # not the divisor's own, which may be coarser
        return self._multiplied(inverse if dtype == np.result_type(self.dtype, inverse) else dtype.type(inverse))

    def __add__(self, other: Any) -> Self:
        if isinstance(other, type(self)):
            refuse_different_legs(f"{type(self).__name__} + {type(other).__name__}", self, other)
            return self._added(other)
        refuse_other_format("+", self, other)
        number = as_number(type(self).__name__, other)
        if number is None:
            return NotImplemented
        return self if number == 0 else self._added(self._constant(number))  # sum() begins with 0

    def __radd__(self, other: Any) -> Self:
        return self.__add__(other)

    def __sub__(self, other: Any) -> Self:
        if isinstance(other, type(self)):
            return self.__add__(-other)
        refuse_other_format("-", self, other)
        number = as_number(type(self).__name__, other)
        return NotImplemented if number is None else self.__add__(-number)

    def __rsub__(self, other: Any) -> Self:
        return (-self).__add__(other)


class Operator(Format):
    """A matrix in factored form; `scipy.sparse.linalg.aslinearoperator` accepts it."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]:
        """Shape (m, n) of the matrix."""

    @abstractmethod
    def _matmat(self, x: Array) -> Array:
        """Return self @ x for a validated x (n, k), without multiplying out."""

    @property
    def H(self) -> Self:
        """The adjoint, where the format has a transpose `T`."""
        adjoint: Self = self.T.conj()  # type: ignore[attr-defined]
        return adjoint

    def _rmatmat(self, x: Array) -> Array:
        """Return self^H @ x for a validated x (m, k), without multiplying out."""
        return self.H._matmat(x)

    def matmat(self, x: Array) -> Array:
        """Return self @ x for x of shape (n, k)."""
        return self._matmat(self._operand("matmat", x, self.shape[1]))

    def rmatmat(self, x: Array) -> Array:
        """Return self^H @ x for x of shape (m, k)."""
        return self._rmatmat(self._operand("rmatmat", x, self.shape[0]))

    def matvec(self, x: Array) -> Array:
        """Return self @ x for x of shape (n,)."""
        return self._matmat(self._operand("matvec", x, self.shape[1], columns=1))[:, 0]

    def rmatvec(self, x: Array) -> Array:
        """Return self^H @ x for x of shape (m,)."""
        return self._rmatmat(self._operand("rmatvec", x, self.shape[0], columns=1))[:, 0]

    def _operand(self, method: str, x: Any, rows: int, columns: int | None = None) -> Array:
        """Return `x` as a matrix of `rows` rows; reshaping anything else would give a wrong result."""
        a, name = self._numbers(method, x), f"{type(self).__name__}.{method}"
        matrix = a[:, None] if a.ndim == columns else a
        if matrix.ndim != 2 or len(matrix) != rows or columns not in (None, matrix.shape[1]):
            expected = f"({rows},)" if columns else f"({rows}, k)"
            raise ArgumentError(f"{name}: x must have shape {expected}, got {a.shape}; legs are flattened row by row.")
        return matrix

    def _numbers(self, method: str, x: Any) -> Array:
        name = f"{type(self).__name__}.{method}"
        a = to_numpy(name, "x", x)
        if a.dtype.kind not in "biufc":
            raise ArgumentTypeError(f"{name}: x must hold numbers, got dtype {a.dtype}; convert it first.")
        return a

    def __matmul__(self, x: Any) -> Any:
        if not self._accepts("@", x):
            return NotImplemented
        x = self._numbers("@", x)
        return self.matvec(x) if x.ndim == 1 else self.matmat(x)

    def __rmatmul__(self, x: Any) -> Any:
        if not self._accepts("on the right of @", x):
            return NotImplemented
        x = self._numbers("@", x).conj()
        return self.rmatvec(x).conj() if x.ndim == 1 else self.rmatmat(x.T).conj().T

    def _accepts(self, sign: str, x: Any) -> bool:
        """Test if `x` is an array to numpy; another format would be multiplied out without notice."""
        refuse_other_format(sign, self, x)
        return isinstance(x, list | tuple | np.ndarray) or hasattr(x, "__array__")


def _holds_other_array(value: Any) -> bool:
    return any(map(is_other_array, value)) if type(value) in (list, tuple) else is_other_array(value)


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
    if isinstance(other, np.longdouble | np.clongdouble):
        raise ArgumentTypeError(
            f"{name}: a number must have at most 64 bits a component, got {other.dtype}; pass float(x) or complex(x)."
        )
    try:
        finite = cmath.isfinite(other)
    except OverflowError:  # an integer beyond every float
        finite = False
    if not finite:
        raise ArgumentError(f"{name}: a number must be finite, got {other}; replace NaN and inf first.")
    return float(other) if isinstance(other, int) else other


def refuse_different_legs(name: str, a: LinearFormat, b: LinearFormat) -> None:
    """Raise where two formats do not have the same legs."""
    refuse_different_sizes(name, a._legs, b._legs, "legs are not broadcast")


def refuse_different_sizes(name: str, a: Sequence[Any], b: Sequence[Any], reason: str) -> None:
    """Raise where the legs of two formats differ in number or size, naming the first one that does."""
    if len(a) != len(b):
        raise ArgumentError(
            f"{name}: both must have as many legs, got {len(a)} and {len(b)}; "
            "a leg of size 1 can take the place of a missing one."
        )
    for k, (n, m) in enumerate(zip(a, b, strict=True)):
        if n != m:
            raise ArgumentError(f"{name}: leg {k} must have one size, got {n} and {m}; {reason}.")


def refuse_other_format(sign: str, a: Format, b: Any) -> None:
    """Raise where `b` is a format that `a` cannot be combined with."""
    advice = advice_for(b, "make one of the other with tnlib.convert" if isinstance(b, Format) else "")
    if advice:
        raise ArgumentTypeError(
            f"{type(a).__name__} {sign} {type(b).__name__}: both must be of kinds that go together, got others; "
            f"{advice}."
        )


def refuse_too_large(value: Format) -> None:
    """Raise where the dense array of `value` has more legs than numpy allows, or does not fit into memory."""
    name, ndim, size = getattr(value, "numpy_class", type(value)).__name__, value.ndim, value.size
    if ndim > MAX_NDIM:
        raise ArgumentError(
            f"{name}.full: a dense array must have at most {MAX_NDIM} legs, got {ndim}; contract some of them first."
        )
    if not fits_in_memory(size, value.dtype):
        raise ArgumentError(
            f"{name}.full: the dense array must fit into memory, got 2**{size.bit_length() - 1} numbers or more; "
            "slice or contract it first."
        )


def refuse_unallocatable(function: str, shape: Sequence[int], dtype: np.dtype[Any]) -> None:
    """Raise where a stored array of this shape does not fit into memory."""
    if not fits_in_memory(math.prod(shape), dtype):
        raise ArgumentError(
            f"{function}: every stored array must fit into memory, got one of shape {tuple(shape)}; lower its sizes."
        )


def fits_in_memory(size: int, dtype: np.dtype[Any]) -> bool:
    """Test if an array of `size` numbers can be allocated: before a contraction fills memory piece by piece."""
    try:
        np.empty(size, dtype)  # reserved, and given back untouched
    except (MemoryError, OverflowError, ValueError):
        return False
    return True


def as_stored(format_name: str, parameter: str, a: Any, *, ndim: int | None = None) -> Array:
    """Return a read-only view of one stored array, finite and of a native dtype (a copy where that needs one)."""
    return read_only(as_array(format_name, parameter, a, ndim=ndim))


def as_stored_list(format_name: str, noun: str, arrays: Any, *, ndim: int) -> tuple[Array, ...]:
    """Return a non-empty tuple of read-only views; messages call array k "noun k"."""
    checked = as_list(format_name, f"{noun}s", arrays, "arrays")
    return tuple(as_stored(format_name, f"{noun} {k}", a, ndim=ndim) for k, a in enumerate(checked))


def set_fields(value: Format, **fields: Any) -> None:
    """Set validated fields of a frozen dataclass, in its `__post_init__`."""
    vars(value).update(fields)


def read_only(a: Array) -> Array:
    """Return a view of `a` that cannot be written to."""
    view = a.view()
    view.setflags(write=False)
    return view


@functools.cache
def _field_names(kind: type) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind))


def numbered(arrays: Mapping[str, Array], prefix: str) -> tuple[Array, ...]:
    """Return the arrays named `prefix`.0, `prefix`.1, ... in order."""
    return tuple(arrays[f"{prefix}.{k}"] for k in range(sum(key.startswith(f"{prefix}.") for key in arrays)))
