"""Networks of quimb as formats, in any order of tensors and indices; states and operators as trains."""

from __future__ import annotations

from typing import Any

import numpy as np
import oracles
import pytest
import quimb.tensor as qtn
import torch
from hypothesis import given
from hypothesis import strategies as st
from physics_states import operators
from quimb_networks import EVERY_FORMAT, dense, every_format
from random_trains import trains
from tnlib_adapters.interop.quimb import from_quimb, to_quimb

import tnlib
from tnlib.interop import quimb
from tnlib.interop.quimb.network_builder import leg_names


def assert_same(got: Any, want: Any) -> None:
    """The same arrays bit for bit; a scale passes through a logarithm to base 10."""
    if hasattr(want, "log_scale"):
        assert got.log_scale == pytest.approx(want.log_scale, rel=1e-15, abs=1e-300)
        assert getattr(got, "center", None) == getattr(want, "center", None)
    assert type(got) is type(want)
    for one, other in zip(got.arrays(), want.arrays(), strict=True):
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        assert one.tobytes() == other.tobytes()
    assert got.shape == want.shape


def shuffled(tn: Any, seed: int) -> Any:
    """The same network with its tensors and all their indices in another order, and other names of bonds."""
    rng = np.random.default_rng(seed)
    tensors = [tn.tensor_map[k].copy() for k in rng.permutation(list(tn.tensor_map))]
    for tensor in tensors:
        tensor.transpose_(*rng.permutation(tensor.inds))
    out = qtn.TensorNetwork(tensors)
    out.exponent = tn.exponent
    return out.reindex({i: qtn.rand_uuid() for i in tn.ind_map if i not in tn.outer_inds()})


@every_format
def test_there_and_back_nothing_is_lost(value: Any) -> None:
    with oracles.unchanged(*value.arrays()):
        assert_same(quimb.from_network(quimb.to_network(value)), value)
    names = [f"leg {name}" for name in reversed(leg_names(value))]
    tn = quimb.to_network(value, names=names)
    assert_same(quimb.from_network(tn, type(value), names=names), value)


@every_format
def test_the_order_of_tensors_and_indices_is_no_matter(value: Any) -> None:
    for seed in range(3):
        got = quimb.from_network(shuffled(quimb.to_network(value), seed))
        assert type(got) is type(value)
        oracles.assert_close(dense(got), dense(value), value.dtype)


def test_states_and_operators_of_quimb_are_recognised() -> None:
    state = qtn.MPS_rand_state(6, 4, seed=1)
    oracles.assert_close(quimb.from_network(state, tnlib.TensorTrain).full().reshape(-1, 1), state.to_dense())
    operator = qtn.MPO_ham_heis(5)
    got = quimb.from_network(operator, tnlib.TTMatrix)
    oracles.assert_close(got.full(), operator.to_dense())


def test_a_center_is_believed_only_where_it_is_true() -> None:
    tt = tnlib.canonicalize(tnlib.tt_svd(oracles.normal((3, 4, 5))).value, 1)
    tn = quimb.to_network(tt)
    assert quimb.from_network(tn).center == 1
    tn["I0"].modify(data=tn["I0"].data * 2)
    got = quimb.from_network(tn)
    assert got.center is None
    oracles.assert_close(got.full(), 2 * tt.full())


def test_low_rank_terms_of_several_ranks_are_padded() -> None:
    a = oracles.normal
    terms = [tnlib.LowRank(a((4, r), seed=r), a((r, 3), seed=9)) for r in (1, 3, 2)]
    value = tnlib.KroneckerTerms(a((3, 2, 5)), terms)
    back = quimb.from_network(quimb.to_network(value))
    assert [term.ranks for term in back.right] == [(3,), (3,), (3,)]
    oracles.assert_close(back.full(), value.full())
    mixed = tnlib.KroneckerTerms(a((3, 2, 5)), [*terms[:2], terms[2].full()])
    oracles.assert_close(quimb.from_network(quimb.to_network(mixed)).full(), mixed.full())


@given(exponent=st.integers(-150, 150), value=st.sampled_from([v for v in EVERY_FORMAT if v.dtype.itemsize >= 8]))
def test_an_exponent_goes_into_the_format(exponent: int, value: Any) -> None:
    if value.dtype in (np.float32, np.complex64):
        exponent //= 8
    tn = quimb.to_network(value)
    tn.exponent += exponent
    got = quimb.from_network(tn)
    oracles.assert_close(
        dense(got) / got.dtype.type(10.0**exponent), dense(value), value.dtype, factor=64 + 8 * abs(exponent)
    )


def test_what_is_no_such_format_is_refused() -> None:
    train = quimb.to_network(tnlib.tt_svd(oracles.normal((3, 4, 5))).value)
    with oracles.refused(TypeError, "from_network", "tn", "ndarray"):
        quimb.from_network(np.ones(3))
    with oracles.refused(ValueError, "from_network", "at least one tensor"):
        quimb.from_network(qtn.TensorNetwork([]))
    with oracles.refused(TypeError, "from_network", "kind", "MPS"):
        quimb.from_network(train, "MPS")
    with oracles.refused(ValueError, "from_network", "names", "k0, k1"):
        quimb.from_network(train, names=("k0", "k1"))
    with oracles.refused(ValueError, "from_network", "names", "query"):
        quimb.from_network(train.reindex({"k1": "query"}))
    with oracles.refused(ValueError, "from_network", "kind", "tag"):
        quimb.from_network(qtn.MPS_rand_state(4, 2, seed=0))
    for kind in (tnlib.Tucker, tnlib.CP, tnlib.SVD, tnlib.Vidal):
        with oracles.refused(ValueError, "from_network", f"structure of a {kind.__name__}"):
            quimb.from_network(train, kind)
    for kind in (tnlib.TTMatrix, tnlib.LowRank, tnlib.KroneckerTerms):
        with oracles.refused(ValueError, "from_network"):
            quimb.from_network(train, kind)
    ring = qtn.MPS_rand_state(4, 2, cyclic=True, seed=0)
    with oracles.refused(ValueError, "from_network", "structure of a TensorTrain"):
        quimb.from_network(ring, tnlib.TensorTrain)
    star = quimb.to_network(tnlib.tucker(oracles.normal((3, 4, 5))).value)
    with oracles.refused(ValueError, "from_network", "structure of a TensorTrain"):
        quimb.from_network(star, tnlib.TensorTrain)
    low = quimb.to_network(tnlib.LowRank(np.ones((3, 2)), np.ones((2, 4))))
    low.exponent = 400.0
    with oracles.refused(ValueError, "from_network", "exponent"):
        quimb.from_network(low)
    low["LEFT"].modify(data=np.full((3, 2), np.nan))
    with oracles.refused(ValueError, "from_network", "finite"):
        quimb.from_network(low)


def dense_by_quimb(obj: Any) -> np.ndarray:
    """As quimb multiplies it out: a state with one leg per site, an operator as a matrix."""
    if isinstance(obj, qtn.MatrixProductOperator):
        return np.asarray(obj.to_dense())
    return np.asarray(obj.to_dense(*([index] for index in obj.site_inds)))


@given(trains() | operators(), st.integers(0, 99))
def test_indices_are_found_by_their_names(value: Any, seed: int) -> None:
    obj = shuffled(to_quimb(value), seed).view_as(type(to_quimb(value)), like=to_quimb(value))
    oracles.assert_close(from_quimb(obj).full(), value.full(), value.dtype)


@pytest.mark.parametrize("center", range(5))
def test_a_centre_is_measured_and_not_believed(center: int) -> None:
    state = qtn.MPS_rand_state(5, 3, seed=1)
    state.canonicalize_(center)
    assert from_quimb(state).center == center
    assert to_quimb(from_quimb(state)).calc_current_orthog_center() == (center, center)
    state[(center + 1) % 5].modify(apply=lambda a: 1.001 * a)
    assert from_quimb(state).center is None


def test_upper_indices_are_rows() -> None:
    rng = np.random.default_rng(0)
    operator = tnlib.ttm_svd(rng.standard_normal((6, 4)), (2, 3), (2, 2)).value
    vector = tnlib.tt_svd(rng.standard_normal((2, 2))).value
    made = to_quimb(operator)
    assert made.upper_inds == ("k0", "k1")
    assert made.lower_inds == ("b0", "b1")
    applied = made.apply(to_quimb(vector))
    oracles.assert_close(dense_by_quimb(applied).ravel(), operator.full() @ vector.full().ravel())


def test_an_exponent_is_a_power_of_ten() -> None:
    state = qtn.MPS_rand_state(4, 2, seed=0)
    state.exponent = 300.0
    state.exponent = state.exponent + 300.0
    assert from_quimb(state).log_norm() == pytest.approx(600 * np.log(10), rel=1e-14)
    again = to_quimb(from_quimb(state))
    assert again.norm(strip_exponent=True)[1] == pytest.approx(600.0, abs=0.5)


def test_names_of_indices_do_not_matter() -> None:
    state = qtn.MPS_rand_state(12, 2, seed=0, site_ind_id="spin({})", site_tag_id="here{}")
    plain = qtn.MPS_rand_state(12, 2, seed=0)
    oracles.assert_close(from_quimb(state).full(), dense_by_quimb(plain))
    operator = qtn.MPO_rand(3, 2, seed=0, upper_ind_id="out.{}", lower_ind_id="in.{}")
    oracles.assert_close(from_quimb(operator).full(), dense_by_quimb(operator))


def test_missing_and_double_bonds_are_bonds() -> None:
    rng = np.random.default_rng(0)
    a, b, c = rng.standard_normal((2, 3, 4)), rng.standard_normal((4, 2, 3)), rng.standard_normal(2)
    tensors = [
        qtn.Tensor(a, ("k0", "x", "y"), "I0"),
        qtn.Tensor(b, ("y", "k1", "x"), "I1"),
        qtn.Tensor(c, ("k2",), "I2"),
    ]
    like = qtn.MPS_rand_state(3, 2)
    state = qtn.TensorNetwork(tensors).view_as(qtn.MatrixProductState, like=like)
    got = from_quimb(state)
    assert got.ranks == (1, 12, 1, 1)
    oracles.assert_close(got.full(), np.einsum("axy,ybx,c->abc", a, b, c))


def test_a_state_of_product_form_without_bonds() -> None:
    state = qtn.MPS_product_state([np.array([[[1.0, 2.0]]])[0], np.array([[3.0, 4.0]])])
    oracles.assert_close(from_quimb(state).full(), np.outer([1, 2], [3, 4]))


def test_one_site() -> None:
    state = qtn.MatrixProductState([np.array([3.0, 4.0j])])
    assert from_quimb(state).cores[0].shape == (1, 2, 1)
    assert from_quimb(state).norm() == pytest.approx(5.0)
    operator = qtn.MatrixProductOperator([np.arange(6.0).reshape(2, 3)])
    oracles.assert_close(from_quimb(operator).full(), np.arange(6.0).reshape(2, 3))


def test_real_and_complex_tensors_meet_in_one_dtype() -> None:
    state = qtn.MPS_rand_state(3, 2, seed=0, dtype="float32")
    state[1].modify(apply=lambda a: a * np.complex64(1j))
    assert from_quimb(state).dtype == np.complex64
    assert {core.dtype for core in from_quimb(state).cores} == {np.dtype(np.complex64)}


def test_tensors_of_torch_are_read() -> None:
    state = qtn.MPS_rand_state(4, 2, seed=0)
    wanted = dense_by_quimb(state)
    state.apply_to_arrays(torch.tensor)
    oracles.assert_close(from_quimb(state).full(), wanted)


def test_two_hundred_sites() -> None:
    state = qtn.MPS_rand_state(200, 8, seed=0)
    train = from_quimb(state)
    assert train.norm() == pytest.approx(state.norm(), rel=1e-12)
    assert abs(to_quimb(train).H @ state) == pytest.approx(1.0, rel=1e-12)


def far_bond() -> Any:
    state = qtn.MPS_rand_state(4, 2)
    state[0].new_bond(state[2], size=2)
    return state


REFUSED = {
    "cyclic state": (lambda: qtn.MPS_rand_state(4, 2, cyclic=True), ["open chain", "cyclic MatrixProductState"]),
    "cyclic pair": (lambda: qtn.MatrixProductState([np.ones((2, 2, 2))] * 2), ["open chain", "cyclic"]),
    "cyclic operator": (lambda: qtn.MPO_rand(4, 2, cyclic=True), ["open chain", "cyclic MatrixProductOperator"]),
    "sites with gaps": (
        lambda: qtn.MatrixProductState([np.ones((2, 2)), np.ones((2, 2))], sites=[0, 2]),
        ["without gaps", "[0, 2]"],
    ),
    "bond that skips a site": (far_bond, ["structure of a TensorTrain", "k0, ", "are due"]),
    "two tensors on a site": (
        lambda: qtn.MPS_rand_state(3, 2).gate(np.eye(2), 1, contract=False),
        ["structure of a TensorTrain", "4 tensors instead of 3"],
    ),
    "operator without an index": (lambda: qtn.MPO_rand(3, 2).isel({"b1": 0}), ["b0, b1", "[0, 2]"]),
    "NaN": (lambda: qtn.MatrixProductState([np.array([1.0, np.nan])]), ["the tensor I0", "finite"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_chain_is_refused(case: str) -> None:
    make, words = REFUSED[case]
    with oracles.refused(ValueError, "from_quimb: ", *words):
        from_quimb(make())


@pytest.mark.parametrize("obj", [qtn.TN_rand_reg(4, 3, 2), qtn.PEPS.rand(2, 2, 2)], ids=type)
def test_what_is_no_state_is_refused(obj: Any) -> None:
    with oracles.refused(TypeError, "from_quimb: obj", "MatrixProductState", type(obj).__name__):
        from_quimb(obj)


def test_two_precisions_are_refused() -> None:
    state = qtn.MatrixProductState([np.ones((2, 2), np.float32), np.ones((2, 2))])
    with oracles.refused(TypeError, "from_quimb: ", "one precision", "float32 and float64"):
        from_quimb(state)
