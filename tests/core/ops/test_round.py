"""Rounding of Tucker, LowRank and SVD, reports, and arguments that are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import oracles
import pytest
from rounding_cases import TOLERANCES, check, exact_train, geometric

import tnlib


@oracles.each_dtype
@pytest.mark.parametrize(
    ("shape", "ranks"),
    [((5, 6, 7), (3, 4, 2)), ((4, 3), (6, 5)), ((5,), (3,)), ((1, 4, 1), (2, 6, 1)), ((3, 3, 3, 3), (2, 5, 1, 4))],
    ids=str,
)
def test_tucker_keeps_the_contract(dtype: np.dtype, shape: tuple[int, ...], ranks: tuple[int, ...]) -> None:
    """Factors of any shape, wide ones and dependent columns included."""
    core = oracles.normal(ranks, dtype)
    factors = [oracles.normal((n, r), dtype, seed=k) for k, (n, r) in enumerate(zip(shape, ranks, strict=True))]
    factors[0][:, -1] = factors[0][:, 0]
    for rtol in TOLERANCES:
        for cap in (None, 1, 2):
            fit = check(tnlib.Tucker(core, factors), rtol, cap)
            assert all(r <= min(n, m) for r, n, m in zip(fit.value.ranks, shape, ranks, strict=True))


@pytest.mark.parametrize("rtol", [None, 1e-10, 1e-5, 1e-2, 0.3])
def test_tucker_ranks_are_those_of_a_decomposition_from_scratch(rtol: float | None) -> None:
    x = geometric((9, 10, 11), 0.1)
    want = tnlib.tucker(x, rtol=rtol)
    identity = tnlib.Tucker(x, [np.eye(n) for n in x.shape])
    fit = check(identity, rtol)
    assert fit.value.ranks == want.value.ranks
    assert fit.error == pytest.approx(want.error, rel=0.05, abs=1e-13)
    again = check(want.value, rtol if rtol is None else rtol / 100)
    assert again.value.ranks == want.value.ranks
    assert again.error <= 1e-13


@oracles.each_dtype
@pytest.mark.parametrize(("m", "r", "n"), [(6, 3, 5), (3, 8, 4), (1, 2, 7), (9, 1, 9), (5, 5, 5), (1, 1, 1)])
def test_low_rank_keeps_the_contract(dtype: np.dtype, m: int, r: int, n: int) -> None:
    left, right = oracles.normal((m, r), dtype), oracles.normal((r, n), dtype, seed=1)
    right[-1] = right[0]
    for t in (tnlib.LowRank(left, right), tnlib.LowRank(0 * left, right)):
        for rtol in TOLERANCES:
            for cap in (None, 1, 2):
                fit = check(t, rtol, cap)
                s = np.linalg.svd(oracles.wide(left) @ oracles.wide(right), compute_uv=False)
                assert fit.value.ranks[0] <= max(1, np.count_nonzero(s > 1e-6 * s[0]))


@oracles.each_dtype
@pytest.mark.parametrize("rtol", [1e-5, 1e-3, 0.03, 0.4])
def test_two_factors_have_the_best_error(dtype: np.dtype, rtol: float) -> None:
    s = 0.3 ** np.arange(12)
    a = oracles.with_spectrum(s, 30, 20, dtype)
    tails = np.sqrt(np.cumsum(s[::-1] ** 2)[::-1]) / np.linalg.norm(s)
    rank = max(1, int(np.count_nonzero(tails > rtol)))
    u, values, vh = tnlib.svd(a).value
    m = oracles.isometry(len(values), len(values), dtype).astype(dtype)
    for t in (tnlib.LowRank(u * values @ m, m.conj().T @ vh), tnlib.SVD(u, values, vh)):
        fit = check(t, rtol)
        assert fit.value.ranks == (rank,)
        assert fit.error == pytest.approx(tails[rank], rel=0.01, abs=4 * oracles.eps(dtype))


@oracles.each_dtype
def test_an_svd_keeps_its_legs(dtype: np.dtype) -> None:
    x = oracles.normal((2, 3, 4, 5), dtype)
    for left in ((0,), (3, 1), (2, 0, 1)):
        t = tnlib.svd(x, left=left).value
        for rtol in (None, 0.2, 0.8):
            fit = check(t, rtol)
            assert fit.value.left == left
            want = tnlib.svd(x, left=left, rtol=rtol).value
            assert fit.value.ranks == want.ranks
            oracles.assert_close(fit.value.u, want.u, dtype)


def test_mixed_dtypes_become_one() -> None:
    a, b, c = oracles.random_cores((3, 4, 5), (1, 3, 3, 1))
    for t in (
        tnlib.TensorTrain([a.astype(np.float32), b, c]),
        tnlib.TensorTrain([a, b.astype(np.complex64), c.astype(np.float32)]),
        tnlib.TTMatrix([a.astype(np.float32)[:, :, None], b.astype(np.complex64)[:, :, None], c[:, :, None]]),
        tnlib.LowRank(a[0].astype(np.float32), b[:, 0].astype(np.complex128)),
        tnlib.LowRank(a[0].astype(np.complex64), b[:, 0]),
        tnlib.Tucker(a[0].astype(np.float32), [oracles.normal((4, 3)), oracles.normal((5, 3), np.complex64)]),
        tnlib.Tucker(a[0].astype(np.complex64), [oracles.normal((4, 3)), oracles.normal((5, 3), np.float32)]),
    ):
        for rtol in (None, 0.3):
            fit = check(t, rtol)
            kinds = {array.dtype for array in fit.value.arrays()}
            assert kinds == {t.dtype}


def test_a_cap_through_equal_values_is_reported() -> None:
    t = exact_train(oracles.ghz(4, 3))
    with pytest.warns(tnlib.DegenerateCutWarning, match="round: max_rank separates equal .* at bond 1"):
        fit = tnlib.round(t, max_rank=2)
    assert fit.error == pytest.approx(np.sqrt(1 / 3))
    assert tnlib.round(t).notes == ()
    with pytest.warns(tnlib.DegenerateCutWarning, match="round: max_rank separates equal"):
        tnlib.round(tnlib.LowRank(np.eye(4), np.eye(4)), max_rank=2)


def test_groups_are_an_option_of_trains() -> None:
    pair = oracles.with_spectrum([1, 1e-2, 0.99e-2], 4, 4)
    train = tnlib.tt_svd(pair).value
    rtol = 1.1e-2  # which the last value alone does not exceed
    assert tnlib.round(train, rtol=rtol).value.ranks == (1, 2, 1)
    assert tnlib.round(train, rtol=rtol, degeneracy_tol=0.02).value.ranks == (1, 3, 1)
    assert tnlib.round(train, max_rank=2, degeneracy_tol=0.02).value.ranks == (1, 1, 1)
    identity = tnlib.eye(train.shape)
    assert tnlib.apply(identity, train, rtol=rtol, degeneracy_tol=0.02).value.ranks == (1, 3, 1)
    assert tnlib.apply(identity, train, max_rank=2, degeneracy_tol=0.02).value.ranks == (1, 1, 1)
    with oracles.refused(ValueError, "round: degeneracy_tol", "1.5"):
        tnlib.round(train, rtol=rtol, degeneracy_tol=1.5)
    with oracles.refused(TypeError, "round: t", "degeneracy_tol", "SVD"):
        tnlib.round(tnlib.svd(pair).value, rtol=rtol, degeneracy_tol=0.02)


LOW_RANK = tnlib.LowRank(np.eye(2), np.eye(2))
CALLS = [
    (lambda: tnlib.round(np.ones((2, 2))), TypeError, ["t must be a TensorTrain", "tt_svd"]),
    (lambda: tnlib.round(tnlib.CP(np.ones(1), [np.ones((2, 1))])), TypeError, ["t must", "KroneckerTerms", "got a CP"]),
    (lambda: tnlib.round(LOW_RANK, rtol=1.5), ValueError, ["rtol must"]),
    (lambda: tnlib.round(LOW_RANK, rtol="a"), TypeError, ["rtol must"]),
    (lambda: tnlib.round(LOW_RANK, max_rank=0), ValueError, ["max_rank must"]),
    (lambda: tnlib.round(LOW_RANK, max_rank=True), TypeError, ["max_rank must"]),
]


@pytest.mark.parametrize(("call", "kind", "words"), CALLS)
def test_impossible_arguments_are_refused(call: Any, kind: type[Exception], words: list[str]) -> None:
    with oracles.refused(kind, "round: ", "got", *words):
        call()
