"""Neighbours where a train jumps: the differences, the frequencies, and the thin errors that they find."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import oracles
import pytest
from cross_functions import place, solve
from hypothesis import given
from hypothesis import strategies as st

import tnlib
from tnlib.formats.train.cross.jumps import difference, sample_jumps, sample_kinks, second_difference


@given(st.integers(0, 1000), st.lists(st.integers(1, 4), min_size=1, max_size=5), st.integers(1, 3))
def test_differences_are_those_of_the_flat_array(seed: int, shape: list[int], rank: int) -> None:
    t = tnlib.random.tensor_train(tuple(shape), rank, rng=seed)
    x = t.full().reshape(-1)
    want = np.append(np.diff(x), -x[-1])
    np.testing.assert_allclose(difference(t).full().reshape(-1), want, atol=1e-12 * np.abs(x).max())


@oracles.each_dtype
def test_jumps_are_drawn_by_their_squares(dtype: np.dtype) -> None:
    t = tnlib.random.tensor_train((3, 2, 4), 2, rng=0, dtype=dtype)
    count = 20_000
    heads = np.tile([1, -1, -1], (count, 1))
    points = sample_jumps(t, heads, 0.0, np.random.default_rng(0))
    flat = np.ravel_multi_index(tuple(points.T), t.shape)
    np.testing.assert_array_equal(flat[count:], flat[:count] + 1)
    squares = np.abs(np.diff(t.full().reshape(-1))[8:16]) ** 2
    frequencies = np.bincount(flat[:count] - 8, minlength=8) / count
    assert np.abs(frequencies - squares / squares.sum()).max() <= 5 / np.sqrt(count)


def test_heads_without_a_jump_end_at_their_first_and_last_entry() -> None:
    heads = np.array([[0, 1, -1, -1], [1, -1, -1, -1]])
    points = sample_jumps(tnlib.ones((2, 3, 2, 3)), heads, 1e-6, np.random.default_rng(0))
    assert points.tolist() == [[0, 1, 0, 0], [1, 0, 0, 0], [0, 1, 1, 2], [1, 2, 1, 2]]


@pytest.mark.parametrize("leg", [0, 1, 2])
def test_second_differences_are_those_along_one_leg(leg: int) -> None:
    t = tnlib.random.tensor_train((3, 5, 4), 2, rng=0)
    want = np.diff(t.full(), n=2, axis=leg)
    np.testing.assert_allclose(second_difference(t, leg).full(), want, atol=1e-12 * np.abs(want).max())


@oracles.each_dtype
def test_kinks_are_drawn_by_their_squares(dtype: np.dtype) -> None:
    """Along the only leg of more than two values that is not given."""
    t = tnlib.random.tensor_train((3, 2, 7), 2, rng=0, dtype=dtype)
    count = 20_000
    before, middle, after = np.split(
        sample_kinks(t, np.tile([1, -1, -1], (count, 1)), 0.0, np.random.default_rng(0)), 3
    )
    np.testing.assert_array_equal([middle - before, after - before], np.multiply.outer([1, 2], before * 0 + [0, 0, 1]))
    assert (before[:, 0] == 1).all()
    squares = np.abs(np.diff(t.full()[1], n=2, axis=1)).reshape(-1) ** 2
    frequencies = np.bincount(5 * before[:, 1] + before[:, 2], minlength=10) / count
    assert np.abs(frequencies - squares / squares.sum()).max() <= 5 / np.sqrt(count)


def test_heads_without_a_kink_end_at_their_corners() -> None:
    """A leg that is given is free where no other one has more than two values."""
    heads = np.array([[0, 1, -1, -1], [0, 1, 2, 1]])
    for head, first, last in zip(heads, ([0, 1, 0, 0], [0, 1, 0, 1]), ([0, 1, 3, 1], [0, 1, 3, 1]), strict=True):
        points = sample_kinks(tnlib.ones((2, 2, 4, 2)), np.tile(head, (99, 1)), 1e-6, np.random.default_rng(0))
        assert points[99:].tolist() == [first] * 99 + [last] * 99
        corners = itertools.product(*[{a, b} for a, b in zip(first, last, strict=True)])
        assert set(map(tuple, points[:99].tolist())) == set(corners)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_the_place_of_a_step(seed: int) -> None:
    """The cells between a step of the train and that of f are 1e-7 of all: no sample meets them."""
    fit, _ = solve(lambda points: (place(points) > 1 / 3) * 1.0, (2,) * 40, 1e-6, rng=seed)
    beside = (1 << 40) // 3 + np.arange(-1000, 1000)
    points = beside[:, None] >> np.arange(39, -1, -1) & 1
    assert fit.converged
    np.testing.assert_allclose(tnlib.entries(fit.value, points), place(points) > 1 / 3, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "f", [lambda total: (total > 47) * 1.0, lambda total: np.abs(total - 47.0)], ids=["step", "kink"]
)
@pytest.mark.parametrize("seed", range(6))
def test_a_step_and_a_kink_in_the_sum_of_the_indices(f: Callable[[np.ndarray], np.ndarray], seed: int) -> None:
    fit, _ = solve(lambda points: f(points.sum(axis=1)), (20,) * 5, 1e-6, rng=seed)
    want = f(sum(np.ix_(*[np.arange(20)] * 5)))
    assert fit.converged
    assert np.abs(fit.value.full() - want).max() < 1e-6 * want.max()


@pytest.mark.parametrize("corner", [0, 1])
def test_an_entry_in_a_corner(corner: int) -> None:
    def f(points: np.ndarray) -> np.ndarray:
        return 1 + 1e4 * (points == corner).all(axis=1)

    fit, _ = solve(f, (2,) * 20, 1e-6)
    assert fit.converged
    assert fit.value[(corner,) * 20] == pytest.approx(10_001)
