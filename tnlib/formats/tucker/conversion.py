"""Exact conversions between Tucker and tensor trains."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from tnlib._errors import ArgumentError
from tnlib._format import MAX_NDIM
from tnlib.formats.train.canonicalize import move_center
from tnlib.formats.train.cores import contract_cores
from tnlib.formats.train.format import TensorTrain
from tnlib.formats.train.round import right_canonicalize
from tnlib.formats.train.tt_svd import decompose_prepared
from tnlib.formats.tucker.format import Tucker
from tnlib.linalg.canonical_basis import canonical_basis_change
from tnlib.linalg.gram_svd import left_svd
from tnlib.linalg.scaling import Prepared, norm, rescale, shift
from tnlib.linalg.truncation import noise_level, numerical_rank

_LARGEST_CORE = 1 << 31  # entries


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


def refuse_large_core(function: str, ranks: Sequence[int], advice: str) -> None:
    """Raise where a Tucker core of these `ranks` has more legs than numpy allows, or too many entries."""
    if math.prod(ranks) > _LARGEST_CORE or len(ranks) > MAX_NDIM:
        raise ArgumentError(
            f"{function}: the core of a Tucker must have at most {_LARGEST_CORE:,} numbers and {MAX_NDIM} legs, got "
            f"{math.prod(ranks):.3g} and {len(ranks)}; {advice}."
        )
