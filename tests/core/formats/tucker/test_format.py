"""Tucker: real and imaginary part, casts, named arrays."""

from __future__ import annotations

import numpy as np
import oracles
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tnlib


@st.composite
def tuckers(draw: st.DrawFn) -> tnlib.Tucker:
    """Arrays of different dtypes, ranks above and below the sizes of the legs."""
    d, seed = draw(st.integers(1, 4)), draw(st.integers(0, 999))
    sizes, ranks = (draw(st.lists(st.integers(1, 4), min_size=d, max_size=d)) for _ in range(2))
    dtypes = draw(st.lists(st.sampled_from(oracles.DTYPES), min_size=d + 1, max_size=d + 1))
    factors = [oracles.normal((n, r), dtypes[k], seed + k) for k, (n, r) in enumerate(zip(sizes, ranks, strict=True))]
    return tnlib.Tucker(oracles.normal(ranks, dtypes[d], seed + d), factors)


def dense(t: tnlib.Tucker) -> np.ndarray:
    return oracles.contract(t.astype(np.complex128))


def roundoff(t: tnlib.Tucker) -> float:
    """Rounding of the entries of `t` in the coarsest dtype of its arrays."""
    magnitude = oracles.contract(tnlib.Tucker(np.abs(t.core), [np.abs(factor) for factor in t.factors]))
    return 32 * max(oracles.eps(a.dtype) for a in t.arrays()) * oracles.norm(magnitude)


@given(tuckers())
def test_real_and_imaginary_part(t: tnlib.Tucker) -> None:
    for part, want in ((t.real, dense(t).real), (t.imag, dense(t).imag)):
        assert part.shape == t.shape
        assert part.dtype == np.zeros(0, t.dtype).real.dtype
        assert part.full().dtype == part.dtype
        assert oracles.norm(oracles.wide(part.full()) - want) <= roundoff(t)
        double = [1 + (t.dtype.kind == "c" and np.iscomplexobj(factor)) for factor in t.factors]
        assert part.ranks == tuple(np.multiply(t.ranks, double))
    if t.dtype.kind != "c":
        assert t.real is t
        assert t.imag.norm() == 0


@pytest.mark.parametrize("dtype", oracles.DTYPES, ids=str)
def test_parts_add_up_to_the_bit(dtype: np.dtype) -> None:
    """Nothing is rounded: the parts of a sum of two terms are those of its dense array of integers."""
    core, factors = np.array([[2, 3], [5, 7]]).astype(dtype), [np.array([[1, 2], [3, 4], [5, 6]]).astype(dtype)] * 2
    if np.dtype(dtype).kind == "c":
        core, factors = core + 1j * core[::-1], [factor - 1j * factor[::-1] for factor in factors]
    t = tnlib.Tucker(core.astype(dtype), [factor.astype(dtype) for factor in factors])
    np.testing.assert_array_equal(t.real.full(), t.full().real)
    np.testing.assert_array_equal(t.imag.full(), t.full().imag)


@given(tuckers(), st.sampled_from(oracles.DTYPES))
def test_casts(t: tnlib.Tucker, dtype: np.dtype) -> None:
    if t.dtype.kind == "c" and dtype.kind != "c":
        with oracles.refused(TypeError, "Tucker.astype", "complex", ".real"):
            t.astype(dtype)
        return
    cast = t.astype(dtype)
    assert all(a.dtype == dtype for a in cast.arrays())
    assert oracles.norm(oracles.wide(cast.full()) - dense(t)) <= max(roundoff(t), roundoff(cast))


@given(tuckers())
def test_named_arrays_make_the_same_value(t: tnlib.Tucker) -> None:
    assert list(t.named_arrays()) == ["core", *(f"factors.{k}" for k in range(t.ndim))]
    oracles.assert_same_bits(tnlib.Tucker.from_named_arrays(t.named_arrays(), t.attributes()), t)
