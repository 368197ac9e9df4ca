r"""Gauges of A B: what goes through the inner leg, A G and G^-1 B for any invertible G.

The product has an SVD, U S V^H, that does not know how it was split. Shared out as A = U S^p and B = S^(1-p) V^H, it is

    p = 1/2   balanced: A^H A = B B^H = S, the split of the smallest norm(A)^2 + norm(B)^2
    p = 0     A isometric, the columns of A orthonormal
    p = 1     B isometric, the rows of B orthonormal

and what equal singular values and phases leave open is fixed on the left. Several matrices that share one B, and with
it one G, are one A, stacked: [A1; A2; ...] B.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from tnlib._typing import Array
from tnlib.linalg.groups import fix_basis
from tnlib.linalg.product import product_svd
from tnlib.linalg.rank import choose_rank, noise_level
from tnlib.linalg.scale import column_exponents, shift
from tnlib.linalg.signs import leading_phases


def product_in_range(left: Array, right: Array) -> tuple[Array, Array, Array, int]:
    """Return u, s, vh of left (m, r) @ right (r, n) at its numerical rank, and e: s is 2**e times too small.

    Columns of `left` and rows of `right` may be of any scale, each of its own; the product is never formed.
    """
    left, right, twos = _even_terms(left, right)
    u, s, vh = product_svd(left, right)
    noise = noise_level(float(np.linalg.norm(s)), s.dtype, min(len(u), vh.shape[1]))
    rank = choose_rank(s, budget=None, noise=noise)
    return u[:, :rank], s[:rank], vh[:rank], twos


def share_out(
    u: Array, s: Array, vh: Array, twos: int, power: float, groups: Sequence[slice] | None = None
) -> tuple[Array, Array]:
    """Return A = u S^power and B = S^(1 - power) vh, S being 2**twos diag(s); `groups` are to share a basis."""
    left, right = u * s**power, s[:, None] ** (1.0 - power) * vh
    if groups:
        turn = fix_basis(u, groups)
        left, right = turn.columns(left), turn.rows(right)
    whole = math.floor(twos * power)
    part = s.dtype.type(2.0 ** (twos * power - whole))
    return shift(left * part, whole), shift(right / part, twos - whole)


def balance_terms(left: Array, right: Array, power: float = 0.5) -> tuple[Array, Array]:
    """Return A D and D^-1 B of `left` (m, r) and `right` (r, n), D diagonal: every term alone in its gauge.

    Column j of the one and row j of the other have lengths s[j]^power and s[j]^(1 - power), and the leading entry of
    the column is positive. A term whose product is zero becomes zero on both sides. This is what is left free where
    terms can be told apart: the complex plane of every frequency of a rotary embedding.
    """
    e, f = column_exponents(left), column_exponents(right.T)
    a, b = shift(left, -e), shift(right.T, -f)  # m r, n r
    lengths = np.linalg.norm(a, axis=0), np.linalg.norm(b, axis=0)
    s, phases = lengths[0] * lengths[1], leading_phases(a)
    twos = np.floor(power * (e + f)).astype(int)
    rest = (2.0 ** (power * (e + f) - twos)).astype(s.dtype)
    with np.errstate(divide="ignore", invalid="ignore"):
        to_left = np.where(s > 0, s**power * rest / lengths[0], 0)
        to_right = np.where(s > 0, s ** (1.0 - power) / rest / lengths[1], 0)
    a, b = a * (phases.conj() * to_left), b * (phases * to_right)
    return shift(a, twos), shift(b, e + f - twos).T


def _even_terms(left: Array, right: Array) -> tuple[Array, Array, int]:
    """Return factors of the same product in range, and e: it is 2**e times smaller. Scales move exactly."""
    e, f = column_exponents(left), column_exponents(right.T)
    there = (np.abs(left).max(axis=0) > 0) & (np.abs(right).max(axis=1) > 0)
    top = int((e + f)[there].max()) if there.any() else 0
    below = np.where(there, e + f - top, 0)  # none above zero: what underflows is nothing beside the largest term
    return shift(left, -e), shift(right.T, below - f).T, top
