"""Diagrams of heads and layers: their shapes, and the operators that they evaluate to."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tnlib_adapters
from attention_layers import narrow_values_layer
from oracles import normal
from tnlib_adapters.attention.norms import HeadNorm
from tnlib_adapters.attention.rotary import Rotary
from tnlib_adapters.attention.softmax import softmax
from tnlib_adapters.circuits import (
    composition_diagram,
    dense_diagram,
    frozen_diagram,
    layer_diagram,
    ov_diagram,
    qk_diagram,
    term_diagram,
)

import tnlib
from tnlib.drawing import Diagram


@pytest.fixture(scope="module")
def layers() -> list[Any]:
    model = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path())
    return [model.attention(0), model.attention(1)]


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


def test_the_diagram_of_cross_attention_reads_a_memory() -> None:
    layer = replace(variants()["grouped"], causal=False, cross=True)
    x, memory = normal((5, 6), seed=40), normal((7, 6), seed=41)
    both = {"x": x, "m": memory}
    values = {f"$\\tilde{{{name}}}$": np.concatenate([a, np.ones((len(a), 1))], axis=1) for name, a in both.items()}
    diagram = layer_diagram(layer, 5)
    values |= {**arrays_of(layer), diagram.bubbles[0].label: lambda products: softmax(layer.scale * products)}
    wanted = layer.output(softmax(layer.scores(x, memory)), memory)
    np.testing.assert_allclose(diagram.evaluate(values), wanted, rtol=1e-10, atol=1e-12)
    assert dict(frozen_diagram(layer, 5).open_legs)["from"] is None
    assert dict(frozen_diagram(variants()["grouped"], 5).open_legs)["from"] == 5


def arrays_of(layer: Any) -> dict[str, Any]:
    """Arrays of all heads by label, biases as one more row of the stream, and G, the key heads of the query heads."""
    values: dict[str, Any] = {"W$_O$": layer.W_O}
    for letter in "QKV":
        weight, bias = getattr(layer, f"W_{letter}"), getattr(layer, f"b_{letter}")
        values[f"W$_{letter}$"] = weight
        if bias is not None:
            values[f"W$_{letter}$\nb$_{letter}$"] = np.concatenate([weight, bias[:, None]], axis=1)
    values["G"] = np.repeat(np.eye(layer.kv_heads), layer.n_heads // layer.kv_heads, axis=0)
    return values if layer.b_O is None else {**values, "b$_O$": layer.b_O}


def variants() -> dict[str, Any]:
    norm = HeadNorm(normal(4, seed=1), normal(4, seed=2), 1e-3)
    return {
        "grouped": narrow_values_layer(),
        "rotary": narrow_values_layer(rotary=Rotary([0.6, 0.1], factor=1.1)),
        "normalised": narrow_values_layer(head_norm=norm),
        "both": narrow_values_layer(biases=False, rotary=Rotary([0.5]), head_norm=norm),
        "ALiBi and cap": narrow_values_layer(alibi=np.arange(4.0), softcap=1.5, window=3),
    }


@pytest.mark.parametrize("name", variants())
def test_the_diagram_of_a_layer_is_its_output(name: str) -> None:
    layer, n = variants()[name], 5
    x, positions = normal((n, 6), seed=40), np.arange(n)
    values = arrays_of(layer) | {"x": x, "$\\tilde{x}$": np.concatenate([x, np.ones((n, 1))], axis=1)}
    diagram = layer_diagram(layer, n)
    offsets = layer.offsets(positions[:, None] - positions)

    def pattern(products: Any) -> Any:
        scores = layer.scale * products + (0 if offsets is None else offsets)
        scores = scores if layer.softcap is None else layer.softcap * np.tanh(scores / layer.softcap)
        return softmax(np.where(layer.mask(n), scores, -np.inf))

    values[diagram.bubbles[0].label] = pattern
    if layer.rotary is not None:
        at = [layer.rotary.rotate(np.eye(4), position) for position in positions]
        values["R"] = np.einsum("iac,jbc->abij", at, at)
    if layer.head_norm is not None:
        norms = [layer.head_norm.queries, layer.head_norm.keys]  # two bubbles of one name, that of the queries first
        values["norm"] = lambda columns: norms.pop(0)(columns)
    wanted = layer.output(softmax(np.where(layer.mask(n), layer.scores(x), -np.inf)), x)
    np.testing.assert_allclose(diagram.evaluate(values), wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", ["grouped", "rotary"])
def test_the_diagrams_of_operators_are_the_operators(name: str) -> None:
    layer, h = variants()[name], 3
    values = {label: a if label in ("b$_O$", "G") else a[h * len(a) // 4] for label, a in arrays_of(layer).items()}
    if layer.rotary is not None:
        values["R"] = layer.rotary.rotate(np.eye(4), 2) @ layer.rotary.rotate(np.eye(4), 0).T
    qk = qk_diagram(layer, h).evaluate(values)
    np.testing.assert_allclose(qk, layer.qk(h, None if layer.rotary is None else 2).full(), rtol=1e-12, atol=1e-12)
    ov = ov_diagram(layer, h).evaluate(values)  # written read
    np.testing.assert_allclose(ov.T, layer.ov(h).full()[:, :-1], rtol=1e-12, atol=1e-12)


def test_both_sides_of_the_frozen_diagram_are_one_operator() -> None:
    """The picture is an equation: what is on its left is the sum of the heads on its right."""
    layer, n = variants()["grouped"], 5
    patterns = normal((4, n, n), seed=3)
    whole = frozen_diagram(layer, n)
    with pytest.raises(tnlib.ArgumentError, match="got the sign '='"):
        whole.evaluate({})
    left, *right = (part for part in parts(whole) if part.legs)
    operator = left.evaluate(arrays_of(layer) | {"A": patterns})  # to from written read
    assert left.open_legs == (("to", n), ("from", n), ("written", 6), ("read", 7))
    x = normal((n, 6), seed=4)
    found = np.einsum("tfwr,fr->tw", operator, np.concatenate([x, np.ones((n, 1))], axis=1)) + layer.b_O
    np.testing.assert_allclose(found, layer.output(patterns, x), rtol=1e-10, atol=1e-12)
    for part, h in zip(right, (0, 3), strict=True):
        values = {label: a if label in ("b$_O$", "G") else a[h * len(a) // 4] for label, a in arrays_of(layer).items()}
        alone = np.zeros_like(patterns)
        alone[h] = patterns[h]
        term = part.evaluate({**values, f"A$^{{{h}}}$": patterns[h]})
        wanted = left.evaluate(arrays_of(layer) | {"A": alone})
        np.testing.assert_allclose(term, wanted, rtol=1e-10, atol=1e-12)


def parts(diagram: Diagram) -> list[Diagram]:
    """Connected components, in the order of their first node; a Kronecker product counts as one where it stands."""
    signs = sorted(node.position[0] for node in diagram.nodes if node.label in ("=", "+"))

    def place(k: int) -> float:
        x, y = diagram.nodes[k].position
        return -1.0 if y > -3 else float(np.searchsorted(signs, x))

    groups = sorted({place(k) for k in range(len(diagram.nodes)) if diagram.nodes[k].kind != "text"})
    found = []
    for group in groups:
        own = [k for k, node in enumerate(diagram.nodes) if node.kind != "text" and place(k) == group]
        legs = [
            replace(leg, a=own.index(leg.a), b=None if leg.b is None else own.index(leg.b))
            for leg in diagram.legs
            if leg.a in own
        ]
        found.append(Diagram(tuple(diagram.nodes[k] for k in own), tuple(legs)))
    return found


def test_a_dense_network_is_evaluated() -> None:
    weights = [normal((3, 8), seed=1), normal((8, 5), seed=2), normal((5, 2), seed=3)]
    x = normal(3, seed=4)
    values = {"x": x, "tanh": np.tanh, **{f"W$_{k + 1}$": w for k, w in enumerate(weights)}}
    wanted = np.tanh(np.tanh(x @ weights[0]) @ weights[1]) @ weights[2]
    np.testing.assert_allclose(dense_diagram(weights, "tanh").evaluate(values), wanted, rtol=1e-12)


@pytest.mark.slow
def test_all_are_painted(layers: list[Any]) -> None:
    diagrams = [
        frozen_diagram(layers[0]),
        layer_diagram(layers[0]),
        *(composition_diagram(kind, (layers[1], 0), (layers[0], 2)) for kind in ("Q", "K", "V")),
        term_diagram("QKV", (layers[1], 0), (layers[0], 2)),
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
