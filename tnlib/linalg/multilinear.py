"""Multilinear products: mode products, unfoldings, Khatri-Rao products."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from tnlib._array_api import permute, tensordot
from tnlib._typing import Array


def mode_product(x: Array, matrix: Array, mode: int) -> Array:
    """Return the product of `matrix` (m, n) with leg `mode` of `x`, whose size n becomes m."""
    out = tensordot(matrix, x, ((1,), (mode,)))  # m [n] ...
    return permute(out, (*range(1, mode + 1), 0, *range(mode + 1, x.ndim)))  # type: ignore[no-any-return]


def unfold(x: Array, mode: int) -> Array:
    """Return the mode unfolding of `x`, a matrix (n[mode], product of the other sizes)."""
    return np.moveaxis(x, mode, 0).reshape(x.shape[mode], -1)


def matrix_from(x: Array, legs: Sequence[int]) -> Array:
    """Return `x` as the matrix (other legs, `legs`), which maps the group `legs` to all others."""
    columns = math.prod(x.shape[k] for k in legs)
    return np.moveaxis(x, legs, range(-len(legs), 0)).reshape(-1, columns)


def khatri_rao(factors: Sequence[Array]) -> Array:
    """Return the column-wise Kronecker product (n[0] n[1] ..., R) of factors (n[k], R)."""
    out = factors[0]
    for factor in factors[1:]:
        out = (out[:, None, :] * factor[None, :, :]).reshape(-1, factor.shape[1])  # (n0 ... nk) R
    return out


def contract_columns(x: Array, factors: Sequence[Array], mode: int) -> Array:
    """Return `x` (n[0], n[1], ..., R) summed over all legs but `mode`, (n[mode], R).

    Column j of the result is the contraction of x[..., j] with the j-th columns of the other factors (n[k], R).
    """
    y = x
    for factor in factors[:mode:-1]:
        y = np.einsum("...jr,jr->...r", y, factor)  # n0 ... [nj] R
    for factor in factors[:mode]:
        y = np.einsum("i...r,ir->...r", y, factor)  # [ni] ... R
    return y
