"""Diagrams of blocks and feed-forward layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tnlib_adapters
from slow_cases import mostly_slow
from tnlib_adapters.checkpoints.weight_stacks import mlp
from tnlib_adapters.circuits import block_diagram, feed_forward_diagram
from tnlib_adapters.reference.weights import read_weights

import tnlib

architecture_models = pytest.importorskip("architecture_models")
EQUATIONS = {
    "gptj": ["x$_1$ = x + attention(norm x) + ...", "... + feed-forward(norm x), at every position"],
    "gpt_neox_sequential": [
        "x$_1$ = x + attention(norm x)",
        "x$_2$ = x$_1$ + feed-forward(norm x$_1$), at every position",
    ],
    "opt_after": ["x$_1$ = norm(x + attention(x))", "x$_2$ = norm(x$_1$ + feed-forward(x$_1$)), at every position"],
    "roberta": ["x$_1$ = norm(x + attention(x))", "x$_2$ = norm(x$_1$ + feed-forward(x$_1$)), at every position"],
    "gemma2": [
        "x$_1$ = x + norm(attention(norm x))",
        "x$_2$ = x$_1$ + norm(feed-forward(norm x$_1$)), at every position",
    ],
}


def opened(name: str, folder: Path) -> Any:
    architecture_models.MODELS[name]().save_pretrained(folder)
    return tnlib_adapters.open_checkpoint(folder)


@pytest.mark.parametrize("name", mostly_slow(EQUATIONS, ["gptj"]))
def test_what_is_added_to_which_stream(name: str, tmp_path: Path) -> None:
    model = opened(name, tmp_path)
    diagram = block_diagram(model, 1, 7)
    assert [n.label.split("\n")[0] for n in diagram.nodes if n.kind == "text"] == EQUATIONS[name]
    assert diagram.open_legs.count(("stream", model.attention(1).d_model)) == 2
    assert diagram.open_legs.count(("position", 7)) == 1
    softmax = next(b.label for b in diagram.bubbles if "softmax" in b.label)
    assert ("causal" in softmax) == (name != "roberta")
    assert ("tanh" in softmax) == (name == "gemma2")
    assert tnlib.draw(diagram)._repr_svg_().rstrip().endswith("</svg>")


@pytest.mark.parametrize("name", ["gptj", "llama_biases", "llama"])
def test_the_diagram_of_a_feed_forward_layer_is_its_output(name: str, tmp_path: Path) -> None:
    model = opened(name, tmp_path)
    layer: Any = next(b.layer for block in read_weights(model).blocks for b in block.branches if hasattr(b.layer, "up"))
    x = np.random.default_rng(0).standard_normal(layer.up.weight.shape[0])

    def biased(affine: Any) -> Any:
        return affine.weight if affine.bias is None else np.concatenate([affine.weight, affine.bias[None]])

    values = {"W$_↑$": biased(layer.up), "W$_↑$\nb$_↑$": biased(layer.up), "W$_↓$": layer.down.weight, "x": x}
    values |= {"$\\tilde{x}$": np.append(x, 1.0), "b$_↓$": layer.down.bias}
    values |= {} if layer.gate is None else {"gate": biased(layer.gate)}
    diagram = feed_forward_diagram(model, 0)
    found = diagram.evaluate({**values, diagram.bubbles[0].label: layer.activation})
    np.testing.assert_allclose(found, layer(x), rtol=1e-10, atol=1e-12)


def test_one_expert_is_drawn(tmp_path: Path) -> None:
    model = opened("mixtral", tmp_path)
    diagram = feed_forward_diagram(model, 0)
    assert diagram.title == "feed-forward with a gate, 24 to 40, one of 5 experts"
    assert any("experts(norm x$_1$)" in n.label for n in block_diagram(model, 0).nodes)
    with pytest.raises(tnlib.ArgumentError, match="whose layer 1 has experts instead"):
        mlp(model, 1)
    shared = feed_forward_diagram(opened("deepseek_v3_experts", tmp_path / "shared"), 1)
    assert shared.title == "feed-forward with a gate, 24 to 16, one of 9 experts, beside a shared one"


def test_a_model_of_attention_alone() -> None:
    model = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path())
    assert [n.label for n in block_diagram(model, 0).nodes if n.kind == "text"] == [
        "x$_1$ = x + attention(x)\nattention output, 4 heads"
    ]
    with pytest.raises(tnlib.ArgumentError, match="mlp: checkpoint must have feed-forward layers"):
        feed_forward_diagram(model, 0)
    with pytest.raises(tnlib.ArgumentTypeError, match=r"block_diagram: checkpoint must be a Checkpoint or .*, got int"):
        block_diagram(3, 0)  # type: ignore[arg-type]
    with pytest.raises(tnlib.ArgumentError, match="layer"):
        block_diagram(model, 9)
