"""Neighbours where a train jumps: the differences, the frequencies, and the thin errors that they find."""

from __future__ import annotations

import numpy as np
import oracles
import pytest
from cross_functions import place, solve
from hypothesis import given
from hypothesis import strategies as st

import tnlib
from tnlib.formats.train.cross.jumps import difference, sample_jumps


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
@pytest.mark.parametrize("seed", range(6))
def test_a_step_in_the_sum_of_the_indices(seed: int) -> None:
    shape = (20,) * 5
    fit, _ = solve(lambda points: (points.sum(axis=1) > 47) * 1.0, shape, 1e-6, rng=seed)
    step = sum(np.ix_(*[np.arange(20)] * 5)) > 47
    assert fit.converged
    assert np.abs(fit.value.full() - step).max() < 1e-6


@pytest.mark.parametrize("corner", [0, 1])
def test_an_entry_in_a_corner(corner: int) -> None:
    def f(points: np.ndarray) -> np.ndarray:
        return 1 + 1e4 * (points == corner).all(axis=1)

    fit, _ = solve(f, (2,) * 20, 1e-6)
    assert fit.converged
    assert fit.value[(corner,) * 20] == pytest.approx(10_001)
