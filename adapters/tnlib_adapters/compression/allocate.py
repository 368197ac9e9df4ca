"""Rank allocation: distribute a budget of numbers over blocks with several sizes each."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tnlib._typing import Array

_N_BISECTIONS = 24  # of the logarithm of a price, from 2^-80 on
_SEARCHABLE = 100_000  # numbers; the options of larger budgets are fine enough without a search


@dataclass(frozen=True)
class Curve:
    """Size and error of a block of weights at each of its options."""

    costs: Array  # stored numbers, ascending
    errors: Array  # errors in the unit of the method, descending: squared relative errors, or sums of gate derivatives
    # Costs of another kind: stored numbers where costs are bits, multiplications per token where costs are numbers.
    # Options that have less of them than all cheaper ones may have any error.
    second_costs: Array | None = None
    fused: str = ""  # name of a fused layer, whose blocks take the same option; "" for a block of its own

    def __add__(self, other: Curve) -> Curve:
        seconds = None
        if self.second_costs is not None and other.second_costs is not None:
            seconds = self.second_costs + other.second_costs
        return Curve(self.costs + other.costs, self.errors + other.errors, seconds, self.fused)


def allocate(curves: Sequence[Curve], budget: int, least: int = 0) -> list[int] | None:
    """Choose one option of every curve with the least sum of errors within a budget of numbers.

    Steps are taken in order of gain per number until the budget is spent. On convex curves this is optimal except for
    the last step; other curves are replaced by their lower convex hull. The rest of the budget goes to single options
    that still fit. If the sum is below `least`, which happens with few and coarse options, all sums are searched.

    Returns None if even the smallest options exceed the budget.

    >>> line = Curve(np.array([0, 10, 20]), np.array([1.0, 0.1, 0.0]))
    >>> allocate([line, line], 30)
    [2, 1]
    """
    choice = [0] * len(curves)
    left = budget - sum(int(curve.costs[0]) for curve in curves)
    if left < 0:
        return None

    for block, start, end in _steps(curves):
        price = int(curves[block].costs[end] - curves[block].costs[start])
        if choice[block] == start and price <= left:
            choice[block] = end
            left -= price
    choice = _spend_rest(curves, choice, left)
    if spent_by(curves, choice) < least and budget <= _SEARCHABLE:
        return _search(curves, budget, least) or choice
    return choice


def allocate_with_two_budgets(curves: Sequence[Curve], budget: int, most: int) -> list[int] | None:
    """Choose one option of every curve with the least sum of errors within a budget and `most` second costs.

    Second costs have a price, added to the errors: the lowest, by bisection, at which the choice of `allocate` is
    within `most`. What one price leaves over goes to single curves. Returns the least second costs within the budget if
    these are more, and None if there is no choice within it.

    >>> line = Curve(np.array([10, 20, 30]), np.array([1.0, 0.1, 0.0]), np.array([1, 9, 2]))
    >>> allocate_with_two_budgets([line, line], 60, 3)
    [2, 0]
    """
    seconds = [np.zeros_like(curve.costs) if curve.second_costs is None else curve.second_costs for curve in curves]

    def choose(price: float) -> list[int] | None:
        priced, options = [], []
        for curve, second in zip(curves, seconds, strict=True):
            errors = curve.errors + price * second
            lower = errors < np.append(np.inf, np.minimum.accumulate(errors)[:-1])
            options.append(np.flatnonzero(lower))
            priced.append(Curve(curve.costs[lower], errors[lower]))
        choice = allocate(priced, budget)
        return None if choice is None else [int(kept[k]) for kept, k in zip(options, choice, strict=True)]

    def fits(choice: Sequence[int]) -> bool:
        return sum(int(second[k]) for second, k in zip(seconds, choice, strict=True)) <= most

    choice = choose(0.0)
    if choice is None or fits(choice):
        return choice
    high = math.fsum(float(curve.errors.max()) for curve in curves) or 1.0  # a single unit outweighs all errors
    best, low = choose(high) or choice, high * 2.0**-80
    if not fits(best):
        return best
    for _ in range(_N_BISECTIONS):
        price = math.sqrt(low * high)
        candidate = choose(price) or choice
        low, high = (low, price) if fits(candidate) else (price, high)
        best = candidate if fits(candidate) else best
    return _filled(curves, seconds, best, budget, most)


def _filled(
    curves: Sequence[Curve], seconds: Sequence[Array], choice: Sequence[int], budget: int, most: int
) -> list[int]:
    """Return a choice in which no single curve can have a smaller error within both budgets."""
    choice, bits = list(choice), budget - spent_by(curves, choice)
    left = most - sum(int(second[k]) for second, k in zip(seconds, choice, strict=True))
    while True:
        gain, best, option = 0.0, -1, -1
        for c, (curve, second, k) in enumerate(zip(curves, seconds, choice, strict=True)):
            fits = (curve.costs - curve.costs[k] <= bits) & (second - second[k] <= left)
            gains = np.where(fits, curve.errors[k] - curve.errors, 0.0)
            if gains.max() > gain:
                gain, best, option = float(gains.max()), c, int(gains.argmax())
        if best < 0:
            return choice
        bits -= int(curves[best].costs[option] - curves[best].costs[choice[best]])
        left -= int(seconds[best][option] - seconds[best][choice[best]])
        choice[best] = option


def smallest(curves: Sequence[Curve], bound: float) -> list[int] | None:
    """Choose one option of every curve with the fewest numbers and a sum of errors of at most `bound`.

    Takes the steps of `allocate` until the bound is met, then moves single blocks back to smaller options.
    Returns None if even the largest options exceed the bound.

    >>> line = Curve(np.array([0, 10, 20]), np.array([1.0, 0.1, 0.0]))
    >>> smallest([line, line], 0.15)
    [2, 1]
    """
    choice = [0] * len(curves)
    steps = iter(_steps(curves))
    count = int(np.argmax(np.append(frontier(curves).errors, -np.inf) <= bound))
    for block, _, end in itertools.islice(steps, count):
        choice[block] = end
    while lost_by(curves, choice) > bound:  # by rounding, or because no choice meets it
        step = next(steps, None)
        if step is None:
            return None
        choice[step[0]] = step[2]
    return _save_rest(curves, choice, bound)


def frontier(curves: Sequence[Curve]) -> Curve:
    """Return the curve of sums of costs and of errors along the steps of `allocate`.

    >>> line = Curve(np.array([0, 10, 20]), np.array([1.0, 0.1, 0.0]))
    >>> frontier([line, line]).costs.tolist()
    [0, 10, 20, 30, 40]
    """
    steps = _steps(curves)
    prices = [int(curves[block].costs[end] - curves[block].costs[start]) for block, start, end in steps]
    saved = np.array([float(curves[block].errors[start] - curves[block].errors[end]) for block, start, end in steps])
    least = math.fsum(float(curve.errors[-1]) for curve in curves)
    costs = sum(int(curve.costs[0]) for curve in curves) + np.append(0, np.cumsum(np.array(prices, int)))
    return Curve(costs, least + np.append(np.cumsum(saved[::-1])[::-1], 0.0))  # from the end: no cancellation


def _steps(curves: Sequence[Curve]) -> list[tuple[int, int, int]]:
    """Return (block, option, next option) along all hulls, the largest gain per number first."""
    steps = [(gain, block, start, end) for block, curve in enumerate(curves) for gain, start, end in _hull_steps(curve)]
    return [step[1:] for step in sorted(steps, key=lambda step: -step[0])]  # stable: equal gains in the blocks' order


def spent_by(curves: Sequence[Curve], choice: Sequence[int]) -> int:
    """Return the sum of costs of one option of every curve."""
    return sum(int(curve.costs[option]) for curve, option in zip(curves, choice, strict=True))


def lost_by(curves: Sequence[Curve], choice: Sequence[int]) -> float:
    """Return the sum of errors of one option of every curve."""
    return math.fsum(float(curve.errors[option]) for curve, option in zip(curves, choice, strict=True))


def _save_rest(curves: Sequence[Curve], choice: list[int], bound: float) -> list[int]:
    """Move single blocks back to the smallest option within the bound, the largest saving first."""
    while True:
        left = bound - lost_by(curves, choice)
        offers = []
        for block, curve in enumerate(curves):
            now = choice[block]
            first = int(np.argmax(curve.errors <= curve.errors[now] + left))
            if first < now:
                offers.append((int(curve.costs[now] - curve.costs[first]), -block, first))
        for _, block, option in sorted(offers, reverse=True):
            candidate = [option if k == -block else current for k, current in enumerate(choice)]
            if lost_by(curves, candidate) <= bound:
                choice = candidate
                break
        else:
            return choice


def _search(curves: Sequence[Curve], budget: int, least: int) -> list[int] | None:
    """Return the best choice whose sum lies between `least` and `budget`, by dynamic programming over sums.

    After block k, error[s] is the smallest error of the first k blocks at the sum s, and taken[k][s] the option
    of block k that gives it.
    """
    error = np.full(budget + 1, np.inf)
    error[0] = 0.0
    taken = []
    for curve in curves:
        best, option = np.full(budget + 1, np.inf), np.zeros(budget + 1, np.int32)
        for k, (cost, more) in enumerate(zip(curve.costs.tolist(), curve.errors.tolist(), strict=True)):
            if cost <= budget:
                moved = np.concatenate([np.full(cost, np.inf), error[: budget + 1 - cost] + more])
                better = moved < best
                best[better], option[better] = moved[better], k
        error = best
        taken.append(option)
    total = least + int(np.argmin(error[least:]))
    if not np.isfinite(error[total]):
        return None
    choice = []
    for curve, option in zip(reversed(curves), reversed(taken), strict=True):
        choice.append(int(option[total]))
        total -= int(curve.costs[choice[-1]])
    return choice[::-1]


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
    """Move single blocks on to the largest option that still fits, the largest reduction of the error first."""
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
