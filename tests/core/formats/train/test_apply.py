"""apply: the contract of every rounding, on products that are never made, and known results of long operators."""

from __future__ import annotations

import math
import tracemalloc
from typing import Any

import numpy as np
import oracles
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tnlib

TOLERANCES = [None, 1e-12, 1e-7, 1e-3, 0.05, 0.4, 1.0]
dtypes = st.sampled_from(oracles.DTYPES)


def operator(rows: Any, columns: Any, rank: int, dtype: Any = np.float64, seed: int = 0) -> list[np.ndarray]:
    sizes = [1, *[rank] * (len(rows) - 1), 1]
    return [
        oracles.normal((sizes[k], m, n, sizes[k + 1]), dtype, seed + k)
        for k, (m, n) in enumerate(zip(rows, columns, strict=True))
    ]


def check(a: tnlib.TTMatrix, x: Any, rtol: float | None, cap: int | None) -> Any:
    """The dense product, in double precision, is what the fit is held against."""
    doubled = (type(t)([oracles.wide(core) for core in t.cores], log_scale=t.log_scale) for t in (a, x))
    left, right = (oracles.contract(t) for t in doubled)
    want = left @ (right if isinstance(x, tnlib.TTMatrix) else right.reshape(-1))
    want = want if isinstance(x, tnlib.TTMatrix) else want.reshape(a.row_shape)
    with oracles.unchanged(*a.cores, *x.cores):
        fit, warned = oracles.quietly(lambda: tnlib.apply(a, x, rtol=rtol, max_rank=cap))
    oracles.assert_fit(fit, want, rtol=rtol)
    oracles.assert_gauge(fit.value)
    oracles.assert_warned(fit, warned)
    assert type(fit.value) is type(x)
    assert fit.value.dtype == np.result_type(a.dtype, x.dtype)
    if cap is None:
        assert fit.converged
    else:
        assert max(fit.value.ranks) <= cap
    return fit


@given(
    legs=st.lists(st.tuples(*[st.integers(1, 3)] * 3), min_size=1, max_size=4),
    ranks=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    dtype=dtypes,
    seed=st.integers(0, 999),
    rtol=st.sampled_from(TOLERANCES),
    cap=st.sampled_from([None, None, 1, 2, 5]),
    kind=st.sampled_from(["normal", "zero", "repeated", "integers"]),
    matrix=st.booleans(),
)
def test_any_operator_on_any_train(legs, ranks, dtype, seed, rtol, cap, kind, matrix) -> None:
    m, n, p = zip(*legs, strict=True)
    a, b = operator(m, n, ranks[0], dtype, seed), operator(n, p, ranks[1], dtype, seed + 9)
    if kind == "zero":
        a[seed % len(a)][...] = 0
    if kind == "repeated":
        b = [np.repeat(core[:1], len(core), axis=0) for core in b]
    if kind == "integers":
        a, b = ([np.round(core) for core in cores] for cores in (a, b))
    x = tnlib.TTMatrix(b)
    if not matrix:
        x = tnlib.TensorTrain([core[:, :, 0] for core in b])
    check(tnlib.TTMatrix(a), x, rtol, cap)


@oracles.each_dtype
@pytest.mark.parametrize("rtol", [None, 1e-4, 0.2])
def test_the_result_is_that_of_rounding_the_product(dtype: np.dtype, rtol: float | None) -> None:
    a = tnlib.TTMatrix(operator((2,) * 10, (2,) * 10, 4, dtype))
    x = tnlib.TensorTrain(oracles.random_cores((2,) * 10, (1, *[6] * 9, 1), dtype, 50))
    for cap in (None, 7):
        got, _ = oracles.quietly(lambda cap=cap: tnlib.apply(a, x, rtol=rtol, max_rank=cap))
        want, _ = oracles.quietly(lambda cap=cap: tnlib.round(a @ x, rtol=rtol, max_rank=cap))
        assert got.value.ranks == want.value.ranks
        assert got.error == pytest.approx(want.error, rel=1e-3, abs=100 * oracles.eps(dtype))
        assert tnlib.distance(got.value, want.value) <= 1e3 * oracles.eps(dtype) * want.value.norm()


@oracles.each_dtype
@pytest.mark.parametrize("rtol", [None, 1e-3, 0.3])
def test_diagonal_operators_multiply_entries(dtype: np.dtype, rtol: float | None) -> None:
    a, b = (tnlib.TensorTrain(oracles.random_cores((3, 2, 4, 2), (1, 3, 4, 2, 1), dtype, seed)) for seed in (1, 60))
    fit = check(tnlib.diag(a), b, rtol, None)
    oracles.assert_fit(fit, oracles.contract(a) * oracles.contract(b), rtol=rtol)
    assert fit.value.ranks == oracles.quietly(lambda: tnlib.round(a * b, rtol=rtol))[0].value.ranks


@pytest.mark.parametrize("power", [-200, -100, 100, 200])
def test_any_scale(power: int) -> None:
    a = tnlib.TTMatrix(operator((2, 3, 2), (3, 2, 2), 3))
    x = tnlib.TensorTrain(oracles.random_cores((3, 2, 2), (1, 3, 2, 1)))
    want = tnlib.apply(a, x, rtol=0.1)
    for left, right in ((10.0**power * a, x), (a, 10.0**power * x), (10.0**power * a, 10.0**power * x)):
        fit = tnlib.apply(left, right, rtol=0.1)
        assert fit.value.ranks == want.value.ranks
        assert fit.error == pytest.approx(want.error, rel=1e-10)
        twice = power * (2 if left is not a and right is not x else 1)
        assert fit.value.log_norm() == pytest.approx(want.value.log_norm() + twice * math.log(10), rel=1e-12)
        assert all(np.isfinite(core).all() for core in fit.value.cores)


def test_mixed_precisions_meet_in_the_wider_one() -> None:
    a = tnlib.TTMatrix(operator((2, 3), (3, 2), 2, np.float32))
    check(a, tnlib.TensorTrain(oracles.random_cores((3, 2), (1, 2, 1), np.complex128)), 1e-10, None)
    check(a, tnlib.TensorTrain(oracles.random_cores((3, 2), (1, 2, 1), np.complex64)), None, None)


# ------------------------------------------------------------------------------------------------------- long chains

X, Z, ONE = np.array([[0.0, 1.0], [1.0, 0.0]]), np.diag([1.0, -1.0]), np.eye(2)


def ising(d: int, coupling: float, field: float) -> tnlib.TTMatrix:
    """- coupling sum Z Z - field sum X, as an automaton of three states."""
    core = np.zeros((3, 2, 2, 3))
    core[0, :, :, 0] = core[2, :, :, 2] = ONE
    core[0, :, :, 1], core[1, :, :, 2], core[0, :, :, 2] = Z, -coupling * Z, -field * X
    return tnlib.TTMatrix([core[:1], *[core] * (d - 2), core[..., 2:]])


def product(leg: Any, d: int) -> tnlib.TensorTrain:
    return tnlib.TensorTrain([np.asarray(leg, float).reshape(1, -1, 1)] * d)


@pytest.mark.parametrize("d", [2, 20, 200])
def test_a_transverse_field_ising_chain(d: int) -> None:
    """On all spins up the field flips one at a time; along the field each coupling flips two."""
    h = ising(d, 1.0, 0.7)
    up, along = product([1, 0], d), product([0.5**0.5] * 2, d)
    fit = tnlib.apply(h, up)
    assert max(fit.value.ranks) == 2
    assert fit.value.norm() == pytest.approx(math.hypot(d - 1, 0.7 * math.sqrt(d)), rel=1e-12)
    assert tnlib.inner(up, fit.value) == pytest.approx(1 - d, rel=1e-12)
    fit = tnlib.apply(h, along)
    assert max(fit.value.ranks) <= 3
    assert fit.value.norm() == pytest.approx(math.hypot(0.7 * d, math.sqrt(d - 1)), rel=1e-12)
    assert tnlib.inner(along, fit.value) == pytest.approx(-0.7 * d, rel=1e-12)
    assert tnlib.distance(fit.value, h @ along) <= 1e-12 * d
    square = tnlib.apply(h, h)  # of operators
    assert max(square.value.ranks) <= 9
    assert tnlib.inner(up, square.value @ up) == pytest.approx((d - 1) ** 2 + 0.49 * d, rel=1e-12)


def test_an_eigenstate_of_200_spins_leaves_nothing() -> None:
    """Without a field the GHZ state has energy -(d - 1): what is left is roundoff, and not its root."""
    d = 200
    ghz = product([1, 0], d) + product([0, 1], d)
    identity = tnlib.TTMatrix([ONE.reshape(1, 2, 2, 1)] * d)
    left = tnlib.apply(ising(d, 1.0, 0.0) + (d - 1) * identity, ghz, rtol=1e-3)
    assert left.value.norm() <= 1e-12 * d
    flipped = tnlib.apply(tnlib.TTMatrix([X.reshape(1, 2, 2, 1)] * d), ghz)
    assert tnlib.distance(flipped.value, ghz) <= 1e-13
    assert flipped.value.ranks == (1, *[2] * (d - 1), 1)


@pytest.mark.parametrize("n", [2, 32])
def test_a_long_product_that_compresses(n: int) -> None:
    """A random operator of rank one and its double, padded: 200 cores, ranks 4 and 3, true rank 3."""
    d = 200
    one = tnlib.TTMatrix([oracles.isometry(n, n, seed=k).reshape(1, n, n, 1) for k in range(d)])
    a = one + one + one + one
    x = tnlib.TensorTrain(oracles.random_cores((n,) * d, (1, *[3] * (d - 1), 1)))
    x = tnlib.TensorTrain(x.cores, log_scale=-x.log_norm())
    fit = tnlib.apply(a, x, rtol=1e-10)
    assert max(fit.value.ranks) == 3
    assert fit.value.norm() == pytest.approx(4, rel=1e-11)
    back = tnlib.apply(one.H, fit.value)
    assert tnlib.distance(back.value / 4, x) <= 1e-12


def test_the_product_of_the_ranks_is_never_held() -> None:
    d, wide, narrow = 60, 24, 8
    a = tnlib.TTMatrix([core / 10 for core in operator((2,) * d, (2,) * d, narrow)])
    x = tnlib.TensorTrain(oracles.random_cores((2,) * d, (1, *[wide] * (d - 1), 1)))
    product_bytes = 8 * 2 * sum((narrow * wide) ** 2 for _ in range(d - 2))
    tracemalloc.start()
    fit, _ = oracles.quietly(lambda: tnlib.apply(a, x, max_rank=12))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert max(fit.value.ranks) == 12
    assert peak < 0.25 * product_bytes


A = tnlib.TTMatrix([np.ones((1, 2, 3, 1)), np.ones((1, 2, 4, 1))])
V = tnlib.TensorTrain([np.ones((1, 3, 1)), np.ones((1, 4, 1))])

REFUSED = [
    (lambda: tnlib.apply(V, V), TypeError, ["operator must be a TTMatrix", "TensorTrain"]),
    (lambda: tnlib.apply(A, np.ones(12)), TypeError, ["x must be a TensorTrain", "ndarray"]),
    (lambda: tnlib.apply(A, V.T), ValueError, ["leg 0 must", "3 and 4"]),
    (lambda: tnlib.apply(A, A), ValueError, ["leg 0 must", "3 and 2"]),
    (lambda: tnlib.apply(A, tnlib.TensorTrain([np.ones((1, 3, 1))])), ValueError, ["as many legs", "2 and 1"]),
    (lambda: tnlib.apply(A, V, rtol=2), ValueError, ["rtol must", "2"]),
    (lambda: tnlib.apply(A, V, max_rank=0), ValueError, ["max_rank must", "0"]),
]


@pytest.mark.parametrize(("call", "kind", "words"), REFUSED)
def test_what_cannot_be_applied_is_refused(call: Any, kind: type[Exception], words: list[str]) -> None:
    with oracles.refused(kind, "apply: ", "got", *words):
        call()
