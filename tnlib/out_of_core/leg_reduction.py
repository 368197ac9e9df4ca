r"""Left singular vectors of a group of legs, and the projection of an array onto them, tile by tile.

The group forms the rows of a matrix A (q, p) that is never held. Every tile holds a block A_i of its columns, so that

    A A^H  =  sum over i of A_i A_i^H,          E^H A  =  [E^H A_1, E^H A_2, ...]

The Gram matrix determines singular values above sqrt(eps) of the largest. Below, a triangular factor per tile does:
R_i^H R_i = A_i A_i^H, two of which are combined by the QR of one above the other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tnlib._typing import Array
from tnlib.linalg.gram import gram
from tnlib.linalg.gram_svd import LeftSVD, svd_of_gram
from tnlib.linalg.orthogonal import r_factor
from tnlib.linalg.projection import adjoint_times, residual_norm
from tnlib.linalg.scaling import shift, squares
from tnlib.linalg.thin_svd import thin_svd
from tnlib.out_of_core.array_source import ArraySource, Tile
from tnlib.out_of_core.tile_data import PART, Partial, TileData
from tnlib.out_of_core.tile_passes import Passes, write_tile
from tnlib.out_of_core.tree_sum import add

_DIFFERENCE = 1e-10  # a difference of squares above this part of them is right to a part in a thousand
_ROUNDING = 1e-14  # of the squares
_POWERS = {"square": 2, "gram": 2, "factor": 1}  # of the scale


class LegSVD(NamedTuple):
    """Left SVD of a group of legs; the norm of the array and the singular values are times 2**exponent."""

    svd: LeftSVD
    norm: float
    exponent: int


def svd_of_legs(passes: Passes, source: ArraySource, legs: Sequence[int], *, exact: bool) -> LegSVD:
    """Return the left SVD of the matrix with rows `legs`, by triangular factors if `exact`, else by Gram matrices."""

    def work(data: TileData) -> Partial:
        a = matrix_of(data.array, legs)
        out = {"exponent": np.array(data.exponent), "square": np.array(data.square)}
        if exact:
            return out | {"factor": r_factor(_in_double(a).conj().T)}
        return out | {"gram": gram(np.ascontiguousarray(a)[None])}

    total = passes.reduce(source, passes.tiles(source, legs), work, combine_scaled)
    if exact:
        u, s, _ = thin_svd(total["factor"].conj().T)
        svd = LeftSVD(u, s, 0.0)
    else:
        svd = svd_of_gram(total["gram"])
    return LegSVD(svd, math.sqrt(total["square"]), int(total["exponent"]))


def combine_scaled(a: Partial, b: Partial) -> Partial:
    """Return the sum of two results of scaled tiles, at the larger of their scales."""
    if float(a["square"]) == 0.0 or float(b["square"]) == 0.0:  # their scale means nothing
        return b if float(a["square"]) == 0.0 else a
    exponent = max(int(a["exponent"]), int(b["exponent"]))
    out = {"exponent": np.array(exponent)}
    for key, power in _POWERS.items():
        if key in a:
            first, second = (shift(p[key], power * (int(p["exponent"]) - exponent)) for p in (a, b))
            out[key] = r_factor(np.concatenate([first, second])) if key == "factor" else first + second
    return out


def project_legs(
    passes: Passes, source: ArraySource, legs: Sequence[int], basis: Array, *, norm: float, discarded: float
) -> tuple[Array, float]:
    """Return E^H A (r, other legs) of the matrix with rows `legs`, and norm(A - E E^H A), of orthonormal E = `basis`.

    The error is the difference of two squares, or, if it is expected to be lost there, the norm of the residual.
    `norm` is that of A, `discarded` the expected error.
    """
    others = [a for a in range(len(source.shape)) if a not in legs]
    rank = basis.shape[1]
    measured = discarded**2 < _DIFFERENCE * norm**2
    dtype = np.result_type(basis, source.dtype, np.float64)
    out = passes.new_array((rank, *(source.shape[a] for a in others)), dtype)

    def work(data: TileData) -> Partial:
        a = np.ascontiguousarray(matrix_of(data.array, legs))
        projected = adjoint_times(basis, a[None])[0]  # r [(legs)] (others)
        residual = residual_norm(a, basis, projected) if measured else 0.0
        sums = {"kept": squares(projected) * 4.0**data.exponent, "residual": residual**2 * 4.0**data.exponent}
        if data.exponent:
            projected = shift(projected, data.exponent)
        widths = [data.array.shape[a] for a in others]
        return {key: np.array(value) for key, value in sums.items()} | {PART: projected.reshape(rank, *widths)}

    def store(tile: Tile, part: Array) -> None:
        write_tile(out, (slice(None), *(slice(*tile[a]) for a in others)), part)

    total = passes.reduce(source, passes.tiles(source, legs), work, add, store)
    if measured:
        return out, math.sqrt(total["residual"])
    return out, math.sqrt(max(0.0, norm**2 - float(total["kept"])) + _ROUNDING * norm**2)


def matrix_of(a: Array, legs: Sequence[int]) -> Array:
    """Return an array as the matrix (legs, other legs)."""
    rows = math.prod(a.shape[k] for k in legs)
    return np.moveaxis(a, legs, range(len(legs))).reshape(rows, -1)


def _in_double(a: Array) -> Array:
    return a.astype(np.result_type(a, np.float64), copy=False)
