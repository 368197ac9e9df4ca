"""States and operators of TeNPy: values, forms, Schmidt values, norms and the physical order of every site."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import oracles
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from physics_states import of_one_charge, operators, turned_inside
from random_trains import trains
from tenpy.linalg import np_conserved as npc
from tenpy.models.hubbard import FermiHubbardModel
from tenpy.models.spins import SpinChain
from tenpy.models.xxz_chain import XXZChain
from tenpy.networks.mpo import MPO
from tenpy.networks.mps import MPS
from tenpy.networks.purification_mps import PurificationMPS
from tenpy.networks.site import BosonSite, FermionSite, GroupedSite, SpinHalfFermionSite, SpinHalfSite, SpinSite
from tnlib_adapters.interop.tenpy import from_tenpy, to_tenpy

import tnlib

SPIN_HALF, SPIN_ONE = [1, -1], [-2, 0, 2]  # 2 Sz in the order without charges: of SpinHalfSite, and of SpinSite(1)


def spin_chain(length: int = 6, total: int = 0, dtype: Any = np.float64, seed: int = 0) -> np.ndarray:
    return of_one_charge([SPIN_HALF] * length, total, dtype, seed)


def random_state(length: int = 6, conserve: str | None = "Sz") -> MPS:
    """In form B and of norm 1."""
    x = spin_chain(length)
    return to_tenpy(tnlib.canonicalize(tnlib.tt_svd(x / np.linalg.norm(x)).value, 0), SpinHalfSite(conserve))


def spin_operator(name: str, k: int, length: int) -> np.ndarray:
    x = {"x": [[0, 1], [1, 0]], "y": [[0, -1j], [1j, 0]], "z": [[1, 0], [0, -1]]}[name]
    return np.kron(np.kron(np.eye(2**k), np.array(x) / 2), np.eye(2 ** (length - k - 1)))


def xxz(length: int, jxx: float, jz: float, hz: Any) -> np.ndarray:
    """sum of jxx (SxSx + SySy) + jz SzSz over neighbours - hz Sz over sites, up first, as a dense matrix."""
    out = np.zeros((2**length, 2**length), complex)
    for k in range(length - 1):
        for name, strength in (("x", jxx), ("y", jxx), ("z", jz)):
            out += strength * spin_operator(name, k, length) @ spin_operator(name, k + 1, length)
    return out - sum(h * spin_operator("z", k, length) for k, h in enumerate(np.broadcast_to(hz, length)))


# ------------------------------------------------------------------------------------------------ states


@pytest.mark.slow
@given(trains())
def test_values_centre_norm_and_schmidt_values_are_kept(train: tnlib.TensorTrain) -> None:
    with oracles.unchanged(*train.arrays()):
        state = to_tenpy(train)
    state.test_sanity()
    assert state.norm == pytest.approx(train.norm(), rel=1e3 * oracles.eps(train.dtype))
    assert state.norm_test().max() < 1e3 * oracles.eps(train.dtype)  # every tensor is as isometric as its form says
    center = train.center or 0
    assert state.form == [(1.0, 0.0)] * center + [(0.0, 1.0)] * (state.L - center)
    for bond in range(1, state.L):
        s = np.sort(state.get_SR(bond - 1))[::-1] * state.norm
        wanted = tnlib.schmidt_values(train, bond)
        np.testing.assert_allclose(s, wanted[: len(s)], atol=1e3 * oracles.eps(train.dtype) * train.norm())
        np.testing.assert_allclose(wanted[len(s) :], 0, atol=1e3 * oracles.eps(train.dtype) * train.norm())
    back = from_tenpy(state)
    oracles.assert_close(back.full(), train.full(), train.dtype, factor=1e3)
    assert back.center is not None
    assert back.center <= center  # the first of several, where cores between them are isometric both ways
    assert back.dtype == train.dtype


@given(trains())
def test_the_vidal_form_goes_there_and_back_bit_for_bit(train: tnlib.TensorTrain) -> None:
    if train.norm() == 0:
        return
    form = tnlib.vidal(train)
    state = to_tenpy(form)
    state.test_sanity()
    assert state.form == [(0.0, 0.0)] * state.L
    back = from_tenpy(state)
    assert isinstance(back, tnlib.Vidal)
    for a, b in zip(form.gammas, back.gammas, strict=True):
        np.testing.assert_array_equal(a, b)
    for a, b in zip(form.lambdas, back.lambdas, strict=True):
        np.testing.assert_array_equal(a, b)
    assert back.log_scale == pytest.approx(form.log_scale, abs=1e-15 * abs(form.log_scale) + 1e-15)


@pytest.mark.slow
@settings(max_examples=30)
@given(
    st.lists(st.sampled_from([SPIN_HALF, SPIN_ONE]), min_size=1, max_size=6),
    st.integers(-2, 2),
    st.sampled_from(oracles.DTYPES),
    st.none() | st.integers(0, 5),
    st.integers(0, 99),
)
def test_states_of_one_charge_become_blocks(
    spins: list[list[int]], total: int, dtype: Any, center: int | None, seed: int
) -> None:
    sites = [SpinHalfSite("Sz") if leg == SPIN_HALF else SpinSite(1.0, "Sz") for leg in spins]
    x = of_one_charge(spins, total, dtype, seed)
    train = turned_inside(tnlib.tt_svd(x).value, seed)
    if center is not None:
        train = tnlib.canonicalize(train, min(center, len(spins) - 1))
    state = to_tenpy(train, sites)
    state.test_sanity()
    assert state.norm == pytest.approx(np.linalg.norm(x), rel=1e3 * oracles.eps(dtype))
    assert state.norm_test().max() < 1e3 * oracles.eps(dtype)
    if x.any():
        assert state.get_total_charge(only_physical_legs=True).tolist() == [total]
    for k in range(1, len(spins)):
        s = np.sort(state.get_SL(k))[::-1] * state.norm
        wanted = np.linalg.svd(oracles.wide(x).reshape(math.prod(x.shape[:k]), -1), compute_uv=False)[: len(s)]
        np.testing.assert_allclose(s, wanted, atol=1e3 * oracles.eps(dtype) * (np.linalg.norm(x) or 1.0))
    oracles.assert_close(from_tenpy(state).full(), x, dtype, factor=1e3)


CONSERVED = {
    "spin and number of electrons": (SpinHalfFermionSite("N", "Sz"), ["up", "down", "full", "empty"]),
    "parity of electrons": (SpinHalfFermionSite("parity", "Sz"), ["up", "down", "full", "empty"]),
    "fermions": (FermionSite("N"), ["full", "empty", "empty", "full"]),
    "spins": (SpinHalfSite("Sz"), ["up", "down", "down", "up"]),
    "spins without charges": (SpinHalfSite(None), ["up", "down", "down", "up"]),
    "parity of spins": (SpinHalfSite("parity"), ["up", "down", "down", "up"]),
    "spin one": (SpinSite(1.0, "Sz"), ["up", "0.0", "down", "0.0"]),
    "bosons": (BosonSite(3, "N"), ["0", "3", "1", "2"]),
}


@pytest.mark.parametrize("case", CONSERVED)
def test_legs_are_in_the_order_that_a_site_has_without_charges(case: str) -> None:
    site, states = CONSERVED[case]
    plain = copy.deepcopy(site)
    plain.change_charge(None)  # back to no charges, and so to the basis that `perm` counts in
    plain_label = {name: int(site.perm[i]) for name, i in site.state_labels.items()}
    state = MPS.from_product_state([site] * 4, states, unit_cell_width=4)
    got = from_tenpy(state).full()
    assert np.argwhere(got).tolist() == [[plain_label[name] for name in states]]
    back = to_tenpy(from_tenpy(state), site)
    assert back.overlap(state) == pytest.approx(1.0, abs=1e-14)
    assert back.get_total_charge(only_physical_legs=True).tolist() == state.get_total_charge(True).tolist()


def test_equal_schmidt_values_of_different_charges_are_told_apart() -> None:
    """Two singlets: four equal Schmidt values in the middle, of charges 1, 0, 0 and -1, mixed by every bond's basis."""
    singlet = np.array([[0, 1], [-1, 0]]) / math.sqrt(2)
    x = np.einsum("ad,bc->abcd", singlet, singlet)
    state = to_tenpy(turned_inside(tnlib.tt_svd(x).value), SpinHalfSite("Sz"))
    np.testing.assert_allclose(state.get_SL(2), 0.5, rtol=1e-14)
    assert sorted(state._B[1].get_leg("vR").to_qflat()[:, 0].tolist()) == [-2, 0, 0, 2]
    oracles.assert_close(from_tenpy(state).full(), x)


@pytest.mark.parametrize("conserve", [None, "Sz"])
def test_faint_schmidt_values_leave_right_isometric_tensors(conserve: str | None) -> None:
    """Pairs whose second Schmidt value is 1e-7: three of them reach 1e-14 between the halves of a chain of six."""
    pair = np.array([[0, 1.0], [1e-7, 0]])
    x = np.einsum("af,be,cd->abcdef", pair, pair, pair)
    state = to_tenpy(turned_inside(tnlib.tt_svd(x).value), SpinHalfSite(conserve))
    assert 1e-15 < min(state.get_SL(3)) < 1e-13
    assert state.norm_test().max() < 1e-13
    oracles.assert_close(from_tenpy(state).full(), x)


def test_states_that_mix_a_conserved_charge_are_refused() -> None:
    mixed = tnlib.tt_svd(spin_chain(4, 0) + 0.1 * spin_chain(4, 4)).value
    with oracles.refused(ValueError, "to_tenpy: value", "one total charge", "of its norm with another"):
        to_tenpy(mixed, SpinHalfSite("Sz"))
    assert from_tenpy(to_tenpy(mixed, SpinHalfSite("parity"))).norm() == pytest.approx(mixed.norm())


def test_roundoff_of_another_charge_is_left_out() -> None:
    x = spin_chain(6)
    noisy = x + 1e-13 * oracles.normal(x.shape, seed=5)
    for center in range(6):
        state = to_tenpy(tnlib.canonicalize(tnlib.tt_svd(noisy).value, center), SpinHalfSite("Sz"))
        assert state.chi == [2, 4, 8, 4, 2]
        assert state.norm_test().max() < 1e-13
        oracles.assert_close(from_tenpy(state).full(), x, factor=1e4)


@pytest.mark.parametrize("conserve", [None, "Sz"])
@pytest.mark.parametrize(
    "form", ["A", "B", "C", "G", "Th", ["A", "A", "Th", "B", "B", "B"], ["A", "C", "G", "B", "Th", "A"]]
)
def test_every_form_is_the_same_state(form: Any, conserve: str | None) -> None:
    state = random_state(conserve=conserve)
    x = from_tenpy(state).full()
    state.convert_form(form)
    oracles.assert_close(from_tenpy(state).full(), x, factor=1e3)


@pytest.mark.parametrize(
    ("form", "center"), [("A", 5), ("B", 0), (["A"] * 2 + ["B"] * 4, 2), (["A"] * 3 + ["Th"] + ["B"] * 2, 3)]
)
def test_a_form_is_a_centre(form: Any, center: int) -> None:
    state = random_state()
    state.convert_form(form)
    assert from_tenpy(state).center == center


def test_a_vidal_of_tenpy_is_sorted() -> None:
    state = random_state()
    state.convert_form("G")
    assert any((np.diff(state.get_SL(k)) > 0).any() for k in range(1, 6))  # TeNPy keeps values charge by charge
    form = from_tenpy(state)
    assert isinstance(form, tnlib.Vidal)
    assert all((np.diff(s) <= 0).all() for s in form.lambdas)
    oracles.assert_close(form.full(), spin_chain() / np.linalg.norm(spin_chain()), factor=1e3)
    for k, s in enumerate(form.lambdas, start=1):
        np.testing.assert_array_equal(s, np.sort(state.get_SL(k))[::-1])


def test_tensors_in_no_form_are_multiplied_as_they_are() -> None:
    state = random_state(conserve=None)
    rng = np.random.default_rng(0)
    cores = [rng.standard_normal((len(s), 2, len(t))) for s, t in zip(state._S, state._S[1:], strict=False)]
    for k, core in enumerate(cores):
        state.set_B(k, npc.Array.from_ndarray_trivial(core, labels=["vL", "p", "vR"]), form=None)
    oracles.assert_close(from_tenpy(state).full(), oracles.dense_train(cores))
    state.form[2] = (0.0, 1.0)
    with oracles.refused(ValueError, "from_tenpy: obj", "bond 2", "canonical_form()"):
        from_tenpy(state)


@pytest.mark.parametrize("norm", [1.0, 3.5, 1e-200, 1e200, -2.0, 1j, 0.0])
def test_a_norm_of_tenpy_is_a_scale(norm: Any) -> None:
    state = random_state()
    unit = from_tenpy(state)
    state.norm = norm
    train = from_tenpy(state)
    assert train.log_norm() == pytest.approx(np.log(abs(norm)) if norm else -math.inf, abs=1e-13)
    oracles.assert_close(train.full(), norm * unit.full(), factor=1e3)  # a logarithm of 460 has an eps of 460
    if norm == 0 or (isinstance(norm, float) and norm > 0):
        assert to_tenpy(train).norm == pytest.approx(norm, rel=1e-13)


def test_norms_that_tenpy_cannot_keep_are_refused() -> None:
    for log_scale in (800.0, -800.0):
        with oracles.refused(ValueError, "to_tenpy: value", "float64", "divide"):
            to_tenpy(tnlib.TensorTrain([np.ones((1, 2, 1))] * 3, None, log_scale))


@pytest.mark.parametrize("conserve", [None, "Sz"])
def test_zero_is_a_state_of_norm_zero(conserve: str | None) -> None:
    zero = tnlib.TensorTrain([np.zeros((1, 2, 3)), np.ones((3, 2, 2)), np.ones((2, 2, 1))])
    state = to_tenpy(zero, SpinHalfSite(conserve))
    assert state.norm == 0.0
    assert state.norm_test().max() < 1e-15
    assert from_tenpy(state).norm() == 0.0


@pytest.mark.slow
def test_two_hundred_sites_with_charges() -> None:
    """One spin up, anywhere: bonds of size 2, a norm of sqrt(200)."""
    step = np.zeros((2, 2, 2))
    step[0, 1, 0] = step[1, 1, 1] = step[0, 0, 1] = 1.0
    w = tnlib.TensorTrain([step[:1], *[step] * 198, step[..., 1:]])
    state = to_tenpy(w, SpinHalfSite("Sz"))
    assert state.norm == pytest.approx(math.sqrt(200), rel=1e-12)
    assert state.get_total_charge(only_physical_legs=True).tolist() == [-198]
    np.testing.assert_allclose(state.expectation_value("Sz"), 1 / 200 - 0.5, atol=1e-12)
    assert tnlib.distance(from_tenpy(state), w) < 1e-12 * w.norm()


def test_a_state_with_a_mixer_on_needs_no_inverse_in_a_good_form() -> None:
    state = random_state(conserve=None)
    x = from_tenpy(state).full()
    state._S[3] = npc.diag(state.get_SL(3), state._B[3].get_leg("vL"), labels=["vL", "vR"])
    oracles.assert_close(from_tenpy(state).full(), x)
    state.form[3] = (1.0, 1.0)
    with oracles.refused(ValueError, "from_tenpy: obj", "bond 3", "a matrix", "canonical_form()"):
        from_tenpy(state)


def test_singular_values_that_are_needed_and_missing_are_refused() -> None:
    state = random_state(conserve=None)
    state.convert_form("G")
    state._S[2] = None
    with oracles.refused(ValueError, "from_tenpy: obj", "bond 2", "none"):
        from_tenpy(state)


# ------------------------------------------------------------------------------------------------ operators


@given(operators(square=True))
def test_operators_without_charges_keep_their_cores(operator: tnlib.TTMatrix) -> None:
    with oracles.unchanged(*operator.arrays()):
        made = to_tenpy(operator)
    made.test_sanity()
    back = from_tenpy(made)
    assert back.ranks == operator.ranks
    assert back.dtype == operator.dtype
    oracles.assert_close(back.full(), operator.full(), operator.dtype)


@pytest.mark.parametrize("conserve", [None, "parity", "Sz"])
def test_a_hamiltonian_of_tenpy_is_the_dense_one(conserve: str | None) -> None:
    h = np.array([0.1, 0.7, -0.3, 0.2])
    model = XXZChain({"L": 4, "Jxx": 1.0, "Jz": 0.6, "hz": h, "conserve": conserve or "None", "bc_MPS": "finite"})
    assert model.H_MPO.chinfo.qnumber == (conserve is not None)
    operator = from_tenpy(model.H_MPO)
    oracles.assert_close(operator.full(), xxz(4, 1.0, 0.6, h))
    made = to_tenpy(operator, model.lat.mps_sites())
    assert made.is_equal(model.H_MPO)
    oracles.assert_close(from_tenpy(made).full(), xxz(4, 1.0, 0.6, h))


@pytest.mark.parametrize("conserve", [("N", "Sz"), ("parity", "Sz"), ("parity", "parity"), ("N", None)])
def test_an_operator_on_electrons_is_the_same_whatever_they_conserve(conserve: tuple[str | None, str | None]) -> None:
    """Sites of four states, whose order by charge is no exchange of pairs."""
    options = {"L": 4, "t": 1.0, "U": 3.0, "mu": 0.5, "bc_MPS": "finite"}
    plain = from_tenpy(FermiHubbardModel({**options, "cons_N": None, "cons_Sz": None}).H_MPO)
    model = FermiHubbardModel({**options, "cons_N": conserve[0], "cons_Sz": conserve[1]})
    operator = from_tenpy(model.H_MPO)
    oracles.assert_close(operator.full(), plain.full())
    made = to_tenpy(plain, model.lat.mps_sites())
    assert made.is_equal(model.H_MPO)
    assert all(w.get_leg("wL").is_blocked() and w.get_leg("wL").sorted for w in made._W)


def test_rows_are_what_an_operator_makes() -> None:
    sp = tnlib.TTMatrix([np.array([[0.0, 1.0], [0.0, 0.0]])[None, ..., None], np.eye(2)[None, ..., None]])
    for site in (SpinHalfSite("Sz"), SpinHalfSite(None)):
        operator = to_tenpy(sp, site)
        state = MPS.from_product_state([site] * 2, ["down", "up"], unit_cell_width=2)
        operator.apply_naively(state)
        oracles.assert_close(from_tenpy(state).full(), sp.full().reshape(2, 2, 2, 2)[..., 1, 0])


def test_an_adjoint_still_to_be_added_is_added() -> None:
    options = {"L": 4, "S": 0.5, "Jx": 1.0, "Jy": 1.0, "Jz": 0.6, "hz": 0.2, "conserve": "Sz", "bc_MPS": "finite"}
    whole = SpinChain({**options, "explicit_plus_hc": False}).H_MPO
    halves = SpinChain({**options, "explicit_plus_hc": True}).H_MPO
    assert halves.explicit_plus_hc
    oracles.assert_close(from_tenpy(halves).full(), from_tenpy(whole).full())
    oracles.assert_close(from_tenpy(whole).full()[::-1, ::-1], xxz(4, 1.0, 0.6, 0.2))  # SpinSite begins with down


def test_an_operator_begins_at_idl_and_ends_at_idr() -> None:
    uniform = XXZChain({"L": 2, "Jxx": 1.0, "Jz": 0.6, "hz": 0.2, "bc_MPS": "infinite"}).H_MPO
    cut = MPO(uniform.sites * 2, uniform._W * 2, "finite", 0, -1, mps_unit_cell_width=4)
    assert cut.chi[0] > 1
    oracles.assert_close(from_tenpy(cut).full(), xxz(4, 1.0, 0.6, 0.2))
    cut.IdR[-1] = None
    with oracles.refused(ValueError, "from_tenpy: obj", "IdR", "None"):
        from_tenpy(cut)


def test_an_operator_that_changes_the_charge_has_one_charge() -> None:
    sp = np.array([[0.0, 1.0], [0.0, 0.0]])
    raise_any = [np.stack([np.stack([np.eye(2), sp]), np.stack([np.zeros((2, 2)), np.eye(2)])])] * 5  # l r m n
    cores = [w.transpose(0, 2, 3, 1) for w in raise_any]
    total = tnlib.TTMatrix([cores[0][:1], *cores[1:-1], cores[-1][..., 1:]])
    back = from_tenpy(to_tenpy(total, SpinHalfSite("Sz")))
    oracles.assert_close(back.full(), total.full())
    with oracles.refused(ValueError, "to_tenpy: value", "one total charge"):
        to_tenpy(total + total.H, SpinHalfSite("Sz"))


def test_an_operator_of_large_norm_shares_it_among_its_tensors() -> None:
    identity = tnlib.TTMatrix([np.eye(4)[None, ..., None]] * 200, None, 600.0)  # norm 2**200 exp(600)
    for site in (None, SpinHalfFermionSite("N", "Sz")):
        made = to_tenpy(identity, site)
        assert max(np.abs(w.to_ndarray()).max() for w in made._W) < 100.0
        assert from_tenpy(made).log_norm() == pytest.approx(identity.log_norm(), rel=1e-12)


@pytest.mark.parametrize("conserve", [None, "Sz"])
def test_zero_is_an_operator(conserve: str | None) -> None:
    zero = tnlib.TTMatrix([np.zeros((1, 2, 2, 1))] * 3)
    assert from_tenpy(to_tenpy(zero, SpinHalfSite(conserve))).norm() == 0.0


# ------------------------------------------------------------------------------------------------ refusals


def infinite() -> MPS:
    return MPS.from_product_state([SpinHalfSite(None)] * 2, ["up"] * 2, bc="infinite", unit_cell_width=2)


def segment() -> MPS:
    return random_state().extract_segment(1, 3)


def grouped() -> MPS:
    state = random_state()
    state.group_sites(2)
    return state


def unpaired() -> MPS:
    sites = [GroupedSite([SpinHalfSite("Sz")] * 2)] * 2
    return MPS.from_product_state(sites, [0, 1], unit_cell_width=2)


def not_a_number() -> MPS:
    state = random_state()
    state.norm = math.nan
    return state


REFUSED = {
    "infinite": (infinite, ["finite boundary conditions", "'infinite'"]),
    "segment": (segment, ["finite boundary conditions", "'segment'"]),
    "infinite operator": (lambda: XXZChain({"L": 2, "bc_MPS": "infinite"}).H_MPO, ["finite", "'infinite'"]),
    "grouped": (grouped, ["one by one", "group_split()"]),
    "grouped sites": (unpaired, ["one by one", "group_split()"]),
    "norm": (not_a_number, ["finite norm", "nan"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_finite_chain_is_refused(case: str) -> None:
    make, words = REFUSED[case]
    with oracles.refused(ValueError, "from_tenpy: obj", *words):
        from_tenpy(make())


def test_what_is_no_state_is_refused() -> None:
    purified = PurificationMPS.from_infiniteT([SpinHalfSite(None)] * 2, unit_cell_width=2)
    for obj in (purified, np.ones(4), None, SpinHalfSite(None)):
        with oracles.refused(TypeError, "from_tenpy: obj", "an MPS", type(obj).__name__):
            from_tenpy(obj)


def test_two_precisions_become_the_wider_one() -> None:
    """TeNPy mixes them itself: its singular values are always in double precision."""
    state = to_tenpy(tnlib.tt_svd(spin_chain(dtype=np.float32)).value)
    state.convert_form("B")
    assert {b.dtype for b in state._B} == {np.dtype(np.float32), np.dtype(np.float64)}
    train = from_tenpy(state)
    assert {core.dtype for core in train.cores} == {np.dtype(np.float64)}
    oracles.assert_close(train.full(), spin_chain(), np.float32)


def test_values_that_are_no_trains_are_refused() -> None:
    for value in (np.eye(2), tnlib.tucker(np.eye(2)).value, tnlib.tt_svd(np.eye(2)), None):
        with oracles.refused(TypeError, "to_tenpy: value", type(value).__name__):
            to_tenpy(value)
    with oracles.refused(ValueError, "to_tenpy: value", "(2,) and (3,)"):
        to_tenpy(tnlib.TTMatrix([np.ones((1, 2, 3, 1))]))


def test_sites_that_do_not_fit_are_refused() -> None:
    train = tnlib.tt_svd(np.eye(2)).value
    with oracles.refused(ValueError, "to_tenpy: sites", "(2, 2)", "(2, 3)"):
        to_tenpy(train, [SpinHalfSite("Sz"), SpinSite(1.0, "Sz")])
    with oracles.refused(ValueError, "to_tenpy: sites", "(2, 2)", "(2,)"):
        to_tenpy(train, [SpinHalfSite("Sz")])
    with oracles.refused(ValueError, "to_tenpy: sites", "set_common_charges"):
        to_tenpy(train, [SpinHalfSite("Sz"), SpinHalfSite("parity")])
    for sites in ("Sz", 2, [None, None]):
        with oracles.refused(TypeError, "to_tenpy: sites", "Site of TeNPy"):
            to_tenpy(train, sites)
