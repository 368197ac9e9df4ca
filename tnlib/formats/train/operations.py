"""Kronecker and outer products of trains, and conversions between trains and TT-matrices."""

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
    if len(a.cores) != len(b.cores):
        raise ArgumentError(
            f"kron: a and b must have as many legs, got {len(a.cores)} and {len(b.cores)}; "
            "a leg of size 1 can take the place of a missing one."
        )
    cores = [np.kron(x, y) for x, y in zip(a.cores, b.cores, strict=True)]
    return TensorTrain.from_products(cores, a.exponent + b.exponent)


def kron_matrices(a: TTMatrix, b: TTMatrix) -> TTMatrix:
    """Return the Kronecker product of two matrices: the cores of `b` behind those of `a`."""
    return _chain(TTMatrix, a, b)


def outer_trains(a: TensorTrain, b: TensorTrain) -> TensorTrain:
    """Return the outer product: the cores of `b` behind those of `a`."""
    return _chain(TensorTrain, a, b)


def _chain(kind: type[T], a: T, b: T) -> T:
    dtype = np.result_type(a.dtype, b.dtype)
    cores = [core.astype(dtype, copy=False) for core in (*a.cores, *b.cores)]
    return kind.from_sweep(cores, None, a.exponent + b.exponent).folded()


def matrix_to_train(t: TTMatrix) -> TensorTrain:
    """Return the train of the fused legs (m[k] n[k])."""
    return t.fused()


def train_to_matrix(t: TensorTrain, row_shape: Sequence[int]) -> TTMatrix:
    """Return the TT-matrix whose leg k has row_shape[k] rows and shape[k] / row_shape[k] columns."""
    if len(row_shape) != len(t.cores) or any(n % m for n, m in zip(t.shape, row_shape, strict=False)):
        raise ArgumentError(
            f"convert: row_shape must divide the legs {t.shape} one by one, got {tuple(row_shape)}; "
            "every leg is rows times columns."
        )
    cores = [core.reshape(len(core), m, -1, core.shape[2]) for core, m in zip(t.cores, row_shape, strict=True)]
    return TTMatrix.from_sweep(cores, t.center, t.exponent)
