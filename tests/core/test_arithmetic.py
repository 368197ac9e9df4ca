"""`+ - * / @` of formats are those of numpy on the dense arrays, at any scale, without rounding anything off."""

from __future__ import annotations

import dataclasses
import math
import operator
from typing import Any

import numpy as np
import oracles
import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_trains import assert_same_tensor, shapes, trains

import tnlib

NUMBERS = [2, -3, 0.5, 2 - 1j, 0, True, np.float32(1.5), np.float64(-2), np.complex64(1j), np.int64(3), np.array(4.0)]
LINEAR = [
    v
    for v in oracles.ALL_FORMATS
    if isinstance(v, tnlib.TensorTrain | tnlib.TTMatrix | tnlib.Tucker | tnlib.CP | tnlib.LowRank)
]
linear = pytest.mark.parametrize("value", LINEAR, ids=oracles.format_id)


@st.composite
def pairs(draw: Any) -> tuple[tnlib.TensorTrain, tnlib.TensorTrain]:
    shape = draw(shapes)
    return draw(trains(shape)), draw(trains(shape))


def assert_is(got: Any, want: np.ndarray, *parts: np.ndarray, dtype: Any) -> None:
    """Equal up to roundoff of the largest of the parts that were combined."""
    size = max(oracles.norm(p) for p in (want, *parts))
    assert got.shape == want.shape
    assert oracles.norm(oracles.wide(got.full()) - want) <= 256 * oracles.eps(dtype) * size


def size_of_cores(t: tnlib.TensorTrain) -> np.ndarray:
    """Return the product of the norms of all cores: terms of the contraction may cancel."""
    return np.array(math.prod(oracles.norm(core) for core in t.cores) * 2.0**t.exponent)


def assert_centre(value: Any) -> None:
    """Where a centre is named, all other cores are isometric towards it."""
    if value.center is not None:
        assert max(tnlib.isometry_errors(value)) <= 100 * oracles.eps(value.dtype) * max(value.ranks)


# ------------------------------------------------------------------------------------------------ against the dense


@given(pairs())
def test_sums_and_products_of_trains(pair: tuple[tnlib.TensorTrain, tnlib.TensorTrain]) -> None:
    a, b = pair
    x, y = (oracles.wide(oracles.contract(t)) for t in pair)
    dtype = min(a.dtype, b.dtype, key=lambda t: np.finfo(t).precision)
    with oracles.unchanged(*a.cores, *b.cores):
        for combine in (operator.add, operator.sub, operator.mul):
            got = combine(a, b)
            assert got.dtype == np.result_type(a.dtype, b.dtype)
            parts = (x, y) if combine is not operator.mul else [size_of_cores(a) * size_of_cores(b)]
            assert_is(got, combine(x, y), *parts, dtype=dtype)
            assert_centre(got)
            ends = zip(a.ranks[1:-1], b.ranks[1:-1], strict=True)
            assert got.ranks[1:-1] == tuple(combine(r, s) if combine is operator.mul else r + s for r, s in ends)


@given(trains(), st.sampled_from(NUMBERS))
def test_numbers_times_trains(t: tnlib.TensorTrain, c: Any) -> None:
    x = oracles.wide(oracles.contract(t))
    for got in (c * t, t * c):
        assert_is(got, x * c, dtype=t.dtype)
        assert_centre(got)
        precise = np.finfo(got.dtype).precision > np.finfo(t.dtype).precision
        assert got.center == (None if precise else t.center)
        assert {core.dtype for core in got.cores} == {got.dtype}
        assert got.dtype == (np.ones(1, t.dtype) * (int(c) if isinstance(c, bool) else c)).dtype
    if c != 0:
        assert_is(t / c, x / c, dtype=t.dtype)
    size = oracles.norm(np.full(x.shape, c))
    for got, want in ((t + c, x + c), (c - t, c - x), (t - c, x - c)):
        assert oracles.norm(got.full() - want) <= 256 * oracles.eps(t.dtype) * (oracles.norm(x) + size)
        assert got.dtype == np.result_type(t.dtype, got.dtype)


@linear
def test_every_linear_format(value: Any) -> None:
    x, eps = oracles.contract(value), oracles.eps(value.dtype)
    other = -2 * value
    assert type(other) is type(value)
    oracles.assert_close(other.full(), -2 * x, value.dtype)
    oracles.assert_close((-value).full(), -x, value.dtype)
    oracles.assert_close((+value).full(), x, value.dtype)
    oracles.assert_close((value + other).full(), -x, value.dtype, 400)
    oracles.assert_close((value - other).full(), 3 * x, value.dtype)
    oracles.assert_close((value / 4).full(), x / 4, value.dtype)
    oracles.assert_close(value.conj().full(), x.conj(), value.dtype)
    oracles.assert_close((np.float32(0.5) * value).full(), x / 2, value.dtype)
    oracles.assert_close(sum([value, value, value]).full(), 3 * x, value.dtype)
    assert (value * 2).dtype == value.dtype
    assert (value * 2j).dtype == np.result_type(value.dtype, np.complex64)
    assert (value - value).norm() <= 64 * eps * value.norm()
    if not isinstance(value, tnlib.TTMatrix | tnlib.LowRank):
        oracles.assert_close((1 + value).full(), 1 + x, value.dtype)


@oracles.each_dtype
def test_products_of_operators(dtype: np.dtype) -> None:
    a = tnlib.TTMatrix([oracles.normal(s, dtype, 1) for s in ((1, 2, 3, 2), (2, 4, 2, 3), (3, 1, 2, 1))], log_scale=1.0)
    b = tnlib.TTMatrix(
        [oracles.normal(s, dtype, 2) for s in ((1, 3, 2, 3), (3, 2, 1, 2), (2, 2, 5, 1))], log_scale=-3.0
    )
    x = tnlib.TensorTrain(oracles.random_cores((3, 2, 2), (1, 2, 2, 1), dtype))
    y = tnlib.TensorTrain(oracles.random_cores((2, 4, 1), (1, 2, 2, 1), dtype))
    oracles.assert_close((a @ b).full(), a.full() @ b.full(), dtype, 200)
    assert (a @ b).ranks == (1, 6, 6, 1)
    product = a @ x
    assert isinstance(product, tnlib.TensorTrain)
    assert product.shape == a.row_shape
    oracles.assert_close(product.full().reshape(-1), a.full() @ x.full().reshape(-1), dtype, 200)
    row = y @ a
    assert row.shape == a.col_shape
    oracles.assert_close(row.full().reshape(-1), y.full().reshape(-1) @ a.full(), dtype, 200)
    oracles.assert_close((a * a).full(), a.full() * a.full(), dtype, 200)
    for got, want in ((a.T, a.full().T), (a.H, a.full().conj().T), (a.conj(), a.full().conj())):
        oracles.assert_close(got.full(), want, dtype)


# --------------------------------------------------------------------------------------------------------- any scale


@pytest.mark.parametrize("power", [-200, -150, 150, 200])
def test_numbers_of_any_size_leave_the_cores_in_range(power: int) -> None:
    t = tnlib.canonicalize(tnlib.TensorTrain(oracles.random_cores((2, 3, 4), (1, 2, 3, 1))), 1)
    scaled = t
    for _ in range(5):
        scaled = 10.0**power * scaled
    assert scaled.center == 1
    assert_centre(scaled)
    assert scaled.log_norm() == pytest.approx(t.log_norm() + 5 * power * math.log(10), rel=1e-13)
    back = scaled
    for _ in range(5):
        back = back / 10.0**power
    oracles.assert_close(back.full(), t.full(), factor=1e4)


@oracles.each_dtype
@pytest.mark.parametrize(("size", "log_scale"), [(1e3, -1.0), (1e-3, 1.0), (1.0, 0.0)])
def test_long_trains_meet_in_one_scale(dtype: np.dtype, size: float, log_scale: float) -> None:
    """Four hundred cores of size 1e3 with a log_scale that takes it back, plus a train of plain cores."""
    d = 400
    plus = np.full((1, 2, 1), 2**-0.5, dtype)
    a = tnlib.TensorTrain([plus] * d)
    b = tnlib.TensorTrain([dtype.type(size) * plus] * d, log_scale=log_scale * d * math.log(10) * 3)
    for total in (a + b, b + a):
        assert all(np.isfinite(core).all() for core in total.cores)
        assert total.norm() == pytest.approx(2, rel=3e3 * oracles.eps(dtype))
    assert (a - b).norm() <= 3e3 * oracles.eps(dtype)


def test_what_is_too_small_to_matter_vanishes_quietly() -> None:
    big = tnlib.TensorTrain([np.ones((1, 2, 1))] * 3, log_scale=5000.0)
    small = tnlib.TensorTrain([np.full((1, 2, 1), 3.0)] * 3, log_scale=-5000.0)
    for total in (big + small, small + big, big - small):
        assert total.log_norm() == pytest.approx(big.log_norm(), rel=1e-14)
    zero = tnlib.TensorTrain([np.zeros((1, 2, 1))] * 3, log_scale=5000.0)
    for total in (zero + small, small + zero):
        assert total.log_norm() == pytest.approx(small.log_norm(), rel=1e-14)


def test_a_sum_of_a_thousand_terms_rounds_to_what_it_is() -> None:
    """Delta trains, one for every count of a one: their sum has rank 2, whatever was added."""
    d = 40
    zero, one = np.array([1.0, 0.0]).reshape(1, 2, 1), np.array([0.0, 1.0]).reshape(1, 2, 1)
    w = sum(tnlib.TensorTrain([one if k == at else zero for k in range(d)]) for at in range(d))
    assert isinstance(w, tnlib.TensorTrain)
    assert w.norm() == pytest.approx(math.sqrt(d), rel=1e-13)
    fit = tnlib.round(w)
    assert fit.value.ranks == (1, *[2] * (d - 1), 1)
    assert tnlib.distance(w, fit.value) <= 1e-13 * math.sqrt(d)


# ------------------------------------------------------------------------------------------------------ other operands


class Stranger:
    """Knows tnlib, which does not know it."""

    def __radd__(self, other: Any) -> str:
        return "radd"

    __rsub__ = __rmul__ = __rmatmul__ = __rtruediv__ = __radd__


@linear
def test_unknown_operands_get_their_turn(value: Any) -> None:
    for combine in (operator.add, operator.sub, operator.mul, operator.truediv):
        assert combine(value, Stranger()) == "radd"
        with pytest.raises(TypeError):
            combine(value, object())
        with pytest.raises(TypeError):
            combine("a", value)
    if hasattr(value, "matmat"):
        assert value @ Stranger() == "radd"


@linear
def test_arrays_on_the_left_are_not_taken_apart(value: Any) -> None:
    dense = np.ones(value.shape)
    for combine in (operator.add, operator.sub, operator.mul):
        with pytest.raises(TypeError):
            combine(dense, value)
        with pytest.raises(TypeError):
            combine(value, dense)
    for c in (np.float64(2), np.int32(2), np.array(2.0)):
        assert isinstance(c * value, type(value))
        oracles.assert_close((c * value).full(), 2 * value.full(), value.dtype)


T = tnlib.TensorTrain([np.ones((1, 2, 3)), np.ones((3, 4, 1))])
A = tnlib.TTMatrix([np.ones((1, 2, 2, 1)), np.ones((1, 3, 4, 1))])
FOUR = tnlib.TensorTrain([np.ones((1, 2, 1))] * 4)
LOW = tnlib.LowRank(np.ones((2, 1)), np.ones((1, 4)))

REFUSED = [
    (lambda: T + T.T, ValueError, ["TensorTrain + TensorTrain: leg 0 must", "2 and 4", "not broadcast"]),
    (lambda: T * FOUR, ValueError, ["TensorTrain * TensorTrain: both must have as", "2 and 4"]),
    (lambda: A + A.T, ValueError, ["TTMatrix + TTMatrix: leg 1 must", "(3, 4) and (4, 3)"]),
    (lambda: T + LOW, TypeError, ["TensorTrain + LowRank", "convert"]),
    (lambda: T - A, TypeError, ["TensorTrain - TTMatrix", "convert"]),
    (lambda: T * LOW, TypeError, ["TensorTrain * LowRank", "convert"]),
    (lambda: LOW @ A, TypeError, ["LowRank @ TTMatrix", "convert"]),
    (lambda: A + 1, TypeError, ["TTMatrix: a number cannot be added", "identity"]),
    (lambda: 1 - LOW, TypeError, ["LowRank: a number cannot be added", "identity"]),
    (lambda: T * math.nan, ValueError, ["TensorTrain: a number must be finite", "nan"]),
    (lambda: T / 0, ValueError, ["TensorTrain: the divisor", "0"]),
    (lambda: math.inf * A, ValueError, ["TTMatrix: a number must be finite", "inf"]),
    (lambda: 10**400 * T, ValueError, ["TensorTrain: a number must be finite"]),
    (lambda: A @ A, ValueError, ["TTMatrix @: leg 1 must", "4 and 3"]),
    (lambda: A @ T.T, ValueError, ["TTMatrix @: leg 0 must", "2 and 4"]),
    (lambda: A @ tnlib.TensorTrain([np.ones((1, 2, 1))]), ValueError, ["TTMatrix @: both must have as many legs"]),
    (lambda: A @ np.ones(3), ValueError, ["TTMatrix.matvec: x must"]),
    (lambda: np.ones((2, 4)) + T, TypeError, ["TensorTrain: the other", "array of shape (2, 4)", "numpy.asarray"]),
    (lambda: A * np.ones((6, 8)), TypeError, ["TTMatrix: the other", "array of shape (6, 8)", "decompose"]),
    (lambda: LOW @ LOW, ValueError, ["LowRank @ LowRank: the inner legs", "4 and 2"]),
]


@pytest.mark.parametrize(("call", "kind", "words"), REFUSED)
def test_operands_that_do_not_fit_are_refused(call: Any, kind: type[Exception], words: list[str]) -> None:
    with oracles.refused(kind, *words):
        call()


@pytest.mark.parametrize("number", [1e-309, -1e-320j])
def test_a_divisor_without_a_finite_inverse_is_refused(number: complex) -> None:
    for value in (tnlib.ones((2, 3)), tnlib.tucker(np.ones((2, 3))).value):
        with oracles.refused(ValueError, "divisor must have a finite inverse", repr(number)):
            value / number


@pytest.mark.parametrize("number", [np.longdouble(2), np.clongdouble(3j)])
def test_numbers_of_extended_precision_are_refused(number: np.number) -> None:
    t = tnlib.ones((2, 3))
    for call in (lambda: t * number, lambda: number * t, lambda: t / number, lambda: t + number):
        with oracles.refused(TypeError, "at most 64 bits a component", str(number.dtype)):
            call()


def test_single_precision_trains_are_divided_beyond_their_range() -> None:
    t = tnlib.ones((2, 3), np.float32) / 1e-40
    assert t.dtype == np.float32
    assert t.log_norm() == pytest.approx(np.log(1e40 * 6**0.5))


@pytest.mark.parametrize("log_scale", [0.0, 0.3, -700.0, 1300.0, 1e9])
def test_a_train_is_made_again_from_its_parts(log_scale: float) -> None:
    t = tnlib.TensorTrain(oracles.random_cores((2, 3, 2), (1, 2, 2, 1)), 1, log_scale)
    for again in (tnlib.TensorTrain(t.cores, t.center, t.log_scale), dataclasses.replace(t)):
        assert again.exponent == t.exponent
        assert all(np.array_equal(a, b) for a, b in zip(again.cores, t.cores, strict=True))
    unscaled = dataclasses.replace(t, log_scale=0.0)
    assert unscaled.log_norm() == pytest.approx(t.log_norm() - t.log_scale, abs=1e-6)


def test_the_real_part_of_a_cp_of_many_complex_factors_is_refused() -> None:
    t = tnlib.CP(np.ones(1), [np.ones((2, 1)) * 1j] * 20)
    with oracles.refused(ValueError, "CP.real", "12 complex factors", "got 20", "TensorTrain"):
        t.real  # noqa: B018


@given(trains(largest=345.0))
def test_cores_are_in_range_and_the_norm_is_that_of_the_array(tt: tnlib.TensorTrain) -> None:
    for core in tt.cores:
        top = float(np.abs(core).max())
        assert top == 0 or 1e-140 < top < 1e140
    plain = tnlib.TensorTrain(tt.cores)
    want = oracles.norm(oracles.wide(plain.full()))
    assert abs(plain.norm() - want) <= 1000 * oracles.eps(tt.dtype) * want
    assert plain.norm() == 0 or abs(tt.log_norm() - tt.exponent * math.log(2) - math.log(plain.norm())) <= 1e-6


@given(trains(largest=345.0))
def test_parts_and_transposes(tt: tnlib.TensorTrain) -> None:
    tt = tnlib.TensorTrain(tt.cores, tt.center)
    dense = tt.full()
    slack = 64 * oracles.eps(tt.dtype) * len(tt.cores) * max(tt.norm(), 1e-300)
    for got, want in ((tt.real, dense.real), (tt.imag, dense.imag), (tt.conj(), dense.conj()), (tt.T, dense.T)):
        assert oracles.norm(oracles.wide(got.full()) - oracles.wide(want)) <= slack
    assert tt.T.center == (None if tt.center is None else len(tt.cores) - 1 - tt.center)
    assert_same_tensor(tt.T.T, tt)
