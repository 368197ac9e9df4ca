"""Diagrams of quimb networks: measured tensors, lattices, rows of long chains."""

from __future__ import annotations

import numpy as np
import pytest
import quimb.tensor as qtn
from random_trains import train

import tnlib
from tnlib.interop.quimb import Network, spell_out, to_network


@pytest.mark.slow
def test_copy_tensors_are_dots() -> None:
    rng = np.random.default_rng(0)
    network = to_network(tnlib.CP(np.ones(2), [rng.standard_normal((n, 2)) for n in (3, 4, 5)]))
    kinds = [n.kind for n in tnlib.draw(network).diagram.nodes]
    assert sorted(kinds) == ["delta", "matrix", "matrix", "matrix", "weights"]
    assert [n.kind for n in tnlib.draw(spell_out(network)).diagram.nodes].count("delta") == 1


def test_triangles_point_to_the_centre() -> None:
    nodes = tnlib.draw(to_network(tnlib.canonicalize(train((3,) * 5, 2), 2))).diagram.nodes
    assert [n.direction and n.direction[0] > 0 for n in nodes] == [True, True, None, False, False]


def test_lattices_are_grids() -> None:
    peps = tnlib.draw(qtn.PEPS.rand(2, 3, bond_dim=2, seed=0)).diagram
    assert len({n.position[0] for n in peps.nodes}) == 3
    assert len({n.position[1] for n in peps.nodes}) == 2
    assert len(peps.bonds) == 7


def test_long_chains_are_in_rows() -> None:
    nodes = tnlib.draw(to_network(tnlib.canonicalize(train((3,) * 23, 2), 15))).diagram.nodes
    assert {n.kind for n in nodes[1:15]} == {"isometry"}
    assert all(n.direction is None or n.direction[1] == 0 for n in nodes), "also at the end of a row"
    assert [n.direction and n.direction[0] > 0 for n in nodes[6:18]] == [True] * 9 + [None] + [False] * 2
    assert len({n.position[1] for n in nodes}) == 3


def test_a_state_and_its_conjugate_are_in_two_rows() -> None:
    ket = to_network(train((2,) * 3, 2))
    norm = tnlib.draw(ket | ket.H.reindex({f"bond{k}": f"c{k}" for k in (1, 2)})).diagram
    assert [n.position[1] for n in norm.nodes[:3]] == [0, 0, 0]
    assert {n.position[1] for n in norm.nodes[3:]} == {norm.nodes[3].position[1]} != {0}
    assert norm.open_legs == ()


def test_open_legs_have_the_order_of_the_format() -> None:
    network = to_network(tnlib.TensorTrain([np.ones((1, 2, 2)), np.ones((2, 3, 2)), np.ones((2, 4, 1))]))
    assert tnlib.draw(Network(network, ["k2", "k0", "k1"])).diagram.open_legs == (("k2", 4), ("k0", 2), ("k1", 3))


def test_an_empty_network_is_refused() -> None:
    with pytest.raises(tnlib.ArgumentError, match="draw: tn must hold at least one tensor"):
        tnlib.draw(qtn.TensorNetwork([]))
