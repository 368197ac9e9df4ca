"""Conversion of trains to TT-matrices."""

from __future__ import annotations

from collections.abc import Sequence

from tnlib._errors import ArgumentError
from tnlib.formats.train.format import TensorTrain
from tnlib.formats.train.tt_matrix import TTMatrix


def train_to_matrix(t: TensorTrain, row_shape: Sequence[int]) -> TTMatrix:
    """Return the TT-matrix whose leg k has row_shape[k] rows and shape[k] / row_shape[k] columns."""
    if len(row_shape) != len(t.cores) or any(n % m for n, m in zip(t.shape, row_shape, strict=False)):
        raise ArgumentError(
            f"convert: row_shape must divide the legs {t.shape} one by one, got {tuple(row_shape)}; "
            "every leg is rows times columns."
        )
    cores = [core.reshape(len(core), m, -1, core.shape[2]) for core, m in zip(t.cores, row_shape, strict=True)]
    return TTMatrix.from_sweep(cores, t.center, t.exponent)
