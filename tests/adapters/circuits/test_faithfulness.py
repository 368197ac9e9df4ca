"""Faithfulness of circuits, metrics of any kind, and the model whose circuit is known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers as tf
from oracles import assert_close, refused
from scipy.stats import mannwhitneyu
from tnlib_adapters import Checkpoint, builtin_path, open_checkpoint
from tnlib_adapters.attention.softmax import log_softmax, namespace_of
from tnlib_adapters.circuits import (
    Ablation,
    EdgeEffects,
    Faithfulness,
    LogitDifference,
    circuit_faithfulness,
    edge_effects,
    find_circuit,
    save_mib_circuit,
)
from tnlib_adapters.circuits.discovery.edge_ablation import GatedModel
from tnlib_adapters.circuits.discovery.term_searches import FRACTIONS
from tnlib_adapters.data.coded_letters import CIRCUIT, CODES, coded_letters
from tnlib_adapters.reference.model import run

N = 4
TOKENS, ANSWERS = coded_letters(2 * N, rng=5)
TEXT = TOKENS[:N], ANSWERS[:N]
OTHERS = (TOKENS[:N][ANSWERS[:N]] + 1) % CODES + CODES


def how(metric: Any = "loss") -> Ablation:
    return Ablation("resample", metric=metric, corrupted=TOKENS[N:])


@pytest.fixture(scope="module")
def coder() -> Checkpoint:
    return open_checkpoint(builtin_path("known_circuit"))


@pytest.fixture(scope="module")
def effects(coder: Checkpoint) -> EdgeEffects:
    return edge_effects(coder, *TEXT, ablation=how())


def test_the_model_answers_by_its_circuit_alone(coder: Checkpoint) -> None:
    import torch

    model = tf.GPT2LMHeadModel.from_pretrained(builtin_path("known_circuit"))
    tokens, answers = coded_letters(200, rng=9)
    with torch.no_grad():
        found = model(torch.from_numpy(tokens)).logits.argmax(-1).numpy()
    assert np.mean(found[:, :-1][answers[:, 1:]] == tokens[answers]) > 0.99
    gated = GatedModel(coder, *TEXT, "f", how())
    is_true = np.array([name in CIRCUIT for name in gated.names])
    assert gated.loss(is_true.astype(float)) < 0.05  # all other edges carry another sequence
    assert gated.loss((~is_true).astype(float)) > np.log(CODES)


def test_integrated_effects_find_the_known_circuit(coder: Checkpoint, effects: EdgeEffects) -> None:
    found = circuit_faithfulness(coder, *TEXT, effects, ablation=how(), true_edges=CIRCUIT)
    assert found.auroc > 0.99
    assert found.cmd < 0.05
    assert f"AUROC {found.auroc:.3f}" in repr(found)
    for values, least, most in ((effects.integrated, 0.95, 1.0), (effects.first_order, 0.5, 0.95)):
        scores = dict(zip(effects.names, values.tolist(), strict=True))
        auroc = circuit_faithfulness(coder, *TEXT, scores, ablation=how(), true_edges=CIRCUIT).auroc
        true = np.array([name in CIRCUIT for name in effects.names])
        sizes = np.abs(values)
        assert auroc == pytest.approx(mannwhitneyu(sizes[true], sizes[~true]).statistic / (true.sum() * (~true).sum()))
        assert least <= auroc <= most
    circuit = find_circuit(coder, *TEXT, loss_increase=0.1, by="integrated", ablation=how())
    assert set(circuit.kept) == set(CIRCUIT)
    assert circuit_faithfulness(coder, *TEXT, circuit, ablation=how(), true_edges=CIRCUIT).auroc == 1


def test_areas() -> None:
    full = Faithfulness(np.arange(10), np.full(10, 2.0), 3.0, np.nan)
    assert (full.cpr, full.cmd) == (pytest.approx(0.999), 0.0)
    linear = Faithfulness(np.arange(10), 3 - np.array(FRACTIONS), 3.0, np.nan)
    assert linear.cpr == pytest.approx((1 - 1e-6) / 2)
    assert linear.cmd == pytest.approx(0.999 - linear.cpr)


def test_losses_are_those_of_the_circuits(coder: Checkpoint, effects: EdgeEffects) -> None:
    found, gated = circuit_faithfulness(coder, *TEXT, effects, ablation=how()), GatedModel(coder, *TEXT, "f", how())
    first = effects.top(int(found.sizes[6]))
    kept = {name for name, _ in first}
    assert_close(found.losses[6], gated.loss(np.array([float(name in kept) for name in gated.names])))
    assert_close(found.losses[-1], effects.loss)
    assert list(found.to_frame().columns) == ["fraction", "edges", "metric", "faithfulness"]


@pytest.mark.slow
def test_effects_of_the_embedding_sum_to_the_difference_of_the_metric(coder: Checkpoint) -> None:
    """Gradients along the line of embeddings, by the fundamental theorem of calculus."""
    gated = GatedModel(coder, *TEXT, "f", how())
    of_tokens = [k for k, name in enumerate(gated.names) if name.startswith("tokens ->")]
    at = (np.arange(400) + 0.5) / 400
    total = np.mean([gated.first_order_between(fraction)[of_tokens].sum() for fraction in at])
    ones = np.ones(len(gated.names))
    assert total == pytest.approx(gated.loss(0 * ones) - gated.loss(ones), rel=0.02)


def test_metrics_are_functions_of_logits(coder: Checkpoint, effects: EdgeEffects) -> None:
    tokens, answers = TEXT
    rows = run(coder, tokens).logits[np.roll(answers, -1, axis=1)]
    every = np.arange(len(rows))
    found = find_circuit(coder, *TEXT, loss_increase=1.0, by="attribution", ablation=how(LogitDifference(OTHERS)))
    assert_close(found.full_loss, (rows[every, OTHERS] - rows[every, tokens[answers]]).mean(), factor=1e4)
    assert found.loss <= found.full_loss + 1
    assert "LogitDifference" in repr(found)

    def cross_entropy(logits: Any, targets: np.ndarray) -> Any:
        assert namespace_of(logits) is not None
        return -log_softmax(logits)[np.arange(len(targets)), targets].mean()

    again = edge_effects(coder, *TEXT, ablation=how(cross_entropy), n_measured=3)
    assert_close(again.integrated, effects.integrated, factor=1e4)
    assert again.loss == pytest.approx(effects.loss)


def test_the_curve_holds_larger_and_smaller_circuits(coder: Checkpoint) -> None:
    found = find_circuit(coder, *TEXT, loss_increase=0.1, by="integrated", ablation=how("kl"))
    sizes, losses = found.curve.T
    assert set(np.ceil(110 * np.array(FRACTIONS))) <= set(sizes)
    assert np.all(np.diff(sizes) > 0)
    assert losses[-1] == found.full_loss
    assert losses[sizes == len(found.kept)][0] == found.loss <= 0.1
    assert sizes[0] < len(found.kept) < sizes[-1]
    acdc = find_circuit(coder, *TEXT, loss_increase=0.1, by="acdc", ablation=how("kl"))
    assert acdc.curve.shape[1] == 2
    assert acdc.curve[-1].tolist() == [110, acdc.full_loss]


def test_graphs_of_mib(coder: Checkpoint, effects: EdgeEffects, tmp_path: Path) -> None:
    circuit = find_circuit(coder, *TEXT, loss_increase=0.1, by="integrated", ablation=how())
    graph = json.loads(save_mib_circuit(tmp_path / "circuit.json", coder, circuit).read_text())
    assert {name for name, edge in graph["edges"].items() if edge["in_graph"]} == {
        *("input->a0.h0<v>", "a0.h0->a1.h0<k>", "input->a1.h0<q>", "input->a1.h0<v>"),
        *("a1.h0->m1", "m1->logits"),
    }
    assert {name for name, node in graph["nodes"].items() if node["in_graph"]} == {
        *("input", "a0.h0", "a1.h0", "m1", "logits")
    }
    assert graph["cfg"] == {"n_layers": 2, "n_heads": 4, "d_model": 32, "parallel_attn_mlp": False}
    both = {"tokens -> 0.1 Q": 1.0, "positions -> 0.1 Q": 2.0, "0.bias -> logits": 3.0}
    graph = json.loads(save_mib_circuit(tmp_path / "circuit.json", coder, both).read_text())
    assert graph["edges"] == {"input->a0.h1<q>": {"score": 3.0, "in_graph": True}}


def test_refusals(coder: Checkpoint, effects: EdgeEffects, tmp_path: Path) -> None:
    with refused(ValueError, "scores must name edges such as 'tokens -> 0.0 Q', got 'a -> b'"):
        circuit_faithfulness(coder, *TEXT, {"a -> b": 1.0}, ablation=how())
    with refused(TypeError, "scores must be EdgeEffects, a Circuit of edges or numbers by edge, got list"):
        circuit_faithfulness(coder, *TEXT, [1.0], ablation=how())  # type: ignore[arg-type]
    with refused(ValueError, "scores must be finite"):
        circuit_faithfulness(coder, *TEXT, {CIRCUIT[0]: np.nan}, ablation=how())
    with refused(ValueError, "true_edges must be some of 110 edges, got 0"):
        circuit_faithfulness(coder, *TEXT, effects, ablation=how(), true_edges=[])
    with refused(TypeError, "true_edges must be names of edges, got str"):
        circuit_faithfulness(coder, *TEXT, effects, ablation=how(), true_edges="a")
    with refused(ValueError, "the metric without any edge must differ"):
        circuit_faithfulness(coder, *TEXT, effects, ablation=how(lambda logits, targets: logits.sum() * 0.0))
    with refused(ValueError, "edge_effects: metric must return a finite number"):
        edge_effects(coder, *TEXT, ablation=how(lambda logits, targets: logits))
    with refused(ValueError, "LogitDifference: others must be one token for each of 16 targets, got int64"):
        edge_effects(coder, *TEXT, ablation=how(LogitDifference(OTHERS[:3])))
    with refused(ValueError, "save_mib_circuit: edges must lead between", "got 'head'"):
        save_mib_circuit(tmp_path / "circuit.json", coder, {"head -> logits": 1.0})
    with refused(ValueError, "coded_letters: n_sequences must be at least 1"):
        coded_letters(0)
