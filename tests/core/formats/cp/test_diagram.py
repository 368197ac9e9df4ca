"""Diagram of a CP decomposition: a star around a copy tensor."""

from __future__ import annotations

import numpy as np

import tnlib


def test_factors_and_weights_meet_in_a_copy_tensor() -> None:
    rng = np.random.default_rng(0)
    diagram = tnlib.draw(tnlib.CP(np.ones(2), [rng.standard_normal((n, 2)) for n in (3, 4, 5)])).diagram
    assert [n.kind for n in diagram.nodes] == ["delta", "matrix", "matrix", "matrix", "weights"]
    assert diagram.bonds == (("R", 2),) * 4
    assert all(leg.towards is None for leg in diagram.legs)
