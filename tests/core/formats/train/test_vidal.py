"""The Gamma-Lambda form: isometries, and the singular values of every unfolding."""

from __future__ import annotations

import math

import numpy as np
import oracles
import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_trains import SHAPES, assert_same_tensor, trains, unfolding

import tnlib


@given(trains(largest=345.0))
def test_vidal_form(tt: tnlib.TensorTrain) -> None:
    form = tnlib.vidal(tt)
    assert_same_tensor(form.train(), tt)
    if tt.log_norm() == -math.inf:
        return
    # the last gamma compensates the rounding of log_scale
    tolerance = 256 * oracles.eps(tt.dtype) * max(form.ranks) + 2 * np.finfo(float).eps * abs(form.log_scale)
    assert max(tnlib.isometry_errors(form.train())) <= tolerance  # L G is left-isometric
    for k, s in enumerate(form.lambdas):
        assert np.linalg.norm(s) == pytest.approx(1.0, abs=tolerance)
        assert (np.diff(s) <= 0).all()
        # G L is right-isometric as far as small Schmidt values were known when they were divided out
        right = form.gammas[k + 1] * (form.lambdas[k + 1] if k + 1 < len(form.lambdas) else np.ones(1))
        rows = right.reshape(len(right), -1)
        gap = np.abs(rows @ rows.conj().T - np.eye(len(rows)))
        assert (gap * np.minimum.outer(s, s) <= tolerance).all()
    assert form.log_scale == pytest.approx(tt.log_norm(), abs=tolerance)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@oracles.each_dtype
def test_lambdas_are_the_singular_values_of_every_unfolding(shape: tuple[int, ...], dtype: np.dtype) -> None:
    x = oracles.random_train(shape, [1, *[3] * (len(shape) - 1), 1], dtype)
    form = tnlib.vidal(tnlib.tt_svd(3 * x).value)
    assert form.log_scale == pytest.approx(math.log(3), abs=1e3 * oracles.eps(dtype))
    for bond, s in enumerate(form.lambdas, 1):
        want = np.linalg.svd(unfolding(oracles.wide(x), bond), compute_uv=False)
        np.testing.assert_allclose(s, want[: len(s)], atol=64 * oracles.eps(dtype))
        assert np.linalg.norm(want[len(s) :]) <= 64 * oracles.eps(dtype)


def test_vidal_of_one_tensor_is_the_same_from_any_of_its_trains() -> None:
    x = oracles.random_train((4, 5, 4, 3), (1, 3, 4, 2, 1))
    tt = tnlib.tt_svd(x).value
    turned = tnlib.canonicalize(tnlib.canonicalize(tt, 0), 2)
    for a, b in zip(tnlib.vidal(tt).arrays(), tnlib.vidal(turned).arrays(), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-11)


@pytest.mark.parametrize("dtype", [np.float64, np.complex64, np.complex128])
@given(seed=st.integers(0, 99))
def test_parts_of_a_vidal_form(dtype: np.dtype, seed: int) -> None:
    tt = tnlib.random.tensor_train((2, 3, 2), 2, dtype=dtype, rng=seed)
    form, dense = tnlib.vidal(tt), tt.full()
    for got, want in ((form.real, dense.real), (form.imag, dense.imag), (form.conj(), dense.conj())):
        assert isinstance(got, tnlib.Vidal)
        assert oracles.norm(got.full() - want) <= 500 * oracles.eps(dtype) * oracles.norm(dense)


def test_the_scale_of_a_vidal_form_is_finite() -> None:
    for scale in (1e13, math.inf, math.nan):
        with oracles.refused(ValueError, "Vidal: log_scale must lie between -1e12 and 1e12", str(scale), "zero cores"):
            tnlib.Vidal([np.ones((1, 2, 1))], [], scale)
