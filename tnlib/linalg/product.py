"""Singular values of a product without forming it."""

from __future__ import annotations

from tnlib._typing import Array
from tnlib.linalg.groups import fixing_turn
from tnlib.linalg.orthogonal import qr_positive
from tnlib.linalg.svd import thin_svd


def product_svd(left: Array, right: Array) -> tuple[Array, Array, Array]:
    """Return u (m, k), s (k,), vh (k, n) of left (m, r) @ right (r, n), k <= r, at a cost linear in m and n.

    With left = Q1 R1 and right^T = Q2 R2, the product is Q1 (R1 R2^T) Q2^T, and the matrix between the isometries
    is only r x r. Signs, and bases of equal values, are fixed on the left.
    """
    q1, r1 = qr_positive(left)
    q2, r2 = qr_positive(right.T)
    u, s, vh = thin_svd(r1 @ r2.T)
    u, vh = q1 @ u, vh @ q2.T
    turn = fixing_turn(u, s / (s[0] or 1), u.dtype, diagonal=True)  # squares of values near 1 stay in range
    return turn.columns(u), s, turn.rows(vh)
