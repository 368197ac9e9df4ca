r"""Trains to trains of smaller ranks.

Oseledets, "Tensor-train decomposition", SIAM J. Sci. Comput. 33 (2011), Algorithm 2, from the right to the left and
back: first all weight is moved to the first core,

    (core)--<|--<|--<|          <|  right-isometric core
       |     |   |   |

then each bond is truncated from the left: that is a truncated SVD of the whole train, as all on its right is isometric.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from tnlib._typing import Array
from tnlib.linalg.groups import fixing_turn
from tnlib.linalg.rows import row_basis
from tnlib.linalg.scale import largest, norm, shift
from tnlib.linalg.svd import thin_svd
from tnlib.sweeps.budget import Budget


def gather(cores: Sequence[Array]) -> tuple[list[Array], int]:
    """Return the train of `cores` (l, n, r) with all but the first right-isometric, and e: it is 2**e times smaller.

    Ranks fall to the numerical ranks of the parts on the right where they are larger.
    """
    out: list[Array] = []
    carry, twos = np.ones((1, 1), cores[-1].dtype), 0
    for core in reversed(cores[1:]):
        left, n, right = core.shape
        grown = (core.reshape(-1, right) @ carry).reshape(left, -1)  # l (n [r]) [r] r'
        grown, e = _in_range(grown)
        carry, basis = row_basis(grown)
        out.append(basis.reshape(len(basis), n, -1))  # l' n r'
        twos += e
    first, e = _in_range(np.tensordot(cores[0], carry, 1))  # 1 n [r] [r] r'; new, even of one core
    return [first, *reversed(out)], twos + e


def truncate(
    cores: Sequence[Array], budget: Budget, max_rank: int | None, *, diagonal: bool = False
) -> tuple[list[Array], list[Array]]:
    """Truncate a train whose cores are right-isometric but the first.

    Return cores, left-isometric but the last, and the singular values that every bond keeps.
    """
    out: list[Array] = []
    spectra: list[Array] = []
    rest = cores[0]
    for core in cores[1:]:
        left, n, right = rest.shape
        u, s, vh = _svd_of_tall(rest.reshape(left * n, right))
        rank = budget.choose(s, max_rank=max_rank)
        u, s = u[:, :rank], s[:rank]
        turn = fixing_turn(u, s, budget.dtype, diagonal=diagonal)
        out.append(turn.columns(u).reshape(left, n, rank))  # l n r'
        spectra.append(s)
        carry = turn.rows(s[:, None] * vh[:rank])  # r' r
        rest = (carry @ core.reshape(right, -1)).reshape(rank, core.shape[1], -1)  # r' [r] n r''
    return [*out, rest], spectra


def schmidt_basis(
    cores: Sequence[Array], dtype: np.dtype[Any], *, diagonal: bool = False
) -> tuple[list[Array], list[Array], int]:
    """Return a train in the basis of left singular vectors on every bond, their values, and e: it is 2**e smaller.

    All cores but the last are left-isometric, and ranks are the numerical ones. `diagonal` as in `resolution`.
    """
    cores, twos = gather(cores)
    sides = [max(core.shape[0], len(cores)) for core in cores[1:]]
    out, spectra = truncate(cores, Budget(norm(cores[0]), None, sides, dtype), None, diagonal=diagonal)
    return out, spectra, twos


def _svd_of_tall(a: Array) -> tuple[Array, Array, Array]:
    """Return the thin SVD of `a` by that of a square factor."""
    if a.shape[0] < 2 * a.shape[1]:
        return thin_svd(a)
    l, q = row_basis(np.ascontiguousarray(a.T))  # a = q^T l^T
    u, s, vh = thin_svd(l.T)
    return q.T @ u, s, vh


def _in_range(a: Array) -> tuple[Array, int]:
    e = math.frexp(largest(a))[1]
    return (a, 0) if abs(e) < 32 else (shift(a, -e), e)
