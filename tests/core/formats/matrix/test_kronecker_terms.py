"""Sums of Kronecker products: action on (positions, features), algebra, norm, fewest terms, finer legs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import oracles
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tnlib


def terms(kind: str, n_terms: int, dtype: Any, shape: tuple[int, int] = (5, 4)) -> list[Any]:
    dense = [oracles.normal(shape, dtype, seed=h) for h in range(n_terms)]
    factored = [
        tnlib.LowRank(oracles.normal((shape[0], 2), dtype, 10 + h), oracles.normal((2, shape[1]), dtype, 20 + h))
        for h in range(n_terms)
    ]
    return {"dense": dense, "factored": factored, "mixed": [*factored[:1], *dense[1:]]}[kind]


def matrices(right: list[Any]) -> list[np.ndarray]:
    return [b.left @ b.right if isinstance(b, tnlib.LowRank) else b for b in right]


@pytest.mark.parametrize("dtype", oracles.DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["dense", "factored", "mixed"])
@pytest.mark.parametrize("n_terms", [1, 2, 9])
def test_apply_is_the_sum_of_two_sided_products(dtype: np.dtype, kind: str, n_terms: int) -> None:
    left, right = oracles.normal((n_terms, 2, 3), dtype, seed=40), terms(kind, n_terms, dtype)
    k = tnlib.KroneckerTerms(left, right)
    x = oracles.normal((3, 4), dtype, seed=50)
    want = sum(a @ x @ b.T for a, b in zip(left, matrices(right), strict=True))
    dense = sum(np.kron(a, b) for a, b in zip(left, matrices(right), strict=True))
    with oracles.unchanged(x):
        oracles.assert_close(k.apply(x), want, dtype, 200)
    oracles.assert_close(k.apply(x).ravel(), dense @ x.ravel(), dtype, 200)
    oracles.assert_close(k.full(), dense, dtype, 200)
    oracles.assert_close(k.H.full(), dense.conj().T, dtype, 200)
    oracles.assert_close(k.H.H.full(), dense, dtype, 200)
    assert k.norm() == pytest.approx(oracles.norm(dense), rel=200 * oracles.eps(dtype))
    assert k.apply(x).dtype == dtype
    assert (k.shape, k.ranks, k.dtype) == ((10, 12), (n_terms,), dtype)


def test_apply_takes_any_layout() -> None:
    k = tnlib.KroneckerTerms(oracles.normal((2, 3, 3)), terms("factored", 2, np.float64))
    x = oracles.normal((3, 4))
    for layout in oracles.LAYOUTS.values():
        oracles.assert_close(k.apply(layout(x)), k.apply(x))


def test_terms_of_low_rank_stay_factored() -> None:
    k = tnlib.KroneckerTerms(np.ones((2, 3, 3)), terms("factored", 2, np.float64))
    assert all(isinstance(b, tnlib.LowRank) for b in k.right)
    assert k.n_parameters == 2 * 9 + 2 * (5 * 2 + 2 * 4)
    assert all(isinstance(b, tnlib.LowRank) for b in k.H.right)


def test_a_stack_of_matrices_is_a_sequence_of_them() -> None:
    k = tnlib.KroneckerTerms(np.ones((2, 3, 3)), np.ones((2, 4, 5)))
    assert len(k.right) == 2
    assert k.shape == (12, 15)


def test_nothing_of_full_size_is_formed() -> None:
    """(p q)^2 would be 10^16 numbers here."""
    p = q = 10_000
    k = tnlib.KroneckerTerms(np.ones((1, 1, p)), [tnlib.LowRank(np.ones((q, 1)), np.ones((1, q)))])
    assert k.norm() == pytest.approx(np.sqrt(p) * q)
    assert k.apply(np.ones((p, q)))[0, 0] == p * q


def test_terms_that_cancel() -> None:
    a, b = oracles.normal((4, 4)), oracles.normal((5, 5))
    assert tnlib.KroneckerTerms(np.stack([a, -a]), [b, b]).norm() <= 1e-14 * np.linalg.norm(a) * np.linalg.norm(b)


def test_products_mix_as_documented() -> None:
    """Head 2 after head 1: (A2 (x) B2)(A1 (x) B1) = A2 A1 (x) B2 B1."""
    a1, a2 = oracles.normal((2, 1, 3, 3))
    b1, b2 = oracles.normal((2, 4, 4), seed=1)
    x = oracles.normal((3, 4), seed=2)
    after = tnlib.KroneckerTerms(a2, [b2]).apply(tnlib.KroneckerTerms(a1, [b1]).apply(x))
    oracles.assert_close(tnlib.KroneckerTerms(a2 @ a1, [b2 @ b1]).apply(x), after)


# ------------------------------------------------------------------------------------------------------------ algebra


def some(
    kind: str = "factored", n_terms: int = 3, dtype: Any = np.float64, p: tuple[int, int] = (3, 3), seed: int = 0
) -> tnlib.KroneckerTerms:
    """Terms on (positions, 4 or 5 features)."""
    return tnlib.KroneckerTerms(oracles.normal((n_terms, *p), dtype, seed=60 + seed), terms(kind, n_terms, dtype))


@pytest.mark.parametrize("dtype", oracles.DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["dense", "factored", "mixed"])
def test_sums_multiples_and_transposes(dtype: np.dtype, kind: str) -> None:
    a, b = some(kind, 3, dtype), some("factored", 2, dtype, seed=1)
    full = a.full(), b.full()
    for got, want, count in (
        (a + b, full[0] + full[1], 5),
        (a - b, full[0] - full[1], 5),
        (sum([a, b, a]), 2 * full[0] + full[1], 8),
        (-2 * a / 4, -full[0] / 2, 3),
        (a.T, full[0].T, 3),
        (a.conj(), full[0].conj(), 3),
    ):
        assert isinstance(got, tnlib.KroneckerTerms)
        assert (got.ranks, got.dtype) == ((count,), dtype)
        oracles.assert_close(got.full(), want, dtype, 200)


@pytest.mark.parametrize("dtype", oracles.DTYPES, ids=str)
@pytest.mark.parametrize("kinds", [("dense", "dense"), ("dense", "factored"), ("factored", "mixed")])
def test_a_product_has_a_term_for_every_pair(dtype: np.dtype, kinds: tuple[str, str]) -> None:
    a, b = some(kinds[0], 3, dtype), some(kinds[1], 2, dtype, (3, 2))
    got = b.H @ a
    oracles.assert_close(got.full(), b.full().conj().T @ a.full(), dtype, 400)
    assert got.ranks == (6,)
    if "dense" not in kinds:
        assert all(isinstance(term, tnlib.LowRank) and term.ranks == (2,) for term in got.right)


def test_a_virtual_head_stays_as_narrow_as_a_head() -> None:
    """A2 A1 (x) (W1 W2)^T through the small inner dimension: nothing of size d x d."""
    d = 100_000
    head = tnlib.KroneckerTerms(np.ones((1, 2, 2)), [tnlib.LowRank(np.ones((d, 1)), np.ones((1, d)) / d)])
    twice = head @ head
    assert [a.shape for a in twice.right[0].arrays()] == [(d, 1), (1, d)]
    assert twice.norm() == pytest.approx(4.0)


# --------------------------------------------------------------------------------------------- operator Schmidt form


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


@pytest.mark.parametrize("dtype", oracles.DTYPES, ids=str)
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


@pytest.mark.parametrize("scale", [1e-200, 1e-30, 1e30, 1e200])
@pytest.mark.parametrize("side", ["left", "right", "both"])
def test_rounding_does_not_depend_on_scale(scale: float, side: str) -> None:
    k = some("factored", 4)
    plain = tnlib.round(k, rtol=0.3)
    left = k.left * (scale if side != "right" else 1.0)
    back = {"left": 1.0, "right": scale, "both": 1 / scale}[side]
    right = [tnlib.LowRank(b.left * back, b.right) for b in k.right]
    fit = tnlib.round(tnlib.KroneckerTerms(left, right), rtol=0.3)
    assert fit.value.ranks == plain.value.ranks
    assert fit.error == pytest.approx(plain.error, rel=1e-10)
    np.testing.assert_allclose(fit.value.left, plain.value.left, atol=1e-12)
    total = 1.0 if side == "both" else scale
    for got, want in zip(fit.value.right, plain.value.right, strict=True):
        np.testing.assert_allclose(np.asarray(got) / total, np.asarray(want), atol=1e-12)
    assert tnlib.KroneckerTerms(left, right).norm() == pytest.approx(total * k.norm())


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


@pytest.mark.parametrize("kind", ["dense", "factored", "mixed"])
def test_files_keep_every_term_as_it_is(kind: str, tmp_path: Path) -> None:
    k = some(kind)
    tnlib.save(tmp_path / "k.npz", k)
    found = tnlib.load(tmp_path / "k.npz")
    assert [type(term) for term in found.right] == [type(term) for term in k.right]
    oracles.assert_same_bits(found, k)


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


# ------------------------------------------------------------------------------------------------------- finer legs


@pytest.mark.parametrize("dtype", oracles.DTYPES, ids=str)
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


def test_a_train_over_finer_legs_at_any_scale_and_of_nothing() -> None:
    k = some("factored", 3)
    for scale in (1e-200, 1e200):
        fit = tnlib.ttm_svd(scale * k, (3, 5), (3, 4), rtol=0.2)
        assert fit.error == pytest.approx(tnlib.ttm_svd(k, (3, 5), (3, 4), rtol=0.2).error)
        oracles.assert_fit(fit, scale * k.full(), rtol=0.2)
    nothing = tnlib.ttm_svd(0 * k, (3, 5), (3, 4))
    assert (nothing.value.ranks, nothing.error) == ((1, 1, 1), 0.0)
    assert not nothing.value.full().any()


@pytest.mark.parametrize(("rows", "columns"), [((5, 3), (4, 3)), ((15,), (12,)), ((3, 5), (4, 3)), ((1, 15), (1, 12))])
def test_legs_that_mix_positions_and_features_are_refused(rows: tuple[int, ...], columns: tuple[int, ...]) -> None:
    with oracles.refused(ValueError, "ttm_svd: row_shape and col_shape", "3 and 3", str(rows), "positions"):
        tnlib.ttm_svd(some(), rows, columns)


def test_other_kinds_and_other_legs_are_refused() -> None:
    a = some()
    with oracles.refused(ValueError, "KroneckerTerms + KroneckerTerms", "leg"):
        a + some(p=(3, 2))
    with oracles.refused(ValueError, "KroneckerTerms @ KroneckerTerms", "(3, 4)", "(3, 5)", "transpose"):
        a @ a
    with oracles.refused(TypeError, "KroneckerTerms"):
        a + 1.0
    with oracles.refused(TypeError, "KroneckerTerms @ LowRank"):
        a @ tnlib.LowRank(np.ones((12, 1)), np.ones((1, 3)))


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (lambda: tnlib.KroneckerTerms(np.ones((2, 3, 3)), [np.ones((4, 4))]), ValueError, ["2 and 1", "terms"]),
        (
            lambda: tnlib.KroneckerTerms(np.ones((2, 3, 3)), [np.ones((4, 4)), np.ones((4, 5))]),
            ValueError,
            ["one shape", "(4, 4)", "(4, 5)", "term 1"],
        ),
        (lambda: tnlib.KroneckerTerms(np.ones((3, 3)), [np.ones((4, 4))]), ValueError, ["left must have 3 legs"]),
        (lambda: tnlib.KroneckerTerms(np.ones((1, 3, 3)), [np.ones(4)]), ValueError, ["right 0 must have 2 legs"]),
        (lambda: tnlib.KroneckerTerms(np.ones((1, 3, 3)), []), TypeError, ["right must be a non-empty sequence"]),
        (lambda: tnlib.KroneckerTerms(np.ones((1, 3, 3)), np.float64(2)), TypeError, ["right must be a non-empty"]),
        (lambda: tnlib.KroneckerTerms(np.ones((1, 3, 3)), "a"), TypeError, ["right must be a non-empty", "str"]),
    ],
)
def test_impossible_terms_are_refused(call: Any, kind: type[Exception], words: list[str]) -> None:
    with oracles.refused(kind, "KroneckerTerms", "got", *words):
        call()


@pytest.mark.parametrize("shape", [(12,), (4, 3), (3, 5), (1, 3, 4), ()])
def test_apply_refuses_other_shapes(shape: tuple[int, ...]) -> None:
    k = tnlib.KroneckerTerms(np.ones((1, 3, 3)), [np.ones((4, 4))])
    with oracles.refused(ValueError, "KroneckerTerms.apply: x must have shape", "(3, 4)", str(shape)):
        k.apply(np.ones(shape))
