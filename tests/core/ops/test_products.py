"""Inner, Kronecker and outer products, and distances, against dense arrays."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import oracles
import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_trains import reach
from slow_cases import mostly_slow

import tnlib


def product(legs: list[np.ndarray], log_scale: float = 0.0) -> tnlib.TensorTrain:
    return tnlib.TensorTrain([leg.reshape(1, -1, 1) for leg in legs], log_scale=log_scale)


def ghz(d: int, n: int) -> tnlib.TensorTrain:
    copy = np.zeros((n, n, n))
    copy[(np.arange(n),) * 3] = 1
    return tnlib.TensorTrain([np.eye(n)[None], *[copy] * (d - 2), np.eye(n)[..., None]])


dtypes = st.sampled_from(oracles.DTYPES)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=5), dtypes, dtypes, st.integers(0, 999), st.booleans())
def test_trains(shape: list[int], one: Any, two: Any, seed: int, matrix: bool) -> None:
    rng = np.random.default_rng(seed)
    a, b = (
        tnlib.TensorTrain(
            oracles.random_cores(shape, [1, *rng.integers(1, 5, len(shape) - 1), 1], dtype, seed + 50 * k),
            log_scale=float(rng.choice([0.0, -2.5, 40.0])),
        )
        for k, dtype in enumerate((one, two))
    )
    if matrix:
        a, b = (tnlib.convert(t, tnlib.TTMatrix) for t in (a, b))
    x, y = (oracles.wide(oracles.contract(t)) for t in (a, b))
    eps, (p, q) = max(oracles.eps(one), oracles.eps(two)), (reach(t) for t in (a, b))
    with oracles.unchanged(*a.cores, *b.cores):
        got = tnlib.inner(a, b)
    assert isinstance(got, complex if np.iscomplexobj(x) or np.iscomplexobj(y) else float)
    assert abs(got - np.vdot(x, y)) <= 100 * eps * p * q
    assert abs(tnlib.inner(a, a) - oracles.norm(x) ** 2) <= 100 * eps * p**2
    far = tnlib.distance(a, b)
    assert isinstance(far, float)
    assert abs(far - oracles.norm(x - y)) <= 100 * eps * (p + q)


KINDS = [tnlib.TensorTrain, tnlib.Tucker, tnlib.CP, tnlib.LowRank]


@oracles.each_dtype
@pytest.mark.parametrize("one", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("two", KINDS, ids=lambda kind: kind.__name__)
def test_any_two_kinds(dtype: np.dtype, one: type, two: type) -> None:
    def a(kind: type, seed: int) -> Any:
        left, right = oracles.normal((5, 3), dtype, seed), oracles.normal((4, 3), dtype, seed + 1)
        if kind is tnlib.Tucker:
            return tnlib.Tucker(oracles.normal((3, 3), dtype, seed + 2), [left, right])
        if kind is tnlib.CP:
            return tnlib.CP(oracles.normal((3,), dtype, seed + 2), [left, right])
        low = tnlib.LowRank(left, right.T)
        return low if kind is tnlib.LowRank else tnlib.convert(low, tnlib.TensorTrain)

    x, y = a(one, 0), a(two, 7)
    p, q = (oracles.wide(oracles.contract(t)) for t in (x, y))
    eps, size = oracles.eps(dtype), oracles.norm(p) * oracles.norm(q)
    assert abs(tnlib.inner(x, y) - np.vdot(p, q)) <= 200 * eps * size
    assert abs(tnlib.distance(x, y) - oracles.norm(p - q)) <= 200 * eps * (oracles.norm(p) + oracles.norm(q))


@oracles.each_dtype
def test_sums_of_kronecker_products(dtype: np.dtype) -> None:
    """Factors and arrays on the right, and an operator of two cores."""
    low = [tnlib.LowRank(oracles.normal((4, 2), dtype, h), oracles.normal((2, 5), dtype, h + 9)) for h in range(3)]
    a = tnlib.KroneckerTerms(oracles.normal((3, 2, 3), dtype), low)
    b = tnlib.KroneckerTerms(oracles.normal((2, 2, 3), dtype, 5), [low[1], oracles.normal((4, 5), dtype, 7)])
    for one, other in ((a, a), (a, b), (b, a), (1e20 * a, 1e-20 * b), (a, tnlib.convert(b, tnlib.TTMatrix))):
        p, q = (oracles.wide(t.full()) for t in (one, other))
        eps, sizes = oracles.eps(dtype), (oracles.norm(p), oracles.norm(q))
        assert abs(tnlib.inner(one, other) - np.vdot(p, q)) <= 400 * eps * math.prod(sizes)
        assert abs(tnlib.distance(one, other) - oracles.norm(p - q)) <= 400 * eps * sum(sizes)


# --------------------------------------------------------------------------------- trains that have no dense form


@pytest.mark.parametrize("n", [2, 5, 32])
@pytest.mark.parametrize("dtype", [np.float64, np.complex128])
def test_product_states_of_200_cores(n: int, dtype: Any) -> None:
    """The inner product is the product of those of the legs."""
    a, b = ([oracles.isometry(n, 1, dtype, seed=k + 1000 * i)[:, 0] for k in range(200)] for i in range(2))
    b = [x + 5 * y for x, y in zip(b, a, strict=True)]
    b = [y / np.linalg.norm(y) for y in b]
    legs = [np.vdot(x, y) for x, y in zip(a, b, strict=True)]
    want = math.fsum(math.log(abs(z)) for z in legs)
    got = tnlib.inner(product(a), product(b))
    assert abs(got) == pytest.approx(math.exp(want), rel=1e-11)
    phase = np.prod([z / abs(z) for z in legs])
    assert got / abs(got) == pytest.approx(phase, abs=1e-11)
    assert tnlib.distance(product(a), product(b)) == pytest.approx(
        math.sqrt(2 - 2 * (np.exp(want) * phase).real), rel=1e-11
    )


@pytest.mark.parametrize("n", mostly_slow([2, 32], [2]))
def test_ghz_states_of_200_cores(n: int) -> None:
    state = ghz(200, n)
    assert state.norm() == pytest.approx(math.sqrt(n), rel=1e-13)
    assert tnlib.inner(state, state) == pytest.approx(n, rel=1e-13)
    first = product([np.eye(n)[0]] * 200)
    assert tnlib.inner(first, state) == pytest.approx(1, rel=1e-13)
    assert tnlib.distance(state, first) == pytest.approx(math.sqrt(n - 1), rel=1e-12)
    assert tnlib.distance(state, state) <= 1e-13 * math.sqrt(n)


@pytest.mark.parametrize("gap", [1e-3, 1e-9, 1e-14])
@pytest.mark.parametrize("center", [None, 0, 100, 199])
def test_a_small_distance_keeps_its_digits(gap: float, center: int | None) -> None:
    """sqrt(aa - 2 ab + bb) would have a floor at 1e-8."""
    shape, ranks = [2 + k % 31 for k in range(200)], [1, *[5] * 199, 1]
    a, b = (tnlib.TensorTrain(oracles.random_cores(shape, ranks, seed=s)) for s in (0, 300))
    a, b = (tnlib.TensorTrain(t.cores, log_scale=-t.log_norm()) for t in (a, b))  # norm 1, orthogonal to roundoff
    near = a + gap * b
    if center is not None:
        a, near = tnlib.canonicalize(a, center), tnlib.canonicalize(near, center)
    assert tnlib.distance(a, near) == pytest.approx(gap, abs=3e-14, rel=1e-9)


def test_scales_beyond_every_float() -> None:
    a = product([np.ones(2)] * 3, 1e5)
    b = product([np.ones(2)] * 3, -1e5)
    assert tnlib.inner(a, b) == pytest.approx(8, rel=1e-10)
    assert tnlib.inner(b, b) == 0.0
    with oracles.refused(ValueError, "inner: the result", "log_scale"):
        tnlib.inner(a, a)
    with oracles.refused(ValueError, "distance: the result", "1.8e308"):
        tnlib.distance(a, b)
    assert tnlib.distance(b, 2 * b) == 0.0
    zero = product([np.zeros(2)] * 3, 1e5)
    assert tnlib.inner(zero, a) == 0.0
    assert tnlib.distance(zero, zero) == 0.0


def test_single_precision_cores_far_from_one() -> None:
    for size in (1e-30, 1e30):
        legs = [np.full(2, size, np.float32)] * 100
        a = product(legs, -100 * math.log(size))
        assert tnlib.inner(a, a) / 2.0**100 == pytest.approx(1, rel=1e-4)


# ------------------------------------------------------------------------------------------- an operator between


@given(
    legs=st.lists(st.tuples(*[st.integers(1, 3)] * 3), min_size=1, max_size=4),
    ranks=st.tuples(*[st.integers(1, 3)] * 3),
    kinds=st.tuples(*[dtypes] * 3),
    seed=st.integers(0, 999),
    matrix=st.booleans(),
)
def test_matrix_elements(legs: Any, ranks: Any, kinds: Any, seed: int, matrix: bool) -> None:
    def chain(sizes: list[tuple[int, int]], k: int) -> tnlib.TTMatrix:
        r = [1, *[ranks[k]] * (len(legs) - 1), 1]
        cores = [oracles.normal((r[i], *size, r[i + 1]), kinds[k], seed + 7 * k + i) for i, size in enumerate(sizes)]
        return tnlib.TTMatrix(cores, log_scale=0.5 * k)

    a = chain([(m, p if matrix else 1) for m, _, p in legs], 0)
    operator = chain([(m, n) for m, n, _ in legs], 1)
    b = chain([(n, p if matrix else 1) for _, n, p in legs], 2)
    want = np.vdot(*(oracles.wide(t) for t in (oracles.contract(a), oracles.contract(operator) @ oracles.contract(b))))
    size = reach(a) * reach(operator) * reach(b)
    if not matrix:
        a, b = (tnlib.convert(t, tnlib.TensorTrain) for t in (a, b))
    with oracles.unchanged(*a.cores, *operator.cores, *b.cores):
        got = tnlib.inner(a, b, operator)
    assert isinstance(got, complex if any(np.dtype(k).kind == "c" for k in kinds) else float)
    assert abs(got - want) <= 100 * max(oracles.eps(k) for k in kinds) * size


def test_energies_of_200_spins() -> None:
    """- sum Z Z - h sum X: -(d - 1) on all spins up, -h d along the field, and no product of bonds of 200."""
    d, h = 200, 0.7
    x, z, core = np.array([[0.0, 1.0], [1.0, 0.0]]), np.diag([1.0, -1.0]), np.zeros((3, 2, 2, 3))
    core[0, :, :, 0] = core[2, :, :, 2] = np.eye(2)
    core[0, :, :, 1], core[1, :, :, 2], core[0, :, :, 2] = z, -z, -h * x
    operator = tnlib.TTMatrix([core[:1], *[core] * (d - 2), core[..., 2:]])
    up, along = product([np.array([1.0, 0.0])] * d), product([np.full(2, 0.5**0.5)] * d)
    assert tnlib.inner(up, up, operator) == pytest.approx(1 - d, rel=1e-13)
    assert tnlib.inner(along, along, operator) == pytest.approx(-h * d, rel=1e-13)
    state = ghz(d, 2)
    assert tnlib.inner(state, state, operator) == pytest.approx(2 * (1 - d), rel=1e-13)
    assert tnlib.inner(1e200 * up, 1e-200 * up, operator) == pytest.approx(1 - d, rel=1e-12)


FLIP = tnlib.TTMatrix([np.array([[0.0, 1.0], [1.0, 0.0]]).reshape(1, 2, 2, 1)] * 3)
BETWEEN = [
    (lambda: tnlib.inner(ghz(3, 2), ghz(3, 2), np.eye(8)), TypeError, ["operator must be a TTMatrix", "ndarray"]),
    (lambda: tnlib.inner(ghz(3, 3), ghz(3, 2), FLIP), ValueError, ["a and operator: leg 0", "3 and 2"]),
    (lambda: tnlib.inner(ghz(3, 2), ghz(3, 3), FLIP), ValueError, ["operator and b: leg 0", "2 and 3"]),
    (lambda: tnlib.inner(ghz(4, 2), ghz(4, 2), FLIP), ValueError, ["as many legs", "4 and 3"]),
    (lambda: tnlib.inner(ghz(3, 2), FLIP, FLIP), TypeError, ["of one kind", "TensorTrain and a TTMatrix"]),
    (lambda: tnlib.inner(tnlib.LowRank(np.eye(2), np.eye(2)), FLIP, FLIP), TypeError, ["a must be", "LowRank"]),
]


@pytest.mark.parametrize(("call", "kind", "words"), BETWEEN)
def test_operators_that_do_not_fit_are_refused(call: Any, kind: type[Exception], words: list[str]) -> None:
    with oracles.refused(kind, "inner", "got", *words):
        call()


REFUSED = [
    (lambda f: f(ghz(3, 2), ghz(3, 3)), ValueError, ["leg 0 must", "2 and 3"]),
    (lambda f: f(ghz(3, 2), ghz(4, 2)), ValueError, ["as many legs", "3 and 4"]),
    (lambda f: f(ghz(3, 2), np.ones((2, 2, 2))), TypeError, ["b must be", "ndarray"]),
    (lambda f: f(None, ghz(3, 2)), TypeError, ["a must be", "NoneType"]),
    (
        lambda f: f(tnlib.LowRank(np.ones((4, 1)), np.ones((1, 4))), tnlib.TTMatrix([np.ones((1, 2, 2, 1))] * 2)),
        TypeError,
        ["ttm_svd"],
    ),
]


@pytest.mark.parametrize(("call", "kind", "words"), REFUSED)
@pytest.mark.parametrize("function", [tnlib.inner, tnlib.distance])
def test_what_has_no_inner_product_is_refused(
    function: Any, call: Any, kind: type[Exception], words: list[str]
) -> None:
    with oracles.refused(kind, *words):
        call(function)


every_dtype = oracles.each_dtype


def pairs(dtype: Any) -> list[tuple[Any, Any]]:
    """Two values of every format, with legs of different sizes."""

    def a(*shape: int) -> np.ndarray:
        return oracles.normal(shape, dtype, seed=sum(shape))

    def svd(m: int, n: int, r: int, left: Any = None) -> tnlib.SVD:
        s = np.arange(r, 0, -1).astype(np.finfo(dtype).dtype)
        u, v = oracles.isometry(m, r, dtype).astype(dtype), oracles.isometry(n, r, dtype).astype(dtype)
        return tnlib.SVD(u, s, v.T, left)

    low = [tnlib.LowRank(a(2, 1), a(1, 3)), tnlib.LowRank(a(2, 2), a(2, 3))]
    return [
        (
            tnlib.TensorTrain([a(1, 2, 2), a(2, 3, 1)], log_scale=1.5),
            tnlib.TensorTrain([a(1, 4, 3), a(3, 1, 1)], log_scale=-2.0),
        ),
        (tnlib.TTMatrix([a(1, 2, 3, 2), a(2, 1, 2, 1)]), tnlib.TTMatrix([a(1, 3, 1, 1)], log_scale=2.0)),
        (tnlib.Tucker(a(2, 1), [a(3, 2), a(2, 1)]), tnlib.Tucker(a(1, 2), [a(2, 1), a(4, 2)])),
        (tnlib.CP(a(2), [a(3, 2), a(2, 2)]), tnlib.CP(a(3), [a(2, 3), a(4, 3)])),
        (tnlib.LowRank(a(3, 2), a(2, 4)), tnlib.LowRank(a(2, 3), a(3, 5))),
        (svd(4, 3, 2), svd(3, 5, 3)),
        (svd(4, 3, 2, left=(1,)), svd(3, 5, 3, left=(1,))),
        (tnlib.KroneckerTerms(a(2, 3, 1), low), tnlib.KroneckerTerms(a(3, 1, 2), list(a(3, 2, 2)))),
        (tnlib.KroneckerTerms(a(2, 5, 5), list(a(2, 1, 1))), tnlib.KroneckerTerms(a(2, 1, 1), low)),
    ]


def mixed_pairs(one: Any, other: Any) -> list[tuple[Any, Any]]:
    return [(a, b) for (a, _), (_, b) in zip(pairs(one), pairs(other), strict=True)]


@every_dtype
@pytest.mark.parametrize("other", oracles.DTYPES, ids=str)
def test_kron_is_that_of_numpy(dtype: np.dtype, other: np.dtype) -> None:
    for a, b in mixed_pairs(dtype, other):
        with oracles.unchanged(*a.arrays(), *b.arrays()):
            product = tnlib.kron(a, b)
        assert type(product) is type(a)
        assert product.dtype == np.result_type(dtype, other)
        if isinstance(product, tnlib.Tucker | tnlib.CP):
            assert product.ranks == tuple(np.multiply(a.ranks, b.ranks))
        coarser = max(dtype, other, key=oracles.eps)
        oracles.assert_close(product.full(), np.kron(oracles.contract(a), oracles.contract(b)), coarser, 200)
        if isinstance(product, tnlib.SVD) and dtype == other:
            oracles.assert_isometric(product.u)
            assert (np.diff(product.s) <= 0).all()


@every_dtype
@pytest.mark.parametrize("other", oracles.DTYPES, ids=str)
def test_outer_is_that_of_numpy(dtype: np.dtype, other: np.dtype) -> None:
    for a, b in mixed_pairs(dtype, other):
        if isinstance(a, tnlib.TTMatrix | tnlib.KroneckerTerms):
            words = "outer: a and b must be two formats of one class", type(a).__name__, "call tnlib.kron"
            with oracles.refused(TypeError, *words):
                tnlib.outer(a, b)
            continue
        product = tnlib.outer(a, b)
        assert type(product) is (tnlib.TensorTrain if isinstance(a, tnlib.LowRank) else type(a))
        want = np.multiply.outer(oracles.contract(a), oracles.contract(b))
        oracles.assert_close(product.full(), want, max(dtype, other, key=oracles.eps), 200)
        assert product.dtype == np.result_type(dtype, other)
        if isinstance(product, tnlib.Tucker):
            assert product.ranks == a.ranks + b.ranks
        if isinstance(product, tnlib.SVD) and dtype == other:
            oracles.assert_isometric(product.u)
            oracles.assert_isometric(np.moveaxis(product.vh, 0, -1).conj())
            assert (np.diff(product.s) <= 0).all()


def test_an_outer_product_with_too_many_legs_is_refused() -> None:
    t = tnlib.Tucker(np.ones((1,) * 40), [np.ones((2, 1))] * 40)
    with oracles.refused(ValueError, "outer: the core of a Tucker", "64 legs", "80", "TensorTrain"):
        tnlib.outer(t, t)


def test_a_cp_of_a_thousand_legs() -> None:
    t = tnlib.CP([1.0, 1.0], [np.array([[1e3, 0.0], [0.0, 1e3]])] * 1000)
    number = tnlib.contract(t, {k: np.full(2, 1e-3) for k in range(1000)})
    assert number == pytest.approx(2.0, rel=1e-11)
    assert tnlib.inner(t, (1e-3**100) * tnlib.CP(t.weights, [1e-6 * f for f in t.factors])) == pytest.approx(2e-300)


def test_outer_of_tensors_split_in_two() -> None:
    a = tnlib.svd(oracles.normal((2, 3, 4)), left=(2, 0)).value
    b = tnlib.svd(oracles.normal((3, 2, 2)), left=1).value
    product = tnlib.outer(a, b)
    assert product.left == (2, 0, 4)
    oracles.assert_close(product.full(), np.multiply.outer(a.full(), b.full()), factor=200)


def test_terms_of_low_rank_stay_factored() -> None:
    """The side that is multiplied out is the one that takes fewer numbers."""
    a = tnlib.KroneckerTerms(np.ones((1, 2, 2)), [np.ones((1, 1))])
    b = tnlib.KroneckerTerms(np.ones((1, 2, 2)), [tnlib.LowRank(np.ones((50, 1)), np.ones((1, 50)))])
    product = tnlib.kron(a, b)
    assert all(isinstance(term, tnlib.LowRank) for term in product.right)
    oracles.assert_close(product.full(), np.kron(a.full(), b.full()))


T = tnlib.TensorTrain([np.ones((1, 2, 2)), np.ones((2, 3, 1))])
A = tnlib.TTMatrix([np.ones((1, 2, 2, 1))])
REFUSED_PAIRS = [
    (lambda: tnlib.kron(T, A), TypeError, ["kron: a and b must be two formats of one class", "TensorTrain and a TTM"]),
    (lambda: tnlib.outer(T, A), TypeError, ["outer: a and b must be two formats of one class", "TensorTrain and a"]),
    (lambda: tnlib.kron(1, 2), TypeError, ["kron: a and b must", "int"]),
    (lambda: tnlib.kron(T, T[0]), ValueError, ["kron: a and b must have equally many legs", "2 legs and one leg"]),
    (
        lambda: tnlib.kron(tnlib.svd(np.eye(2)).value, tnlib.svd(np.eye(2), left=1).value),
        ValueError,
        ["kron: a and b must have the same left legs", "(0,) and (1,)"],
    ),
]


@pytest.mark.parametrize(("call", "kind", "words"), REFUSED_PAIRS)
def test_products_of_other_values_are_refused(call: Any, kind: type[Exception], words: list[str]) -> None:
    with oracles.refused(kind, "got", *words):
        call()
