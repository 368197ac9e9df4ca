"""Ordinary linear layers in place of factored ones, for inference and export."""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor, nn

from tnlib_adapters.transformers_plugin.factored_linear import FactoredLinear, LowRankLinear, as_dense
from tnlib_adapters.transformers_plugin.factored_modules import FactoredEmbedding, SideBySide
from tnlib_adapters.transformers_plugin.interpolative_linear import InterpolativeLinear

_VECTOR = 8  # ranks that are no multiples of it cost a product of many rows up to 40 % more


def use_linear_layers(model: nn.Module) -> nn.Module:
    """Replace the factored layers of a loaded model by ordinary linear layers, and return it.

    A low-rank weight becomes two linear layers, unless a dense one takes as few multiplications; every other kind
    becomes a dense one. Integers are dequantized. Factored embeddings and unembeddings stay. The model computes the
    same and can be exported, but not saved as a folder of factors.

    Parameters
    ----------
    model
        Model loaded by `from_pretrained`; its modules are replaced.
    """
    for name, module in list(model.named_modules()):
        if not isinstance(module, FactoredLinear | SideBySide):
            continue
        parent, _, leaf = name.rpartition(".")
        if isinstance(model.get_submodule(parent), nn.ModuleList):  # of projections side by side, replaced already
            continue
        setattr(model.get_submodule(parent), leaf, _linear(module))
    for module in list(model.modules()):
        if hasattr(module, "tnlib"):
            del module.tnlib
    embeddings = (module for module in model.modules() if isinstance(module, FactoredEmbedding))
    for embedding in embeddings:
        embedding.factors.keep_values()
    return model


def _linear(layer: FactoredLinear | SideBySide) -> nn.Module:
    if isinstance(layer, LowRankLinear) and type(layer) is LowRankLinear:
        return _cheapest(layer, layer.part("left"), layer.part("right"), None, layer.added())
    if isinstance(layer, InterpolativeLinear):
        rows, m = layer.left_factor(), layer.in_features
        inner = rows[m] if layer.has_bias_row else None
        outer = None if layer.has_bias_row else layer.added()
        return _cheapest(layer, rows[:m], layer.part("right"), inner, outer)
    like = layer.like() if isinstance(layer, FactoredLinear) else cast(FactoredLinear, layer.layers[0]).like()
    return as_dense(layer, like)


def _cheapest(
    layer: FactoredLinear, left: Tensor, right: Tensor, inner_bias: Tensor | None, bias: Tensor | None
) -> nn.Module:
    """Return x -> (x left + inner_bias) right + bias as two linear layers or a dense one."""
    (m, r), n = left.shape, right.shape[1]
    padded = r + -r % _VECTOR
    if padded * (m + n) >= m * n:
        return as_dense(layer, layer.like())
    rows, columns = left.new_zeros(padded, m), left.new_zeros(n, padded)
    rows[:r], columns[:, :r] = left.detach().T, right.detach().T
    offset = None if inner_bias is None else left.new_zeros(padded)
    if offset is not None and inner_bias is not None:
        offset[:r] = inner_bias.detach()
    return nn.Sequential(_layer(rows, offset), _layer(columns, bias))


def _layer(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta")
    layer.weight = nn.Parameter(weight)
    layer.bias = cast(Any, None if bias is None else nn.Parameter(bias.detach().clone()))
    return layer
