"""Random indices: frequencies agree with the densities."""

from __future__ import annotations

import itertools
import math

import numpy as np
import oracles
import pytest

from tnlib.formats.train.cross.sampling import (
    log_density_beside,
    log_density_of_products,
    sample_beside,
    sample_products,
    sample_train,
)

COUNT = 40_000


def assert_frequencies(points: np.ndarray, density: np.ndarray) -> None:
    assert density.sum() == pytest.approx(1)
    frequencies = np.zeros(density.shape)
    np.add.at(frequencies, tuple(points.T), 1 / len(points))
    assert np.abs(frequencies - density).max() <= 5 * math.sqrt(density.max() / len(points))


def everywhere(shape: tuple[int, ...]) -> np.ndarray:
    return np.array(list(itertools.product(*map(range, shape))))


def test_indices_are_drawn_from_the_train() -> None:
    x = oracles.random_train((3, 4, 2), (1, 2, 2, 1), np.complex128)
    cores, rest = [], x.reshape(1, -1)
    for n in x.shape[:-1]:
        q, r = np.linalg.qr(rest.reshape(len(rest) * n, -1))
        cores.append(q.reshape(-1, n, q.shape[1]))
        rest = r
    cores.append(rest.reshape(-1, x.shape[-1], 1))
    assert_frequencies(sample_train(cores, COUNT, np.random.default_rng(0)), np.abs(x) ** 2)


def test_products_are_drawn_with_the_density_that_is_returned() -> None:
    rng = np.random.default_rng(1)
    shape = (3, 2, 4)
    profiles = [rng.random((2, n)) * (rng.random((2, n)) < 0.8) + 1e-3 for n in shape]
    points = everywhere(shape)
    density = np.exp(log_density_of_products(profiles, points)) / len(points)
    assert_frequencies(sample_products(profiles, COUNT, rng), density.reshape(shape))


def test_points_beside_rows_and_columns_are_drawn_with_the_density_that_is_returned() -> None:
    shape = (3, 2, 4)
    none = np.empty((0, 0), int)
    heads = [none, np.array([[0], [2]]), np.array([[0, 1], [2, 0], [2, 1]])]
    tails = [none, np.array([[0, 1], [1, 3]]), np.array([[3]])]
    points = everywhere(shape)
    density = np.exp(log_density_beside(heads, tails, shape, points)) / len(points)
    drawn = sample_beside(heads, tails, shape, COUNT, np.random.default_rng(3))
    assert_frequencies(drawn, density.reshape(shape))
