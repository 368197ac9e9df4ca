"""Cuts in the gauge of belief propagation: optimal on trees, better than cuts without a gauge with loops."""

from __future__ import annotations

from typing import Any

import numpy as np
import oracles
import pytest
import quimb.tensor as qtn

import tnlib
from tnlib.interop.quimb import contract, gauge_loops, to_network, truncate_gauged


def decaying(seed: int) -> Any:
    """A PEPS with decaying weights on every bond, in a random basis."""
    peps, rng = qtn.PEPS.rand(3, 3, bond_dim=4, seed=seed), np.random.default_rng(seed)
    for bond in peps.inner_inds():
        a, b = (peps.tensor_map[number] for number in peps.ind_map[bond])
        change = rng.standard_normal((4, 4))
        a.gate_(np.diag(0.5 ** np.arange(4)) @ change, bond)
        b.gate_(np.linalg.inv(change).T, bond)
    return peps


def error_of(tn: Any, reference: Any) -> float:
    legs = reference.outer_inds()
    x = contract(reference, legs=legs)
    return float(np.linalg.norm(contract(tn, legs=legs) - x) / np.linalg.norm(x))


@pytest.mark.parametrize("seed", range(6))
def test_the_gauged_cut_is_more_accurate_with_loops(seed: int) -> None:
    peps = decaying(seed)
    fit = truncate_gauged(gauge_loops(peps), max_rank=2)
    assert set(fit.value.ranks) == {2}
    assert not fit.certified
    error = error_of(fit.value.tn, peps)
    assert error < error_of(peps.compress_all(max_bond=2, canonize=False), peps)
    assert 0.5 * error <= fit.error <= 2 * error


def test_one_bond_of_a_chain_is_cut_optimally() -> None:
    tt = tnlib.tt_svd(oracles.random_train((4, 3, 5), (1, 2, 5, 1))).value
    gauged = gauge_loops(to_network(tt))
    fit = truncate_gauged(gauged, max_rank=3)
    best = tnlib.truncate_bond(tt, 2, max_rank=3)
    assert fit.error == pytest.approx(best.error, rel=1e-6)
    assert error_of(fit.value.tn, gauged.network) == pytest.approx(best.error, rel=1e-6)


def test_ranks_follow_the_tolerance() -> None:
    gauged = gauge_loops(decaying(0))
    fits = [truncate_gauged(gauged, rtol=rtol) for rtol in (0.5, 0.1, 1e-3)]
    assert [fit.error <= rtol for fit, rtol in zip(fits, (0.5, 0.1, 1e-3), strict=True)] == [True] * 3
    assert np.all(np.diff([sum(fit.value.ranks) for fit in fits]) > 0)
    whole = truncate_gauged(gauged)
    assert error_of(whole.value.tn, gauged.network) <= 1e-12


def test_wrong_input_is_refused() -> None:
    with oracles.refused(TypeError, "truncate_gauged: gauged must be the result of gauge_loops"):
        truncate_gauged(decaying(0))
    with oracles.refused(TypeError, "truncate_gauged: keywords", "max_rank="):
        truncate_gauged(gauge_loops(decaying(0)), max_bond=2)  # type: ignore[call-arg]
