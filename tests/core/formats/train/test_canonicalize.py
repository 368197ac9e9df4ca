"""Gauges of trains: what stays the same, what becomes isometric, and what a bond carries."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import oracles
import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_trains import assert_same_tensor, trains

import tnlib


@given(trains(largest=345.0), st.data())
def test_any_train_at_any_centre(tt: tnlib.TensorTrain, data: st.DataObject) -> None:
    center = data.draw(st.integers(0, len(tt.cores) - 1))
    with oracles.unchanged(*tt.cores):
        mixed = tnlib.canonicalize(tt, center)
    assert mixed.center == center
    assert mixed.dtype == tt.dtype
    assert_same_tensor(mixed, tt)
    errors = tnlib.isometry_errors(mixed)
    assert max(errors) <= 64 * oracles.eps(tt.dtype) * max(mixed.ranks)
    assert errors[center] == 0.0
    assert all(new <= old for new, old in zip(mixed.ranks, tt.ranks, strict=True))
    # the norm is that of the centre
    size = (
        math.log(oracles.norm(mixed.cores[center])) + mixed.log_scale
        if oracles.norm(mixed.cores[center])
        else -math.inf
    )
    assert size == pytest.approx(tt.log_norm(), abs=1e3 * oracles.eps(tt.dtype))


@given(trains(largest=345.0), st.data())
def test_a_known_centre_moves_by_the_cores_in_between_alone(tt: tnlib.TensorTrain, data: st.DataObject) -> None:
    start, stop = (data.draw(st.integers(0, len(tt.cores) - 1)) for _ in range(2))
    mixed = tnlib.canonicalize(tt, start)
    moved = tnlib.canonicalize(mixed, stop)
    for k in range(len(tt.cores)):
        if not min(start, stop) <= k <= max(start, stop):
            assert np.array_equal(moved.cores[k], mixed.cores[k])
    assert max(tnlib.isometry_errors(moved)) <= 64 * oracles.eps(tt.dtype) * max(mixed.ranks)
    assert_same_tensor(moved, tt)


@oracles.each_dtype
def test_operators_have_centres_too(dtype: np.dtype) -> None:
    cores = [oracles.normal(shape, dtype, k) for k, shape in enumerate([(1, 2, 3, 4), (4, 3, 2, 5), (5, 2, 2, 1)])]
    operator = tnlib.TTMatrix(cores)
    for center in range(3):
        mixed = tnlib.canonicalize(operator, center)
        assert mixed.row_shape, mixed.col_shape == (operator.row_shape, operator.col_shape)
        oracles.assert_close(mixed.full(), operator.full(), dtype)
        assert max(tnlib.isometry_errors(mixed)) <= 64 * oracles.eps(dtype) * 5
    assert len(tnlib.schmidt_values(operator, 1)) == 4


@pytest.mark.slow
def test_a_thousand_cores_neither_overflow_nor_lose_their_norm() -> None:
    for size in (1e-3, 1e3):
        cores = [size * oracles.normal((1 if k == 0 else 8, 4, 1 if k == 999 else 8), seed=k) for k in range(1000)]
        tt = tnlib.TensorTrain(cores)
        for center in (0, 999):
            mixed = tnlib.canonicalize(tt, center)
            assert max(tnlib.isometry_errors(mixed)) < 1e-13
            assert mixed.log_norm() == pytest.approx(tt.log_norm(), rel=1e-12)
        form = tnlib.vidal(tt)
        assert form.log_scale == pytest.approx(tt.log_norm(), rel=1e-12)


def test_zero_trains_have_gauges() -> None:
    zero = tnlib.TensorTrain([np.zeros((1, 3, 2)), np.zeros((2, 4, 2)), np.zeros((2, 3, 1))])
    mixed = tnlib.canonicalize(zero, 1)
    assert not mixed.full().any()
    assert max(tnlib.isometry_errors(mixed)) < 1e-15
    form = tnlib.vidal(zero)
    assert not form.full().any()
    assert form.ranks == (1, 1, 1, 1)
    assert not tnlib.schmidt_values(zero, 1).any()
    assert tnlib.entropy(zero, 2) == 0.0
    assert tnlib.truncate_bond(zero, 1).value.ranks[1] == 1


@pytest.mark.parametrize("dtype", [np.float64, np.complex64])
def test_isometry_errors_are_those_of_the_stored_cores(dtype: Any) -> None:
    mixed = tnlib.canonicalize(tnlib.TensorTrain(oracles.random_cores((3, 2, 4), (1, 3, 4, 1), dtype)), 2)
    for factor, least in (
        (3.0, 8.0),
        (1 / 3, 0.8),
    ):  # norm(Q^H Q - 1) = |factor^2 - 1| sqrt(columns) of a multiple of Q
        cores = [mixed.cores[0], mixed.cores[1] * dtype(factor), mixed.cores[2]]
        assert tnlib.isometry_errors(tnlib.TensorTrain(cores, 2))[1] >= least
    assert max(tnlib.isometry_errors(tnlib.TensorTrain(mixed.cores, 2, log_scale=1e4))) < 1e3 * oracles.eps(dtype)


def test_what_is_wrong_is_said() -> None:
    tt = tnlib.tt_svd(oracles.normal((3, 4, 5))).value
    for wrong in (3, 17):
        with oracles.refused(ValueError, "canonicalize", "center", "3 cores", str(wrong)):
            tnlib.canonicalize(tt, wrong)
        with oracles.refused(ValueError, "schmidt_values", "bond", "1 and 2", str(wrong)):
            tnlib.schmidt_values(tt, wrong)
    for bond in (0, -1):
        with oracles.refused(ValueError, "entropy", "bond", str(bond)):
            tnlib.entropy(tt, bond)
    with oracles.refused(ValueError, "entropy", "2 cores", "got 1"):
        tnlib.entropy(tnlib.TensorTrain([np.ones((1, 3, 1))]), 1)
    for dtype in (np.float64, np.complex64):
        large = tnlib.TensorTrain([np.ones((1, 2, 1), dtype)] * 2, log_scale=1e3)
        with oracles.refused(ValueError, "schmidt_values", "range", np.finfo(dtype).dtype.name):
            tnlib.schmidt_values(large, 1)
    with oracles.refused(TypeError, "canonicalize", "center", "1.5"):
        tnlib.canonicalize(tt, 1.5)  # type: ignore[arg-type]
    with oracles.refused(TypeError, "vidal", "TensorTrain", "ndarray"):
        tnlib.vidal(np.eye(3))  # type: ignore[arg-type]
    with oracles.refused(TypeError, "truncate_bond", "TTMatrix", "Tucker"):
        tnlib.truncate_bond(tnlib.tucker(np.ones((2, 2))).value, 1)  # type: ignore[type-var]
    with oracles.refused(ValueError, "entropy", "order", "-1"):
        tnlib.entropy(tt, 1, order=-1)
    with oracles.refused(ValueError, "entropy", "order", "nan"):
        tnlib.entropy(tt, 1, order=math.nan)
    for base in (0, 0.5, 1, math.inf):
        with oracles.refused(ValueError, "entropy", "base"):
            tnlib.entropy(tt, 1, base=base)
    with oracles.refused(TypeError, "entropy", "base", "'2'"):
        tnlib.entropy(tt, 1, base="2")  # type: ignore[arg-type]
    with oracles.refused(ValueError, "isometry_errors", "center", "None"):
        tnlib.isometry_errors(tnlib.TensorTrain(tt.cores))
    with oracles.refused(ValueError, "correlation_length", "equal", "(2, 3, 4)"):
        tnlib.correlation_length(np.ones((2, 3, 4)))
    with oracles.refused(ValueError, "correlation_length", "finite"):
        tnlib.correlation_length(np.full((2, 2, 2), np.nan))
    with oracles.refused(ValueError, "Vidal", "lambda 0", "positive"):
        tnlib.Vidal([np.ones((1, 2, 2)), np.ones((2, 2, 1))], [np.array([1.0, 0.0])])
    with oracles.refused(ValueError, "Vidal", "lambdas", "bonds"):
        tnlib.Vidal([np.ones((1, 2, 2)), np.ones((2, 2, 1))], [np.ones(3)])
