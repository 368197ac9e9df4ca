"""How many singular values to keep: one rule for every format."""

from __future__ import annotations

from typing import Any

import numpy as np

from tnlib._typing import Array

# A matrix whose entries were rounded once, and every factorisation of it, carry singular values of this many
# eps of its norm that mean nothing. Sixteen were seen for trains of 24 cores multiplied out; this is twice that.
_NOISE = 32.0


def tails(s: Array) -> Array:
    """Return t with t[r] = sqrt(sum(s[r:] ** 2)), r = 0 ... len(s): the error of keeping r values.

    >>> tails(np.array([3.0, 4.0, 0.0]))
    array([5., 4., 0., 0.])
    """
    squares = np.square(s, dtype=np.float64)
    # smallest first, so that what is discarded is summed without rounding against what is kept
    sums: Array = np.concatenate([[0.0], np.cumsum(squares[::-1])])[::-1]
    return np.sqrt(sums)


def noise_level(norm: float, dtype: np.dtype[Any], smaller_side: int) -> float:
    """Return the value below which singular values of a matrix of this norm are roundoff.

    `smaller_side` is the smaller dimension of the unfolding of the whole tensor, not of what a sweep left of it.
    """
    eps = float(np.finfo(dtype).eps)
    return eps * norm * max(_NOISE, float(np.sqrt(smaller_side)))


def choose_rank(s: Array, *, budget: float | None, noise: float, max_rank: int | None = None) -> int:
    """Return the smallest rank whose discarded tail fits `budget`, at least 1 and at most `max_rank`.

    Parameters
    ----------
    s
        Singular values, descending.
    budget
        Frobenius norm that may be discarded; None keeps every value above `noise`, the numerical rank.
    noise
        What `noise_level` says.
    max_rank
        Cap; the smaller rank wins.

    >>> choose_rank(np.array([3.0, 1.0, 0.1]), budget=0.2, noise=0.0)
    2
    """
    if budget is None:
        rank = int(np.count_nonzero(s > noise))
    else:  # the last tail is 0, so one is found
        rank = int(np.argmax(tails(s) <= budget))
    rank = max(1, rank)
    return rank if max_rank is None else min(rank, max_rank)


def cuts_group(s: Array, rank: int, noise: float) -> bool:
    """Say whether the values on both sides of the cut are equal to roundoff, and not roundoff themselves."""
    return rank < len(s) and float(s[rank]) > noise and float(s[rank - 1] - s[rank]) <= noise
