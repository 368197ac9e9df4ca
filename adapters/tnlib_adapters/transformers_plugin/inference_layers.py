"""Factored layers as ordinary linear layers, for fast inference."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from tnlib_adapters.factors.projections import join
from tnlib_adapters.transformers_plugin.contracted_linear import LOW_RANK, ContractedLinear
from tnlib_adapters.transformers_plugin.factored_linear import FactoredLinear
from tnlib_adapters.transformers_plugin.factored_modules import FactoredEmbedding, SideBySide
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

    Examples
    --------
    >>> import os, tempfile, tnlib_adapters, transformers
    >>> folder = os.path.join(tempfile.mkdtemp(), "smaller")
    >>> _ = tnlib_adapters.compress(
    ...     tnlib_adapters.builtin_path("llama"), folder, tnlib_adapters.Budget(keep=0.5)
    ... )
    >>> model = use_linear_layers(transformers.AutoModelForCausalLM.from_pretrained(folder))
    >>> model.model.layers[0].mlp.up_proj
    Sequential(
      (0): Linear(in_features=128, out_features=32, bias=False)
      (1): Linear(in_features=32, out_features=320, bias=False)
    )
    """
    for kind in (SideBySide, FactoredLinear):  # first those that contain others
        layers: list[Any] = [(name, module) for name, module in model.named_modules() if isinstance(module, kind)]
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

    def __init__(self, products: Sequence[_TwoLayers], groups: tuple[int, int] | None) -> None:
        super().__init__()
        self.groups = groups
        biases = [p.left.new_zeros(len(p.right)) if p.inner_bias is None else p.inner_bias for p in products]
        has_bias = any(product.inner_bias is not None for product in products)
        self.ranks = [len(product.right) for product in products]
        self.first = _layer(torch.cat([p.left for p in products], 1), torch.cat(biases) if has_bias else None)
        self.second = nn.ModuleList([_layer(p.right, p.bias) for p in products])

    def forward(self, x: Tensor) -> Tensor:
        """Return all projections of x."""
        inner = self.first(x).split(self.ranks, -1)
        parts: list[Tensor] = [linear(y) for linear, y in zip(self.second, inner, strict=True)]
        return join(parts, self.groups, torch.cat)


def _linear(layer: FactoredLinear | SideBySide) -> nn.Module:
    """Return the ordinary layers of the fewest multiplications."""
    parts = layer.layers if isinstance(layer, SideBySide) else [layer]
    products = [product for part in parts if (product := _products(part)) is not None]
    cost = sum(len(product.right) * (len(product.left) + product.right.shape[1]) for product in products)
    if len(products) < len(parts) or cost >= layer.in_features * layer.out_features:
        return layer.to_dense()
    if isinstance(layer, SideBySide):
        return _SharedInput(products, layer.groups) if layer.bias is None else layer.to_dense()
    ((left, inner_bias, right, bias),) = products
    return nn.Sequential(_layer(left, inner_bias), _layer(right, bias))


def _products(layer: FactoredLinear) -> _TwoLayers | None:
    """Return the factors of a low-rank layer, or None; zeros make its rank a multiple of `_VECTOR`."""
    inner_bias, bias = None, layer.added()
    if isinstance(layer, ContractedLinear) and layer.network == LOW_RANK:
        left = layer.part("left")
    elif isinstance(layer, InterpolativeLinear):
        left = layer.left_factor()
        if layer.has_bias_row:
            left, inner_bias, bias = left[:-1], left[-1], None
    else:
        return None
    right, pad = layer.part("right"), nn.functional.pad
    extra = _VECTOR * max(1, math.ceil(len(right) / _VECTOR)) - len(right)  # torch warns of layers without numbers
    inner_bias = None if inner_bias is None else pad(inner_bias, (0, extra))
    return _TwoLayers(pad(left, (0, extra)), inner_bias, pad(right, (0, 0, 0, extra)), bias)


def _layer(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """Return the layer x -> x weight + bias."""
    layer = nn.Linear(len(weight), weight.shape[1], bias is not None, device="meta")
    layer.weight = nn.Parameter(weight.detach().T.contiguous())
    layer.bias = cast(Any, None if bias is None else nn.Parameter(bias.detach().clone()))
    return layer
