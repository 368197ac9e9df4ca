"""Scaling by powers of two: exact, range of norms and squares, validated arrays."""

from __future__ import annotations

import decimal
import math
from typing import Any

import numpy as np
import oracles
import pytest

from tnlib.linalg.scaling import (
    Scaled,
    column_exponents,
    distance,
    exponent_of,
    fold,
    in_range,
    largest,
    norm,
    normalize,
    prepare,
    rescale,
    shift,
    split_exponential,
    squares,
)


def sizes_of(dtype: np.dtype) -> tuple[float, ...]:
    single = np.finfo(dtype).bits == 32
    return (1e-37, 1e-20, 1.0, 1e20, 1e37) if single else (1e-300, 1e-150, 1.0, 1e150, 1e300)


@pytest.mark.parametrize("dtype", oracles.DTYPES, ids=str)
def test_scales_are_exact_powers_of_two(dtype: np.dtype) -> None:
    single = np.finfo(dtype).bits == 32
    for size in sizes_of(dtype):
        a = dtype.type(size) * oracles.normal((4, 5), dtype)
        e = exponent_of(a)
        scaled = shift(a, -e)
        assert scaled.dtype == dtype
        np.testing.assert_array_equal(shift(scaled, e), a)
        assert 2.0 ** (-40 if single else -400) <= largest(scaled) <= 2.0 ** (40 if single else 400)
        assert np.isfinite(np.square(scaled)).all()
    assert exponent_of(np.zeros(3, dtype)) == 0


@pytest.mark.parametrize("dtype", oracles.DTYPES, ids=str)
def test_rescale_normalize_and_fold_keep_the_value(dtype: np.dtype) -> None:
    for size in sizes_of(dtype):
        a = dtype.type(size) * oracles.normal((4, 5), dtype)
        for scaled in (rescale(a, 3), normalize(a, 3)):
            np.testing.assert_array_equal(shift(scaled.array, scaled.exponent - 3), a)
        assert 0.5 <= largest(normalize(a).array) < 1
        folded = fold(normalize(a).array, normalize(a).exponent)
        if folded.exponent == 0:
            np.testing.assert_array_equal(folded.array, a)
        else:
            assert abs(math.log2(size)) > (39 if np.finfo(dtype).bits == 32 else 399)
    assert rescale(np.zeros(3, dtype)).exponent == normalize(np.zeros(3, dtype)).exponent == 0
    ordinary = oracles.normal((3, 4), dtype)
    assert rescale(ordinary).array is ordinary


def test_scales_depend_on_both_parts_and_on_moduli() -> None:
    assert largest(np.array([1 - 5j, -3])) == 5
    assert largest(np.array([-7.0, 2.0])) == 7
    assert largest(np.ones(0)) == 0
    assert exponent_of(np.array([1e-200 + 1e200j])) > 600


def test_shifts_by_column() -> None:
    a = np.array([[3.0, 1e200, 0.0], [-1.0, 1e100, 0.0]])
    for b in (a, a * (1 + 1j)):
        e = column_exponents(b)
        scaled = shift(b, -e)
        assert all(0.5 <= largest(scaled[:, k]) < 1 for k in (0, 1))
        assert e[2] == 0
        np.testing.assert_array_equal(shift(scaled, e), b)


@pytest.mark.parametrize("c", [5e-324, 1e-200, 1.0, 1e200, 1e307])
def test_norms_neither_overflow_nor_underflow(c: float) -> None:
    assert norm(np.array([3.0, -4.0]) * c) == pytest.approx(5 * c)
    assert norm(np.array([3.0j, -4.0]) * c) == pytest.approx(5 * c)


def test_norms_of_many_entries_are_summed_in_double() -> None:
    assert norm(np.full((3, 100_000), 0.1, np.float32)) == pytest.approx(
        float(np.float32(0.1)) * math.sqrt(3e5), rel=1e-12
    )
    assert norm(np.zeros((2, 3))) == 0


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("n", [3, 300_000])
def test_norms_of_nan_and_inf(bad: float, n: int) -> None:
    a = np.ones(n)
    a[n // 2] = bad
    assert not math.isfinite(norm(a))
    assert not math.isfinite(squares(a))


def test_overflowing_squares_are_infinite_without_a_warning() -> None:
    for n in (3, 300_000):
        assert squares(np.full(n, 1e200)) == math.inf
        assert squares(np.full(n, 1e200j)) == math.inf
    assert squares(np.full(300_000, 1e153)) == math.inf  # each block is finite


@pytest.mark.parametrize("dtype", oracles.DTYPES, ids=str)
@pytest.mark.parametrize("layout", oracles.LAYOUTS)
def test_squares_do_not_depend_on_the_layout(dtype: np.dtype, layout: str) -> None:
    a = oracles.normal((5, 6, 7), dtype)
    want = float(np.sum(np.abs(oracles.wide(a)) ** 2))
    assert squares(oracles.LAYOUTS[layout](a)) == pytest.approx(want, rel=1e-13)
    if layout != "big-endian":  # which `prepare` converts first
        assert squares(oracles.LAYOUTS[layout](a)) == squares(a)


@pytest.mark.parametrize("shape", [(1, 1), (1, 200_000), (200_000, 1), (700, 300), (3, 5, 7), (4,)], ids=str)
def test_distances(shape: tuple[int, ...]) -> None:
    a, b = oracles.normal(shape, np.complex128), oracles.normal(shape, np.complex128, seed=1)
    assert distance(a, b) == pytest.approx(float(np.linalg.norm((a - b).ravel())), rel=1e-12)
    assert distance(a, a) == 0


def test_scaled_numbers() -> None:
    assert Scaled(np.array([3.0]), 4).item() == 48.0
    assert Scaled(np.array([[1 - 2j]]), -1).item() == 0.5 - 1j
    with pytest.raises(OverflowError):
        Scaled(np.ones(1), 5000).item()
    with pytest.raises(OverflowError):
        Scaled(np.ones(4), 5000).norm()
    assert Scaled(np.ones(1), -5000).item() == 0.0
    assert Scaled(np.ones(4), 5000).log2_norm() == 5001
    assert Scaled(np.zeros(4), 5000).log2_norm() == -math.inf


def test_an_update_is_rescaled_where_it_drifts() -> None:
    scaled = Scaled(np.ones(2), 7)
    near, far = scaled.update(np.full(2, 2.0**20)), scaled.update(np.full(2, 2.0**50))
    assert near.exponent == 7
    assert far.exponent > 50
    np.testing.assert_array_equal(shift(far.array, far.exponent - 7), np.full(2, 2.0**50))
    assert scaled.update(np.zeros(2)).exponent == 7


@pytest.mark.parametrize("dtype", oracles.DTYPES, ids=str)
def test_prepared_arrays_are_in_range(dtype: np.dtype) -> None:
    for size in sizes_of(dtype):
        x = dtype.type(size) * oracles.normal((3, 4, 2), dtype)
        a, e, length = prepare("f", "x", x)
        np.testing.assert_array_equal(shift(a, e), x)
        assert length == pytest.approx(oracles.norm(a), rel=1e-12)
        assert in_range(a, length) or e != 0
        assert np.isfinite(np.square(a)).all()
    assert prepare("f", "x", np.zeros((2, 2), dtype))[1:] == (0, 0.0)


@pytest.mark.parametrize("x", [[[1, 2], [3, 4]], np.ones((2, 2), np.float16), np.ones((2, 2), bool)], ids=str)
def test_prepared_arrays_are_of_a_native_dtype(x: Any) -> None:
    assert prepare("f", "x", x).array.dtype in (np.float32, np.float64)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_prepared_arrays_are_finite(bad: float) -> None:
    with oracles.refused(ValueError, "f: x must be finite", "index (1, 0)"):
        prepare("f", "x", np.array([[1.0, 2.0], [bad, 0.0]]))
    assert prepare("f", "x", np.full((2, 2), 1e300)).exponent > 900


@pytest.mark.parametrize("x", [0.0, 0.3, -0.4, 1.0, -745.0, 1e3, -12345.678, 1e9, -1e11])
def test_exponentials_are_split_to_roundoff(x: float) -> None:
    e, f = split_exponential(x)
    assert 0.7 < f < 1.5
    with decimal.localcontext(prec=60):
        want = (decimal.Decimal(x) - e * decimal.Decimal(2).ln()).exp()
    assert f == pytest.approx(float(want), rel=1e-15)
