"""The diagrams of the ten terms are right: contracted as they are drawn they give the terms."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tnlib_adapters
from tnlib_adapters.circuits import OpenLayer, split_stream, term_diagram
from tnlib_adapters.circuits.paths.attention_layer import NAMES
from tnlib_adapters.reference.model import run
from tnlib_adapters.reference.weights import read_weights

import tnlib
from tnlib.drawing import Diagram

N, H, G = 10, 1, 3  # positions; heads of layer 1 and of layer 0
TOKENS = np.arange(N)


@pytest.fixture(scope="module")
def arrays(model: Any) -> dict[str, np.ndarray]:
    """What stands on a node, by its label, in homogeneous coordinates."""
    weights, seen = read_weights(model), run(model, TOKENS)
    x = seen.residuals[0][0]
    found = {"x": x, "$\\tilde{x}$": np.concatenate([x, np.ones((N, 1))], axis=1), "A$^1$": seen.patterns[0][0, G]}
    for number, layer, head in ((1, 0, G), (2, 1, H)):
        attention: Any = weights.blocks[layer].branches[0].layer
        for letter in "QKV":
            w, b = (getattr(attention, f"{kind}_{letter}")[head] for kind in "Wb")
            found[f"W$^{number}_{letter}$\nb$^{number}_{letter}$"] = np.concatenate([w, b[None]])
        o = attention.W_O[head]
        # what is written ends in the constant coordinate where another head reads it, and without where none does
        found[f"W$^{number}_O$"] = o
        found[f"W$^{number}_O$ read"] = np.concatenate([o, np.zeros((len(o), 1))], axis=1)
    return found


def contract(diagram: Diagram, inside: set[int], arrays: dict[str, np.ndarray]) -> np.ndarray:
    """Multiply out some nodes; open are the legs that leave them, in order: those with a free end first."""
    operands: list[Any] = []
    for k in sorted(inside):
        legs = [i for i, leg in enumerate(diagram.legs) if k in (leg.a, leg.b)]
        label = diagram.nodes[k].label
        sizes = [diagram.legs[i].size or N for i in legs]
        array = arrays[label]
        if label.endswith("_O$") and array.shape[1] not in sizes:
            array = arrays[f"{label} read"]
        if label == "A$^1$":  # from the position that is told from the one that is read
            legs.sort(key=lambda i: diagram.legs[i].name == "source")
            order = [0, 1]
        else:
            order = [sizes.index(size) for size in array.shape]
        operands += [array, [legs[i] for i in order]]
    out = [
        i
        for i, leg in enumerate(diagram.legs)
        if (leg.a in inside) != (leg.b in inside if leg.b is not None else False)
    ]
    out.sort(key=lambda i: diagram.legs[i].b is not None)
    return np.asarray(np.einsum(*operands, out, optimize=True))


@pytest.mark.parametrize("name", NAMES[2:])
def test_scores_and_values_are_those_of_the_term(name: str, model: Any, arrays: dict[str, np.ndarray]) -> None:
    diagram = term_diagram(name, (model.attention(1), H), (model.attention(0), G))
    parts = split_stream(model, TOKENS, layer=1)
    layer = OpenLayer(read_weights(model).blocks[1].branches[0].layer, parts)  # type: ignore[arg-type]
    sides = {letter: [f"0.{G}" if letter in name and name != "second" else "embedding"] for letter in "QKV"}
    (bubble,) = diagram.bubbles
    inside = set(bubble.nodes)
    scores = contract(diagram, inside, arrays)  # query key
    wanted = layer.scores(sides["Q"], sides["K"])[H]
    np.testing.assert_allclose(layer.attention.scale * scores, wanted, rtol=1e-9, atol=1e-12)

    values = contract(diagram, set(range(len(diagram.nodes))) - inside, arrays)  # stream key
    own = layer.output(sides["V"], pattern=np.broadcast_to(np.eye(N), (4, N, N)))[H]
    np.testing.assert_allclose(values.T, own, rtol=1e-9, atol=1e-12)


def test_the_first_layer_alone_and_the_direct_path(model: Any, arrays: dict[str, np.ndarray]) -> None:
    heads = (model.attention(1), H), (model.attention(0), G)
    parts = split_stream(model, TOKENS, layer=1)
    direct, first = (term_diagram(name, *heads) for name in ("direct", "first"))
    assert [node.label for node in direct.nodes] == ["x"]
    assert direct.open_legs == (("position", None), ("stream", 64))
    found = contract(first, set(range(4)), arrays)
    np.testing.assert_allclose(found.T, parts[f"0.{G}"], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_every_end_has_a_name_and_nothing_stands_on_another(name: str, model: Any) -> None:
    llama = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path("llama"))
    for one in (model, llama):
        diagram = term_diagram(name, (one.attention(1), H), (one.attention(0), G))
        assert [end for end, _ in diagram.open_legs] in (["stream", "position"], ["position", "stream"])
        places = [node.position for node in diagram.nodes]
        apart = [np.hypot(*np.subtract(p, q)) for k, p in enumerate(places) for q in places[:k]]
        assert min(apart, default=1.0) >= 1.0
        assert diagram.title.startswith(f"{name}: ")


def test_all_are_painted_inside_the_picture(model: Any) -> None:
    axes = tnlib.draw(term_diagram("QKV", (model.attention(1), H), (model.attention(0), G))).figure.axes[0]
    (x0, x1), (y0, y1) = axes.get_xlim(), axes.get_ylim()
    back = axes.transData.inverted()
    boxes = [back.transform(text.get_window_extent().get_points()) for text in axes.texts]
    assert len(boxes) > 20
    for (left, low), (right, high) in boxes:
        assert x0 <= left <= right <= x1
        assert y0 <= low <= high <= y1


def test_other_names_and_models_are_refused(model: Any) -> None:
    one, two = (model.attention(0), 0), (model.attention(1), 0)
    with pytest.raises(tnlib.ArgumentError, match="name must be one of direct, first"):
        term_diagram("KQ", two, one)
    other = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path("llama")).attention(0)
    with pytest.raises(tnlib.ArgumentError, match="one d_model, got 64 and 128"):
        term_diagram("K", two, (other, 0))
    with pytest.raises(tnlib.TnlibError, match="head"):
        term_diagram("K", two, (model.attention(0), 9))
