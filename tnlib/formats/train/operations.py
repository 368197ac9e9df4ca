"""Kronecker and outer products of trains."""

from __future__ import annotations

import numpy as np

from tnlib.formats.train.format import TensorTrain
from tnlib.formats.train.tt_matrix import T


def kron_trains(a: TensorTrain, b: TensorTrain) -> TensorTrain:
    """Return the Kronecker product, leg by leg: core (l, n, r) (x) core (l', n', r'); ranks multiply."""
    cores = [np.kron(x, y) for x, y in zip(a.cores, b.cores, strict=True)]
    return TensorTrain.from_products(cores, a.exponent + b.exponent)


def chain_trains(a: T, b: T) -> T:
    """Return the outer product of two trains, or the Kronecker product of two TT-matrices: `b` behind `a`."""
    dtype = np.result_type(a.dtype, b.dtype)
    cores = [core.astype(dtype, copy=False) for core in (*a.cores, *b.cores)]
    return a.from_sweep(cores, None, a.exponent + b.exponent).folded()
