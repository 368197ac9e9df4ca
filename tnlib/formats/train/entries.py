"""Entries of a train at many indices."""

from __future__ import annotations

import numpy as np

from tnlib._typing import Array
from tnlib.formats.train.format import TensorTrain, Train

_BATCH = 1 << 20  # numbers in the rows that are carried through a train


def train_entries(t: Train, points: Array) -> tuple[Array, Array]:
    """Return x and e: entry i of `t` is x[i] * 2**e[i] at the indices points[i], (N, d), of the fused legs."""
    train = t.fused()
    step = max(1, _BATCH // max(train.ranks))
    parts = [_multiply_rows(train, points[i : i + step]) for i in range(0, len(points), step)]
    return np.concatenate([x for x, _ in parts]), np.concatenate([e for _, e in parts])


def _multiply_rows(train: TensorTrain, points: Array) -> tuple[Array, Array]:
    """Rows that share the index of a core are multiplied together; every row has its own power of two."""
    rows = np.ones((len(points), 1), train.dtype)
    exponents = np.full(len(points), train.exponent, np.int64)
    for k, core in enumerate(train.cores):
        grown = np.empty((len(points), core.shape[2]), rows.dtype)
        order = np.argsort(points[:, k], kind="stable")
        values, starts = np.unique(points[order, k], return_index=True)
        for index, members in zip(values, np.split(order, starts[1:]), strict=True):
            grown[members] = rows[members] @ core[:, index]  # N [l] r
        rows, e = normalize_rows(grown)
        exponents += e
    return rows[:, 0], exponents


def normalize_rows(rows: Array) -> tuple[Array, Array]:
    """Return contiguous rows (N, r) with the largest part of each in [1/2, 1), and the powers of two (N,) removed."""
    parts = rows.view(rows.real.dtype)
    e = np.frexp(np.abs(parts).max(axis=1, initial=0.0))[1]
    return np.ldexp(parts, -e[:, None]).view(rows.dtype), e.astype(np.int64)
