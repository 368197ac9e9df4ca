"""Factored layers as ordinary linear layers, for fast inference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from tnlib_adapters.transformers_plugin.contracted_linear import LOW_RANK, ContractedLinear
from tnlib_adapters.transformers_plugin.factored_linear import FactoredLinear, as_dense
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
