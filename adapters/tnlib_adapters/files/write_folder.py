"""Write a checkpoint folder: tensors into the files they came in, their index, config.json, and all small files."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tnlib_adapters.files.folder import CONFIG, INDEX, PICKLED, Folder
from tnlib_adapters.files.tensor_file import Entry, write_tensor_file

# The same weights in the formats of other libraries: they would be those of another model now. Below a folder such
# files belong to another part of the pipeline, such as a pooling layer, but for those of whole exports.
OTHER_WEIGHTS = (*PICKLED, ".safetensors", ".h5", ".msgpack", ".onnx", ".onnx_data", ".ot", ".gguf", ".tflite")
EXPORTS = ("onnx", "openvino", "coreml", "gguf")


def write_folder(
    source: Folder,
    tensors: Mapping[str, Sequence[Entry]],
    config: Mapping[str, Any],
    out: Path,
    *,
    skip: Container[str] = (),
) -> Iterator[tuple[int, int]]:
    """Write a checkpoint folder into the empty folder `out`, and yield (tensors written, all tensors) as it goes.

    Parameters
    ----------
    source
        Folder whose metadata and other files come along.
    tensors
        File name -> the tensors in that file; files without any are not written.
    config
        Content of config.json.
    skip
        Names of files at the top of `source` that are not copied.
    """
    files = {name: entries for name, entries in tensors.items() if entries}
    total, done = sum(len(entries) for entries in files.values()), 0
    for name, entries in files.items():
        for _ in write_tensor_file(out / name, entries, source.metadata or {"format": "pt"}):
            done += 1
            yield done, total
    if len(files) > 1 or (source.path / INDEX).is_file():
        weight_map = {entry.name: name for name, entries in files.items() for entry in entries}
        size = sum(entry.n_bytes for entries in files.values() for entry in entries)
        _write_json(out / INDEX, {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))})
    _write_json(out / CONFIG, dict(config))
    for path in other_files(source, skip)[0]:
        target = out / path.relative_to(source.path)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)


def other_files(source: Folder, skip: Container[str] = ()) -> tuple[list[Path], list[Path]]:
    """Return the files that are copied as they are (tokenizer, modules, ...), and those that are left out.

    Left out are the same weights in other formats, and what is no regular file of this folder: links that lead out
    of it could copy private or endless files. The links of a hub's cache into its store of blobs are followed.
    """
    root = source.path
    rewritten = {*source.files, root / CONFIG, root / INDEX}
    inside = [root.resolve()]
    if root.resolve().parent.name == "snapshots":
        inside.append(root.resolve().parent.parent / "blobs")
    copied: list[Path] = []
    left_out: list[Path] = []
    for path in _visible_files(root, inside):
        if path in rewritten or (path.parent == root and path.name in skip):
            continue
        folders = path.relative_to(root).parts[:-1]
        same_weights = folders[0] in EXPORTS if folders else path.suffix in OTHER_WEIGHTS
        (left_out if same_weights or not path.is_file() or not _is_below(path, inside) else copied).append(path)
    return copied, left_out


def _visible_files(root: Path, inside: Sequence[Path]) -> Iterator[Path]:
    """Yield all files below `root` that are not hidden, each folder once, and links to folders that lead outside."""
    visited = set()
    for folder, names, files in os.walk(root, followlinks=True):
        here = Path(folder)
        visited.add(here.resolve())
        below = sorted(name for name in names if not name.startswith("."))
        names[:] = [name for name in below if _is_below(here / name, inside) and (here / name).resolve() not in visited]
        yield from (here / name for name in below if not _is_below(here / name, inside))
        yield from (here / name for name in sorted(files) if not name.startswith("."))


def _is_below(path: Path, folders: Sequence[Path]) -> bool:
    return any(path.resolve().is_relative_to(folder) for folder in folders)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
