"""Diagrams of trains: labels, bonds, and triangles towards the centre."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_trains import train

import tnlib


def test_labels_and_bonds() -> None:
    tt = train([2, 3, 4, 3], 5)
    diagram = tnlib.draw(tt).diagram
    assert [n.label for n in diagram.nodes] == ["0", "1", "2", "3"]
    assert {n.kind for n in diagram.nodes} == {"tensor"}
    assert diagram.bonds == tuple((f"bond{k}", tt.ranks[k]) for k in (1, 2, 3))
    assert all(leg.towards is None for leg in diagram.legs)


def test_open_legs_of_operators() -> None:
    operator = tnlib.ttm_svd(np.random.default_rng(0).standard_normal((12, 20)), (3, 4), (4, 5)).value
    assert sorted(tnlib.draw(operator).diagram.open_legs) == [("b0", 4), ("b1", 5), ("k0", 3), ("k1", 4)]


def test_the_title_has_the_power_of_two() -> None:
    assert tnlib.draw(train([2, 3], 2)).diagram.title == "TensorTrain, 2 x 3"
    scaled = tnlib.TensorTrain(train([2, 3], 2).cores, log_scale=2000 * np.log(2))
    assert tnlib.draw(scaled).diagram.title == "TensorTrain, 2 x 3, times exp(1386)"


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.integers(2, 4), min_size=2, max_size=6),
    st.integers(1, 4),
    st.integers(0, 5),
    st.booleans(),
    st.booleans(),
)
def test_triangles_point_to_the_centre_whether_it_is_known_or_not(
    sizes: list[int], rank: int, seed: int, known: bool, operator: bool
) -> None:
    tt: Any = train(sizes, rank, seed=seed)
    if operator:
        tt = tnlib.TTMatrix([np.stack([c, 2 * c], axis=2) for c in tt.cores])
    center = seed % len(sizes)
    mixed = tnlib.canonicalize(tt, center)
    cores = [c * (3.7 if k == center else 1) for k, c in enumerate(mixed.cores)]  # the centre is no isometry
    diagram = tnlib.draw(type(tt)(cores, center if known else None)).diagram
    kinds = [n.kind for n in diagram.nodes]
    assert kinds == ["tensor" if k == center else "isometry" for k in range(len(sizes))]
    signs = [n.direction[0] if n.direction else 0 for n in diagram.nodes]
    assert signs == [float(np.sign(center - k)) for k in range(len(sizes))]
    bonds = [leg for leg in diagram.legs if leg.b is not None]
    assert [leg.towards for leg in bonds] == [k if k <= center else k - 1 for k in range(1, len(sizes))]


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 1000), st.integers(2, 5))
def test_a_random_gauge_has_no_triangles(seed: int, count: int) -> None:
    tt = tnlib.canonicalize(train([3] * count, 2, seed=seed), count - 1)
    cores, g = list(tt.cores), np.random.default_rng(seed)
    for k in range(1, count):
        gauge = g.standard_normal((cores[k].shape[0],) * 2) + 3 * np.eye(cores[k].shape[0])
        cores[k - 1] = cores[k - 1] @ gauge
        cores[k] = np.tensordot(np.linalg.inv(gauge), cores[k], 1)
    assert {n.kind for n in tnlib.draw(tnlib.TensorTrain(cores)).diagram.nodes} == {"tensor"}
    network = tnlib.interop.quimb.to_network(tnlib.TensorTrain(cores))
    assert {n.kind for n in tnlib.draw(network).diagram.nodes} <= {"tensor", "matrix"}


def test_a_wrong_centre_gives_no_triangles() -> None:
    claimed = tnlib.TensorTrain(train([2, 3, 2], 2).cores, center=1)
    assert {n.kind for n in tnlib.draw(claimed).diagram.nodes} == {"tensor"}


def test_vidal_has_its_values_on_the_bonds() -> None:
    diagram = tnlib.draw(tnlib.vidal(train([3, 4, 5], 2))).diagram
    weights = [k for k, n in enumerate(diagram.nodes) if n.kind == "weights"]
    assert len(weights) == 2
    assert all(sum(k in (leg.a, leg.b) for leg in diagram.legs) == 2 for k in weights)


@pytest.mark.parametrize(("count", "center"), [(30, None), (31, None), (200, 100), (200, 3), (57, 56)])
def test_long_trains_are_shortened_and_count_the_omitted_cores(count: int, center: int | None) -> None:
    tt = train([2] * count, 2)
    tt = tt if center is None else tnlib.canonicalize(tt, center)
    nodes = tnlib.draw(tt).diagram.nodes
    omitted = sum(int(n.label.split()[0]) for n in nodes if n.kind == "ellipsis")
    shown = [int(n.label) for n in nodes if n.kind != "ellipsis"]
    assert len(shown) + omitted == count
    assert len(nodes) <= 30
    assert shown == sorted(shown)
    assert {0, count - 1, *(() if center is None else (center,))} <= set(shown)


def test_factors_point_to_the_core() -> None:
    x = np.random.default_rng(0).standard_normal((3, 4, 5))
    diagram = tnlib.draw(tnlib.tucker(x, ranks=(2, 3, 4)).value).diagram
    assert [n.kind for n in diagram.nodes] == ["tensor", *["isometry"] * 3]
    for node in diagram.nodes[1:]:
        assert node.direction is not None
        assert np.dot(node.direction, node.position) < 0, "the tip points to the core"
    assert diagram.bonds == (("r0", 2), ("r1", 3), ("r2", 4))
    assert [leg.towards for leg in diagram.legs if leg.b is not None] == [0, 0, 0]


def test_factors_that_are_not_isometric_are_squares() -> None:
    diagram = tnlib.draw(tnlib.Tucker(np.ones((2, 2)), [np.ones((3, 2)), np.eye(2)])).diagram
    assert [n.kind for n in diagram.nodes] == ["tensor", "matrix", "unitary"]


def test_factors_and_weights_meet_in_a_copy_tensor() -> None:
    rng = np.random.default_rng(0)
    diagram = tnlib.draw(tnlib.CP(np.ones(2), [rng.standard_normal((n, 2)) for n in (3, 4, 5)])).diagram
    assert [n.kind for n in diagram.nodes] == ["delta", "matrix", "matrix", "matrix", "weights"]
    assert diagram.bonds == (("R", 2),) * 4
    assert all(leg.towards is None for leg in diagram.legs)


def test_factors_of_svd_and_low_rank_are_measured() -> None:
    a = np.random.default_rng(0).standard_normal((4, 6))
    u, s, vh = tnlib.svd(a).value
    assert [n.kind for n in tnlib.draw(tnlib.svd(a).value).diagram.nodes] == ["unitary", "weights", "isometry"]
    left, right = tnlib.draw(tnlib.LowRank(u[:, :2], s[:2, None] * vh[:2])).diagram.nodes
    assert (left.kind, left.direction, right.kind) == ("isometry", (1.0, 0.0), "matrix")
    right = tnlib.draw(tnlib.LowRank(u[:, :2] * s[:2], vh[:2])).diagram.nodes[1]
    assert (right.kind, right.direction) == ("isometry", (-1.0, 0.0))


def test_legs_of_a_tensor_are_split_into_rows_and_columns() -> None:
    x = np.random.default_rng(0).standard_normal((3, 4, 5))
    legs = tnlib.draw(tnlib.svd(x, left=(0, 2)).value).diagram.legs
    assert [(leg.a, leg.name, leg.size) for leg in legs if leg.b is None] == [(0, "k0", 3), (0, "k2", 5), (2, "k1", 4)]


def test_legs_of_low_rank() -> None:
    diagram = tnlib.draw(tnlib.LowRank(np.ones((6, 2)), np.ones((2, 5)))).diagram
    assert (diagram.bonds, diagram.open_legs) == ((("r", 2),), (("k0", 6), ("b0", 5)))


@pytest.mark.parametrize("factored", [False, True])
def test_kronecker_terms(factored: bool) -> None:
    right = tnlib.LowRank(np.ones((5, 2)), np.ones((2, 6))) if factored else np.ones((5, 6))
    diagram = tnlib.draw(tnlib.KroneckerTerms(np.ones((3, 4, 7)), [right] * 3)).diagram
    assert sorted(diagram.open_legs) == [("b0", 7), ("b1", 6), ("k0", 4), ("k1", 5)]
    assert [n.kind for n in diagram.nodes].count("delta") == factored
    assert ("term", 3) in diagram.bonds
