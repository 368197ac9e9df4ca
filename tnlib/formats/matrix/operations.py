"""Verbs of SVD, LowRank and KroneckerTerms: round, inner, kron, outer, canonical_form."""

from __future__ import annotations

from typing import Any

import numpy as np

from tnlib._array_api import to_host
from tnlib._errors import ArgumentError
from tnlib._typing import Array
from tnlib.formats.matrix.kronecker_terms import KroneckerTerms, right_factors
from tnlib.formats.matrix.low_rank import LowRank, distribute, scaled_product_svd, truncated_product_svd
from tnlib.formats.matrix.matrix_sums import Factors, multiply_factors, rescale_terms
from tnlib.formats.matrix.svd import SVD
from tnlib.formats.train.format import TensorTrain
from tnlib.formats.train.operations import chain_trains
from tnlib.linalg.canonical_basis import CanonicalForm, choose_groups, group_basis_change
from tnlib.linalg.scaling import Scaled, norm, rescale, rescale_each, shift
from tnlib.linalg.truncation import TruncationBudget


def round_svd(t: SVD, rtol: float | None, max_rank: int | None) -> tuple[SVD, TruncationBudget]:
    """Return the leading singular triplets."""
    scaled = rescale(to_host(t.s)).array
    budget = TruncationBudget(norm(scaled), rtol, [len(scaled)], t.dtype, max_rank)
    rank = budget.truncate(scaled)
    u, s, vh = (1 * a for a in (t.u[..., :rank], t.s[:rank], t.vh[:rank, ...]))  # copies, which do not keep the rest
    return SVD(u, s, vh, t.left), budget


def round_low_rank(t: LowRank, rtol: float | None, max_rank: int | None) -> tuple[LowRank, TruncationBudget]:
    """Return U S and V^H of the truncated SVD."""
    u, s, vh, exponent = scaled_product_svd(*t.promoted_arrays())
    budget = TruncationBudget(norm(s), rtol, [len(s)], t.dtype, max_rank)
    rank = budget.truncate(s)
    return LowRank(shift(u[:, :rank] * s[:rank], exponent), vh[:rank]), budget


def inner_low_rank(a: LowRank, b: LowRank) -> Scaled:
    """Return the sum over r, s of (left_a^H left_b)[r, s] times conj(right_a right_b^H)[r, s]."""
    (l, e), (r, f), (m, g), (s, h) = (rescale(x) for x in (*a.arrays(), *b.arrays()))
    return Scaled(np.asarray(_inner_matrices((l, r), (m, s))), e + f + g + h)


def inner_terms(a: KroneckerTerms, b: KroneckerTerms) -> Scaled:
    """Return the sum over pairs of terms of the product of both inner products."""
    left_a, right_a, e = rescale_terms(a.left, right_factors(a))
    left_b, right_b, f = rescale_terms(b.left, right_factors(b))
    on_positions = left_a.reshape(len(left_a), -1).conj() @ left_b.reshape(len(left_b), -1).T  # h [(p p')] g
    on_features = np.array([[_inner_matrices(x, y) for y in right_b] for x in right_a])  # h g
    return Scaled(np.asarray(np.sum(on_positions * on_features)), e + f)  # [h g]


def _inner_matrices(a: Factors, b: Factors) -> Any:
    if len(a) == len(b) == 2:
        return np.sum((a[0].conj().T @ b[0]) * (a[1].conj() @ b[1].T))  # r [m] s times r [n] s
    return np.vdot(multiply_factors(a), multiply_factors(b))


def kron_svd(a: SVD, b: SVD) -> SVD:
    """Return the Kronecker product: singular values multiply, and are sorted again."""
    if a.left != b.left:
        raise ArgumentError(
            f"kron: a and b must have the same left legs, got {a.left} and {b.left}; decompose one of them anew."
        )
    s, order = _sorted_products(a.s, b.s)
    return SVD(np.kron(a.u, b.u)[..., order], s, np.kron(a.vh, b.vh)[order], a.left)


def outer_svd(a: SVD, b: SVD) -> SVD:
    """Return the outer product: singular values multiply, and are sorted again."""
    (s, order), rank = _sorted_products(a.s, b.s), len(a.s) * len(b.s)
    u = np.moveaxis(np.multiply.outer(a.u, b.u), a.u.ndim - 1, -2)  # (left of a) (left of b) ra rb
    vh = np.moveaxis(np.multiply.outer(a.vh, b.vh), a.vh.ndim, 1)  # ra rb (right of a) (right of b)
    u, vh = u.reshape(*u.shape[:-2], rank)[..., order], vh.reshape(rank, *vh.shape[2:])[order]
    return SVD(u, s, vh, (*(a.left or ()), *(a.ndim + k for k in b.left or ())))


def _sorted_products(a: Array, b: Array) -> tuple[Array, Array]:
    """Return all products a[i] * b[j], descending, and their positions in numpy.kron(a, b)."""
    products: Array = np.kron(a, b)
    order = np.argsort(-products, kind="stable")
    return products[order], order


def kron_low_rank(a: LowRank, b: LowRank) -> LowRank:
    """Return the Kronecker product: of the left and of the right factors."""
    ((l, r), e), ((m, s), f) = rescale_each(a.arrays()), rescale_each(b.arrays())
    return LowRank(shift(np.kron(l, m), e + f), np.kron(r, s))


def outer_low_rank(a: LowRank, b: LowRank) -> TensorTrain:
    """Return the outer product, a train of the four factors with a bond of size 1 in the middle."""
    return chain_trains(
        TensorTrain([a.left[None], a.right[:, :, None]]), TensorTrain([b.left[None], b.right[:, :, None]])
    )


def kron_terms(a: KroneckerTerms, b: KroneckerTerms) -> KroneckerTerms:
    """Return A (x) (B (x) b) for every A (x) B of `a`, or (a (x) C) (x) D for every C (x) D of `b`: the smaller one."""
    terms_of_a = a.left.size + len(a.left) * a.right[0].shape[0] * a.right[0].shape[1] * b.size
    terms_of_b = b.left.size * a.size + sum(x.size for factors in right_factors(b) for x in factors)
    if terms_of_a < terms_of_b:
        dense = b.full()
        return KroneckerTerms(a.left, [np.kron(np.asarray(term), dense) for term in a.right])
    dense = a.full()
    return KroneckerTerms(np.stack([np.kron(dense, matrix) for matrix in b.left]), b.right)


def canonical_svd(t: SVD, function: str, groups: Any) -> CanonicalForm:
    """Return the SVD with a canonical basis in every group of equal singular values."""
    u, vh = (a.astype(t.dtype, copy=False) for a in (t.u, t.vh))
    s, columns = rescale(t.s).array, u.reshape(-1, len(t.s))
    (chosen,) = choose_groups(function, t, [s], groups, diagonal=True)
    change = group_basis_change(columns, chosen)
    columns, rows = change.columns(columns), change.rows(vh.reshape(len(s), -1))
    value = SVD(columns.reshape(u.shape), t.s, rows.reshape(vh.shape), t.left)
    return CanonicalForm(value, [(columns, s)], [chosen])


def canonical_low_rank(t: LowRank, function: str, groups: Any) -> CanonicalForm:
    """Return the balanced product, with a canonical basis in every group of equal singular values."""
    u, s, vh, exponent = truncated_product_svd(*t.promoted_arrays())
    (chosen,) = choose_groups(function, t, [s], groups, diagonal=True)
    value = LowRank(*distribute(u, s, vh, exponent, 0.5, chosen))
    return CanonicalForm(value, [(group_basis_change(u, chosen).columns(u), s)], [chosen])
