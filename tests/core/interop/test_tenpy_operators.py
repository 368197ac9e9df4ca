"""Operators of TeNPy sites in the basis of the legs, and the expectation values and correlations of TeNPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import oracles
import pytest
import quimb.tensor as qtn
from physics_states import of_one_charge
from tenpy.networks.mps import MPS
from tenpy.networks.site import BosonSite, FermionSite, GroupedSite, SpinHalfFermionSite, SpinHalfSite, SpinSite
from tnlib_adapters.interop.quimb import from_quimb
from tnlib_adapters.interop.tenpy import from_tenpy, operator, to_tenpy

import tnlib

SITES = {
    "spins": (SpinHalfSite("Sz"), [[1, -1]], 1),
    "spins of parity": (SpinHalfSite("parity"), [[1, -1]], 1),
    "spins 1": (SpinSite(1.0, "Sz"), [[-2, 0, 2]], 2),
    "bosons": (BosonSite(2, "N"), [[0, 1, 2]], 4),
    "fermions": (FermionSite("N"), [[0, 1]], 3),
    "electrons": (SpinHalfFermionSite("N", "Sz"), [[0, 10, 1, 11]], 32),  # empty, up, down, both
    "electrons of parity": (SpinHalfFermionSite("parity", None), [[0, 1, 1, 2]], 5),
}


def state(name: str, length: int = 5, dtype: Any = np.complex128) -> tuple[MPS, tnlib.TensorTrain]:
    """A random state of one charge, in TeNPy and here."""
    site, charges, total = SITES[name]
    psi = to_tenpy(tnlib.tt_svd(of_one_charge(charges * length, total, dtype)).value, site)
    return psi, from_tenpy(psi)


@pytest.mark.parametrize("name", SITES)
def test_operators_of_a_site_are_in_the_basis_of_the_legs(name: str) -> None:
    psi, train = state(name)
    site = psi.sites[0]
    diagonal = [key for key in sorted(site.opnames - {"JW"}) if not site.get_op(key).qtotal.any()]
    diagonal = [key for key in diagonal if not site.op_needs_JW(key)]
    for key in [*diagonal, "Id Id"]:
        want = psi.expectation_value(key)
        np.testing.assert_allclose(tnlib.expectation(train, operator(site, key)), want, atol=1e-12)
    assert max(abs(psi.expectation_value(key)).max() for key in diagonal if key not in ("Id", "JW")) > 0.1


@pytest.mark.parametrize(
    ("name", "a", "b"),
    [
        ("fermions", "Cd", "C"),
        ("fermions", "C", "Cd"),
        ("electrons", "Cdu", "Cu"),
        ("electrons", "Cd", "Cdd"),
        ("electrons of parity", "Cdu", "Cd"),
        ("electrons of parity", "Cdd", "Cu"),
    ],
)
def test_fermions_have_the_correlations_of_tenpy(name: str, a: str, b: str) -> None:
    psi, train = state(name)
    site = psi.sites[0]
    x, y, string = (operator(site, key) for key in (a, b, "JW"))
    want = psi.correlation_function(a, b)
    found = tnlib.correlation(train, x, y, string=string)
    np.testing.assert_allclose(found, want, atol=1e-12)
    assert np.abs(found - tnlib.correlation(train, x, y)).max() > 0.01  # the string matters


def test_spins_and_a_given_string_have_the_correlations_of_tenpy() -> None:
    psi, train = state("spins 1")
    site = psi.sites[0]
    x, y, rotation = operator(site, "Sp"), operator(site, "Sm"), operator(site, "Sz") + 0.5 * operator(site, "Sz Sz")
    np.testing.assert_allclose(tnlib.correlation(train, x, y), psi.correlation_function("Sp", "Sm"), atol=1e-12)
    string = site.get_op("Sz") + 0.5 * site.get_op("Sz Sz")
    want = psi.correlation_function("Sp", "Sm", opstr=string, str_on_first=True)
    np.testing.assert_allclose(tnlib.correlation(train, x, y, string=[rotation] * 5), want, atol=1e-12)


def test_objects_of_the_other_library_are_refused_with_its_converter() -> None:
    with oracles.refused(TypeError, "from_quimb: obj must be", "tenpy.MPS", "interop.tenpy.from_tenpy"):
        from_quimb(state("spins")[0])
    with oracles.refused(TypeError, "from_tenpy: obj must be", "quimb.MatrixProductState", "interop.quimb.from_quimb"):
        from_tenpy(qtn.MPS_ghz_state(3))
    with oracles.refused(TypeError, "from_quimb: obj must be", "quimb.PEPS", "takes other networks as they are"):
        from_quimb(qtn.PEPS.rand(2, 2, 2, seed=0))


def test_what_is_no_site_or_no_operator_is_refused() -> None:
    with oracles.refused(TypeError, "operator: site must be", "MPS", "psi.sites[0]"):
        operator(state("spins")[0], "Sz")
    with oracles.refused(TypeError, "operator: site must be", "GroupedSite"):
        operator(GroupedSite([SpinHalfSite("Sz")] * 2), "Sz0")
    for name in ("Sx", "", 3):
        with oracles.refused(ValueError, "operator: name must be one of", "Sm, Sp, Sz"):
            operator(SpinHalfSite("Sz"), name)
