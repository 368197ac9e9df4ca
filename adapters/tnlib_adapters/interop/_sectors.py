"""Bonds of a train in bases of definite charge.

Where every leg k carries charges and the whole has one total charge, the states on the left of a bond with different
charges meet orthogonal ones on its right, so that the Schmidt decomposition can be made charge by charge. A basis found
without minding them may mix charges inside a group of equal Schmidt values; a library with block-sparse tensors cannot
hold it. With no charges at all there is one sector, and these are the sweeps of any rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tnlib._typing import Array
from tnlib.formats.train.format import TensorTrain
from tnlib.formats.train.round import right_canonicalize
from tnlib.linalg.canonical_basis import canonical_basis_change
from tnlib.linalg.orthogonal import qr_positive
from tnlib.linalg.scaling import norm
from tnlib.linalg.thin_svd import thin_svd
from tnlib.linalg.truncation import noise_level


@dataclass
class Sectors:
    """2**exponent * size times a train of norm 1, of right-isometric cores; a bond has the charges on its left."""

    cores: list[Array]
    spectra: list[Array]  # of all d + 1 bonds, descending within a charge
    charges: list[Array]  # of all d + 1 bonds, (r, number of charges)
    size: float
    exponent: int
    outside: float  # norm of the part that has not the most common total charge, which was left out


def by_charge(train: TensorTrain, legs: Sequence[Array], valid: Callable[[Array], Array]) -> Sectors:
    """Return the train in bases of definite charge, of numerical ranks; of zero, a basis state and size 0.

    `legs[k]` (n[k], number of charges) belongs to the entries of leg k; `valid` brings charges into their range. From
    left to right every bond state gets a charge, and the last core tells the total; what has another is left out there,
    and from right to left so is what led to it.
    """
    gathered = right_canonicalize(train)
    given, dtype, size = list(gathered.cores), train.dtype, norm(gathered.cores[0])
    if size == 0.0:
        given = [np.eye(1, n, dtype=dtype)[..., None] for n in train.shape]
    noise = [noise_level(1.0, dtype, max(core.shape[-1], len(legs))) for core in given]
    rest = given[0] / given[0].real.dtype.type(size or 1.0)
    labelled, charges = [], [valid(np.zeros((1, legs[0].shape[1]), int))]
    for k, following in enumerate(given[1:]):
        left, n, right = rest.shape
        u, _, carry, ends = _split(rest.reshape(left * n, right), _after(charges[k], legs[k], valid), noise[k])
        labelled.append(u.reshape(left, n, -1))
        charges.append(ends)
        rest = (carry @ following.reshape(right, -1)).reshape(len(carry), *following.shape[1:])  # r' [r] n r''
    rest, total, outside = _of_one_charge(rest, _after(charges[-1], legs[-1], valid))
    one = np.ones(1, rest.real.dtype)
    found = Sectors([rest], [one], [total], size, gathered.exponent, outside)
    for k in range(len(legs) - 1, 0, -1):
        left, n, right = found.cores[0].shape
        u, s, carry, begins = _split(
            found.cores[0].reshape(left, n * right).T, _before(found.charges[0], legs[k], valid), noise[k - 1]
        )
        found.cores[0] = np.ascontiguousarray(u.T).reshape(-1, n, right)
        found.cores.insert(0, labelled[k - 1] @ carry.T)  # l n [r] r'
        found.spectra.insert(0, s)
        found.charges.insert(0, begins)
    found.spectra.insert(0, one)
    found.charges.insert(0, charges[0])
    return found


def left_isometric(found: Sectors, legs: Sequence[Array], valid: Callable[[Array], Array], center: int) -> None:
    """Turn the cores before number `center` into left-isometric ones in the same bases.

    The columns of (the values on its left times a core) are orthogonal, of the lengths of the values on its right. To
    divide by these would divide the roundoff of the others by the faintest; a QR that starts with the longest does not.
    """
    for k in range(center):
        left, n, right = found.cores[k].shape
        theta = (found.spectra[k][:, None, None] * found.cores[k]).reshape(left * n, right)
        begins, out, kept = _after(found.charges[k], legs[k], valid), np.zeros_like(theta), []
        for columns in _alike(found.charges[k + 1]):
            rows = np.flatnonzero((begins == found.charges[k + 1][columns[0]]).all(axis=1))
            q, _ = qr_positive(theta[np.ix_(rows, columns)])
            columns = columns[: q.shape[1]]  # more values than this sector has room for are roundoff
            out[np.ix_(rows, columns)] = q
            kept.append(columns)
        keep = np.sort(np.concatenate(kept))
        found.cores[k], found.cores[k + 1] = out[:, keep].reshape(left, n, -1), found.cores[k + 1][keep]
        found.spectra[k + 1], found.charges[k + 1] = found.spectra[k + 1][keep], found.charges[k + 1][keep]


def _after(charges: Array, leg: Array, valid: Callable[[Array], Array]) -> Array:
    """Return the charges on the right of a core, of rows (l n), from those on its left."""
    return valid((charges[:, None] + leg[None]).reshape(len(charges) * len(leg), -1))


def _before(charges: Array, leg: Array, valid: Callable[[Array], Array]) -> Array:
    """Return the charges on the left of a core, of columns (n r), from those on its right."""
    return valid((charges[None] - leg[:, None]).reshape(len(leg) * len(charges), -1))


def _of_one_charge(core: Array, rows: Array) -> tuple[Array, Array, float]:
    """Return the part of the last core that has the most common total charge, that, and the norm of the rest."""
    matrix = core.reshape(-1, 1)
    inside = max(_alike(rows), key=lambda sector: norm(matrix[sector]))
    out = np.zeros_like(matrix)
    out[inside] = matrix[inside]
    return out.reshape(core.shape), rows[inside[:1]], norm(np.delete(matrix, inside, axis=0))


def _split(matrix: Array, rows: Array, noise: float) -> tuple[Array, Array, Array, Array]:
    """Return u, s and diag(s) vh of a matrix whose rows have charges, and those of the columns of u."""
    parts = []
    for inside in _alike(rows):
        u, s, vh = thin_svd(matrix[inside])
        rank = int(np.count_nonzero(s > noise))
        turn = canonical_basis_change(u[:, :rank], s[:rank], matrix.dtype)
        parts.append((inside, turn.columns(u[:, :rank]), s[:rank], turn.rows(s[:rank, None] * vh[:rank])))
    values = np.concatenate([s for _, _, s, _ in parts])
    out, first = np.zeros((len(matrix), len(values)), matrix.dtype), 0
    for inside, u, s, _ in parts:
        out[inside, first : first + len(s)] = u
        first += len(s)
    charges = np.concatenate([np.repeat(rows[inside[:1]], len(s), axis=0) for inside, _, s, _ in parts])
    return out, values, np.concatenate([carry for *_, carry in parts]), charges


def _alike(charges: Array) -> list[Array]:
    """Return the rows of every charge, in the order of the charges."""
    if charges.shape[1] == 0:
        return [np.arange(len(charges))]
    numbers = np.unique(charges[:, ::-1], axis=0, return_inverse=True)[1].reshape(-1)  # the last one first, as TeNPy
    order = np.argsort(numbers, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(numbers[order])) + 1)
