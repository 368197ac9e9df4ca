"""Cross interpolation: exact at the points where it was grown, at ranks no larger than those of the tensor."""

from __future__ import annotations

import itertools

import numpy as np
import oracles
import pytest

from tnlib.formats.train.cross.interpolation import CrossInterpolation
from tnlib.formats.train.cross.sampling import sample_uniform


def everywhere(shape: tuple[int, ...]) -> np.ndarray:
    return np.array(list(itertools.product(*map(range, shape))))


@pytest.mark.parametrize("dtype", [np.float64, np.complex128])
@pytest.mark.parametrize("shape", [(6, 5, 4, 5), (2,) * 8, (7, 6), (3, 1, 4)], ids=str)
def test_a_cross_is_exact_where_it_was_grown(shape: tuple[int, ...], dtype: type) -> None:
    x = oracles.normal(shape, dtype)
    rng = np.random.default_rng(0)
    cross = CrossInterpolation(lambda points: x[tuple(points.T)], shape, np.zeros(len(shape), int))
    points = sample_uniform(shape, 6, rng)
    for count in (1, 3, 6):
        assert cross.grow(points[:count], np.full(count, 1e-13), 1e-15) >= 0
        dense = oracles.dense_train(cross.cores())
        for point in points[:count]:
            assert dense[tuple(point)] == pytest.approx(x[tuple(point)], abs=1e-10)
    assert cross.ranks == (*(core.shape[0] for core in cross.cores()), 1)
    assert max(cross.ranks) <= 7


def test_a_cross_grown_everywhere_is_the_tensor_at_its_own_ranks() -> None:
    x = oracles.random_train((5, 4, 6, 3), (1, 3, 4, 2, 1))
    cross = CrossInterpolation(lambda points: x[tuple(points.T)], x.shape, np.zeros(4, int))
    cross.grow(everywhere(x.shape), np.full(x.size, 1e-12), 1e-14)
    assert cross.ranks == (1, 3, 4, 2, 1)
    oracles.assert_close(oracles.dense_train(cross.cores()), x, factor=1e4)
    assert cross.grow(everywhere(x.shape), np.full(x.size, 1e-12), 1e-14) == 0
