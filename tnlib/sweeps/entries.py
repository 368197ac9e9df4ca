"""Single entries of a train, many at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tnlib._typing import Array


def pick_entries(cores: Sequence[Array], points: Array) -> tuple[Array, Array]:
    """Return x and e, so that entry i of the train of cores (l, n, r) is x[i] * 2**e[i] at indices points[i], (N, d).

    Rows that meet the same index of a core are multiplied together; every row has its own power of two set aside.
    """
    if len(points) == 0:
        return np.empty(0, np.result_type(*cores)), np.empty(0, np.int64)
    rows = np.ones((len(points), 1), np.result_type(*cores))
    twos = np.zeros(len(points), np.int64)
    for k, core in enumerate(cores):
        grown = np.empty((len(points), core.shape[2]), rows.dtype)
        order = np.argsort(points[:, k], kind="stable")
        values, starts = np.unique(points[order, k], return_index=True)
        for index, here in zip(values, np.split(order, starts[1:]), strict=True):
            grown[here] = rows[here] @ core[:, index]  # N [l] r
        rows, e = set_aside(grown)
        twos += e
    return rows[:, 0], twos


def set_aside(rows: Array) -> tuple[Array, Array]:
    """Return contiguous rows (N, r) with the power of two of the largest entry of each divided out, and the powers."""
    parts = rows.view(rows.real.dtype)
    e = np.frexp(np.abs(parts).max(axis=1))[1]
    return np.ldexp(parts, -e[:, None]).view(rows.dtype), e.astype(np.int64)
