"""Layers with fixed patterns are drawn as they are: operators, products of layers, paths."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import tnlib_adapters

import tnlib
from tnlib.drawing import Diagram

N, D = 10, 64


@pytest.fixture(scope="module")
def stack() -> Any:
    model = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path())
    uniform = np.tril(np.ones((4, N, N))) / np.arange(1, N + 1)[:, None]
    return tnlib_adapters.freeze(model, [uniform, uniform])


def signs(diagram: Diagram) -> list[str]:
    """What stands between the operators, from left to right, without blanks."""
    texts = sorted((n for n in diagram.nodes if n.kind == "text"), key=lambda n: n.position[0])
    return ["".join(n.label.split()) for n in texts]


def drawn(value: Any) -> Diagram:
    return tnlib.draw(value).diagram


def operators(diagram: Diagram) -> int:
    ends = Counter(diagram.open_legs)
    assert set(ends) == {("k0", N), ("b0", N), ("k1", D), ("b1", D)}
    assert len(set(ends.values())) == 1
    return ends["k0", N]


def test_a_layer_and_paths(stack: Any) -> None:
    layer, paths = drawn(stack.layers[0]), drawn(stack.expand())
    assert operators(layer) == operators(paths) == 1
    assert signs(layer) == ["+constant"]
    assert ("term", 4) in layer.bonds
    assert signs(paths) == ["1+", "+constant"]
    assert ("term", 24) in paths.bonds
    assert "24 paths" in paths.title


@pytest.mark.parametrize("times", [1, 2])
def test_a_stack_is_a_product_of_its_layers(times: int, stack: Any) -> None:
    tall = stack if times == 1 else stack @ stack
    whole, linear = drawn(tall), drawn(tall.operator)
    middle = ["···"] if times == 2 else []
    assert signs(linear) == ["(1+", ")", *middle, "(1+", ")"]
    assert signs(whole) == [*signs(linear), "+constant"]
    assert operators(whole) == operators(linear) == 2
    assert f"{2 * times} layers" in whole.title


def test_signs_and_legs_stay_apart(stack: Any) -> None:
    axes = tnlib.draw(stack).figure.axes[0]
    back = axes.transData.inverted()
    boxes = [(text.get_text(), *back.transform(text.get_window_extent().get_points())) for text in axes.texts]
    for k, (one, (x0, y0), (x1, y1)) in enumerate(boxes):
        for other, (u0, v0), (u1, v1) in boxes[:k]:
            assert x1 <= u0 or u1 <= x0 or y1 <= v0 or v1 <= y0, f"{one} on {other}"
