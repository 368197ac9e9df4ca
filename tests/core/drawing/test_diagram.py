"""Diagrams as data: validation of nodes, legs and bubbles, and their union."""

from __future__ import annotations

import numpy as np
import pytest

import tnlib
from tnlib.drawing import Bubble, Diagram, Leg, Node, join

VECTOR = Diagram((Node("tensor", "v", (0, 0)),), (Leg(0, None, "i", 3, (0, -1)),), "v", (Bubble((0,), "relu"),))

BAD = {
    "kind": (lambda: Node("star", "", (0, 0)), "kind must be one of"),
    "kind of another type": (lambda: Node(np.ones(2), "", (0, 0)), "kind must be one of"),  # type: ignore[arg-type]
    "no direction": (lambda: Node("isometry", "", (0, 0)), "direction must be given"),
    "position": (lambda: Node("tensor", "", (0, float("nan"))), "position must be finite"),
    "no position": (lambda: Node("tensor", "", None), "position must be a pair"),  # type: ignore[arg-type]
    "no end": (lambda: Leg(0, None, "i", 2), "end must be given"),
    "size": (lambda: Leg(0, 1, "i", 0), "size must be a positive integer"),
    "arrow": (lambda: Leg(0, 1, "i", 2, towards=2), "towards must be one of"),
    "a node by its name": (lambda: Leg("a", 1), "a must be the number of a node, got 'a'"),  # type: ignore[arg-type]
    "nodes by name": (lambda: Bubble("a", "f"), "nodes must be a tuple of numbers"),  # type: ignore[arg-type]
    "points": (lambda: Leg(0, 1, via=None), "via must be a tuple of points"),  # type: ignore[arg-type]
    "no legs": (lambda: Diagram((), None), "legs must be a tuple of Leg, got None"),  # type: ignore[arg-type]
    "None among legs": (lambda: Diagram((), (None,)), "legs must be a tuple of Leg, got None"),  # type: ignore[arg-type]
    "other legs": (lambda: Diagram((), ("i",)), "legs must be a tuple of Leg, got 'i'"),  # type: ignore[arg-type]
    "translation": (lambda: Diagram((), ()).moved(None, 0), "must be a pair of numbers"),  # type: ignore[arg-type]
    "joined": (lambda: join(np.ones(2)), "join: diagrams must be a tuple of Diagram"),  # type: ignore[arg-type]
    "no node": (lambda: Diagram((Node("tensor", "", (0, 0)),), (Leg(0, 1),)), "nodes from 0 to 0, got 1"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_in_a_sentence(case: str) -> None:
    call, words = BAD[case]
    with pytest.raises(tnlib.TnlibError, match=words):
        call()


def test_moved_translates_every_point() -> None:
    moved = VECTOR.moved(2.0, 3.0)
    assert moved.bounds == (2.0, 2.0, 2.0, 3.0)
    assert (moved.open_legs, moved.bonds, moved.bubbles) == (VECTOR.open_legs, (), VECTOR.bubbles)


def test_joined_diagrams_keep_their_legs_and_bubbles() -> None:
    bond = Diagram((Node("matrix", "A", (1, 0)), Node("matrix", "B", (2, 0))), (Leg(0, 1, "j", 4, towards=1),))
    both = join((VECTOR, bond), "both")
    assert both.title == "both"
    assert [node.label for node in both.nodes] == ["v", "A", "B"]
    assert [(leg.a, leg.b, leg.towards) for leg in both.legs] == [(0, None, None), (1, 2, 2)]
    assert join((bond, VECTOR)).bubbles == (Bubble((2,), "relu"),)
