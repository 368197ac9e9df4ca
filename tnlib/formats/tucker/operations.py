r"""Verbs of the Tucker format: round, inner, kron, outer, contract, and the canonical form.

The canonical form has orthonormal factors, and a core whose slices along every leg are orthogonal,

    sum over all legs but k of conj(core[.. i ..]) core[.. j ..]  =  0 for i != j,  s[k][i]^2 for i = j

with s[k] descending, the singular values of the unfolding along leg k: the higher-order SVD. The sequentially truncated
HOSVD is the same where it discards nothing but roundoff: a unitary on one leg leaves the singular values and vectors of
the other unfoldings unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from tnlib._array_api import adjoint, astype, contiguous, vdot
from tnlib._typing import Array
from tnlib.formats.tucker.format import Tucker, refuse_large_core
from tnlib.formats.tucker.st_hosvd import st_hosvd
from tnlib.linalg.canonical_basis import CanonicalForm, choose_groups, group_basis_change
from tnlib.linalg.multilinear import mode_product, unfold
from tnlib.linalg.orthogonal import qr_positive
from tnlib.linalg.scaling import Scaled, norm, normalize, rescale_each, shift
from tnlib.linalg.truncation import TruncationBudget


def round_tucker(t: Tucker, rtol: float | None, max_rank: int | None) -> tuple[Tucker, TruncationBudget]:
    """Return the truncated HOSVD of `t`, and its truncations."""
    core, factors, budget = recompress(t, rtol, max_rank)
    return Tucker(shift(core.array, core.exponent), tuple(factors)), budget


def inner_tucker(a: Tucker, b: Tucker) -> Scaled:
    """Return the inner product: the core of `b` with its legs taken to those of `a` by conj(A_k)^T B_k."""
    core, small = normalize(a.core), normalize(b.core)
    for k, (left, right) in enumerate(zip(a.factors, b.factors, strict=True)):
        (x, e), (y, f) = normalize(left), normalize(right)
        overlap = adjoint(x) @ y  # rak [nk] rbk
        small = Scaled(small.array, small.exponent + e + f).update(mode_product(small.array, overlap, k))
    return Scaled(vdot(core.array, small.array), core.exponent + small.exponent)


def kron_tucker(a: Tucker, b: Tucker) -> Tucker:
    """Return the Kronecker product: of the cores, and of the factors of every leg."""
    ((x, *left), e), ((y, *right), f) = rescale_each(a.arrays()), rescale_each(b.arrays())
    return Tucker(shift(np.kron(x, y), e + f), tuple(map(np.kron, left, right)))


def outer_tucker(a: Tucker, b: Tucker) -> Tucker:
    """Return the outer product, the legs of `b` behind those of `a`."""
    refuse_large_core("outer", a.ranks + b.ranks, "convert both to TensorTrain first")
    ((x, *left), e), ((y, *right), f) = rescale_each(a.arrays()), rescale_each(b.arrays())
    return Tucker(shift(np.multiply.outer(x, y), e + f), (*left, *right))


def contract_vectors(t: Tucker, vectors: Mapping[int, Array]) -> Tucker | Scaled:
    """Return `t` with legs summed against vectors (n[k],): a Tucker, or a `Scaled` number where no leg is left."""
    core = normalize(t.core)
    for k, vector in vectors.items():
        (v, e), (factor, f) = normalize(vector), normalize(t.factors[k])
        row = (v @ factor)[None]  # 1 [nk] rk
        core = Scaled(core.array, core.exponent + e + f).update(mode_product(core.array, row, k))
    kept = [k for k in range(t.ndim) if k not in vectors]
    if not kept:
        return core
    ranks = [core.array.shape[k] for k in kept]
    return Tucker(shift(core.array.reshape(ranks), core.exponent), tuple(t.factors[k] for k in kept))


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
    wide_core, factors, budget = st_hosvd(array, norm(array), rtol, max_rank, bases)
    narrow = [astype(a, t.dtype) for a in (wide_core, *factors)]
    return Scaled(narrow[0], core.exponent), narrow[1:], budget
