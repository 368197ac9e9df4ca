"""A model is drawn as one network, for every architecture, and the network evaluates to what the model computes."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import tnlib_adapters
from oracles import refused
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from tnlib_adapters.circuits import block_diagram, model_diagram, model_values
from tnlib_adapters.reference.model import run

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
def test_the_network_is_connected_and_evaluates_to_the_model(name: str, saved: Any) -> None:
    network, folder = saved(name)
    model = tnlib_adapters.open_checkpoint(folder)
    x = transformers_models.inputs(network, 7)[:1]
    values = model_values(model, x, blocks=range(model.n_layers))
    diagram = model_diagram(model, values["P"].shape[0] if name == "vit" else 7, blocks=range(model.n_layers))
    assert count_parts(diagram) == 1
    assert not any("block" in node.label for node in diagram.nodes)
    found, seen = diagram.evaluate(values), run(model, x)
    wanted = seen.hidden[0] if seen.logits is None else seen.logits[0]
    np.testing.assert_allclose(found, wanted, rtol=1e-10, atol=1e-10 * np.abs(wanted).max())
    of_transformers = transformers_models.outputs(network, x)[0]
    if of_transformers.shape == found.shape:  # the head of masked language models is not read
        np.testing.assert_allclose(found, of_transformers, rtol=0, atol=1e-4 * np.abs(wanted).max())
    assert [leg for leg, _ in diagram.open_legs] == ["position", "stream" if seen.logits is None else "vocab"]


@pytest.mark.parametrize("name", ["gpt2_lm", "bert", "falcon_alibi", "llama", "gemma2", "t5_encoder"])
def test_the_logits_of_transformers_in_double_precision(name: str, saved: Any) -> None:
    network, folder = saved(name)
    model = tnlib_adapters.open_checkpoint(folder)
    x = transformers_models.inputs(network, 9)[:1]
    wanted = transformers_models.outputs(copy.deepcopy(network).double(), x)[0]
    found = model_diagram(model).evaluate(model_values(model, x))
    # transformers computes rotations, and the softmax of T5, in single precision
    tol = 1e-10 if name in ("gpt2_lm", "bert", "falcon_alibi") else 3e-6
    np.testing.assert_allclose(found, wanted, rtol=0, atol=tol * np.abs(wanted).max())


def test_other_values_change_the_result(model: Any) -> None:
    """The picture computes: without the weights of the previous-token head, the induction head has nothing to copy."""
    segment = np.random.default_rng(0).permutation(128)[:20]
    tokens = np.tile(segment, 2)
    diagram, values = model_diagram(model, blocks=(0, 1)), model_values(model, tokens, blocks=(0, 1))
    right = diagram.evaluate(values)[25].argmax()
    values["W$^{0}_O$"] = values["W$^{0}_O$"] * (np.arange(4) != 3)[:, None, None]
    wrong = diagram.evaluate(values)[25].argmax()
    assert right == tokens[26] != wrong


@pytest.mark.parametrize("blocks", [(), (1,), (0, 3), (0, 1, 2, 3)])
def test_other_blocks_are_one_function(blocks: tuple[int, ...]) -> None:
    model = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path("llama"))
    names = {(): ["blocks 0 to 3"], (1,): ["block 0", "blocks 2 to 3"], (0, 3): ["blocks 1 to 2"]}.get(blocks, [])
    diagram = model_diagram(model, blocks=blocks)
    assert [node.label for node in diagram.nodes if "block" in node.label] == names
    assert sum("softmax" in node.label for node in diagram.nodes) == len(blocks)
    found = diagram.evaluate(model_values(model, [5, 6, 7], blocks=blocks))
    np.testing.assert_allclose(found, run(model, [5, 6, 7]).logits[0], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", TITLES)
def test_the_title_has_the_equations(name: str, saved: Any) -> None:
    diagram = model_diagram(tnlib_adapters.open_checkpoint(saved(name)[1]), 5)
    assert all(equation in diagram.title for equation in TITLES[name])


@pytest.mark.parametrize("name", NAMES)
def test_nothing_stands_on_another_node(name: str, saved: Any) -> None:
    diagram = model_diagram(tnlib_adapters.open_checkpoint(saved(name)[1]), 5)
    places = np.array([node.position for node in diagram.nodes])
    distances = np.hypot(*(places[:, None] - places).T) + 9 * np.eye(len(places))
    assert distances.min() > 0.4


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
    with refused(ValueError, "model_values: tokens must be one sequence, got 2"):
        model_values(model, [[1, 2], [3, 4]])
    assert block_diagram(model, 0).nodes
