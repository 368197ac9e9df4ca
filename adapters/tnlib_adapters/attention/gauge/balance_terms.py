"""Balanced rank-one terms: the gauge of a product A B under diagonal scaling of its inner index."""

from __future__ import annotations

import numpy as np

from tnlib._typing import Array
from tnlib.linalg.canonical_basis import leading_phases
from tnlib.linalg.scaling import column_exponents, shift


def balance_terms(left: Array, right: Array, power: float = 0.5) -> tuple[Array, Array]:
    """Return A D and D^-1 B of `left` (m, r) and `right` (r, n), D diagonal, balanced term by term.

    Column j of A D and row j of D^-1 B have the norms s[j]^power and s[j]^(1 - power), and the leading entry of the
    column is positive. A term with zero product becomes zero on both sides. Diagonal scaling is the gauge freedom of
    distinct terms, such as the complex planes of distinct rotary frequencies.
    """
    e, f = column_exponents(left), column_exponents(right.T)
    a, b = shift(left, -e), shift(right.T, -f)  # m r, n r
    norms = np.linalg.norm(a, axis=0), np.linalg.norm(b, axis=0)
    s, phases = norms[0] * norms[1], leading_phases(a)
    exponents = np.floor(power * (e + f)).astype(int)
    factors = (2.0 ** (power * (e + f) - exponents)).astype(s.dtype)
    with np.errstate(divide="ignore", invalid="ignore"):
        to_left = np.where(s > 0, s**power * factors / norms[0], 0)
        to_right = np.where(s > 0, s ** (1.0 - power) / factors / norms[1], 0)
    a, b = a * (phases.conj() * to_left), b * (phases * to_right)
    return shift(a, exponents), shift(b, e + f - exponents).T
