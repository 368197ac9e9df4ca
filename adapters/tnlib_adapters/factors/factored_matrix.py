"""Factors that replace the weights of a module: the same record for attention, feed-forward layers and embeddings.

A factored matrix replaces the weight of a module, or one or more projections of an attention module. Its kind selects
the product of its parts (`expansion.EXPAND`) and the torch module that computes with them. The parts are tensors,
`<module>.<part>` of a weight and `<attention module>.tnlib.<projections>_<part>` of projections; config.json describes
them, so that shapes are known before a tensor is read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tnlib import FileFormatError
from tnlib._typing import Array
from tnlib_adapters.architectures.wiring import Wiring
from tnlib_adapters.factors.int8 import narrow, scale_shapes, widen
from tnlib_adapters.factors.projections import NAMES, expect
from tnlib_adapters.files.folder import Folder
from tnlib_adapters.files.tensor_file import FLOATS

KEY = "quantization_config"  # section of config.json in which transformers looks for storage formats
MODULES = "modules"  # of this section: factored matrices outside the attention
METHOD = "tnlib"
VERSION = 1

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Description:
    """Stored form of a factored matrix, an entry of config.json.

    Parameters
    ----------
    kind
        A key of `SHAPES`.
    module
        Path of the module without the prefix of the checkpoint; for projections, of their attention module.
    of
        The replaced projections, such as "q" or "qkvo"; "" for the weight of `module`.
    shapes
        Part name -> shape.
    ranks
        One per head where heads share a factor, otherwise ().
    rows
        For kind "interpolative": the rows of the left factor that form a unit matrix; otherwise ().
    biases
        For this kind: the projections whose biases are among the factors.
    in_int8
        If True, parts with at least two axes are stored in int8, each with its scales.
    """

    kind: str
    module: str
    of: str
    shapes: Mapping[str, Shape]
    ranks: tuple[int, ...] = ()
    rows: tuple[int, ...] = ()
    biases: str = ""
    in_int8: bool = False

    @property
    def scales(self) -> dict[str, Shape]:
        """Part name -> shape of its scales, for parts in int8."""
        return {k: tuple(shape) for k, shape in scale_shapes(self.shapes).items()} if self.in_int8 else {}

    @property
    def shape(self) -> Shape:
        """Shape of the product of the parts; `ValueError` or `LookupError` if they do not fit together."""
        parts = {part: shape for part, shape in self.shapes.items() if part != "bias"}
        shape = SHAPES[self.kind](parts, self.rows)
        if not self.of and len(shape) != 2:
            raise ValueError(f"{len(shape)} legs for a matrix")
        return shape

    def tensor_name(self, part: str) -> str:
        """Return the name of a part, without the prefix of the checkpoint."""
        return f"{self.module}.{part_name(self.of, part)}" if self.of else f"{self.module}.{part}"

    def stored_name(self, part: str, wiring: Wiring) -> str:
        """Return the name of a part in a file; an unembedding often lacks the prefix of the checkpoint."""
        if self.of:
            return wiring.prefix + self.tensor_name(part)
        return f"{wiring.matrices[self.module].module}.{part}"

    def read(self, get: Callable[[str], Array]) -> FactoredMatrix:
        """Return the matrix; `get` reads a part, or the scales of one, by its name."""
        arrays = {part: get(part) for part in self.shapes}
        arrays = widen(arrays, {part: get(scale_name(part)) for part in self.scales})
        return FactoredMatrix(self.kind, self.of, arrays, self.ranks, self.rows, self.biases, self.module)

    def held_biases(self, d_model: int) -> str:
        """Return the projections whose biases are among the factors: a part of their own, or a last row or column."""
        if self.kind == "interpolative":
            return self.biases
        if "bias" in self.shapes:
            return self.of
        if self.kind != "heads":
            return ""
        first, second = list(self.of)
        rows, columns = self.shapes["left"][0], self.shapes["right"][1]
        return (first if rows > d_model else "") + (second if columns > d_model else "")

    def to_json(self) -> dict[str, Any]:
        """Return the entry of config.json."""
        entry: dict[str, Any] = {"kind": self.kind} | ({"of": self.of} if self.of else {})
        entry["shapes"] = {part: list(shape) for part, shape in self.shapes.items()}
        if self.of:
            entry["ranks"] = list(self.ranks)
        if self.kind == "interpolative":
            entry |= {"rows": list(self.rows)} | ({"biases": self.biases} if self.of else {})
        return entry | ({"scales": scale_shapes(self.shapes)} if self.in_int8 else {})


@dataclass(frozen=True)
class FactoredMatrix:
    """Factors of a weight, or of one or more projections, with the fields of `Description`.

    `arrays` maps part names to factors. `module` is "" before the matrix is assigned to a module.
    """

    kind: str
    of: str
    arrays: Mapping[str, Array]
    ranks: tuple[int, ...] = ()
    rows: tuple[int, ...] = ()
    biases: str = ""
    module: str = ""

    def describe(self, *, in_int8: bool = False) -> Description:
        """Return the description of the stored form."""
        shapes = {part: a.shape for part, a in self.arrays.items()}
        return Description(self.kind, self.module, self.of, shapes, self.ranks, self.rows, self.biases, in_int8)

    def parts(self, *, in_int8: bool) -> dict[str, tuple[Array, bool]]:
        """Return the stored arrays by name, and whether each keeps its dtype (int8 and scales) in the file."""
        if not in_int8:
            return {part: (a, False) for part, a in self.arrays.items()}
        stored, scales = narrow(self.arrays)
        parts = {part: (a, part in scales) for part, a in stored.items()}
        return parts | {scale_name(part): (scale, True) for part, scale in scales.items()}

    def rounded(self) -> FactoredMatrix:
        """Return the matrix after rounding to int8 and back."""
        stored, scales = narrow(self.arrays)
        return replace(self, arrays=widen(stored, scales))

    @property
    def n_parameters(self) -> int:
        """Number of stored numbers."""
        return sum(a.size for a in self.arrays.values()) + len(self.rows)


def whole_part(of: str) -> str:
    """Return the name of the only part of kind "dense": `<module>.weight` is an empty tensor in a compressed folder."""
    return "weight" if of else "whole"


def scale_name(part: str) -> str:
    """Return the name of the scales of a part in int8."""
    return f"{part}_scale"


def part_name(of: str, part: str) -> str:
    """Return the name of a part of projections below its attention module."""
    return f"{METHOD}.{of}_{part}"


# ---------------------------------------------------------------------------------------------------------- the kinds


def _one_part(parts: Mapping[str, Shape], _: Sequence[int]) -> Shape:
    (shape,) = parts.values()
    return shape


def _product(parts: Mapping[str, Shape], _: Sequence[int]) -> Shape:
    (m, r), (s, n) = parts["left"], parts["right"]
    return _agree((m, n), r == s and len(parts) == 2)


def _of_heads(parts: Mapping[str, Shape], _: Sequence[int]) -> Shape:
    (m, _r), (_s, n) = parts["left"], parts["right"]  # one factor is wider if query heads share keys
    return _agree((m, n), len(parts) == 2)


def _interpolation(parts: Mapping[str, Shape], rows: Sequence[int]) -> Shape:
    (others, r), (s, n) = parts["left"], parts["right"]
    m = others + len(rows)
    return _agree((m, n), len(rows) == r == s == len({*rows} & {*range(m)}) and len(parts) == 2)


def _tt_matrix(parts: Mapping[str, Shape], _: Sequence[int]) -> Shape:
    cores = [parts[f"core{k}"] for k in range(len(parts))]
    bonds = [1, *(core[3] for core in cores)]
    legs = (math.prod(core[1] for core in cores), math.prod(core[2] for core in cores))
    return _agree(legs, [core[0] for core in cores] == bonds[:-1] and bonds[-1] == 1 and len(cores) > 0)


def _tucker(parts: Mapping[str, Shape], _: Sequence[int]) -> Shape:
    factors = [parts[f"factor{k}"] for k in range(len(parts) - 1)]
    return _agree(tuple(n for n, _ in factors), tuple(r for _, r in factors) == tuple(parts["core"]))


def _cp(parts: Mapping[str, Shape], _: Sequence[int]) -> Shape:
    factors = [parts[f"factor{k}"] for k in range(len(parts) - 1)]
    return _agree(tuple(n for n, _ in factors), all((r,) == tuple(parts["weights"]) for _, r in factors))


def _agree(shape: Shape, agree: bool) -> Shape:
    if not agree:
        raise ValueError("contracted axes differ in size")
    return shape


# kind -> function from the shapes of the parts and the unit rows to the shape of the product
SHAPES: Mapping[str, Callable[[Mapping[str, Shape], Sequence[int]], Shape]] = {
    "dense": _one_part,
    "low_rank": _product,
    "ttm": _tt_matrix,
    "heads": _of_heads,
    "interpolative": _interpolation,
    "tucker": _tucker,
    "cp": _cp,
    "stack": _one_part,
}


# ------------------------------------------------------------------------------------------ the section of config.json


def describe(
    matrices: Sequence[FactoredMatrix], layers: Sequence[str], method: str, *, in_int8: bool = False
) -> dict[str, Any]:
    """Return the section of config.json for these matrices; `layers` are the attention modules, first to last."""
    stored = [matrix.describe(in_int8=in_int8) for matrix in matrices]
    section = {"quant_method": METHOD, "version": VERSION, "method": method}
    section["layers"] = [
        [description.to_json() for description in stored if description.of and description.module == layer]
        for layer in layers
    ]
    modules = {description.module: description.to_json() for description in stored if not description.of}
    return section | ({MODULES: modules} if modules else {})


def descriptions(config: Mapping[str, Any], layers: Sequence[str]) -> list[Description] | None:
    """Return the factored matrices of a compressed checkpoint; None for an ordinary one.

    `layers` are the attention modules, first to last. Sections written by tnlib 0.1 are read as well.

    Raises
    ------
    FileFormatError
        If the section is of another method or version, or damaged.
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
    described = [_read_entry(entry, name) for name, own in zip(layers, of_layers, strict=True) for entry in own]
    return described + [_read_entry(entry, name, is_module=True) for name, entry in modules.items()]


def _read_entry(entry: Any, module: str, *, is_module: bool = False) -> Description:
    fields: Any = {"of": "", "ranks": []} | entry if is_module and isinstance(entry, dict) else entry
    if not _is_entry(fields) or bool(fields["of"]) == is_module:
        raise FileFormatError(
            f"open_checkpoint: the factors of {module} described in config.json are damaged, got {entry!r:.80}; "
            "compress again."
        )
    shapes = {part: tuple(shape) for part, shape in fields["shapes"].items()}
    ranks, rows, in_int8 = tuple(fields["ranks"]), tuple(fields.get("rows", ())), fields.get("scales") is not None
    described = Description(
        fields["kind"], module, fields["of"], shapes, ranks, rows, fields.get("biases", ""), in_int8=in_int8
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
        and entry.get("scales") in (None, scale_shapes(entry["shapes"]))
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
        for part, shape in description.shapes.items():
            name = description.stored_name(part, wiring)
            expect(folder, name, shape, ("I8",) if part in description.scales else FLOATS)
        for part, shape in description.scales.items():
            expect(folder, description.stored_name(scale_name(part), wiring), shape)
