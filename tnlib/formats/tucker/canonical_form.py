r"""Canonical form of a Tucker: orthonormal factors, and a core whose slices along every leg are orthogonal.

    sum over all legs but k of conj(core[.. i ..]) core[.. j ..]  =  0 for i != j,  s[k][i]^2 for i = j

with s[k] descending, the singular values of the unfolding along leg k: the higher-order SVD. The sequentially truncated
HOSVD is the same where it discards nothing but roundoff: a unitary on one leg leaves the singular values and vectors of
the other unfoldings unchanged.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tnlib._array_api import astype, contiguous
from tnlib._typing import Array
from tnlib.formats.tucker.format import Tucker
from tnlib.formats.tucker.st_hosvd import st_hosvd
from tnlib.linalg.canonical_basis import CanonicalForm, choose_groups, group_basis_change
from tnlib.linalg.multilinear import mode_product, unfold
from tnlib.linalg.orthogonal import qr_positive
from tnlib.linalg.scaling import Scaled, norm, normalize, shift
from tnlib.linalg.truncation import TruncationBudget


def canonical_tucker(t: Tucker, function: str, groups: Any) -> CanonicalForm:
    """Return the higher-order SVD of `t`, with a canonical basis in every group of equal singular values."""
    (core, exponent), factors, _ = recompress(t, None, None)
    spectra = [np.linalg.norm(unfold(core, k), axis=1) for k in range(core.ndim)]  # lengths of the slices
    chosen = choose_groups(function, t, spectra, groups)
    for k, of_leg in enumerate(chosen):
        change = group_basis_change(factors[k], of_leg)
        factors[k] = change.columns(factors[k])
        rows = change.rows(unfold(core, k))  # rk (r0 ...)
        core = np.moveaxis(rows.reshape(-1, *core.shape[:k], *core.shape[k + 1 :]), 0, k)
    value = Tucker(shift(np.ascontiguousarray(core), exponent), tuple(factors))
    return CanonicalForm(value, list(zip(factors, spectra, strict=True)), chosen)


def recompress(t: Tucker, rtol: float | None, max_rank: int | None) -> tuple[Scaled, list[Array], TruncationBudget]:
    """Return the core and the orthonormal factors of the truncated HOSVD of `t`, from its core; nothing dense is made.

    With A_k = Q_k R_k, the core multiplied by all R_k holds the coordinates of `t` in the orthonormal bases Q_k.
    """
    (core, *sides), bases = map(normalize, t.promoted_arrays()), []
    for k, (side, e) in enumerate(sides):
        q, r = qr_positive(side)
        core = Scaled(core.array, core.exponent + e).update(mode_product(core.array, r, k))  # r0 ... rk' [rk] ...
        bases.append(q)
    array = contiguous(core.array)
    wide_core, factors, budget = st_hosvd(array, norm(array), rtol, [max_rank] * array.ndim, bases)
    narrow = [astype(a, t.dtype) for a in (wide_core, *factors)]
    return Scaled(narrow[0], core.exponent), narrow[1:], budget
