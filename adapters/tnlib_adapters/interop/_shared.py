"""Find the orthogonality centre of a chain of cores."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tnlib._typing import Array

# A computed isometry is off by a few eps per column; one multiplied by 1 + 1e-10 must not pass.
_ISOMETRIC = 1e4


def find_center(cores: Sequence[Array], claimed: int | None = None) -> int | None:
    """Return the index of an orthogonality centre of cores (r, legs ..., r'), None if there is none.

    Other libraries store the centre, but the user may have changed the cores since; the test costs one product per
    core. If several cores qualify, as in product states, return the claimed one or the first.
    """
    last = len(cores) - 1
    start = last  # all cores after it are right-isometric
    while start > 0 and _is_isometry(cores[start].reshape(len(cores[start]), -1).T):
        start -= 1
    stop = 0  # all cores before it are left-isometric
    while stop < last and _is_isometry(cores[stop].reshape(-1, cores[stop].shape[-1])):
        stop += 1
    if stop < start:
        return None
    return claimed if claimed is not None and start <= claimed <= stop else start


def _is_isometry(a: Array) -> bool:
    columns = a.shape[1]
    if columns > len(a):
        return False
    limit = _ISOMETRIC * np.finfo(a.dtype).eps * np.sqrt(columns)
    with np.errstate(over="ignore", invalid="ignore"):  # an overflow is not an isometry
        return bool(np.linalg.norm(a.conj().T @ a - np.eye(columns)) <= limit)
