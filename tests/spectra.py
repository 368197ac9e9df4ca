"""Singular values that are hard for Gram matrices: functions of the number of values, descending."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

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
