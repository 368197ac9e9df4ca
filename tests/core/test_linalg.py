"""The pieces below the formats: tails and ranks, scales, signs, the budget, products along legs, the CP gauge."""

from __future__ import annotations

import math

import numpy as np
import oracles
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tnlib._fit import roundoff
from tnlib.linalg import modes, orthogonal, rank, scale, signs
from tnlib.linalg.solve import solve_gram
from tnlib.sweeps.budget import Budget

values = st.lists(st.floats(0, 1e3, allow_subnormal=False), min_size=1, max_size=12)


@given(values)
def test_tails_are_norms_of_what_is_left_out(s: list[float]) -> None:
    s = np.sort(np.array(s))[::-1]
    t = rank.tails(s)
    assert t.shape == (len(s) + 1,)
    for r in range(len(s) + 1):
        assert t[r] == pytest.approx(math.fsum(v**2 for v in s[r:]) ** 0.5, rel=1e-12, abs=1e-150)
    assert t[-1] == 0


def test_tails_of_single_precision_are_double() -> None:
    t = rank.tails(np.array([1.0, 3e-4, 1e-4, 2e-5], np.float32))
    assert t.dtype == np.float64
    np.testing.assert_allclose(t[1:], [math.sqrt(9e-8 + 1e-8 + 4e-10), math.sqrt(1e-8 + 4e-10), 2e-5, 0], rtol=1e-6)


@given(values, st.floats(0, 2e3), st.sampled_from([None, 1, 2, 5]))
def test_the_rank_is_the_smallest_within_budget(s: list[float], budget: float, cap: int | None) -> None:
    s = np.sort(np.array(s))[::-1]
    r = rank.choose_rank(s, budget=budget, noise=0.0, max_rank=cap)
    t = rank.tails(s)
    assert 1 <= r <= (cap or len(s))
    assert t[r] <= budget or r == cap
    assert r == 1 or t[r - 1] > budget


def test_the_numerical_rank_counts_what_is_above_noise() -> None:
    s = np.array([3.0, 2.0, 1.0, 0.5])
    for noise, want in ((0.0, 4), (0.5, 3), (0.4, 4), (2.5, 1), (9.0, 1)):
        assert rank.choose_rank(s, budget=None, noise=noise) == want
    assert rank.choose_rank(s, budget=None, noise=0.0, max_rank=2) == 2


def test_the_noise_level_grows_with_norm_eps_and_size() -> None:
    small = rank.noise_level(1.0, np.dtype(np.float64), 4)
    assert rank.noise_level(7.0, np.dtype(np.float64), 4) == pytest.approx(7 * small)
    assert rank.noise_level(1.0, np.dtype(np.complex64), 4) == pytest.approx(small * 2**29)
    assert rank.noise_level(1.0, np.dtype(np.float64), 10**8) > 100 * small


def test_cuts_through_groups() -> None:
    s = np.array([2.0, 2.0, 1.0, 1.0, 0.0, 0.0])
    assert [rank.cuts_group(s, r, 1e-12) for r in range(1, 7)] == [True, False, True, False, False, False]


@pytest.mark.parametrize("dtype", oracles.DTYPES, ids=str)
def test_scales_are_exact_powers_of_two(dtype: np.dtype) -> None:
    single = np.finfo(dtype).bits == 32
    for size in (1e-37, 1e-20, 1.0, 1e20, 1e37) if single else (1e-300, 1e-150, 1.0, 1e150, 1e300):
        a = dtype.type(size) * oracles.normal((4, 5), dtype)
        e = scale.exponent(a)
        scaled = scale.shift(a, -e)
        assert scaled.dtype == dtype
        np.testing.assert_array_equal(scale.shift(scaled, e), a)
        assert 2.0 ** (-40 if single else -400) <= scale.largest(scaled) <= 2.0 ** (40 if single else 400)
        assert np.isfinite(np.square(scaled)).all()
    assert scale.exponent(np.zeros(3, dtype)) == 0


def test_scales_look_at_both_parts_and_signs() -> None:
    assert scale.largest(np.array([1 - 5j, -3])) == 5
    assert scale.largest(np.array([-7.0, 2.0])) == 7
    assert scale.largest(np.ones(0)) == 0
    assert scale.exponent(np.array([1e-200 + 1e200j])) > 600


@pytest.mark.parametrize("c", [5e-324, 1e-200, 1.0, 1e200, 1e307])
def test_norms_neither_overflow_nor_underflow(c: float) -> None:
    assert scale.norm(np.array([3.0, -4.0]) * c) == pytest.approx(5 * c)
    assert scale.norm(np.array([3.0j, -4.0]) * c) == pytest.approx(5 * c)


def test_norms_of_many_entries_are_summed_in_double() -> None:
    assert scale.norm(np.full((3, 100_000), 0.1, np.float32)) == pytest.approx(
        float(np.float32(0.1)) * math.sqrt(3e5), rel=1e-12
    )
    assert scale.norm(np.zeros((2, 3))) == 0


@pytest.mark.parametrize("shape", [(1, 1), (1, 200_000), (200_000, 1), (700, 300), (3, 5, 7), (4,)], ids=str)
def test_distances(shape: tuple[int, ...]) -> None:
    a, b = oracles.normal(shape, np.complex128), oracles.normal(shape, np.complex128, seed=1)
    assert scale.distance(a, b) == pytest.approx(float(np.linalg.norm((a - b).ravel())), rel=1e-12)
    assert scale.distance(a, a) == 0


@pytest.mark.parametrize("dtype", oracles.DTYPES, ids=str)
def test_leading_phases(dtype: np.dtype) -> None:
    u = oracles.normal((6, 5), dtype)
    u[:, 4] = 0
    u[:, 3] = dtype.type(1e-20)
    phases = signs.leading_phases(u)
    assert phases.dtype == dtype
    np.testing.assert_allclose(np.abs(phases), 1, rtol=8 * oracles.eps(dtype))
    assert phases[4] == 1
    oracles.assert_signs((u * phases.conj())[:, :4] / np.linalg.norm(u[:, :4], axis=0))


def test_of_entries_that_tie_the_first_leads() -> None:
    u = np.array([[-1.0, 0.5], [1.0 + 1e-12, -1.0], [-1.0 - 2e-12, 1.0 + 1e-14]])
    np.testing.assert_array_equal(signs.leading_phases(u), [-1, -1])
    np.testing.assert_array_equal(signs.leading_phases(np.array([[-1.0], [1.001]])), [1])


@pytest.mark.parametrize("dtype", oracles.DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(6, 4), (4, 6), (5, 5), (1, 3), (3, 1)], ids=str)
def test_qr(dtype: np.dtype, shape: tuple[int, int]) -> None:
    a = oracles.normal(shape, dtype)
    with oracles.unchanged(a):
        q, r = orthogonal.qr_positive(a)
        t = orthogonal.triangle(a)
    oracles.assert_isometric(q)
    oracles.assert_close(q @ r, a, dtype)
    np.testing.assert_array_equal(np.tril(r, -1), 0)
    np.testing.assert_allclose(np.diagonal(r).imag, 0, atol=8 * oracles.eps(dtype))
    assert (np.diagonal(r).real >= 0).all()
    oracles.assert_close(t.conj().T @ t, a.conj().T @ a, dtype, 200)
    q, r = orthogonal.qr_positive(np.zeros(shape, dtype))
    oracles.assert_isometric(q)
    assert not r.any()


@pytest.mark.parametrize("dtype", [np.float64, np.complex128])
def test_products_along_legs(dtype: type) -> None:
    x, m = (
        oracles.normal((2, 3, 4, 5), dtype),
        {k: oracles.normal((6, n), dtype, k) for k, n in enumerate((2, 3, 4, 5))},
    )
    for mode, subscripts in enumerate(("abcd,xa->xbcd", "abcd,xb->axcd", "abcd,xc->abxd", "abcd,xd->abcx")):
        oracles.assert_close(modes.mode_product(x, m[mode], mode), np.einsum(subscripts, x, m[mode]))
        moved = modes.unfold(x, mode)
        assert moved.shape == (x.shape[mode], x.size // x.shape[mode])
        np.testing.assert_array_equal(moved[1], np.take(x, 1, axis=mode).ravel())


@pytest.mark.parametrize("dtype", [np.float64, np.complex128])
@pytest.mark.parametrize("shape", [(3, 4), (3, 4, 5), (2, 3, 4, 5), (2, 1, 3, 2, 4)], ids=str)
def test_khatri_rao_and_column_sums(dtype: type, shape: tuple[int, ...]) -> None:
    factors = [oracles.normal((n, 3), dtype, k) for k, n in enumerate(shape)]
    oracles.assert_close(
        modes.khatri_rao(factors[:2]), np.einsum("ir,jr->ijr", *factors[:2]).reshape(shape[0] * shape[1], 3)
    )
    for mode in range(len(shape)):
        others = [f for k, f in enumerate(factors) if k != mode]
        columns = oracles.normal((*shape, 3), dtype, 9)
        flat = np.moveaxis(columns, mode, 0).reshape(shape[mode], -1, 3)
        expected = np.einsum("kir,ir->kr", flat, modes.khatri_rao(others))
        oracles.assert_close(modes.sum_columns(columns, factors, mode), expected, factor=200)


@pytest.mark.parametrize("rank", [1, 4, 9])  # of a 6 x 6 Gram matrix: singular, singular, regular
@pytest.mark.parametrize("dtype", [np.float32, np.complex128])
def test_gram_systems_are_solved_or_pseudo_solved(dtype: type, rank: int) -> None:
    a, target = oracles.normal((rank, 6), dtype), oracles.normal((5, 6), dtype, 1)
    gram = a.conj().T @ a
    solved = solve_gram(target, gram)
    rcond = 6 * np.finfo(dtype).eps
    expected = target.astype(complex) @ np.linalg.pinv(gram.astype(complex), rcond=rcond, hermitian=True)
    assert solved.dtype == dtype
    assert np.linalg.norm(solved - expected) <= 1e3 * np.finfo(dtype).eps * np.linalg.cond(a) ** 2 * np.linalg.norm(
        expected
    )


def budget(rtol: float | None, steps: int, norm: float = 1.0) -> Budget:
    return Budget(norm, rtol, [2] * steps, np.dtype(float))


def discarded(of: Budget, *s: float, max_rank: int | None = None) -> float:
    """What the next truncation of singular values `s` discards."""
    before = of.discarded
    of.choose(np.array(s), max_rank=max_rank)
    return math.sqrt(of.discarded**2 - before**2)


def test_the_budget_gives_what_is_left_in_equal_shares() -> None:
    shares = budget(0.1, 4, norm=10.0)
    assert discarded(shares, 9.0, 0.1) == pytest.approx(0.1)  # of a share of 1 / 2
    assert discarded(shares, 9.0, 0.57) == pytest.approx(0.57)  # of sqrt((1 - 0.01) / 3) = 0.574
    assert discarded(shares, 9.0, 0.58) == 0  # the share is sqrt((1 - 0.3349) / 2) = 0.577
    assert discarded(shares, 9.0, 0.81) == pytest.approx(0.81)  # of sqrt(1 - 0.3349) = 0.816
    assert shares.discarded == pytest.approx(math.sqrt(0.1**2 + 0.57**2 + 0.81**2))
    assert shares.error == pytest.approx(shares.discarded / 10)


def test_equal_shares_add_up_to_the_whole() -> None:
    assert discarded(budget(0.2, 4), 0.9, 0.1001) == 0
    shares = budget(0.2, 4)
    for _ in range(4):
        assert discarded(shares, 0.9, 0.0999) == pytest.approx(0.0999)
    assert shares.error == pytest.approx(2 * 0.0999)


def test_what_a_cap_discards_is_not_taken_from_the_others() -> None:
    shares = budget(0.2, 2)
    assert discarded(shares, 0.9, 0.5, max_rank=1) == pytest.approx(0.5)
    assert discarded(shares, 0.9, 0.14) == pytest.approx(0.14)
    assert shares.error == pytest.approx(math.hypot(0.5, 0.14))


def test_the_budget_of_zero() -> None:
    shares = budget(0.1, 1, norm=0.0)
    assert shares.choose(np.zeros(2)) == 1
    assert shares.error == 0


def test_an_uncertainty_counts_as_discarded_and_is_not_spent_twice() -> None:
    shares = budget(0.5, 1)
    assert shares.choose(np.array([0.9, 0.3]), blur=0.45) == 2  # 0.3 and 0.45 together exceed the share
    shares = budget(0.5, 1)
    assert shares.choose(np.array([0.9, 0.3]), blur=0.3) == 1
    assert shares.error == pytest.approx(math.hypot(0.3, 0.3))


def test_a_measured_loss_takes_the_place_of_its_parts() -> None:
    shares = budget(0.2, 3)
    discarded(shares, 0.9, 0.1)
    discarded(shares, 0.9, 0.05)
    assert shares.settle(0, 0.08)
    assert shares.error == pytest.approx(0.08)
    assert discarded(shares, 0.9, 0.18) == pytest.approx(0.18)  # of sqrt(0.04 - 0.0064) = 0.183
    assert not budget_after(0.1, 0.05).settle(0, 0.3)  # more than the shares allow


def budget_after(*losses: float) -> Budget:
    shares = budget(0.2, len(losses))
    for loss in losses:
        discarded(shares, 0.9, loss)
    return shares


def test_a_rewound_budget_is_as_it_was() -> None:
    shares = budget(0.2, 3)
    discarded(shares, 0.9, 0.1)
    share, error = shares.share, shares.error
    discarded(shares, 0.9, 0.9, max_rank=1)
    shares.rewind(1)
    assert (shares.share, shares.error, shares.cuts) == (share, error, [])


def test_a_cap_inside_a_group_is_noted() -> None:
    for s, cap, inside in (((4, 2, 2, 1), 2, True), ((4, 2, 2, 1), 3, False), ((4, 2, 2, 0), 3, False)):
        shares = budget(None, 1, norm=5.0)
        shares.choose(np.array(s, float), max_rank=cap)
        assert shares.cuts == ([0] if inside else [])
    loose = budget(0.5, 1, norm=5.0)  # 2.5 may be discarded: the cap is not what cuts
    loose.choose(np.array([4.0, 2.0, 2.0, 1.0]), max_rank=3)
    assert loose.cuts == []


def test_roundoff_depends_on_precision_and_steps() -> None:
    assert roundoff(np.dtype(np.float32)) > 1e8 * roundoff(np.dtype(np.float64))
    assert roundoff(np.dtype(np.complex64), 4) == pytest.approx(2 * roundoff(np.dtype(np.float32)))
