"""Free of scale: c times the input gives the same ranks, the same relative error and c times the result."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import oracles
import pytest
from format_cases import collinear_components, some
from slow_cases import mostly_slow

import tnlib

scales = pytest.mark.parametrize("c", mostly_slow([1e-200, 1e-100, 1e-30, 1e30, 1e100, 1e200], [1e-200, 1e30, 1e200]))
A, B, D = (oracles.normal((n, 3), seed=n) for n in (5, 6, 7))
CORE, WEIGHTS = oracles.normal((3, 3, 3)), np.array([3.0, -2.0, 1.0])
TERMS, SVD = some("factored", 4), tnlib.svd(A @ B.T).value


def terms(left: float, right: float) -> tnlib.KroneckerTerms:
    return tnlib.KroneckerTerms(left * TERMS.left, [tnlib.LowRank(right * b.left, b.right) for b in TERMS.right])


# c -> c times one tensor, the scale in one array, in two, or in two against each other
VALUES: dict[str, Callable[[float], Any]] = {
    "LowRank, left": lambda c: tnlib.LowRank(c * A, B.T),
    "LowRank, both": lambda c: tnlib.LowRank(math.sqrt(c) * A, math.sqrt(c) * B.T),
    "LowRank, against each other": lambda c: tnlib.LowRank(c**1.5 * A, c**-0.5 * B.T),
    "Tucker, core": lambda c: tnlib.Tucker(c * CORE, [A, B, D]),
    "Tucker, factors": lambda c: tnlib.Tucker(CORE, [math.sqrt(c) * A, math.sqrt(c) * B, D]),
    "Tucker, against each other": lambda c: tnlib.Tucker(c**1.5 * CORE, [A, c**-0.5 * B, D]),
    "CP, weights": lambda c: tnlib.CP(c * WEIGHTS, [A, B, D]),
    "CP, factors": lambda c: tnlib.CP(WEIGHTS, [math.sqrt(c) * A, math.sqrt(c) * B, D]),
    "CP, against each other": lambda c: tnlib.CP(c**1.5 * WEIGHTS, [A, c**-0.5 * B, D]),
    "SVD": lambda c: tnlib.SVD(SVD.u, c * SVD.s, SVD.vh),
    "TensorTrain": lambda c: tnlib.TensorTrain([c * A[None], CORE, D.T[:, :, None]]),
    "KroneckerTerms, left": lambda c: terms(c, 1.0),
    "KroneckerTerms, right": lambda c: terms(1.0, c),
    "KroneckerTerms, against each other": lambda c: terms(c**1.5, c**-0.5),
}


def assert_same_fit(got: Any, want: Any, c: float, factor: float, rel: float = 1e-10) -> None:
    assert got.value.ranks == want.value.ranks
    assert got.error == pytest.approx(want.error, rel=rel, abs=1e-14)
    assert got.converged == want.converged
    assert got.n_iter == want.n_iter
    oracles.assert_close(got.value.full() / c, want.value.full(), factor=factor)


@scales
@pytest.mark.parametrize("name", VALUES)
def test_verbs(name: str, c: float) -> None:
    value, plain = VALUES[name](c), VALUES[name](1.0)
    assert value.norm() == pytest.approx(c * plain.norm(), rel=1e-13)
    if not isinstance(value, tnlib.CP):
        for rtol in (0.3, 1e-10):
            assert_same_fit(tnlib.round(value, rtol=rtol), tnlib.round(plain, rtol=rtol), c, 1e3)
    if not isinstance(value, tnlib.SVD):
        assert tnlib.inner(value, plain) == pytest.approx(c * tnlib.inner(plain, plain), rel=1e-12)
    if not isinstance(value, tnlib.KroneckerTerms):
        for kind in (tnlib.TensorTrain, tnlib.Tucker, *([] if plain.ndim > 2 else [tnlib.SVD, tnlib.LowRank])):
            oracles.assert_close(tnlib.convert(value, kind).full() / c, plain.full(), factor=400)
        for verb in (tnlib.kron, tnlib.outer):
            oracles.assert_close(verb(value, plain).full() / c, verb(plain, plain).full(), factor=400)


TRAIN, GATE = tnlib.random.tensor_train((2,) * 6, 5, rng=1), oracles.normal((4, 4), seed=2)
DECAYING = oracles.contract(tnlib.CP(0.5 ** np.arange(7), [oracles.isometry(n, 7, seed=n) for n in (8, 7, 9)]))
HIDDEN = np.random.default_rng(0).random((8, 9, 10)) < 0.2


def known(x: np.ndarray) -> np.ma.MaskedArray:
    return np.ma.array(x, mask=HIDDEN)


FITS: dict[str, Callable[[float], Any]] = {
    "cp": lambda c: tnlib.cp(c * collinear_components((5, 6, 7), 3, 0.95, 0), 3),
    "cp of a core": lambda c: tnlib.cp(c * collinear_components((24, 24, 24), 3, 0.95, 0), 3),
    "cp of known entries": lambda c: tnlib.cp(known(c * oracles.random_cp((8, 9, 10), 2)), 2, rtol=1e-6),
    "tucker of known entries": lambda c: tnlib.tucker(
        known(c * oracles.random_tucker((8, 9, 10), (2, 2, 2))), max_rank=2, n_iter=1000, rtol=1e-6
    ),
    "ttm_svd of terms": lambda c: tnlib.ttm_svd(c * TERMS, (3, 5), (3, 4), rtol=0.2),
    "apply_gate": lambda c: tnlib.apply_gate(TRAIN, c * GATE, (2, 3), rtol=0.1),
    "round_randomized": lambda c: tnlib.round_randomized(c * tnlib.tt_svd(DECAYING).value, rtol=1e-2),
}


@scales
@pytest.mark.parametrize("name", mostly_slow(FITS, [*FITS][::2]))
def test_fits(name: str, c: float) -> None:
    got, want = FITS[name](c), FITS[name](1.0)
    if name in ("cp", "cp of a core"):  # of collinear components: the fit is exact, the path to it differs by roundoff
        assert max(got.error, want.error) < 1e-8
        assert got.value.norm() == pytest.approx(c * want.value.norm(), rel=1e-7)
    elif "known" in name:
        assert_same_fit(got, want, c, 1e6, rel=1e-3)
    else:
        assert_same_fit(got, want, c, 1e3, rel=1e-12)
