"""CP: real and imaginary part, casts, named arrays."""

from __future__ import annotations

import numpy as np
import oracles
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tnlib


@st.composite
def cps(draw: st.DrawFn) -> tnlib.CP:
    """Arrays of different dtypes, more and fewer components than the legs have entries."""
    d, rank, seed = draw(st.integers(1, 5)), draw(st.integers(1, 4)), draw(st.integers(0, 999))
    sizes = draw(st.lists(st.integers(1, 4), min_size=d, max_size=d))
    dtypes = draw(st.lists(st.sampled_from(oracles.DTYPES), min_size=d + 1, max_size=d + 1))
    factors = [oracles.normal((n, rank), dtypes[k], seed + k) for k, n in enumerate(sizes)]
    return tnlib.CP(oracles.normal((rank,), dtypes[d], seed + d), factors)


def dense(t: tnlib.CP) -> np.ndarray:
    return oracles.contract(t.astype(np.complex128))


def roundoff(t: tnlib.CP) -> float:
    """Rounding of the entries of `t` in the coarsest dtype of its arrays."""
    magnitude = oracles.contract(tnlib.CP(np.abs(t.weights), [np.abs(factor) for factor in t.factors]))
    return 32 * max(oracles.eps(a.dtype) for a in t.arrays()) * oracles.norm(magnitude)


@given(cps())
def test_real_and_imaginary_part(t: tnlib.CP) -> None:
    is_complex = [np.iscomplexobj(a) for a in (t.factors[0][:, :1] * t.weights[:1], *t.factors[1:])]
    rank = len(t.weights) * 2 ** max(0, sum(is_complex) - 1)
    for part, want in ((t.real, dense(t).real), (t.imag, dense(t).imag)):
        assert part.shape == t.shape
        assert part.dtype == np.zeros(0, t.dtype).real.dtype
        assert part.full().dtype == part.dtype
        assert oracles.norm(oracles.wide(part.full()) - want) <= 2 ** len(t.shape) * roundoff(t)
        assert part.ranks == (rank,)
    if t.dtype.kind != "c":
        assert t.real is t
        assert t.imag.norm() == 0


@pytest.mark.parametrize("dtype", [np.complex64, np.complex128])
def test_parts_of_integers_are_exact(dtype: type) -> None:
    factors = [np.array([[1 + 2j, 3 - 1j], [2 - 1j, 4j]]).astype(dtype) + k for k in range(4)]
    t = tnlib.CP(np.array([2 - 4j, 1j]).astype(dtype), factors)
    np.testing.assert_array_equal(t.real.full(), t.full().real)
    np.testing.assert_array_equal(t.imag.full(), t.full().imag)


@pytest.mark.parametrize("c", [1e-300, 1e300])
def test_parts_of_large_weights_stay_in_range(c: float) -> None:
    t = tnlib.CP(np.array([c * 1j]), [np.array([[c], [c * 1j]]), np.array([[1j / c]])])
    np.testing.assert_allclose(tnlib.entries(t.real, [[0, 0], [1, 0]]), [-c, 0.0], rtol=1e-14)
    np.testing.assert_allclose(tnlib.entries(t.imag, [[0, 0], [1, 0]]), [0.0, -c], rtol=1e-14)


@given(cps(), st.sampled_from(oracles.DTYPES))
def test_casts(t: tnlib.CP, dtype: np.dtype) -> None:
    if t.dtype.kind == "c" and dtype.kind != "c":
        with oracles.refused(TypeError, "CP.astype", "complex", ".real"):
            t.astype(dtype)
        return
    cast = t.astype(dtype)
    assert all(a.dtype == dtype for a in cast.arrays())
    assert oracles.norm(oracles.wide(cast.full()) - dense(t)) <= max(roundoff(t), roundoff(cast))


@given(cps())
def test_named_arrays_make_the_same_value(t: tnlib.CP) -> None:
    assert list(t.named_arrays()) == ["weights", *(f"factors.{k}" for k in range(t.ndim))]
    oracles.assert_same_bits(tnlib.CP.from_named_arrays(t.named_arrays(), t.attributes()), t)
