"""A TT-matrix applied to dense vectors."""

from __future__ import annotations

from collections.abc import Sequence

from tnlib._typing import Array


def apply_cores(cores: Sequence[Array], x: Array) -> Array:
    """Return the matrix of `cores` (r[k], m[k], n[k], r[k+1]) times x (prod n, K), shape (prod m, K).

    Core by core: the column leg n[k] of x is exchanged for the row leg m[k], which joins the end.
    """
    columns = x.shape[1]
    y = x  # (l n0) (n1 ... K)
    for core in cores:
        left, m, n, right = core.shape
        exchange = core.transpose(0, 2, 1, 3).reshape(left * n, m * right)  # (l nk) (mk r)
        y = y.reshape(left * n, -1).T @ exchange  # (n(k+1) ... K m0 ...) [(l nk)] (mk r)
        y = y.reshape(-1, right).T  # r (n(k+1) ... K m0 ... mk)
    return y.reshape(columns, -1).T  # (m0 ... m(d-1)) K
