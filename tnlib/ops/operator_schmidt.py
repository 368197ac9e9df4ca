r"""Sums of Kronecker products as trains of two cores, and of more.

An operator on positions (x) features is a matrix M with a row per pair of positions and a column per pair of features,
M = sum_h vec(A[h]) vec(B[h])^T. Its singular value decomposition is the operator Schmidt form

    M = U W,    U^H U = 1,    W W^H = diag(s^2),

a shortest sum of Kronecker products: the rows of W are combinations of the B[h], which are never laid side by side.
M. A. Nielsen et al., "Quantum dynamics as a physical resource", Phys. Rev. A 67 (2003), section II.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from tnlib._typing import Array
from tnlib.formats.kronecker import KroneckerTerms
from tnlib.formats.low_rank import LowRank
from tnlib.formats.train import TTMatrix
from tnlib.linalg.product import product_svd
from tnlib.linalg.scale import norm, shift
from tnlib.linalg.terms import Factors, combine, terms_in_range, terms_triangle
from tnlib.sweeps.budget import Budget
from tnlib.sweeps.dense import pair_legs
from tnlib.sweeps.split import dense_to_cores


def round_terms(t: KroneckerTerms, rtol: float | None, max_rank: int | None) -> tuple[KroneckerTerms, Budget]:
    """Return the fewest terms, left ones orthonormal and right ones orthogonal, their norms descending."""
    columns, matrices, twos, u, s = _decomposed(t)
    budget = Budget(norm(s), rtol, [_smaller_side(t)], t.dtype)
    u = u[:, : budget.choose(s, max_rank=max_rank)]
    right = [_as_term(factors, twos) for factors in combine(u.conj().T @ columns, matrices)]
    return KroneckerTerms(_as_stack(u, t), right), budget


def terms_spectrum(t: KroneckerTerms) -> tuple[Array, int]:
    """Return s and e: 2**e * s are the Schmidt values between positions and features, descending."""
    *_, twos, _, s = _decomposed(t)
    return s, twos


def terms_to_matrix(
    t: KroneckerTerms,
    row_shape: Sequence[int],
    col_shape: Sequence[int],
    split: int,
    rtol: float | None,
    max_rank: int | None,
) -> tuple[TTMatrix, Budget]:
    """Return the train whose first `split` legs are those of the positions, left-canonical.

    The sweep of an array, in two parts. As the rows of diag(1/s) W are orthonormal, what U diag(s) loses is what the
    operator loses.
    """
    columns, matrices, twos, u, s = _decomposed(t)
    pairs = [m * n for m, n in zip(row_shape, col_shape, strict=True)]
    sides = [min(math.prod(pairs[:k]), math.prod(pairs[k:])) for k in range(1, len(pairs))]
    budget = Budget(norm(s), rtol, sides, t.dtype)
    u, s = u[:, s > 0], s[s > 0]
    if not len(s):
        zeros = [np.zeros((1, m, n, 1), t.dtype) for m, n in zip(row_shape, col_shape, strict=True)]
        return TTMatrix(tuple(zeros), center=len(zeros) - 1), budget

    (_, p, p_in), (q, q_in) = t.left.shape, t.right[0].shape
    on_top = (u * s).reshape(p, p_in, -1).transpose(0, 2, 1).reshape(-1, p_in)  # (p k) p'
    positions = pair_legs(on_top, (*row_shape[:split], len(s)), (*col_shape[:split], 1))  # pp' ... k
    *cores, last = dense_to_cores(np.ascontiguousarray(positions), budget, max_rank)

    dense = [_multiplied(factors) for factors in combine(u.conj().T @ columns, matrices)]
    carry = (last[:, :, 0] / s) @ np.stack(dense).reshape(len(s), -1)  # r [k] (q q')
    legs = [pair_legs(row.reshape(q, q_in), row_shape[split:], col_shape[split:]) for row in carry]  # qq' ...
    features = np.stack(legs)
    first = features.shape[1]
    rest = dense_to_cores(features.reshape(-1, *features.shape[2:]), budget, max_rank)
    cores += [rest[0].reshape(len(carry), first, -1), *rest[1:]]  # r qq' r'
    cores[-1] = shift(cores[-1], twos)
    split_legs = zip(cores, row_shape, col_shape, strict=True)
    return TTMatrix(tuple(core.reshape(len(core), m, n, -1) for core, m, n in split_legs), len(cores) - 1), budget


def _decomposed(t: KroneckerTerms) -> tuple[Array, list[Factors], int, Array, Array]:
    """Return the left terms as columns, the right ones, the power of two set aside, U and s."""
    left, matrices, twos = terms_in_range(t.left, [_factors(term) for term in t.right])
    columns = left.reshape(len(left), -1).T  # pp' h
    u, s, _ = product_svd(columns, terms_triangle(matrices).T)
    return columns, matrices, twos, u, s


def _smaller_side(t: KroneckerTerms) -> int:
    return min(math.prod(t.left.shape[1:]), math.prod(t.right[0].shape))


def _as_stack(u: Array, t: KroneckerTerms) -> Array:
    return np.ascontiguousarray(u.T).reshape(-1, *t.left.shape[1:])  # k p p'


def _factors(term: Array | LowRank) -> Factors:
    return term.arrays() if isinstance(term, LowRank) else (term,)


def _as_term(factors: Factors, twos: int) -> Array | LowRank:
    first = shift(factors[0], twos)
    return LowRank(first, factors[1]) if len(factors) == 2 else first


def _multiplied(factors: Factors) -> Array:
    return factors[0] @ factors[1] if len(factors) == 2 else factors[0]
