"""tt_svd: ranks, budget over bonds, gauge, long trains, degenerate input."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import oracles
import pytest

import tnlib

SHAPES = [
    ((4, 5, 6), (1, 3, 2, 1)),
    ((2, 3, 4, 3, 2), (1, 2, 4, 3, 2, 1)),
    ((8, 8), (1, 5, 1)),
    ((2,) * 12, (1, *[2] * 11, 1)),
    ((1, 4, 1, 5, 1), (1, 1, 3, 3, 1, 1)),
]


@oracles.each_dtype
@pytest.mark.parametrize(("shape", "ranks"), SHAPES, ids=str)
def test_ranks_of_a_random_train_are_recovered(dtype: np.dtype, shape: tuple, ranks: tuple) -> None:
    x = oracles.random_train(shape, ranks, dtype)
    fit = tnlib.tt_svd(x)
    assert fit.value.ranks == ranks
    oracles.assert_fit(fit, x)
    oracles.assert_gauge(fit.value)
    oracles.assert_close(fit.value.full(), x, dtype, factor=500)
    assert all(core.dtype == dtype for core in fit.value.cores)


@pytest.mark.parametrize("d", [12, 16])
@pytest.mark.parametrize("seed", range(6))
def test_roundoff_of_multiplying_out_is_no_rank(d: int, seed: int) -> None:
    """Every product of cores rounds every entry; the singular values of that noise grow with the count of cores."""
    x = oracles.dense_train(oracles.random_cores((2,) * d, [1] * (d + 1), seed=seed))
    assert tnlib.tt_svd(x).value.ranks == (1,) * (d + 1)


def test_the_whole_tolerance_is_used() -> None:
    """A budget that nobody else needs goes to the bond that does: only the last bond of this train is not trivial."""
    s = 0.8 ** np.arange(16)
    x = oracles.with_spectrum(s, 16, 16).reshape(1, 1, 1, 16, 16)
    assert tnlib.tt_svd(x, rtol=0.05).value.ranks[-2] == tnlib.svd(x[0, 0, 0], rtol=0.05).value.ranks[0]


@oracles.each_dtype
def test_the_center_carries_the_norm(dtype: np.dtype) -> None:
    x = oracles.normal((3, 4, 5), dtype)
    value = tnlib.tt_svd(x).value
    assert oracles.norm(value.cores[-1]) == pytest.approx(oracles.norm(x), rel=64 * oracles.eps(dtype))
    assert value.norm() == pytest.approx(oracles.norm(x), rel=64 * oracles.eps(dtype))
    assert value.log_scale == 0


@oracles.each_dtype
def test_one_leg(dtype: np.dtype) -> None:
    x = oracles.normal((5,), dtype)
    fit = tnlib.tt_svd(x, rtol=0.5, max_rank=1)
    assert fit.value.ranks == (1, 1)
    assert fit.error == 0
    np.testing.assert_array_equal(fit.value.full(), x)


def test_a_cap_through_equal_values_names_its_bonds() -> None:
    x = oracles.ghz(4, 3)
    with pytest.warns(tnlib.DegenerateCutWarning, match="tt_svd: max_rank separates equal .* at bond 1"):
        fit = tnlib.tt_svd(x, max_rank=2)
    oracles.assert_fit(fit, x)
    assert fit.value.ranks == (1, 2, 2, 2, 1)
    assert fit.error == pytest.approx(np.sqrt(1 / 3))
    assert tnlib.tt_svd(x).notes == ()
    assert tnlib.tt_svd(x, max_rank=3).value.ranks == (1, 3, 3, 3, 1)


def test_a_cap_on_one_bond_does_not_loosen_the_others() -> None:
    """What the cap discards beyond its share is lost; it neither raises nor lowers what later bonds may discard."""
    s = 0.7 ** np.arange(12)
    x = np.multiply.outer(oracles.with_spectrum(s, 12, 12), oracles.with_spectrum(s, 12, 12, seed=5))
    fit, _ = oracles.quietly(lambda: tnlib.tt_svd(x, rtol=0.02, max_rank=6))
    free = tnlib.tt_svd(x, rtol=0.02)
    assert free.value.ranks[1] > 6
    assert fit.value.ranks == (1, 6, 1, 6, 1)
    oracles.assert_fit(fit, x, rtol=0.02)


def test_errors_of_single_precision_are_sums_in_double() -> None:
    x = oracles.with_spectrum([1.0, 3e-4, 1e-4, 2e-5], 8, 8, np.float32).reshape(2, 4, 4, 2)
    fit = tnlib.tt_svd(x, rtol=1e-5)
    oracles.assert_fit(fit, x, rtol=1e-5)
    assert fit.value.ranks[2] == 4


@pytest.mark.parametrize(("n", "d"), [(64, 3), (24, 4), (7, 6)])
@pytest.mark.parametrize("rtol", [1e-4, 1e-5])
def test_smooth_arrays_meet_the_tolerance_and_no_error_is_reported_too_small(n: int, d: int, rtol: float) -> None:
    """Singular values fall by factors of ten, entries are sorted, and the true error is known to long doubles."""
    x = 1.0 / (1 + np.indices((n,) * d).sum(axis=0))
    fit = tnlib.tt_svd(x, rtol=rtol)
    wide = x.astype(np.longdouble)
    squares = np.square(wide - fit.value.full()).sum() / np.square(wide).sum()
    assert fit.converged
    assert math.sqrt(squares) <= fit.error * (1 + 1e-9) <= rtol


CAPS = (3, 5, 2)


@pytest.mark.parametrize("rtol", [None, 0.3, 0.9])
@pytest.mark.parametrize("large", [False, True])
def test_a_rank_cap_for_every_bond(large: bool, rtol: float | None) -> None:
    """Large arrays are split several legs at a time; the caps of a TT-matrix, `round` and `apply` are of bonds too."""
    n = 16 if large else 4
    x = oracles.normal((n,) * 4)
    train, pairs = tnlib.tt_svd(x).value, ((2, n // 2) * 2, (2, n // 2) * 2)
    matrix = x.reshape(n * n, n * n)
    calls: list[tuple[Any, np.ndarray]] = [
        (partial(tnlib.tt_svd, x), x),
        (partial(tnlib.tt_svd, x, storage=tnlib.Storage(memory=1 << 24)), x),
        (partial(tnlib.ttm_svd, matrix, *pairs), matrix),
        (partial(tnlib.round, train), x),
        (partial(tnlib.apply, tnlib.eye(x.shape), train), x),
    ]
    for call, exact in calls:
        fit, _ = oracles.quietly(partial(call, rtol=rtol, max_rank=CAPS))
        inner = fit.value.ranks[1:-1]
        assert all(rank <= cap for rank, cap in zip(inner, CAPS, strict=True))
        assert rtol is not None or inner == CAPS
        assert oracles.true_error(exact, fit.value) == pytest.approx(fit.error, rel=1e-3, abs=1e-13)


def test_a_rank_cap_for_every_bond_in_one_read() -> None:
    x = oracles.noisy_tucker((6, 7, 8, 5), (2, 2, 2, 2))
    fit, _ = oracles.quietly(lambda: tnlib.tt_svd(x, max_rank=[2, 4, 1], storage=tnlib.Storage(one_pass=True)))
    assert fit.value.ranks == (1, 2, 4, 1, 1)
    assert oracles.true_error(x, fit.value) <= 1.6 * fit.error


def test_rank_caps_that_do_not_match_the_bonds_are_refused() -> None:
    x = oracles.normal((3, 4, 5))
    terms = tnlib.random.tucker((3, 4, 5), 2, rng=0)
    for call in (tnlib.tt_svd, lambda _, **o: tnlib.round(tnlib.tt_svd(x).value, **o)):
        for caps, words in (((2,), "2 bonds"), ((2, 2, 2), "(2, 2, 2)"), ((2, 0), "at least 1"), ((2, 1.5), "1.5")):
            with oracles.refused(Exception, "max_rank must", words):
                call(x, max_rank=caps)
    with oracles.refused(ValueError, "round: max_rank must be one rank, got (2, 2)"):
        tnlib.round(terms, max_rank=(2, 2))
