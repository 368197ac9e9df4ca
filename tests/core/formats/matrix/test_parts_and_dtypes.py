"""Real and imaginary parts, casts and named arrays of LowRank, KroneckerTerms and SVD."""

from __future__ import annotations

from typing import Any

import numpy as np
import oracles
import pytest

import tnlib

KINDS = tnlib.LowRank | tnlib.KroneckerTerms | tnlib.SVD
VALUES = [value for value in oracles.ALL_FORMATS if isinstance(value, KINDS)]


@pytest.mark.parametrize("value", VALUES, ids=oracles.format_id)
def test_real_and_imaginary_parts(value: Any) -> None:
    real_dtype = np.finfo(value.dtype).dtype
    for part, want in ((value.real, value.full().real), (value.imag, value.full().imag)):
        assert type(part) is type(value)
        assert part.dtype == real_dtype
        oracles.assert_close(
            part.full(),
            want,
            real_dtype,
            200 * max(1, oracles.norm(value.full()) / oracles.norm(want)) if want.any() else 64,
        )
    if value.dtype.kind == "f":
        assert value.real is value
        assert not value.imag.full().any()
    else:
        most = min(len(value.u.reshape(-1, *value.ranks)), value.vh[0].size) if isinstance(value, tnlib.SVD) else 10**9
        assert value.real.ranks == (min(2 * value.ranks[0], most),)


def test_terms_of_low_rank_stay_factored() -> None:
    low = tnlib.LowRank(oracles.normal((4, 1), complex), oracles.normal((1, 3), complex))
    terms = tnlib.KroneckerTerms(oracles.normal((1, 2, 2)), [low])
    for part, want in ((terms.real, terms.full().real), (terms.imag, terms.full().imag)):
        assert all(isinstance(term, tnlib.LowRank) for term in part.right)
        oracles.assert_close(part.full(), want, factor=200)


@pytest.mark.parametrize("value", VALUES, ids=oracles.format_id)
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


@pytest.mark.parametrize("value", VALUES, ids=oracles.format_id)
def test_named_arrays_give_the_value_back(value: Any) -> None:
    again = type(value).from_named_arrays(value.named_arrays(), value.attributes())
    oracles.assert_same_bits(again, value)
    assert tuple(value.named_arrays().values()) == value.arrays()
    assert (value.ndim, value.size) == (len(value.shape), int(np.prod(value.shape)))
