"""Diagram of a Tucker decomposition: a star of isometries."""

from __future__ import annotations

import numpy as np

import tnlib


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
