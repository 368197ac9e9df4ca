"""TT-SVD by samples of rows: low rank is found, and structure that no sample shows is detected afterwards."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import oracles
import pytest

import tnlib
from tnlib.linalg.randomized import sampled_range
from tnlib.linalg.truncation import noise_level

# All arrays have 65536 entries or more: smaller ones are not sampled. The middle has 128 rows or more: a sample is half
# of them at most.
SHAPES = [(24, 24, 12, 12), (2,) * 16, (32, 24, 90), (8, 1, 96, 1, 96), (5, 9, 13, 9, 13)]


def is_sampled(x: np.ndarray, rtol: float | None) -> bool:
    """Whether a sample of the middle unfolding of `x` shows a low rank within the first share of the tolerance."""
    rows = min((math.prod(x.shape[:k]) for k in range(1, x.ndim)), key=lambda m: m + x.size // m)
    size = oracles.norm(x)
    limit = noise_level(size, x.dtype, rows) if rtol is None else rtol * size / math.sqrt(x.ndim - 1)
    return sampled_range(x.reshape(rows, -1), limit=limit) is not None


def checked(x: np.ndarray, rtol: float | None) -> tnlib.Fit[tnlib.TensorTrain]:
    fit = tnlib.tt_svd(x, rtol=rtol)
    oracles.assert_fit(fit, x, rtol=rtol)
    oracles.assert_gauge(fit.value)
    return fit


def noisy_train(shape: tuple[int, ...], rank: int, noise: float, dtype: Any = np.float64) -> np.ndarray:
    x = oracles.random_train(
        shape, [1, *[rank] * (len(shape) - 1), 1], np.complex128 if dtype == "complex64" else dtype
    )
    return (x + noise / math.sqrt(x.size) * oracles.normal(shape, x.dtype, seed=9)).astype(dtype)


@oracles.each_dtype
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("rank", [1, 3])
def test_trains_of_low_rank_come_from_samples(dtype: np.dtype, shape: tuple[int, ...], rank: int) -> None:
    x = noisy_train(shape, rank, 1e-4, dtype)
    with oracles.unchanged(x):
        fit = checked(x, 1e-3)
    assert is_sampled(x, 1e-3)
    assert fit.value.ranks == tnlib.tt_svd(x.astype(np.complex128), rtol=1e-3).value.ranks
    assert max(fit.value.ranks) <= rank


@oracles.each_dtype
@pytest.mark.parametrize("rtol", [None, 1e-4])
def test_samples_of_exact_trains_have_no_error(dtype: np.dtype, rtol: float | None) -> None:
    for shape in SHAPES:
        x = oracles.random_train(shape, [1, *[2] * (len(shape) - 1), 1], dtype)
        fit = checked(x, rtol)
        assert fit.error < 100 * oracles.eps(dtype)
        assert is_sampled(x, rtol)


@pytest.mark.parametrize("rtol", [1e-2, 1e-4, 1e-6, 1e-8, 1e-10, 1e-12, 1e-13])
@pytest.mark.parametrize("noise", [1e-3, 1e-5, 1e-7, 1e-9, 1e-11])
def test_noise_above_and_below_the_tolerance(rtol: float, noise: float) -> None:
    x = noisy_train((24, 24, 12, 12), 2, noise)
    fit = checked(x, rtol)
    if noise < 0.3 * rtol:
        assert is_sampled(x, rtol)
        assert fit.value.ranks == (1, 2, 2, 2, 1)


# ---------------------------------------------------------------------------------- structure outside of the sample


def sparse(shape: tuple[int, ...], count: int) -> np.ndarray:
    rng, x = np.random.default_rng(count), np.zeros(shape)
    x.reshape(-1)[rng.choice(x.size, count, replace=False)] = rng.standard_normal(count)
    return x


def with_a_row(shape: tuple[int, ...], size: float) -> np.ndarray:
    """Low rank but for one row of the middle unfolding, or of what is nearest to it."""
    x = noisy_train(shape, 2, 0.0)
    middle = x.reshape(math.prod(shape[: len(shape) // 2]), -1)
    middle[len(middle) // 3] += size * oracles.normal((middle.shape[1],), seed=3) / math.sqrt(middle.shape[1])
    return x


def blocks(shape: tuple[int, ...], size: float) -> np.ndarray:
    """One corner of rank one, the opposite corner noise."""
    x = np.zeros(shape)
    near, far = (tuple(slice(0, n // 2) for n in shape), tuple(slice(n // 2, None) for n in shape))
    x[near] = noisy_train(x[near].shape, 1, 0.0)
    x[far] = size * oracles.normal(x[far].shape) / math.sqrt(x[far].size)
    return x


def identity(shape: tuple[int, ...]) -> np.ndarray:
    rows = math.prod(shape[: len(shape) // 2])
    return np.eye(rows, math.prod(shape) // rows).reshape(shape)


ADVERSARIES: dict[str, Callable[[tuple[int, ...]], np.ndarray]] = {
    "one entry": lambda shape: sparse(shape, 1),
    "fifty entries": lambda shape: sparse(shape, 50),
    "low rank and an entry": lambda shape: noisy_train(shape, 2, 0.0) + sparse(shape, 1),
    "one outstanding row": lambda shape: with_a_row(shape, 10.0),
    "one significant row": lambda shape: with_a_row(shape, 1e-3),
    "two blocks": lambda shape: blocks(shape, 1.0),
    "a block of noise": lambda shape: blocks(shape, 1e-4),
    "identity": identity,
    "constant but along the first leg": lambda shape: np.broadcast_to(
        oracles.normal((shape[0],) + (1,) * (len(shape) - 1)), shape
    ).copy(),
    "constant but along the last leg": lambda shape: np.broadcast_to(oracles.normal(shape[-1:]), shape).copy(),
    "zero in every other slice": lambda shape: noisy_train(shape, 2, 0.0) * (np.arange(shape[-1]) % 2),
    "zero but for the last slice": lambda shape: (
        noisy_train(shape, 2, 0.0) * (np.arange(shape[0]) == shape[0] - 1).reshape((-1,) + (1,) * (len(shape) - 1))
    ),
    "rows of every size": lambda shape: (
        noisy_train(shape, 2, 0.0) * np.logspace(0, -20, shape[0]).reshape((-1,) + (1,) * (len(shape) - 1))
    ),
    "noise": lambda shape: oracles.normal(shape),
}


@pytest.mark.parametrize("kind", ADVERSARIES)
@pytest.mark.parametrize(
    "shape",
    [(2048, 32), *(pytest.param(shape, marks=pytest.mark.slow) for shape in ((24, 24, 12, 12), (2,) * 16))],
    ids=str,
)
def test_structure_outside_of_a_sample_is_detected(kind: str, shape: tuple[int, ...]) -> None:
    x = ADVERSARIES[kind](shape)
    noise = 64 * oracles.eps(x.dtype) * oracles.norm(x)
    unfoldings = [x.reshape(math.prod(shape[:k]), -1) for k in range(1, x.ndim)]
    spectra = [np.linalg.svd(a, compute_uv=False) for a in unfoldings]
    tails = [np.sqrt(np.cumsum(s[::-1] ** 2)[::-1]) for s in spectra]
    for rtol in (None, 0.3, 1e-2, 1e-4, 1e-6, 1e-8, 1e-11, 1e-13):
        fit = checked(x, rtol)
        share = max(noise, (rtol or 0.0) * oracles.norm(x) / math.sqrt(x.ndim - 1))
        for rank, s, tail in zip(fit.value.ranks[1:-1], spectra, tails, strict=True):
            assert rank <= max(1, np.count_nonzero(s > noise if rtol is None else tail > 0.97 * share))


@pytest.mark.parametrize("kind", ADVERSARIES)
@pytest.mark.parametrize("dtype", [np.float32, np.complex64])
def test_structure_outside_of_a_sample_is_detected_in_single_precision(kind: str, dtype: type) -> None:
    x = ADVERSARIES[kind]((24, 24, 12, 12)).astype(dtype)
    for rtol in (None, 1e-2, 1e-4):
        checked(x, rtol)


def test_a_cap_alone_gives_the_best_error() -> None:
    x = noisy_train((24, 24, 12, 12), 3, 1e-2)
    fit = tnlib.tt_svd(x, max_rank=3)
    oracles.assert_fit(fit, x)
    middle = np.linalg.svd(x.reshape(576, 144), compute_uv=False)
    assert fit.error >= np.linalg.norm(middle[3:]) / np.linalg.norm(middle) * (1 - 1e-9)
    assert fit.error <= 0.0101


@pytest.mark.parametrize("cap", [1, 2, 3, 8, 1000])
@pytest.mark.parametrize("rtol", [1e-2, 1e-4, 1e-8])
def test_a_cap_and_a_tolerance(cap: int, rtol: float) -> None:
    x = noisy_train((24, 24, 12, 12), 3, 1e-6)
    fit, warned = oracles.quietly(lambda: tnlib.tt_svd(x, rtol=rtol, max_rank=cap))
    oracles.assert_fit(fit, x, rtol=rtol)
    oracles.assert_warned(fit, warned)
    free = tnlib.tt_svd(x, rtol=rtol).value.ranks
    assert all(r <= min(cap, s) for r, s in zip(fit.value.ranks, free, strict=True))
