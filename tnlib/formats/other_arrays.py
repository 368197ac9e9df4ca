"""Formats whose arrays are of another library than numpy: torch tensors, and arrays of the array API standard.

`TensorTrain(cores)` of torch tensors is an `ArrayTensorTrain`, a subclass that holds them as they are. Such a class
has the methods that it defines itself and those that read nothing but shapes. All others refuse, and so do the verbs of
the registry: a sweep for numpy never meets an array of another library.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NoReturn, Self, TypeAlias, TypeVar

import numpy as np

from tnlib._errors import ArgumentTypeError
from tnlib._fit import Fit
from tnlib._format import Format
from tnlib._registry import implementation
from tnlib._typing import Array
from tnlib._validate import is_other_array
from tnlib.linalg.array_namespace import OtherArray, device_of, dtype_of, from_host, library_of, to_host

F = TypeVar("F", bound=Format)
Verbs: TypeAlias = Mapping[str, Callable[..., Any]]

# Members that need no array but its shape; the two constructors store arrays as they are.
_OF_SHAPES = {"shape", "ranks", "ndim", "size", "attributes", "log_scale", "row_shape", "col_shape"}
_OF_SHAPES |= {"from_sweep", "from_named_arrays"}
_OPERATORS = ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "matmul", "rmatmul", "neg", "getitem", "iter")


class OtherArrays(Format):
    """Base class of formats with arrays of another library."""

    numpy_class: ClassVar[type[Format]]  # the format with numpy arrays
    verbs: ClassVar[Verbs]  # implementations in the place of those of `numpy_class`

    def __init_subclass__(cls) -> None:
        """Replace every inherited public method and operator that reads numpy arrays by one that refuses."""
        super().__init_subclass__()
        operators = {f"__{name}__" for name in _OPERATORS}
        own = _OF_SHAPES.union(*(vars(base) for base in cls.__mro__ if issubclass(base, OtherArrays)))
        own |= {field.name for field in dataclasses.fields(cls.numpy_class)}  # type: ignore[arg-type]
        for name in dir(cls.numpy_class):
            if name not in own and (not name.startswith("_") or name in operators):
                setattr(cls, name, _refusal(cls.numpy_class, name))

    @classmethod
    def from_numpy(cls, value: Format, like: OtherArray) -> Self:
        """Return the format `value`, of numpy arrays, with arrays of the library and on the device of `like`."""
        new: Self = cls._converted(value, lambda a: from_host(a, like))
        return new

    def to_numpy(self) -> Format:
        """Return the same value with numpy arrays, without gradients."""
        value: Format = self._converted(self, _read_only_host, self.numpy_class)
        return value

    @classmethod
    def _converted(cls, value: Format, convert: Callable[[Any], Any], kind: type[Any] | None = None) -> Any:
        """Return `value` as an object of `kind`, with its arrays converted."""
        new = object.__new__(kind or cls)
        for name, field in vars(value).items():
            if isinstance(field, tuple) and field and hasattr(field[0], "shape"):
                vars(new)[name] = tuple(map(convert, field))
            else:
                vars(new)[name] = convert(field) if hasattr(field, "shape") else field
        return new

    def arrays(self) -> tuple[Any, ...]:
        """Return the stored arrays, in a fixed order."""
        return tuple(self.named_arrays().values())

    def named_arrays(self) -> dict[str, Any]:
        """Return the stored arrays by their names."""
        named: dict[str, Any] = {}
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if hasattr(value, "shape"):
                named[field.name] = value
            elif isinstance(value, tuple) and value and hasattr(value[0], "shape"):
                named |= {f"{field.name}.{k}": a for k, a in enumerate(value)}
        return named

    @property
    def dtype(self) -> np.dtype[Any]:
        """Common dtype of the stored arrays, as a numpy dtype."""
        return np.result_type(*map(dtype_of, self.arrays()))

    @property
    def n_parameters(self) -> int:
        """Number of stored numbers, every factor included."""
        return sum(math.prod(a.shape) for a in self.arrays())

    def is_subnormal(self) -> bool:
        """Test if numbers are so small that rounding them is not relative."""
        return any(0 < np.abs(to_host(a)).max() < np.finfo(dtype_of(a)).tiny for a in self.arrays())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return self.to_numpy().__array__(dtype, copy)

    def __repr__(self) -> str:
        first = self.arrays()[0]
        text = super().__repr__().replace(type(self).__name__, self.numpy_class.__name__, 1)
        return f"{text.removesuffix(')')}, {library_of(first)} on {device_of(first)})"


def _refusal(kind: type[Format], name: str) -> Any:
    """Return a method, or a property, of the format `kind` that needs numpy arrays and refuses others."""

    def _refuse(self: OtherArrays, *_: Any, **__: Any) -> NoReturn:
        refuse(f"{self.numpy_class.__name__}.{name.strip('_')}", "the value", self)

    return _refuse if callable(getattr(kind, name)) else property(_refuse)


def refuse(function: str, parameter: str, value: OtherArrays) -> NoReturn:
    """Raise the error of a function that needs numpy arrays."""
    library = library_of(value.arrays()[0])
    raise ArgumentTypeError(
        f"{function}: {parameter} must hold numpy arrays, got a {value.numpy_class.__name__} of {library} arrays; "
        "convert it with .to_numpy()."
    )


def with_arrays_of(x: Any, fit: Fit[F]) -> Fit[F]:
    """Return `fit` with arrays of the kind of the input `x`."""
    if not is_other_array(x):
        return fit
    kind: Any = implementation("other_arrays", type(fit.value))
    return dataclasses.replace(fit, value=kind.from_numpy(fit.value, x))


def _read_only_host(x: OtherArray) -> Array:
    a = np.array(to_host(x))
    a.setflags(write=False)
    return a
