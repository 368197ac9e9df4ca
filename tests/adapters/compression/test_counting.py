"""Numbers of a checkpoint, counted in the heads of its files: those that its layers hold once they are read."""

from __future__ import annotations

from typing import Any

import pytest
from tnlib_adapters import builtin_path, open_checkpoint
from tnlib_adapters.compression.compressed_part import compressed_weights, stored_bytes
from tnlib_adapters.factors.model_weights import count_parameters

pytest.importorskip("torch")
MODELS = pytest.importorskip("transformers_models").MODELS


@pytest.mark.parametrize("name", ["builtin", *MODELS])
def test_the_attention_of_every_architecture(name: str, saved: Any) -> None:
    checkpoint = open_checkpoint(builtin_path() if name == "builtin" else saved(name)[1])
    weights = compressed_weights(checkpoint, "attention")
    numbers = [count_parameters(own for own in weights if own.group == k) for k in range(checkpoint.n_layers)]
    for layer, n in enumerate(numbers):
        read = checkpoint.projections(layer)
        if "deepseek" in name:  # maps to and from latent vectors, of fewer numbers than their products
            stored = checkpoint.folder.tensors.items()
            assert n == sum(
                info.size for key, info in stored if f"layers.{layer}.self_attn" in key and "norm" not in key
            )
        else:
            assert n == sum(a.size for a in (*read.weights.values(), *read.biases.values()))
    sizes, n_other = stored_bytes(checkpoint, weights)
    assert sizes["attention"] + sizes.get("matrices", 0) == 4 * sum(numbers)
    assert sizes["other"] == 4 * n_other
    assert sum(numbers) + n_other == sum(info.size for info in checkpoint.folder.tensors.values())
