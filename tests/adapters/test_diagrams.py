"""Attention's diagrams show what the layers have: matrices, sizes, functions, and who reads whom."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import tnlib_adapters
from tnlib_adapters.attention.norms import HeadNorm
from tnlib_adapters.attention.rotary import Rotary
from tnlib_adapters.circuits import (
    composition_diagram,
    dense_diagram,
    frozen_diagram,
    layer_diagram,
    ov_diagram,
    qk_diagram,
)

import tnlib
from tnlib.drawing import Diagram


@pytest.fixture(scope="module")
def layers() -> list[Any]:
    model = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path())
    return [model.attention(0), model.attention(1)]


def neighbours(diagram: Diagram) -> Counter[frozenset[str]]:
    names = [n.label.split()[0] if n.label else n.kind for n in diagram.nodes]
    return Counter(frozenset((names[leg.a], names[leg.b])) for leg in diagram.legs if leg.b is not None)


def test_operators_have_the_shapes_and_ranks_of_what_they_show(layers: list[Any]) -> None:
    layer = layers[0]
    for diagram, operator in ((qk_diagram(layer, 1), layer.qk(1)), (ov_diagram(layer, 1), layer.ov(1))):
        assert [size for _, size in diagram.bonds] == list(operator.ranks)
        assert len(diagram.nodes) == 2
    assert dict(qk_diagram(layer, 1).open_legs) == {"query": 65, "key": 65}
    assert dict(ov_diagram(layer, 1).open_legs) == {"written": 64, "read": 65}
    bare = replace(layer, b_Q=None, b_K=None, b_V=None, b_O=None)
    assert dict(qk_diagram(bare, 1).open_legs) == {"query": 64, "key": 64}
    turned = replace(bare, rotary=Rotary([1.0, 0.1]))
    assert [n.label for n in qk_diagram(turned, 0).nodes] == ["W$_Q$", "R", "W$_K$"]
    assert [n.kind for n in qk_diagram(turned, 0).nodes][1] == "unitary"
    longer = replace(bare, rotary=Rotary(np.geomspace(1, 0.1, 8), factor=1.1))
    assert [n.kind for n in qk_diagram(longer, 0).nodes][1] == "matrix", "a rotation and a factor"
    assert turned.d_head == 16
    assert all(size == 16 for _, size in qk_diagram(turned, 0).bonds)


def test_an_isometric_weight_is_a_triangle_whose_tip_is_in_the_head(layers: list[Any]) -> None:
    layer = replace(layers[0], b_Q=None, b_K=None, b_V=None, b_O=None)
    W_Q, W_O = np.linalg.qr(layer.W_Q)[0], np.linalg.qr(layer.W_O.transpose(0, 2, 1))[0].transpose(0, 2, 1)
    diagram = qk_diagram(replace(layer, W_Q=W_Q), 0)
    assert [(n.kind, n.direction) for n in diagram.nodes] == [("isometry", (1.0, 0.0)), ("matrix", None)]
    diagram = ov_diagram(replace(layer, W_O=W_O), 0)
    assert [(n.kind, n.direction) for n in diagram.nodes] == [("isometry", (1.0, 0.0)), ("matrix", None)]


def test_a_frozen_layer_is_a_sum_of_kronecker_products(layers: list[Any]) -> None:
    layer = layers[0]
    diagram = frozen_diagram(layer, 10)
    assert [n.label for n in diagram.nodes if n.kind == "text"] == ["=", "+", "· · ·", "+"]
    patterns = [n.label for n in diagram.nodes if n.label.startswith("A")]
    assert patterns == ["A", "A$^{0}$", f"A$^{{{layer.n_heads - 1}}}$"]
    legs = Counter(diagram.open_legs)
    assert legs == dict.fromkeys((("to", 10), ("from", 10), ("written", 64), ("read", 65)), 3)
    places = [n.position for n in diagram.nodes]
    assert len(set(places)) == len(places)
    assert ("heads", layer.n_heads) in diagram.bonds
    names = ("W_Q", "W_K", "W_V", "W_O", "b_Q", "b_K", "b_V")
    few = frozen_diagram(replace(layer, **{name: getattr(layer, name)[:2] for name in names}))
    assert [n.label for n in few.nodes if n.kind == "text"] == ["=", "+"]


def test_a_layer_has_its_scores_in_a_bubble_and_its_values_outside(layers: list[Any]) -> None:
    diagram = layer_diagram(layers[0], 10)
    (bubble,) = diagram.bubbles
    inside = [diagram.nodes[k].label for k in bubble.nodes if diagram.nodes[k].kind == "matrix"]
    outside = [n.label for k, n in enumerate(diagram.nodes) if k not in bubble.nodes and n.kind == "matrix"]
    assert ["".join(x.split()) for x in inside] == ["W$_Q$b$_Q$", "W$_K$b$_K$"]
    assert ["".join(x.split()) for x in outside] == ["W$_O$", "W$_V$b$_V$"]
    assert diagram.open_legs == (("position", 10), ("stream", 64))
    assert bubble.label == "causal softmax(0.25 ...)"
    capped = layer_diagram(replace(layers[0], softcap=50.0, causal=False, window=4)).bubbles[0].label
    assert capped == "softmax(50 tanh(0.25 ... / 50)) over 4 positions"


def test_grouped_heads_and_normalised_queries(layers: list[Any]) -> None:
    bare = replace(layers[0], b_Q=None, b_K=None, b_V=None, b_O=None)
    grouped = replace(bare, W_K=bare.W_K[:2], W_V=bare.W_V[:2])
    assert layer_diagram(grouped).bonds.count(("shared by 2", 2)) == 2
    assert frozen_diagram(grouped).bonds.count(("shared by 2", 2)) == 1
    assert "shared by 2" not in dict(layer_diagram(bare).bonds)
    normed = replace(bare, head_norm=HeadNorm(np.ones(16), np.ones(16), 1e-6))
    assert [b.label for b in layer_diagram(normed).bubbles][1:] == ["norm", "norm"]
    for refused in (lambda: qk_diagram(normed, 0), lambda: composition_diagram("K", (normed, 0), (bare, 0))):
        with pytest.raises(tnlib.ArgumentError, match="normalised"):
            refused()


@pytest.mark.parametrize("kind", ["Q", "K", "V"])
def test_compositions_join_reader_and_writer(kind: Any, layers: list[Any]) -> None:
    diagram = composition_diagram(kind, (layers[1], 0), (layers[0], 2))
    met = neighbours(diagram)
    own = 2 if kind == "V" else 0  # bonds between the same two names inside the heads
    assert met[frozenset((f"W$_{kind}$", "W$_O$"))] == 1 + own, "what reads stands next to what the other head wrote"
    assert met[frozenset(("W$_O$", "W$_V$"))] == 1 + own
    if kind == "V":
        assert met[frozenset(("A$^2$", "A$^1$"))] == 1
        assert not diagram.bubbles
    else:
        at = {leg.name: leg.end[0] for leg in diagram.legs if leg.end is not None}
        assert at["query"] < at["key"]
        pattern = next(n for n in diagram.nodes if n.label == "A$^1$")
        assert pattern.position[0] == at["query" if kind == "Q" else "key"]


def test_a_dense_network_has_a_bubble_for_every_function() -> None:
    sizes = [3, 8, 8, 2]
    diagram = dense_diagram([np.ones((m, n)) for m, n in pairwise(sizes)], "gelu")
    assert [size for _, size in diagram.bonds] == sizes[:-1]
    assert [len(b.nodes) for b in diagram.bubbles] == [2, 3]
    assert {b.label for b in diagram.bubbles} == {"gelu"}


def test_all_are_painted(layers: list[Any]) -> None:
    diagrams = [
        frozen_diagram(layers[0]),
        layer_diagram(layers[0]),
        *(composition_diagram(kind, (layers[1], 0), (layers[0], 2)) for kind in ("Q", "K", "V")),
    ]
    for diagram in diagrams:
        figure = tnlib.draw(diagram).figure
        axes = figure.axes[0]
        (x0, x1), (y0, y1) = axes.get_xlim(), axes.get_ylim()
        for text in axes.texts:
            (left, low), (right, high) = axes.transData.inverted().transform(text.get_window_extent().get_points())
            assert x0 <= left <= right <= x1, text.get_text()
            assert y0 <= low <= high <= y1, text.get_text()


def test_bad_input_is_refused(layers: list[Any]) -> None:
    with pytest.raises(tnlib.ArgumentTypeError, match="qk_diagram: layer must be an Attention, got int"):
        qk_diagram(3, 0)  # type: ignore[arg-type]
    with pytest.raises(tnlib.TnlibError, match="ov_diagram: head"):
        ov_diagram(layers[0], 4)
    with pytest.raises(tnlib.ArgumentError, match="n_positions must be at least 1"):
        frozen_diagram(layers[0], 0)
    with pytest.raises(tnlib.ArgumentError, match="kind must be 'Q', 'K' or 'V'"):
        composition_diagram("X", (layers[1], 0), (layers[0], 0))  # type: ignore[arg-type]
    with pytest.raises(tnlib.ArgumentError, match="weights are"):
        dense_diagram([np.ones((2, 3)), np.ones((2, 3))])
    with pytest.raises(tnlib.ArgumentTypeError, match="non-empty list"):
        dense_diagram([])
