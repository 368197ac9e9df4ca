"""Deprecated factories: deltas, identities, swaps, as before and with a warning."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import oracles
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tnlib.interop import quimb

pytestmark = pytest.mark.filterwarnings("ignore:tnlib.interop.quimb:DeprecationWarning")

sizes = st.lists(st.integers(1, 4), min_size=1, max_size=3)


@given(size=st.integers(1, 4), legs=st.integers(1, 5), dtype=st.sampled_from(oracles.DTYPES))
def test_delta(size: int, legs: int, dtype: Any) -> None:
    got = quimb.delta(size, legs, dtype=dtype)
    assert got.dtype == dtype
    for place in itertools.product(range(size), repeat=legs):
        assert got[place] == (len(set(place)) == 1)


def test_deltas_fuse_and_make_diagonals() -> None:
    d3 = quimb.delta(3, 3)
    np.testing.assert_array_equal(np.tensordot(d3, d3, 1), quimb.delta(3, 4))
    np.testing.assert_array_equal(np.einsum("iij->j", d3), np.ones(3))
    np.testing.assert_array_equal(d3 @ np.array([1.0, 2.0, 3.0]), np.diag([1.0, 2.0, 3.0]))


@given(sizes=sizes)
def test_the_product_of_identities_flattened_is_an_identity(sizes: list[int]) -> None:
    d, total = len(sizes), math.prod(sizes)
    eyes = [np.eye(n) for n in sizes]
    product = eyes[0]
    for eye in eyes[1:]:
        product = np.multiply.outer(product, eye)  # row column row column ...
    rows_first = product.transpose([*range(0, 2 * d, 2), *range(1, 2 * d, 2)])
    np.testing.assert_array_equal(quimb.identity(sizes), rows_first)
    np.testing.assert_array_equal(quimb.identity(sizes).reshape(total, total), np.eye(total))
    flat = quimb.flattening(sizes)
    np.testing.assert_array_equal(np.tensordot(flat, flat, (-1, -1)), quimb.identity(sizes))
    np.testing.assert_array_equal(np.tensordot(flat, flat, (range(d), range(d))), np.eye(total))
    x = oracles.normal(sizes)
    np.testing.assert_array_equal(np.tensordot(x, flat, d), x.reshape(-1))
    assert quimb.is_isometry(flat, d)


@given(n=st.integers(1, 4), m=st.integers(1, 4))
def test_swap(n: int, m: int) -> None:
    s, x, y = quimb.swap(n, m), oracles.normal((n, 3)), oracles.normal((m, 2), seed=1)
    np.testing.assert_array_equal(
        np.kron(y, x), s.reshape(m * n, n * m) @ np.kron(x, y) @ quimb.swap(2, 3).reshape(6, 6)
    )
    np.testing.assert_array_equal(np.tensordot(quimb.swap(m, n), s, 2), quimb.identity((n, m)))


def test_bad_input() -> None:
    with oracles.refused(ValueError, "delta", "legs"):
        quimb.delta(3, 0)
    for size, legs in ((10**6, 9), (2, 80), (2, 10**5)):
        with oracles.refused(ValueError, "delta", f"{legs} legs", "as a train"):
            quimb.delta(size, legs)
    with oracles.refused(TypeError, "delta", "size"):
        quimb.delta(1.5, 2)
    for dtype in (float("nan"), "x", str, object):
        with oracles.refused(TypeError, "swap" if dtype is object else "delta", "dtype must be one of numbers"):
            quimb.swap(2, 3, dtype=dtype) if dtype is object else quimb.delta(2, 2, dtype=dtype)
    with oracles.refused(TypeError, "identity", "sizes"):
        quimb.identity(3)
    with oracles.refused(ValueError, "flattening", "sizes"):
        quimb.flattening(())
    with oracles.refused(ValueError, "swap", "m"):
        quimb.swap(2, 0)


@pytest.mark.filterwarnings("default")
def test_they_warn() -> None:
    with pytest.warns(DeprecationWarning, match=r"delta is deprecated; use quimb\.tensor\.COPY_tensor"):
        quimb.delta(2, 3)
    for name, arguments in (("identity", ((2,),)), ("flattening", ((2, 3),)), ("swap", (2, 3))):
        with pytest.warns(DeprecationWarning, match=rf"{name} is deprecated; use numpy\.eye"):
            getattr(quimb, name)(*arguments)
