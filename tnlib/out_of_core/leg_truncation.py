r"""Truncation of a group of legs of an array that is read by tiles, by the left singular vectors of their matrix.

The group forms the rows of a matrix A (q, p) that is never held. Every tile holds a block A_i of its columns, so that

    A A^H  =  sum over i of A_i A_i^H,          E^H A  =  [E^H A_1, E^H A_2, ...]

The Gram matrix determines singular values above sqrt(eps) of the largest. Below, a triangular factor per tile does:
R_i^H R_i = A_i A_i^H, two of which are combined by the QR of one above the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from tnlib._typing import Array
from tnlib.linalg.canonical_basis import canonical_basis_change
from tnlib.linalg.gram import adjoint_times, gram, residual_norm
from tnlib.linalg.gram_svd import LeftSVD, gram_resolution, svd_of_gram
from tnlib.linalg.multilinear import matrix_onto
from tnlib.linalg.orthogonal import r_factor
from tnlib.linalg.scaling import in_safe_range, shift, squares
from tnlib.linalg.thin_svd import thin_svd
from tnlib.linalg.truncation import TruncationBudget
from tnlib.out_of_core.array_source import ArraySource, Tile
from tnlib.out_of_core.passes import Passes, add, write_tile
from tnlib.out_of_core.tiles import PART, Partial, TileData

Chosen = TypeVar("Chosen")
_RESOLVED = 4.5  # times the error of a Gram spectrum
_DIFFERENCE = 1e-10  # a difference of squares above this part of them is right to a part in a thousand
_ROUNDING = 1e-14  # of the squares
_POWERS = {"square": 2, "gram": 2, "factor": 1}  # of the scale


class LegSVD(NamedTuple):
    """Left SVD of a group of legs; the norm of the array and the singular values are times 2**exponent."""

    svd: LeftSVD
    norm: float
    exponent: int


def truncate_legs(
    passes: Passes, source: ArraySource, legs: Sequence[int], budget: TruncationBudget
) -> tuple[Array, Array]:
    """Return orthonormal columns E (q, r) for the next truncation of `budget`, and the projected array (r, others)."""

    def choose(svd: LeftSVD) -> int:
        return budget.truncate(svd.s, error_estimate=svd.error_estimate)

    def basis_of(svd: LeftSVD, rank: int) -> Array:
        u, s = svd.u[:, :rank], svd.s[:rank]
        return canonical_basis_change(u, s, budget.dtype, squared=svd.error_estimate != 0.0).columns(u)

    spectrum = first_svd(passes, source, legs, budget)
    _, basis, projected = project_truncated(passes, source, legs, spectrum, budget, choose, basis_of)
    return basis, projected


def project_truncated(
    passes: Passes,
    source: ArraySource,
    legs: Sequence[int],
    spectrum: LegSVD,
    budget: TruncationBudget,
    choose: Callable[[LeftSVD], Chosen],
    basis_of: Callable[[LeftSVD, Chosen], Array],
) -> tuple[Chosen, Array, Array]:
    """Truncate the left SVD of legs, and project the source onto what is kept.

    Where the errors of a Gram spectrum leave the truncation open, or the measured error of the projection exceeds the
    budget, it is done again with the SVD of triangular factors, whose discarded part is the error.

    Parameters
    ----------
    passes, source, legs
        The source, and the legs whose matrix is truncated.
    spectrum
        Its left SVD.
    budget
        Budget that `choose` truncates by.
    choose
        Function that truncates a left SVD.
    basis_of
        Function that returns orthonormal columns (q, r) of it.

    Returns
    -------
    What `choose` returned, its columns, and the projected array (r, others).
    """
    while True:
        svd, exact = spectrum.svd, spectrum.svd.error_estimate == 0.0
        with budget.trial() as trial:
            chosen = choose(svd)
            if exact or not any(record.ambiguous for record in trial.records):
                basis = basis_of(svd, chosen)
                projected, discarded = _project_legs(
                    passes, source, legs, basis, norm=budget.norm, discarded=trial.discarded
                )
                if exact:
                    trial.commit()
                if exact or trial.commit_measured(discarded):
                    return chosen, basis, projected
                passes.discard(projected)
        spectrum = _scaled_svd(passes, source, legs, budget, exact=True)


def first_svd(passes: Passes, source: ArraySource, legs: Sequence[int], budget: TruncationBudget) -> LegSVD:
    """Return the left SVD of legs from a Gram matrix, or from triangular factors if it would miss the tolerance."""
    rows = int(np.prod([source.shape[a] for a in legs]))
    exact = budget.cap is None and _RESOLVED * gram_resolution(rows) * budget.norm > budget.threshold
    return _scaled_svd(passes, source, legs, budget, exact=exact)


def _scaled_svd(
    passes: Passes, source: ArraySource, legs: Sequence[int], budget: TruncationBudget, *, exact: bool
) -> LegSVD:
    """Return `_svd_of_legs`; the first one determines the scale of the source and the norm of the budget."""
    svd, norm, exponent = spectrum = _svd_of_legs(passes, source, legs, exact=exact)
    if budget.records or source.exponent:
        return spectrum
    if norm > 0 and not (exponent == 0 and in_safe_range(norm, source.size, source.dtype)):
        source.exponent = exponent + math.frexp(norm)[1]
    by = exponent - source.exponent
    budget.norm = math.ldexp(norm, by)
    return LegSVD(LeftSVD(svd.u, shift(svd.s, by), math.ldexp(svd.error_estimate, by)), budget.norm, 0)


def _svd_of_legs(passes: Passes, source: ArraySource, legs: Sequence[int], *, exact: bool) -> LegSVD:
    """Return the left SVD of the matrix with rows `legs`, by triangular factors if `exact`, else by Gram matrices."""

    def work(data: TileData) -> Partial:
        a = matrix_onto(data.array, legs)
        out = {"exponent": np.array(data.exponent), "square": np.array(data.square)}
        if exact:
            wide = a.astype(np.result_type(a, np.float64), copy=False)
            return out | {"factor": r_factor(wide.conj().T)}
        return out | {"gram": gram(np.ascontiguousarray(a)[None])}

    total = passes.reduce(source, passes.tiles(source, legs), work, _combine_scaled)
    if exact:
        u, s, _ = thin_svd(total["factor"].conj().T)
        svd = LeftSVD(u, s, 0.0)
    else:
        svd = svd_of_gram(total["gram"])
    return LegSVD(svd, math.sqrt(total["square"]), int(total["exponent"]))


def _combine_scaled(a: Partial, b: Partial) -> Partial:
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


def _project_legs(
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
        a = np.ascontiguousarray(matrix_onto(data.array, legs))
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
