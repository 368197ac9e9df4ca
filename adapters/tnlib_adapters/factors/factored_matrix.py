"""Factors that replace the weights of a module: the same record for attention, feed-forward layers and embeddings.

A factored matrix replaces the weight of a module, or one or more projections of an attention module. Its kind selects
the product of its parts (`expansion.EXPAND`) and the torch module that computes with them. The parts are tensors,
`<module>.<part>` of a weight and `<attention module>.tnlib.<projections>_<part>` of projections; config.json describes
them, so that shapes are known before a tensor is read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tnlib import ArgumentError
from tnlib._typing import Array
from tnlib_adapters.architectures.grouped_heads import Sizes
from tnlib_adapters.architectures.wiring import Wiring
from tnlib_adapters.factors.integers import FORMAT_FIELDS, GROUP, IntegerFormat, Integers, int8_format, part_format
from tnlib_adapters.factors.rounding import round_to_nearest
from tnlib_adapters.files.safetensors_file import to_bf16

METHOD = "tnlib"  # prefix of the parts of projections, and name of the method in config.json

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Description:
    """Stored form of a factored matrix, an entry of config.json."""

    kind: str  # key of `SHAPES`
    module: str  # path of the module without the prefix of the checkpoint; for projections, of their attention module
    of: str  # the replaced projections, such as "q" or "qkvo"; "" for the weight of `module`
    shapes: Mapping[str, Shape]  # part name -> shape
    ranks: tuple[int, ...] = ()  # one per head where heads share a factor, otherwise ()
    # for kind "interpolative": the rows of the left factor that form a unit matrix; otherwise ()
    rows: tuple[int, ...] = ()
    biases: str = ""  # for this kind: the projections whose biases are among the factors
    # part name -> integer format, for the parts that are stored as integers with scales
    formats: Mapping[str, IntegerFormat] = field(default_factory=dict)

    @property
    def tensors(self) -> dict[str, tuple[str | None, Shape]]:
        """Stored tensors of `FactoredMatrix.parts` by name: dtype, None for floats of the checkpoint's, and shape."""
        tensors: dict[str, tuple[str | None, Shape]] = {part: (None, shape) for part, shape in self.shapes.items()}
        for part, form in self.formats.items():
            tensors[part] = ("U8" if form.is_packed else "I8", form.stored_shape(self.shapes[part]))
            dtype = "BF16" if form.has_short_scales else "F32"
            tensors[scale_name(part)] = (dtype, form.scale_shape(self.shapes[part]))
        return tensors

    @property
    def is_whole(self) -> bool:
        """True if the weights are stored as they are, rounded or not, instead of as factors."""
        return self.kind in ("dense", "stack")

    @property
    def is_rewritten(self) -> bool:
        """False for a dense weight outside the attention that is not rounded: its tensor is copied."""
        return bool(self.of or self.formats) or self.kind != "dense"

    def n_bits(self, float_bits: int) -> int:
        """Return the bits of all parts and scales, with `float_bits` bits for a number without format.

        Row indices are in config.json.
        """
        formats = self.formats
        return sum(
            formats[part].n_bits(shape) if part in formats else float_bits * math.prod(shape)
            for part, shape in self.shapes.items()
        )

    @property
    def shape(self) -> Shape:
        """Shape of the product of the parts; `ValueError` or `LookupError` if they do not fit together."""
        parts = {part: shape for part, shape in self.shapes.items() if part != "bias"}
        return SHAPES[self.kind](parts, self)

    def check(self, sizes: Sizes) -> None:
        """Raise `ValueError` or `LookupError` unless the product is a matrix, or projections of these sizes."""
        shape, d = self.shape, sizes.d_model
        if self.kind == "heads":
            first, second = list(self.of)
            inner = tuple(sum(ranks_of(name, self.ranks, sizes)) for name in self.of)
            fits = (self.shapes["left"][1], self.shapes["right"][0]) == inner and len(self.ranks) == sizes.kv_heads
            fits = fits and max(self.ranks) <= sizes.of_head(first) == sizes.of_head(second)
            fits = fits and self.of in ("qk", "vo")
            fits = fits and shape[0] in (d, d + 1) and shape[1] in ((d,) if second == "o" else (d, d + 1))
        elif self.kind in STACKS:
            fits = shape == (2 * sizes.group_size + 2, sizes.kv_heads, d, sizes.d_head)
            fits = fits and sizes.d_head == sizes.d_value and sorted(self.of) == sorted("qkvo")
        elif self.of:
            n_in, n_out = sizes.sides(self.of)
            has_bias_row = self.kind == "interpolative" and shape[0] == n_in + 1
            fits = len(self.of) == 1 and shape == (n_in + has_bias_row, n_out)
            fits = fits and self.shapes.get("bias", (n_out,)) == (n_out,)
        else:
            fits = len(shape) == 2 and all(shape)
        if not fits or ("bias" in self.shapes and len(self.of) > 1):
            ranks = f" with ranks {self.ranks}" if self.ranks else ""
            heads = f"{sizes.n_heads} heads of {sizes.d_head}, {sizes.kv_heads} of them for keys, and d_model {d}"
            raise ValueError(f"a product of shape {shape}{ranks}, for {heads}")

    def stored_name(self, part: str, wiring: Wiring) -> str:
        """Return the name of a part in a file; an unembedding often lacks the prefix of the checkpoint."""
        if self.of:
            return f"{wiring.prefix}{self.module}.{METHOD}.{self.of}_{part}"
        return f"{wiring.matrices[self.module].module}.{part}"

    def read(self, get: Callable[[str], Array]) -> FactoredMatrix:
        """Return the matrix; `get` reads a part, or the scales of one, by its name."""
        arrays = {part: get(part) for part in self.shapes}
        integers = {
            part: Integers.from_stored(arrays[part], get(scale_name(part)), form, self.shapes[part])
            for part, form in self.formats.items()
        }
        matrix = FactoredMatrix(self.kind, self.of, arrays, self.ranks, self.rows, self.biases, self.module)
        return matrix.with_integers(integers)

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
        for part, form in self.formats.items():
            if form == int8_format(part, self.shapes[part]):
                entry.setdefault("scales", {})[part] = list(form.scale_shape(self.shapes[part]))
            else:
                entry.setdefault("integers", {})[part] = {field: getattr(form, field) for field in FORMAT_FIELDS}
        return entry


@dataclass(frozen=True)
class FactoredMatrix:
    """Factors of a weight, or of one or more projections, with the fields of `Description`.

    `arrays` maps part names to factors. `module` is "" before the matrix is assigned to a module. `integers` maps the
    names of rounded parts to their integers, whose values `arrays` holds; see `with_integers`.
    """

    kind: str
    of: str
    arrays: Mapping[str, Array]
    ranks: tuple[int, ...] = ()
    rows: tuple[int, ...] = ()
    biases: str = ""
    module: str = ""
    integers: Mapping[str, Integers] = field(default_factory=dict)

    def describe(self) -> Description:
        """Return the description of the stored form."""
        shapes = {part: a.shape for part, a in self.arrays.items()}
        formats = {part: integers.format for part, integers in self.integers.items()}
        return Description(self.kind, self.module, self.of, shapes, self.ranks, self.rows, self.biases, formats)

    def parts(self) -> dict[str, Array]:
        """Return the stored tensors by name, of the dtypes of `Description.tensors`."""
        parts = dict(self.arrays)
        for part, integers in self.integers.items():
            form, scales = integers.format, integers.scales
            if not np.array_equal(form.stored_scales(scales), scales):
                raise ArgumentError(
                    f"FactoredMatrix.parts: the scales of {part!r} must be values that {form} stores, got others; "
                    "round the scales before the codes."
                )
            parts[part] = integers.stored()
            parts[scale_name(part)] = to_bf16(scales) if form.has_short_scales else scales
        return parts

    def with_integers(self, integers: Mapping[str, Integers]) -> FactoredMatrix:
        """Return the matrix with these parts rounded, `arrays` included."""
        values = {part: rounded.values() for part, rounded in integers.items()}
        return replace(self, arrays={**self.arrays, **values}, integers={**self.integers, **integers})

    def without_values(self) -> FactoredMatrix:
        """Return the matrix without the values of its integers, which take four times their memory."""
        return replace(self, arrays={part: a for part, a in self.arrays.items() if part not in self.integers})

    @property
    def n_parameters(self) -> int:
        """Number of stored numbers; scales are not counted."""
        return sum(a.size for a in self.arrays.values()) + len(self.rows)


def by_module(matrices: Iterable[FactoredMatrix]) -> dict[str, list[FactoredMatrix]]:
    """Return matrices by the path of their module, in their order."""
    modules = dict[str, list[FactoredMatrix]]()
    for matrix in matrices:
        modules.setdefault(matrix.module, []).append(matrix)
    return modules


def rounded(matrix: FactoredMatrix, bits: int, *, by_row: bool = False) -> FactoredMatrix:
    """Return a matrix with all parts but vectors rounded to the nearest integers of `part_format`.

    With `by_row`, for a table of embeddings, groups lie within rows, so that a row is read without the others.

    >>> identity = FactoredMatrix("dense", "q", {"weight": np.eye(64, dtype=np.float32)})
    >>> # 64 * 64 codes of 4 bits, 64 scales of 16 bits
    >>> rounded(identity, 4).describe().n_bits(float_bits=32)
    17408
    """
    formats = {part: part_format(part, a.shape, bits) for part, a in matrix.arrays.items() if a.ndim > 1}
    if bits < 8 and matrix.kind == "heads" and matrix.of[-1:] != "o":
        formats["right"] = IntegerFormat(bits, 1, GROUP)  # applied as its transpose
    first = next(iter(formats), "")  # holds the rows of a table
    if bits < 8 and by_row and first in ("left", whole_part("")):
        formats[first] = IntegerFormat(bits, 1, GROUP)
    return matrix.with_integers({part: round_to_nearest(matrix.arrays[part], form) for part, form in formats.items()})


def whole_part(of: str) -> str:
    """Return the name of the only part of kind "dense": `<module>.weight` is an empty tensor in a compressed folder."""
    return "weight" if of else "whole"


def scale_name(part: str) -> str:
    """Return the name of the scales of a part that is stored as integers."""
    return f"{part}_scale"


def ranks_of(name: str, ranks: Sequence[int], sizes: Sizes) -> list[int]:
    """Return the rank of every head of a projection, that of its key and value head."""
    group = sizes.group_size if name in "qo" else 1
    return [r for r in ranks for _ in range(group)]


# ---------------------------------------------------------------------------------------------------------- the kinds


Parts = Mapping[str, Shape]
STACKS = ("tucker", "cp", "stack")  # kinds of all projections as one array


def _whole(parts: Parts, part: str) -> Shape:
    return _agree(parts[part], len(parts) == 1)


def _product(parts: Parts, _: Description) -> Shape:
    (m, r), (s, n) = parts["left"], parts["right"]
    return _agree((m, n), r == s and len(parts) == 2)


def _of_heads(parts: Parts, _: Description) -> Shape:
    (m, _r), (_s, n) = parts["left"], parts["right"]  # one factor is wider if query heads share keys
    return _agree((m, n), len(parts) == 2)


def _interpolation(parts: Parts, described: Description) -> Shape:
    (others, r), (s, n) = parts["left"], parts["right"]
    rows = described.rows
    m = others + len(rows)
    return _agree((m, n), len(rows) == r == s == len({*rows} & {*range(m)}) and len(parts) == 2)


def _tt_matrix(parts: Parts, _: Description) -> Shape:
    cores = [parts[f"core{k}"] for k in range(len(parts))]
    left, rows, columns, right = zip(*cores, strict=True)
    return _agree((math.prod(rows), math.prod(columns)), left == (1, *right[:-1]) and right[-1] == 1 and all(left))


def _of_legs(parts: Parts, first: str) -> Shape:
    """Return the shape of a Tucker or CP from its factors (n, r) and the part that their ranks belong to."""
    shape, ranks = zip(*(parts[f"factor{k}"] for k in range(len(parts) - 1)), strict=True)
    wanted = parts[first] if first == "core" else len(ranks) * parts[first]
    return _agree(shape, ranks == wanted and all(ranks))


def _agree(shape: Shape, agree: bool) -> Shape:
    if not agree:
        raise ValueError("contracted axes differ in size")
    return shape


# kind -> function from the shapes of the parts, but for a bias, and their description to the shape of the product
SHAPES: Mapping[str, Callable[[Parts, Description], Shape]] = {
    "dense": lambda parts, described: _whole(parts, whole_part(described.of)),
    "low_rank": _product,
    "ttm": _tt_matrix,
    "heads": _of_heads,
    "interpolative": _interpolation,
    "tucker": lambda parts, _: _of_legs(parts, "core"),
    "cp": lambda parts, _: _of_legs(parts, "weights"),
    "stack": lambda parts, _: _whole(parts, "stack"),
}
