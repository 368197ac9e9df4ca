"""Operator Schmidt form: fewest terms, Schmidt values, trains over finer legs."""

from __future__ import annotations

from typing import Any

import numpy as np
import oracles
import pytest
from format_cases import some, terms
from hypothesis import given
from hypothesis import strategies as st

import tnlib


def with_schmidt_values(s: Any, n_terms: int, dtype: Any = np.float64, seed: int = 0) -> tnlib.KroneckerTerms:
    """(3, 4) positions and (5, 6) features with Schmidt values `s`, written as `n_terms` other terms."""
    a, b = oracles.isometry(12, len(s), dtype, seed), oracles.isometry(30, len(s), dtype, seed + 1)
    mix = oracles.isometry(n_terms, n_terms, dtype, seed + 2)[:, : len(s)]  # h k
    left, right = (a * np.asarray(s)) @ mix.T, b @ mix.conj().T  # sum_h mix[h, k] conj(mix[h, l]) = delta
    dense = right.T.reshape(-1, 5, 6).astype(dtype)
    return tnlib.KroneckerTerms(left.T.reshape(-1, 3, 4).astype(dtype), [tnlib.LowRank(np.eye(5), m) for m in dense])


def schmidt_form(value: tnlib.KroneckerTerms) -> tuple[np.ndarray, np.ndarray]:
    """Left and right terms as columns and rows."""
    right = np.stack([np.asarray(term).ravel() for term in value.right])
    return value.left.reshape(len(value.left), -1).T, right


@oracles.each_dtype
@pytest.mark.parametrize("kind", ["dense", "factored", "mixed"])
@pytest.mark.parametrize("rtol", [None, 0.0, 0.1, 0.5, 1.0])
def test_rounding_holds_the_contract_and_its_gauge(dtype: np.dtype, kind: str, rtol: float | None) -> None:
    k = some(kind, 7, dtype)
    with oracles.unchanged(*k.arrays()):
        fit = tnlib.round(k, rtol=rtol)
    oracles.assert_fit(fit, k.full(), rtol=rtol)
    u, w = schmidt_form(fit.value)
    oracles.assert_isometric(u)
    oracles.assert_signs(u)
    gram = oracles.wide(w) @ oracles.wide(w).conj().T
    s = np.sqrt(np.diag(gram).real)
    assert (np.diff(s) <= 0).all()
    np.testing.assert_allclose(gram, np.diag(s**2), atol=200 * oracles.eps(dtype) * s[0] ** 2)
    paired = k.full().reshape(3, 5, 3, 4).transpose(0, 2, 1, 3).reshape(9, 20)
    want = np.linalg.svd(oracles.wide(paired), compute_uv=False)[: len(s)]
    np.testing.assert_allclose(s, want, atol=200 * oracles.eps(dtype) * want[0])
    assert fit.value.dtype == dtype


@given(
    st.lists(st.floats(-12, 0), min_size=1, max_size=8),
    st.integers(8, 11),
    st.sampled_from([None, 1e-13, 1e-8, 1e-3, 0.1, 0.6]),
    st.sampled_from([None, 1, 3]),
)
def test_rounding_at_any_spectrum(exponents: list[float], n_terms: int, rtol: float | None, cap: int | None) -> None:
    """Errors and ranks have no floor at sqrt(eps): values down to 1e-12 of the largest are seen."""
    s = np.sort(10.0 ** np.array(exponents))[::-1]
    k = with_schmidt_values(s, n_terms)
    fit, warned = oracles.quietly(lambda: tnlib.round(k, rtol=rtol, max_rank=cap))
    oracles.assert_fit(fit, k.full(), rtol=rtol)
    oracles.assert_warned(fit, warned)
    assert fit.value.ranks[0] <= min(len(s), cap or 99)
    if rtol is None and cap is None and s[-1] > 1e-11 * s[0]:
        assert fit.value.ranks == (len(s),)


def test_two_sums_of_one_operator_round_to_the_same_terms() -> None:
    s = [1.0, 0.3, 0.05]
    one, other = with_schmidt_values(s, 5), with_schmidt_values(s, 5)
    mix = oracles.normal((5, 5), seed=3)
    right = np.stack([np.asarray(term) for term in other.right])
    mixed = tnlib.KroneckerTerms(
        np.tensordot(np.linalg.inv(mix).T, other.left, 1), list(np.tensordot(mix, right, 1))
    )  # sum_h left[h] right[h]
    (u, w), (v, x) = (schmidt_form(tnlib.round(k, rtol=1e-8).value) for k in (one, mixed))
    np.testing.assert_allclose(u, v, atol=1e-10)
    np.testing.assert_allclose(w, x, atol=1e-10)


@pytest.mark.parametrize("scale", [1e-200, 1.0, 1e200])
def test_schmidt_values_and_entropy(scale: float) -> None:
    s = np.array([1.0, 0.5, 0.25])
    k = scale * with_schmidt_values(s, 5)
    got = tnlib.schmidt_values(k, 1)
    np.testing.assert_allclose(got[:3] / scale, s, rtol=1e-12)
    assert (got[3:] <= 1e-14 * scale).all()
    p = s**2 / (s**2).sum()
    assert tnlib.entropy(k, 1) == pytest.approx(-(p * np.log(p)).sum())
    assert tnlib.entropy(tnlib.KroneckerTerms(np.eye(3)[None], [np.eye(4)]), 1) == 0.0
    np.testing.assert_allclose(tnlib.entanglement_spectrum(k, 1)[:3], -np.log(p), rtol=1e-10)
    with oracles.refused(ValueError, "schmidt_values: bond must be 1", "got 2"):
        tnlib.schmidt_values(k, 2)


def test_repeated_and_cancelling_terms_go() -> None:
    k = some("factored", 3)
    assert tnlib.round(k + k).value.ranks == (3,)
    assert tnlib.round(k + k - 2 * k, rtol=1e-3).value.n_parameters > 0
    assert tnlib.round(0 * k).value.ranks == (1,)
    assert tnlib.round(0 * k).error == 0.0


def test_rounded_terms_are_factors_where_these_are_fewer_numbers() -> None:
    narrow = [tnlib.LowRank(oracles.normal((40, 2), seed=h), oracles.normal((2, 40), seed=9 + h)) for h in range(3)]
    few = tnlib.round(tnlib.KroneckerTerms(oracles.normal((3, 2, 2)), narrow), max_rank=2).value
    assert all(isinstance(term, tnlib.LowRank) and term.ranks == (6,) for term in few.right)
    wide = tnlib.round(some("factored", 3), max_rank=2).value
    assert all(isinstance(term, np.ndarray) for term in wide.right)


def test_rounding_forms_nothing_of_full_size() -> None:
    """Side by side, the 64 matrices of the features would be 8 GB, and the operator has 10^11 entries."""
    import tracemalloc

    right = [tnlib.LowRank(oracles.normal((4096, 1), seed=h), oracles.normal((1, 4096), seed=h)) for h in range(64)]
    k = tnlib.KroneckerTerms(oracles.normal((64, 80, 80)), right)
    tracemalloc.start()
    fit = tnlib.round(k, max_rank=3)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert fit.value.ranks == (3,)
    assert peak < 2e8


@oracles.each_dtype
@pytest.mark.parametrize("kind", ["dense", "factored", "mixed"])
@pytest.mark.parametrize(
    ("rows", "columns"),
    [((4, 6), (6, 6)), ((2, 2, 3, 2), (3, 2, 2, 3)), ((4, 1, 6), (3, 2, 6)), ((2, 2, 1, 2, 3), (1, 6, 6, 1, 1))],
)
@pytest.mark.parametrize("rtol", [None, 0.3])
def test_a_train_over_finer_legs_is_that_of_the_matrix(
    dtype: np.dtype, kind: str, rows: tuple[int, ...], columns: tuple[int, ...], rtol: float | None
) -> None:
    k = tnlib.KroneckerTerms(oracles.normal((4, 4, 6), dtype), terms(kind, 4, dtype, (6, 6)))
    fit, dense = (tnlib.ttm_svd(a, rows, columns, rtol=rtol) for a in (k, k.full()))
    oracles.assert_fit(fit, k.full(), rtol=rtol)
    oracles.assert_gauge(fit.value)
    assert fit.value.row_shape == rows
    assert fit.value.col_shape == columns
    if rtol is None:
        assert fit.value.ranks == dense.value.ranks


def test_a_train_over_finer_legs_of_nothing() -> None:
    nothing = tnlib.ttm_svd(0 * some("factored", 3), (3, 5), (3, 4))
    assert (nothing.value.ranks, nothing.error) == ((1, 1, 1), 0.0)
    assert not nothing.value.full().any()


@pytest.mark.parametrize(("rows", "columns"), [((5, 3), (4, 3)), ((15,), (12,)), ((3, 5), (4, 3)), ((1, 15), (1, 12))])
def test_legs_that_mix_positions_and_features_are_refused(rows: tuple[int, ...], columns: tuple[int, ...]) -> None:
    with oracles.refused(ValueError, "ttm_svd: row_shape and col_shape", "3 and 3", str(rows), "positions"):
        tnlib.ttm_svd(some(), rows, columns)
