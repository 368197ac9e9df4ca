"""The model of a LoRA adapter: its base with W + (alpha / r) B A in place of every adapted weight W."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tnlib import FileFormatError
from tnlib._typing import Array
from tnlib_adapters.architectures.wiring import Linear
from tnlib_adapters.checkpoints.checkpoint import Checkpoint, open_checkpoint
from tnlib_adapters.checkpoints.modified import wide, with_tensors
from tnlib_adapters.compression.adapter.checkpoint_difference import adaptable_weights
from tnlib_adapters.files.json_file import JsonFile
from tnlib_adapters.files.tensor_file import TensorInfo, read_header

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def is_adapter(folder: str | os.PathLike[str]) -> bool:
    """Test if a folder holds an adapter and no model."""
    return (Path(folder) / CONFIG).is_file() and not (Path(folder) / "config.json").exists()


def open_adapted(folder: str | os.PathLike[str]) -> Checkpoint:
    """Return the base of an adapter from `extract_adapter` with the adapter merged; weights are computed on reading.

    Raises
    ------
    FileFormatError
        If the adapter is of another kind, or does not fit its base.
    MissingFileError
        If the base is not where adapter_config.json says.
    """
    file = JsonFile("evaluate", Path(folder) / CONFIG, "name an adapter from `tnlib adapter`")
    settings = file.as_object(file.read())
    expected = {"peft_type": "LORA", "use_dora": False, "use_rslora": False, "bias": "none"}
    for key, value in expected.items():
        if settings.get(key, value) != value:
            file.refuse(key, repr(value), settings[key])
    base = open_checkpoint(settings.get("base_model_name_or_path") or "")
    weights, factors = adaptable_weights(base), read_header(Path(folder) / WEIGHTS)[0]
    changes = {}
    for name in sorted(factors):
        module, _, part = name.removeprefix("base_model.model.").rpartition(".lora_")
        if module not in weights or part not in ("A.weight", "B.weight"):
            raise FileFormatError(
                f"evaluate: {factors[name].file} must adapt weights of attention and feed-forward layers of "
                f"{base.folder.path}, got {name!r}; name the adapter of this base."
            )
        if part == "A.weight":
            right = factors.get(name.replace(".lora_A.", ".lora_B."))
            pair = _checked_pair(factors[name], right, base.folder.tensors[weights[module].weight], weights[module])
            scale = _alpha(settings, module) / pair[0].shape[0]
            changes[weights[module].weight] = partial(_merged, base, weights[module], pair, scale)
    return with_tensors(base, changes)


def _checked_pair(
    a: TensorInfo, b: TensorInfo | None, weight: TensorInfo, linear: Linear
) -> tuple[TensorInfo, TensorInfo]:
    """Return A (r, in) and B (out, r), if their shapes are those of the weight."""
    shape = weight.shape if linear.stored == "out_in" else weight.shape[::-1]
    if b is None or len(a.shape) != 2 or a.shape[0] < 1 or (*b.shape, *a.shape) != (shape[0], a.shape[0], *a.shape):
        actual = "no lora_B" if b is None else f"{b.shape} and {a.shape}"
        raise FileFormatError(
            f"evaluate: {a.file} must hold factors of shapes ({shape[0]}, r) and (r, {shape[1]}) for {weight.name!r}, "
            f"got {actual}; name the adapter of this base."
        )
    return a, b


def _alpha(settings: dict[str, Any], module: str) -> float:
    return float((settings.get("alpha_pattern") or {}).get(module, settings.get("lora_alpha", 1)))


def _merged(base: Checkpoint, linear: Linear, pair: tuple[TensorInfo, TensorInfo], scale: float) -> Array:
    """Return an adapted weight as stored, in float64."""
    a, b = (factor.read_finite().astype(np.float64) for factor in pair)
    change: Array = scale * b @ a  # out [r], [r] in
    return wide(base, linear.weight) + (change if linear.stored == "out_in" else change.T)
