"""Exact conversions between matrix formats, trains, Tucker and CP."""

from __future__ import annotations

import numpy as np

from tnlib._errors import ArgumentTypeError
from tnlib._format import Format
from tnlib.formats.cp.format import CP
from tnlib.formats.matrix.balance import scaled_product_svd
from tnlib.formats.matrix.kronecker_terms import KroneckerTerms
from tnlib.formats.matrix.low_rank import LowRank
from tnlib.formats.matrix.svd import SVD
from tnlib.formats.train.format import TensorTrain
from tnlib.formats.train.tt_matrix import TTMatrix
from tnlib.formats.tucker.format import Tucker
from tnlib.linalg.scaling import shift


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
