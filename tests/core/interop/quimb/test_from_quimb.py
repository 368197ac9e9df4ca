"""Networks of quimb as formats, in any order of tensors and indices."""

from __future__ import annotations

from typing import Any

import numpy as np
import oracles
import pytest
import quimb.tensor as qtn
from hypothesis import given
from hypothesis import strategies as st
from quimb_networks import EVERY_FORMAT, dense, every_format

import tnlib
from tnlib.interop import quimb
from tnlib.interop.quimb.to_quimb import leg_names


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
