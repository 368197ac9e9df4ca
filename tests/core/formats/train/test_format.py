"""TensorTrain: the scale of the cores, parts, transposes."""

from __future__ import annotations

import math

import numpy as np
import oracles
from hypothesis import given
from random_trains import assert_same_tensor, wild_trains

import tnlib


@given(wild_trains())
def test_cores_are_in_range_and_the_norm_is_that_of_the_array(tt: tnlib.TensorTrain) -> None:
    for core in tt.cores:
        top = float(np.abs(core).max())
        assert top == 0 or 1e-140 < top < 1e140
    plain = tnlib.TensorTrain(tt.cores)
    want = oracles.norm(oracles.wide(plain.full()))
    assert abs(plain.norm() - want) <= 1000 * oracles.eps(tt.dtype) * want
    assert plain.norm() == 0 or abs(tt.log_norm() - tt.exponent * math.log(2) - math.log(plain.norm())) <= 1e-6


@given(wild_trains())
def test_parts_and_transposes(tt: tnlib.TensorTrain) -> None:
    tt = tnlib.TensorTrain(tt.cores)
    dense = tt.full()
    slack = 64 * oracles.eps(tt.dtype) * len(tt.cores) * max(tt.norm(), 1e-300)
    for got, want in ((tt.real, dense.real), (tt.imag, dense.imag), (tt.conj(), dense.conj()), (tt.T, dense.T)):
        assert oracles.norm(oracles.wide(got.full()) - oracles.wide(want)) <= slack
    assert_same_tensor(tt.T.T, tt)
