"""Checkpoint folders and safetensors files made by hand in any dtype, right or wrong on purpose; no framework."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from compressed_folders import NUMPY
from oracles import normal
from safetensors.numpy import load_file, save_file
from tnlib_adapters.data import builtin_path

WEIGHTS, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"

Tensors = dict[str, np.ndarray]


def entry(dtype: Any, shape: Any, begin: Any, end: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def raw_file(file: Path, header: Any, data: bytes = b"", *, length: int | None = None) -> Path:
    """Write a safetensors file with any header, an object or its bytes, of any claimed length."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes((len(raw) if length is None else length).to_bytes(8, "little") + raw + data)
    return file


def builtin_copy(folder: Path) -> Path:
    return Path(shutil.copytree(builtin_path(), folder))


def change_config(folder: Path, **values: Any) -> None:
    """Set keys of config.json; `...` removes one."""
    config = json.loads((folder / CONFIG).read_text()) | values
    (folder / CONFIG).write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))


def change_tensors(folder: Path, change: Callable[[Tensors], Any]) -> None:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file({name: np.ascontiguousarray(a) for name, a in tensors.items()}, folder / WEIGHTS)


def shard(folder: Path) -> Path:
    """Split model.safetensors of a folder into two files and an index, and return the index."""
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    names = sorted(tensors)
    halves = {"one.safetensors": names[1::2], "two.safetensors": names[::2]}
    for file, held in halves.items():
        save_file({name: tensors[name] for name in held}, folder / file)
    weight_map = {name: file for file, held in halves.items() for name in held}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder / INDEX


Stored = Mapping[str, tuple[str, np.ndarray]]  # name -> (dtype of the file, values)


def stored_bytes(dtype: str, values: np.ndarray) -> bytes:
    if dtype == "BF16":  # the upper half: the values are made so that the lower one is empty
        return (values.astype("<f4").view("<u4") >> 16).astype("<u2").tobytes()
    return values.astype(NUMPY[dtype]).tobytes()


def representable(values: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "BF16":
        return (values.astype("<f4").view("<u4") & 0xFFFF0000).view("<f4")
    return values.astype(NUMPY[dtype])


def safetensors_file(file: Path, tensors: Stored, metadata: Mapping[str, str] | None = None) -> Path:
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    data = b""
    for name, (dtype, values) in tensors.items():
        raw = stored_bytes(dtype, values)
        header[name] = entry(dtype, list(values.shape), len(data), len(data) + len(raw))
        data += raw
    return raw_file(file, header, data)


def bert_tensors(d: int, n_layers: int, prefix: str = "", scale: float = 1.0) -> dict[str, np.ndarray]:
    tensors = {
        f"{prefix}embeddings.word_embeddings.weight": normal((5, d), seed=1),
        f"{prefix}embeddings.position_embeddings.weight": normal((4, d), seed=2),
    }
    for layer in range(n_layers):
        base = f"{prefix}encoder.layer.{layer}.attention"
        for k, module in enumerate(("self.query", "self.key", "self.value", "output.dense")):
            tensors[f"{base}.{module}.weight"] = scale * normal((d, d), seed=10 * layer + k + 3)
            tensors[f"{base}.{module}.bias"] = scale * normal((d,), seed=10 * layer + k + 7)
        tensors[f"{base}.output.LayerNorm.weight"] = normal((d,), seed=layer)
    return tensors


def gpt2_tensors(d: int, n_layers: int, prefix: str = "transformer.") -> dict[str, np.ndarray]:
    tensors = {f"{prefix}wte.weight": normal((5, d), seed=1), f"{prefix}wpe.weight": normal((4, d), seed=2)}
    for layer in range(n_layers):
        base = f"{prefix}h.{layer}.attn"
        tensors[f"{base}.c_attn.weight"] = normal((d, 3 * d), seed=10 * layer + 3)
        tensors[f"{base}.c_attn.bias"] = normal((3 * d,), seed=10 * layer + 4)
        tensors[f"{base}.c_proj.weight"] = normal((d, d), seed=10 * layer + 5)
        tensors[f"{base}.c_proj.bias"] = normal((d,), seed=10 * layer + 6)
        tensors[f"{prefix}h.{layer}.ln_1.weight"] = normal((d,), seed=layer)
    return tensors


KEYS = {
    "bert": ("hidden_size", "num_attention_heads", "num_hidden_layers"),
    "gpt2": ("n_embd", "n_head", "n_layer"),
}


def random_folder(
    folder: Path,
    model_type: str = "bert",
    *,
    d: int = 12,
    n_heads: int = 3,
    n_layers: int = 2,
    dtype: str = "F32",
    n_files: int = 1,
    metadata: Mapping[str, str] | None = None,
    **options: Any,
) -> Path:
    """Write a model with biases; with several files, neighbouring tensors lie in different ones."""
    make = bert_tensors if model_type == "bert" else gpt2_tensors
    tensors = make(d, n_layers, **options)
    stored = {name: (dtype, representable(values, dtype)) for name, values in tensors.items()}
    folder.mkdir()
    values = dict(zip(KEYS[model_type], (d, n_heads, n_layers), strict=True))
    (folder / CONFIG).write_text(json.dumps({"model_type": model_type, **values, "torch_dtype": "kept"}))
    if n_files == 1:
        safetensors_file(folder / WEIGHTS, stored, metadata)
        return folder
    weight_map = {name: f"part-{k % n_files}.safetensors" for k, name in enumerate(stored)}
    for file in sorted(set(weight_map.values())):
        held = {name: pair for name, pair in stored.items() if weight_map[name] == file}
        safetensors_file(folder / file, held, metadata)
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    return folder
