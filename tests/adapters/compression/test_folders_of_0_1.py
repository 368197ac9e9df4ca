"""Folders that tnlib 0.1 compressed still load: the section of config.json as it was written then."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

transformers = pytest.importorskip("transformers")
torch = pytest.importorskip("torch")
pytest.importorskip("tnlib_adapters.transformers_plugin")

from checkpoint_folders import change_config, change_tensors  # noqa: E402
from oracles import assert_close, normal  # noqa: E402
from tnlib_adapters import open_checkpoint  # noqa: E402

D, WIDE, HEADS = 12, 48, 3
LAYER = "encoder.layer.0"

# written by 0.1.0; the second layer has whole weights
SECTION: dict[str, Any] = json.loads("""
{
  "quant_method": "tnlib", "version": 1, "method": "calibrated",
  "layers": [
    [
      {"kind": "heads", "of": "qk", "shapes": {"left": [13, 5], "right": [5, 13]}, "ranks": [2, 3, 0]},
      {"kind": "interpolative", "of": "v", "shapes": {"left": [9, 3], "right": [3, 12]}, "ranks": [],
       "rows": [0, 4, 7], "biases": "v", "scales": {"left": [1, 3], "right": [3, 1]}},
      {"kind": "dense", "of": "o", "shapes": {"weight": [12, 12], "bias": [12]}, "ranks": []}
    ],
    []
  ],
  "modules": {
    "encoder.layer.0.intermediate.dense":
      {"kind": "interpolative", "shapes": {"left": [8, 4], "right": [4, 48]}, "rows": [1, 2, 3, 11]},
    "encoder.layer.0.output.dense":
      {"kind": "dense", "shapes": {"whole": [48, 12]}, "scales": {"whole": [1, 12]}},
    "embeddings.word_embeddings": {"kind": "low_rank", "shapes": {"left": [20, 3], "right": [3, 12]}}
  }
}
""")


def with_unit_rows(left: np.ndarray, rows: list[int]) -> np.ndarray:
    whole = np.zeros((len(left) + len(rows), len(rows)))
    whole[rows] = np.eye(len(rows))
    whole[[k for k in range(len(whole)) if k not in rows]] = left
    return whole


@pytest.fixture
def folder(tmp_path: Path) -> tuple[Path, dict[str, np.ndarray]]:
    sizes = {"hidden_size": D, "num_attention_heads": HEADS, "intermediate_size": WIDE, "num_hidden_layers": 2}
    path = tmp_path / "old"
    transformers.BertModel(transformers.BertConfig(vocab_size=20, **sizes)).save_pretrained(path)
    parts: dict[str, np.ndarray] = {}

    def change(tensors: dict[str, np.ndarray]) -> None:
        attention = f"{LAYER}.attention"
        for name in ("self.query", "self.key", "self.value", "output.dense"):
            del tensors[f"{attention}.{name}.bias"]
            tensors[f"{attention}.{name}.weight"] = np.empty(0, np.float32)
        for described in SECTION["layers"][0]:
            add(tensors, f"{attention}.tnlib.{described['of']}_", described)
        for name, described in SECTION["modules"].items():
            tensors[f"{name}.weight"] = np.empty(0, np.float32)
            add(tensors, f"{name}.", described)

    def add(tensors: dict[str, np.ndarray], start: str, described: dict[str, Any]) -> None:
        for k, (part, shape) in enumerate(described["shapes"].items()):
            values = normal(tuple(shape), np.float32, seed=len(parts) + k)
            if part in described.get("scales", {}):
                scale = np.abs(normal(tuple(described["scales"][part]), np.float32, seed=99)) / 100
                stored = np.rint(30 * values).clip(-127, 127).astype(np.int8)
                tensors[f"{start}{part}"], tensors[f"{start}{part}_scale"] = stored, scale
                values = stored * scale
            else:
                tensors[f"{start}{part}"] = values
            parts[f"{start.split('.')[-2]}.{start.split('.')[-1]}{part}"] = values.astype(np.float64)

    change_tensors(path, change)
    change_config(path, quantization_config=SECTION)
    return path, parts


def test_every_matrix_is_the_product_of_its_parts(folder: tuple[Path, dict[str, np.ndarray]]) -> None:
    path, parts = folder
    checkpoint = open_checkpoint(path)
    found = checkpoint.projections(0)
    left = with_unit_rows(parts["tnlib.v_left"], [0, 4, 7])
    assert_close(found.weights["v"], left @ parts["tnlib.v_right"], np.float32)
    assert_close(found.weights["o"], parts["tnlib.o_weight"], np.float32)
    assert_close(found.biases["o"], parts["tnlib.o_bias"], np.float32)
    assert not found.biases["v"].any()
    own = parts["tnlib.qk_left"][:, :2] @ parts["tnlib.qk_right"][:2]
    q, k = (np.vstack([found.weights[n], found.biases[n]])[:, :4] for n in "qk")
    assert_close(q @ k.T, own, np.float32)
    up = checkpoint.read(f"{LAYER}.intermediate.dense.weight")
    assert_close(up.T, with_unit_rows(parts["dense.left"], [1, 2, 3, 11]) @ parts["dense.right"], np.float32)
    assert_close(checkpoint.read(f"{LAYER}.output.dense.weight").T, parts["dense.whole"], np.float32)
    table = checkpoint.read("embeddings.word_embeddings.weight")
    assert_close(table, parts["word_embeddings.left"] @ parts["word_embeddings.right"], np.float32)


def test_descriptions_are_written_back_as_they_were(folder: tuple[Path, dict[str, np.ndarray]]) -> None:
    checkpoint = open_checkpoint(folder[0])
    assert checkpoint.factored is not None
    entries = [one.to_json() for one in checkpoint.factored]
    assert entries == [*SECTION["layers"][0], *SECTION["modules"].values()]


def test_transformers_computes_the_same_as_numpy(folder: tuple[Path, dict[str, np.ndarray]]) -> None:
    model = transformers.AutoModel.from_pretrained(folder[0]).eval()
    checkpoint = open_checkpoint(folder[0])
    with torch.no_grad():
        layer = model.encoder.layer[0]
        x = torch.from_numpy(normal((5, D), np.float32, seed=3))
        up = checkpoint.read(f"{LAYER}.intermediate.dense.weight")
        bias = layer.intermediate.dense.bias.numpy()
        assert_close(layer.intermediate.dense(x).numpy(), x.numpy() @ up.T + bias, np.float32, factor=256)
        table = checkpoint.read("embeddings.word_embeddings.weight")
        assert_close(model.embeddings.word_embeddings(torch.arange(5)).numpy(), table[:5], np.float32, factor=256)
        v = checkpoint.projections(0)
        found = layer.attention.self.value(x).numpy()
        assert_close(found, x.numpy() @ v.weights["v"] + v.biases["v"], np.float32, factor=256)
