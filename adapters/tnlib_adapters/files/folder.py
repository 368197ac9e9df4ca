"""A checkpoint folder: config.json and safetensors, single or sharded, checked and opened lazily."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tnlib import FileFormatError, MissingFileError
from tnlib._validate import as_path
from tnlib_adapters.files.json_file import JsonFile
from tnlib_adapters.files.tensor_file import TensorInfo, read_header

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.txt", "vocab.json")  # one of them is there
# Formats that hold Python pickles: opening one can run whatever its author wrote.
PICKLED = (".bin", ".pt", ".pth", ".pkl", ".ckpt")


@dataclass(frozen=True)
class Folder:
    """The files of a checkpoint: what is where, with nothing read but headers."""

    path: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    files: tuple[Path, ...]  # the safetensors files, in order
    metadata: Mapping[str, str]


def open_folder(path: str | os.PathLike[str]) -> Folder:
    """Open a checkpoint folder, reading config.json and the headers of its safetensors files.

    Raises
    ------
    MissingFileError
        If the folder or its config.json is missing.
    FileFormatError
        If a file is not what it should be, or its weights are pickled.
    """
    folder = as_path("open_checkpoint", "folder", path)
    if not folder.is_dir():
        raise MissingFileError(f"open_checkpoint: folder must exist, found no folder at {folder}; check the path.")
    config = _read_json(folder / CONFIG, "every checkpoint folder has one; check the path")
    files, weight_map = _weight_files(folder)

    tensors: dict[str, TensorInfo] = {}
    metadata: dict[str, str] = {}
    for file in files:
        in_file, metadata = read_header(file)
        for name in in_file.keys() & tensors.keys():
            raise FileFormatError(
                f"open_checkpoint: tensor {name!r} must stand in one file, found it in {tensors[name].file.name} and "
                f"in {file.name}; remove one of them."
            )
        tensors |= in_file
    for name, file_name in weight_map.items():
        if name not in tensors or tensors[name].file.name != file_name:
            raise FileFormatError(
                f"open_checkpoint: {INDEX} places tensor {name!r} in {file_name}, which does not hold it; "
                "download the checkpoint again."
            )
    return Folder(folder, config, tensors, files, metadata)


def _weight_files(folder: Path) -> tuple[tuple[Path, ...], dict[str, str]]:
    """Return the safetensors files and, for a sharded checkpoint, its map from tensor to file name."""
    if (folder / WEIGHTS).is_file():
        return (folder / WEIGHTS,), {}
    if (folder / INDEX).is_file():
        weight_map = _read_json(folder / INDEX, "download it again").get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise FileFormatError(f"open_checkpoint: {folder / INDEX} must hold a weight_map; download it again.")
        for name, file_name in weight_map.items():
            if not isinstance(file_name, str) or Path(file_name).name != file_name or file_name in ("", ".", ".."):
                raise FileFormatError(
                    f"open_checkpoint: {INDEX} must name files inside its own folder, got {file_name!r} for tensor "
                    f"{name!r}; do not trust this checkpoint."
                )
        files = tuple(folder / name for name in sorted(set(weight_map.values())))
        for file in files:
            if not os.path.isfile(file):  # Path.is_file raises where a name is longer than the system allows
                raise FileFormatError(
                    f"open_checkpoint: {INDEX} names {file.name:.80}, which is missing from {folder}; download it too."
                )
        return files, weight_map
    pickled = sorted(file.name for file in folder.iterdir() if file.suffix in PICKLED)
    if pickled:
        raise FileFormatError(
            f"open_checkpoint: {folder} holds pickled weights ({pickled[0]}), which can run code when they are opened; "
            "convert them to safetensors first, for example with save_pretrained of transformers."
        )
    raise FileFormatError(f"open_checkpoint: {folder} must hold {WEIGHTS} or {INDEX}, found neither; check the path.")


def _read_json(file: Path, advice: str) -> dict[str, Any]:
    if not file.is_file():
        raise MissingFileError(f"open_checkpoint: found no {file.name} in {file.parent}; {advice}.")
    json_file = JsonFile("open_checkpoint", file, advice)
    return json_file.as_object(json_file.read())
