"""Samples of trains: frequencies are the squared moduli of the entries, whatever the gauge and the scale."""

from __future__ import annotations

from typing import Any

import numpy as np
import oracles
import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_trains import trains

import tnlib

N = 20000


@oracles.each_dtype
@pytest.mark.parametrize("shape", [(5,), (2, 3, 4), (1, 2, 1, 3), (2,) * 5])
def test_frequencies_are_the_probabilities(shape: tuple[int, ...], dtype: Any) -> None:
    tt = tnlib.random.tensor_train(shape, 3, dtype=dtype, rng=7)
    p = np.abs(oracles.wide(tt.full())) ** 2
    p = p.reshape(-1) / p.sum()
    samples = tnlib.sample(tt, N, rng=1)
    assert samples.shape == (N, len(shape))
    counts = np.bincount(np.ravel_multi_index(tuple(samples.T), shape), minlength=p.size)
    assert np.all(np.abs(counts - N * p) <= 5 * np.sqrt(N * p * (1 - p)) + 1)


@given(trains(largest=345.0), st.integers(0, 99), st.data())
def test_gauge_and_scale_change_no_sample(tt: tnlib.TensorTrain, seed: int, data: st.DataObject) -> None:
    if tt.norm() == 0:
        with oracles.refused(ValueError, "sample: tt must not be zero"):
            tnlib.sample(tt, 3)
        return
    samples = tnlib.sample(tt, 8, rng=seed)
    assert np.all((samples >= 0) & (samples < tt.shape))
    assert np.all(np.abs(tnlib.entries(tnlib.TensorTrain(tt.cores), samples)) > 0)
    scaled = tnlib.TensorTrain(tt.cores, tt.center, exponent=tt.exponent - 300)
    assert np.array_equal(tnlib.sample(scaled, 8, rng=seed), samples)
    if tt.dtype.char in "dD":
        moved = tnlib.canonicalize(tt, data.draw(st.integers(0, len(tt.cores) - 1)))
        same = (tnlib.sample(moved, 8, rng=seed) == samples).all(axis=1)
        assert same.sum() >= 7  # a threshold may lie within roundoff of a random number


def test_seeds_and_counts() -> None:
    tt = tnlib.random.tensor_train((3,) * 8, 4, rng=0)
    assert np.array_equal(tnlib.sample(tt, 50), tnlib.sample(tt, 50, rng=0))
    assert np.array_equal(tnlib.sample(tt, 50, rng=3)[:20], tnlib.sample(tt, 20, rng=3))
    assert not np.array_equal(tnlib.sample(tt, 50, rng=3), tnlib.sample(tt, 50, rng=4))
    wide = tnlib.random.tensor_train((2, 600, 2), (2, 2), rng=0)  # several batches
    whole = tnlib.sample(wide, 2000, rng=5)
    assert np.array_equal(tnlib.sample(wide, 1000, rng=5), whole[:1000])


def test_what_has_no_probability_is_never_drawn() -> None:
    ghz = tnlib.tt_svd(oracles.ghz(6, 3)).value
    samples = tnlib.sample(ghz, 500, rng=2)
    assert np.all(samples == samples[:, :1])
    basis = tnlib.product_state(np.eye(4)[[3, 0, 2]])
    assert np.all(tnlib.sample(basis, 100) == [3, 0, 2])


class Zeros(np.random.Generator):
    """A generator at the lower end of its range."""

    def random(self, size: Any) -> Any:  # type: ignore[override]
        return np.zeros(size)


def test_the_random_number_zero_draws_what_has_a_probability() -> None:
    samples = tnlib.sample(tnlib.product_state(np.eye(4)[[3, 0, 2]]), 5, rng=Zeros(np.random.PCG64()))
    assert np.all(samples == [3, 0, 2])


def test_long_trains_of_extreme_norm() -> None:
    up = tnlib.product_state([np.array([1e-150, 1e-150])] * 400)
    samples = tnlib.sample(up, 500, rng=0)
    assert abs(samples.mean() - 0.5) < 0.01


@pytest.mark.parametrize("dtype", [np.float64, np.complex64])
def test_extreme_scales_change_no_sample(dtype: Any) -> None:
    tt = tnlib.random.tensor_train((3, 2, 4), 3, dtype=dtype, rng=1)
    want = tnlib.sample(tt, 50, rng=2)
    for exponent in (-2000, 2000, 10**12):
        assert np.array_equal(tnlib.sample(tnlib.TensorTrain(tt.cores, tt.center, exponent=exponent), 50, rng=2), want)
    tiny, huge = np.finfo(dtype).tiny, np.finfo(dtype).max
    for size in (tiny, huge / 4):
        single = tnlib.TensorTrain([(np.array([0, 1, 0], dtype) * size)[None, :, None]], 0)
        assert np.all(tnlib.sample(single, 20) == 1)


def test_wrong_input_is_refused() -> None:
    tt = tnlib.random.tensor_train((2, 3), 2, rng=0)
    with oracles.refused(ValueError, "sample: n_samples must be at least 1"):
        tnlib.sample(tt, 0)
    with oracles.refused(TypeError, "sample: tt must be a TensorTrain"):
        tnlib.sample(tt.full(), 3)  # type: ignore[arg-type]
    with oracles.refused(TypeError, "sample: rng must be"):
        tnlib.sample(tt, 3, rng="seed")  # type: ignore[arg-type]
