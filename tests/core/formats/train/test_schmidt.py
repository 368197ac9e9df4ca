"""Schmidt values and entropies by their definitions, and the optimal truncation of one bond."""

from __future__ import annotations

import itertools
import math

import numpy as np
import oracles
import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_trains import trains, unfolding

import tnlib


@given(trains(largest=345.0), st.data())
def test_schmidt_values_of_any_bond(tt: tnlib.TensorTrain, data: st.DataObject) -> None:
    if len(tt.cores) == 1:
        with oracles.refused(ValueError, "schmidt_values", "bond"):
            tnlib.schmidt_values(tt, 1)
        return
    bond = data.draw(st.integers(1, len(tt.cores) - 1))
    x = oracles.wide(tnlib.TensorTrain(tt.cores).full())
    want = np.linalg.svd(unfolding(x, bond), compute_uv=False) * math.exp(tt.log_scale)
    top = want[0] if want[0] > 0 else 1.0
    for center in (None, 0, bond - 1, bond, len(tt.cores) - 1):
        got = tnlib.schmidt_values(tt if center is None else tnlib.canonicalize(tt, center), bond)
        count = min(len(got), len(want))
        np.testing.assert_allclose(got[:count] / top, want[:count] / top, atol=256 * oracles.eps(tt.dtype))


@pytest.mark.parametrize("bond", [1, 2, 3])
def test_entropies_by_their_definitions(bond: int) -> None:
    x = oracles.random_train((3, 4, 5, 3), (1, 3, 6, 2, 1), np.complex128)
    tt = tnlib.tt_svd(7 * x).value
    s = np.linalg.svd(unfolding(x, bond), compute_uv=False)
    p = s[s > 1e-12] ** 2
    p = p / p.sum()
    assert tnlib.entropy(tt, bond) == pytest.approx(-np.sum(p * np.log(p)), abs=1e-12)
    assert tnlib.entropy(tt, bond, base=2) == pytest.approx(-np.sum(p * np.log2(p)), abs=1e-12)
    assert tnlib.entropy(tt, bond, order=2) == pytest.approx(-np.log(np.sum(p**2)), abs=1e-12)
    assert tnlib.entropy(tt, bond, order=0) == pytest.approx(np.log(len(p)), abs=1e-12)
    assert tnlib.entropy(tt, bond, order=math.inf) == pytest.approx(-np.log(p.max()), abs=1e-12)
    falling = [tnlib.entropy(tt, bond, order=order) for order in (0, 0.5, 1 - 1e-7, 1, 1 + 1e-7, 2, 5, math.inf)]
    assert all(a >= b - 1e-6 for a, b in itertools.pairwise(falling))
    spectrum = tnlib.entanglement_spectrum(tt, bond)
    np.testing.assert_allclose(np.exp(-spectrum), p, atol=1e-12)


@given(trains(largest=345.0), st.sampled_from([1.0, 2.0, math.inf]))
def test_all_entropies_are_those_of_single_bonds(tt: tnlib.TensorTrain, order: float) -> None:
    expected = [tnlib.entropy(tt, bond, order=order, base=2) for bond in range(1, tt.ndim)]
    found = tnlib.entropies(tt, order=order, base=2)
    assert found.shape == (tt.ndim - 1,)
    np.testing.assert_allclose(found, expected, atol=64 * oracles.eps(tt.dtype) ** 0.5)


def test_entropies_of_wrong_order_are_refused() -> None:
    with oracles.refused(tnlib.ArgumentError, "entropies: order must be at least 0.0"):
        tnlib.entropies(tnlib.ones((2, 2)), order=-1.0)


def test_renyi_entropies_of_any_order() -> None:
    flat = tnlib.tt_svd(np.eye(4) / 2).value
    for order in (1 + 1e-14, 1 - 1e-9, 1 + 1e-6, 1.5, 1000, 1e12):
        assert tnlib.entropy(flat, 1, order=order, base=2) == pytest.approx(2, rel=1e-13)
    tt = tnlib.tt_svd(np.diag([4.0, 3.0, 1e-3])).value
    p = np.array([16, 9, 1e-6]) / (25 + 1e-6)
    slope = np.sum(p * np.log(p) ** 2) - np.sum(p * np.log(p)) ** 2  # the derivative at 1 is half of minus that
    for away in (-1e-4, -1e-9, 1e-13, 1e-7):
        expected = -np.sum(p * np.log(p)) - away * slope / 2
        assert tnlib.entropy(tt, 1, order=1 + away) == pytest.approx(expected, abs=1e-13 + 10 * away**2)
    assert tnlib.entropy(tt, 1, order=1e6) == pytest.approx(-np.log(p.max()), rel=2e-6)


def test_product_states_and_maximally_entangled_ones() -> None:
    level = tnlib.entanglement_spectrum(tnlib.TensorTrain([np.full((1, 3, 1), 0.7)] * 2), 1)
    assert level == pytest.approx([0.0], abs=1e-15)
    assert not np.signbit(level[0])
    product = tnlib.TensorTrain([oracles.normal((1, 3, 1), seed=k) for k in range(4)])
    assert [tnlib.entropy(product, bond) for bond in (1, 2, 3)] == pytest.approx([0, 0, 0], abs=1e-14)
    ghz = tnlib.tt_svd(oracles.ghz(5, 3)).value
    for bond, order in itertools.product((1, 2, 3, 4), (0, 1, 2, math.inf)):
        assert tnlib.entropy(ghz, bond, order=order) == pytest.approx(math.log(3), abs=1e-13)


@oracles.each_dtype
def test_a_bond_is_cut_optimally(dtype: np.dtype) -> None:
    x = oracles.random_train((4, 5, 6, 3), (1, 4, 9, 3, 1), dtype)
    tt = tnlib.tt_svd(x).value
    for bond, rank in [(1, 2), (2, 3), (2, 8), (3, 1)]:
        fit = tnlib.truncate_bond(tt, bond, max_rank=rank)
        s = np.linalg.svd(unfolding(oracles.wide(x), bond), compute_uv=False)
        assert fit.value.ranks[bond] == rank
        assert fit.value.center == bond
        assert max(tnlib.isometry_errors(fit.value)) <= 64 * oracles.eps(dtype) * 9
        best = oracles.norm(s[rank:]) / oracles.norm(s)
        assert oracles.true_error(x, fit.value) == pytest.approx(best, abs=64 * oracles.eps(dtype))
        assert fit.error == pytest.approx(best, rel=1e-3, abs=64 * oracles.eps(dtype))
    for rtol in (0.0, 1e-6, 0.05, 0.3, 1.0):
        fit = tnlib.truncate_bond(tt, 2, rtol=rtol)
        assert oracles.true_error(x, fit.value) <= rtol + 64 * oracles.eps(dtype)


def test_a_cap_between_equal_values_is_reported() -> None:
    fit, warned = oracles.quietly(lambda: tnlib.truncate_bond(tnlib.tt_svd(oracles.ghz(4)).value, 2, max_rank=1))
    assert warned == [tnlib.DegenerateCutWarning]
    assert "bond 2" in fit.notes[0]
