"""Trains with more ranks than they need, and the contract of rounding."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import oracles

import tnlib

TOLERANCES = [None, 1e-13, 1e-10, 1e-7, 1e-4, 0.01, 0.1, 0.5, 1.0]
SHAPES = [(4, 5, 6, 3), (2,) * 9, (6, 1, 7, 1), (5,), (1, 1, 1), (3, 8), (16, 4, 16)]


def geometric(shape: Sequence[int], ratio: float = 0.3, dtype: Any = np.float64) -> np.ndarray:
    """Every unfolding has singular values ratio ** k, as many as its legs allow: ranks and gauge are well defined."""
    count = min((n for n in shape if n > 1), default=1)
    legs = [oracles.isometry(n, count, dtype, seed=k) if n > 1 else np.ones((1, count)) for k, n in enumerate(shape)]
    weights = ratio ** np.arange(count)
    if not any(n > 1 for n in shape):
        weights = weights[:1]
    return oracles.contract(tnlib.CP(weights, legs)).astype(dtype)


def exact_train(x: np.ndarray, dtype: Any = None) -> tnlib.TensorTrain:
    """A train of `x` without truncation, by QR: its roundoff stays well below the noise level, unlike that of SVDs."""
    cores, rest = [], oracles.wide(x).reshape(1, -1)
    for n in x.shape[:-1]:
        q, r = np.linalg.qr(rest.reshape(len(rest) * n, -1))
        cores.append(q.reshape(len(rest), n, -1))
        rest = r
    cores.append(rest.reshape(len(rest), x.shape[-1], 1))
    return tnlib.TensorTrain([core.astype(dtype or x.dtype) for core in cores])


def regauged(t: tnlib.TensorTrain, seed: int = 0) -> tnlib.TensorTrain:
    """The same tensor with a well conditioned matrix and its inverse between all cores."""
    cores = [core.copy() for core in t.cores]
    for k in range(1, len(cores)):
        m = oracles.isometry(cores[k].shape[0], cores[k].shape[0], t.dtype, seed + k) * np.linspace(
            0.5, 2, cores[k].shape[0]
        )
        cores[k - 1] = np.tensordot(cores[k - 1], m, 1)
        cores[k] = np.tensordot(np.linalg.inv(m), cores[k], 1)
    return tnlib.TensorTrain(cores)


def padded(t: tnlib.TensorTrain, more: int = 3) -> tnlib.TensorTrain:
    """The same tensor with `more` dead entries on every bond: zeros on one side, anything on the other."""
    cores = []
    for k, core in enumerate(t.cores):
        left, right = (more if k > 0 else 0), (more if k < len(t.cores) - 1 else 0)
        wider = np.zeros((core.shape[0] + left, core.shape[1], core.shape[2] + right), core.dtype)
        wider[: core.shape[0], :, : core.shape[2]] = core
        if right:
            wider[:, :, core.shape[2] :] = oracles.normal((wider.shape[0], core.shape[1], right), core.dtype, seed=k)
        cores.append(wider)
    return tnlib.TensorTrain(cores)


def plus(a: tnlib.TensorTrain, b: tnlib.TensorTrain, sign: float = 1.0) -> tnlib.TensorTrain:
    """a + sign * b, ranks added."""
    if len(a.cores) == 1:
        return tnlib.TensorTrain([a.cores[0] + sign * b.cores[0]])
    cores = []
    for k, (one, other) in enumerate(zip(a.cores, b.cores, strict=True)):
        rows, columns = (k > 0) * one.shape[0], (k < len(a.cores) - 1) * one.shape[2]
        total = np.zeros((rows + other.shape[0], one.shape[1], columns + other.shape[2]), np.result_type(one, other))
        total[: one.shape[0], :, : one.shape[2]] += one
        total[rows:, :, columns:] += other * (sign if k == 0 else 1)
        cores.append(total)
    return tnlib.TensorTrain(cores)


def as_matrix(t: tnlib.TensorTrain) -> tnlib.TTMatrix:
    """Split every leg in two, the first factor as large as it goes below its root."""
    cores = []
    for core in t.cores:
        m = next(m for m in range(math.isqrt(core.shape[1]), 0, -1) if core.shape[1] % m == 0)
        cores.append(core.reshape(core.shape[0], m, -1, core.shape[2]))
    return tnlib.TTMatrix(cores)


def dense(t: Any) -> np.ndarray:
    """The dense array in double precision, whatever precisions meet in `t`."""
    return oracles.wide(t.astype(np.result_type(t.dtype, np.float64)).full())


def check(t: Any, rtol: float | None, cap: int | None = None) -> Any:
    """Round `t` and hold the contract on the dense arrays."""
    with oracles.unchanged(*t.arrays()):
        fit, warned = oracles.quietly(lambda: tnlib.round(t, rtol=rtol, max_rank=cap))
    oracles.assert_fit(fit, dense(t), rtol=rtol)
    oracles.assert_warned(fit, warned)
    assert type(fit.value) is type(t)
    assert fit.value.dtype == t.dtype
    assert fit.n_iter == 0
    if isinstance(t, tnlib.LowRank):
        oracles.assert_isometric(fit.value.right.conj().T)
    else:
        oracles.assert_gauge(fit.value)
    if cap is None:
        assert fit.converged
    else:
        assert max(fit.value.ranks) <= max(1, cap)
    return fit
