"""Inputs of the tests of formats: hard CP fits, sums of Kronecker products, singular values hard for Gram matrices."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
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


def terms(kind: str, n_terms: int, dtype: Any, shape: tuple[int, int] = (5, 4)) -> list[Any]:
    dense = [oracles.normal(shape, dtype, seed=h) for h in range(n_terms)]
    factored = [
        tnlib.LowRank(oracles.normal((shape[0], 2), dtype, 10 + h), oracles.normal((2, shape[1]), dtype, 20 + h))
        for h in range(n_terms)
    ]
    return {"dense": dense, "factored": factored, "mixed": [*factored[:1], *dense[1:]]}[kind]


def some(
    kind: str = "factored", n_terms: int = 3, dtype: Any = np.float64, p: tuple[int, int] = (3, 3), seed: int = 0
) -> tnlib.KroneckerTerms:
    """Terms on (positions, 4 or 5 features)."""
    return tnlib.KroneckerTerms(oracles.normal((n_terms, *p), dtype, seed=60 + seed), terms(kind, n_terms, dtype))


SPECTRA: dict[str, Callable[[int], np.ndarray]] = {
    "geometric to 1e-16": lambda m: 10.0 ** -np.linspace(0, 16, m),
    "geometric to 1e-40": lambda m: 10.0 ** -np.linspace(0, 40, m),
    "clusters": lambda m: 10.0 ** -(4.0 * (np.arange(m) * 5 // m)),
    "clusters of three": lambda m: 10.0 ** -(1.5 * (np.arange(m) // 3)),
    "exact cut": lambda m: np.where(np.arange(m) < m // 3, 1.0, 0.0),
    "cut at 1e-7": lambda m: np.where(np.arange(m) < m // 3, 1.0, 1e-7),
    "cut at 1e-9": lambda m: np.where(np.arange(m) < m // 3, 1.0, 1e-9),
    "one large": lambda m: np.where(np.arange(m) < 1, 1.0, 1e-8),
    "rank one": lambda m: np.where(np.arange(m) < 1, 1.0, 0.0),
    "flat": lambda m: np.ones(m),
}
