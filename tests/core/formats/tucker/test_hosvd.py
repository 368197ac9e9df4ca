"""tucker: multilinear ranks, the error budget over legs, rank caps, orthogonal iteration, degenerate input."""

from __future__ import annotations

import copy

import numpy as np
import oracles
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tnlib


def unfolding_values(x: np.ndarray, k: int) -> np.ndarray:
    return np.linalg.svd(np.moveaxis(x, k, 0).reshape(x.shape[k], -1), compute_uv=False)


@oracles.each_dtype
@pytest.mark.parametrize(
    ("shape", "ranks"), [((5, 6, 7), (2, 3, 4)), ((4, 4, 4, 4), (1, 2, 2, 3)), ((9, 3), (2, 2)), ((6,), (1,))], ids=str
)
def test_multilinear_ranks_are_recovered(dtype: np.dtype, shape: tuple, ranks: tuple) -> None:
    x = oracles.random_tucker(shape, ranks, dtype)
    fit = tnlib.tucker(x)
    assert fit.value.ranks == ranks
    oracles.assert_fit(fit, x)
    oracles.assert_gauge(fit.value)
    oracles.assert_close(fit.value.full(), x, dtype, factor=200)


@oracles.each_dtype
def test_the_core_is_the_projection(dtype: np.dtype) -> None:
    x = oracles.normal((4, 5, 6), dtype)
    value = tnlib.tucker(x, ranks=(2, 3, 2)).value
    core = np.einsum("ijk,ia,jb,kc->abc", x, *(f.conj() for f in value.factors))
    oracles.assert_close(value.core, core, dtype, factor=200)


@pytest.mark.parametrize("n_iter", [0, 1, 5])
def test_error_at_given_ranks_is_quasi_optimal(n_iter: int) -> None:
    x = oracles.normal((5, 6, 7))
    fit = tnlib.tucker(x, ranks=(2, 3, 3), n_iter=n_iter)
    tails = [np.sum(unfolding_values(x, k)[r:] ** 2) for k, r in enumerate((2, 3, 3))]
    oracles.assert_fit(fit, x)
    assert np.sqrt(max(tails)) / np.linalg.norm(x) <= fit.error <= np.sqrt(sum(tails)) / np.linalg.norm(x)
    assert fit.n_iter == n_iter


@pytest.mark.parametrize("n_iter", [0, 2])
@oracles.each_dtype
def test_error_has_no_floor_at_the_root_of_eps(dtype: np.dtype, n_iter: int) -> None:
    """sqrt(norm(x)^2 - norm(core)^2) would lose half of the digits, iterated or not."""
    e = oracles.eps(dtype)
    exact = oracles.random_tucker((5, 6, 7), (1, 1, 1), dtype)
    fit = tnlib.tucker(exact, ranks=1, n_iter=n_iter)
    oracles.assert_fit(fit, exact)
    assert fit.error < 20 * e
    noise = oracles.normal(exact.shape, dtype, seed=3)
    size = 2e4 * e * oracles.norm(exact) / oracles.norm(noise)
    noisy = (exact + size * noise).astype(dtype)
    fit = tnlib.tucker(noisy, ranks=1, n_iter=n_iter)
    oracles.assert_fit(fit, noisy)
    assert 1e4 * e < fit.error < 3e4 * e


@pytest.mark.parametrize("keyword", ["max_rank", "ranks"])
def test_caps_are_one_number_or_one_per_leg(keyword: str) -> None:
    x = oracles.normal((4, 5, 6))
    for cap in (2, (4, 9, 1), [9, 2, 2], np.array([3, 2, 2])):
        given = copy.copy(cap)
        ranks = tuple(np.minimum(np.broadcast_to(cap, 3), x.shape))
        assert tnlib.tucker(x, **{keyword: given}).value.ranks == ranks
        np.testing.assert_array_equal(given, cap)


def test_both_names_of_the_cap_are_refused() -> None:
    with oracles.refused(ValueError, "tucker: max_rank and ranks must not both be given", "got 2 and 3"):
        tnlib.tucker(np.ones((3, 4, 5)), max_rank=2, ranks=3)


@pytest.mark.parametrize("keyword", ["max_rank", "ranks"])
@pytest.mark.parametrize(
    ("error", "caps"),
    [
        (ValueError, [(2, 2), (2, 2, 2, 2), (), 0, (2, 0, 2)]),
        (TypeError, ["222", {2}, None.__class__, 2.5, True]),
    ],
)
def test_impossible_caps_are_refused(error: type[Exception], caps: list[object], keyword: str) -> None:
    for cap in caps:
        with oracles.refused(error, f"tucker: {keyword} must", "got"):
            tnlib.tucker(np.ones((3, 4, 5)), **{keyword: cap})


@pytest.mark.parametrize("keyword", ["max_rank", "ranks"])
def test_a_cap_through_equal_values_names_its_legs(keyword: str) -> None:
    x = oracles.ghz(3, 4)
    with pytest.warns(tnlib.DegenerateCutWarning, match=f"tucker: {keyword} separates .* at leg 0"):
        fit = tnlib.tucker(x, **{keyword: 2})
    oracles.assert_fit(fit, x)
    assert tnlib.tucker(x).value.ranks == (4, 4, 4)


@pytest.mark.parametrize("n_iter", [0, 2])
def test_zero(n_iter: int) -> None:
    fit = tnlib.tucker(np.zeros((3, 4, 5)), max_rank=2, n_iter=n_iter)
    assert fit.value.ranks == (1, 1, 1)
    assert fit.error == 0
    oracles.assert_gauge(fit.value)


@oracles.each_dtype
def test_orthogonal_iteration_lowers_the_error_to_a_stationary_point(dtype: np.dtype) -> None:
    x = oracles.normal((6, 7, 8), dtype)
    errors = [tnlib.tucker(x, ranks=2, n_iter=n).error for n in (0, 1, 3, 30)]
    assert errors[1] < errors[0]
    assert errors[2] < errors[1]
    fit = tnlib.tucker(x, ranks=2, n_iter=30)
    oracles.assert_fit(fit, x)
    oracles.assert_gauge(fit.value)
    assert tnlib.tucker(x, ranks=2, n_iter=31).error == pytest.approx(fit.error, rel=1e-3)


@pytest.mark.parametrize("ranks", [(4, 1, 2), (1, 4, 1), (5, 1, 1), (1, 1, 3, 2)], ids=str)
@pytest.mark.parametrize("dtype", [np.float64, np.complex64], ids=str)
def test_ranks_that_the_other_legs_cannot_fill(ranks: tuple[int, ...], dtype: type) -> None:
    x = oracles.normal((5, 5, 4, 3)[: len(ranks)], dtype)
    for n_iter in (0, 1, 3):
        fit = tnlib.tucker(x, ranks=ranks, n_iter=n_iter)
        assert fit.value.ranks == ranks
        oracles.assert_fit(fit, x)
        oracles.assert_gauge(fit.value)


def test_tolerance_and_iteration_together() -> None:
    x = oracles.hilbert((6, 6, 6))
    fit = tnlib.tucker(x, rtol=1e-3, n_iter=2)
    oracles.assert_fit(fit, x, rtol=1e-3)
    assert fit.value.ranks == tnlib.tucker(x, rtol=1e-3).value.ranks


@pytest.mark.parametrize("small", [1e-3, 1e-4, 1e-5])
def test_a_basis_of_small_equal_values_does_not_depend_on_the_other_legs(small: float) -> None:
    """Gram matrices, which determine the values, separate two equal ones by eps over their size."""
    left = oracles.isometry(4, 4) * [1, small, small, small / 10]
    tensors = [(left @ oracles.isometry(42, 4, seed=seed).T).reshape(4, 6, 7) for seed in (5, 50)]
    first, second = (tnlib.tucker(x, ranks=(4, 6, 7)).value.factors[0] for x in tensors)
    assert np.linalg.norm(first - second) < 1e3 * oracles.eps(np.float64) / small**2


@given(st.integers(0, 1000), st.integers(1, 3), st.integers(1, 3))
@settings(max_examples=20, deadline=None)
def test_sweeps_from_any_start_do_not_raise_its_error(seed: int, rank: int, n_iter: int) -> None:
    """The error of the projection on the factors of the start bounds that of every sweep."""
    x, start = oracles.normal((4, 5, 6), seed=seed), tnlib.random.tucker((4, 5, 6), rank, rng=seed)
    fit = tnlib.tucker(x, init=start, n_iter=n_iter)
    q = [np.linalg.qr(factor)[0] for factor in start.factors]
    projection = np.einsum("abc,ai,bj,ck,di,ej,fk->def", x, *q, *q)
    assert fit.value.ranks == start.ranks
    assert fit.error <= oracles.norm(x - projection) / oracles.norm(x) * (1 + 1e-12)
    assert fit.error == pytest.approx(oracles.true_error(x, fit.value))
    assert tnlib.tucker(x, init=fit.value, n_iter=1).error <= fit.error * (1 + 1e-12)


@oracles.each_dtype
@pytest.mark.parametrize("scale", [1.0, 2.0**-40])
def test_a_start_of_any_scale_and_dtype(dtype: np.dtype, scale: float) -> None:
    x = oracles.random_tucker((5, 6, 7), (2, 3, 2), dtype)
    start = tnlib.tucker(x + 0.1 * oracles.normal(x.shape, dtype, 1), max_rank=(2, 3, 2)).value
    fit = tnlib.tucker(x * dtype.type(scale), init=start, n_iter=4)
    oracles.assert_fit(fit, x * dtype.type(scale))
    assert fit.value.dtype == dtype
    assert fit.error <= 100 * oracles.eps(dtype)


def test_other_starts_are_refused() -> None:
    x, start = oracles.normal((3, 4, 5)), tnlib.random.tucker((3, 4, 5), 2, rng=0)
    with oracles.refused(TypeError, "tucker", "init must be a Tucker", "ndarray"):
        tnlib.tucker(x, init=x, n_iter=1)  # type: ignore[arg-type]
    with oracles.refused(ValueError, "tucker", "init must have the shape of x, (3, 4, 5), got (3, 4, 6)"):
        tnlib.tucker(x, init=tnlib.random.tucker((3, 4, 6), 2, rng=0), n_iter=1)
    with oracles.refused(TypeError, "tucker", "init must be real"):
        tnlib.tucker(x, init=start * 1j, n_iter=1)
    for options in ({}, {"n_iter": 1, "max_rank": 2}):
        with oracles.refused(ValueError, "tucker", "init must be given with n_iter and without max_rank"):
            tnlib.tucker(x, init=start, **options)
    assert tnlib.tucker(0 * x, init=start, n_iter=1).value.norm() == 0
