"""Scales, invertible matrices and comparisons for tests of canonical forms."""

from __future__ import annotations

from typing import Any

import numpy as np
import oracles

SCALES = {"float32": (1.0, 1e-15, 1e15), "float64": (1.0, 1e-150, 1e150)}


def real(dtype: np.dtype) -> np.dtype:
    return np.zeros(0, dtype).real.dtype


def scales(dtype: np.dtype) -> tuple[float, ...]:
    return SCALES[real(dtype).name]


def invertible(n: int, dtype: Any, seed: int, condition: float = 10.0) -> np.ndarray:
    """A matrix with singular values from 1 to `condition`."""
    return oracles.with_spectrum(np.geomspace(condition, 1, n), n, n, np.result_type(dtype, np.float64), seed)


def assert_alike(a: Any, b: Any, factor: float) -> None:
    """The same arrays but for `factor` eps of the norm of each."""
    assert type(a) is type(b)
    for one, other in zip(a.arrays(), b.arrays(), strict=True):
        oracles.assert_close(one, other, a.dtype, factor)
