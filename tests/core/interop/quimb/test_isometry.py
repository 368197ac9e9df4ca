"""Isometric tensors."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import oracles
import pytest
import quimb.tensor as qtn

import tnlib
from tnlib.interop import quimb


@pytest.mark.parametrize("dtype", oracles.DTYPES, ids=str)
def test_isometries(dtype: Any) -> None:
    u = oracles.isometry(24, 6, dtype).astype(dtype)
    for legs, a in (((3, 4), u.reshape(2, 3, 4, 2, 3)), ((0, 2), u.reshape(24, 2, 3).transpose(1, 0, 2))):
        assert quimb.is_isometry(a, legs)
        assert quimb.isometry_error(a, legs) <= 64 * oracles.eps(dtype)
        named = qtn.Tensor(a, "abcde"[: a.ndim])
        assert quimb.is_isometry(named, ["abcde"[k] for k in legs])
        others = [k for k in range(a.ndim) if k not in legs]
        assert quimb.isometry_error(a, others) == pytest.approx(math.sqrt(18), rel=1e-5)  # a projector is no identity
        assert not quimb.is_isometry(a, others)
        assert not quimb.is_isometry(a * dtype.type(1.5), legs)
    assert quimb.isometry_error(np.full((3, 2), 1e300), 1) == math.inf


def test_isometries_of_our_formats_and_of_a_mera() -> None:
    tt = tnlib.canonicalize(tnlib.tt_svd(oracles.normal((3, 4, 5, 2))).value, 1)
    tn = quimb.to_network(tt)
    assert quimb.is_isometry(tn["I0"], "bond1")
    assert quimb.is_isometry(tn["I2"], "bond2")
    assert not quimb.is_isometry(tn["I1"], "bond1")
    mera = qtn.MERA.rand(8, max_bond=3, seed=0)
    assert mera.num_tensors == 14
    for tensor in mera:
        tip = [i for i in tensor.inds if i not in tensor.left_inds]
        assert not tip or quimb.is_isometry(tensor, tip)


def test_bad_input() -> None:
    with oracles.refused(ValueError, "is_isometry", "legs", "not all"):
        quimb.is_isometry(np.eye(3), (0, 1))
    tensor = qtn.Tensor(np.eye(3), ["i", "j"])
    with oracles.refused(ValueError, "isometry_error", "legs", "k", "i, j"):
        quimb.isometry_error(tensor, "k")
    with oracles.refused(TypeError, "isometry_error", "legs", "i, j"):
        quimb.isometry_error(tensor, 0)
    with oracles.refused(ValueError, "isometry_error", "finite"):
        quimb.isometry_error(np.full((2, 2), np.nan), 0)
