"""Kronecker and outer products of trains, and the conversion of a train to a TT-matrix."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from tnlib._errors import ArgumentError
from tnlib.formats.train.format import TensorTrain
from tnlib.formats.train.tt_matrix import TTMatrix

T = TypeVar("T", TensorTrain, TTMatrix)


def kron_trains(a: TensorTrain, b: TensorTrain) -> TensorTrain:
    """Return the Kronecker product, leg by leg: core (l, n, r) (x) core (l', n', r'); ranks multiply."""
    cores = [np.kron(x, y) for x, y in zip(a.cores, b.cores, strict=True)]
    return TensorTrain.from_products(cores, a.exponent + b.exponent)


def chain_trains(a: T, b: T) -> T:
    """Return the outer product of two trains, or the Kronecker product of two TT-matrices: `b` behind `a`."""
    dtype = np.result_type(a.dtype, b.dtype)
    cores = [core.astype(dtype, copy=False) for core in (*a.cores, *b.cores)]
    return a.from_sweep(cores, None, a.exponent + b.exponent).folded()


def train_to_matrix(t: TensorTrain, row_shape: Sequence[int]) -> TTMatrix:
    """Return the TT-matrix whose leg k has row_shape[k] rows and shape[k] / row_shape[k] columns."""
    if len(row_shape) != len(t.cores) or any(n % m for n, m in zip(t.shape, row_shape, strict=False)):
        raise ArgumentError(
            f"convert: row_shape must divide the legs {t.shape} one by one, got {tuple(row_shape)}; "
            "every leg is rows times columns."
        )
    cores = [core.reshape(len(core), m, -1, core.shape[2]) for core, m in zip(t.cores, row_shape, strict=True)]
    return TTMatrix.from_sweep(cores, t.center, t.exponent)
