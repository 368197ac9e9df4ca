"""The contract of every decomposition, as inequalities, over inputs that hypothesis chooses."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import oracles
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tnlib

CONTENTS = {
    "normal": lambda shape, dtype, seed: oracles.normal(shape, dtype, seed),
    "integers": lambda shape, dtype, seed: np.round(oracles.normal(shape, dtype, seed)),
    "ones": lambda shape, dtype, seed: np.ones(shape, dtype),
    "zero": lambda shape, dtype, seed: np.zeros(shape, dtype),
    "one entry": lambda shape, dtype, seed: np.eye(1, int(np.prod(shape)), dtype=dtype).reshape(shape) * dtype.type(-3),
    "rank 1": lambda shape, dtype, seed: oracles.random_train(shape, [1] * (len(shape) + 1), dtype, seed),
    "rank 2": lambda shape, dtype, seed: oracles.random_train(shape, [1, *[2] * (len(shape) - 1), 1], dtype, seed),
    "hilbert": lambda shape, dtype, seed: oracles.hilbert(shape).astype(dtype),
    "signs": lambda shape, dtype, seed: np.where(oracles.normal(shape, np.float64, seed) > 0, 1, -1).astype(dtype),
}

dtypes = st.sampled_from(oracles.DTYPES)
contents = st.sampled_from(sorted(CONTENTS))
seeds = st.integers(0, 1000)
tolerances = st.sampled_from([None, 0.0, 1e-13, 1e-12, 1e-9, 1e-6, 1e-4, 1e-3, 0.01, 0.1, 0.3, 0.7, 1.0])
caps = st.sampled_from([None, 1, 2, 3, 100])
layouts = st.sampled_from(sorted(oracles.LAYOUTS))


@st.composite
def arrays(draw: Any, least: int = 1, most: int = 5) -> np.ndarray:
    shape = draw(st.lists(st.integers(1, 5), min_size=least, max_size=most))
    x = CONTENTS[draw(contents)](tuple(shape), draw(dtypes), draw(seeds))
    return oracles.LAYOUTS[draw(layouts)](x)


def check(x: np.ndarray, name: str, rtol: float | None, cap: int | None) -> None:
    with oracles.unchanged(x):
        fit, warned = oracles.quietly(lambda: oracles.METHODS[name](x, rtol, cap))
    oracles.assert_fit(fit, x, rtol=rtol)
    oracles.assert_gauge(fit.value)
    oracles.assert_warned(fit, warned)
    assert fit.value.dtype == x.dtype.newbyteorder("=")
    if cap is not None:
        assert max(fit.value.ranks) <= cap
    else:
        assert fit.converged
    if rtol is None and cap is None:
        assert oracles.true_error(x, fit.value) <= 1000 * oracles.eps(x.dtype)


@pytest.mark.parametrize(("name", "least"), [("tt_svd", 1), ("tucker", 1), ("svd", 2)])
@given(data=st.data(), rtol=tolerances, cap=caps)
def test_tensors(name: str, least: int, data: st.DataObject, rtol: float | None, cap: int | None) -> None:
    check(data.draw(arrays(least)), name, rtol, cap)


@given(
    rows=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    columns=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    content=contents, dtype=dtypes, seed=seeds, layout=layouts, rtol=tolerances, cap=caps,
)  # fmt: skip
def test_ttm_svd(rows, columns, content, dtype, seed, layout, rtol, cap) -> None:
    x = CONTENTS[content]((int(np.prod(rows)), int(np.prod(columns))), dtype, seed)
    check(oracles.LAYOUTS[layout](x), "ttm_svd", rtol, cap)


@given(x=arrays(least=2, most=4), rank=st.integers(1, 4), n_iter=st.integers(1, 12))
def test_cp_reports_its_true_error_after_any_number_of_sweeps(x: np.ndarray, rank: int, n_iter: int) -> None:
    with oracles.unchanged(x):
        fit, warned = oracles.quietly(lambda: tnlib.cp(x, rank, n_iter=n_iter))
    oracles.assert_fit(fit, x)
    oracles.assert_gauge(fit.value)
    oracles.assert_warned(fit, warned)
    assert fit.value.ranks == (rank,)
    assert fit.n_iter <= n_iter
    assert fit.error <= 1 + oracles.slack(fit.value)


@given(x=arrays(least=2, most=4), n_iter=st.integers(1, 3), cap=st.sampled_from([1, 2, 3]))
def test_orthogonal_iteration_never_raises_the_error(x: np.ndarray, n_iter: int, cap: int) -> None:
    first, _ = oracles.quietly(lambda: tnlib.tucker(x, ranks=cap))
    fit, _ = oracles.quietly(lambda: tnlib.tucker(x, ranks=cap, n_iter=n_iter))
    oracles.assert_fit(fit, x)
    oracles.assert_gauge(fit.value)
    assert fit.value.ranks == first.value.ranks
    assert fit.error <= first.error + oracles.slack(fit.value)


@pytest.mark.parametrize("name", oracles.METHODS)
@oracles.each_dtype
@pytest.mark.parametrize("rtol", [None, 1e-3, 0.2])
def test_ranks_are_free_of_scale(name: str, dtype: np.dtype, rtol: float | None) -> None:
    shape = (8, 12) if name == "ttm_svd" else (4, 6, 2, 4)
    x = oracles.random_train(shape, [1, *[3] * (len(shape) - 1), 1], dtype)
    x = x + (0 if rtol is None else dtype.type(0.005)) * oracles.normal(shape, dtype, 9)
    fit = oracles.METHODS[name](x, rtol)
    single = np.finfo(dtype).bits == 32
    for c in (1e-30, 1e-12, 1e12, 1e30) if single else (1e-200, 1e-150, 1e-30, 1e30, 1e150, 1e200):
        scaled = oracles.METHODS[name](dtype.type(c) * x, rtol)
        oracles.assert_fit(scaled, dtype.type(c) * x, rtol=rtol)
        oracles.assert_gauge(scaled.value)
        assert scaled.value.ranks == fit.value.ranks
        assert scaled.error == pytest.approx(fit.error, rel=0.01, abs=32 * oracles.eps(dtype))
        assert scaled.value.norm() == pytest.approx(c * fit.value.norm(), rel=100 * oracles.eps(dtype))


@oracles.each_dtype
def test_cp_is_free_of_scale(dtype: np.dtype) -> None:
    x = oracles.random_cp((4, 5, 6), 2, dtype)
    for c in (1e-30, 1.0, 1e30) if np.finfo(dtype).bits == 32 else (1e-200, 1e-100, 1.0, 1e100, 1e200):
        scaled = tnlib.cp(dtype.type(c) * x, 2)
        oracles.assert_fit(scaled, dtype.type(c) * x)
        assert scaled.error < 100 * oracles.eps(dtype)
        np.testing.assert_allclose(scaled.value.weights / c, [2, 1], rtol=1000 * oracles.eps(dtype))
        assert scaled.value.norm() == pytest.approx(c * np.sqrt(5), rel=1000 * oracles.eps(dtype))


@pytest.mark.parametrize("name", [*oracles.METHODS, "cp"])
@oracles.each_dtype
def test_layout_and_repetition_do_not_change_a_bit(name: str, dtype: np.dtype) -> None:
    methods = oracles.METHODS | {"cp": lambda x, _: tnlib.cp(x, 3, n_iter=4)}
    x = oracles.normal((6, 10) if name == "ttm_svd" else (4, 5, 6), dtype)
    want, _ = oracles.quietly(lambda: methods[name](x, 0.3))
    for layout in oracles.LAYOUTS.values():
        got, _ = oracles.quietly(lambda layout=layout: methods[name](layout(x), 0.3))
        oracles.assert_same_bits(got.value, want.value)
        assert got.error == want.error


@pytest.mark.parametrize("name", [*oracles.METHODS, "cp"])
def test_a_result_does_not_follow_later_changes_of_its_input(name: str) -> None:
    methods = oracles.METHODS | {"cp": lambda x: tnlib.cp(x, 1, n_iter=2)}
    for shape in [(4, 3), (1, 2)] if name in ("svd", "ttm_svd", "cp") else [(4, 3), (5,), (1, 4), (3, 1)]:
        x = oracles.random_train(shape, [1] * (len(shape) + 1))
        fit = methods[name](x)
        before = fit.value.full().copy()
        x[...] = 7
        np.testing.assert_array_equal(fit.value.full(), before)


@pytest.mark.parametrize("name", [*oracles.METHODS, "cp"])
@pytest.mark.parametrize(
    ("given_dtype", "computed"),
    [("int8", "float64"), ("int64", "float64"), ("uint16", "float64"), ("bool", "float64"), ("float16", "float32")],
)
def test_other_dtypes_are_promoted(name: str, given_dtype: str, computed: str) -> None:
    methods = oracles.METHODS | {"cp": lambda x: tnlib.cp(x, 1)}
    x = np.multiply.outer([1, 0, 1], [1, 1, 0, 1]).astype(given_dtype)
    fit = methods[name](x)
    assert fit.value.dtype == computed
    oracles.assert_fit(fit, x)
    assert fit.error < 100 * oracles.eps(computed)


def test_nested_lists_are_arrays() -> None:
    assert tnlib.svd([[1, 2], [2, 4]]).value.ranks == (1,)


@pytest.mark.parametrize("name", oracles.METHODS)
@oracles.each_dtype
def test_zero(name: str, dtype: np.dtype) -> None:
    for shape in [(4, 6), (6, 4), (1, 1)] if name == "ttm_svd" else [(4, 6), (2, 3, 4), (1, 1, 1)]:
        for rtol, cap in itertools.product([None, 0.0, 0.1], [None, 2]):
            fit = oracles.METHODS[name](np.zeros(shape, dtype), rtol, cap)
            assert set(fit.value.ranks) == {1}
            assert fit.error == 0
            assert not fit.value.full().any()
            oracles.assert_gauge(fit.value)


@pytest.mark.parametrize("name", oracles.METHODS)
def test_the_smaller_rank_wins(name: str) -> None:
    x = oracles.hilbert((8, 8))
    loose, tight = oracles.METHODS[name](x, 0.2), oracles.METHODS[name](x, 1e-6)
    capped, warned = oracles.quietly(lambda: oracles.METHODS[name](x, 1e-6, 2))
    assert max(loose.value.ranks) < max(tight.value.ranks)
    assert oracles.METHODS[name](x, 0.2, 100).value.ranks == loose.value.ranks
    assert max(capped.value.ranks) == 2
    assert warned == [tnlib.ConvergenceWarning]
    assert not capped.converged


@pytest.mark.parametrize("name", oracles.METHODS)
@pytest.mark.parametrize("spectrum", oracles.SPECTRA)
def test_tolerances_down_to_roundoff_are_honoured(name: str, spectrum: str) -> None:
    matrix = oracles.with_spectrum(oracles.SPECTRA[spectrum](24), 24, 36, seed=4)
    x = matrix if name == "ttm_svd" else matrix.reshape(4, 6, 6, 6)
    for rtol in (1e-13, 1e-12, 1e-10, 1e-7, 1e-4, 0.03):
        fit = oracles.METHODS[name](x, rtol)
        assert oracles.true_error(x, fit.value) <= rtol + 20 * oracles.eps(x.dtype)
        oracles.assert_fit(fit, x, rtol=rtol)


# --------------------------------------------------------------------------------------------------- wrong input

CALLS = {
    "svd": (lambda x, **k: tnlib.svd(x, **k), "a"),
    "tt_svd": (lambda x, **k: tnlib.tt_svd(x, **k), "x"),
    "ttm_svd": (lambda x, **k: tnlib.ttm_svd(x, (2, 2), (2, 2), **k), "a"),
    "tucker": (lambda x, **k: tnlib.tucker(x, **k), "x"),
    "cp": (lambda x, **k: tnlib.cp(x, 2, **k), "x"),
}
GOOD = np.arange(16.0).reshape(4, 4)


def poisoned(value: Any, dtype: Any = np.float64) -> np.ndarray:
    x = np.ones((4, 4), dtype)
    x[2, 1] = value
    return x


BAD_ARRAYS = {
    "nan": (poisoned(np.nan), ValueError, ["finite", "nan", "(2, 1)"]),
    "inf": (poisoned(-np.inf, np.float32), ValueError, ["finite", "-inf", "(2, 1)"]),
    "complex nan": (poisoned(1j * np.nan, np.complex64), ValueError, ["finite", "nan", "(2, 1)"]),
    "half nan": (poisoned(np.nan, np.float16), ValueError, ["finite", "nan"]),
    "empty": (np.ones((4, 0)), ValueError, ["size 0", "(4, 0)"]),
    "string": ("abcd", TypeError, ["<U4"]),
    "strings": (np.full((4, 4), "a"), TypeError, ["<U1"]),
    "none": (None, TypeError, ["object"]),
    "objects": (np.full((4, 4), 1, object), TypeError, ["object"]),
    "jagged": ([[1, 2], [3]], TypeError, ["list"]),
    "dates": (np.zeros((4, 4), "datetime64[s]"), TypeError, ["datetime64"]),
    "long double": (np.ones((4, 4), np.longdouble), TypeError, [str(np.dtype(np.longdouble))]),
}


@pytest.mark.parametrize("name", CALLS)
def test_impossible_arrays_and_tolerances_are_refused(name: str) -> None:
    call, parameter = CALLS[name]
    for bad, (x, kind, words) in BAD_ARRAYS.items():
        if bad == "long double" and np.dtype(np.longdouble) == np.float64:
            continue
        with oracles.refused(kind, f"{name}: {parameter} must", "got", *words):
            call(x)
    for rtol in (-1e-3, 1.5, np.nan, np.inf, "1e-3", True, False, 1e-3j, [1e-3], np.array([0.1])):
        with oracles.refused(ValueError if type(rtol) is float else TypeError, f"{name}: rtol must", "got"):
            call(GOOD, rtol=rtol)


COUNTS = [
    ("svd", "max_rank", lambda n: tnlib.svd(GOOD, max_rank=n)),
    ("tt_svd", "max_rank", lambda n: tnlib.tt_svd(GOOD, max_rank=n)),
    ("ttm_svd", "max_rank", lambda n: tnlib.ttm_svd(GOOD, (2, 2), (2, 2), max_rank=n)),
    ("tucker", "n_iter", lambda n: tnlib.tucker(GOOD, n_iter=-1 if n == 0 else n)),
    ("cp", "rank", lambda n: tnlib.cp(GOOD, n)),
    ("cp", "n_iter", lambda n: tnlib.cp(GOOD, 1, n_iter=n)),
    ("cp", "n_starts", lambda n: tnlib.cp(GOOD, 1, n_starts=n)),
]


@pytest.mark.parametrize(("name", "parameter", "call"), COUNTS, ids=[f"{n}-{p}" for n, p, _ in COUNTS])
def test_impossible_counts_are_refused(name: str, parameter: str, call: Any) -> None:
    for bad in (0, -3, 2.0, "2", True, np.True_, 2j, np.array(2.5)):
        with oracles.refused(ValueError if type(bad) is int else TypeError, f"{name}: {parameter} must", "got"):
            call(bad)


def test_numpy_integers_are_counts() -> None:
    assert tnlib.svd(GOOD, max_rank=np.int32(1)).value.ranks == (1,)
    assert tnlib.tucker(GOOD, ranks=np.array([1, 2])).value.ranks == (1, 1)
