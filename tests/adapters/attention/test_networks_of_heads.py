"""Attention as networks: operators of a trained model, with its biases, contracted with residual streams."""

from __future__ import annotations

from typing import Any

import numpy as np
import oracles
import pytest
import quimb.tensor as qtn
from tnlib_adapters import open_checkpoint
from tnlib_adapters.attention.attention import Attention
from tnlib_adapters.attention.rotary import Rotary
from tnlib_adapters.data import builtin_path

from tnlib.interop import quimb as network


@pytest.fixture(scope="module")
def layer() -> Attention:
    return open_checkpoint(builtin_path()).attention(1)


def stream(n: int, width: int, name: str, leg: str) -> Any:
    """Residual stream in homogeneous coordinates, positions on `name`, features on `leg`."""
    x = oracles.normal((n, width), np.float32)
    return qtn.Tensor(np.concatenate([x, np.ones((n, 1), np.float32)], axis=1), (name, leg))


def test_scores_of_every_head(layer: Attention) -> None:
    query, key = stream(12, layer.d_model, "i", "query"), stream(12, layer.d_model, "j", "key")
    want = layer.scores(query.data[:, :-1])
    for head in range(layer.n_heads):
        omega = network.to_network(layer.qk(head), names=("query", "key"))
        got = layer.scale * network.contract(query & omega & key, legs=("i", "j"))
        oracles.assert_close(got, want[head], np.float32, factor=200)


def test_two_heads_in_a_row_are_one_network(layer: Attention) -> None:
    """x~ OV_1 OV_2: a virtual head, in the order that never leaves the small bonds."""
    one = network.to_network(layer.ov(0), names=("in", "between"))
    two = network.to_network(layer.ov(1), names=("between", "out"))
    both = one & two
    cost = network.contraction_cost(stream(5, layer.d_model, "i", "in") & both, legs=("i", "out"))
    d, r = layer.d_model + 1, layer.d_head
    assert cost.multiplications <= 2 * 5 * r * d + 5 * d * r + d * r * r + 5 * r * r
    got = network.contract(both, legs=("in", "out"))
    oracles.assert_close(got, (layer.ov(0) @ layer.ov(1)).full(), np.float32, factor=200)


def test_a_frozen_layer(layer: Attention) -> None:
    x = oracles.normal((9, layer.d_model), np.float32)
    patterns = np.abs(oracles.normal((layer.n_heads, 9, 9), np.float32))
    frozen = layer.frozen(patterns / patterns.sum(-1, keepdims=True))
    tn = network.to_network(frozen.terms, names=("i", "out", "j", "in"))
    got = network.contract(tn & qtn.Tensor(x, ("j", "in")), legs=("i", "out"))
    oracles.assert_close(got, frozen.terms.apply(x), np.float32, factor=200)
    back = network.from_network(tn, names=("i", "out", "j", "in"))
    oracles.assert_close(back.left, frozen.terms.left, np.float32)


def test_a_rotary_head_at_many_distances() -> None:
    w = oracles.normal((4, 1, 6, 4))
    layer = Attention(w[0], w[1], w[2], w[3].transpose(0, 2, 1), scale=0.5, rotary=Rotary([1.0, 0.1]))
    tn = network.to_network(layer.qk_tensor(0, range(8)), names=("distance", "query", "key"))
    at_three = network.contract(tn.isel({"distance": 3}), legs=("query", "key"))
    oracles.assert_close(at_three, layer.qk(0, distance=3).full(), factor=1000)


def test_the_derivative_of_a_loss_in_a_weight(layer: Attention) -> None:
    """d score[i, j] / d left factor is x~_i (x) right factor x~_j."""
    query, key = stream(3, layer.d_model, "i", "query"), stream(4, layer.d_model, "j", "key")
    omega = layer.qk(2)
    got = network.derivative(query & network.to_network(omega, names=("query", "key")) & key, "LEFT", legs=("i", "j"))
    want = np.einsum("iq,rk,jk->ijqr", query.data, omega.right, key.data)
    oracles.assert_close(got, want, np.float32, factor=200)
