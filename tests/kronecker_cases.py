"""Sums of Kronecker products with arrays or low-rank factors on the right."""

from __future__ import annotations

from typing import Any

import numpy as np
import oracles

import tnlib


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
