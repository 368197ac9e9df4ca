"""The model of a LoRA adapter: its base with W + (alpha / r) B A in place of every adapted weight W."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tnlib import FileFormatError, MissingFileError
from tnlib._typing import Array
from tnlib_adapters.architectures.wiring import Linear
from tnlib_adapters.checkpoints.checkpoint import Checkpoint, open_checkpoint
from tnlib_adapters.checkpoints.modified import wide, with_tensors
from tnlib_adapters.compression.adapter.checkpoint_difference import adaptable_weights
from tnlib_adapters.files.json_file import JsonFile
from tnlib_adapters.files.tensor_file import TensorInfo, read_header

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_BASE = "base_model_name_or_path"
# Other values change the product, the layers it is added to, or the tokens it applies to.
_SETTINGS = {
    "peft_type": "LORA",
    "use_dora": False,
    "use_rslora": False,
    "bias": "none",
    "layer_replication": None,
    "alora_invocation_tokens": None,
}
_INITIAL = (True, False, "gaussian", "eva")  # other initialisations subtract the first B A from the base


def is_adapter(folder: str | os.PathLike[str]) -> bool:
    """Test if a folder holds an adapter and no model."""
    if not isinstance(folder, str | os.PathLike):  # `open_checkpoint` refuses it
        return False
    return (Path(folder) / CONFIG).is_file() and not (Path(folder) / "config.json").exists()


def open_adapted(folder: str | os.PathLike[str]) -> Checkpoint:
    """Return the base of an adapter from `extract_adapter` with the adapter merged; weights are computed on reading.

    Raises
    ------
    FileFormatError
        If the adapter is of another kind, or does not fit its base.
    MissingFileError
        If the factors are missing, or the base is not where adapter_config.json says.
    """
    file = JsonFile("evaluate", Path(folder) / CONFIG, "name an adapter from `tnlib adapter`")
    settings = _read_settings(file)
    base = _open_base(file, settings)
    weights = adaptable_weights(base)
    pairs = _read_pairs(Path(folder) / WEIGHTS, base, weights)
    alphas = _alphas(file, settings, pairs)
    changes = {
        weights[module].weight: partial(_merged, base, weights[module], pair, alphas[module] / pair[0].shape[0])
        for module, pair in pairs.items()
    }
    return with_tensors(base, changes)


def _read_settings(file: JsonFile) -> dict[str, Any]:
    """Return adapter_config.json of a plain LoRA adapter."""
    settings = file.as_object(file.read())
    for key, value in _SETTINGS.items():
        if settings.get(key, value) != value:
            file.refuse(key, repr(value), settings[key])
    initial = settings.get("init_lora_weights", True)
    if initial not in _INITIAL:
        file.refuse("init_lora_weights", f"one of {_INITIAL}", initial)
    return settings


def _open_base(file: JsonFile, settings: Mapping[str, Any]) -> Checkpoint:
    path = file.as_string(settings.get(_BASE) or None, _BASE)
    try:
        base = open_checkpoint(path)
    except MissingFileError as problem:
        raise MissingFileError(
            f"evaluate: {_BASE} of {file.path} must name the folder of the base, got {path!r} ({problem}); write its "
            "path there."
        ) from None
    if base.factored is not None:
        raise FileFormatError(
            f"evaluate: the base of {file.path} must hold whole weights, got the factors of {base.folder.path}; "
            "compress it with layout='dense'."
        )
    return base


def _read_pairs(
    file: Path, base: Checkpoint, weights: Mapping[str, Linear]
) -> dict[str, tuple[TensorInfo, TensorInfo]]:
    """Return A (r, in) and B (out, r) by module."""
    if not file.is_file():
        raise MissingFileError(
            f"evaluate: the factors of an adapter must be in {WEIGHTS}, found none in {file.parent}; save the adapter "
            "with safetensors."
        )
    factors: dict[str, dict[str, TensorInfo]] = {}
    for name, info in read_header(file)[0].items():
        module, _, part = name.removeprefix("base_model.model.").rpartition(".lora_")
        if module not in weights or part not in ("A.weight", "B.weight"):
            raise FileFormatError(
                f"evaluate: {file} must adapt weights of attention and feed-forward layers of {base.folder.path}, got "
                f"{name!r}; name the adapter of this base."
            )
        factors.setdefault(module, {})[part[0]] = info
    if not factors:
        raise FileFormatError(f"evaluate: {file} must hold factors of at least one weight, got none; extract it again.")
    return {
        module: _checked_pair(file, own, base.folder.tensors[weights[module].weight], weights[module])
        for module, own in factors.items()
    }


def _checked_pair(
    file: Path, factors: Mapping[str, TensorInfo], weight: TensorInfo, linear: Linear
) -> tuple[TensorInfo, TensorInfo]:
    """Return A and B, if their shapes are those of the weight."""
    n_out, n_in = weight.shape if linear.stored == "out_in" else weight.shape[::-1]
    shapes = {part: factors[part].shape if part in factors else () for part in "AB"}
    rank = shapes["A"][0] if shapes["A"] else 0
    if rank < 1 or shapes != {"A": (rank, n_in), "B": (n_out, rank)}:
        raise FileFormatError(
            f"evaluate: {file} must hold lora_A of shape (r, {n_in}) and lora_B of shape ({n_out}, r) for "
            f"{weight.name!r}, got {shapes['A'] or 'none'} and {shapes['B'] or 'none'}; name the adapter of this base."
        )
    return factors["A"], factors["B"]


def _alphas(file: JsonFile, settings: Mapping[str, Any], modules: Collection[str]) -> dict[str, float]:
    """Return alpha of every module; as in peft, the first pattern counts that matches the end of its name."""
    patterns = file.as_object(settings.get("alpha_pattern") or {}, "alpha_pattern")
    for value in (settings.get("lora_alpha"), *patterns.values()):
        if type(value) not in (int, float):
            file.refuse("lora_alpha and alpha_pattern", "numbers", value)
    try:
        tests = [(re.compile(rf"(.*\.)?({pattern})$"), float(value)) for pattern, value in patterns.items()]
    except re.error as problem:
        file.refuse("alpha_pattern", "regular expressions", str(problem))
    alpha = float(settings["lora_alpha"])
    return {module: next((own for test, own in tests if test.match(module)), alpha) for module in modules}


def _merged(base: Checkpoint, linear: Linear, pair: tuple[TensorInfo, TensorInfo], scale: float) -> Array:
    """Return an adapted weight as stored, in float64."""
    a, b = (factor.read_finite().astype(np.float64) for factor in pair)
    change: Array = scale * b @ a  # out [r], [r] in
    return wide(base, linear.weight) + (change if linear.stored == "out_in" else change.T)
