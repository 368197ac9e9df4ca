"""Decompositions of arrays past memory: the calls, arrays of low ranks with noise, and the contract."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import oracles

import tnlib

SHAPE = (20, 24, 30, 8)
ROWS, COLUMNS = (4, 6, 20), {240: (5, 6, 8), 480: (12, 5, 8)}

CALLS: dict[str, Callable[..., Any]] = {
    "tt_svd": tnlib.tt_svd,
    "tucker": tnlib.tucker,
    "svd": lambda x, **options: tnlib.svd(x, left=1, **options),
    "ttm_svd": lambda x, **options: tnlib.ttm_svd(x, ROWS, COLUMNS[x.shape[1]], **options),
}
TENSORS = ["tt_svd", "tucker", "svd"]


def noisy(dtype: Any = np.float64, noise: float = 1e-3, seed: int = 0, shape: tuple[int, ...] = SHAPE) -> np.ndarray:
    return oracles.noisy_tucker(shape, (3, 4, 5, 2)[: len(shape)], dtype, noise, seed)


def paired(n_columns: int) -> np.ndarray:
    """A matrix (480, n_columns), a TT-matrix of ranks 2 and 3 plus noise."""
    pairs = [*zip(ROWS, COLUMNS[n_columns], strict=True)]
    train = oracles.random_train([m * n for m, n in pairs], [1, 2, 3, 1]).reshape([n for pair in pairs for n in pair])
    x = train.transpose(0, 2, 4, 1, 3, 5).reshape(480, n_columns)
    return x + 1e-3 * oracles.normal(x.shape, seed=3) / np.sqrt(x.size)


def check(name: str, x: np.ndarray, stored: Any, storage: tnlib.Storage, **options: Any) -> Any:
    fit, warned = oracles.quietly(lambda: CALLS[name](stored, storage=storage, **options))
    oracles.assert_fit(fit, x, rtol=options.get("rtol"))
    oracles.assert_gauge(fit.value)
    oracles.assert_warned(fit, warned)
    assert fit.value.dtype == (x.dtype if x.dtype.kind in "fc" else np.float64)
    return fit
