"""Deltas, identities, swaps and isometries: the equations that networks are rewritten with."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import oracles
import pytest
import quimb.tensor as qtn
from hypothesis import given
from hypothesis import strategies as st

import tnlib
from tnlib import network

sizes = st.lists(st.integers(1, 4), min_size=1, max_size=3)


@given(size=st.integers(1, 4), legs=st.integers(1, 5), dtype=st.sampled_from(oracles.DTYPES))
def test_delta(size: int, legs: int, dtype: Any) -> None:
    got = network.delta(size, legs, dtype=dtype)
    assert got.dtype == dtype
    for place in itertools.product(range(size), repeat=legs):
        assert got[place] == (len(set(place)) == 1)


def test_deltas_fuse_and_make_diagonals() -> None:
    d3 = network.delta(3, 3)
    np.testing.assert_array_equal(np.tensordot(d3, d3, 1), network.delta(3, 4))
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
    np.testing.assert_array_equal(network.identity(sizes), rows_first)
    np.testing.assert_array_equal(network.identity(sizes).reshape(total, total), np.eye(total))
    flat = network.flattening(sizes)
    np.testing.assert_array_equal(np.tensordot(flat, flat, (-1, -1)), network.identity(sizes))
    np.testing.assert_array_equal(np.tensordot(flat, flat, (range(d), range(d))), np.eye(total))
    x = oracles.normal(sizes)
    np.testing.assert_array_equal(np.tensordot(x, flat, d), x.reshape(-1))
    assert network.is_isometry(flat, d)


@given(n=st.integers(1, 4), m=st.integers(1, 4))
def test_swap(n: int, m: int) -> None:
    s, x, y = network.swap(n, m), oracles.normal((n, 3)), oracles.normal((m, 2), seed=1)
    np.testing.assert_array_equal(
        np.kron(y, x), s.reshape(m * n, n * m) @ np.kron(x, y) @ network.swap(2, 3).reshape(6, 6)
    )
    np.testing.assert_array_equal(np.tensordot(network.swap(m, n), s, 2), network.identity((n, m)))


@pytest.mark.parametrize("dtype", oracles.DTYPES, ids=str)
def test_isometries(dtype: Any) -> None:
    u = oracles.isometry(24, 6, dtype).astype(dtype)
    for legs, a in (((3, 4), u.reshape(2, 3, 4, 2, 3)), ((0, 2), u.reshape(24, 2, 3).transpose(1, 0, 2))):
        assert network.is_isometry(a, legs)
        assert network.isometry_error(a, legs) <= 64 * oracles.eps(dtype)
        named = qtn.Tensor(a, "abcde"[: a.ndim])
        assert network.is_isometry(named, ["abcde"[k] for k in legs])
        others = [k for k in range(a.ndim) if k not in legs]
        assert network.isometry_error(a, others) == pytest.approx(math.sqrt(18), rel=1e-5)  # a projector is no identity
        assert not network.is_isometry(a, others)
        assert not network.is_isometry(a * dtype.type(1.5), legs)
    assert network.isometry_error(np.full((3, 2), 1e300), 1) == math.inf


def test_isometries_of_our_formats_and_of_a_mera() -> None:
    tt = tnlib.canonicalize(tnlib.tt_svd(oracles.normal((3, 4, 5, 2))).value, 1)
    tn = network.to_network(tt)
    assert network.is_isometry(tn["I0"], "bond1")
    assert network.is_isometry(tn["I2"], "bond2")
    assert not network.is_isometry(tn["I1"], "bond1")
    mera = qtn.MERA.rand(8, max_bond=3, seed=0)
    assert mera.num_tensors == 14
    for tensor in mera:
        tip = [i for i in tensor.inds if i not in tensor.left_inds]
        assert not tip or network.is_isometry(tensor, tip)


def test_bad_input() -> None:
    with oracles.refused(ValueError, "delta", "legs"):
        network.delta(3, 0)
    for size, legs in ((10**6, 9), (2, 80), (2, 10**5)):
        with oracles.refused(ValueError, "delta", f"{legs} legs", "as a train"):
            network.delta(size, legs)
    with oracles.refused(TypeError, "delta", "size"):
        network.delta(1.5, 2)
    for dtype in (float("nan"), "x", str, object):
        with oracles.refused(TypeError, "swap" if dtype is object else "delta", "dtype must be one of numbers"):
            network.swap(2, 3, dtype=dtype) if dtype is object else network.delta(2, 2, dtype=dtype)
    with oracles.refused(TypeError, "identity", "sizes"):
        network.identity(3)
    with oracles.refused(ValueError, "flattening", "sizes"):
        network.flattening(())
    with oracles.refused(ValueError, "swap", "m"):
        network.swap(2, 0)
    with oracles.refused(ValueError, "is_isometry", "legs", "not all"):
        network.is_isometry(np.eye(3), (0, 1))
    tensor = qtn.Tensor(np.eye(3), ["i", "j"])
    with oracles.refused(ValueError, "isometry_error", "legs", "k", "i, j"):
        network.isometry_error(tensor, "k")
    with oracles.refused(TypeError, "isometry_error", "legs", "i, j"):
        network.isometry_error(tensor, 0)
