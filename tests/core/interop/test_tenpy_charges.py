"""Ground states of TeNPy, truncated and returned to bonds of definite charge; the projection onto one charge."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import oracles
import pytest
from tenpy.algorithms.dmrg import TwoSiteDMRGEngine
from tenpy.models.hubbard import FermiHubbardModel
from tenpy.models.xxz_chain import XXZChain
from tenpy.networks.mps import MPS
from tenpy.networks.site import SpinHalfSite
from tnlib_adapters.interop.tenpy import from_tenpy, project_charge, to_tenpy

import tnlib

MODELS = {
    "Heisenberg": (XXZChain, {"L": 14, "Jxx": 1.0, "Jz": 1.0, "hz": 0.0, "conserve": "Sz"}),
    "Hubbard": (FermiHubbardModel, {"L": 6, "t": 1.0, "U": 4.0, "mu": 0.0, "cons_N": "N", "cons_Sz": "Sz"}),
}
MULTIPLETS = 1e-3  # relative difference of Schmidt values that the calculation of a ground state leaves equal


class Ground(NamedTuple):
    model: Any
    state: Any
    energy: float
    train: tnlib.TensorTrain


@pytest.fixture(scope="module", params=MODELS)
def ground(request: pytest.FixtureRequest) -> Ground:
    kind, options = MODELS[request.param]
    model = kind({**options, "bc_MPS": "finite"})
    state = MPS.from_product_state(
        model.lat.mps_sites(), ["up", "down"] * (options["L"] // 2), unit_cell_width=options["L"]
    )
    dmrg = {"mixer": True, "max_sweeps": 8, "trunc_params": {"chi_max": 40, "svd_min": 1e-10}}
    energy, _ = TwoSiteDMRGEngine(state, model, dmrg).run()
    return Ground(model, state, energy, from_tenpy(state))


def check(ground: Ground, fit: tnlib.Fit[tnlib.TensorTrain], back: Any, omitted: float = 0.0) -> None:
    """The returned state has the charge, the overlap and the energy that the error of the truncation allows."""
    back.test_sanity()
    assert back.norm_test().max() < 1e-12
    assert (
        back.get_total_charge(only_physical_legs=True).tolist()
        == ground.state.get_total_charge(only_physical_legs=True).tolist()
    )
    kept = 1 - fit.error**2  # what a truncation discards is orthogonal to what it keeps
    assert abs(back.norm**2 - kept * (1 - omitted**2)) < 1e-12
    assert abs(ground.state.overlap(back) - kept) < 1e-12
    spectral_radius = 4.0 * ground.state.L
    assert -1e-10 < ground.model.H_MPO.expectation_value(back) - ground.energy < spectral_radius * fit.error**2 + 1e-10


@pytest.mark.slow
@pytest.mark.parametrize(
    "tolerance", [{"rtol": 10.0**-k} for k in range(1, 7)] + [{"max_rank": m} for m in (7, 13, 24)]
)
def test_a_truncation_between_multiplets_keeps_the_charge(ground: Ground, tolerance: dict[str, Any]) -> None:
    fit = tnlib.round(ground.train, **tolerance, degeneracy_tol=MULTIPLETS)
    assert fit.error <= tolerance.get("rtol", 1.0)
    assert max(fit.value.ranks) <= tolerance.get("max_rank", 40)
    check(ground, fit, to_tenpy(fit.value, ground.model.lat.mps_sites()))


@pytest.mark.slow
@pytest.mark.parametrize("rank", [10, 13, 20])
def test_an_applied_operator_keeps_the_charge(ground: Ground, rank: int) -> None:
    operator, sites = from_tenpy(ground.model.H_MPO), ground.model.lat.mps_sites()
    fit = tnlib.apply(operator, ground.train, max_rank=rank, degeneracy_tol=MULTIPLETS)
    back = to_tenpy(fit.value, sites)
    assert abs(ground.state.overlap(back) - ground.energy) <= fit.error * abs(ground.energy) + 1e-10


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::tnlib.DegenerateCutWarning")
def test_a_truncation_through_a_multiplet_returns_with_a_tolerance(ground: Ground) -> None:
    """At every rank: where the state is refused, the message names the tolerance with which it is not."""
    sites, refused = ground.model.lat.mps_sites(), 0
    for rank in range(5, 30):
        fit = tnlib.round(ground.train, max_rank=rank)
        projected = project_charge(fit.value, sites)
        assert projected.error <= fit.error
        try:
            back = to_tenpy(fit.value, sites)
        except tnlib.ArgumentError as problem:
            refused += 1
            rtol = float(str(problem).split("pass rtol=")[1].split()[0])
            assert projected.error < rtol < 2 * projected.error
            back = to_tenpy(fit.value, sites, rtol=rtol)
        check(ground, fit, back, projected.error)
        oracles.assert_close(from_tenpy(to_tenpy(projected.value, sites)).full(), projected.value.full(), factor=1e3)
    assert refused > 0, "the case proves nothing"


def test_the_projection_is_orthogonal() -> None:
    sites = [SpinHalfSite("Sz")] * 6
    x = oracles.normal((2,) * 6)
    train = tnlib.TensorTrain(tnlib.tt_svd(x).value.cores, None, 700.0)  # beyond float64
    part = project_charge(train, sites)
    spin = np.add.outer(*[np.add.outer(np.add.outer([1, -1], [1, -1]), [1, -1])] * 2)
    norms = {total: np.linalg.norm(x[spin == total]) for total in range(-6, 7, 2)}
    largest = max(norms, key=lambda total: norms[total])
    unit = tnlib.TensorTrain(part.value.cores, part.value.center, part.value.log_scale - 700.0)
    oracles.assert_close(unit.full(), np.where(spin == largest, x, 0), factor=1e3)
    assert part.error == pytest.approx(math.sqrt(1 - (norms[largest] / np.linalg.norm(x)) ** 2), rel=1e-12)
    assert part.value.gauge_error() is None
    assert project_charge(part.value, sites).error < 1e-14


def test_the_message_names_what_keeps_a_charge() -> None:
    mixed = tnlib.tt_svd(np.array([[0.1, 0.7], [-0.7, 0.0]])).value
    with oracles.refused(ValueError, "to_tenpy: value must", "pass rtol=", "project_charge", "degeneracy_tol=1e-3"):
        to_tenpy(mixed, SpinHalfSite("Sz"))


def test_the_projection_of_an_operator_has_one_charge() -> None:
    raising = tnlib.embed(np.array([[0.0, 1.0], [0.0, 0.0]]), [1], (2, 2, 2))
    part = project_charge(raising + 0.5 * raising.H, SpinHalfSite("Sz"))
    oracles.assert_close(part.value.full(), raising.full())
    assert part.error == pytest.approx(0.5 / math.sqrt(1.25), rel=1e-12)
    assert to_tenpy(part.value, SpinHalfSite("Sz")).chi == [1, 1, 1, 1]
