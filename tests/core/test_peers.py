"""Defects that were reproduced in other libraries, each as a test that tnlib passes."""

from __future__ import annotations

import tracemalloc

import numpy as np
import oracles
import pytest

import tnlib


def test_fixing_signs_keeps_columns_of_zero_mean() -> None:
    """tensorly's cp_flip_sign multiplies by sign(mean), 0 for (1, -1): the component is lost, relative change 0.38."""
    factors = [np.array([[1.0, 1.0], [-1.0, 0.0]]), np.array([[1.0, 0.0], [-1.0, 1.0], [0.0, 0.0]]), np.eye(2)]
    x = oracles.contract(tnlib.CP([2.0, 1.0], factors))
    fit = tnlib.cp(x, 2)
    oracles.assert_fit(fit, x)
    oracles.assert_gauge(fit.value)
    assert fit.error < 1e-13


def test_complex_data_are_conjugated_where_they_must_be() -> None:
    """tensorly's symeig_svd (error 1.11), teneva's truncate (1.25) and tntorch's trains (1.33) forget the conjugate."""
    x = oracles.normal((4, 5, 6), np.complex128)
    for name in ("svd", "tt_svd", "tucker"):
        assert oracles.true_error(x, oracles.METHODS[name](x).value) < 1e-13
    assert oracles.true_error(x[0], oracles.METHODS["ttm_svd"](x[0]).value) < 1e-13


@pytest.mark.parametrize(
    ("s", "rtol", "dtype"),
    [([1, 3e-4, 1e-4, 2e-5], 1e-5, np.float32), ([1, 3e-8, 1e-9, 2e-10], 1e-10, np.float64)],
)
def test_small_tails_are_summed_apart_from_the_large_values(s: list[float], rtol: float, dtype: type) -> None:
    """quimb on torch compares a cumulative sum with tot * (1 - cutoff), where rounding hides the tail: it keeps two."""
    x = np.diag(np.array(s, dtype))
    assert tnlib.svd(x, rtol=rtol).value.ranks == (4,)
    assert tnlib.tt_svd(x, rtol=rtol).value.ranks == (1, 4, 1)


def test_a_steep_spectrum_is_truncated_optimally() -> None:
    """quimb's svd:rand, without orthonormalisation between powers, is off by 1.5e-5 where 1e-10 is possible."""
    s = 10.0 ** (-np.arange(32) / 2)
    fit = tnlib.svd(oracles.with_spectrum(s, 32, 32), max_rank=20)
    assert fit.error == pytest.approx(np.linalg.norm(s[20:]) / np.linalg.norm(s), rel=1e-4)


@pytest.mark.parametrize("size", [1.0, 10.0, 1e3])
@pytest.mark.parametrize("rtol", [0.5, 0.05, 5e-3])
def test_errors_are_not_amplified_by_the_largest_value(size: float, rtol: float) -> None:
    """teneva splits sqrt(s) on both sides: an error of 0.5 that was asked for becomes 10.05."""
    s = size * np.array([100.0, *[1.0] * 15])
    x = oracles.with_spectrum(s, 16, 16).reshape(4, 4, 4, 4)
    oracles.assert_fit(tnlib.tt_svd(x, rtol=rtol), x, rtol=rtol)


def test_the_long_side_costs_memory_once() -> None:
    """tntorch makes full_matrices and drops them: 106 MB for a matrix of 0.45 MB."""
    a = oracles.normal((16, 3500))
    tnlib.svd(a[:, :20])  # what the first call imports is no memory of the second
    tracemalloc.start()
    fit = tnlib.svd(a, rtol=1e-3)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert fit.value.vh.shape == (16, 3500)
    assert peak < 12 * a.nbytes


@pytest.mark.parametrize("rtol", [1e-9, 1e-10, 1e-12])
def test_tolerances_below_the_root_of_eps_are_honoured(rtol: float) -> None:
    """pyttb's hosvd works on Gram matrices: at tol 1e-10 it returns 6.3e-9 and, unless verbose, says nothing."""
    x = oracles.hilbert((12, 12, 12))
    fit = tnlib.tucker(x, rtol=rtol)
    assert oracles.true_error(x, fit.value) <= rtol
    assert max(fit.value.ranks) < 12
    oracles.assert_fit(fit, x, rtol=rtol)


def test_lists_of_ranks_are_not_changed() -> None:
    """pyttb overwrites the list of ranks that it is given."""
    ranks = [9, 9, 1]
    tnlib.tucker(oracles.normal((3, 4, 5)), ranks=ranks)
    assert ranks == [9, 9, 1]
