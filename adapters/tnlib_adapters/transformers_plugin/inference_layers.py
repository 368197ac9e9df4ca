"""Fast inference of factored layers: as ordinary linear layers, or by torch's kernels for packed integers.

The kernels multiply bfloat16 by packed weights on the CPU. They dequantize in registers. One row of a 2048 x 2048
matrix takes 0.31 (int8) and 0.38 (int4) of the time of the product in bfloat16, because fewer bytes are read; 8 rows
take the same time, more take longer. Up to 16 rows take at most half of the time of dequantization and product. In
float32 the same operations have no vectorised code: they take 7 to 80 times as long as the product.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from tnlib import ArgumentError, ArgumentTypeError
from tnlib_adapters.factors.integers import IntegerFormat
from tnlib_adapters.transformers_plugin.contracted_linear import LOW_RANK, ContractedLinear
from tnlib_adapters.transformers_plugin.factored_linear import FactoredLinear, as_dense, unpacked
from tnlib_adapters.transformers_plugin.factored_modules import FactoredEmbedding, SideBySide, join_projections
from tnlib_adapters.transformers_plugin.indexed_linear import InterpolativeLinear

_VECTOR = 8  # ranks that are no multiples of it cost a product of many rows up to 40 % more


def use_linear_layers(model: nn.Module) -> nn.Module:
    """Replace the factored layers of a loaded model by ordinary linear layers, and return it.

    A low-rank weight becomes two linear layers, unless a dense one takes as few multiplications; queries, keys and
    values of one module share the first. Every other kind of factors becomes a dense layer. Integers are dequantized.
    Factored embeddings stay. The model computes the same, faster, and takes more memory; it cannot be saved as a folder
    of factors any more.

    Parameters
    ----------
    model
        Model loaded by `from_pretrained`; its modules are replaced.
    """
    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, SideBySide)]
    inside = {id(part) for _, module in layers for part in module.layers}
    layers += [
        (name, cast(Any, module))
        for name, module in model.named_modules()
        if isinstance(module, FactoredLinear) and id(module) not in inside
    ]
    for name, layer in layers:
        model.set_submodule(name, _linear(layer))
    for module in list(model.modules()):
        if hasattr(module, "tnlib"):  # the parameters of the factors
            del module.tnlib
    for module in model.modules():
        if isinstance(module, FactoredEmbedding):
            module.factors.keep_values()
    return model


class _TwoLayers(NamedTuple):
    """x -> (x left + inner_bias) right + bias, for left (m, r) and right (r, n)."""

    left: Tensor
    inner_bias: Tensor | None
    right: Tensor
    bias: Tensor | None


class _SharedInput(nn.Module):
    """Products of one input with a common first layer, whose outputs are put together as those of one projection."""

    def __init__(self, products: Sequence[_TwoLayers], groups: int | None, d_head: int) -> None:
        super().__init__()
        self.groups, self.d_head = groups, d_head
        padded = [_padded(product) for product in products]
        biases = [p.left.new_zeros(len(p.right)) if p.inner_bias is None else p.inner_bias for p in padded]
        has_bias = any(product.inner_bias is not None for product in padded)
        self.ranks = [len(product.right) for product in padded]
        self.first = _layer(torch.cat([p.left for p in padded], 1), torch.cat(biases) if has_bias else None)
        self.second = nn.ModuleList([_layer(p.right, p.bias) for p in padded])

    def forward(self, x: Tensor) -> Tensor:
        """Return all projections of x."""
        inner = self.first(x).split(self.ranks, -1)
        return join_projections(
            [linear(y) for linear, y in zip(self.second, inner, strict=True)], self.groups, self.d_head
        )


def _linear(layer: FactoredLinear | SideBySide) -> nn.Module:
    """Return the ordinary layers of the fewest multiplications."""
    parts = [cast(FactoredLinear, part) for part in layer.layers] if isinstance(layer, SideBySide) else [layer]
    products = [product for part in parts if (product := _products(part)) is not None]
    costs = [_rank(product) * (len(product.left) + product.right.shape[1]) for product in products]
    if len(products) < len(parts) or sum(costs) >= layer.in_features * layer.out_features:
        return as_dense(layer, parts[0].like())
    if isinstance(layer, SideBySide) and layer.bias is None:
        return _SharedInput(products, layer.groups, layer.d_head)
    if isinstance(layer, SideBySide):
        return as_dense(layer, parts[0].like())
    left, inner_bias, right, bias = _padded(products[0])
    return nn.Sequential(_layer(left, inner_bias), _layer(right, bias))


def _products(layer: FactoredLinear) -> _TwoLayers | None:
    """Return the factors of a low-rank layer; None for another kind."""
    if isinstance(layer, ContractedLinear) and layer.network == LOW_RANK:
        return _TwoLayers(layer.part("left"), None, layer.part("right"), layer.added())
    if isinstance(layer, InterpolativeLinear):
        rows, m, right = layer.left_factor(), layer.in_features, layer.part("right")
        return (
            _TwoLayers(rows[:m], rows[m], right, None)
            if layer.has_bias_row
            else _TwoLayers(rows, None, right, layer.added())
        )
    return None


def _rank(product: _TwoLayers) -> int:
    rank = max(1, len(product.right))  # torch warns of layers without numbers
    return rank + -rank % _VECTOR


def _padded(product: _TwoLayers) -> _TwoLayers:
    """Return the products with zeros up to a rank that is a multiple of `_VECTOR`."""
    left, inner_bias, right, bias = product
    extra = _rank(product) - len(right)
    pad = nn.functional.pad
    inner_bias = None if inner_bias is None else pad(inner_bias, (0, extra))
    return _TwoLayers(pad(left, (0, extra)), inner_bias, pad(right, (0, 0, 0, extra)), bias)


def _layer(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """Return the layer x -> x weight + bias."""
    layer = nn.Linear(len(weight), weight.shape[1], bias is not None, device="meta")
    layer.weight = nn.Parameter(weight.detach().T.contiguous())
    layer.bias = cast(Any, None if bias is None else nn.Parameter(bias.detach().clone()))
    return layer


_MOST_ROWS = 16
_GROUP, _OUT = 64, 16  # multiples of the sizes that the kernels take


class PackedProduct(nn.Module):
    """x -> x W, for integers W (in, out): 8 bits with a scale per column or row, or 2 to 4 bits with groups of rows.

    Codes c of fewer than 4 bits are those of 4 bits, c + 8 - 2^(bits - 1): a value is (code - 8 + 1/2) scale. The
    kernel of 8 bits has scales of columns; scales of rows multiply x.

    >>> codes, scales = torch.ones(3, 2, dtype=torch.int8), torch.tensor([[0.5, 2.0]])
    >>> PackedProduct(codes, scales, IntegerFormat(8, axis=0))(torch.ones(1, 3, dtype=torch.bfloat16)).tolist()
    [[1.5, 6.0]]
    """

    codes: Tensor
    scales: Tensor
    row_scales: Tensor | None

    def __init__(self, codes: Tensor, scales: Tensor, form: IntegerFormat) -> None:
        super().__init__()
        self.n_in, self.n_out = codes.shape
        self.is_int8 = not form.is_packed
        pad_in, pad_out = -self.n_in % _GROUP, -self.n_out % _OUT
        weight = functional.pad(codes.T, (0, pad_in, 0, pad_out)).contiguous()  # out in
        half, by_row = scales.detach().to(torch.bfloat16), form.axes == (1,)
        by_column = functional.pad(half.new_ones(1, self.n_out) if by_row else half, (0, pad_out))
        if self.is_int8:
            packed_codes, kernel_scales = weight, by_column[0]
        else:
            n_groups = weight.shape[1] // _GROUP
            packed_codes = torch.ops.aten._convert_weight_to_int4pack_for_cpu(
                weight.int() + 8 - 2 ** (form.bits - 1), 1
            )
            rows = by_column.expand(n_groups, -1) if len(by_column) == 1 else by_column
            kernel_scales = torch.stack([rows, rows / 2], -1).contiguous()
        self.register_buffer("codes", packed_codes, persistent=False)
        self.register_buffer("scales", kernel_scales, persistent=False)
        self.register_buffer("row_scales", half[:, 0] if by_row else None, persistent=False)

    @staticmethod
    def holds(shape: tuple[int, ...], form: IntegerFormat) -> bool:
        """Test if there is a kernel for an array in this format."""
        if len(shape) != 2 or 0 in shape or len(form.axes) != 1:
            return False
        (axis,) = form.axes
        is_one_group = form.n_groups(shape[axis]) == 1
        if not form.is_packed:
            return is_one_group
        # torch has the operations since version 2.6
        has_kernel = form.bits <= 4 and hasattr(torch.ops.aten, "_weight_int4pack_mm_for_cpu")
        return has_kernel and axis == 0 and (is_one_group or form.group == _GROUP)

    def takes(self, x: Tensor) -> bool:
        """Test if the kernel is the faster way for this input; it has no derivatives, and runs on the CPU."""
        is_small = x.dtype == self.scales.dtype == torch.bfloat16 and x[..., 0].numel() <= _MOST_ROWS
        return is_small and x.device.type == self.codes.device.type == "cpu" and not torch.is_grad_enabled()

    def forward(self, x: Tensor) -> Tensor:
        """Return x W."""
        rows = x.reshape(-1, self.n_in)
        rows = rows if self.row_scales is None else rows * self.row_scales
        rows = functional.pad(rows, (0, -self.n_in % _GROUP)).contiguous()
        y: Tensor
        if self.is_int8:
            y = torch.ops.aten._weight_int8pack_mm(rows, self.codes, self.scales)
        else:
            y = torch.ops.aten._weight_int4pack_mm_for_cpu(rows, self.codes, _GROUP, self.scales)
        return y[:, : self.n_out].reshape(*x.shape[:-1], self.n_out)


def use_packed_kernels(model: nn.Module) -> nn.Module:
    """Multiply few rows by factors in integers with torch's packed kernels, and return the model.

    For generation: a token is faster than with integers that are dequantized in every call, and than in bfloat16. The
    kernels need a copy of the integers in an order of their own, which is not saved and does not follow a change of the
    scales. They have no derivatives, and run where gradients are disabled, as by `generate` and `torch.no_grad`.
    Factors that no kernel takes are dequantized as before: those of 5 and 6 bits, TT-matrices, Tucker, CP and heads,
    embeddings and an unembedding that is tied to them.

    Parameters
    ----------
    model
        Model in bfloat16 on the CPU, loaded by `from_pretrained`, with factors in int8, or, from torch 2.6 on, in int4,
        int3 or int2.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        If the model is in another dtype or on another device, or no kernel takes any of its factors, or it is no
        module.

    Examples
    --------
    ::

        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        use_packed_kernels(model).generate(**tokenizer("One", return_tensors="pt"))
    """
    if not isinstance(model, nn.Module):
        raise ArgumentTypeError(
            f"use_packed_kernels: model must be a module of torch, got {type(model).__name__}; load it with "
            "from_pretrained."
        )
    layers = [module for module in model.modules() if isinstance(module, FactoredLinear) and _packable(module)]
    if not layers:
        raise ArgumentError(
            "use_packed_kernels: model must have weights or low-rank factors in integers of 8, or of 2 to 4 bits, got "
            'none; compress it with method "matrix" and store="int8", or use use_linear_layers.'
        )
    likes = [layer.like() for layer in layers]
    other = next((like for like in likes if like.dtype != torch.bfloat16 or like.device.type != "cpu"), None)
    if other is not None:
        raise ArgumentError(
            f"use_packed_kernels: model must be in torch.bfloat16 on the CPU, got {other.dtype} on {other.device}; "
            "load it with dtype=torch.bfloat16, or use use_linear_layers."
        )
    for layer in layers:
        _add_kernels(layer)
    return model


def _packable(layer: FactoredLinear) -> dict[str, tuple[tuple[int, ...], IntegerFormat]]:
    """Return shapes and formats of the parts that a kernel multiplies by."""
    parts = layer.multiplied_integers().items()
    return {name: (shape, form) for name, (shape, form) in parts if PackedProduct.holds(shape, form)}


def _add_kernels(layer: FactoredLinear) -> None:
    """Give the kernels of a layer's parts to the module of its parameters."""
    for name, (shape, form) in _packable(layer).items():
        codes, scales = layer.held(name)
        if form.is_packed:
            codes = unpacked(codes, form.bits)[..., : shape[0]].T  # out in -> in out
        layer.add_kernel(name, PackedProduct(codes.detach(), cast(Tensor, scales), form))
