"""Formats as networks of quimb and back: the same numbers in both, whatever was done to the network in between."""

from __future__ import annotations

from typing import Any

import numpy as np
import oracles
import pytest
import quimb.tensor as qtn
from hypothesis import given
from hypothesis import strategies as st
from oracles import ALL_FORMATS, format_id

import tnlib
from tnlib import network
from tnlib.network.build import leg_names

VIDALS = [
    tnlib.vidal(tnlib.TensorTrain(oracles.random_cores((2, 3, 2, 4), (1, 2, 5, 3, 1), dtype), log_scale=0.75))
    for dtype in oracles.DTYPES
] + [tnlib.vidal(tnlib.TensorTrain([np.ones((1, 3, 1))]))]
EVERY = [*ALL_FORMATS, *VIDALS]
every_format = pytest.mark.parametrize("value", EVERY, ids=format_id)


def dense(value: Any) -> np.ndarray:
    """The array whose legs a network of `value` has open, an operator's rows before its columns."""
    full = oracles.contract(value.train() if isinstance(value, tnlib.Vidal) else value)
    match value:
        case tnlib.TTMatrix():
            return full.reshape(*value.row_shape, *value.col_shape)
        case tnlib.KroneckerTerms():
            (_, p, p_in), (q, q_in) = value.left.shape, value.right[0].shape
            return full.reshape(p, q, p_in, q_in)
    return full


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
def test_a_network_holds_the_same_numbers(value: Any) -> None:
    tn = network.to_network(value)
    assert isinstance(tn, qtn.TensorNetwork)
    assert set(tn.outer_inds()) == set(leg_names(value))
    oracles.assert_close(network.contract(tn, legs=leg_names(value)), dense(value), value.dtype)
    by_quimb = tn.contract(output_inds=leg_names(value))
    oracles.assert_close(by_quimb.data, dense(value), value.dtype)


@every_format
def test_there_and_back_nothing_is_lost(value: Any) -> None:
    with oracles.unchanged(*value.arrays()):
        assert_same(network.from_network(network.to_network(value)), value)
    names = [f"leg {name}" for name in reversed(leg_names(value))]
    tn = network.to_network(value, names=names)
    assert_same(network.from_network(tn, type(value), names=names), value)


@every_format
def test_the_order_of_tensors_and_indices_is_no_matter(value: Any) -> None:
    for seed in range(3):
        got = network.from_network(shuffled(network.to_network(value), seed))
        assert type(got) is type(value)
        oracles.assert_close(dense(got), dense(value), value.dtype)


@every_format
def test_copy_tensors_may_be_stored(value: Any) -> None:
    spelled = network.spell_out(network.to_network(value))
    assert all(len(holders) <= 2 for holders in spelled.ind_map.values())
    assert set(spelled.outer_inds()) == set(leg_names(value))
    oracles.assert_close(network.contract(spelled, legs=leg_names(value)), dense(value), value.dtype)


def test_a_train_is_a_state_of_quimb_under_another_name() -> None:
    tt = tnlib.tt_svd(oracles.normal((2, 2, 2, 2, 2))).value
    state = network.to_network(tt).view_as(
        qtn.MatrixProductState, L=5, site_ind_id="k{}", site_tag_id="I{}", cyclic=False
    )
    for bond in range(1, 5):
        np.testing.assert_allclose(state.schmidt_values(bond), tnlib.schmidt_values(tt, bond) ** 2, rtol=1e-10)


def test_states_and_operators_of_quimb_are_recognised() -> None:
    state = qtn.MPS_rand_state(6, 4, seed=1)
    oracles.assert_close(network.from_network(state, tnlib.TensorTrain).full().reshape(-1, 1), state.to_dense())
    operator = qtn.MPO_ham_heis(5)
    got = network.from_network(operator, tnlib.TTMatrix)
    oracles.assert_close(got.full(), operator.to_dense())


def test_a_center_is_believed_only_where_it_is_true() -> None:
    tt = tnlib.canonicalize(tnlib.tt_svd(oracles.normal((3, 4, 5))).value, 1)
    tn = network.to_network(tt)
    assert network.from_network(tn).center == 1
    tn["I0"].modify(data=tn["I0"].data * 2)
    got = network.from_network(tn)
    assert got.center is None
    oracles.assert_close(got.full(), 2 * tt.full())


def test_low_rank_terms_of_several_ranks_are_padded() -> None:
    a = oracles.normal
    terms = [tnlib.LowRank(a((4, r), seed=r), a((r, 3), seed=9)) for r in (1, 3, 2)]
    value = tnlib.KroneckerTerms(a((3, 2, 5)), terms)
    back = network.from_network(network.to_network(value))
    assert [term.ranks for term in back.right] == [(3,), (3,), (3,)]
    oracles.assert_close(back.full(), value.full())
    mixed = tnlib.KroneckerTerms(a((3, 2, 5)), [*terms[:2], terms[2].full()])
    oracles.assert_close(network.from_network(network.to_network(mixed)).full(), mixed.full())


def test_an_attention_head_as_a_network_scores_all_pairs() -> None:
    x, w_q, w_k = (oracles.normal(shape, seed=k) for k, shape in enumerate([(7, 16), (16, 3), (16, 3)]))
    omega = network.to_network(tnlib.LowRank(w_q, w_k.T), names=("query", "key"))
    scores = qtn.Tensor(x, ("i", "query")) & omega & qtn.Tensor(x, ("j", "key"))
    oracles.assert_close(network.contract(scores, legs=("i", "j")), (x @ w_q) @ (x @ w_k).T)
    cost = network.contraction_cost(scores, legs=("i", "j"))
    assert cost.multiplications == 2 * 7 * 16 * 3 + 7 * 7 * 3  # nothing of size 16 x 16


@given(exponent=st.integers(-150, 150), value=st.sampled_from([v for v in EVERY if v.dtype.itemsize >= 8]))
def test_an_exponent_goes_into_the_format(exponent: int, value: Any) -> None:
    if value.dtype in (np.float32, np.complex64):
        exponent //= 8
    tn = network.to_network(value)
    tn.exponent += exponent
    got = network.from_network(tn)
    oracles.assert_close(
        dense(got) / got.dtype.type(10.0**exponent), dense(value), value.dtype, factor=64 + 8 * abs(exponent)
    )


def test_names_are_checked() -> None:
    a = tnlib.LowRank(np.ones((3, 2)), np.ones((2, 4)))
    with oracles.refused(TypeError, "from_network: kind must be a format"):
        network.from_network(network.to_network(tnlib.tt_svd(np.ones((2, 2))).value), np.ones(2))
    with oracles.refused(TypeError, "to_network", "value", "ndarray"):
        network.to_network(np.ones((2, 2)))
    with oracles.refused(ValueError, "to_network", "names", "2", "3"):
        network.to_network(a, names=("i", "j", "k"))
    with oracles.refused(ValueError, "to_network", "names", "once"):
        network.to_network(a, names=("i", "i"))
    with oracles.refused(ValueError, "to_network", "names", "bond"):
        network.to_network(a, names=("bond", "i"))
    with oracles.refused(TypeError, "to_network", "names"):
        network.to_network(a, names="ij")


def test_what_is_no_such_format_is_refused() -> None:
    train = network.to_network(tnlib.tt_svd(oracles.normal((3, 4, 5))).value)
    with oracles.refused(TypeError, "from_network", "tn", "ndarray"):
        network.from_network(np.ones(3))
    with oracles.refused(ValueError, "from_network", "at least one tensor"):
        network.from_network(qtn.TensorNetwork([]))
    with oracles.refused(TypeError, "from_network", "kind", "MPS"):
        network.from_network(train, "MPS")
    with oracles.refused(ValueError, "from_network", "names", "k0, k1"):
        network.from_network(train, names=("k0", "k1"))
    with oracles.refused(ValueError, "from_network", "names", "query"):
        network.from_network(train.reindex({"k1": "query"}))
    with oracles.refused(ValueError, "from_network", "kind", "tag"):
        network.from_network(qtn.MPS_rand_state(4, 2, seed=0))
    for kind in (tnlib.Tucker, tnlib.CP, tnlib.SVD, tnlib.Vidal):
        with oracles.refused(ValueError, "from_network", f"structure of a {kind.__name__}"):
            network.from_network(train, kind)
    for kind in (tnlib.TTMatrix, tnlib.LowRank, tnlib.KroneckerTerms):
        with oracles.refused(ValueError, "from_network"):
            network.from_network(train, kind)
    ring = qtn.MPS_rand_state(4, 2, cyclic=True, seed=0)
    with oracles.refused(ValueError, "from_network", "structure of a TensorTrain"):
        network.from_network(ring, tnlib.TensorTrain)
    star = network.to_network(tnlib.tucker(oracles.normal((3, 4, 5))).value)
    with oracles.refused(ValueError, "from_network", "structure of a TensorTrain"):
        network.from_network(star, tnlib.TensorTrain)
    low = network.to_network(tnlib.LowRank(np.ones((3, 2)), np.ones((2, 4))))
    low.exponent = 400.0
    with oracles.refused(ValueError, "from_network", "exponent"):
        network.from_network(low)
    low["LEFT"].modify(data=np.full((3, 2), np.nan))
    with oracles.refused(ValueError, "from_network", "finite"):
        network.from_network(low)


def test_without_quimb_it_says_what_is_missing() -> None:
    import subprocess
    import sys

    code = (
        "import sys; sys.modules['quimb.tensor'] = None; import numpy as np, tnlib\n"
        "try: tnlib.network.to_network(tnlib.CP(np.ones(1), [np.ones((2, 1))]))\n"
        "except ModuleNotFoundError as missing: print(missing)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert "to_network needs quimb" in done.stdout


def test_the_table_of_contents() -> None:
    import ast
    from pathlib import Path

    stub = ast.parse(Path(network.__file__).with_suffix(".pyi").read_text())
    named = {alias.name for node in stub.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert named == set(network.__all__) <= set(dir(network))
    assert tnlib.network is network
    assert all(getattr(network, name).__doc__ for name in network.__all__)
    with pytest.raises(AttributeError, match="no attribute 'contractt'"):
        network.contractt  # noqa: B018
