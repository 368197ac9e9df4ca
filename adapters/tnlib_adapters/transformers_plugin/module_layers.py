"""Modules that hold factors outside the attention: linear layers, and tables of embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from tnlib import FileFormatError
from tnlib_adapters.factors.attention_factors import scale_name
from tnlib_adapters.factors.module_factors import PARTS
from tnlib_adapters.transformers_plugin.attention_layers import DenseLinear
from tnlib_adapters.transformers_plugin.factored_linear import FactoredLinear, LowRankLinear, no_numbers
from tnlib_adapters.transformers_plugin.interpolative_linear import InterpolativeLinear


class FactoredEmbedding(nn.Module):
    """Rows of left @ right, or of one matrix in int8, looked up by token."""

    def __init__(self, factors: FactoredLinear) -> None:
        super().__init__()
        # under names of its own, so that they stand where those of the table stood
        for name, parameter in factors.named_parameters(recurse=False):
            self.register_parameter(name, parameter)
        self.num_embeddings, self.embedding_dim = factors.in_features, factors.out_features

    def forward(self, ids: Tensor) -> Tensor:
        """Return the rows of these tokens."""
        first, scale = self._held(0)
        rows = nn.functional.embedding(ids, first)
        if scale is not None:
            rows = rows.to(scale.dtype) * scale
        return rows if len(self._parts) == 1 else rows @ self._wide(1)  # ... [r], [r] d

    def to_dense(self) -> nn.Embedding:
        """Return an ordinary table of the same rows."""
        whole = self._wide(0, torch.float64)
        whole = whole if len(self._parts) == 1 else whole @ self._wide(1, torch.float64)
        table = nn.Embedding(self.num_embeddings, self.embedding_dim, device=whole.device, dtype=self._like.dtype)
        with torch.no_grad():
            table.weight.copy_(whole)
        return table

    @property
    def _parts(self) -> tuple[str, ...]:
        return PARTS["low_rank" if hasattr(self, "left") else "dense"]

    @property
    def _like(self) -> Tensor:
        first, scale = self._held(0)
        return first if scale is None else scale

    def _held(self, k: int) -> tuple[Tensor, Tensor | None]:
        name = self._parts[k]
        return cast(Tensor, getattr(self, name)), getattr(self, scale_name(name), None)

    def _wide(self, k: int, dtype: torch.dtype | None = None) -> Tensor:
        factor, scale = self._held(k)
        if scale is None:
            return factor if dtype is None else factor.to(dtype)
        return factor.to(dtype or scale.dtype) * scale.to(dtype or scale.dtype)


def factored_module(described: Mapping[str, Any], original: nn.Module) -> nn.Module:
    """Return an empty module for these factors in the place of one that holds a weight; it keeps the bias."""
    weight = cast(Tensor, original.weight)
    scales = described.get("scales", {})
    if isinstance(original, nn.Embedding) and described["kind"] == "interpolative":
        raise FileFormatError(
            "from_pretrained: a table of embeddings must not be of kind 'interpolative' in config.json; compress again."
        )

    def empty(shape: list[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=weight.device)

    factors = {
        part: empty(shape, torch.int8 if part in scales else weight.dtype)
        for part, shape in described["shapes"].items()
    }
    made = _made(described, factors)
    for part, shape in scales.items():
        made.register_parameter(scale_name(part), nn.Parameter(empty(shape, weight.dtype)))
    made.bias = getattr(original, "bias", None)
    found: nn.Module = FactoredEmbedding(made) if isinstance(original, nn.Embedding) else made
    found.register_parameter("weight", no_numbers(weight))
    return found


def _made(described: Mapping[str, Any], factors: Mapping[str, Tensor]) -> FactoredLinear:
    if described["kind"] == "interpolative":
        rows = described["rows"]
        return InterpolativeLinear(factors, rows, len(factors["left"]) + len(rows))
    return LowRankLinear(factors) if described["kind"] == "low_rank" else DenseLinear(factors, "whole")
