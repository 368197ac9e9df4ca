"""Exact conversions between CP, Tucker and tensor trains."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tnlib._errors import ArgumentTypeError
from tnlib._typing import Array
from tnlib.formats.cp.format import CP
from tnlib.formats.train.format import TensorTrain
from tnlib.formats.tucker.conversion import refuse_large_core
from tnlib.formats.tucker.format import Tucker
from tnlib.linalg.orthogonal import qr_positive
from tnlib.linalg.scaling import rescale, shift


def cp_to_train(t: CP) -> TensorTrain:
    """Return the train whose cores are diagonal in their bonds, which have the size of the rank."""
    (weights, e), *factors = map(rescale, t.promoted_arrays())
    arrays = [factor.array for factor in factors]
    cores = _diagonal_cores([arrays[0] * weights, *arrays[1:]])
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


def _diagonal_cores(factors: Sequence[Array]) -> list[Array]:
    """Return cores (R, n, R), diagonal between the ends, of the sum of outer products of columns (n, R)."""
    if len(factors) == 1:
        return [factors[0].sum(axis=1).reshape(1, -1, 1)]
    rank = factors[0].shape[1]
    inner = []
    for factor in factors[1:-1]:
        core = np.zeros((rank, len(factor), rank), factor.dtype)
        core[np.arange(rank), :, np.arange(rank)] = factor.T
        inner.append(core)
    return [factors[0][None], *inner, np.ascontiguousarray(factors[-1].T)[:, :, None]]
