"""Matrices outside the attention that are stored as products: feed-forward layers and embeddings of tokens.

A module of weight W has tensors `<module>.left` and `<module>.right`, or, rounded as it is, `<module>.whole` in int8,
and its `<module>.weight` is empty; x W is x left right, and the row of a token left[token] right. Of kind
"interpolative" some rows of the left factor are a unit matrix, which is not stored. Its bias stays.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tnlib import FileFormatError
from tnlib._typing import Array
from tnlib_adapters.architectures.table import Architecture
from tnlib_adapters.factors.attention_factors import KEY, Piece, scale_name
from tnlib_adapters.factors.int8 import scale_shapes
from tnlib_adapters.factors.interpolative import unpack
from tnlib_adapters.factors.projections import expect
from tnlib_adapters.files.folder import Folder
from tnlib_adapters.files.tensor_file import FLOATS, TensorInfo

MODULES = "modules"  # of the section of config.json
PARTS = {"low_rank": ("left", "right"), "interpolative": ("left", "right"), "dense": ("whole",)}


def mlp_names(row: Architecture, layers: Iterable[int]) -> list[str]:
    """Return the modules of the feed-forward parts of these layers, without a prefix."""
    if row.mlp is None:
        return []
    parts = dict.fromkeys(part for part in (row.mlp.gate, row.mlp.up, row.mlp.down) if part is not None)
    return [part.format(layer=layer) for layer in layers for part in parts]


def is_embedding(row: Architecture, name: str) -> bool:
    """Whether a module of this name, without a prefix, looks tokens up instead of multiplying."""
    return name == row.embeddings[0]


def on_rows(row: Architecture, name: str, weight: Any) -> Any:
    """Return a stored weight as (in, out), or one that is (in, out) as it is stored: an array or a tensor."""
    return weight.T if row.stored == "out_in" and not is_embedding(row, name) else weight


def is_rewritten(piece: Piece, *, in_int8: bool) -> bool:
    """Whether a matrix is not stored as it came."""
    return in_int8 or piece.kind != "dense"


def describe_modules(pieces: Sequence[Piece], *, in_int8: bool) -> dict[str, Any]:
    """Return what config.json says of these matrices; those that are stored as they came are not among them."""
    found = {}
    for piece in pieces:
        if not is_rewritten(piece, in_int8=in_int8):
            continue
        said = piece.describe()
        rows = {"rows": said["rows"]} if piece.kind == "interpolative" else {}
        scales = {"scales": scale_shapes(said["shapes"])} if in_int8 else {}
        found[piece.of] = {"kind": piece.kind, "shapes": said["shapes"]} | rows | scales
    return found


def multiply_out(arrays: Sequence[Array], rows: Sequence[int]) -> Array:
    """Return the (in, out) weight of these factors, or this one, in double precision; `rows` of an interpolation."""
    first, *others = (a.astype(np.float64) for a in arrays)
    left = unpack(first, rows) if len(rows) else first
    return left @ others[0] if others else left


def described_modules(config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the described matrices of a compressed checkpoint by module, {} for an ordinary one."""
    section = config.get(KEY)
    modules = section.get(MODULES, {}) if isinstance(section, dict) else {}
    if not isinstance(modules, dict) or not all(_is_described(one) for one in modules.values()):
        raise FileFormatError(f"open_checkpoint: the modules of {KEY} in config.json are damaged; compress again.")
    return modules


def _is_described(one: Any) -> bool:
    if not isinstance(one, dict) or one.get("kind") not in tuple(PARTS) or not isinstance(one.get("shapes"), dict):
        return False
    shapes = one["shapes"]
    if tuple(shapes) != PARTS[one["kind"]] or not all(
        isinstance(s, list) and len(s) == 2 and all(type(n) is int and n >= 0 for n in s) for s in shapes.values()
    ):
        return False
    if "right" in shapes and shapes["left"][1] != shapes["right"][0]:
        return False
    if one["kind"] == "interpolative" and not _are_places(one.get("rows"), *shapes["left"]):
        return False
    return one.get("scales") in (None, scale_shapes(shapes))


def _are_places(rows: Any, n_others: int, r: int) -> bool:
    """Whether these are r rows of all that there are."""
    return (
        isinstance(rows, list)
        and all(type(k) is int for k in rows)
        and len(rows) == r == len({*rows} & {*range(n_others + r)})
    )


@dataclass(frozen=True)
class Product(TensorInfo):
    """A weight that other tensors are multiplied to."""

    factors: tuple[tuple[TensorInfo, TensorInfo | None], ...] = ()  # each with its scale, if it is in int8
    rows: tuple[int, ...] = ()
    transposed: bool = False

    def read_stored(self) -> Array:
        """Multiply out, in double precision."""
        found = [
            part.read_finite().astype(np.float64) * (1.0 if scale is None else scale.read_finite())
            for part, scale in self.factors
        ]
        whole = multiply_out(found, self.rows)
        return (whole.T if self.transposed else whole).astype(np.float32)

    def read_part(self, index: tuple[slice, ...]) -> Array:
        """Multiply out, and return some rows and columns."""
        return self.read_finite()[index]


def with_products(folder: Folder, prefix: str) -> Folder:
    """Return a folder in which every weight that is stored as a product is there under its own name.

    Raises
    ------
    FileFormatError
        If a factor is missing or of another shape than is described.
    """
    row, tensors = folder.architecture, dict(folder.tensors)
    for name, told in described_modules(folder.config).items():
        scales = told.get("scales", {})
        for part, shape in told["shapes"].items():
            expect(folder, f"{prefix}{name}.{part}", tuple(shape), ("I8",) if part in scales else FLOATS)
        for part, shape in scales.items():
            expect(folder, f"{prefix}{name}.{scale_name(part)}", tuple(shape))
        stored = [
            (folder.tensors[f"{prefix}{name}.{part}"], folder.tensors.get(f"{prefix}{name}.{scale_name(part)}"))
            for part in told["shapes"]
        ]
        rows = tuple(told.get("rows", ()))
        shape = (stored[0][0].shape[0] + len(rows), stored[-1][0].shape[1])
        transposed = row.stored == "out_in" and not is_embedding(row, name)
        whole, first = f"{prefix}{name}.weight", stored[0][0]
        tensors[whole] = Product(
            first.file, whole, "F32", shape[::-1] if transposed else shape, 0, 0, tuple(stored), rows, transposed
        )
    return replace(folder, tensors=tensors)
