"""Diagrams of composed heads evaluate to the terms that they show."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from attention_layers import narrow_values_layer
from oracles import normal
from tnlib_adapters import Attention, Checkpoint, Rotary
from tnlib_adapters.attention.relative_bias import RelativeBias
from tnlib_adapters.circuits import OpenLayer, StreamParts, composition_diagram, split_stream, ten_terms, term_diagram
from tnlib_adapters.circuits.paths.attention_terms import NAMES
from tnlib_adapters.reference.model import run
from tnlib_adapters.reference.weights import read_weights

import tnlib

N, H, G = 10, 1, 3  # positions; heads of layer 1 and of layer 0
TOKENS = np.arange(N)


OPTIONS: dict[str, dict[str, Any]] = {
    "grouped heads and biases": {},
    "without biases": {"biases": False},
    "rotary embeddings": {"rotary": Rotary([0.6, 0.1], factor=1.1)},
    "ALiBi": {"alibi": np.array([0.5, 0.2, 0.1, 1.0])},
    "relative bias": {"relative_bias": RelativeBias(normal((4, 8), seed=7), 5), "causal": False},
    "window and cap": {"window": 3, "softcap": 1.5},
}


def biased(weight: np.ndarray, bias: np.ndarray | None) -> np.ndarray:
    return weight if bias is None else np.concatenate([weight, bias[None]])


def with_one(x: np.ndarray) -> np.ndarray:
    return np.concatenate([x, np.ones((len(x), 1))], axis=1)


def rotations(layer: Attention, n: int) -> np.ndarray:
    """Rotations by the distance, (d_head, d_head, query position, key position)."""
    assert layer.rotary is not None
    at = [layer.rotary.rotate(np.eye(layer.d_head), position) for position in range(n)]
    return np.einsum("iac,jbc->abij", at, at)


def values_of(later: Attention, earlier: Attention, x: np.ndarray, pattern: np.ndarray) -> dict[str, Any]:
    """Arrays by label: the weights of head H of the later layer and of head G of the earlier, x, and the pattern."""
    values: dict[str, Any] = {"x": x, "$\\tilde{x}$": with_one(x), "A$^1$": pattern}
    for number, layer, head in ((1, earlier, G), (2, later, H)):
        group = layer.n_heads // layer.kv_heads
        for letter, k in (("Q", head), ("K", head // group), ("V", head // group)):
            weight, bias = getattr(layer, f"W_{letter}")[k], getattr(layer, f"b_{letter}")
            values[f"W$^{number}_{letter}$"] = weight
            if bias is not None:
                values[f"W$^{number}_{letter}$\nb$^{number}_{letter}$"] = biased(weight, bias[k])
        values[f"W$^{number}_O$"] = layer.W_O[head]
    if later.b_O is not None:
        values["b$^2_O$"] = later.b_O
    if later.rotary is not None:
        values["R"] = rotations(later, len(x))
    return values


def head_output(layer: Attention, head: int, pattern: np.ndarray, x: np.ndarray) -> np.ndarray:
    """What a head writes for a pattern (n, n), its value bias included."""
    kv = head // (layer.n_heads // layer.kv_heads)
    values = x @ layer.W_V[kv] if layer.b_V is None else x @ layer.W_V[kv] + layer.b_V[kv]
    return np.asarray(pattern @ values @ layer.W_O[head])


@pytest.fixture(scope="module", params=OPTIONS)
def network(request: Any) -> tuple[Attention, Attention, OpenLayer, dict[str, Any]]:
    """Two layers, the second one open on the stream in two parts, and the values of the diagrams."""
    earlier, later = narrow_values_layer(40), narrow_values_layer(60, **OPTIONS[request.param])
    x, pattern = normal((N, 6), seed=3), np.tril(normal((N, N), seed=4) ** 2)
    parts = StreamParts(("embedding", "0.3"), np.stack([x, head_output(earlier, G, pattern, x)]))
    return earlier, later, OpenLayer(later, parts), values_of(later, earlier, x, pattern)


@pytest.mark.parametrize("name", NAMES[2:])
def test_the_diagram_of_a_term_is_the_term(name: str, network: Any) -> None:
    earlier, later, layer, values = network
    diagram = term_diagram(name, (later, H), (earlier, G))
    sides = ["0.3" if letter in name and name != "second" else "embedding" for letter in "QKV"]
    offsets = later.offsets(np.arange(N)[:, None] - np.arange(N)) if sides[:2] == ["embedding"] * 2 else None

    def change(contracted: np.ndarray) -> np.ndarray:
        term = later.scale * contracted + (0 if offsets is None else offsets)
        return np.asarray((layer.pattern() - layer.pattern(layer.scores() - term))[H])

    (bubble,) = diagram.bubbles
    assert ("slope" in bubble.label or "bias" in bubble.label) == (offsets is not None)
    found = diagram.evaluate({**values, bubble.label: change})
    assert [leg for leg, _ in diagram.open_legs] == ["position", "stream"]
    wanted = layer.removed(*([side] for side in sides))[H]
    np.testing.assert_allclose(found, wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", ["Q", "K"])
def test_the_diagram_of_composed_scores_is_the_term_of_the_scores(kind: Any, network: Any) -> None:
    earlier, later, layer, values = network
    diagram = composition_diagram(kind, (later, H), (earlier, G))
    found = later.scale * diagram.evaluate(values)
    sides = {letter: ["0.3" if letter == kind else "embedding"] for letter in "QK"}
    np.testing.assert_allclose(found, layer.scores(sides["Q"], sides["K"])[H], rtol=1e-10, atol=1e-12)
    assert diagram.title.endswith("times 0.7")


def test_the_diagram_of_a_virtual_head_is_its_effect(network: Any) -> None:
    earlier, later, layer, values = network
    diagram = composition_diagram("V", (later, H), (earlier, G))
    second = layer.pattern()[H]
    operator = diagram.evaluate({**values, "A$^2$": second})  # to from written read
    assert [leg for leg, _ in diagram.open_legs] == ["to", "from", "written", "read"]
    found = np.einsum("tfwr,fr->tw", operator, with_one(values["x"]))
    np.testing.assert_allclose(found, layer.output(["0.3"])[H], rtol=1e-10, atol=1e-12)


def test_terms_without_composition(network: Any) -> None:
    earlier, later, layer, values = network
    direct, first = (term_diagram(name, (later, H), (earlier, G)) for name in ("direct", "first"))
    bias = 0 if later.b_O is None else later.b_O
    np.testing.assert_allclose(direct.evaluate(values), values["x"] + bias, rtol=1e-12)
    np.testing.assert_allclose(first.evaluate(values), layer.parts["0.3"], rtol=1e-10, atol=1e-12)


def test_the_trained_model_by_pairs_of_heads(model: Any) -> None:
    """`ten_terms` of the built-in model: its K-composition of two heads, and the direct term."""
    weights, seen = read_weights(model), run(model, TOKENS)
    earlier, later = (weights.blocks[k].branches[0].layer for k in (0, 1))
    layer, terms = OpenLayer(later, split_stream(model, TOKENS, layer=1)), ten_terms(model, TOKENS)  # type: ignore[arg-type]
    values = values_of(later, earlier, seen.residuals[0][0], seen.patterns[0][0, G])  # type: ignore[arg-type]
    diagram = term_diagram("K", (model.attention(1), H), (model.attention(0), G))
    change = diagram.bubbles[0].label
    values[change] = lambda term: (layer.pattern() - layer.pattern(layer.scores() - 0.25 * term))[H]
    found, wanted = diagram.evaluate(values), terms.by_pair[1, G, H]
    np.testing.assert_allclose(found, wanted, rtol=1e-9, atol=1e-12)
    pattern = diagram.evaluate({**values, change: lambda term: layer.pattern(0.25 * term + np.zeros((4, N, N)))[H]})
    assert np.linalg.norm(pattern - wanted) > np.linalg.norm(wanted), "softmax of the term alone is another number"
    direct = term_diagram("direct", (model.attention(1), H), (model.attention(0), G)).evaluate(values)
    np.testing.assert_allclose(direct, terms["direct"], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_every_end_has_a_name_and_nothing_stands_on_another(name: str, model: Any, llama: Checkpoint) -> None:
    for one in (model, llama):
        diagram = term_diagram(name, (one.attention(1), H), (one.attention(0), G))
        assert [end for end, _ in diagram.open_legs] in (["stream", "position"], ["position", "stream"])
        places = [node.position for node in diagram.nodes]
        apart = [np.hypot(*np.subtract(p, q)) for k, p in enumerate(places) for q in places[:k]]
        assert min(apart, default=1.0) >= 1.0
        assert diagram.title.startswith(f"{name}: ")


def test_titles_and_labels_name_layers(llama: Checkpoint) -> None:
    pair = (llama.attention(3), 6), (llama.attention(1), 2)
    for diagram in (
        *(composition_diagram(kind, *pair, layers=(16, 3)) for kind in ("Q", "K", "V")),  # type: ignore[arg-type]
        *(term_diagram(name, *pair, layers=(16, 3)) for name in ("Q", "K", "V", "QKV")),
    ):
        assert "16.6" in diagram.title
        assert "3.2" in diagram.title
        labels = " ".join(node.label for node in diagram.nodes)
        assert "A$^{3}$" in labels
        assert "$^{16}_" in labels
        assert "^1" not in labels.replace("^{16}", "")
        assert "^2" not in labels
        assert {leg.name for leg in diagram.legs if "head" in leg.name} <= {"head 16.6", "head 3.2"}
    assert tnlib.draw(diagram).figure is not None
    assert term_diagram("first", *pair, layers=(16, 3)).title == "first: head 3.2 alone"
    for layers in ((3, 16), (1,), 4):
        with pytest.raises(tnlib.ArgumentError, match="term_diagram: layers must be the numbers"):
            term_diagram("K", *pair, layers=layers)  # type: ignore[arg-type]


def test_other_names_and_models_are_refused(model: Any, llama: Checkpoint) -> None:
    one, two = (model.attention(0), 0), (model.attention(1), 0)
    with pytest.raises(tnlib.ArgumentError, match="name must be one of direct, first"):
        term_diagram("KQ", two, one)
    other = llama.attention(0)
    with pytest.raises(tnlib.ArgumentError, match="one d_model, got 64 and 128"):
        term_diagram("K", two, (other, 0))
    with pytest.raises(tnlib.TnlibError, match="head"):
        term_diagram("K", two, (model.attention(0), 9))
