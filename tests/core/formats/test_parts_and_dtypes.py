"""Real and imaginary parts and casts of every format."""

from __future__ import annotations

from typing import Any

import numpy as np
import oracles
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tnlib

every_format = pytest.mark.parametrize("value", oracles.ALL_FORMATS, ids=oracles.format_id)


@every_format
def test_real_and_imaginary_parts(value: Any) -> None:
    real_dtype = np.finfo(value.dtype).dtype
    for part, want in ((value.real, value.full().real), (value.imag, value.full().imag)):
        assert type(part) is type(value)
        assert part.dtype == real_dtype
        factor = 200 * max(1, oracles.norm(value.full()) / oracles.norm(want)) if want.any() else 64
        oracles.assert_close(part.full(), want, real_dtype, factor)
    if value.dtype.kind == "f":
        assert value.real is value
        assert not value.imag.full().any()
    elif isinstance(value, tnlib.SVD | tnlib.LowRank | tnlib.KroneckerTerms):
        most = min(len(value.u.reshape(-1, *value.ranks)), value.vh[0].size) if isinstance(value, tnlib.SVD) else 10**9
        assert value.real.ranks == (min(2 * value.ranks[0], most),)


def test_terms_of_low_rank_stay_factored() -> None:
    low = tnlib.LowRank(oracles.normal((4, 1), complex), oracles.normal((1, 3), complex))
    terms = tnlib.KroneckerTerms(oracles.normal((1, 2, 2)), [low])
    for part, want in ((terms.real, terms.full().real), (terms.imag, terms.full().imag)):
        assert all(isinstance(term, tnlib.LowRank) for term in part.right)
        oracles.assert_close(part.full(), want, factor=200)


@st.composite
def mixed(draw: st.DrawFn) -> tnlib.CP | tnlib.Tucker:
    """CP or Tucker with arrays of different dtypes, ranks above and below the sizes of the legs."""
    d, seed = draw(st.integers(1, 4)), draw(st.integers(0, 999))
    sizes, ranks = (draw(st.lists(st.integers(1, 4), min_size=d, max_size=d)) for _ in range(2))
    dtypes = draw(st.lists(st.sampled_from(oracles.DTYPES), min_size=d + 1, max_size=d + 1))
    kind = draw(st.sampled_from([tnlib.CP, tnlib.Tucker]))
    ranks = ranks if kind is tnlib.Tucker else [ranks[0]] * d
    factors = [oracles.normal((n, r), dtypes[k], seed + k) for k, (n, r) in enumerate(zip(sizes, ranks, strict=True))]
    return kind(oracles.normal(ranks if kind is tnlib.Tucker else ranks[:1], dtypes[d], seed + d), factors)


def part_ranks(t: tnlib.CP | tnlib.Tucker) -> tuple[int, ...]:
    """Ranks of the real part: a complex factor doubles its own rank, or that of a CP but for the first."""
    if isinstance(t, tnlib.Tucker):
        double = [1 + (t.dtype.kind == "c" and np.iscomplexobj(factor)) for factor in t.factors]
        return tuple(np.multiply(t.ranks, double))
    is_complex = [np.iscomplexobj(a) for a in (t.factors[0][:, :1] * t.weights[:1], *t.factors[1:])]
    return (len(t.weights) * 2 ** max(0, sum(is_complex) - 1),)


@given(mixed())
def test_parts_of_mixed_dtypes(t: tnlib.CP | tnlib.Tucker) -> None:
    first, *factors = (np.abs(a) for a in t.arrays())
    terms = oracles.norm(oracles.contract(type(t)(first, factors)))
    roundoff = 32 * max(oracles.eps(a.dtype) for a in t.arrays()) * terms
    dense = oracles.contract(t.astype(np.complex128))
    for part, want in ((t.real, dense.real), (t.imag, dense.imag)):
        assert part.dtype == np.zeros(0, t.dtype).real.dtype
        assert oracles.norm(oracles.wide(part.full()) - want) <= roundoff * 2 ** len(t.shape)
        assert part.ranks == part_ranks(t)


@pytest.mark.parametrize("c", [1e-300, 1e300])
def test_parts_of_large_weights_stay_in_range(c: float) -> None:
    t = tnlib.CP(np.array([c * 1j]), [np.array([[c], [c * 1j]]), np.array([[1j / c]])])
    np.testing.assert_allclose(tnlib.entries(t.real, [[0, 0], [1, 0]]), [-c, 0.0], rtol=1e-14)
    np.testing.assert_allclose(tnlib.entries(t.imag, [[0, 0], [1, 0]]), [0.0, -c], rtol=1e-14)


@every_format
@pytest.mark.parametrize("target", oracles.DTYPES, ids=str)
def test_casts(value: Any, target: np.dtype) -> None:
    if value.dtype.kind == "c" and target.kind != "c":
        with oracles.refused(TypeError, f"{type(value).__name__}.astype: dtype must be complex", ".real"):
            value.astype(target)
        return
    cast = value.astype(target)
    assert type(cast) is type(value)
    assert cast.dtype == target
    coarser = target if oracles.eps(target) > oracles.eps(value.dtype) else value.dtype
    oracles.assert_close(cast.full(), value.full(), coarser, 200)
    if isinstance(value, tnlib.SVD):
        assert cast.s.dtype == np.finfo(target).dtype
        assert cast.left == value.left
    else:
        assert {a.dtype for a in cast.arrays()} == {target}
