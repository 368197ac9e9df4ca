"""CP and Tucker: real and imaginary part, casts, named arrays, products."""

from __future__ import annotations

from typing import Any

import numpy as np
import oracles
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tnlib

Value = tnlib.CP | tnlib.Tucker


@st.composite
def cps(draw: st.DrawFn) -> tnlib.CP:
    """Arrays of different dtypes, more and fewer components than the legs have entries."""
    d, rank, seed = draw(st.integers(1, 5)), draw(st.integers(1, 4)), draw(st.integers(0, 999))
    sizes = draw(st.lists(st.integers(1, 4), min_size=d, max_size=d))
    dtypes = draw(st.lists(st.sampled_from(oracles.DTYPES), min_size=d + 1, max_size=d + 1))
    factors = [oracles.normal((n, rank), dtypes[k], seed + k) for k, n in enumerate(sizes)]
    return tnlib.CP(oracles.normal((rank,), dtypes[d], seed + d), factors)


@st.composite
def tuckers(draw: st.DrawFn) -> tnlib.Tucker:
    """Arrays of different dtypes, ranks above and below the sizes of the legs."""
    d, seed = draw(st.integers(1, 4)), draw(st.integers(0, 999))
    sizes, ranks = (draw(st.lists(st.integers(1, 4), min_size=d, max_size=d)) for _ in range(2))
    dtypes = draw(st.lists(st.sampled_from(oracles.DTYPES), min_size=d + 1, max_size=d + 1))
    factors = [oracles.normal((n, r), dtypes[k], seed + k) for k, (n, r) in enumerate(zip(sizes, ranks, strict=True))]
    return tnlib.Tucker(oracles.normal(ranks, dtypes[d], seed + d), factors)


values = pytest.mark.parametrize("values", [cps(), tuckers()], ids=["cp", "tucker"])


def dense(t: Value) -> np.ndarray:
    return oracles.contract(t.astype(np.complex128))


def roundoff(t: Value) -> float:
    """Rounding of the entries of `t` in the coarsest dtype of its arrays."""
    first, *factors = (np.abs(a) for a in t.named_arrays().values())
    return 32 * max(oracles.eps(a.dtype) for a in t.arrays()) * oracles.norm(oracles.contract(type(t)(first, factors)))


def part_ranks(t: Value) -> tuple[int, ...]:
    """Ranks of the real part: a complex factor doubles its own rank, or that of a CP but for the first."""
    if isinstance(t, tnlib.Tucker):
        double = [1 + (t.dtype.kind == "c" and np.iscomplexobj(factor)) for factor in t.factors]
        return tuple(np.multiply(t.ranks, double))
    is_complex = [np.iscomplexobj(a) for a in (t.factors[0][:, :1] * t.weights[:1], *t.factors[1:])]
    return (len(t.weights) * 2 ** max(0, sum(is_complex) - 1),)


@values
@given(st.data())
def test_real_and_imaginary_part(values: st.SearchStrategy[Value], data: st.DataObject) -> None:
    t = data.draw(values)
    tolerance = roundoff(t) * (2 ** len(t.shape) if isinstance(t, tnlib.CP) else 1)
    for part, want in ((t.real, dense(t).real), (t.imag, dense(t).imag)):
        assert part.shape == t.shape
        assert part.dtype == np.zeros(0, t.dtype).real.dtype
        assert part.full().dtype == part.dtype
        assert oracles.norm(oracles.wide(part.full()) - want) <= tolerance
        assert part.ranks == part_ranks(t)
    if t.dtype.kind != "c":
        assert t.real is t
        assert t.imag.norm() == 0


@pytest.mark.parametrize("c", [1e-300, 1e300])
def test_parts_of_large_weights_stay_in_range(c: float) -> None:
    t = tnlib.CP(np.array([c * 1j]), [np.array([[c], [c * 1j]]), np.array([[1j / c]])])
    np.testing.assert_allclose(tnlib.entries(t.real, [[0, 0], [1, 0]]), [-c, 0.0], rtol=1e-14)
    np.testing.assert_allclose(tnlib.entries(t.imag, [[0, 0], [1, 0]]), [0.0, -c], rtol=1e-14)


@values
@given(st.data(), st.sampled_from(oracles.DTYPES))
def test_casts(values: st.SearchStrategy[Value], data: st.DataObject, dtype: np.dtype) -> None:
    t = data.draw(values)
    if t.dtype.kind == "c" and dtype.kind != "c":
        with oracles.refused(TypeError, f"{type(t).__name__}.astype", "complex", ".real"):
            t.astype(dtype)
        return
    cast = t.astype(dtype)
    assert all(a.dtype == dtype for a in cast.arrays())
    assert oracles.norm(oracles.wide(cast.full()) - dense(t)) <= max(roundoff(t), roundoff(cast))


@values
@given(st.data())
def test_named_arrays_make_the_same_value(values: st.SearchStrategy[Value], data: st.DataObject) -> None:
    t = data.draw(values)
    first = "weights" if isinstance(t, tnlib.CP) else "core"
    assert list(t.named_arrays()) == [first, *(f"factors.{k}" for k in range(t.ndim))]
    oracles.assert_same_bits(type(t).from_named_arrays(t.named_arrays(), t.attributes()), t)


@pytest.mark.parametrize("make", [tnlib.random.cp, tnlib.random.tucker])
@given(
    st.integers(1, 3), st.integers(1, 2), st.sampled_from(oracles.DTYPES), st.sampled_from(oracles.DTYPES),
    st.integers(0, 999),
)  # fmt: skip
def test_products_beside_numpy(make: Any, d: int, rank: int, dtype: np.dtype, other: np.dtype, seed: int) -> None:
    a, b = make((2, 3, 2)[:d], rank, dtype=dtype, rng=seed), make((3, 2, 2)[:d], 2, dtype=other, rng=seed + 20)
    x, y = oracles.contract(a), oracles.contract(b)
    for product, want in ((tnlib.kron(a, b), np.kron(x, y)), (tnlib.outer(a, b), np.multiply.outer(x, y))):
        assert type(product) is type(a)
        assert product.dtype == np.result_type(dtype, other)
        scale = np.prod([oracles.norm(array) for array in product.arrays()])  # terms may cancel
        assert oracles.norm(oracles.wide(product.full()) - want) <= 100 * max(map(oracles.eps, (dtype, other))) * scale
    assert tnlib.kron(a, b).ranks == tuple(np.multiply(a.ranks, b.ranks))
    assert tnlib.outer(a, b).ranks == (a.ranks + b.ranks if isinstance(a, tnlib.Tucker) else (2 * rank,))


def test_an_outer_product_with_too_many_legs_is_refused() -> None:
    t = tnlib.Tucker(np.ones((1,) * 40), [np.ones((2, 1))] * 40)
    with oracles.refused(ValueError, "outer: the core of a Tucker", "64 legs", "80", "TensorTrain"):
        tnlib.outer(t, t)


def test_a_cp_of_a_thousand_legs() -> None:
    t = tnlib.CP([1.0, 1.0], [np.array([[1e3, 0.0], [0.0, 1e3]])] * 1000)
    number = tnlib.contract(t, {k: np.full(2, 1e-3) for k in range(1000)})
    assert number == pytest.approx(2.0, rel=1e-11)
    assert tnlib.inner(t, (1e-3**100) * tnlib.CP(t.weights, [1e-6 * f for f in t.factors])) == pytest.approx(2e-300)
