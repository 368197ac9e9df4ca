r"""Operator Schmidt form of a sum of Kronecker products.

An operator on positions (x) features is a matrix M with a row per pair of positions and a column per pair of features,
M = sum_h vec(A[h]) vec(B[h])^T. Its singular value decomposition is the operator Schmidt form

    M = U W,    U^H U = 1,    W W^H = diag(s^2),

a shortest sum of Kronecker products: the rows of W are combinations of the B[h], and the matrix of all vec(B[h]) is
never formed. M. A. Nielsen et al., "Quantum dynamics as a physical resource", Phys. Rev. A 67 (2003), section II.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tnlib._errors import ArgumentError
from tnlib._typing import Array, MaxRank
from tnlib._validate import as_position
from tnlib.formats.matrix.kronecker_terms import KroneckerTerms, right_factors
from tnlib.formats.matrix.low_rank import LowRank
from tnlib.formats.matrix.matrix_sums import Factors, combine, gram_factor, multiply_factors, rescale_terms
from tnlib.formats.train.cores import pair_legs
from tnlib.formats.train.tt_matrix import TTMatrix
from tnlib.formats.train.tt_svd import split_array
from tnlib.linalg.scaling import Scaled, norm, shift
from tnlib.linalg.thin_svd import product_svd
from tnlib.linalg.truncation import TruncationBudget


class SchmidtForm(NamedTuple):
    """U and s of the operator Schmidt form; it is 2**exponent times smaller than the operator."""

    u: Array  # (p p', k)
    s: Array  # (k,), descending
    to_right: Array  # (k, H): W is this matrix times the right terms
    right: list[Factors]
    exponent: int


def round_terms(t: KroneckerTerms, rtol: float | None, max_rank: MaxRank) -> tuple[KroneckerTerms, TruncationBudget]:
    """Return the fewest terms, left ones orthonormal and right ones orthogonal, their norms descending."""
    form = _schmidt_form(t)
    sides = [min(math.prod(t.left.shape[1:]), math.prod(t.right[0].shape))]
    budget = TruncationBudget(norm(form.s), rtol, sides, t.dtype, max_rank)
    rank = budget.truncate(form.s)
    left = np.ascontiguousarray(form.u[:, :rank].T).reshape(-1, *t.left.shape[1:])  # k p p'
    scaled = [(shift(f[0], form.exponent), *f[1:]) for f in combine(form.to_right[:rank], form.right)]
    return KroneckerTerms(left, [LowRank(*f) if len(f) == 2 else f[0] for f in scaled]), budget


def terms_schmidt_values(t: KroneckerTerms, function: str, bond: int) -> Scaled:
    """Return the Schmidt values between positions and features, descending."""
    if as_position(function, "bond", bond, 3, "bonds") != 1:
        raise ArgumentError(
            f"{function}: bond must be 1, got {bond}; KroneckerTerms have one bond, between positions and features."
        )
    form = _schmidt_form(t)
    return Scaled(form.s, form.exponent)


def terms_ttm_svd(
    t: KroneckerTerms,
    row_shape: Sequence[int],
    col_shape: Sequence[int],
    rtol: float | None,
    max_rank: MaxRank,
) -> tuple[TTMatrix, TruncationBudget]:
    """Return the train over finer legs, of which the first split the positions, left-canonical.

    The sweep of TT-SVD, in two parts. As the rows of diag(1/s) W are orthonormal, truncating U diag(s) discards as much
    as truncating the operator.
    """
    split = _position_legs(t, row_shape, col_shape)
    form = _schmidt_form(t)
    pairs = [m * n for m, n in zip(row_shape, col_shape, strict=True)]
    sides = [min(math.prod(pairs[:k]), math.prod(pairs[k:])) for k in range(1, len(pairs))]
    budget = TruncationBudget(norm(form.s), rtol, sides, t.dtype, max_rank)
    rank = int(np.count_nonzero(form.s > 0))
    if rank == 0:
        zeros = [np.zeros((1, m, n, 1), t.dtype) for m, n in zip(row_shape, col_shape, strict=True)]
        return TTMatrix.from_sweep(zeros, len(zeros) - 1), budget

    (_, p, p_in), (q, q_in), s = t.left.shape, t.right[0].shape, form.s[:rank]
    rows = (form.u[:, :rank] * s).reshape(p, p_in, rank).transpose(0, 2, 1).reshape(-1, p_in)  # (p k) p'
    positions = pair_legs(rows, (*row_shape[:split], rank), (*col_shape[:split], 1))  # pp' ... k
    *cores, last = split_array(np.ascontiguousarray(positions), budget)

    dense = np.stack([multiply_factors(factors) for factors in combine(form.to_right[:rank], form.right)])
    carry = (last[:, :, 0] / s) @ dense.reshape(rank, -1)  # r [k] (q q')
    features = np.stack([pair_legs(row.reshape(q, q_in), row_shape[split:], col_shape[split:]) for row in carry])
    first = features.shape[1]
    others = split_array(features.reshape(-1, *features.shape[2:]), budget)
    cores += [others[0].reshape(len(carry), first, -1), *others[1:]]  # r qq' r'
    legs = zip(cores, row_shape, col_shape, strict=True)
    unfused = [core.reshape(len(core), m, n, -1) for core, m, n in legs]  # l m n r
    return TTMatrix.from_sweep(unfused, len(cores) - 1, form.exponent).folded(), budget


def _schmidt_form(t: KroneckerTerms) -> SchmidtForm:
    left, right, exponent = rescale_terms(t.left, right_factors(t))
    columns = left.reshape(len(left), -1).T  # pp' h
    u, s, _ = product_svd(columns, gram_factor(right).T)
    return SchmidtForm(u, s, u.conj().T @ columns, right, exponent)  # k [pp'] h


def _position_legs(t: KroneckerTerms, row_shape: Sequence[int], col_shape: Sequence[int]) -> int:
    """Return the number of legs that split the positions; all others split the features."""
    positions = t.left.shape[1:]
    for k in range(1, len(row_shape)):
        if (math.prod(row_shape[:k]), math.prod(col_shape[:k])) == positions:
            return k
    raise ArgumentError(
        "ttm_svd: row_shape and col_shape must split the positions of KroneckerTerms before the features, and begin "
        f"with legs that multiply to {positions[0]} and {positions[1]}, got {tuple(row_shape)} and "
        f"{tuple(col_shape)}; no leg may hold part of both."
    )
