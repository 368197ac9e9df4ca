"""Scaling by powers of two: exact, norms and squares within their range, validated arrays."""

from __future__ import annotations

import decimal
import math

import numpy as np
import oracles
import pytest

from tnlib.linalg.scaling import (
    Scaled,
    distance,
    exponent_of,
    norm,
    normalize,
    prepare,
    rescale,
    shift,
    split_exponential,
    squares,
)


@oracles.each_dtype
def test_scales_are_exact_powers_of_two(dtype: np.dtype) -> None:
    single = np.finfo(dtype).bits == 32
    for size in (1e-37, 1e-20, 1.0, 1e20, 1e37) if single else (1e-300, 1e-150, 1.0, 1e150, 1e300):
        a = dtype.type(size) * oracles.normal((4, 5), dtype)
        scaled = shift(a, -exponent_of(a))
        assert scaled.dtype == dtype
        np.testing.assert_array_equal(shift(scaled, exponent_of(a)), a)
        for one in (rescale(a, 3), normalize(a, 3)):
            np.testing.assert_array_equal(shift(one.array, one.exponent - 3), a)
        prepared, e, length = prepare("f", "x", a)
        np.testing.assert_array_equal(shift(prepared, e), a)
        assert length == pytest.approx(oracles.norm(prepared), rel=1e-12)
        for in_range in (scaled, prepared):
            assert np.isfinite(np.square(in_range)).all()
    assert exponent_of(np.zeros(3, dtype)) == rescale(np.zeros(3, dtype)).exponent == 0
    assert prepare("f", "x", np.zeros((2, 2), dtype))[1:] == (0, 0.0)


@pytest.mark.parametrize("c", [5e-324, 1e-200, 2.1e-161, 1.0, 1e200, 1e307])
def test_norms_neither_overflow_nor_underflow(c: float) -> None:
    assert norm(np.array([3.0, -4.0]) * c) == pytest.approx(5 * c, rel=1e-6, abs=0)
    assert norm(np.array([3.0j, -4.0]) * c) == pytest.approx(5 * c, rel=1e-6, abs=0)


def test_long_sums_of_sorted_entries_do_not_round_in_one_direction() -> None:
    x = 1.0 / (1 + np.indices((24,) * 4).sum(axis=0))
    exact = float(np.square(x.astype(np.longdouble)).sum())
    assert abs(squares(x) - exact) <= 8 * oracles.eps(np.float64) * exact


def test_sums_of_squares() -> None:
    a = np.full((3, 100_000), 0.1, np.float32)
    assert norm(a) == pytest.approx(float(np.float32(0.1)) * math.sqrt(3e5), rel=1e-12)  # in double precision
    for n in (3, 300_000):
        for bad in (np.nan, np.inf, -np.inf):
            a = np.ones(n)
            a[n // 2] = bad
            assert not math.isfinite(norm(a))
            assert not math.isfinite(squares(a))
        assert squares(np.full(n, 1e200)) == squares(np.full(n, 1e200j)) == math.inf
    assert squares(np.full(300_000, 1e153)) == math.inf  # each block is finite
    for shape in ((1, 1), (1, 200_000), (200_000, 1), (700, 300), (3, 5, 7)):
        a, b = oracles.normal(shape, np.complex128), oracles.normal(shape, np.complex128, seed=1)
        assert distance(a, b) == pytest.approx(float(np.linalg.norm((a - b).ravel())), rel=1e-12)
        assert distance(a, a) == 0


def test_scaled_numbers() -> None:
    assert Scaled(np.array([[1 - 2j]]), -1).item() == 0.5 - 1j
    for call in (Scaled(np.ones(1), 5000).item, Scaled(np.ones(4), 5000).norm):
        with pytest.raises(OverflowError):
            call()
    assert Scaled(np.ones(1), -5000).item() == 0.0
    assert Scaled(np.ones(4), 5000).log2_norm() == 5001
    assert Scaled(np.zeros(4), 5000).log2_norm() == -math.inf


@pytest.mark.parametrize("x", [0.0, 0.3, -0.4, 1.0, -745.0, 1e3, -12345.678, 1e9, -1e11])
def test_exponentials_are_split_to_roundoff(x: float) -> None:
    e, f = split_exponential(x)
    with decimal.localcontext(prec=60):
        want = (decimal.Decimal(x) - e * decimal.Decimal(2).ln()).exp()
    assert f == pytest.approx(float(want), rel=1e-15)
