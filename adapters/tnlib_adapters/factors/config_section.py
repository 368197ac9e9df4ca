"""The section of config.json that describes the factored matrices of a compressed checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tnlib import FileFormatError
from tnlib_adapters.architectures.wiring import Wiring
from tnlib_adapters.factors.factored_matrix import METHOD, SHAPES, Description
from tnlib_adapters.factors.integers import BITS, FORMAT_FIELDS, IntegerFormat, int8_format
from tnlib_adapters.factors.projections import NAMES, expect
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


def descriptions(config: Mapping[str, Any], layers: Sequence[str]) -> list[Description] | None:
    """Return the factored matrices of a compressed checkpoint; None for an ordinary one.

    `layers` are the attention modules, first to last. `FileFormatError` if the section is damaged, or of another method
    or version.
    """
    section = config.get(KEY)
    if section is None:
        return None
    if not isinstance(section, dict) or section.get("quant_method") != METHOD:
        raise FileFormatError(
            f"open_checkpoint: {KEY} in config.json must be of {METHOD} or absent, got {section!r:.80}; "
            "dequantize the checkpoint first."
        )
    if section.get("version") != VERSION:
        raise FileFormatError(
            f"open_checkpoint: factors of version {section.get('version')!r} cannot be read, this tnlib reads "
            f"version {VERSION}; install a newer tnlib."
        )
    of_layers, modules = section.get("layers"), section.get(MODULES, {})
    if not (
        isinstance(of_layers, list)
        and all(isinstance(entries, list) for entries in of_layers)
        and isinstance(modules, dict)
    ):
        raise FileFormatError(
            f"open_checkpoint: the lists of factored matrices of {KEY} in config.json are damaged; compress again."
        )
    if len(of_layers) != len(layers):
        raise FileFormatError(
            f"open_checkpoint: config.json must describe the factors of {len(layers)} layers, got {len(of_layers)}; "
            "compress again."
        )
    described = [_read_entry(entry, name) for name, entries in zip(layers, of_layers, strict=True) for entry in entries]
    return described + [_read_entry(entry, name, is_module=True) for name, entry in modules.items()]


def _read_entry(entry: Any, module: str, *, is_module: bool = False) -> Description:
    fields: Any = {"of": "", "ranks": []} | entry if is_module and isinstance(entry, dict) else entry
    if not _is_entry(fields) or bool(fields["of"]) == is_module:
        raise FileFormatError(
            f"open_checkpoint: the factors of {module} described in config.json are damaged, got {entry!r:.80}; "
            "compress again."
        )
    shapes = {part: tuple(shape) for part, shape in fields["shapes"].items()}
    ranks, rows = tuple(fields["ranks"]), tuple(fields.get("rows", ()))
    formats = {part: int8_format(part, shapes[part]) for part in fields.get("scales") or ()}
    formats |= {part: IntegerFormat(**form) for part, form in (fields.get("integers") or {}).items()}
    described = Description(
        fields["kind"], module, fields["of"], shapes, ranks, rows, fields.get("biases", ""), formats
    )
    try:
        described.shape  # noqa: B018  raises if the parts do not fit together
    except (LookupError, ValueError) as problem:
        raise FileFormatError(
            f"open_checkpoint: the factors of {module} described in config.json are damaged: parts of shapes {shapes} "
            f"do not make a layer of kind {fields['kind']!r} ({problem}); compress again."
        ) from None
    return described


def _is_entry(entry: Any) -> bool:
    return (
        isinstance(entry, dict)
        and entry.get("kind") in tuple(SHAPES)
        and isinstance(entry.get("of"), str)
        and set(entry["of"]) <= set(NAMES)
        and isinstance(entry.get("shapes"), dict)
        and all(_are_counts(shape) for shape in entry["shapes"].values())
        and _are_counts(entry.get("ranks"))
        and _are_counts(entry.get("rows", []))
        and isinstance(entry.get("biases", ""), str)
        and set(entry.get("biases", "")) <= set(NAMES)
        and _are_scales(entry.get("scales"), entry["shapes"])
        and _are_formats(entry.get("integers"), entry["shapes"])
        and not {*(entry.get("scales") or ())} & {*(entry.get("integers") or ())}
    )


def _are_scales(scales: Any, shapes: Mapping[str, list[int]]) -> bool:
    if scales is None:
        return True
    return (
        isinstance(scales, dict)
        and len(scales) > 0
        and all(len(shapes.get(part, ())) > 1 and _are_counts(shape) for part, shape in scales.items())
        and all((*shape,) == int8_format(p, shapes[p]).scale_shape(shapes[p]) for p, shape in scales.items())
    )


def _are_formats(formats: Any, shapes: Mapping[str, list[int]]) -> bool:
    return formats is None or (
        isinstance(formats, dict)
        and len(formats) > 0
        and all(_is_format(form, shapes.get(part, [])) for part, form in formats.items())
    )


def _is_format(form: Any, shape: list[int]) -> bool:
    return (
        isinstance(form, dict)
        and set(form) == {*FORMAT_FIELDS}
        and _are_counts([*form.values()])
        and form["bits"] in BITS
        and form["axis"] < len(shape)
        and len(shape) > 1
    )


def _are_counts(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)


def factored_projections(described: Sequence[Description] | None, layers: Sequence[str]) -> list[str] | None:
    """Return the projections of every attention module that are stored as factors; None of an ordinary checkpoint."""
    if described is None:
        return None
    return ["".join(description.of for description in described if description.module == layer) for layer in layers]


def check_factors(folder: Folder, wiring: Wiring, described: Sequence[Description]) -> None:
    """Raise unless every described factor is there, in the described shape, and belongs to a matrix of the model."""
    for description in described:
        if not description.of and description.module not in wiring.matrices:
            raise FileFormatError(
                f"open_checkpoint: the modules of {KEY} in config.json must be matrices of a {wiring.model_type}, got "
                f"{description.module!r}; compress again."
            )
        for part, (dtype, shape) in description.tensors.items():
            dtypes = (dtype,) if dtype in ("U8", "I8") else FLOATS
            expect(folder, description.stored_name(part, wiring), shape, dtypes)
