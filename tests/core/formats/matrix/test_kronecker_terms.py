"""Sums of Kronecker products: action on (positions, features), algebra, norm, fewest terms, finer legs."""

from __future__ import annotations

from typing import Any

import numpy as np
import oracles
import pytest
from format_cases import some, terms

import tnlib


def matrices(right: list[Any]) -> list[np.ndarray]:
    return [b.left @ b.right if isinstance(b, tnlib.LowRank) else b for b in right]


@oracles.each_dtype
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
    """(p q)^2 would be 1.6 10^13 numbers here."""
    p = q = 2000
    k = tnlib.KroneckerTerms(np.ones((1, 1, p)), [tnlib.LowRank(np.ones((q, 1)), np.ones((1, q)))])
    assert k.norm() == pytest.approx(np.sqrt(p) * q)
    assert k.apply(np.ones((p, q)))[0, 0] == p * q


@oracles.each_dtype
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


@oracles.each_dtype
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
