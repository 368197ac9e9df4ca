"""Frozen attention as networks: layers, products of layers and paths evaluate to what the operators compute."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tnlib_adapters
from oracles import normal

import tnlib
from tnlib.drawing import Diagram

N, D = 10, 64
X = normal((N, D), seed=1)


@pytest.fixture(scope="module")
def stack() -> Any:
    model = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path())
    uniform = np.tril(np.ones((4, N, N))) / np.arange(1, N + 1)[:, None]
    return tnlib_adapters.freeze(model, [uniform, uniform])


def drawn(value: Any) -> Diagram:
    diagram = tnlib.draw(value).diagram
    assert diagram.open_legs == (("position", N), ("stream", D))
    return diagram


def values_of(layers: Any, constant: Any = None) -> dict[str, Any]:
    """The arrays of layers by label, numbered from 1 if there are several."""
    values: dict[str, Any] = {"x": X, "c": constant}
    for k, terms in enumerate(layers, 1):
        mark = f"$_{{{k}}}$" if len(layers) > 1 else ""
        values[f"A{mark}"] = terms.left
        values[f"left{mark}"] = np.stack([term.left for term in terms.right])
        values[f"right{mark}"] = np.stack([term.right for term in terms.right])
    return values


def close(found: Any, wanted: Any) -> None:
    np.testing.assert_allclose(found, wanted, rtol=1e-10, atol=1e-10 * np.abs(wanted).max())


def test_a_layer(stack: Any) -> None:
    layer = stack.layers[0]
    diagram = drawn(layer)
    assert ("term", 4) in diagram.bonds
    close(diagram.evaluate(values_of([layer.terms], layer.constant)), layer.apply(X))


def test_paths(stack: Any) -> None:
    paths = stack.expand()
    diagram = drawn(paths)
    assert ("term", 24) in diagram.bonds
    assert "24 paths" in diagram.title
    terms = [tnlib.LowRank(t.left, t.right) for t in paths.terms.right]
    rank = max(t.ranks[0] for t in terms)
    values = {
        "A": paths.terms.left,
        "left": np.stack([np.pad(t.left, ((0, 0), (0, rank - t.ranks[0]))) for t in terms]),
        "right": np.stack([np.pad(t.right, ((0, rank - t.ranks[0]), (0, 0))) for t in terms]),
    }
    close(diagram.evaluate({"x": X, "c": paths.constant, **values}), stack.apply(X))


def test_a_stack_is_a_product_of_its_layers(stack: Any) -> None:
    layers = [layer.terms for layer in stack.layers]
    whole, linear = drawn(stack), drawn(stack.operator)
    close(linear.evaluate(values_of(layers)), stack.operator.apply(X))
    constant = stack.apply(np.zeros_like(X))
    close(whole.evaluate(values_of(layers, constant)), stack.apply(X))
    assert "2 layers" in whole.title


def test_of_many_layers_those_between_are_one_function(stack: Any) -> None:
    tall = stack @ stack
    layers = [layer.terms for layer in tall.layers]
    diagram = drawn(tall.operator)
    assert [node.label for node in diagram.nodes if "layers" in node.label] == ["layers 2 to 3"]
    assert "(1 + K$_{4}$) ... (1 + K$_{1}$) x" in diagram.title

    def middle(x: Any) -> Any:
        for terms in layers[1:3]:
            x = x + terms.apply(x)
        return x

    close(diagram.evaluate({**values_of(layers), "layers 2 to 3": middle}), tall.operator.apply(X))


def test_no_texts_overlap(stack: Any) -> None:
    axes = tnlib.draw(stack).figure.axes[0]
    back = axes.transData.inverted()
    boxes = [(text.get_text(), *back.transform(text.get_window_extent().get_points())) for text in axes.texts]
    for k, (one, (x0, y0), (x1, y1)) in enumerate(boxes):
        for other, (u0, v0), (u1, v1) in boxes[:k]:
            assert x1 <= u0 or u1 <= x0 or y1 <= v0 or v1 <= y0, f"{one} on {other}"
