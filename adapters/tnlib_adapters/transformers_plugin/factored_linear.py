"""Linear layers whose weight is held as factors, y = x W + b.

A layer multiplies by one factor after the other. For many rows it is cheaper to multiply the factors out first; `cost`
counts the multiplications of both ways, and the cheaper one is taken. Gradients reach the factors on either.

Few rows are multiplied by factors in integers as they are, on the CPU and without gradients. Otherwise integers are
dequantized in every call; `keep_values` keeps a dequantized copy instead.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from tnlib import CP, SVD, ArgumentError, ArgumentTypeError, LowRank, TTMatrix, Tucker
from tnlib._validate import as_array, to_numpy
from tnlib_adapters.factors.factored_matrix import scale_name
from tnlib_adapters.factors.integers import IntegerFormat
from tnlib_adapters.transformers_plugin.integer_tensors import FewVectorProducts, dequantized


class Factors(NamedTuple):
    """Factors of a layer by name: its own parameters, or those of another module, which several layers can share."""

    shapes: Mapping[str, tuple[int, ...]]  # also where the parameters are packed integers
    formats: Mapping[str, IntegerFormat] = {}  # of the factors in integers
    parameters: Mapping[str, nn.Parameter] = {}  # factors and scales, to be registered in the layer
    home: nn.Module | None = None  # other module that holds the parameters
    stem: str = ""  # of their names there

    @classmethod
    def of_arrays(cls, arrays: Mapping[str, Any]) -> Factors:
        """Return copies of arrays as parameters, so that training does not change the arrays."""
        tensors = {name: torch.from_numpy(np.array(a)) for name, a in arrays.items()}
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        return cls(shapes, parameters={name: nn.Parameter(tensor) for name, tensor in tensors.items()})

    def only(self, part: str) -> Factors:
        """Return one of the factors of another module."""
        formats = {name: form for name, form in self.formats.items() if name == part}
        return self._replace(shapes={part: self.shapes[part]}, formats=formats)


class Multiplications(NamedTuple):
    """Numbers of multiplications of the two ways to apply a layer."""

    per_row: int  # factor by factor
    forming: int  # to multiply the factors out, once


class FactoredLinear(nn.Module, ABC):
    """The layer :math:`y = x W + b` with W held as factors; weights act on rows, W is (in_features, out_features).

    Build one with `from_value`. The factors are parameters, and so is `bias` unless it is None.

    Examples
    --------
    >>> import numpy as np, tnlib
    >>> FactoredLinear.from_value(tnlib.svd(np.ones((6, 4), np.float32)).value)
    ContractedLinear(in_features=6, out_features=4, parameters=10)
    """

    bias: nn.Parameter | None
    _kinds: ClassVar[dict[type, Any]] = {}  # format -> class whose `of` builds a layer from it

    def __init_subclass__(cls, formats: Sequence[type] = ()) -> None:
        super().__init_subclass__()
        FactoredLinear._kinds.update(dict.fromkeys(formats, cls))

    def __init__(self, factors: Factors, features: tuple[int, int]) -> None:
        super().__init__()
        self.in_features, self.out_features = features
        # a module in a tuple is not registered as a submodule: its parameters are listed once, in `home`
        self._home = () if factors.home is None else (factors.home,)
        self._names = {part: factors.stem + part for part in factors.shapes}
        self._shapes, self._formats = dict(factors.shapes), dict(factors.formats)
        self._products = FewVectorProducts()
        for name, parameter in factors.parameters.items():
            self.register_parameter(name, parameter)
        self.register_parameter("bias", None)

    @staticmethod
    def from_value(
        value: LowRank | SVD | TTMatrix | Tucker | CP,
        *,
        inputs: Sequence[int] | None = None,
        bias: Any = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> FactoredLinear:
        """Return the layer that multiplies rows by a factored matrix.

        Parameters
        ----------
        value
            A `LowRank`, `SVD` or `TTMatrix` of shape (in, out); a `Tucker` or `CP` of any legs.
        inputs
            For a Tucker or CP: the input legs, by default the first one. The others are outputs, in order; several legs
            are one feature axis in C order.
        bias
            (out,), or None.
        dtype, device
            Dtype and device of the parameters, by default the value's dtype and the CPU.

        Raises
        ------
        ArgumentError, ArgumentTypeError
            If `value` is of another format, or `inputs` or `bias` do not fit it.

        Examples
        --------
        >>> import numpy as np, tnlib, torch
        >>> value = tnlib.LowRank(np.ones((6, 1)), np.ones((1, 4)))
        >>> layer = FactoredLinear.from_value(value, dtype=torch.float32)
        >>> layer(torch.ones(2, 6)).shape, sum(p.numel() for p in layer.parameters())
        (torch.Size([2, 4]), 10)
        """
        kind = FactoredLinear._kinds.get(type(value))
        if kind is None:
            raise ArgumentTypeError(
                "FactoredLinear.from_value: value must be a LowRank, SVD, TTMatrix, Tucker or CP, got "
                f"{type(value).__name__}; decompose the matrix first."
            )
        layer: FactoredLinear = kind.of(value, inputs)
        if bias is not None:
            bias_array = to_numpy("FactoredLinear.from_value", "bias", bias)
            if bias_array.shape != (layer.out_features,):
                raise ArgumentError(
                    f"FactoredLinear.from_value: bias must have shape ({layer.out_features},), got {bias_array.shape}; "
                    "one number per output."
                )
            vector = torch.as_tensor(as_array("FactoredLinear.from_value", "bias", bias_array).copy())
            layer.bias = nn.Parameter(vector.to(layer.like().dtype))
        return layer.to(device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Return :math:`x W + b`, for x of shape (..., in_features)."""
        self.check(x)
        cost, rows = self.cost(), x.numel() // self.in_features
        through = rows * cost.per_row <= cost.forming + rows * self.in_features * self.out_features
        y = self.product(x) if through else x @ self.matrix()
        bias = self.added()
        return y if bias is None else y + bias.to(y.dtype)

    def check(self, x: Tensor) -> None:
        """Raise `ArgumentError` for input of another width; a test of shapes only, which compilers remove."""
        if not isinstance(x, Tensor) or x.shape[-1:] != (self.in_features,):
            received = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise ArgumentError(
                f"{type(self).__name__}: x must be a tensor of shape (..., {self.in_features}), got {received}; "
                "the last axis holds the input features."
            )

    @abstractmethod
    def product(self, x: Tensor) -> Tensor:
        """Return x W, one factor after the other."""

    @abstractmethod
    def matrix(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return W of shape (in_features, out_features), multiplied out in the factors' dtype or in this one."""

    @abstractmethod
    def cost(self) -> Multiplications:
        """Return the numbers of multiplications per row, and for multiplying out."""

    def added(self, dtype: torch.dtype | None = None) -> Tensor | None:
        """Return the bias, from the factors if they include it, or None."""
        if "bias" in self._names:
            return self.part("bias", dtype)
        return self.bias if self.bias is None or dtype is None else self.bias.to(dtype)

    def part(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """Return one of the factors, dequantized if it is held in integers."""
        factor, scale = self.held(name)
        if scale is None:
            return factor if dtype is None else factor.to(dtype)
        values = self._kept(name)
        if values is not None and dtype is None:
            return values
        form, shape = self._formats[name], self._shapes[name]
        return dequantized(factor, scale, form, form.axes[0], shape[form.axes[0]], dtype or scale.dtype)

    @property
    def home(self) -> nn.Module:
        """The module that holds the parameters."""
        return self._home[0] if self._home else self

    def held(self, name: str) -> tuple[Tensor, Tensor | None]:
        """Return a factor as held, and its scales if it is in integers."""
        factor: Tensor = getattr(self.home, self._names[name])
        return factor, getattr(self.home, scale_name(self._names[name])) if name in self._formats else None

    def rows_of(self, name: str, ids: Tensor) -> Tensor:
        """Return the rows `ids` of a factor with two axes."""
        factor, scale = self.held(name)
        if scale is None:
            return nn.functional.embedding(ids, factor)
        form = self._formats[name]
        if form.axes == (1,):  # codes and scales of a row are side by side
            codes, scales = (nn.functional.embedding(ids, table) for table in (factor, scale))
            return dequantized(codes, scales, form, ids.ndim, self._shapes[name][1], scale.dtype)
        if not form.is_packed and len(scale) == 1:
            return nn.functional.embedding(ids, factor).to(scale.dtype) * scale
        return nn.functional.embedding(ids, self.part(name))

    def _kept(self, name: str) -> Tensor | None:
        """Return the dequantized copy of a part, if there is one."""
        return self.home._buffers.get(_values_name(self._names[name]))  # a failing getattr would take 3 us

    def keep_values(self, *, keep: bool = True) -> None:
        """Keep the dequantized values of integers in memory, or drop them; changes of scales do not reach them."""
        for name in self._formats:
            with torch.no_grad():
                values = self.part(name).contiguous() if keep else None
            self.home.register_buffer(_values_name(self._names[name]), values, persistent=False)

    def times(self, x: Tensor, name: str, *, transposed: bool = False) -> Tensor:
        """Return x times a part of two axes, or times its transpose."""
        factor, scale = self.held(name)
        if scale is not None and self._kept(name) is None:
            y = self._products.multiply(name, x, factor, scale, self._formats[name], transposed=transposed)
            if y is not None:
                return y
        values = self.part(name)
        return x @ (values.mT if transposed else values)

    def look_up(self, ids: Tensor) -> Tensor:
        """Return the rows W[ids], (..., out_features)."""
        return nn.functional.embedding(ids, self.matrix())

    def transposed_product(self, y: Tensor) -> Tensor:
        """Return :math:`y W^T`, for y of shape (..., out_features)."""
        return y @ self.matrix().mT  # ... [n], m [n]

    def to_dense(self) -> nn.Linear:
        """Return a dense layer of the same function, multiplied out in float64."""
        return as_dense(self, self.like())

    def like(self) -> Tensor:
        """Return a tensor with the dtype and device of the factors."""
        factor, scale = self.held(next(iter(self._names)))
        return factor if scale is None else scale

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        self._products.clear()  # of parameters that may move to another device, whose memory they would keep
        return super()._apply(*args, **kwargs)  # type: ignore[no-untyped-call]

    def settle(self) -> None:
        """Create buffers that are not in the state dict, after the factors were moved to their device."""

    def extra_repr(self) -> str:
        """Return sizes and number of parameters."""
        size = sum(math.prod(shape) for shape in self._shapes.values())
        return f"in_features={self.in_features}, out_features={self.out_features}, parameters={size}"


def _values_name(parameter: str) -> str:
    return f"{parameter}_values"


def as_dense(layer: Any, like: Tensor) -> nn.Linear:
    """Return a dense layer of the same function as a layer with a `matrix`, multiplied out in float64."""
    wide = torch.complex128 if like.is_complex() else torch.float64
    with torch.no_grad():
        bias = layer.added(wide)
        dense = nn.Linear(layer.in_features, layer.out_features, bias is not None, like.device, like.dtype)
        dense.weight.copy_(layer.matrix(wide).T)
        if bias is not None:
            dense.bias.copy_(bias)
    return dense


def no_numbers(like: Tensor) -> nn.Parameter:
    """Return an empty, untrained parameter for the name of a weight that is stored as factors."""
    return nn.Parameter(like.new_empty(0), requires_grad=False)
