"""What tt_cross is made of: crosses that are exact where they were grown, and indices drawn with known densities."""

from __future__ import annotations

import itertools
import math

import numpy as np
import oracles
import pytest

from tnlib.sweeps.cross import Cross
from tnlib.sweeps.sample import (
    draw,
    draw_beside,
    draw_products,
    log_density_beside,
    log_density_of_products,
    spread_out,
)
from tnlib.sweeps.sketch import bond_bounds, project_on_sketch


def everywhere(shape: tuple[int, ...]) -> np.ndarray:
    return np.array(list(itertools.product(*map(range, shape))))


@pytest.mark.parametrize("dtype", [np.float64, np.complex128])
@pytest.mark.parametrize("shape", [(6, 5, 4, 5), (2,) * 8, (7, 6), (3, 1, 4)], ids=str)
def test_a_cross_is_exact_where_it_was_grown(shape: tuple[int, ...], dtype: type) -> None:
    x = oracles.normal(shape, dtype)
    rng = np.random.default_rng(0)
    cross = Cross(lambda points: x[tuple(points.T)], shape, np.zeros(len(shape), int))
    points = spread_out(shape, 6, rng)
    for count in (1, 3, 6):
        assert cross.grow(points[:count], np.full(count, 1e-13), 1e-15) >= 0
        found = oracles.dense_train(cross.cores())
        for point in points[:count]:
            assert found[tuple(point)] == pytest.approx(x[tuple(point)], abs=1e-10)
    assert cross.ranks == (*(core.shape[0] for core in cross.cores()), 1)
    assert max(cross.ranks) <= 7


def test_a_cross_grown_everywhere_is_the_tensor_at_its_own_ranks() -> None:
    x = oracles.random_train((5, 4, 6, 3), (1, 3, 4, 2, 1))
    cross = Cross(lambda points: x[tuple(points.T)], x.shape, np.zeros(4, int))
    cross.grow(everywhere(x.shape), np.full(x.size, 1e-12), 1e-14)
    assert cross.ranks == (1, 3, 4, 2, 1)
    oracles.assert_close(oracles.dense_train(cross.cores()), x, factor=1e4)
    assert cross.grow(everywhere(x.shape), np.full(x.size, 1e-12), 1e-14) == 0


def test_indices_are_drawn_from_the_train() -> None:
    x = oracles.random_train((3, 4, 2), (1, 2, 2, 1), np.complex128)
    cores, rest = [], x.reshape(1, -1)
    for n in x.shape[:-1]:
        q, r = np.linalg.qr(rest.reshape(len(rest) * n, -1))
        cores.append(q.reshape(-1, n, q.shape[1]))
        rest = r
    cores.append(rest.reshape(-1, x.shape[-1], 1))
    count = 40_000
    points = draw(cores, count, np.random.default_rng(0))
    seen = np.zeros(x.shape)
    np.add.at(seen, tuple(points.T), 1 / count)
    want = np.abs(x) ** 2  # its sum is 1
    assert np.abs(seen - want).max() <= 5 * math.sqrt(want.max() / count)


def test_products_are_drawn_with_the_density_that_is_told() -> None:
    rng = np.random.default_rng(1)
    shape = (3, 2, 4)
    profiles = [rng.random((2, n)) * (rng.random((2, n)) < 0.8) + 1e-3 for n in shape]
    points = everywhere(shape)
    density = np.exp(log_density_of_products(profiles, points)) / len(points)
    assert density.sum() == pytest.approx(1)
    count = 40_000
    seen = np.zeros(shape)
    np.add.at(seen, tuple(draw_products(profiles, count, rng).T), 1 / count)
    assert np.abs(seen.reshape(-1) - density).max() <= 5 * math.sqrt(density.max() / count)


def test_points_beside_rows_and_columns_are_drawn_with_the_density_that_is_told() -> None:
    shape = (3, 2, 4)
    none = np.empty((0, 0), int)
    heads = [none, np.array([[0], [2]]), np.array([[0, 1], [2, 0], [2, 1]])]
    tails = [none, np.array([[0, 1], [1, 3]]), np.array([[3]])]
    points = everywhere(shape)
    density = np.exp(log_density_beside(heads, tails, shape, points)) / len(points)
    assert density.sum() == pytest.approx(1)
    count = 40_000
    seen = np.zeros(shape)
    np.add.at(seen, tuple(draw_beside(heads, tails, shape, count, np.random.default_rng(3)).T), 1 / count)
    assert np.abs(seen.reshape(-1) - density).max() <= 5 * math.sqrt(density.max() / count)


def test_uniform_indices_take_every_value_of_a_leg_equally_often() -> None:
    points = spread_out((3, 1, 7), 42, np.random.default_rng(2))
    for leg, n in zip(points.T, (3, 1, 7), strict=True):
        assert np.bincount(leg, minlength=n).tolist() == [42 // n] * n


@pytest.mark.parametrize("width", [1, 3, 5, 50])
def test_a_sketch_projects_and_knows_what_it_left_out_on_average(width: int) -> None:
    terms = [oracles.random_cores((6, 5, 5, 6), (1, 4, 5, 4, 1), seed=10 * k) for k in range(2)]
    x = sum(oracles.dense_train(cores) for cores in terms)
    squares, guesses = [], []
    for seed in range(12):
        cores, lost, twos = project_on_sketch(terms, width, np.random.default_rng(seed))
        for core in cores[:-1]:
            oracles.assert_isometric(core)
        y = oracles.dense_train(cores) * 2.0**twos
        assert max(core.shape[0] for core in cores) <= min(width, max(bond_bounds(terms)))
        true = np.linalg.norm(x - y)
        assert np.vdot(y, x - y) == pytest.approx(0, abs=1e-10 * np.vdot(x, x))  # a projection
        squares.append(true**2)
        guesses.append((lost * 2.0**twos) ** 2)
    if width == 50:
        assert max(guesses) <= 1e-20 * np.vdot(x, x)
        assert max(squares) <= 1e-20 * np.vdot(x, x)
    else:  # two standard errors above the mean, at least as much as one column alone can tell
        assert 0.5 * np.mean(squares) <= np.mean(guesses) <= 4 * np.mean(squares)
