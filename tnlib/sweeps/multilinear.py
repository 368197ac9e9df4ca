"""Trains and factors: a Tucker core or a CP as a train, and a train as factors and a smaller train."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tnlib._typing import Array
from tnlib.gauge.train import move_center
from tnlib.linalg.groups import fixing_turn
from tnlib.linalg.left import left_svd
from tnlib.linalg.rank import choose_rank, noise_level
from tnlib.linalg.scale import norm
from tnlib.sweeps.round import gather


def diagonal_cores(factors: Sequence[Array]) -> list[Array]:
    """Return the cores (R, n, R) of the sum of outer products of columns of factors (n, R), diagonal between ends."""
    if len(factors) == 1:
        return [factors[0].sum(axis=1).reshape(1, -1, 1)]
    rank = factors[0].shape[1]
    between = []
    for factor in factors[1:-1]:
        core = np.zeros((rank, len(factor), rank), factor.dtype)
        core[np.arange(rank), :, np.arange(rank)] = factor.T
        between.append(core)
    return [factors[0][None], *between, np.ascontiguousarray(factors[-1].T)[:, :, None]]


def widen_legs(cores: Sequence[Array], factors: Sequence[Array]) -> list[Array]:
    """Return cores (l, n, r) for cores (l, k, r) whose legs go through factors (n, k)."""
    return [np.matmul(factor, core) for factor, core in zip(factors, cores, strict=True)]  # l n [k] r


def narrow_legs(cores: Sequence[Array]) -> tuple[list[Array], list[Array], int]:
    """Return orthonormal factors (n, k), the cores (l, k, r) of what they leave, and e: those are 2**e times smaller.

    Every k is the numerical rank of its leg, seen when the centre of the train comes by.
    """
    small, twos = gather(cores)
    factors = []
    for k in range(len(small)):
        if k > 0:
            small, e = move_center(small, k - 1, k)
            twos += e
        left, n, right = small[k].shape
        found = left_svd(small[k], exact=True)  # l n r: the legs on both sides are summed over
        rank = choose_rank(found.s, budget=None, noise=noise_level(norm(small[k]), small[k].dtype, n))
        u = found.u[:, :rank]
        u = fixing_turn(u, found.s[:rank], u.dtype).columns(u).astype(small[k].dtype, copy=False)
        factors.append(u)
        small[k] = np.matmul(u.conj().T, small[k]).reshape(left, rank, right)  # l k [n] r
    return factors, small, twos
