"""One budget shared out over curves, against every combination of options."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles import refused
from tnlib_adapters import Budget
from tnlib_adapters.compression.allocate import Curve, allocate, allocate_with_two_budgets, frontier, smallest
from tnlib_adapters.compression.methods.factorisation import Factorisation

from tnlib import ArgumentError


def cost(curves: Sequence[Curve], choice: Sequence[int]) -> int:
    return sum(int(curve.costs[k]) for curve, k in zip(curves, choice, strict=True))


def error(curves: Sequence[Curve], choice: Sequence[int]) -> float:
    return sum(float(curve.errors[k]) for curve, k in zip(curves, choice, strict=True))


def best(curves: Sequence[Curve], budget: int) -> float | None:
    """The least error of all combinations within the budget."""
    combinations = itertools.product(*(range(len(curve.costs)) for curve in curves))
    return min((error(curves, c) for c in combinations if cost(curves, c) <= budget), default=None)


def corners(curve: Curve) -> list[int]:
    """The options on the lower convex hull, straight stretches included, from its definition."""
    x, y = curve.costs.astype(float), curve.errors
    n = len(x)
    return [k for k in range(n) if not any(_below(x, y, i, k, j) for i in range(k) for j in range(k + 1, n))]


def largest_step(curve: Curve) -> float:
    """The most error that one step along the hull saves."""
    return max((float(curve.errors[a] - curve.errors[b]) for a, b in itertools.pairwise(corners(curve))), default=0.0)


def dearest_step(curve: Curve) -> int:
    """The most numbers that one step along the hull costs."""
    return max((int(curve.costs[b] - curve.costs[a]) for a, b in itertools.pairwise(corners(curve))), default=0)


def _below(x: np.ndarray, y: np.ndarray, i: int, k: int, j: int) -> bool:
    """Whether point k lies above the chord from i to j."""
    return bool(y[k] > y[i] + (y[j] - y[i]) * (x[k] - x[i]) / (x[j] - x[i]))


def can_use_more(curves: Sequence[Curve], choice: Sequence[int], budget: int) -> bool:
    left = budget - cost(curves, choice)
    return any(
        curve.costs[k + 1] - curve.costs[k] <= left
        for curve, k in zip(curves, choice, strict=True)
        if k + 1 < len(curve.costs)
    )


# Errors are quarters, so that ties, straight lines and flat stretches are common and sums are exact.
def drawn_curve(convex: bool, unit: int | None) -> st.SearchStrategy[Curve]:
    gains = st.lists(st.integers(0, 12), max_size=4).map(lambda g: sorted(g, reverse=True) if convex else g)

    @st.composite
    def draw(draw: st.DrawFn) -> Curve:
        steps = draw(gains)
        prices = [unit] * len(steps) if unit else [draw(st.integers(1, 9)) for _ in steps]
        start = draw(st.integers(0, 5))
        if convex and unit is None:  # gains per number descend
            pairs = sorted(zip(steps, prices, strict=True), key=lambda pair: -pair[0] / pair[1])
            steps, prices = [s for s, _ in pairs], [p for _, p in pairs]
        costs = start + np.concatenate([[0], np.cumsum(prices, dtype=int)])
        errors = np.concatenate([np.cumsum(steps[::-1])[::-1], [0.0]]) / 4
        return Curve(costs.astype(int), errors)

    return draw()


def curves(*, convex: bool, unit: int | None) -> st.SearchStrategy[list[Curve]]:
    return st.lists(drawn_curve(convex, unit), min_size=1, max_size=4)


budgets = st.integers(0, 60)


@given(curves(convex=True, unit=3), budgets)
def test_convex_curves_of_equal_steps_are_shared_out_best(some: list[Curve], budget: int) -> None:
    choice = allocate(some, budget)
    wanted = best(some, budget)
    if wanted is None:
        assert choice is None
    else:
        assert choice is not None
        assert error(some, choice) == wanted


@pytest.mark.parametrize("convex", [True, False])
def test_any_curves(convex: bool) -> None:
    @given(curves(convex=convex, unit=None), budgets)
    def holds(some: list[Curve], budget: int) -> None:
        choice = allocate(some, budget)
        wanted = best(some, budget)
        assert (choice is None) == (wanted is None)
        if choice is None or wanted is None:
            return
        assert len(choice) == len(some)
        assert cost(some, choice) <= budget
        assert not can_use_more(some, choice, budget)
        assert error(some, choice) <= wanted + max(map(largest_step, some))

    holds()


@given(curves(convex=False, unit=None), budgets)
def test_one_step_less_of_budget_is_never_enough_to_do_better(some: list[Curve], budget: int) -> None:
    choice = allocate(some, budget)
    if choice is not None:
        wanted = best(some, budget - max(map(dearest_step, some)))
        assert wanted is None or error(some, choice) <= wanted


@given(curves(convex=True, unit=3), budgets, st.integers(0, 12), st.integers(0, 2**32 - 1))
def test_both_budgets_are_met_wherever_the_price_of_a_number_meets_them(
    some: list[Curve], budget: int, most: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    some = [Curve(curve.costs, curve.errors, rng.integers(0, 4, len(curve.costs))) for curve in some]

    def count(choice: Sequence[int]) -> int:
        return sum(int(curve.second_costs[k]) for curve, k in zip(some, choice, strict=True))  # type: ignore[index]

    choice = allocate_with_two_budgets(some, budget, most)
    inside = [c for c in itertools.product(*(range(len(curve.costs)) for curve in some)) if cost(some, c) <= budget]
    assert (choice is None) == (not inside)
    if choice is None:
        return
    assert cost(some, choice) <= budget
    if count(choice) <= most:
        assert error(some, choice) >= min(error(some, c) for c in inside if count(c) <= most)
        if count(allocate(some, budget) or []) <= most:
            assert error(some, choice) <= error(some, allocate(some, budget) or [])
    if budget >= sum(int(curve.costs[-1]) for curve in some):  # nothing but the numbers is scarce
        fewest = count([int(np.argmin(curve.second_costs)) for curve in some])  # type: ignore[arg-type]
        assert (count(choice) <= most) == (fewest <= most)


def test_fewer_numbers_are_bought_where_they_lose_least() -> None:
    costs = np.array([1, 2, 3])
    dear, cheap = (Curve(costs, np.array([1.0, lost, 0.0]), np.array([4, 5, 9])) for lost in (0.9, 0.1))
    assert allocate_with_two_budgets([dear, cheap], 6, 18) == [2, 2]
    assert allocate_with_two_budgets([dear, cheap], 6, 14) == [2, 1]
    assert allocate_with_two_budgets([dear, cheap], 6, 8) == [0, 0]
    assert allocate_with_two_budgets([dear, cheap], 6, 7) == [0, 0]  # the fewest that there are
    assert allocate_with_two_budgets([dear, cheap], 1, 18) is None


def test_nothing_fits() -> None:
    curve = Curve(np.array([3, 5]), np.array([1.0, 0.0]))
    assert allocate([curve, curve], 5) is None
    assert allocate([curve, curve], 6) == [0, 0]
    assert allocate([curve, curve], -1) is None


def test_everything_fits() -> None:
    curve = Curve(np.array([3, 5, 9]), np.array([1.0, 1.0, 0.0]))
    assert allocate([curve] * 3, 27) == [2, 2, 2]
    assert allocate([curve] * 3, 10**9) == [2, 2, 2]


def test_a_dear_option_that_saves_most_per_number_is_taken_over_cheap_ones() -> None:
    """Behind a step that saves nothing stands one that saves all: only the hull shows it."""
    late = Curve(np.array([0, 1, 2]), np.array([1.0, 1.0, 0.0]))
    early = Curve(np.array([0, 1, 2]), np.array([0.4, 0.1, 0.0]))
    assert allocate([late, early], 2) == [2, 0]


def test_straight_lines_are_followed_in_small_steps() -> None:
    """A line taken in one step would not fit, and its room would go to a block that needs it less."""
    line = Curve(np.arange(5), np.array([4.0, 3.0, 2.0, 1.0, 0.0]))
    flat = Curve(np.arange(5), np.array([1.2, 0.7, 0.2, 0.1, 0.0]))
    assert allocate([line, flat], 3) == [3, 0]


def test_numbers_that_round_do_not_lose_a_step() -> None:
    """Gains that are equal but for the last bit come in the order of the curve."""
    errors = np.linspace(1, 0, 50)
    curve = Curve(np.arange(50), errors)
    assert allocate([curve, Curve(np.arange(50), errors / 3)], 49) == [49, 0]


# --------------------------------------------------------------------------------------------- the other way round


def fewest(curves: Sequence[Curve], bound: float) -> int | None:
    """The least numbers of all combinations within the bound."""
    combinations = itertools.product(*(range(len(curve.costs)) for curve in curves))
    return min((cost(curves, c) for c in combinations if error(curves, c) <= bound), default=None)


@given(curves(convex=False, unit=None), st.integers(-1, 60).map(lambda quarters: quarters / 4))
def test_an_error_is_met_by_few_numbers(curves: list[Curve], bound: float) -> None:
    found, least = smallest(curves, bound), fewest(curves, bound)
    if found is None:
        assert least is None
        return
    assert least is not None
    assert error(curves, found) <= bound
    assert least <= cost(curves, found) <= least + max(map(dearest_step, curves))
    for block, option in enumerate(found):  # no block could be smaller on its own
        if option:
            tried = [option - 1 if k == block else one for k, one in enumerate(found)]
            assert error(curves, tried) > bound or curves[block].costs[option - 1] == curves[block].costs[option]


@given(curves(convex=True, unit=3), st.integers(0, 60).map(lambda quarters: quarters / 4))
def test_of_equal_steps_no_fewer_numbers_meet_an_error(curves: list[Curve], bound: float) -> None:
    found = smallest(curves, bound)
    assert found is not None  # nothing is lost at the end of these curves
    assert cost(curves, found) == fewest(curves, bound)


@given(curves(convex=True, unit=None))
def test_the_frontier_is_what_every_budget_gives(curves: list[Curve]) -> None:
    line = frontier(curves)
    assert np.all(np.diff(line.costs) >= 0)
    assert np.all(np.diff(line.errors) <= 0)
    for budget, least in zip(line.costs.tolist(), line.errors.tolist(), strict=True):
        assert least == best(curves, budget) or budget in line.costs[1:][np.diff(line.costs) == 0]


def test_an_error_that_no_choice_reaches() -> None:
    curve = Curve(np.array([1, 2]), np.array([1.0, 0.5]))
    assert smallest([curve, curve], 0.9) is None
    assert smallest([curve, curve], 1.0) == [1, 1]


def test_an_option_that_costs_all_that_is_left_is_bought() -> None:
    """Both steps of a curve that is not convex are one edge of its hull, which is too dear; the first one is not."""
    curve = Curve(np.array([0, 2, 4]), np.array([10.0, 9.0, 0.0]))
    assert allocate([curve], 2) == [1]
    assert allocate([curve], 3) == [1]
    assert allocate([curve, curve], 6) == [2, 1]


@dataclass(frozen=True)
class Blocks:
    curves: Sequence[Curve]
    fixed: int = 0
    matrices: Any = None


gains = st.lists(st.integers(0, 12), min_size=3, max_size=3)
blocks = st.tuples(st.sampled_from(["", "a", "b"]), st.integers(1, 5), gains)


@given(st.lists(st.lists(blocks, max_size=3), max_size=3), st.integers(1, 150))
def test_blocks_of_a_fused_layer_take_one_option(drawn: list[list[tuple[str, int, list[int]]]], budget: int) -> None:
    parts = {
        f"{k}": Blocks(
            [
                Curve(size * np.array([2, 3, 4, 8]), (10.0 * size - np.cumsum([0, *own])), fused=name)
                for name, size, own in part
            ]
        )
        for k, part in enumerate(drawn)
    }
    every = [curve for part in parts.values() for curve in part.curves]
    whole = Factorisation("quantized", parts, 1024, in_bits=True)
    fewest = cost(every, [0] * len(every))
    if fewest > budget:
        with refused(ArgumentError, "bits"):
            whole.select(Budget(bits=budget / 1024))
        return
    options = [k for of_part in whole.by_part(whole.select(Budget(bits=budget / 1024))) for k in of_part]
    layers = [[(c, k) for c, k in zip(every, options, strict=True) if c.fused == name] for name in ("a", "b")]
    layers += [[(c, k)] for c, k in zip(every, options, strict=True) if not c.fused]
    assert all(len({k for _, k in layer}) <= 1 for layer in layers)
    assert cost(every, options) <= budget
    for layer in filter(None, layers):
        k = layer[0][1]
        more = 0 if k == 3 else sum(int(c.costs[k + 1] - c.costs[k]) for c, _ in layer)
        assert k == 3 or more > budget - cost(every, options)
