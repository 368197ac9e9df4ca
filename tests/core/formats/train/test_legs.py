"""Legs of trains split, joined and permuted, and operators on some legs, beside dense arrays."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import oracles
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tnlib

SHAPES = [((12, 10), (2, 6, 5, 2)), ((2, 3, 4), (24,)), ((6, 4), (8, 3)), ((4, 1, 9), (2, 2, 1, 3, 3)), ((5,), (5, 1))]
dtypes = st.sampled_from(oracles.DTYPES)


def train(shape: tuple[int, ...], dtype: Any = np.float64, rank: int = 3, seed: int = 0) -> Any:
    ranks = [1, *(min(rank, math.prod(shape[:k]), math.prod(shape[k:])) for k in range(1, len(shape))), 1]
    return tnlib.TensorTrain(oracles.random_cores(shape, tuple(ranks), dtype), exponent=seed)


def close(found: Any, want: np.ndarray) -> None:
    eps = np.finfo(found.dtype).eps
    assert found.dtype == want.dtype
    assert np.linalg.norm(found.full() - want) <= 1e3 * eps * np.linalg.norm(want)


@pytest.mark.parametrize(("old", "new"), [*SHAPES, *((new, old) for old, new in SHAPES)])
@oracles.each_dtype
def test_reshape_is_that_of_numpy(old: Any, new: Any, dtype: Any) -> None:
    tt = train(old, dtype)
    found = tnlib.reshape(tt, new)
    assert found.shape == new
    close(found, tt.full().reshape(new))


def test_reshape_of_operators_splits_rows_and_columns_together() -> None:
    cores = [oracles.normal((1, 6, 4, 3)), oracles.normal((3, 5, 2, 1), seed=1)]
    operator = tnlib.TTMatrix(cores)
    for shape in (((2, 3, 5), (2, 2, 2)), ((30,), (8,)), ((6, 5, 1), (2, 2, 2))):
        found = tnlib.reshape(operator, shape)
        assert (found.row_shape, found.col_shape) == shape
        close(found, operator.full())


def test_reshape_keeps_scales_beyond_the_dtype_and_smallest_ranks() -> None:
    tt = tnlib.TensorTrain([np.linspace(0, 1, 2**12).reshape(1, -1, 1)], exponent=5000)
    bits = tnlib.reshape(tt, (2,) * 12)
    assert bits.ranks == (1, *(2,) * 11, 1)
    assert bits.log_norm() == pytest.approx(tt.log_norm(), rel=1e-12)


@given(order=st.permutations(range(5)), dtype=dtypes)
def test_permute_is_transpose(order: list[int], dtype: Any) -> None:
    tt = train((2, 3, 4, 2, 3), dtype)
    found = tnlib.permute(tt, order)
    close(found, tt.full().transpose(order))
    assert found.center is None or max(tnlib.isometry_errors(found)) < 1e4 * np.finfo(tt.dtype).eps


def test_permute_of_operators_keeps_rows_and_columns_together() -> None:
    operator = tnlib.TTMatrix([oracles.normal((1, n, n + 1, 1), seed=n) for n in (1, 2, 3)])
    found = tnlib.permute(operator, (2, 0, 1))
    assert (found.row_shape, found.col_shape) == ((3, 1, 2), (4, 2, 3))
    dense = operator.full().reshape(1, 2, 3, 2, 3, 4).transpose(2, 0, 1, 5, 3, 4).reshape(6, 24)
    close(found, dense)


@pytest.mark.parametrize("legs", [*itertools.combinations(range(4), 2), (3, 0), (2,), (0, 1, 3), (3, 0, 2)])
def test_embedded_operators_are_those_of_the_dense_matrix(legs: tuple[int, ...]) -> None:
    shape = (2, 3, 2, 3)
    tt = train(shape)
    sizes = [shape[k] for k in legs]
    gate = oracles.normal((math.prod(sizes),) * 2)
    want = np.tensordot(gate.reshape(sizes * 2), tt.full(), axes=(range(len(legs), 2 * len(legs)), legs))
    want = np.moveaxis(want, range(len(legs)), legs)
    for split in (gate, tnlib.ttm_svd(gate, sizes, sizes).value):
        operator = tnlib.embed(split, legs, shape)
        close(tnlib.apply(operator, tt).value, want)
        dense = np.vdot(tt.full(), want) / tt.norm() ** 2
        assert tnlib.expectation(tt, operator) == pytest.approx(dense, rel=1e-10)
        assert tnlib.expectation(tt, split, legs) == pytest.approx(dense, rel=1e-10)
    if len(legs) <= 2:
        close(tnlib.apply_gate(tt, gate, legs).value, want)


@given(dtype=dtypes, seed=st.integers(0, 9))
def test_correlations_are_those_of_the_dense_state(dtype: Any, seed: int) -> None:
    tt = train((3,) * 4, dtype, seed=-2000 * (seed % 2))
    a, b = (oracles.normal((3, 3), np.complex128, seed=seed + k).astype(np.complex128) for k in range(2))
    found, x = tnlib.correlation(tt, a, b), tnlib.TensorTrain(tt.cores).full().astype(np.complex128)
    for i, j in itertools.product(range(4), repeat=2):
        y = np.moveaxis(np.tensordot(b, x, axes=([1], [j])), 0, j)
        y = np.moveaxis(np.tensordot(a, y, axes=([1], [i])), 0, i)
        want = np.vdot(x, y) / np.vdot(x, x).real
        assert abs(found[i, j] - want) <= 1e4 * np.finfo(tt.dtype).eps * np.linalg.norm(a) * np.linalg.norm(b)
    assert np.allclose(np.diagonal(tnlib.correlation(tt, a)).imag, 0, atol=1e-4)
    assert tnlib.expectation(tt, a, 2) == pytest.approx(tnlib.correlation(tt, a, np.eye(3))[2, 0], abs=1e-4)


@given(dtype=dtypes, seed=st.integers(0, 9), center=st.sampled_from([None, 0, 2, 3]))
def test_expectation_values_at_all_legs_are_those_at_each(dtype: Any, seed: int, center: int | None) -> None:
    tt = train((3,) * 4, dtype, seed=-2000 * (seed % 2))
    tt = tt if center is None else tnlib.canonicalize(tt, center)
    a = oracles.normal((3, 3), np.complex128, seed=seed).astype(np.complex128)
    for operator in (a, a + a.conj().T):
        found = tnlib.expectation(tt, operator)
        each = [tnlib.expectation(tt, operator, k) for k in range(4)]
        np.testing.assert_allclose(found, each, atol=1e4 * np.finfo(tt.dtype).eps * np.linalg.norm(operator))
        assert np.iscomplexobj(found) == np.iscomplexobj(each) == (operator is a)
    sizes = train((2, 3, 1, 2), dtype, seed=seed)
    operators = [oracles.normal((n, n), seed=seed + n) for n in sizes.shape]
    each = [tnlib.expectation(sizes, operators[k], k) for k in range(4)]
    np.testing.assert_allclose(tnlib.expectation(sizes, operators), each, atol=1e5 * np.finfo(sizes.dtype).eps)


def test_correlations_between_legs_of_different_sizes() -> None:
    tt = train((2, 3, 2))
    spins = [np.diag(np.arange(n) - (n - 1) / 2) for n in tt.shape]
    pairs = tnlib.correlation(tt, spins)
    assert pairs[0, 1] == pytest.approx(tnlib.expectation(tt, np.kron(spins[0], spins[1]), (0, 1)), rel=1e-10)
    assert pairs[2, 1] == pytest.approx(tnlib.expectation(tt, np.kron(spins[2], spins[1]), (2, 1)), rel=1e-10)
    assert pairs[1, 1] == pytest.approx(tnlib.expectation(tt, spins[1] @ spins[1], 1), rel=1e-10)


def test_what_does_not_fit_is_refused() -> None:
    tt, operator = train((2, 3, 2)), tnlib.eye((2, 3, 2))
    calls: list[tuple[Any, str]] = [
        (lambda: tnlib.reshape(tt, (5, 2)), "multiply to 12"),
        (lambda: tnlib.reshape(operator, (12, 12)), "pair"),
        (lambda: tnlib.reshape(operator, ((12,), (6, 2))), "as many row legs"),
        (lambda: tnlib.reshape(np.ones(4), (2, 2)), "tt"),
        (lambda: tnlib.permute(tt, (0, 1)), "all 3 legs"),
        (lambda: tnlib.diag(tnlib.TTMatrix([np.ones((1, 2, 3, 1))])), "same sizes"),
        (lambda: tnlib.embed(np.eye(3), 0, (2, 3)), "sizes"),
        (lambda: tnlib.embed(operator, (0, 1), (2, 3, 2)), "one for each core"),
        (lambda: tnlib.embed(np.eye(6), (0, 2), (2, 3, 2)), "square"),
        (lambda: tnlib.embed(tt, (0, 1, 2), (2, 3, 2)), "tnlib.diag"),
        (lambda: tnlib.expectation(tt, tnlib.eye((2, 2, 3))), "(2, 3, 2)"),
        (lambda: tnlib.expectation(tnlib.zeros((2, 2)), np.eye(2), 0), "zero"),
        (lambda: tnlib.expectation(tt, np.eye(2)), "expectation: operator must be square, of 12 rows"),
        (lambda: tnlib.expectation(tt, [np.eye(2), np.eye(3)]), "expectation: operator must be (n, n) for each leg"),
        (lambda: tnlib.expectation(train((2, 2, 2)), np.eye(2), range(3)), "leave legs out"),
        (lambda: tnlib.correlation(tt, np.eye(2)), "for each leg"),
        (lambda: tnlib.correlation(train((2, 2)), np.eye(2), string=np.eye(3)), "correlation: string must be (n, n)"),
        (lambda: tnlib.correlation(tt, [np.eye(2), np.eye(3)]), "for each leg"),
    ]
    for call, words in calls:
        with oracles.refused(Exception, words):
            call()
