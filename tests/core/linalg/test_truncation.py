"""Rank truncation: tails, numerical ranks, shares of the budget, trials and their rollback."""

from __future__ import annotations

import contextlib
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tnlib._typing import MaxRank
from tnlib.linalg.truncation import TruncationBudget, tail_norms

values = st.lists(st.floats(0, 1e3, allow_subnormal=False), min_size=1, max_size=12)


@given(values)
def test_tails_are_norms_of_the_discarded_values(s: list[float]) -> None:
    s = np.sort(np.array(s))[::-1]
    t = tail_norms(s)
    assert t.shape == (len(s) + 1,)
    for r in range(len(s) + 1):
        assert t[r] == pytest.approx(math.fsum(v**2 for v in s[r:]) ** 0.5, rel=1e-12, abs=1e-150)
    assert t[-1] == 0


def test_tails_of_single_precision_are_double() -> None:
    t = tail_norms(np.array([1.0, 3e-4, 1e-4, 2e-5], np.float32))
    assert t.dtype == np.float64
    np.testing.assert_allclose(t[1:], [math.sqrt(9e-8 + 1e-8 + 4e-10), math.sqrt(1e-8 + 4e-10), 2e-5, 0], rtol=1e-6)
    np.testing.assert_allclose(tail_norms(np.array([4e-30, 3e-30], np.float32)), [5e-30, 3e-30, 0], rtol=1e-6)


@given(values, st.floats(0, 1), st.sampled_from([None, 1, 2, 5]))
def test_the_rank_is_the_smallest_within_budget(s: list[float], rtol: float, cap: int | None) -> None:
    s = np.sort(np.array(s))[::-1]
    t = tail_norms(s)
    shares = TruncationBudget(float(t[0]), rtol, [2], np.dtype(float), cap)
    allowed = shares.share
    r = shares.truncate(s)
    assert 1 <= r <= (cap or len(s))
    assert t[r] <= allowed * (1 + 1e-15) or r == cap
    assert r == 1 or t[r - 1] > allowed * (1 - 1e-15)


@given(
    st.lists(st.tuples(st.floats(0.01, 1), st.integers(1, 4)), min_size=1, max_size=6),
    st.none() | st.floats(0, 1),
    st.sampled_from([None, 1, 2, 3, 5]),
)
def test_groups_are_kept_or_discarded_whole(
    levels: list[tuple[float, int]], rtol: float | None, cap: int | None
) -> None:
    s = np.sort(np.concatenate([x * (1 - 1e-4 * np.arange(n)) for x, n in levels]))[::-1]
    groups = TruncationBudget(float(np.linalg.norm(s)), rtol, [2], np.dtype(float), cap, degeneracy_tol=1e-3)
    plain = TruncationBudget(groups.norm, rtol, [2], np.dtype(float))
    r, least = groups.truncate(s), plain.truncate(s)
    whole = [k for k in range(1, len(s) + 1) if k == len(s) or s[k] <= (1 - 1e-3) * s[k - 1]]
    assert 1 <= r <= (cap or len(s))
    if r not in whole:  # the first group alone is longer than the cap
        assert r == min(least, cap)
        assert cap < whole[0]
    elif r < least:  # the next group does not end within the cap
        assert next(k for k in whole if k > r) > cap
    else:
        assert r == next(k for k in whole if k >= least)
    assert groups.records[-1].discarded == pytest.approx(tail_norms(s)[r])


def test_a_value_whose_square_is_zero_is_dropped() -> None:
    budget = TruncationBudget(1.0, 0.0, [2], np.dtype(float))
    assert budget.truncate(np.array([1.0, 1e-200])) == 1


# --------------------------------------------------------------------------------------------------------- the budget


def budget(rtol: float | None, steps: int, norm: float = 1.0, max_rank: MaxRank = None) -> TruncationBudget:
    return TruncationBudget(norm, rtol, [2] * steps, np.dtype(float), max_rank)


def discarded(of: TruncationBudget, *s: float) -> float:
    """Norm that the next truncation of singular values `s` discards."""
    of.truncate(np.array(s))
    return of.records[-1].discarded


def test_the_remaining_error_is_divided_into_equal_shares() -> None:
    shares = budget(0.1, 4, norm=10.0)
    assert discarded(shares, 9.0, 0.1) == pytest.approx(0.1)  # of a share of 1 / 2
    assert discarded(shares, 9.0, 0.57) == pytest.approx(0.57)  # of sqrt((1 - 0.01) / 3) = 0.574
    assert discarded(shares, 9.0, 0.58) == 0  # the share is sqrt((1 - 0.3349) / 2) = 0.577
    assert discarded(shares, 9.0, 0.81) == pytest.approx(0.81)  # of sqrt(1 - 0.3349) = 0.816
    assert shares.discarded == pytest.approx(math.sqrt(0.1**2 + 0.57**2 + 0.81**2))
    assert shares.error == pytest.approx(shares.discarded / 10)


def test_equal_shares_add_up_to_the_tolerance() -> None:
    assert discarded(budget(0.2, 4), 0.9, 0.1001) == 0
    shares = budget(0.2, 4)
    for _ in range(4):
        assert discarded(shares, 0.9, 0.0999) == pytest.approx(0.0999)
    assert shares.error == pytest.approx(2 * 0.0999)


def test_the_excess_of_a_cap_is_not_taken_from_other_shares() -> None:
    shares = budget(0.2, 2, max_rank=(1, None))
    assert discarded(shares, 0.9, 0.5) == pytest.approx(0.5)
    assert discarded(shares, 0.9, 0.14) == pytest.approx(0.14)
    assert shares.error == pytest.approx(math.hypot(0.5, 0.14))


@pytest.mark.parametrize("name", ["error_estimate", "discarded"])
def test_error_estimates_and_values_that_are_not_passed_count_as_discarded(name: str) -> None:
    shares = budget(0.5, 1)
    assert shares.truncate(np.array([0.9, 0.3]), **{name: 0.45}) == 2  # 0.3 and 0.45 together exceed the share
    assert name != "discarded" or shares.error == pytest.approx(0.45)
    shares = budget(0.5, 1)
    assert shares.truncate(np.array([0.9, 0.3]), **{name: 0.3}) == 1
    assert shares.error == pytest.approx(math.hypot(0.3, 0.3))


def test_error_estimates_are_admitted_below_the_share_or_under_a_cap() -> None:
    shares = budget(0.2, 4)
    assert shares.threshold == shares.share == pytest.approx(0.1)
    assert shares.admits(0.09)
    assert not shares.admits(0.11)
    assert budget(0.2, 4, max_rank=3).admits(0.11)
    exact = budget(None, 4)
    assert exact.share is None
    assert exact.threshold == exact.noise > 0
    assert not exact.admits(1e-8)


def test_what_a_truncation_leaves_to_the_next_one_counts_once() -> None:
    shares = budget(0.2, 2)
    with shares.trial() as trial:
        discarded(shares, 0.9, 0.0)  # all of the tolerance is left to the other
        discarded(shares, 0.9, 0.19)
        assert not trial.commit_measured(0.201)
        assert trial.commit_measured(0.199)


@pytest.mark.parametrize("measured", [0.08, 0.3])
def test_a_measured_norm_replaces_the_estimates_or_is_refused_above_the_shares(measured: float) -> None:
    shares = budget(0.2, 3)
    with shares.trial() as trial:
        discarded(shares, 0.9, 0.1)
        discarded(shares, 0.9, 0.05)
        assert trial.discarded == pytest.approx(math.hypot(0.1, 0.05))
        assert trial.commit_measured(measured) == (measured < 0.2)
    assert shares.error == pytest.approx(measured if measured < 0.2 else 0)
    if measured < 0.2:
        assert discarded(shares, 0.9, 0.18) == pytest.approx(0.18)  # of sqrt(0.04 - 0.0064) = 0.183


@pytest.mark.parametrize("interrupted", [True, False])
@pytest.mark.parametrize("committed", [True, False])
def test_a_trial_is_rolled_back_unless_it_is_committed(committed: bool, interrupted: bool) -> None:
    shares = budget(0.2, 3, max_rank=(None, 1, None))
    discarded(shares, 0.9, 0.1)
    share, error = shares.share, shares.error
    with contextlib.suppress(KeyboardInterrupt), shares.trial() as trial:
        discarded(shares, 0.9, 0.9)
        assert len(trial.records) == 1
        if committed:
            trial.commit()
        if interrupted:
            raise KeyboardInterrupt
    assert len(shares.records) == 1 + committed
    assert bool(shares.notes()) == committed
    if not committed:
        assert (shares.share, shares.error) == (share, error)


def test_trials_are_resolved_where_ranks_and_norms_are_certain() -> None:
    for s, error_estimate, resolved in (
        ((0.9, 0.3), 0.0, True),
        ((0.9, 0.3), 1e-17, True),  # roundoff
        ((0.9, 0.3), 0.01, True),  # 0.3 is 30 times the error estimate
        ((0.9, 0.3), 0.1, False),  # the discarded norm is uncertain by more than five percent
        ((0.9, 0.499), 0.2, False),  # another rank may fit the share
        ((0.9, 0.6), 0.2, False),  # the last kept value is uncertain
        ((0.9, 0.6), 0.1, True),
    ):
        shares = budget(0.5, 1)
        with shares.trial() as trial:
            shares.truncate(np.array(s), error_estimate=error_estimate)
            assert trial.is_resolved(error_estimate) == resolved, (s, error_estimate)


def test_a_cap_inside_a_group_is_noted() -> None:
    for s, cap, inside in (((4, 2, 2, 1), 2, True), ((4, 2, 2, 1), 3, False), ((4, 2, 2, 0), 3, False)):
        shares = budget(None, 1, norm=5.0, max_rank=cap)
        shares.truncate(np.array(s, float))
        assert len(shares.notes("bond", first=1)) == inside
    loose = budget(0.5, 1, norm=5.0, max_rank=3)  # 2.5 may be discarded: the tolerance cuts, not the cap
    loose.truncate(np.array([4.0, 2.0, 2.0, 1.0]))
    assert loose.notes() == ()


def test_values_equal_to_the_resolution_form_a_group() -> None:
    for resolution in (0.0, 0.02):
        shares = budget(None, 1, norm=5.0, max_rank=2)
        shares.truncate(np.array([4.0, 2.0, 1.99]), resolution=resolution)
        assert bool(shares.notes()) == (resolution > 0)


def test_notes_name_the_legs_and_the_cap() -> None:
    shares = budget(None, 3, norm=5.0, max_rank=(2, 3, 2))
    for _ in range(3):
        shares.truncate(np.array([4.0, 2.0, 2.0, 1.0]))
    (note,) = shares.notes("bond", first=1, cap="ranks")
    assert note == "ranks separates equal singular values at bond 1, 3; another rank would be unique"
    assert shares.notes() == ("max_rank separates equal singular values; another rank would be unique",)
