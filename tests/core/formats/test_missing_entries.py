"""cp and tucker of numpy masked arrays: the known entries determine the rest, and no sweep raises their error."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import oracles
import pytest

import tnlib

SHAPE = (8, 9, 10)


def masked(x: np.ndarray, missing: float, seed: int = 0) -> np.ma.MaskedArray:
    """What is hidden is NaN, so that a result which reads it cannot be finite."""
    mask = np.random.default_rng(seed).random(x.shape) < missing
    return np.ma.array(np.where(mask, np.nan, x).astype(x.dtype), mask=mask)


FITS: dict[str, Callable[..., Any]] = {
    "cp": functools.partial(tnlib.cp, rank=2, n_starts=2, rng=0),
    "tucker": functools.partial(tnlib.tucker, max_rank=2, n_iter=1000),
}
EXACT = {
    "cp": functools.partial(oracles.random_cp, SHAPE, 2),
    "tucker": functools.partial(oracles.random_tucker, SHAPE, (2, 2, 2)),
}
both = pytest.mark.parametrize("name", FITS)


def known_error(x: np.ma.MaskedArray, value: Any) -> float:
    known = ~x.mask
    return oracles.norm(oracles.wide(x.data)[known] - oracles.wide(value.full())[known]) / oracles.norm(x.data[known])


@both
@oracles.each_dtype
@pytest.mark.parametrize("missing", [0.1, 0.5])
def test_missing_entries_are_recovered(name: str, dtype: np.dtype, missing: float) -> None:
    x = EXACT[name](dtype)
    hidden = masked(x, missing)
    with oracles.unchanged(hidden.mask):
        fit, _ = oracles.quietly(lambda: FITS[name](hidden))
    assert fit.value.dtype == dtype
    assert not fit.certified
    assert f"{np.count_nonzero(~hidden.mask)} known of {x.size}" in fit.notes[-1]
    assert fit.error == pytest.approx(known_error(hidden, fit.value), rel=1e-3, abs=50 * oracles.eps(dtype))
    assert oracles.true_error(x, fit.value) <= 1e4 * oracles.eps(dtype)
    oracles.assert_gauge(fit.value)


@both
def test_no_sweep_raises_the_error_of_known_entries(name: str) -> None:
    x = masked(oracles.normal((5, 6, 7)), 0.3)
    errors = [
        oracles.quietly(lambda n=n: FITS[name](x, n_iter=n, **({"n_starts": 1} if name == "cp" else {})))[0].error
        for n in (1, 2, 3, 5, 9, 20)
    ]
    assert all(b <= a * (1 + 1e-12) for a, b in itertools.pairwise(errors))
    assert errors[-1] < errors[0]


@both
def test_noise_is_averaged(name: str) -> None:
    """A model of few parameters fits the noise of known entries in part, and errs by less than it elsewhere."""
    exact = EXACT[name](np.float64)
    noise = oracles.normal(SHAPE, seed=3)
    x = masked(exact + 0.01 * oracles.norm(exact) / oracles.norm(noise) * noise, 0.3)
    fit = FITS[name](x)
    assert fit.converged
    assert 0.005 < fit.error < 0.0105
    assert oracles.true_error(exact, fit.value) < 0.01


@both
def test_tolerances_end_the_sweeps_or_are_missed(name: str) -> None:
    x = masked(EXACT[name](np.float64), 0.4)
    loose, tight = (FITS[name](x, rtol=rtol) for rtol in (0.1, 1e-8))
    assert loose.converged
    assert tight.converged
    assert loose.error <= 0.1
    assert tight.error <= 1e-8
    assert loose.n_iter < tight.n_iter
    with pytest.warns(tnlib.ConvergenceWarning, match=f"{name}: the error .* misses"):
        assert not FITS[name](x, rtol=1e-8, n_iter=1).converged
    with pytest.warns(tnlib.ConvergenceWarning, match=f"{name}: still improving after 2 sweeps"):
        assert not FITS[name](x, n_iter=2).converged


@both
def test_masks_without_missing_entries_and_zeros(name: str) -> None:
    x = EXACT[name](np.float64)
    fit = FITS[name](np.ma.array(x, mask=False))
    oracles.assert_fit(fit, x)
    assert fit.certified
    zero = FITS[name](masked(np.zeros(SHAPE), 0.3))
    assert zero.error == 0
    assert not zero.value.full().any()


@both
def test_what_known_entries_do_not_determine_is_refused(name: str) -> None:
    x = np.ma.array(np.ones(SHAPE), mask=np.zeros(SHAPE, bool))
    x.mask[:, 4] = True
    with oracles.refused(ValueError, f"{name}: x must have a known entry", "index 4 of leg 1"):
        FITS[name](x)
    x = masked(np.full(SHAPE, np.inf), 0.2)
    with oracles.refused(ValueError, f"{name}: x must be finite"):
        FITS[name](x)


def test_options_that_need_all_entries_are_refused() -> None:
    x = masked(np.ones(SHAPE), 0.2)
    with oracles.refused(ValueError, "tucker: max_rank must be given", "missing"):
        tnlib.tucker(x, rtol=0.1, n_iter=5)
    with oracles.refused(ValueError, "tucker: n_iter must be at least 1", "n_iter=500"):
        tnlib.tucker(x, max_rank=2)
    with oracles.refused(ValueError, "cp: constraint must be None", "missing"):
        tnlib.cp(x, 1, constraint="nonnegative")
    with oracles.refused(TypeError, "tt_svd: x must be dense"):
        tnlib.tt_svd(x)


@pytest.mark.parametrize("scale", [1.0, 1e-100])
def test_a_tucker_goes_on_from_an_earlier_one(scale: float) -> None:
    """Sweeps from the value of a fit are those that the fit would have taken next."""
    x = masked(scale * oracles.random_tucker(SHAPE, (2, 2, 2)), 0.6)
    first, _ = oracles.quietly(lambda: tnlib.tucker(x, max_rank=2, n_iter=7))
    after, _ = oracles.quietly(lambda: tnlib.tucker(x, init=first.value, n_iter=5))
    at_once, _ = oracles.quietly(lambda: tnlib.tucker(x, max_rank=2, n_iter=12))
    assert after.error <= first.error
    assert after.error == pytest.approx(at_once.error)
    np.testing.assert_allclose(after.value.full(), at_once.value.full(), atol=1e-9 * scale)
