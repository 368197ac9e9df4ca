"""Whole models: embeddings, norms and logits stand where the model has them, and sizes are those of its tensors."""

from __future__ import annotations

from pathlib import Path

import pytest
import tnlib_adapters
from tnlib_adapters.circuits import block_diagram, model_diagram

import tnlib

architecture_models = pytest.importorskip("architecture_models")

HEADINGS = {
    "gptj": ("x = tokens W$_E$", "logits = norm(x) W$_U$ + b$_U$"),
    "opt_after": ("x = tokens W$_E$ + P", "logits = x W$_U$"),
    "gemma2": ("x = $\\sqrt{24}$ tokens W$_E$", "logits = cap(norm(x) W$_U$)"),
    "opt_narrow": ("x = tokens W$_E$ W$_{in}$ + P", "logits = norm(x) W$_{out}$ W$_U$"),
    "roberta": ("x = norm(tokens W$_E$ + P)", "hidden states = x"),
    "vit": ("x = patches W$_E$ + P", "hidden states = norm(x)"),
}


@pytest.mark.parametrize("name", HEADINGS)
def test_beginning_and_end(name: str, tmp_path: Path) -> None:
    architecture_models.MODELS[name]().save_pretrained(tmp_path)
    model = tnlib_adapters.open_checkpoint(tmp_path)
    diagram = model_diagram(model, 5)
    headings = [node.label for node in diagram.nodes if node.kind == "text" and node.label != "+"]
    assert (headings[0], headings[-1]) == HEADINGS[name]
    assert ("norm" in [b.label for b in diagram.bubbles]) == ("norm(x)" in headings[-1])
    width = model.attention(0).d_model
    assert ("stream", width) in diagram.open_legs
    inside = block_diagram(model, 0, 5)
    assert set(inside.open_legs) <= set(diagram.open_legs)
    places = [node.position for node in diagram.nodes]
    assert len(set(places)) == len(places)


def test_the_vocabulary_of_the_built_in_models() -> None:
    for name, vocab in (("induction", 128), ("llama", 1024)):
        model = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path(name))
        diagram = model_diagram(model)
        assert ("vocab", vocab) in diagram.open_legs
        assert ("vocab", vocab) in diagram.bonds
    picture = tnlib.draw(model_diagram(model, 8))
    assert picture._repr_svg_().rstrip().endswith("</svg>")


def test_refusals() -> None:
    with pytest.raises(tnlib.ArgumentTypeError, match="model_diagram: checkpoint must be a Checkpoint, got str"):
        model_diagram("builtin")  # type: ignore[arg-type]
    with pytest.raises(tnlib.ArgumentError, match="n_positions"):
        model_diagram(tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path()), 0)
