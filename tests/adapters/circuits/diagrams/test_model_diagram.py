"""A model is drawn as one network, for every architecture."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tnlib_adapters
from oracles import refused
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from tnlib_adapters.circuits import block_diagram, model_diagram

import tnlib
from tnlib.drawing import Diagram

transformers_models = pytest.importorskip("transformers_models")
DECODERS = {"t5", "t5_untied"}  # of two streams, refused by name
NAMES = sorted(transformers_models.MODELS.keys() - DECODERS)
TITLES = {
    "gptj": ("x = tokens W$_E$", "logits = norm(x) W$_U$ + b$_U$"),
    "opt_after": ("x = tokens W$_E$ + P", "logits = x W$_U$"),
    "gemma2": ("x = $\\sqrt{24}$ tokens W$_E$", "logits = cap(norm(x) W$_U$)"),
    "opt_narrow": ("x = tokens W$_E$ W$_{in}$ + P", "logits = norm(x) W$_{out}$ W$_U$"),
    "roberta": ("x = norm(tokens W$_E$ + P + s)", "hidden states = x"),
    "vit": ("x = patches W$_E$ + P", "hidden states = norm(x)"),
}


def count_parts(diagram: Diagram) -> int:
    """Number of connected components."""
    bonds = [(leg.a, leg.b) for leg in diagram.legs if leg.b is not None]
    a, b = zip(*bonds, strict=True)
    n = len(diagram.nodes)
    return int(connected_components(coo_array((np.ones(len(bonds)), (a, b)), shape=(n, n)))[0])


@pytest.mark.parametrize("name", NAMES)
def test_the_network_is_connected_and_no_node_covers_another(name: str, saved: Any) -> None:
    model = tnlib_adapters.open_checkpoint(saved(name)[1])
    diagram = model_diagram(model, 5, blocks=range(model.n_layers))
    assert count_parts(diagram) == 1
    assert not any("block" in node.label for node in diagram.nodes)
    end = "stream" if model.wiring.unembedding is None else "vocab"
    assert [leg for leg, _ in diagram.open_legs] == ["position", end]
    for shown in (diagram, model_diagram(model, 5)):
        positions = np.array([node.position for node in shown.nodes])
        distances = np.hypot(*(positions[:, None] - positions).T) + 9 * np.eye(len(positions))
        assert distances.min() > 0.4


@pytest.mark.parametrize("blocks", [(), (1,), (0, 3), (0, 1, 2, 3)])
def test_other_blocks_are_one_function(blocks: tuple[int, ...], llama: Any) -> None:
    names = {(): ["blocks 0 to 3"], (1,): ["block 0", "blocks 2 to 3"], (0, 3): ["blocks 1 to 2"]}.get(blocks, [])
    diagram = model_diagram(llama, blocks=blocks)
    assert [node.label for node in diagram.nodes if "block" in node.label] == names
    assert sum("softmax" in node.label for node in diagram.nodes) == len(blocks)


@pytest.mark.parametrize("name", TITLES)
def test_the_title_has_the_equations(name: str, saved: Any) -> None:
    diagram = model_diagram(tnlib_adapters.open_checkpoint(saved(name)[1]), 5)
    assert all(equation in diagram.title for equation in TITLES[name])


def test_the_vocabulary_of_the_built_in_models() -> None:
    for name, vocab in (("induction", 128), ("llama", 1024)):
        model = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path(name))
        diagram = model_diagram(model)
        assert ("vocab", vocab) in diagram.open_legs
        assert ("vocab", vocab) in diagram.bonds
    picture = tnlib.draw(model_diagram(model, 8))
    assert picture._repr_svg_().rstrip().endswith("</svg>")


def test_refusals(model: Any) -> None:
    with refused(TypeError, "model_diagram: checkpoint must be a Checkpoint or a transformers model, got str"):
        model_diagram("builtin")  # type: ignore[arg-type]
    with refused(ValueError, "n_positions"):
        model_diagram(model, 0)
    with refused(ValueError, "model_diagram: blocks must"):
        model_diagram(model, blocks=(2,))
    with refused(TypeError, "model_diagram: blocks must"):
        model_diagram(model, blocks=1)  # type: ignore[arg-type]
    assert block_diagram(model, 0).nodes
