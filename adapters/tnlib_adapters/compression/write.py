"""A compressed checkpoint folder: factors, or multiplied-out weights, in the place of the attention's tensors."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from tnlib import ArgumentError
from tnlib._typing import Array
from tnlib_adapters.checkpoints.checkpoint import Checkpoint
from tnlib_adapters.compression.choices import PAGE, REPORT
from tnlib_adapters.compression.plan import Plan
from tnlib_adapters.factors.attention_factors import KEY, describe, expand, factor_name
from tnlib_adapters.factors.module_factors import MODULES, PARTS, describe_modules, is_rewritten, multiply_out, on_rows
from tnlib_adapters.factors.projections import module_names, put_together
from tnlib_adapters.files.bf16 import from_bf16
from tnlib_adapters.files.folder import CONFIG, INDEX, PICKLED
from tnlib_adapters.files.tensor_file import FLOATS, STORED_AS, Entry, encode, write_tensor_file

# The same weights in the formats of other libraries, uncompressed: to copy them would undo the compression. Below
# a folder they belong to another part of the pipeline, such as a pooling layer, but for those of whole exports.
OTHER_WEIGHTS = (*PICKLED, ".safetensors", ".h5", ".msgpack", ".onnx", ".onnx_data", ".ot", ".gguf", ".tflite")
EXPORTS = ("onnx", "openvino", "coreml", "gguf")


def write_checkpoint(
    checkpoint: Checkpoint, plan: Plan, layout: str, out: Path, *, in_int8: bool = False
) -> Iterator[tuple[str, int, int]]:
    """Write the compressed checkpoint into the empty folder `out`; yields (what, done, total) as it goes."""
    replaced = [*_replaced(checkpoint, plan, layout, in_int8), *_replaced_modules(checkpoint, plan, layout, in_int8)]
    new = {name: entries for layer in replaced for name, entries in layer.items()}
    names = {file: _entries(checkpoint, file, new) for file in checkpoint.folder.files}
    names = {file: entries for file, entries in names.items() if entries}  # a shard may have held nothing else
    total, done = sum(len(entries) for entries in names.values()), 0
    for file, entries in names.items():
        for _ in write_tensor_file(out / file.name, entries, checkpoint.folder.metadata or {"format": "pt"}):
            done += 1
            yield "writing tensors", done, total
    if len(names) > 1 or (checkpoint.folder.path / INDEX).is_file():
        _write_index(checkpoint, names, out)
    _write_config(checkpoint, plan, layout, out, in_int8)
    for path in other_files(checkpoint)[0]:
        target = out / path.relative_to(checkpoint.folder.path)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)


def other_files(checkpoint: Checkpoint) -> tuple[list[Path], list[Path]]:
    """Return the files that are copied as they are (tokenizer, modules, ...), and weights that are left out."""
    root = checkpoint.folder.path
    rewritten = {*checkpoint.folder.files, root / CONFIG, root / INDEX, root / REPORT, root / PAGE}
    copied: list[Path] = []
    left_out: list[Path] = []
    for path in _visible_files(root):
        if path in rewritten:
            continue
        folders = path.relative_to(root).parts[:-1]
        same_weights = folders[0] in EXPORTS if folders else path.suffix in OTHER_WEIGHTS
        (left_out if same_weights else copied).append(path)
    return copied, left_out


def _visible_files(root: Path) -> Iterator[Path]:
    """Yield all files below `root` that are not hidden, links to files and folders followed, each folder once."""
    seen = set()
    for folder, names, files in os.walk(root, followlinks=True):
        here = Path(folder)
        seen.add(here.resolve())
        names[:] = sorted(n for n in names if not n.startswith(".") and (here / n).resolve() not in seen)
        yield from (here / name for name in sorted(files) if not name.startswith("."))


def _replaced(checkpoint: Checkpoint, plan: Plan, layout: str, in_int8: bool) -> list[dict[str, list[Entry]]]:
    """Return, for each layer, the tensors that vanish, and with the first of them all those that take their place."""
    layers = []
    for layer, pieces in enumerate(plan.layers):
        if not pieces:
            continue
        found = expand(pieces, checkpoint.sizes)
        vanishing = []
        for module, names in module_names(checkpoint.architecture, checkpoint.prefix, layer).items():
            vanishing += [f"{module}.weight"] if set(names) <= found.weights.keys() else []
            vanishing += [f"{module}.bias"] if set(names) <= found.biases.keys() else []
        dtype = max((checkpoint.folder.tensors[name].dtype for name in vanishing), key=FLOATS.index)
        if layout == "dense":
            dense = put_together(checkpoint.architecture, checkpoint.sizes, checkpoint.prefix, layer, found)
            entries = [Entry(name, dtype, _encoded(name, values, dtype)) for name, values in dense.items()]
        else:
            row, prefix = checkpoint.architecture, checkpoint.prefix
            entries = [
                _entry(factor_name(row, prefix, layer, piece.of, part), values, None if own else dtype)
                for piece in pieces
                for part, (values, own) in piece.parts(in_int8=in_int8).items()
            ]
            # Under the old names of weights empty ones: what knows nothing of factors then refuses the folder, where it
            # would otherwise start with random attention.
            empty = np.empty(0, STORED_AS[dtype])
            entries += [Entry(name, dtype, empty) for name in vanishing if name.endswith(".weight")]
        layers.append({vanishing[0]: entries, **{name: [] for name in vanishing[1:]}})
    return layers


def _replaced_modules(checkpoint: Checkpoint, plan: Plan, layout: str, in_int8: bool) -> list[dict[str, list[Entry]]]:
    """Return the same for every matrix outside the attention that is not stored as it came."""
    found = []
    for piece in plan.modules:
        if not is_rewritten(piece, in_int8=in_int8):
            continue
        name = f"{checkpoint.prefix}{piece.of}"
        dtype = checkpoint.folder.tensors[f"{name}.weight"].dtype
        if layout == "dense":
            weight = multiply_out([piece.arrays[part] for part in PARTS[piece.kind]], piece.rows)
            stored = np.ascontiguousarray(on_rows(checkpoint.architecture, piece.of, weight))
            entries = [Entry(f"{name}.weight", dtype, _encoded(f"{name}.weight", stored, dtype))]
        else:
            parts = piece.parts(in_int8=in_int8).items()
            entries = [_entry(f"{name}.{part}", values, None if own else dtype) for part, (values, own) in parts]
            entries.append(Entry(f"{name}.weight", dtype, np.empty(0, STORED_AS[dtype])))
        found.append({f"{name}.weight": entries})
    return found


def _entry(name: str, values: Array, dtype: str | None) -> Entry:
    """Return a tensor in this dtype, or, in the one that it comes in, what int8 is made of."""
    if dtype is None:
        return Entry(name, "I8" if values.dtype == np.int8 else "F32", values)
    return Entry(name, dtype, _encoded(name, values, dtype))


def _encoded(name: str, values: Array, dtype: str) -> Array:
    """Return `values` as a dtype of safetensors stores them, refusing numbers beyond its range."""
    with np.errstate(over="ignore"):  # seen below, where the tensor has a name
        stored = encode(values, dtype)
    if not np.isfinite(from_bf16(stored) if dtype == "BF16" else stored).all():
        raise ArgumentError(
            f"compress: tensor {name!r} would hold {np.abs(values).max():.3g}, more than its dtype {dtype} can; "
            "use another method or layout, or convert the checkpoint to F32 first."
        )
    return stored


def _entries(checkpoint: Checkpoint, file: Path, new: Mapping[str, list[Entry]]) -> list[Entry]:
    """Return what a weight file will hold: its own tensors in their order, replaced ones exchanged."""
    entries: list[Entry] = []
    for name, info in checkpoint.folder.tensors.items():
        if info.file == file:
            entries += new[name] if name in new else [Entry(name, info.dtype, info)]
    return entries


def _write_index(checkpoint: Checkpoint, names: Mapping[Path, list[Entry]], out: Path) -> None:
    weight_map = {entry.name: file.name for file, entries in names.items() for entry in entries}
    size = sum(entry.n_bytes for entries in names.values() for entry in entries)
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
    (out / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _write_config(checkpoint: Checkpoint, plan: Plan, layout: str, out: Path, in_int8: bool) -> None:
    config = dict(checkpoint.config)
    if layout == "factored":
        config[KEY] = describe(plan.layers, plan.method, in_int8=in_int8)
        modules = describe_modules(plan.modules, in_int8=in_int8)
        config[KEY] |= {MODULES: modules} if modules else {}
    (out / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
