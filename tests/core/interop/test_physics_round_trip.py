"""Ground states go from library to library and file and back: nothing is lost on the way.

A Heisenberg chain in a field that differs from site to site: no two sites are alike, the total spin along z is
conserved, and quimb and TeNPy each find the ground state by their own density-matrix renormalization group.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import quimb.tensor as qtn
from tenpy.algorithms.dmrg import TwoSiteDMRGEngine
from tenpy.models.xxz_chain import XXZChain
from tenpy.networks.mps import MPS
from tenpy.networks.site import SpinHalfSite
from tenpy.tools import hdf5_io
from tnlib_adapters.interop.quimb import from_quimb, to_quimb
from tnlib_adapters.interop.tenpy import from_tenpy, read, to_tenpy, write

import tnlib

SITES, BOND = 20, 32
FIELD = np.random.default_rng(0).uniform(-1.0, 1.0, SITES)
SZ = np.diag([0.5, -0.5])


@pytest.fixture(scope="module")
def quimb_operator() -> Any:
    ham = qtn.SpinHam1D(1 / 2)
    for strength, a, b in ((0.5, "+", "-"), (0.5, "-", "+"), (1.0, "Z", "Z")):
        ham += strength, a, b
    for k, h in enumerate(FIELD):
        ham[k] += -h, "Z"
    return ham.build_mpo(SITES)


@pytest.fixture(scope="module")
def quimb_state(quimb_operator: Any) -> Any:
    start = qtn.MPS_computational_state("01" * (SITES // 2))
    dmrg = qtn.DMRG2(quimb_operator, bond_dims=[8, 16, BOND], cutoffs=1e-12, p0=start)
    dmrg.solve(tol=1e-8, verbosity=0)
    return dmrg.state


@pytest.fixture(scope="module")
def model() -> XXZChain:
    return XXZChain({"L": SITES, "Jxx": 1.0, "Jz": 1.0, "hz": FIELD, "bc_MPS": "finite"})


@pytest.fixture(scope="module")
def tenpy_state(model: XXZChain) -> MPS:
    start = MPS.from_lat_product_state(model.lat, [["up"], ["down"]])
    options = {"mixer": True, "max_sweeps": 6, "trunc_params": {"chi_max": BOND, "svd_min": 1e-10}}
    state = TwoSiteDMRGEngine(start, model, options).run()[1]
    state.canonical_form()  # it leaves its Schmidt values to 1e-11
    return state


def spins(state: Any) -> list[float]:
    """Expectation values of Sz on every site, as the library of `state` computes them."""
    if isinstance(state, MPS):
        return list(state.expectation_value("Sz"))
    if isinstance(state, tnlib.TensorTrain):
        return [tnlib.inner(state, apply_at(state, k)).real / state.norm() ** 2 for k in range(SITES)]
    return [float(np.real(state.magnetization(k))) for k in range(SITES)]


def apply_at(state: tnlib.TensorTrain, k: int) -> tnlib.TensorTrain:
    turned = np.einsum("mn,lnr->lmr", SZ, state.cores[k])
    return tnlib.TensorTrain([*state.cores[:k], turned, *state.cores[k + 1 :]], None, state.log_scale)


def spectra(state: Any) -> np.ndarray:
    """Schmidt values on every bond, as the library of `state` computes them, descending and padded with zeros."""
    if isinstance(state, MPS):
        values = [state.get_SR(k) for k in range(SITES - 1)]
    elif isinstance(state, tnlib.TensorTrain):
        values = [tnlib.schmidt_values(state, bond) for bond in range(1, SITES)]
    else:
        values = [np.sqrt(np.abs(state.schmidt_values(bond))) for bond in range(1, SITES)]  # quimb's are squares
    return np.array([np.sort(np.pad(s, (0, 2 * BOND - len(s))))[::-1] for s in values])


def overlap(a: tnlib.TensorTrain, b: tnlib.TensorTrain) -> float:
    return abs(tnlib.inner(a, b)) / (a.norm() * b.norm())


@pytest.mark.slow
@pytest.mark.parametrize("conserve", [None, "Sz"])
def test_a_ground_state_of_quimb_comes_back_through_tenpy_and_a_file(
    conserve: str | None, quimb_state: Any, quimb_operator: Any, tmp_path: Path
) -> None:
    start = from_quimb(quimb_state)
    through = to_tenpy(start, SpinHalfSite(conserve))
    hdf5_io.save(through, str(tmp_path / "state.h5"))
    stored = read(tmp_path / "state.h5")
    end = to_quimb(stored)

    assert abs(end.H @ quimb_state) == pytest.approx(1.0, abs=1e-12)
    assert abs(end.H @ quimb_operator.apply(end)) == pytest.approx(
        abs(quimb_state.H @ quimb_operator.apply(quimb_state)), rel=1e-12
    )
    wanted, values = spins(quimb_state), spectra(quimb_state)
    entropies = [quimb_state.copy().entropy(bond) for bond in range(1, SITES)]  # in bits
    assert tnlib.entropies(start, base=2) == pytest.approx(entropies, abs=1e-9)
    assert np.ptp(wanted) > 0.1
    for state in (start, through, stored, end):
        assert spins(state) == pytest.approx(wanted, abs=1e-12)
    for state in (start, through, stored):
        np.testing.assert_allclose(spectra(state), values, rtol=0, atol=1e-12)


@pytest.mark.slow
def test_a_ground_state_of_tenpy_with_charges_comes_back_through_quimb_and_a_file(
    tenpy_state: MPS, model: XXZChain, quimb_operator: Any, tmp_path: Path
) -> None:
    hdf5_io.save(tenpy_state, str(tmp_path / "state.h5"))
    there = to_quimb(read(tmp_path / "state.h5"))
    write(tmp_path / "back.h5", from_quimb(there), model.lat.mps_sites())
    back = hdf5_io.load(str(tmp_path / "back.h5"))

    assert abs(back.overlap(tenpy_state)) == pytest.approx(1.0, abs=1e-12)
    assert back.get_total_charge(only_physical_legs=True).tolist() == [0]
    assert model.H_MPO.expectation_value(back) == pytest.approx(model.H_MPO.expectation_value(tenpy_state), rel=1e-12)
    assert float(np.real(there.H @ quimb_operator.apply(there))) == pytest.approx(
        model.H_MPO.expectation_value(tenpy_state), rel=1e-12
    )
    wanted, values = spins(tenpy_state), spectra(tenpy_state)
    for state in (there, back, from_quimb(there)):
        assert spins(state) == pytest.approx(wanted, abs=1e-12)
    for state in (back, from_quimb(there)):
        np.testing.assert_allclose(spectra(state), values, rtol=0, atol=1e-12)


@pytest.mark.slow
def test_both_libraries_find_one_ground_state_of_one_operator(
    quimb_state: Any, tenpy_state: MPS, quimb_operator: Any, model: XXZChain
) -> None:
    ours, theirs = from_quimb(quimb_operator), from_tenpy(model.H_MPO)
    assert tnlib.distance(ours, theirs) < 1e-13 * ours.norm()
    assert overlap(from_quimb(quimb_state), from_tenpy(tenpy_state)) == pytest.approx(1.0, abs=1e-6)


@pytest.mark.slow
def test_an_operator_comes_back_through_tenpy_and_a_file(
    quimb_operator: Any, tenpy_state: MPS, model: XXZChain, tmp_path: Path
) -> None:
    write(tmp_path / "plain.h5", from_quimb(quimb_operator))
    plain = to_quimb(read(tmp_path / "plain.h5"))
    assert abs(plain.trace() - quimb_operator.trace()) < 1e-9
    assert tnlib.distance(from_quimb(plain), from_quimb(quimb_operator)) < 1e-14 * from_quimb(plain).norm()

    charged = to_tenpy(from_quimb(quimb_operator), model.lat.mps_sites())
    assert charged.is_equal(model.H_MPO)
    assert charged.expectation_value(tenpy_state) == pytest.approx(
        model.H_MPO.expectation_value(tenpy_state), rel=1e-12
    )
