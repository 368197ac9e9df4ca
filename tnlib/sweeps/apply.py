"""A TT-matrix applied to dense vectors."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tnlib._typing import Array


def apply_cores(cores: Sequence[Array], x: Array) -> Array:
    """Return the matrix of `cores` (r[k], m[k], n[k], r[k+1]) times x (prod n, K), shape (prod m, K).

    Core by core: the column leg n[k] of x is exchanged for the row leg m[k], which joins the end.
    """
    y = x.reshape(1, *(core.shape[2] for core in cores), -1)  # l n0 n1 ... K
    for core in cores:
        y = np.tensordot(y, core, axes=([0, 1], [0, 2]))  # [l] [nk] ... K m0 ... mk r
        y = np.moveaxis(y, -1, 0)  # r n(k+1) ... K m0 ... mk
    columns = y.shape[1]
    return y.reshape(columns, -1).T  # (m0 ... m(d-1)) K
