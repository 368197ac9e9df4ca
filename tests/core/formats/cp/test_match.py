"""Matching two CPs: optimal where greed is not, by the score of the literature, beside tensorly and pyttb."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import oracles
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tnlib


def random_cp(rank: int, shape: tuple[int, ...] = (5, 6, 7), dtype: Any = np.float64, seed: int = 0) -> tnlib.CP:
    weights = np.abs(oracles.normal((rank,), seed=seed)).astype(np.zeros(0, dtype).real.dtype) + 1
    return tnlib.CP(weights, [oracles.normal((n, rank), dtype, seed + n) for n in shape])


def shuffled(cp: tnlib.CP, seed: int) -> tuple[tnlib.CP, np.ndarray]:
    """The same tensor: components in another order, columns of other lengths and phases."""
    order = np.random.default_rng(seed).permutation(len(cp.weights))
    scales = [oracles.normal(cp.weights.shape, cp.dtype, seed + k) for k in range(len(cp.factors))]
    weights = cp.weights / np.prod(scales, axis=0)
    return tnlib.CP(weights[order], [(f * s)[:, order] for f, s in zip(cp.factors, scales, strict=True)]), order


def scores(a: tnlib.CP, b: tnlib.CP, weight_penalty: bool) -> np.ndarray:
    """The score of every pair, from its definition."""
    out = np.ones((len(a.weights), len(b.weights)))
    for i, j in itertools.product(*map(range, out.shape)):
        w, v = abs(a.weights[i]), abs(b.weights[j])
        for x, y in zip(a.factors, b.factors, strict=True):
            p, q = np.linalg.norm(x[:, i]), np.linalg.norm(y[:, j])
            out[i, j] *= abs(np.vdot(x[:, i], y[:, j])) / (p * q)
            w, v = w * p, v * q
        out[i, j] *= 1 - abs(w - v) / max(w, v) if weight_penalty else 1
    return out


def best_of_all(table: np.ndarray) -> float:
    table = table if table.shape[0] >= table.shape[1] else table.T
    n = table.shape[1]
    return max(table[list(rows), range(n)].mean() for rows in itertools.permutations(range(len(table)), n))


@given(
    st.integers(1, 5),
    st.integers(1, 5),
    st.sampled_from(oracles.DTYPES),
    st.booleans(),
    st.integers(0, 999),
)
def test_no_pairing_scores_more(rank: int, other: int, dtype: np.dtype, weight_penalty: bool, seed: int) -> None:
    a, b = random_cp(rank, (3, 4, 2), dtype, seed), random_cp(other, (3, 4, 2), dtype, seed + 50)
    with oracles.unchanged(*a.arrays(), *b.arrays()):
        found = tnlib.match(a, b, weight_penalty=weight_penalty)
    table = scores(a, b, weight_penalty)
    tolerance = 100 * oracles.eps(dtype)
    assert found.score == pytest.approx(best_of_all(table), abs=tolerance)
    pairs = min(rank, other)
    assert found.partners.shape == found.congruences.shape == (pairs,)
    assert found.score == pytest.approx(table[found.permutation[:pairs], found.partners].mean(), abs=tolerance)
    np.testing.assert_allclose(
        found.congruences, scores(a, b, False)[found.permutation[:pairs], found.partners], atol=tolerance
    )
    assert sorted(found.permutation) == list(range(rank))
    assert (np.diff(found.partners) > 0).all()
    # still the first tensor, in unit columns
    assert found.value.dtype == dtype
    size = oracles.norm(found.value.weights)
    assert oracles.norm(oracles.wide(found.value.full()) - oracles.contract(a)) <= tolerance * size
    for factor in found.value.factors:
        np.testing.assert_allclose(np.linalg.norm(oracles.wide(factor), axis=0), 1, rtol=tolerance)
    assert (found.value.weights >= 0).all()
    # cosines with the partners are positive, but for one factor of each component at most: the least alike
    unit = tnlib.match(b, b).value
    for j, partner in enumerate(found.partners):
        cosines = [np.vdot(x[:, j], y[:, partner]) for x, y in zip(found.value.factors, unit.factors, strict=True)]
        off = [k for k, c in enumerate(cosines) if abs(c - abs(c)) > tolerance]
        assert off in ([], [int(np.argmin(np.abs(cosines)))])


@oracles.each_dtype
@pytest.mark.parametrize("weight_penalty", [True, False])
def test_one_cp_in_two_gauges_matches_itself(dtype: np.dtype, weight_penalty: bool) -> None:
    a = random_cp(6, dtype=dtype)
    b, order = shuffled(a, 3)
    found = tnlib.match(b, a, weight_penalty=weight_penalty)
    assert found.score == pytest.approx(1, abs=200 * oracles.eps(dtype))
    assert (order[found.permutation] == np.arange(6)).all()
    one = tnlib.match(a, a).value
    for x, y in zip(found.value.arrays(), one.arrays(), strict=True):
        oracles.assert_close(x, y, dtype, 200)


def test_a_greedy_pairing_is_beaten() -> None:
    """The best single pair is not part of the best pairing."""
    angle = np.deg2rad

    def columns(*degrees: float) -> np.ndarray:
        return np.array([[np.cos(angle(d)), np.sin(angle(d))] for d in degrees]).T

    a, b = tnlib.CP(np.ones(2), [columns(0, 30)] * 3), tnlib.CP(np.ones(2), [columns(25, 70)] * 3)
    found = tnlib.match(a, b)
    table = scores(a, b, True)
    assert np.argmax(table) == 2  # 30 beside 25
    assert found.permutation.tolist() == [0, 1]
    assert found.score > (table[1, 0] + table[0, 1]) / 2


def test_scores_beside_pyttb() -> None:
    pyttb = pytest.importorskip("pyttb")
    for seed, weight_penalty in itertools.product(range(5), (True, False)):
        a = random_cp(5, seed=seed)
        b = tnlib.CP(
            a.weights[:4] * 1.3, [f[:, :4] + 0.2 * oracles.normal((len(f), 4), seed=k) for k, f in enumerate(a.factors)]
        )
        theirs = [pyttb.ktensor([np.array(f) for f in t.factors], np.array(t.weights)) for t in (a, b)]
        score, _, _, order = theirs[0].score(theirs[1], weight_penalty=weight_penalty)
        found = tnlib.match(a, b, weight_penalty=weight_penalty)
        assert found.score >= score - 1e-12  # theirs is greedy
        if list(found.permutation) == list(order):
            assert found.score == pytest.approx(score, rel=1e-12)
        else:
            assert found.score > score
    assert list(found.permutation) == list(order), "no case in which both pair alike"


def test_congruence_beside_tensorly() -> None:
    factors = pytest.importorskip("tensorly.metrics.factors")
    for seed in range(10):
        a, b = random_cp(5, seed=seed), random_cp(5, seed=seed + 40)
        mean, order = factors.congruence_coefficient(list(b.factors), list(a.factors))
        found = tnlib.match(a, b, weight_penalty=False)
        assert found.score == pytest.approx(float(mean), rel=1e-12)
        assert [int(k) for k in order] == found.permutation.tolist()


@pytest.mark.parametrize("scale", [1e-150, 1e150])
def test_scale_matters_where_weights_do(scale: float) -> None:
    a, b = random_cp(3, seed=1), random_cp(3, seed=2)
    plain = tnlib.match(a, b)
    both = tnlib.match(*(tnlib.CP(t.weights * scale, t.factors) for t in (a, b)))
    assert both.score == pytest.approx(plain.score, rel=1e-12)
    apart = tnlib.CP(a.weights, [a.factors[0] * scale, a.factors[1] * scale, a.factors[2] / scale])
    assert tnlib.match(apart, b).score < 1e-100
    assert tnlib.match(apart, b, weight_penalty=False).score == pytest.approx(
        tnlib.match(a, b, weight_penalty=False).score, rel=1e-12
    )


def test_components_without_weight_match_each_other() -> None:
    eye = [np.eye(3)] * 3
    a, b = tnlib.CP([0.0, 1.0, 0.0], eye), tnlib.CP([1.0, 0.0, 0.0], [np.eye(3)[:, [1, 0, 2]]] * 3)
    found = tnlib.match(a, b)
    assert found.score == 1.0
    assert found.permutation.tolist() == [1, 0, 2]


def test_what_alternating_least_squares_finds_is_what_was_put_in() -> None:
    truth = tnlib.canonical_form(random_cp(3, (10, 11, 12), seed=4))
    x = truth.full()
    noisy = x + 1e-3 * oracles.norm(x) / np.sqrt(x.size) * oracles.normal(x.shape)
    for seed in range(3):
        found = tnlib.match(tnlib.cp(noisy, 3, rng=seed, n_starts=2).value, truth)
        assert 0.99 < found.score <= 1.0
        for one, other in zip(found.value.factors, truth.factors, strict=True):
            assert oracles.norm(one - other) < 0.02


def test_what_is_wrong_is_said() -> None:
    cp = random_cp(2)
    with oracles.refused(TypeError, "match", "a", "CP", "Tucker"):
        tnlib.match(tnlib.tucker(np.eye(2)).value, cp)  # type: ignore[arg-type]
    with oracles.refused(TypeError, "match", "b", "CP", "ndarray"):
        tnlib.match(cp, np.eye(2))  # type: ignore[arg-type]
    for flag in (None, np.ones(2), "yes", 2):
        with oracles.refused(TypeError, "match: weight_penalty must be True or False"):
            tnlib.match(cp, cp, weight_penalty=flag)  # type: ignore[arg-type]
    with oracles.refused(ValueError, "match", "(5, 6, 7)", "(5, 6)"):
        tnlib.match(cp, random_cp(2, (5, 6)))
