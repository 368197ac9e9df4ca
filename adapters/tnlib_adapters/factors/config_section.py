"""The section of config.json that describes the factored matrices of a compressed checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tnlib import FileFormatError
from tnlib_adapters.architectures.grouped_heads import Sizes
from tnlib_adapters.architectures.wiring import Wiring
from tnlib_adapters.factors.factored_matrix import METHOD, SHAPES, Description
from tnlib_adapters.factors.integers import FORMAT_FIELDS, IntegerFormat, int8_format
from tnlib_adapters.factors.projections import NAMES, stored_shapes
from tnlib_adapters.files.folder import Folder
from tnlib_adapters.files.safetensors_file import FLOATS

KEY = "quantization_config"  # section of config.json in which transformers looks for storage formats
MODULES = "modules"  # of this section: factored matrices outside the attention
VERSION = 1
# The file of weights that config.json names: transformers refuses another kind of file and quotes its name, unless the
# plug-in has removed the entry.
WEIGHTS_FILE = "transformers_weights"
IMPORT_FIRST = "these are factors of tnlib; `import tnlib_adapters.transformers_plugin` before from_pretrained"


def describe(stored: Sequence[Description], layers: Sequence[str], method: str) -> dict[str, Any]:
    """Return the section of config.json for these matrices; `layers` are the attention modules, first to last."""
    section = {"quant_method": METHOD, "version": VERSION, "method": method}
    section["layers"] = [
        [description.to_json() for description in stored if description.of and description.module == layer]
        for layer in layers
    ]
    modules = {description.module: description.to_json() for description in stored if not description.of}
    return section | ({MODULES: modules} if modules else {})


def quantization(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Return the section of config.json, empty if there is none, and the other sections."""
    section = config.get(KEY)
    others = {key: value for key, value in config.items() if key != KEY}
    return (section if isinstance(section, Mapping) else {}), others


def descriptions(
    config: Mapping[str, Any], layers: Sequence[str], sizes: Sizes, function: str = "open_checkpoint"
) -> list[Description] | None:
    """Return the factored matrices of a compressed checkpoint; None for an ordinary one.

    `layers` are the attention modules, first to last. `FileFormatError` of `function` if the section is damaged, of
    another method or version, or its factors do not fit together or into attention layers of these sizes.
    """
    section = config.get(KEY)
    if section is None:
        return None
    if not isinstance(section, dict) or section.get("quant_method") != METHOD:
        raise FileFormatError(
            f"{function}: {KEY} in config.json must be of {METHOD} or absent, got {section!r:.80}; "
            "dequantize the checkpoint first."
        )
    if section.get("version") != VERSION:
        raise FileFormatError(
            f"{function}: factors of version {section.get('version')!r} cannot be read, this tnlib reads "
            f"version {VERSION}; install a newer tnlib."
        )
    of_layers, modules = section.get("layers"), section.get(MODULES, {})
    if not (
        isinstance(of_layers, list)
        and all(isinstance(entries, list) for entries in of_layers)
        and isinstance(modules, dict)
    ):
        raise FileFormatError(
            f"{function}: the lists of factored matrices of {KEY} in config.json are damaged; compress again."
        )
    if len(of_layers) != len(layers):
        raise FileFormatError(
            f"{function}: config.json must describe the factors of {len(layers)} layers, got {len(of_layers)}; "
            "compress again."
        )
    entries = [(name, entry, False) for name, of_layer in zip(layers, of_layers, strict=True) for entry in of_layer]
    entries += [(name, entry, True) for name, entry in modules.items()]
    return [_read_entry(*entry, sizes, function) for entry in entries]


def _read_entry(module: str, entry: Any, is_module: bool, sizes: Sizes, function: str) -> Description:
    try:
        described = _description({"of": "", "ranks": []} | entry if is_module else entry, module)
        _require(bool(described.of) != is_module)
    except (AttributeError, LookupError, TypeError, ValueError):
        raise FileFormatError(
            f"{function}: the factors of {module} described in config.json are damaged, got {entry!r:.80}; "
            "compress again."
        ) from None
    try:
        described.check(sizes)
    except (LookupError, ValueError) as problem:
        raise FileFormatError(
            f"{function}: the factors {described.of!r} of {module} described in config.json are damaged: parts of "
            f"shapes {described.shapes} do not make a layer of kind {described.kind!r} ({problem}); compress again."
        ) from None
    return described


def _description(fields: Any, module: str) -> Description:
    """Return the description of an entry; if it is damaged, any error of Python."""
    shapes, formats = {part: _counts(shape) for part, shape in fields["shapes"].items()}, dict[str, IntegerFormat]()
    for part, shape in _items(fields, "scales"):
        formats[part] = int8_format(part, shapes[part])
        _require(_counts(shape) == formats[part].scale_shape(shapes[part]))
    for part, form in _items(fields, "integers"):
        _require(part not in formats and form.keys() == {*FORMAT_FIELDS})
        bits, axis, group = _counts([form[field] for field in FORMAT_FIELDS])
        formats[part] = IntegerFormat(bits, axis, group)
        _require(axis < len(shapes[part]))
    _require(fields["kind"] in tuple(SHAPES) and all(len(shapes[part]) > 1 for part in formats))
    of, biases = fields["of"], fields.get("biases", "")
    _require(isinstance(of, str) and isinstance(biases, str) and {*of, *biases} <= {*NAMES})
    ranks, rows = _counts(fields["ranks"]), _counts(fields.get("rows", []))
    return Description(fields["kind"], module, of, shapes, ranks, rows, biases, formats)


def _items(fields: Mapping[str, Any], key: str) -> list[tuple[str, Any]]:
    """Return the items of an optional entry, which must not be empty."""
    values = fields.get(key)
    _require(values is None or len(values) > 0)
    return [] if values is None else [*values.items()]


def _counts(values: Any) -> tuple[int, ...]:
    _require(isinstance(values, list) and all(type(value) is int and value >= 0 for value in values))
    return tuple(values)


def _require(holds: bool) -> None:
    if not holds:
        raise ValueError("damaged")


def check_factors(folder: Folder, wiring: Wiring, described: Sequence[Description]) -> None:
    """Raise unless every described factor is there, in the described shape, and belongs to a matrix of the model."""
    for description in described:
        if not description.of and description.module not in wiring.matrices:
            raise FileFormatError(
                f"open_checkpoint: the modules of {KEY} in config.json must be matrices of a {wiring.model_type}, got "
                f"{description.module!r}; compress again."
            )
        for part, (dtype, shape) in description.tensors.items():
            dtypes = (dtype,) if dtype in ("U8", "I8") else FLOATS  # transformers saves scales as any floats
            _expect(folder, description.stored_name(part, wiring), shape, dtypes)


def check_attention(folder: Folder, wiring: Wiring, described: Sequence[Description]) -> None:
    """Raise unless all tensors of the attention but those of factored projections exist, in the shapes of the config.

    Of the folder in which factored matrices of modules read as dense tensors.
    """
    for module, layer in zip(wiring.attention_modules, wiring.layers, strict=True):
        factored = {of for description in described if description.module == module for of in description.of}
        linears = layer.attention.projections
        absent = [linear.weight for letters, linear in linears.items() if set(letters) <= factored]
        for name, shape in stored_shapes(layer.attention).items():
            if name not in absent:
                _expect(folder, name, shape, FLOATS)


def _expect(folder: Folder, name: str, shape: tuple[int, ...], dtypes: Sequence[str]) -> None:
    """Raise `FileFormatError` unless there is a tensor of this name and shape, of one of these dtypes."""
    if name not in folder.tensors:
        raise FileFormatError(
            f"open_checkpoint: tensor {name!r} of shape {shape} is missing from {folder.path}; "
            "config.json states more layers than there are, or the download is incomplete."
        )
    if folder.tensors[name].dtype not in dtypes:
        raise FileFormatError(
            f"open_checkpoint: tensor {name!r} must be of {', '.join(dtypes)}, got {folder.tensors[name].dtype}; "
            "dequantize the checkpoint first."
        )
    if folder.tensors[name].shape != shape:
        raise FileFormatError(
            f"open_checkpoint: tensor {name!r} must have shape {shape} by config.json, got "
            f"{folder.tensors[name].shape}; one of the two belongs to another model."
        )
