"""Safetensors files and checkpoint folders made by hand, right or wrong on purpose; no framework."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
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
