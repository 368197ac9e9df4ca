"""Sharing one budget of numbers out over blocks that each offer several sizes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tnlib._typing import Array


@dataclass(frozen=True)
class Curve:
    """What a block of weights costs and errs at each of its options.

    Parameters
    ----------
    costs
        Stored numbers, ascending.
    errors
        Squared relative error, descending.
    """

    costs: Array
    errors: Array


def allocate(curves: Sequence[Curve], budget: int) -> list[int] | None:
    """Choose one option of every curve, with the sum of errors as small as the budget of numbers allows.

    On convex curves the steps with the largest gain per number, taken until the budget is spent, are the best
    choice but for the last step; a curve that is not convex is replaced by its lower convex hull. What is left
    of the budget then goes to whichever single options still fit.

    Returns None where even the smallest options exceed the budget.

    >>> line = Curve(np.array([0, 10, 20]), np.array([1.0, 0.1, 0.0]))
    >>> allocate([line, line], 30)
    [2, 1]
    """
    choice = [0] * len(curves)
    left = budget - sum(int(curve.costs[0]) for curve in curves)
    if left < 0:
        return None

    steps = [(gain, block, start, end) for block, curve in enumerate(curves) for gain, start, end in _hull_steps(curve)]
    for _, block, start, end in sorted(steps, key=lambda step: -step[0]):  # stable: equal gains in the blocks' order
        price = int(curves[block].costs[end] - curves[block].costs[start])
        if choice[block] == start and price <= left:
            choice[block] = end
            left -= price
    return _spend_rest(curves, choice, left)


def _hull_steps(curve: Curve) -> list[tuple[float, int, int]]:
    """Return (error saved per number, option, next option) along the lower convex hull, from its first option."""
    hull = [0]
    for k in range(1, len(curve.costs)):
        # points on a straight line stay: small steps fit a budget better than one large one
        while len(hull) > 1 and _gain(curve, hull[-2], hull[-1]) < _gain(curve, hull[-1], k):
            hull.pop()
        hull.append(k)
    return [(_gain(curve, a, b), a, b) for a, b in itertools.pairwise(hull)]


def _gain(curve: Curve, a: int, b: int) -> float:
    return float(curve.errors[a] - curve.errors[b]) / max(1, int(curve.costs[b] - curve.costs[a]))


def _spend_rest(curves: Sequence[Curve], choice: list[int], left: int) -> list[int]:
    """Move single blocks on to the largest option that still fits, the one that saves most error first."""
    while True:
        offers = []
        for block, curve in enumerate(curves):
            now = choice[block]
            last = int(np.searchsorted(curve.costs, curve.costs[now] + left, side="right")) - 1
            if last > now:
                offers.append((float(curve.errors[now] - curve.errors[last]), -block, last))
        if not offers:
            return choice
        _, block, option = max(offers)
        left -= int(curves[-block].costs[option] - curves[-block].costs[choice[-block]])
        choice[-block] = option
