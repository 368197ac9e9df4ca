"""A checkpoint folder: config.json and safetensors, single or sharded, checked, opened lazily, and written."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tnlib import ArgumentTypeError, FileFormatError, MissingFileError
from tnlib._validate import as_path
from tnlib_adapters.files.json_file import JsonFile
from tnlib_adapters.files.safetensors_file import Entry, TensorInfo, read_header, write_tensor_file

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
# Formats that hold Python pickles: opening one can run whatever its author wrote.
PICKLED = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
# The same weights in the formats of other libraries: they would be those of another model now. Below a folder such
# files belong to another part of the pipeline, such as a pooling layer, but for those of whole exports.
OTHER_WEIGHTS = (*PICKLED, ".safetensors", ".h5", ".msgpack", ".onnx", ".onnx_data", ".ot", ".gguf", ".tflite")
EXPORTS = ("onnx", "openvino", "coreml", "gguf")
NOTE = "> Compressed by tnlib"  # the first words that a compression puts on top of the model card, README.md
_FRONT_MATTER = re.compile(rb"(?:\xef\xbb\xbf)?---[ \t]*\r?\n(?:.*\n)*?---[ \t]*\r?(?:\n|\Z)")
_NOTE = re.compile(rb"\s*%b.*\n(?:>.*\n)*" % NOTE.encode())


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

    The errors are those of `open_checkpoint`: a file that is missing or damaged, pickled weights, no path.
    """
    folder = find_folder("open_checkpoint", "folder", path)
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


def path_text(path: Path) -> str:
    r"""Return a path as text for reports; bytes that are no UTF-8 are written as \xff.

    >>> path_text(Path("model"))
    'model'
    """
    return os.fsencode(path).decode("utf-8", "backslashreplace")


_HUB_NAME = re.compile(r"[A-Za-z0-9_][\w.-]*(/[A-Za-z0-9_][\w.-]*)?", re.ASCII)


def find_folder(function: str, name: str, path: Any, builtin: Sequence[str] = ()) -> Path:
    """Return the folder at a path, or, for the name of a model on the hub, its folder in the local cache.

    Messages state the function, the name of its argument, and `builtin`, other names that the caller accepts.
    """
    if hasattr(path, "save_pretrained"):
        raise ArgumentTypeError(
            f"{function}: {name} must be a path, got a {type(path).__name__} in memory; pass it to open_model, or "
            "save it first, with model.save_pretrained(folder)."
        )
    folder = as_path(function, name, path)
    if folder.is_dir():
        return folder
    if folder.exists():
        raise MissingFileError(
            f"{function}: {name} must be a folder, found the file {folder}; pass the folder that contains it, "
            f"{folder.parent}."
        )
    as_text, remedy = os.fsdecode(path), "check the path"
    if _HUB_NAME.fullmatch(as_text):  # no path such as ./model
        if cached := _in_hub_cache(as_text):
            return cached
        remedy += f", or name a model of the package, {' or '.join(map(repr, builtin))}" if builtin else ""
        remedy += f", or, for a model on the hub, download it first: hf download {as_text}"
    raise MissingFileError(f"{function}: {name} must exist, found no folder at {as_text}; {remedy}.")


def _in_hub_cache(name: str) -> Path | None:
    """Return the folder of a model in the local cache of huggingface_hub, without a request to the hub."""
    try:
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError
    except ModuleNotFoundError:
        return None
    try:
        config = try_to_load_from_cache(name, CONFIG)
    except HFValidationError:  # no possible name, such as "a--b"
        return None
    return Path(config).parent if isinstance(config, str) else None


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
    if converted := sorted(file.name for file in folder.glob("*.gguf")):
        raise FileFormatError(
            f"open_checkpoint: {folder} must hold {WEIGHTS} or {INDEX}, found {converted[0]}, which llama.cpp reads; "
            "the report of `compress` beside it has the error on held-out text."
        )
    raise FileFormatError(f"open_checkpoint: {folder} must hold {WEIGHTS} or {INDEX}, found neither; check the path.")


def _read_json(file: Path, advice: str) -> dict[str, Any]:
    if not file.is_file():
        raise MissingFileError(f"open_checkpoint: found no {file.name} in {file.parent}; {advice}.")
    return JsonFile("open_checkpoint", file, advice).read()


def write_folder(
    source: Folder,
    tensors: Mapping[str, Sequence[Entry]],
    config: Mapping[str, Any],
    out: Path,
    *,
    skip: Container[str] = (),
) -> Iterator[tuple[int, int]]:
    """Write a checkpoint folder into the empty folder `out`, and yield (tensors written, all tensors) as it goes.

    `tensors` are those of every file, by its name; files without any are not written. Metadata and other files are
    copied from `source`, but for those at its top whose names are in `skip`.
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
    copy_other_files(source, out, skip)


def copy_other_files(source: Folder, out: Path, skip: Container[str]) -> None:
    """Copy the files that are not of the weights into `out`, see `other_files`."""
    for path in other_files(source, skip)[0]:
        target = out / path.relative_to(source.path)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)


def other_files(source: Folder, skip: Container[str]) -> tuple[list[Path], list[Path]]:
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


# ------------------------------------------------------------------------------------------------------ model card


def split_card(card: bytes) -> tuple[bytes, bytes]:
    r"""Return the YAML front matter of a model card, and the rest without the note.

    >>> split_card(b"> Compressed by tnlib, which ...\n> It loads ...\n\n# Model\n")
    (b'', b'\n# Model\n')
    """
    front = _FRONT_MATTER.match(card)
    head, body = (front[0].rstrip() + b"\n\n", card[front.end() :]) if front else (b"", card)
    note = _NOTE.match(body)
    return head, body[note.end() :] if note else body


def without_note(card: bytes) -> bytes:
    """Return a model card without the note."""
    head, body = split_card(card)
    return head + body.lstrip(b"\r\n")
