r"""Gauges of a train: on which side of a bond a matrix and its inverse go.

Cores left of the centre are left-isometric, those right of it right-isometric,

    |>--|>--(C)--<|--<|         sum over l, n of conj(A[l, n, r]) A[l, n, r'] = 1
    |   |    |    |   |         sum over n, r of B[l, n, r] conj(B[l', n, r]) = 1

so that the norm, the Schmidt values and the best truncation of the whole are those of the centre alone. Schollwoeck,
"The density-matrix renormalization group in the age of matrix product states", Annals of Physics 326 (2011), section 4.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from tnlib._typing import Array
from tnlib.linalg.groups import fix_basis
from tnlib.linalg.orthogonal import qr_positive
from tnlib.linalg.scale import exponent, norm, shift


def move_center(cores: Sequence[Array], start: int | None, stop: int) -> tuple[list[Array], int]:
    """Return the train with its centre at core `stop`, and e: what is returned is 2**e times smaller.

    One QR per core between `start` and `stop`; where `start` is None, all others are made isometric towards `stop`.
    """
    out, twos = list(cores), 0
    for k in range(0 if start is None else start, stop):
        out[k], out[k + 1], e = _to_the_right(out[k], out[k + 1])
        twos += e
    for k in range(len(out) - 1 if start is None else start, stop, -1):
        out[k - 1], out[k], e = _to_the_left(out[k - 1], out[k])
        twos += e
    return out, twos


def turn_bonds(cores: Sequence[Array], groups: Sequence[Sequence[slice]]) -> list[Array]:
    """Return the left-canonical train with a fixed basis in the `groups` of every bond; see `fix_basis`."""
    out = list(cores)
    for k, of_bond in enumerate(groups):
        left, n, right = out[k].shape
        flat = out[k].reshape(left * n, right)
        turn = fix_basis(flat, of_bond)
        out[k] = turn.columns(flat).reshape(left, n, right)
        following = out[k + 1]
        out[k + 1] = turn.rows(following.reshape(right, -1)).reshape(following.shape)
    return out


def isometry_errors(cores: Sequence[Array], center: int) -> list[float]:
    """Return the Frobenius norm by which every core fails to be isometric towards core `center`; 0 for itself."""
    errors = []
    for k, core in enumerate(cores):
        if k == center:
            errors.append(0.0)
            continue
        columns = core.reshape(-1, core.shape[-1]) if k < center else core.reshape(len(core), -1).T
        with np.errstate(over="ignore", invalid="ignore"):
            off = columns.conj().T @ columns - np.eye(columns.shape[1])
        errors.append(norm(off) if np.isfinite(off).all() else math.inf)
    return errors


def _to_the_right(core: Array, following: Array) -> tuple[Array, Array, int]:
    """Return a left-isometric core, and the next one with what it leaves, in range."""
    left, n, right = core.shape
    q, r = qr_positive(core.reshape(left * n, right))
    grown = (r @ following.reshape(right, -1)).reshape(-1, *following.shape[1:])  # r' [r] n r''
    e = exponent(grown)
    return q.reshape(left, n, -1), shift(grown, -e), e


def _to_the_left(previous: Array, core: Array) -> tuple[Array, Array, int]:
    """Return the core before with what this one leaves, in range, and a right-isometric core."""
    left, n, right = core.shape
    q, r = qr_positive(np.ascontiguousarray(core.reshape(left, n * right).T))  # core = r^T q^T
    grown = previous @ r.T  # l n [l'] l''
    e = exponent(grown)
    return shift(grown, -e), np.ascontiguousarray(q.T).reshape(-1, n, right), e
