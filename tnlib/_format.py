"""Base classes of formats: what every format offers, arithmetic, and matrices as linear operators."""

from __future__ import annotations

import cmath
import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, ParamSpec, Self, TypeVar

import numpy as np
import numpy.typing as npt

from tnlib._array_api import device_of, dtype_of, from_host, library_of, refuse_different_libraries, to_host
from tnlib._errors import ArgumentError, ArgumentTypeError
from tnlib._fit import Fit, format_html, refuse_other_arrays, shorten
from tnlib._operands import as_number, refuse_different_sizes
from tnlib._stored_arrays import in_common_dtype, numbered, read_only, set_fields
from tnlib._typing import Array
from tnlib._validate import advice_for, as_dtype, is_other_array, to_numpy

F = TypeVar("F", bound="Format")
P = ParamSpec("P")
R = TypeVar("R")


def numpy_arrays(method: Callable[P, R]) -> Callable[P, R]:
    """Return a method of a format that refuses arrays of other libraries than numpy."""
    name = method.__name__.strip("_")

    @functools.wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        refuse_other_arrays(f"{type(args[0]).__name__}.{name}", "the value", args[0])
        return method(*args, **kwargs)

    return call


class Format(ABC):
    """A tensor in factored form: arrays whose contraction is a dense array.

    Constructors raise ArgumentError if arrays are not finite or have inconsistent shapes, and ArgumentTypeError if they
    are not arrays of numbers. Arrays are stored as read-only views, without a copy if their dtype is supported.

    Examples
    --------
    >>> import numpy as np, tnlib
    >>> x = np.ones((10, 20, 30))
    >>> for value in (tnlib.tt_svd(x).value, tnlib.tucker(x).value, tnlib.cp(x, 1).value):
    ...     print(isinstance(value, tnlib.Format), value.ranks, value.n_parameters)
    True (1, 1, 1, 1) 60
    True (1, 1, 1) 61
    True (1,) 61
    """

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
            if _is_array(value):
                named[name] = value
            elif name not in self.attributes():
                named |= {f"{name}.{k}": a for k, a in enumerate(value)}
        return named

    @classmethod
    def from_named_arrays(cls, arrays: Mapping[str, Array], attributes: Mapping[str, Any]) -> Self:
        """Return the value with these `named_arrays` and `attributes`."""
        known = {**arrays, **attributes}
        return cls(**{name: known.get(name, numbered(arrays, name)) for name in _field_names(cls)})

    @classmethod
    def from_valid(cls, **fields: Any) -> Self:
        """Return the value with these fields; nothing is validated."""
        self = object.__new__(cls)
        set_fields(self, **{name: read_only(value) for name, value in fields.items()})
        return self

    def attributes(self) -> dict[str, Any]:
        """Return what a value stores beside its arrays, as JSON values."""
        return {}

    def gauge_error(self) -> str | None:
        """Return which array is not in the gauge that the value states, beyond roundoff; constructors do not check."""
        return None

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

    @property
    def library(self) -> str:
        """Library of the stored arrays: "numpy", or "torch" or another one of the array API standard."""
        names = _field_names(type(self))
        first: Any = getattr(self, names[0]) if names else None
        first = first[0] if type(first) is tuple and first else first
        return library_of(first) if is_other_array(first) else "numpy"

    def to_numpy(self) -> Self:
        """Return the same value with numpy arrays, without gradients; itself if it has them."""
        return self if self.library == "numpy" else self._with_arrays(lambda a: read_only(np.array(to_host(a))))

    def _with_arrays(self, convert: Callable[[Any], Any]) -> Self:
        """Return the value with `convert` applied to every stored array; nothing is validated."""
        new = object.__new__(type(self))
        for name, value in vars(self).items():
            is_list = isinstance(value, tuple) and len(value) > 0 and _is_array(value[0])
            vars(new)[name] = tuple(map(convert, value)) if is_list else convert(value) if _is_array(value) else value
        return new

    def promoted_arrays(self) -> list[Array]:
        """Return the stored arrays in their common dtype."""
        return in_common_dtype(self.arrays())

    @property
    def dtype(self) -> np.dtype[Any]:
        """Common dtype of the stored arrays."""
        return np.result_type(*map(dtype_of, self.arrays()))

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
        return sum(math.prod(a.shape) for a in self.arrays())

    def is_subnormal(self) -> bool:
        """Test if numbers are subnormal: below 2.2e-308 or, in single precision, 1.2e-38."""
        return any(0 < np.abs(a).max(initial=0) < np.finfo(a.dtype).tiny for a in map(to_host, self.arrays()))

    @numpy_arrays
    def astype(self, dtype: npt.DTypeLike) -> Self:
        """Return the same tensor with arrays of `dtype`: float32, float64, complex64 or complex128.

        Arrays that are real by definition, such as singular values, get the real dtype of the same precision.
        """
        target = self._target_dtype(dtype)
        cast = {name: a.astype(self._dtype_of(name, target)) for name, a in self.named_arrays().items()}
        return self.from_named_arrays(cast, self.attributes())

    @numpy_arrays
    def conj(self) -> Self:
        """Return the complex conjugate."""
        conjugate = {name: a.conj() for name, a in self.named_arrays().items()}
        return self.from_named_arrays(conjugate, self.attributes())

    @property
    @numpy_arrays
    def real(self) -> Self:
        """The real part, exact and of a real dtype; ranks of complex data grow, real data are returned unchanged."""
        return self._part(imaginary=False) if self.dtype.kind == "c" else self

    @property
    @numpy_arrays
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
        return self.to_numpy().full().astype(dtype or self.dtype, copy=False)

    def __repr__(self) -> str:
        sizes = shorten(self.shape, " x ")
        ranks = self.ranks if len(self.ranks) <= 16 else shorten(self.ranks, ", ")
        place = "" if self.library == "numpy" else f", {self.library} on {device_of(self.arrays()[0])}"
        size = f"{self.n_parameters:,} parameters"
        return f"{type(self).__name__}(shape {sizes}, ranks {ranks}, {size}, {self.dtype}{place})"


class LinearFormat(Format):
    """A format with exact sums, whose ranks add, and exact multiples.

    Examples
    --------
    >>> import tnlib
    >>> ones = tnlib.ones((4, 5, 6))
    >>> total = 3 * ones - ones / 2
    >>> isinstance(ones, tnlib.LinearFormat), total.ranks, f"{total.full().max():.6f}"
    (True, (1, 2, 2, 1), '2.500000')
    """

    @property
    @numpy_arrays
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
            refuse_mixed_libraries(f"{type(self).__name__}.add", value=self, other=other)
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
    """A matrix in factored form; `scipy.sparse.linalg.aslinearoperator` accepts it.

    Examples
    --------
    >>> import numpy as np, tnlib
    >>> from scipy.sparse.linalg import aslinearoperator
    >>> a = tnlib.LowRank(np.ones((1000, 1)), np.ones((1, 3)))
    >>> (
    ...     isinstance(a, tnlib.Operator),
    ...     a.matvec(np.arange(3.0)).sum(),
    ...     aslinearoperator(a).rmatvec(np.ones(1000)),
    ... )
    (True, np.float64(3000.0), array([1000., 1000., 1000.]))
    """

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
        """Return the adjoint times x, for x of shape (m, k)."""
        return self._rmatmat(self._operand("rmatmat", x, self.shape[0]))

    def matvec(self, x: Array) -> Array:
        """Return self @ x for x of shape (n,)."""
        return self._matmat(self._operand("matvec", x, self.shape[1], columns=1))[:, 0]

    def rmatvec(self, x: Array) -> Array:
        """Return the adjoint times x, for x of shape (m,)."""
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
        refuse_other_arrays(name, "the value", self)
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


def refuse_different_legs(name: str, a: LinearFormat, b: LinearFormat) -> None:
    """Raise where two formats do not have the same legs."""
    refuse_different_sizes(name, a._legs, b._legs, "legs are not broadcast")


def refuse_other_format(sign: str, a: Format, b: Any) -> None:
    """Raise where `b` is a format that `a` cannot be combined with."""
    product = "apply operators by @, or " if sign == "*" else ""
    advice = advice_for(b, f"{product}make one of the other with tnlib.convert" if isinstance(b, Format) else "")
    if advice:
        raise ArgumentTypeError(
            f"{type(a).__name__} {sign} {type(b).__name__}: both must be of one kind, got two; {advice}."
        )


def refuse_mixed_libraries(function: str, **values: Format) -> None:
    """Raise where the arrays of some `values`, by parameter, are of another library than those of the others."""
    libraries = {value.library for value in values.values()}
    if len(libraries) > 1 and "numpy" in libraries:
        for parameter, value in values.items():
            refuse_other_arrays(function, parameter, value)
    if libraries != {"numpy"}:
        refuse_different_libraries(function, [value.arrays()[0] for value in values.values()])


def with_arrays_of(x: Any, fit: Fit[F]) -> Fit[F]:
    """Return a `fit` of numpy arrays with arrays of the library and on the device of the input `x`."""
    if not is_other_array(x):
        return fit
    return replace(fit, value=fit.value._with_arrays(lambda a: from_host(a, x)))


def _is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray) or is_other_array(value)


@functools.cache
def _field_names(kind: type) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind)) if is_dataclass(kind) else ()
