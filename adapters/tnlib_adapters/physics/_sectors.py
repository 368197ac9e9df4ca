"""Bonds of a train in bases of definite charge.

Where every leg k carries charges and the whole has one total charge, the states on the left of a bond with different
charges meet orthogonal ones on its right, so that the Schmidt decomposition can be made charge by charge. A basis found
without minding them may mix charges inside a group of equal Schmidt values; a library with block-sparse tensors cannot
hold it. With no charges at all there is one sector, and this is the sweep of `tnlib.vidal`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tnlib._typing import Array
from tnlib.linalg.groups import fixing_turn
from tnlib.linalg.orthogonal import qr_positive
from tnlib.linalg.rank import noise_level
from tnlib.linalg.scale import norm
from tnlib.linalg.svd import thin_svd
from tnlib.sweeps.round import gather


@dataclass
class Sectors:
    """2**twos * size times a train of norm 1, its cores left-isometric; charges are those to the left of a bond."""

    cores: list[Array]
    spectra: list[Array]  # of all d + 1 bonds, descending within a charge
    charges: list[Array]  # of all d + 1 bonds, (r, number of charges)
    size: float
    twos: int
    outside: float  # norm of the part that has not the most common total charge, which was left out


def by_charge(cores: Sequence[Array], legs: Sequence[Array], valid: Callable[[Array], Array]) -> Sectors:
    """Return cores (l, n, r), not zero, in bases of definite charge.

    `legs[k]` (n[k], number of charges) belongs to the entries of leg k; `valid` brings charges into their range.
    """
    given, twos = gather(cores)
    dtype, size = given[0].dtype, norm(given[0])
    if size == 0.0:
        given = [np.eye(1, n, dtype=dtype)[..., None] for n in (core.shape[1] for core in cores)]
    rest = given[0] / given[0].real.dtype.type(size or 1.0)
    one = np.ones(1, given[0].real.dtype)
    found = Sectors([], [one], [valid(np.zeros((1, legs[0].shape[1]), int))], size, twos, 0.0)
    for k, leg in enumerate(legs):
        left, n, right = rest.shape
        rows = valid((found.charges[k][:, None] + leg[None]).reshape(left * n, -1))  # (l n) q
        matrix = rest.reshape(left * n, right)
        if k == len(legs) - 1:
            break
        u, s, carry, charges = _split(matrix, rows, noise_level(1.0, dtype, max(right, len(legs))))
        found.cores.append(u.reshape(left, n, -1))
        found.spectra.append(s)
        found.charges.append(charges)
        rest = (carry @ given[k + 1].reshape(right, -1)).reshape(len(s), *given[k + 1].shape[1:])  # r' [r] n r''
    inside = max(_alike(rows), key=lambda sector: norm(matrix[sector]))
    last = np.zeros_like(matrix)
    last[inside] = matrix[inside] / norm(matrix[inside])
    found.cores.append(last.reshape(rest.shape))
    found.spectra.append(one)
    found.charges.append(rows[inside[:1]])
    found.outside = norm(np.delete(matrix, inside, axis=0))
    return found


def _split(matrix: Array, rows: Array, noise: float) -> tuple[Array, Array, Array, Array]:
    """Return u, s and diag(s) vh of a matrix whose rows have charges, and those of the columns of u."""
    parts = []
    for inside in _alike(rows):
        u, s, vh = thin_svd(matrix[inside])
        rank = int(np.count_nonzero(s > noise))
        turn = fixing_turn(u[:, :rank], s[:rank], matrix.dtype)
        parts.append((inside, turn.columns(u[:, :rank]), s[:rank], turn.rows(s[:rank, None] * vh[:rank])))
    values = np.concatenate([s for _, _, s, _ in parts])
    out, first = np.zeros((len(matrix), len(values)), matrix.dtype), 0
    for inside, u, s, _ in parts:
        out[inside, first : first + len(s)] = u
        first += len(s)
    charges = np.concatenate([np.repeat(rows[inside[:1]], len(s), axis=0) for inside, _, s, _ in parts])
    return out, values, np.concatenate([carry for *_, carry in parts]), charges


def right_isometric(found: Sectors, legs: Sequence[Array], valid: Callable[[Array], Array], first: int) -> None:
    """Turn the cores from number `first` on into right-isometric ones in the same bases.

    The rows of (core times the values on its right) are orthogonal, of the lengths of the values on its left. To divide
    by these would divide the roundoff of the others by the faintest; a QR that starts with the longest does not.
    """
    for k in range(len(found.cores) - 1, first - 1, -1):
        left, n, right = found.cores[k].shape
        theta = (found.cores[k] * found.spectra[k + 1]).reshape(left, n * right)
        ends = valid((found.charges[k + 1][None] - legs[k][:, None]).reshape(n * right, -1))  # (n r) q
        out, kept = np.zeros_like(theta), []
        for rows in _alike(found.charges[k]):
            columns = np.flatnonzero((ends == found.charges[k][rows[0]]).all(axis=1))
            q, _ = qr_positive(theta[np.ix_(rows, columns)].T)
            rows = rows[: q.shape[1]]  # more values than this sector has room for are roundoff
            out[np.ix_(rows, columns)] = q.T
            kept.append(rows)
        keep = np.sort(np.concatenate(kept))
        found.cores[k] = out[keep].reshape(len(keep), n, right)
        if len(keep) < left:
            found.cores[k - 1] = found.cores[k - 1][..., keep]
            found.spectra[k], found.charges[k] = found.spectra[k][keep], found.charges[k][keep]


def _alike(charges: Array) -> list[Array]:
    """Return the rows of every charge, in the order of the charges."""
    if charges.shape[1] == 0:
        return [np.arange(len(charges))]
    numbers = np.unique(charges, axis=0, return_inverse=True)[1].reshape(-1)
    order = np.argsort(numbers, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(numbers[order])) + 1)
