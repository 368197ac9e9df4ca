"""Formats as networks of quimb: the same numbers, named legs."""

from __future__ import annotations

from typing import Any

import numpy as np
import oracles
import quimb.tensor as qtn
from quimb_networks import dense, every_format

import tnlib
from tnlib.interop import quimb
from tnlib.interop.quimb.network_builder import leg_names


@every_format
def test_a_network_holds_the_same_numbers(value: Any) -> None:
    tn = quimb.to_network(value)
    assert isinstance(tn, qtn.TensorNetwork)
    assert set(tn.outer_inds()) == set(leg_names(value))
    oracles.assert_close(quimb.contract(tn, legs=leg_names(value)), dense(value), value.dtype)
    by_quimb = tn.contract(output_inds=leg_names(value))
    oracles.assert_close(by_quimb.data, dense(value), value.dtype)


def test_a_train_is_a_state_of_quimb_under_another_name() -> None:
    tt = tnlib.tt_svd(oracles.normal((2, 2, 2, 2, 2))).value
    state = quimb.to_network(tt).view_as(
        qtn.MatrixProductState, L=5, site_ind_id="k{}", site_tag_id="I{}", cyclic=False
    )
    for bond in range(1, 5):
        np.testing.assert_allclose(state.schmidt_values(bond), tnlib.schmidt_values(tt, bond) ** 2, rtol=1e-10)


def test_an_attention_head_as_a_network_scores_all_pairs() -> None:
    x, w_q, w_k = (oracles.normal(shape, seed=k) for k, shape in enumerate([(7, 16), (16, 3), (16, 3)]))
    omega = quimb.to_network(tnlib.LowRank(w_q, w_k.T), names=("query", "key"))
    scores = qtn.Tensor(x, ("i", "query")) & omega & qtn.Tensor(x, ("j", "key"))
    oracles.assert_close(quimb.contract(scores, legs=("i", "j")), (x @ w_q) @ (x @ w_k).T)
    cost = quimb.contraction_cost(scores, legs=("i", "j"))
    assert cost.multiplications == 2 * 7 * 16 * 3 + 7 * 7 * 3  # nothing of size 16 x 16


def test_names_are_checked() -> None:
    a = tnlib.LowRank(np.ones((3, 2)), np.ones((2, 4)))
    with oracles.refused(TypeError, "from_network: kind must be a format"):
        quimb.from_network(quimb.to_network(tnlib.tt_svd(np.ones((2, 2))).value), np.ones(2))
    with oracles.refused(TypeError, "to_network", "value", "ndarray"):
        quimb.to_network(np.ones((2, 2)))
    with oracles.refused(ValueError, "to_network", "names", "2", "3"):
        quimb.to_network(a, names=("i", "j", "k"))
    with oracles.refused(ValueError, "to_network", "names", "once"):
        quimb.to_network(a, names=("i", "i"))
    with oracles.refused(ValueError, "to_network", "names", "bond"):
        quimb.to_network(a, names=("bond", "i"))
    with oracles.refused(TypeError, "to_network", "names"):
        quimb.to_network(a, names="ij")
