"""Factors stored in the place of attention weights: how they are named, described and multiplied out.

A layer of a compressed checkpoint is a list of pieces. A piece stands for one or more of the four projections;
its arrays are tensors named `<attention module>.tnlib.<of>_<part>`, its kind says how they multiply out, and
config.json describes it, so that the shapes are known before a tensor is read.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tnlib import CP, FileFormatError, TTMatrix, Tucker
from tnlib._typing import Array
from tnlib_adapters.architectures.table import Architecture
from tnlib_adapters.factors.int8 import narrow, scale_shapes, widen
from tnlib_adapters.factors.interpolative import unpack
from tnlib_adapters.factors.projections import NAMES, Projections, Sizes, expect, n_out
from tnlib_adapters.files.folder import Folder
from tnlib_adapters.files.tensor_file import FLOATS

KEY = "quantization_config"  # of config.json: where transformers looks for how weights are stored
METHOD = "tnlib"
VERSION = 1


@dataclass(frozen=True)
class Piece:
    """Factors of one or more projections.

    Parameters
    ----------
    kind
        A key of `EXPAND`.
    of
        The projections, such as "q" or "qkvo".
    arrays
        Part name -> factor.
    ranks
        One per head where heads share an array, otherwise ().
    rows
        Of kind "interpolative": the rows of its left factor that are a unit matrix; otherwise ().
    biases
        Of this kind: the projections whose biases it stands for as well.
    """

    kind: str
    of: str
    arrays: Mapping[str, Array]
    ranks: tuple[int, ...] = ()
    rows: tuple[int, ...] = ()
    biases: str = ""

    @classmethod
    def read(cls, described: Mapping[str, Any], get: Callable[[str], Array]) -> Piece:
        """Return the piece that config.json describes; `get` reads a part, or the scale of one, by its name."""
        arrays = {part: get(part) for part in described["shapes"]}
        scales = {part: get(scale_name(part)) for part in described.get("scales", {})}
        rows, biases = tuple(described.get("rows", ())), described.get("biases", "")
        return cls(described["kind"], described["of"], widen(arrays, scales), tuple(described["ranks"]), rows, biases)

    def parts(self, *, in_int8: bool) -> dict[str, tuple[Array, bool]]:
        """Return what is stored, by name, and whether it has the dtype that it comes with, not that of the file."""
        if not in_int8:
            return {part: (a, False) for part, a in self.arrays.items()}
        stored, scales = narrow(self.arrays)
        found = {part: (a, part in scales) for part, a in stored.items()}
        return found | {scale_name(part): (scale, True) for part, scale in scales.items()}

    def rounded(self) -> Piece:
        """Return the piece as it is once it has been stored in int8."""
        stored, scales = narrow(self.arrays)
        return replace(self, arrays=widen(stored, scales))

    @property
    def n_parameters(self) -> int:
        """Count of stored numbers."""
        return sum(a.size for a in self.arrays.values()) + len(self.rows)

    def describe(self) -> dict[str, Any]:
        """Return what config.json says of it."""
        shapes = {part: list(a.shape) for part, a in self.arrays.items()}
        said = {"kind": self.kind, "of": self.of, "shapes": shapes, "ranks": list(self.ranks)}
        return said | {"rows": list(self.rows), "biases": self.biases} if self.kind == "interpolative" else said


def scale_name(part: str) -> str:
    """Return the name of what the integers of a part are multiplied by."""
    return f"{part}_scale"


def part_name(of: str, part: str) -> str:
    """Return the name of a factor below its attention module."""
    return f"{METHOD}.{of}_{part}"


def factor_name(row: Architecture, prefix: str, layer: int, of: str, part: str) -> str:
    """Return the full name of a factor."""
    return f"{prefix}{row.attention.format(layer=layer)}.{part_name(of, part)}"


def describe(layers: Sequence[Sequence[Piece]], method: str, *, in_int8: bool = False) -> dict[str, Any]:
    """Return the section of config.json that tells how the attention of every layer is stored."""
    pieces = [[piece.describe() for piece in layer] for layer in layers]
    if in_int8:
        pieces = [[piece | {"scales": scale_shapes(piece["shapes"])} for piece in layer] for layer in pieces]
    return {"quant_method": METHOD, "version": VERSION, "method": method, "layers": pieces}


def descriptions(config: Mapping[str, Any]) -> list[list[dict[str, Any]]] | None:
    """Return, for each layer, the described pieces of a compressed checkpoint; None for an ordinary one."""
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
    layers = section.get("layers")
    if not isinstance(layers, list) or not all(
        isinstance(layer, list) and all(_is_described(piece) for piece in layer) for layer in layers
    ):
        raise FileFormatError(f"open_checkpoint: the layers of {KEY} in config.json are damaged; compress again.")
    return layers


def _is_described(piece: Any) -> bool:
    return (
        isinstance(piece, dict)
        and piece.get("kind") in tuple(EXPAND)
        and isinstance(piece.get("of"), str)
        and set(piece["of"]) <= set(NAMES)
        and isinstance(piece.get("shapes"), dict)
        and all(isinstance(s, list) and all(type(n) is int and n >= 0 for n in s) for s in piece["shapes"].values())
        and _are_counts(piece.get("ranks"))
        and _are_counts(piece.get("rows", []))
        and isinstance(piece.get("biases", ""), str)
        and set(piece.get("biases", "")) <= set(NAMES)
        and piece.get("scales") in (None, scale_shapes(piece["shapes"]))
    )


def _are_counts(values: Any) -> bool:
    return isinstance(values, list) and all(type(one) is int and one >= 0 for one in values)


def held_biases(described: Mapping[str, Any], d_model: int) -> str:
    """Return the projections whose biases the factors hold as well: a last row, or column, beyond d_model."""
    if described["kind"] == "interpolative":
        return str(described["biases"])
    if described["kind"] in ("dense", "low_rank") and "bias" in described["shapes"]:
        return str(described["of"])
    if described["kind"] != "heads":
        return ""
    first, second = list(described["of"])
    rows, columns = described["shapes"]["left"][0], described["shapes"]["right"][1]
    return (first if rows > d_model else "") + (second if columns > d_model else "")


def check_factors(folder: Folder, prefix: str, layers: Sequence[Sequence[Mapping[str, Any]]]) -> None:
    """Raise unless every described factor is there, in the described shape."""
    for layer, pieces in enumerate(layers):
        for piece in pieces:
            scales = piece.get("scales", {})
            for part, shape in piece["shapes"].items():
                name = factor_name(folder.architecture, prefix, layer, piece["of"], part)
                expect(folder, name, tuple(shape), ("I8",) if part in scales else FLOATS)
            for part, shape in scales.items():
                expect(
                    folder, factor_name(folder.architecture, prefix, layer, piece["of"], scale_name(part)), tuple(shape)
                )


def expand(pieces: Sequence[Piece], sizes: Sizes) -> Projections:
    """Multiply the factors of a layer out, in float64, to the weights and biases they stand for."""
    weights: dict[str, Array] = {}
    biases: dict[str, Array] = {}
    for piece in pieces:
        wide = replace(piece, arrays={k: a.astype(np.float64) for k, a in piece.arrays.items()})
        try:
            found = EXPAND[piece.kind](wide, sizes)
            _check_expanded(found, piece, sizes)
        except (LookupError, ValueError) as problem:  # a part that is missing, or shapes that do not fit together
            raise FileFormatError(
                f"open_checkpoint: the factors of projections {piece.of!r} cannot be multiplied out as "
                f"{piece.kind!r} ({problem}); compress again."
            ) from None
        weights |= found.weights
        biases |= found.biases
    return Projections(weights, biases)


def _check_expanded(found: Projections, piece: Piece, sizes: Sizes) -> None:
    shapes = {name: weight.shape for name, weight in found.weights.items()}
    wanted = {name: (sizes.d_model, sizes.widths[name]) for name in piece.of}
    if shapes != {name: shape[::-1] if name == "o" else shape for name, shape in wanted.items()}:
        raise ValueError(f"they give weights of shapes {shapes} for d_model {sizes.d_model}")
    for name, bias in found.biases.items():
        if bias.shape != (n_out(sizes, name),):
            raise ValueError(f"they give a bias of shape {bias.shape} where {n_out(sizes, name)} numbers are added")


def _dense(piece: Piece, sizes: Sizes) -> Projections:
    return Projections({piece.of: piece.arrays["weight"]}, _own_bias(piece))


def _low_rank(piece: Piece, sizes: Sizes) -> Projections:
    return Projections({piece.of: piece.arrays["left"] @ piece.arrays["right"]}, _own_bias(piece))


def _own_bias(piece: Piece) -> dict[str, Array]:
    return {piece.of: piece.arrays["bias"]} if "bias" in piece.arrays else {}


def _ttm(piece: Piece, sizes: Sizes) -> Projections:
    cores = [piece.arrays[f"core{k}"] for k in range(len(piece.arrays))]
    return Projections({piece.of: TTMatrix(tuple(cores)).full()}, {})


def _tucker(piece: Piece, sizes: Sizes) -> Projections:
    factors = [piece.arrays[f"factor{k}"] for k in range(len(piece.arrays) - 1)]
    return unstack(Tucker(piece.arrays["core"], tuple(factors)).full(), piece.of)


def _cp(piece: Piece, sizes: Sizes) -> Projections:
    factors = [piece.arrays[f"factor{k}"] for k in range(len(piece.arrays) - 1)]
    return unstack(CP(piece.arrays["weights"], tuple(factors)).full(), piece.of)


def _stack(piece: Piece, sizes: Sizes) -> Projections:
    return unstack(piece.arrays["stack"], piece.of)


def _interpolative(piece: Piece, sizes: Sizes) -> Projections:
    """Put the unit rows back into the left factor: the other rows of the weight are combinations of these.

    `left` (m - r, r) holds the rows that are not units, the bias as the last of all m where it is one of them; `right`
    (r, n) is those rows of the weight that are. A bias that no row holds is `bias`, or 0: what a bias of keys adds to
    the scores of a query is the same for all keys, and what that of values adds to the output is constant.
    """
    name = piece.of
    n_in = sizes.widths["o"] if name == "o" else sizes.d_model
    together = unpack(piece.arrays["left"], piece.rows) @ piece.arrays["right"]  # m [r], [r] n
    biases = {one: np.zeros(n_out(sizes, one)) for one in piece.biases}
    biases |= {name: together[n_in]} if len(together) > n_in else {}
    return Projections({name: together[:n_in]}, biases | _own_bias(piece))


def _heads(piece: Piece, sizes: Sizes) -> Projections:
    """Put the columns of every head back into its slot of d_head, the rest of which stays zero.

    `left` (d_model, r) or (d_model + 1, r) holds the weights, and as its last row the bias, of the first
    projection; `right` those of the second, (r, d_model) or (r, d_model + 1).
    """
    if len(piece.ranks) != sizes.kv_heads or max(piece.ranks) > sizes.d_head:
        raise ValueError(f"ranks {piece.ranks} for {sizes.kv_heads} heads of {sizes.d_head}")
    first, second = list(piece.of)
    left = np.zeros((len(piece.arrays["left"]), sizes.widths[first]))
    right = np.zeros((sizes.widths[second], piece.arrays["right"].shape[1]))
    left[:, places(ranks_of(first, piece.ranks, sizes), sizes.d_head)] = piece.arrays["left"]
    right[places(ranks_of(second, piece.ranks, sizes), sizes.d_head)] = piece.arrays["right"]

    d = sizes.d_model
    weights = {first: left[:d], second: right if second == "o" else right[:, :d].T}
    biases = {first: left[d]} if len(left) > d else {}
    if second != "o" and right.shape[1] > d:
        biases[second] = right[:, d]
    return Projections(weights, biases)


def ranks_of(name: str, ranks: Sequence[int], sizes: Sizes) -> list[int]:
    """Return for every head of a projection the rank that its key and value head has."""
    group = sizes.n_heads // sizes.kv_heads if name in "qo" else 1
    return [r for r in ranks for _ in range(group)]


def places(ranks: Sequence[int], d_head: int) -> list[int]:
    """Return the inner dimensions that heads of these ranks fill: the first ones of each.

    >>> places([1, 2], d_head=4)
    [0, 4, 5]
    """
    return [head * d_head + column for head, r in enumerate(ranks) for column in range(r)]


def stack(projections: Projections, sizes: Sizes, of: Sequence[str] = NAMES) -> Array:
    """Return these weights as one array (projection, key head, d_model, d_head).

    Query heads that share a key and value head lie along the first leg: their queries, the key, the value, their
    outputs.
    """
    parts = []
    for name in of:
        weight = projections.weights[name]
        on_columns = weight.T if name == "o" else weight  # d_model (kv head of kv dh)
        by_group = on_columns.reshape(sizes.d_model, sizes.kv_heads, -1, sizes.d_head)
        parts.append(by_group.transpose(2, 1, 0, 3))  # (head of kv) kv d dh
    return np.concatenate(parts)


def unstack(x: Array, of: Sequence[str] = NAMES) -> Projections:
    """Undo `stack`."""
    weights = {}
    for name, part in rows_of_stack(len(x), of).items():
        flat = x[part].transpose(2, 1, 0, 3).reshape(x.shape[2], -1)  # d_model (kv head of kv dh)
        weights[name] = flat.T if name == "o" else flat
    return Projections(weights, {})


def rows_of_stack(n_rows: int, of: Sequence[str] = NAMES) -> dict[str, slice]:
    """Return where every projection lies along the first leg of a stack of so many rows.

    >>> rows_of_stack(6)["k"]
    slice(2, 3, None)
    """
    of_groups = sum(name in "qo" for name in of)
    group = (n_rows - len(of) + of_groups) // max(1, of_groups)
    ends = (0, *itertools.accumulate(group if name in "qo" else 1 for name in of))
    return {name: slice(*ends[k : k + 2]) for k, name in enumerate(of)}


EXPAND: Mapping[str, Callable[[Piece, Sizes], Projections]] = {
    "dense": _dense,
    "low_rank": _low_rank,
    "ttm": _ttm,
    "heads": _heads,
    "interpolative": _interpolative,
    "tucker": _tucker,
    "cp": _cp,
    "stack": _stack,
}
