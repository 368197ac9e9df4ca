"""Left spaces from samples of rows: low rank is found, and what no sample shows is noticed afterwards."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import oracles
import pytest

import tnlib
from tnlib.linalg.sampled import sampled_columns

split = importlib.import_module("tnlib.sweeps.split")


@pytest.fixture
def routes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Try samples on small arrays too; list for every attempt whether its result was kept."""
    taken: list[bool] = []
    real = split._by_a_sample

    def watched(*args: Any) -> Any:
        found = real(*args)
        taken.append(found is not None)
        return found

    monkeypatch.setattr(split, "_by_a_sample", watched)
    monkeypatch.setattr(split, "_SAMPLED", 1 << 11)
    return taken


# ------------------------------------------------------------------------------------------------ columns of a sample


def lost_by(columns: np.ndarray, a: np.ndarray) -> float:
    """Norm of what lies outside the space of the leading columns, those above roundoff."""
    u, s, _ = np.linalg.svd(columns, full_matrices=False)
    u = u[:, s > 1e-13 * s[0]]
    return oracles.norm(oracles.wide(a) - u @ (u.conj().T @ oracles.wide(a)))


@pytest.mark.parametrize("dtype", oracles.DTYPES, ids=str)
@pytest.mark.parametrize(("m", "n", "rank"), [(300, 80, 1), (300, 80, 5), (128, 400, 12), (2000, 40, 3)])
def test_the_space_of_a_matrix_of_low_rank_is_found(dtype: np.dtype, m: int, n: int, rank: int) -> None:
    a = oracles.with_spectrum(0.5 ** np.arange(rank), m, n, dtype)
    with oracles.unchanged(a):
        columns = sampled_columns(a, limit=1e-3 * oracles.norm(a))
    assert columns.dtype == (np.complex128 if dtype.kind == "c" else np.float64)
    assert rank - 3 <= columns.shape[1] <= 2 * rank + 8
    assert lost_by(columns, a) <= 1e-3 * oracles.norm(a)
    # a V^H with orthonormal rows V: no column is longer than the matrix, and together they hold nearly all of it
    assert (1 - 1e-5) * oracles.norm(a) <= oracles.norm(columns) <= (1 + 1e-12) * oracles.norm(a)


@pytest.mark.parametrize("limit", [1e-2, 1e-4, 1e-6, 1e-9, 1e-12])
def test_a_sample_is_resolved_as_finely_as_the_limit_asks(limit: float) -> None:
    a = oracles.with_spectrum(10.0 ** -np.arange(18.0), 400, 200)
    columns = sampled_columns(a, limit=limit)
    assert columns is not None
    assert columns.shape[1] <= 24
    assert lost_by(columns, a) <= limit


@pytest.mark.parametrize("limit", [0.0, 1e-3, 0.5])
def test_no_low_rank_is_seen_where_there_is_none(limit: float) -> None:
    assert sampled_columns(oracles.normal((300, 100)) / math.sqrt(30_000), limit=limit) is None
    assert sampled_columns(np.zeros((300, 100)), limit=limit) is None
    assert sampled_columns(oracles.normal((100, 3)), limit=limit) is None, "too few columns for a low rank"
    assert sampled_columns(np.ones((100, 300)), limit=limit) is None, "too few rows for a sample"


def test_the_same_rows_are_drawn_every_time() -> None:
    a = oracles.with_spectrum(0.1 ** np.arange(6.0), 500, 60)
    np.random.seed(0)  # noqa: NPY002 - the global state is what is watched
    before = np.random.get_state()[1].copy()  # noqa: NPY002
    one, other = (sampled_columns(a, limit=1e-4) for _ in range(2))
    np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(np.random.get_state()[1], before)  # noqa: NPY002


# --------------------------------------------------------------------------------------------- trains made of samples


def noisy_train(shape: tuple[int, ...], rank: int, noise: float, dtype: Any = np.float64) -> np.ndarray:
    x = oracles.random_train(
        shape, [1, *[rank] * (len(shape) - 1), 1], np.complex128 if dtype == "complex64" else dtype
    )
    return (x + noise / math.sqrt(x.size) * oracles.normal(shape, x.dtype, seed=9)).astype(dtype)


# with 128 rows or more in the middle: a sample is half of them at most
SHAPES = [(12, 12, 8, 8), (2,) * 14, (16, 12, 40), (4, 1, 32, 1, 32), (3, 5, 9, 5, 9)]


@pytest.mark.parametrize("dtype", oracles.DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("rank", [1, 3])
def test_trains_of_low_rank_come_from_samples(
    routes: list[bool], dtype: np.dtype, shape: tuple[int, ...], rank: int
) -> None:
    x = noisy_train(shape, rank, 1e-4, dtype)
    with oracles.unchanged(x):
        fit = tnlib.tt_svd(x, rtol=1e-3)
    assert any(routes)
    oracles.assert_fit(fit, x, rtol=1e-3)
    oracles.assert_gauge(fit.value)
    assert fit.value.ranks == tnlib.tt_svd(x.astype(np.complex128), rtol=1e-3).value.ranks
    assert max(fit.value.ranks) <= rank


@pytest.mark.parametrize("dtype", oracles.DTYPES, ids=str)
@pytest.mark.parametrize("rtol", [None, 1e-4])
def test_samples_of_exact_trains_have_no_error(routes: list[bool], dtype: np.dtype, rtol: float | None) -> None:
    for shape in SHAPES:
        x = oracles.random_train(shape, [1, *[2] * (len(shape) - 1), 1], dtype)
        fit = tnlib.tt_svd(x, rtol=rtol)
        oracles.assert_fit(fit, x)
        oracles.assert_gauge(fit.value)
        assert fit.error < 100 * oracles.eps(dtype)
    assert any(routes)


@pytest.mark.parametrize("rtol", [1e-2, 1e-4, 1e-6, 1e-8, 1e-10, 1e-12, 1e-13])
@pytest.mark.parametrize("noise", [1e-3, 1e-5, 1e-7, 1e-9, 1e-11])
def test_noise_above_and_below_the_tolerance(routes: list[bool], rtol: float, noise: float) -> None:
    x = noisy_train((12, 12, 8, 8), 2, noise)
    fit = tnlib.tt_svd(x, rtol=rtol)
    oracles.assert_fit(fit, x, rtol=rtol)
    oracles.assert_gauge(fit.value)
    if noise < 0.3 * rtol:
        assert any(routes)
        assert fit.value.ranks == (1, 2, 2, 2, 1)


@pytest.mark.parametrize("shape", [(128, 8), (128, 64), (256, 256), (16, 16, 16, 16), (2,) * 14], ids=str)
@pytest.mark.parametrize("rank", [1, 2, 4])
def test_what_stands_in_for_a_matrix_is_not_sampled_for_ever(
    routes: list[bool], monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], rank: int
) -> None:
    """The columns that stand in for a tall matrix have a low rank too, and there may be no fewer of them."""
    monkeypatch.setattr(split, "_SAMPLED", 0)
    for rtol in (0.3, 1e-2, 1e-3):
        x = noisy_train(shape, rank, 1e-5)
        oracles.assert_fit(tnlib.tt_svd(x, rtol=rtol), x, rtol=rtol)


def test_a_tall_matrix_of_low_rank_with_noise() -> None:
    """The same at the size from which samples are drawn without being told to."""
    x = noisy_train((8192, 16), 1, 1e-5)
    oracles.assert_fit(tnlib.tt_svd(x, rtol=1e-2), x, rtol=1e-2)


# ------------------------------------------------------------------------------------- what a sample of rows misses


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
    "five entries": lambda shape: sparse(shape, 5),
    "fifty entries": lambda shape: sparse(shape, 50),
    "low rank and an entry": lambda shape: noisy_train(shape, 2, 0.0) + sparse(shape, 1),
    "one outstanding row": lambda shape: with_a_row(shape, 10.0),
    "one row that matters": lambda shape: with_a_row(shape, 1e-3),
    "one row that hardly matters": lambda shape: with_a_row(shape, 1e-7),
    "two blocks": lambda shape: blocks(shape, 1.0),
    "a block of noise": lambda shape: blocks(shape, 1e-4),
    "identity": identity,
    "superdiagonal": lambda shape: (
        np.einsum("k,...k->...", np.ones(1), oracles.ghz(len(shape), min(shape))[..., None])
        if len(set(shape)) == 1
        else identity(shape)
    ),
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
@pytest.mark.parametrize("shape", [(12, 12, 8, 8), (2,) * 14, (160, 32)], ids=str)
def test_what_a_sample_misses_is_noticed(routes: list[bool], kind: str, shape: tuple[int, ...]) -> None:
    x = ADVERSARIES[kind](shape)
    noise = 64 * oracles.eps(x.dtype) * oracles.norm(x)
    unfoldings = [x.reshape(math.prod(shape[:k]), -1) for k in range(1, x.ndim)]
    spectra = [np.linalg.svd(a, compute_uv=False) for a in unfoldings]
    tails = [np.sqrt(np.cumsum(s[::-1] ** 2)[::-1]) for s in spectra]
    for rtol in (None, 0.3, 1e-2, 1e-4, 1e-6, 1e-8, 1e-11, 1e-13):
        fit = tnlib.tt_svd(x, rtol=rtol)
        oracles.assert_fit(fit, x, rtol=rtol)
        oracles.assert_gauge(fit.value)
        share = max(noise, (rtol or 0.0) * oracles.norm(x) / math.sqrt(x.ndim - 1))
        for rank, s, tail in zip(fit.value.ranks[1:-1], spectra, tails, strict=True):
            assert rank <= max(1, np.count_nonzero(s > noise if rtol is None else tail > 0.97 * share))
    assert routes


@pytest.mark.parametrize("kind", ADVERSARIES)
@pytest.mark.parametrize("dtype", [np.float32, np.complex64])
def test_what_a_sample_misses_is_noticed_in_single_precision(routes: list[bool], kind: str, dtype: type) -> None:
    x = ADVERSARIES[kind]((12, 12, 8, 8)).astype(dtype)
    for rtol in (None, 1e-2, 1e-4):
        fit = tnlib.tt_svd(x, rtol=rtol)
        oracles.assert_fit(fit, x, rtol=rtol)
        oracles.assert_gauge(fit.value)


@pytest.mark.parametrize("kind", ["one outstanding row", "one row that matters", "five entries"])
def test_a_sample_that_was_wrong_leaves_no_trace(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """What was booked for it is taken back: the result is the one that no sample was drawn for."""
    x = ADVERSARIES[kind]((12, 12, 8, 8))
    for rtol in (1e-2, 1e-4, 1e-8):
        monkeypatch.setattr(split, "_SAMPLED", 1 << 62)
        want = tnlib.tt_svd(x, rtol=rtol)
        monkeypatch.setattr(split, "_SAMPLED", 0)
        got = tnlib.tt_svd(x, rtol=rtol)
        assert got.value.ranks == want.value.ranks
        assert got.error == pytest.approx(want.error, rel=0.05, abs=1e-13)


def test_a_cap_alone_asks_for_the_best_error(routes: list[bool]) -> None:
    x = noisy_train((12, 12, 8, 8), 3, 1e-2)
    fit = tnlib.tt_svd(x, max_rank=3)
    assert not any(routes)
    oracles.assert_fit(fit, x)
    middle = np.linalg.svd(x.reshape(144, 64), compute_uv=False)
    assert fit.error >= np.linalg.norm(middle[3:]) / np.linalg.norm(middle) * (1 - 1e-9)
    assert fit.error <= 0.0101


@pytest.mark.parametrize("cap", [1, 2, 3, 8, 1000])
@pytest.mark.parametrize("rtol", [1e-2, 1e-4, 1e-8])
def test_a_cap_and_a_tolerance(routes: list[bool], cap: int, rtol: float) -> None:
    x = noisy_train((12, 12, 8, 8), 3, 1e-6)
    fit, warned = oracles.quietly(lambda: tnlib.tt_svd(x, rtol=rtol, max_rank=cap))
    oracles.assert_fit(fit, x, rtol=rtol)
    oracles.assert_warned(fit, warned)
    free = tnlib.tt_svd(x, rtol=rtol).value.ranks
    assert all(r <= min(cap, s) for r, s in zip(fit.value.ranks, free, strict=True))
