"""Exact conversions between trains, Tucker, CP and factored matrices."""

from __future__ import annotations

import numpy as np

from tnlib._errors import ArgumentTypeError
from tnlib._format import Format
from tnlib.formats.cp.format import CP
from tnlib.formats.matrix.kronecker_terms import KroneckerTerms
from tnlib.formats.matrix.low_rank import LowRank, scaled_product_svd
from tnlib.formats.matrix.svd import SVD
from tnlib.formats.train.canonicalize import move_center
from tnlib.formats.train.cores import contract_cores, diagonal_core
from tnlib.formats.train.format import TensorTrain
from tnlib.formats.train.tt_matrix import TTMatrix
from tnlib.formats.train.tt_rounding import right_canonicalize
from tnlib.formats.train.tt_svd import decompose_prepared
from tnlib.formats.tucker.format import Tucker, refuse_large_core
from tnlib.linalg.canonical_basis import canonical_basis_change
from tnlib.linalg.gram_svd import left_svd
from tnlib.linalg.orthogonal import qr_positive
from tnlib.linalg.scaling import Prepared, norm, rescale, shift
from tnlib.linalg.truncation import noise_level, numerical_rank


def tucker_to_train(t: Tucker) -> TensorTrain:
    """Return the TT-SVD of the core at its numerical ranks, with the factors multiplied into the legs of its cores."""
    (core, e), *factors = map(rescale, t.promoted_arrays())
    core = np.ascontiguousarray(core)
    train, _ = decompose_prepared(Prepared(core, 0, norm(core)), None, None)
    cores = [np.matmul(factor.array, small) for factor, small in zip(factors, train.cores, strict=True)]  # l n [k] r
    return TensorTrain.from_products(cores, train.exponent + e + sum(factor.exponent for factor in factors))


def train_to_tucker(t: TensorTrain) -> Tucker:
    """Return the train as a core and orthonormal factors (n[k], r[k]), at its numerical multilinear ranks.

    Factor k holds the left singular vectors of leg k of the orthogonality centre while that is core k: there the
    unfolding of the centre has the singular values of the unfolding of the whole.
    """
    train, factors = right_canonicalize(t), []
    for k in range(t.ndim):
        train = move_center(train, k)
        center = train.cores[k]
        svd = left_svd(center, exact=True)  # n of (l, n, r)
        rank = numerical_rank(svd.s, noise_level(norm(center), t.dtype, center.shape[1]))
        u, s = svd.u[:, :rank], svd.s[:rank]
        factors.append(canonical_basis_change(u, s, u.dtype).columns(u).astype(t.dtype, copy=False))
        small = np.matmul(factors[k].conj().T, center)  # l rk [n] r
        train = TensorTrain.from_sweep([*train.cores[:k], small, *train.cores[k + 1 :]], k, train.exponent)
    refuse_large_core("convert", train.shape, f"stay with the {type(t).__name__}")
    core, e = contract_cores(train.cores)  # (r0 ... r(d-1)) 1
    return Tucker(shift(core, train.exponent + e).reshape(train.shape), tuple(factors))


def cp_to_train(t: CP) -> TensorTrain:
    """Return the train whose cores are diagonal in their bonds, which have the size of the rank."""
    (weights, e), *factors = map(rescale, t.promoted_arrays())
    arrays = [factor.array for factor in factors]
    if len(arrays) == 1:
        cores = [(arrays[0] * weights).sum(axis=1).reshape(1, -1, 1)]
    else:
        first, last = (arrays[0] * weights)[None], np.ascontiguousarray(arrays[-1].T)[:, :, None]
        cores = [first, *map(diagonal_core, arrays[1:-1]), last]
    return TensorTrain.from_products(cores, e + sum(factor.exponent for factor in factors))


def cp_to_tucker(t: CP) -> Tucker:
    """Return factors with orthonormal columns (n[k], min(n[k], R)), and the CP of their triangular factors as core."""
    refuse_large_core("convert", [min(factor.shape) for factor in t.factors], "stay with the CP")
    q, r = zip(*(qr_positive(factor.astype(t.dtype, copy=False)) for factor in t.factors), strict=True)
    core = CP(t.weights, r).full()
    return Tucker(core.astype(t.dtype, copy=False), q)


def train_to_cp(t: TensorTrain) -> CP:
    """Return the CP that a train of two cores, or of bonds of size 1, already is; raise for any other."""
    if max(t.ranks) > 1 and len(t.cores) > 2:
        raise ArgumentTypeError(f"convert: a CP does not hold a train of ranks {t.ranks} exactly.")
    factors = tuple(core.transpose(1, 0, 2).reshape(core.shape[1], -1) for core in t.cores)  # n (l r)
    return CP(shift(np.ones(factors[0].shape[1], factors[0].real.dtype), t.exponent), factors)


def train_to_low_rank(t: TensorTrain) -> LowRank:
    """Return the two cores of a train as factors."""
    _refuse_unless_matrix(t)
    left, right = t.cores
    return LowRank(shift(left[0], t.exponent), right[:, :, 0])


def tucker_to_low_rank(t: Tucker) -> LowRank:
    """Return the core, multiplied into the left factor, and the right factor."""
    _refuse_unless_matrix(t)
    left, right = t.factors
    return LowRank(left @ t.core, right.T)  # n0 [r0] r1


def cp_to_low_rank(t: CP) -> LowRank:
    """Return the weights, multiplied into the left factor, and the right factor."""
    _refuse_unless_matrix(t)
    left, right = t.factors
    return LowRank(left * t.weights, right.T)


def svd_to_low_rank(t: SVD) -> LowRank:
    """Return U S and V^H."""
    _refuse_unless_matrix(t)
    product = LowRank(t.u * t.s, t.vh)
    return product if t.left == (0,) else product.T


def low_rank_to_svd(t: LowRank) -> SVD:
    """Return the thin SVD, computed from the factors."""
    u, s, vh, exponent = scaled_product_svd(*t.promoted_arrays())
    return SVD(u, shift(s, exponent), vh)


def low_rank_to_train(t: LowRank) -> TensorTrain:
    """Return the factors as a train of two cores."""
    return TensorTrain([t.left[None], t.right[:, :, None]])


def svd_to_train(t: SVD) -> TensorTrain:
    """Return U S and V^H as a train of two cores."""
    return low_rank_to_train(svd_to_low_rank(t))


def terms_to_tt_matrix(t: KroneckerTerms) -> TTMatrix:
    """Return the sum as a TT-matrix of two cores, with a bond of the number of terms."""
    left = t.left.transpose(1, 2, 0)[None]  # 1 p p' H
    right = np.stack([np.asarray(term) for term in t.right])[..., None]  # H q q' 1
    return TTMatrix([left, right])


def tt_matrix_to_terms(t: TTMatrix) -> KroneckerTerms:
    """Return a TT-matrix of two cores as a sum over its bond."""
    if len(t.cores) != 2:
        raise ArgumentTypeError(f"convert: a sum of Kronecker products has two cores, got {len(t.cores)}.")
    left, right = t.cores
    return KroneckerTerms(shift(left[0].transpose(2, 0, 1), t.exponent), list(right[..., 0]))  # H p p', H q q'


def _refuse_unless_matrix(t: Format) -> None:
    if t.ndim != 2:
        raise ArgumentTypeError(f"convert: a matrix has two legs, got {t.ndim}.")
