r"""Higher-order orthogonal iteration: the Tucker factors of fixed ranks, improved one leg at a time.

With the other factors fixed, the error of a projection is smallest where the core is largest, so the best factor k is

    U_k  =  the leading r[k] left singular vectors of the unfolding along leg k of  x times U_j^H along all legs j != k

and a sweep never raises the error.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tnlib._typing import Array
from tnlib.formats.tucker.st_hosvd import unfold_slabs
from tnlib.linalg.canonical_basis import canonical_basis_change
from tnlib.linalg.gram_svd import left_svd
from tnlib.linalg.multilinear import mode_product
from tnlib.linalg.orthogonal import complete_columns


def orthogonal_iteration(x: Array, factors: Sequence[Array], n_iter: int) -> tuple[Array, list[Array]]:
    """Return the core and the orthonormal factors (n[k], r[k]) after `n_iter` sweeps over the legs of `x`."""
    factors = list(factors)
    partial = x
    for _ in range(n_iter):
        for k, factor in enumerate(factors):
            partial = x
            for j, other in enumerate(factors):
                if j != k:
                    partial = mode_product(partial, other.conj().T, j)  # r0 ... nk ... rj [nj] ...
            factors[k] = _leading_columns(unfold_slabs(np.ascontiguousarray(partial), k), factor.shape[1])
    core = mode_product(partial, factors[-1].conj().T, x.ndim - 1)  # r0 ... r(d-1) [n(d-1)]
    return np.ascontiguousarray(core), factors


def _leading_columns(slabs: Array, rank: int) -> Array:
    """Return `rank` left singular vectors of the middle leg of (l, n, m), completed where l m is smaller."""
    svd = left_svd(slabs, exact=True)
    u, s = svd.u[:, :rank], svd.s[:rank]
    columns = canonical_basis_change(u, s, slabs.dtype).columns(u).astype(slabs.dtype, copy=False)
    return columns if columns.shape[1] == rank else complete_columns(columns, rank)
