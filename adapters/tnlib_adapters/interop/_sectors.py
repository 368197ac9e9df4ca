"""Schmidt decomposition of a train by charge sectors.

If every leg k carries charges and the state has one total charge, states on the left of a bond with different charges
meet orthogonal states on its right, so the Schmidt decomposition splits by charge. A decomposition that ignores charges
may mix them within a group of equal Schmidt values, which block-sparse tensors cannot represent. Without charges there
is one sector, and the sweeps are those of ordinary rounding.
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
    """2**exponent * size times a train of norm 1 with right-isometric cores; bond charges belong to the left."""

    cores: list[Array]
    spectra: list[Array]  # of all d + 1 bonds, descending within a charge
    charges: list[Array]  # of all d + 1 bonds, (r, number of charges)
    size: float
    exponent: int
    outside: float  # norm of the omitted part, whose total charge is not the most common one


def by_charge(train: TensorTrain, legs: Sequence[Array], valid: Callable[[Array], Array]) -> Sectors:
    """Return the train in bases of definite charge, with numerical ranks; for zero, a basis state and size 0.

    `legs[k]` (n[k], number of charges) holds the charges of the entries of leg k; `valid` maps charges into their
    range. The sweep from left to right assigns a charge to every bond state; the last core determines the total charge.
    Parts with another total charge are omitted there, and from the other cores in the sweep from right to left.
    """
    gathered = right_canonicalize(train)
    train_cores, dtype, size = list(gathered.cores), train.dtype, norm(gathered.cores[0])
    if size == 0.0:
        train_cores = [np.eye(1, n, dtype=dtype)[..., None] for n in train.shape]
    noise = [noise_level(1.0, dtype, max(core.shape[-1], len(legs))) for core in train_cores]
    last = train_cores[0] / train_cores[0].real.dtype.type(size or 1.0)
    labelled, charges = [], [valid(np.zeros((1, legs[0].shape[1]), int))]
    for k, following in enumerate(train_cores[1:]):
        left, n, right = last.shape
        u, _, carry, ends = _split(last.reshape(left * n, right), _after(charges[k], legs[k], valid), noise[k])
        labelled.append(u.reshape(left, n, -1))
        charges.append(ends)
        last = (carry @ following.reshape(right, -1)).reshape(len(carry), *following.shape[1:])  # r' [r] n r''
    last, total, outside = _of_one_charge(last, _after(charges[-1], legs[-1], valid))
    unit = np.ones(1, last.real.dtype)
    sectors = Sectors([last], [unit], [total], size, gathered.exponent, outside)
    for k in range(len(legs) - 1, 0, -1):
        left, n, right = sectors.cores[0].shape
        u, s, carry, begins = _split(
            sectors.cores[0].reshape(left, n * right).T, _before(sectors.charges[0], legs[k], valid), noise[k - 1]
        )
        sectors.cores[0] = np.ascontiguousarray(u.T).reshape(-1, n, right)
        sectors.cores.insert(0, labelled[k - 1] @ carry.T)  # l n [r] r'
        sectors.spectra.insert(0, s)
        sectors.charges.insert(0, begins)
    sectors.spectra.insert(0, unit)
    sectors.charges.insert(0, charges[0])
    return sectors


def left_isometric(found: Sectors, legs: Sequence[Array], valid: Callable[[Array], Array], center: int) -> None:
    """Make the cores before number `center` left-isometric in the same bases.

    The columns of diag(left values) @ core are orthogonal, with the right values as norms. Division by these would
    amplify roundoff in the smallest ones; a QR that starts with the longest columns does not.
    """
    for k in range(center):
        left, n, right = found.cores[k].shape
        theta = (found.spectra[k][:, None, None] * found.cores[k]).reshape(left * n, right)
        begins, out, values_kept = _after(found.charges[k], legs[k], valid), np.zeros_like(theta), []
        for columns in _alike(found.charges[k + 1]):
            rows = np.flatnonzero((begins == found.charges[k + 1][columns[0]]).all(axis=1))
            q, _ = qr_positive(theta[np.ix_(rows, columns)])
            columns = columns[: q.shape[1]]  # values beyond the size of this sector are roundoff
            out[np.ix_(rows, columns)] = q
            values_kept.append(columns)
        keep = np.sort(np.concatenate(values_kept))
        found.cores[k], found.cores[k + 1] = out[:, keep].reshape(left, n, -1), found.cores[k + 1][keep]
        found.spectra[k + 1], found.charges[k + 1] = found.spectra[k + 1][keep], found.charges[k + 1][keep]


def _after(charges: Array, leg: Array, valid: Callable[[Array], Array]) -> Array:
    """Return the charges after a core, of rows (l n), from those before it."""
    return valid((charges[:, None] + leg[None]).reshape(len(charges) * len(leg), -1))


def _before(charges: Array, leg: Array, valid: Callable[[Array], Array]) -> Array:
    """Return the charges before a core, of columns (n r), from those after it."""
    return valid((charges[None] - leg[:, None]).reshape(len(leg) * len(charges), -1))


def _of_one_charge(core: Array, rows: Array) -> tuple[Array, Array, float]:
    """Return the part of the last core with the most common total charge, that charge, and the norm of the rest."""
    matrix = core.reshape(-1, 1)
    inside = max(_alike(rows), key=lambda sector: norm(matrix[sector]))
    out = np.zeros_like(matrix)
    out[inside] = matrix[inside]
    return out.reshape(core.shape), rows[inside[:1]], norm(np.delete(matrix, inside, axis=0))


def _split(matrix: Array, rows: Array, noise: float) -> tuple[Array, Array, Array, Array]:
    """Return u, s and diag(s) vh of a matrix with row charges, and the charges of the columns of u."""
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
    """Return the row numbers of every charge, sorted by charge."""
    if charges.shape[1] == 0:
        return [np.arange(len(charges))]
    numbers = np.unique(charges[:, ::-1], axis=0, return_inverse=True)[1].reshape(-1)  # last charge first, as in TeNPy
    order = np.argsort(numbers, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(numbers[order])) + 1)
