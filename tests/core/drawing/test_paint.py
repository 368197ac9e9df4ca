"""Line widths and bubbles of painted diagrams."""

from __future__ import annotations

from tnlib.drawing import Bubble, Diagram, Node
from tnlib.drawing.paint import bubble_padding, thickness


def test_lines_of_larger_dimensions_are_thicker() -> None:
    widths = [thickness(n) for n in (1, 2, 64, 768, 50257)]
    assert widths == sorted(set(widths))


def test_a_bubble_leaves_room_for_those_inside() -> None:
    inner, outer = Bubble((0,), "relu"), Bubble((0, 1), "softmax")
    diagram = Diagram((Node("tensor", "", (0, 0)), Node("tensor", "", (1, 0))), (), "", (inner, outer))
    assert bubble_padding(diagram, outer) > bubble_padding(diagram, inner)
