"""Tensors that are hard for CP fits, and the contract of such a fit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import oracles

import tnlib


def of_factors(factors: Sequence[np.ndarray], dtype: Any) -> np.ndarray:
    return oracles.contract(tnlib.CP(np.ones(factors[0].shape[1]), list(factors))).astype(dtype)


def normal_components(shape: Sequence[int], rank: int, dtype: Any, seed: int) -> np.ndarray:
    """Components with columns in no special position to each other."""
    wide = np.complex128 if np.dtype(dtype).kind == "c" else np.float64
    return of_factors([oracles.normal((n, rank), wide, 10 * seed + k) for k, n in enumerate(shape)], dtype)


def collinear_components(
    shape: Sequence[int], rank: int, cosine: float, seed: int, dtype: Any = np.float64
) -> np.ndarray:
    """Components whose columns have about this cosine with each other, in every factor."""
    wide = np.complex128 if np.dtype(dtype).kind == "c" else np.float64
    factors = []
    for k, n in enumerate(shape):
        columns = oracles.normal((n, rank + 1), wide, 20 * seed + k)
        columns /= np.linalg.norm(columns, axis=0)
        factor = math.sqrt(cosine) * columns[:, :1] + math.sqrt(1 - cosine) * columns[:, 1:]
        factors.append(factor / np.linalg.norm(factor, axis=0))
    return of_factors(factors, dtype)


def check_fit(x: np.ndarray, rank: int, **kwargs: Any) -> Any:
    with oracles.unchanged(x):
        fit, warned = oracles.quietly(lambda: tnlib.cp(x, rank, **kwargs))
    value, rtol = fit.value, kwargs.get("rtol")
    error, unit = oracles.true_error(x, value), oracles.slack(value)
    assert fit.certified
    assert error <= fit.error + unit, f"the true error {error:.3g} exceeds the reported {fit.error:.3g}"
    assert fit.error <= error * (1 + 1e-6) + 100 * oracles.eps(x.dtype)
    assert rtol is None or fit.converged == (fit.error <= max(rtol, unit))
    oracles.assert_gauge(value)
    oracles.assert_warned(fit, warned)
    assert value.ranks == (rank,)
    assert value.shape == x.shape
    assert value.dtype == x.dtype
    assert fit.n_iter <= kwargs.get("n_iter", 500)
    return fit
