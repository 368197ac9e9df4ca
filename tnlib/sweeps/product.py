r"""A TT-matrix times a train, truncated on the way: the product of the ranks is never held.

Rounding A x needs, at every bond, the part on its right only up to an isometry: a factor T with as many rows as the
bonds of A and x have pairs, and no legs,

    (A)--(A)--            (T)--
     |    |       =   T Q,     Q right-isometric, and forgotten
    (x)--(x)--

A sweep from the right finds them by one orthogonalisation per core. The sweep back decomposes, bond by bond,

    Q^H A x  on the left of the bond, (m, pairs),   times   T  on its right, (pairs, k),

whose singular values are those of the whole, as everything on the left is isometric already: truncated there, the
result is the one that rounding the product would give, error included. Of the factors T every sqrt(d)-th is kept, and
those between are made again when the sweep back comes to them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from tnlib._typing import Array
from tnlib.linalg.groups import fixing_turn
from tnlib.linalg.left import left_svd
from tnlib.linalg.rows import row_factor
from tnlib.linalg.scale import largest, norm, shift
from tnlib.sweeps.budget import Budget

_HELD = 1 << 18  # numbers in the factors T that may be held all at once


class RightFactors:
    """The factors T (la, lb, k) of what stands on the right of every bond of a b, and their powers of two.

    Cores are (la, m, n, ra) of a and (lb, n, p, rb) of b.
    """

    def __init__(self, a: Sequence[Array], b: Sequence[Array]) -> None:
        self._a, self._b = a, b
        self._step = 1 if _bound(a, b) <= _HELD else math.isqrt(len(a))
        last = np.ones((1, 1, 1), np.result_type(a[-1], b[-1]))
        self._held: dict[int, tuple[Array, int]] = {len(a): (last, 0)}
        self.sizes = [1] * (len(a) + 1)
        self._sweep(len(a), 0, self._step)

    def at(self, bond: int) -> tuple[Array, int]:
        """Return T and e at a bond: the part on its right is 2**e T Q. To be asked for from the left to the right."""
        for passed in [k for k in self._held if k < bond]:
            del self._held[passed]
        if bond not in self._held:
            self._sweep(min(self._held), bond, 1)
        return self._held[bond]

    def _sweep(self, start: int, stop: int, step: int) -> None:
        carry, twos = self._held[start]
        for k in range(start - 1, stop - 1, -1):
            left = self._a[k].shape[0], self._b[k].shape[0]
            grown = _onto_right(self._a[k], self._b[k], carry)
            e = math.frexp(largest(grown))[1]
            factor = row_factor(shift(grown, -e))
            carry, twos = factor.reshape(*left, -1), twos + e
            self.sizes[k] = carry.shape[2]
            if k % step == 0:
                self._held[k] = carry, twos


def truncated_product(
    a: Sequence[Array], b: Sequence[Array], rtol: float | None, max_rank: int | None, dtype: np.dtype[Any]
) -> tuple[list[Array], int, Budget]:
    """Return cores (l, m, p, r) of the product, left-isometric but the last, e, and what was discarded.

    The product is 2**e times what is returned.
    """
    right = RightFactors(a, b)
    whole, scale = right.at(0)
    sides = [max(size, len(a)) for size in right.sizes[1:-1]]
    budget = Budget(norm(whole), rtol, sides, dtype)
    out: list[Array] = []
    carry, twos = np.ones((1, 1, 1), dtype), 0  # l la lb
    for k, (one, other) in enumerate(zip(a, b, strict=True)):
        shape = len(carry), one.shape[1], other.shape[2]  # l m p
        theta = _onto_left(carry, one, other).reshape(math.prod(shape), -1)  # (l m p) (ra rb)
        if k == len(a) - 1:
            out.append(theta.reshape(*shape, 1))
            break
        factor, e = right.at(k + 1)
        found = left_svd((theta @ factor.reshape(theta.shape[1], -1))[None], exact=True)
        s = shift(found.s, twos + e - scale)
        rank = budget.choose(s, max_rank=max_rank)
        u = found.u[:, :rank]
        u = fixing_turn(u, s[:rank], dtype).columns(u).astype(dtype, copy=False)
        out.append(u.reshape(*shape, rank))
        grown = u.conj().T @ theta  # r [(l m p)] (ra rb)
        e = math.frexp(largest(grown))[1]
        carry, twos = shift(grown, -e).reshape(rank, one.shape[3], other.shape[3]), twos + e
    return out, twos, budget


def _bound(a: Sequence[Array], b: Sequence[Array]) -> int:
    """Return how many numbers all factors T together have at most."""
    total, size = 0, 1
    for one, other in zip(reversed(a), reversed(b), strict=True):
        pairs = one.shape[0] * other.shape[0]
        size = min(pairs, one.shape[1] * other.shape[2] * size)
        total += pairs * size
    return total


def _onto_right(one: Array, other: Array, carry: Array) -> Array:
    """Return a core of each on the left of a factor (ra, rb, k), as a matrix (la lb, m p k)."""
    half = np.tensordot(other, carry, axes=([3], [1]))  # lb n p [rb] ra k
    both = np.tensordot(one, half, axes=([2, 3], [1, 3]))  # la m [n ra] lb p k
    return both.transpose(0, 2, 1, 3, 4).reshape(one.shape[0] * other.shape[0], -1)


def _onto_left(carry: Array, one: Array, other: Array) -> Array:
    """Return a core of each on the right of (l, la, lb), as (l, m, p, ra, rb)."""
    half = np.tensordot(carry, other, axes=([2], [0]))  # l la [lb] n p rb
    both = np.tensordot(half, one, axes=([1, 2], [0, 2]))  # l [la n] p rb m ra
    return both.transpose(0, 3, 1, 4, 2)
