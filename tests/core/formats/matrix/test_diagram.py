"""Diagrams of matrix formats: measured factors, open legs of operators."""

from __future__ import annotations

import numpy as np
import pytest

import tnlib


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
