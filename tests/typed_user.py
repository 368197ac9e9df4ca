"""A user's file: `make check` runs mypy --strict over it, so that stubs and constructors fit what people write."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import tnlib_adapters

import tnlib


def formats(a: npt.NDArray[np.float64], b: npt.NDArray[np.float64]) -> list[tuple[int, ...]]:
    train = tnlib.TensorTrain([a, b])
    matrix = tnlib.TTMatrix([a, b], center=0)
    tucker = tnlib.Tucker(a, [b, b, b])
    cp = tnlib.CP(np.ones(2), [a, b])
    terms = tnlib.KroneckerTerms(a, [tnlib.LowRank(a, b), b])
    return [one.ranks for one in (train, matrix, tucker, cp, terms)]


def fits(x: npt.NDArray[np.float32]) -> tuple[float, bool]:
    fit: tnlib.Fit[tnlib.TensorTrain] = tnlib.tt_svd(x, rtol=1e-6)
    u, s, vh = tnlib.svd(x, left=[0, 1], max_rank=3).value
    tnlib.save("train.safetensors", fit.value)
    best = tnlib.cp(x, 2, n_starts=3, rng=np.random.default_rng(1))
    return float(u.sum() + s[0] + vh[0, 0]) + best.error, fit.converged


def streams(slabs: Iterator[npt.NDArray[np.float64]]) -> tuple[float, tuple[int, ...]]:
    stream = tnlib.SlabStream(slabs, (100, 20, 20), np.float64)
    fit: tnlib.Fit[tnlib.TensorTrain] = tnlib.tt_svd(stream, max_rank=8, rtol=1e-3)
    return fit.error, tnlib.tucker(stream, max_rank=8, storage=tnlib.Storage(memory=2**30)).value.ranks


def gauges(train: tnlib.TensorTrain, low: tnlib.LowRank, cp: tnlib.CP) -> tuple[float, tnlib.CP, int]:
    groups: list[list[slice]] = tnlib.degenerate_groups(train, rtol=1e-8)
    fixed: tnlib.TensorTrain = tnlib.canonical_form(train, groups=groups)
    basis = tnlib.canonical_basis(np.eye(3), tnlib.degenerate_groups(np.ones(3)))
    found = tnlib.match(cp, cp, weight_penalty=False)
    return tnlib.nearest_tie(fixed) + found.score, found.value, len(basis) + tnlib.balance(low, power=0).ranks[0]


def adapters() -> tuple[tuple[int, int], tuple[int, int], float]:
    layer = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path()).attention(0)
    layer = tnlib_adapters.fix_gauge(layer)
    terms, constant = layer.frozen(np.ones((4, 3, 3)) / 3)
    return layer.qk(0).shape, terms.shape, float(constant[0, 0])


def calculus(a: tnlib.TensorTrain, operator: tnlib.TTMatrix) -> tuple[float, tnlib.CP]:
    product: tnlib.TensorTrain = operator @ a
    square: tnlib.TTMatrix = operator @ operator
    fit: tnlib.Fit[tnlib.TensorTrain] = tnlib.apply(square, a, rtol=1e-8)
    total: tnlib.TensorTrain = tnlib.round(2 * fit.value + product * a - a / 3, rtol=1e-6).value
    cp: tnlib.CP = tnlib.convert(total, tnlib.CP)
    low = tnlib.LowRank(np.ones((2, 1)), np.ones((1, 2)))
    return tnlib.distance(total, a) + abs(tnlib.inner(a, a, operator)) + (low @ low).norm(), cp
