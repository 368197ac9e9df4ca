"""Models of every architecture with a gate on each edge: the model itself, its derivatives, and replaced values."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from oracles import assert_close, normal, refused
from slow_cases import mostly_slow
from tnlib_adapters import Checkpoint, open_checkpoint
from tnlib_adapters.attention.softmax import log_softmax
from tnlib_adapters.circuits import Ablation, EdgeEffects, edge_effects, find_circuit
from tnlib_adapters.circuits.discovery.edge_ablation import GatedModel
from tnlib_adapters.data.repeats import repeated_segments
from tnlib_adapters.reference.model import loss, run
from tnlib_adapters.reference.weights import read_weights

models = pytest.importorskip("transformers_models")

WITHOUT_LOGITS = {"bert", "bert_masked", "roberta", "llama_base", "bloom_six_heads", "gpt2", "gpt2_unscaled"}
WITHOUT_LOGITS |= {"gpt2_by_layer", "t5", "t5_untied", "t5_encoder", "t5_encoder_gated", "vit"}
EVERY = sorted(set(models.MODELS) - WITHOUT_LOGITS)
FEW = ["gpt2_lm", "gpt_neox", "llama", "gemma2", "qwen3", "opt_after", "deepseek_v3_experts", "qwen3_moe_normalised"]
RNG = np.random.default_rng(0)
TOKENS, OTHERS = RNG.integers(2, 50, (2, 8)), RNG.integers(2, 50, (2, 8))
MASK = np.arange(8) > np.array([[2], [5]])


def open_gates(gated: GatedModel) -> np.ndarray:
    return np.ones(len(gated.names))


# ------------------------------------------------------------------------------------------------- every architecture


@pytest.mark.parametrize("name", mostly_slow(EVERY, FEW))
def test_gates_of_every_architecture(name: str, opened: Any) -> None:
    """Open gates are the model, slopes are differences, and a single closed gate is computed from what follows it."""
    checkpoint, _ = opened(name)
    gated = GatedModel(checkpoint, TOKENS, MASK, "f", Ablation("resample", corrupted=OTHERS))
    assert_close(gated.loss(open_gates(gated)), loss(checkpoint, TOKENS, MASK), factor=1e4)
    assert_close(gated.loss(np.zeros(len(gated.names))), loss_of_mixture(checkpoint), factor=1e5)
    n, rng, h = len(gated.names), np.random.default_rng(1), 1e-5
    at, way = 1 - 0.1 * rng.random(n), normal((n,), seed=1) * (rng.random(n) > 0.5)
    difference = (gated.loss(at + h * way) - gated.loss(at - h * way)) / (2 * h)
    assert abs(-gated.first_order(at) @ way - difference) <= 1e-5 * abs(difference) + 1e-9
    gates = (rng.random(n) > 0.1).astype(float)
    some = rng.choice(n, 12, replace=False)
    want = [gated.loss(np.where(np.arange(n) == k, 0, gates)) for k in some]
    assert_close(gated.losses_without(gates, some), np.array(want), factor=1e5)


def loss_of_mixture(checkpoint: Checkpoint) -> float:
    """With all edges replaced the predictions are those of the other tokens, compared with the true ones."""
    log_p = log_softmax(run(checkpoint, OTHERS).logits[:, :-1])  # type: ignore[index]
    return -float(np.take_along_axis(log_p, TOKENS[:, 1:, None], axis=2)[MASK[:, 1:]].mean())


@pytest.mark.parametrize("name", mostly_slow(["gpt2_lm", "llama", "opt_after", "gemma2"], ["llama", "opt_after"]))
@pytest.mark.parametrize("kind", ["zero", "resample"])
def test_effects_by_position(name: str, kind: Any, opened: Any) -> None:
    """Parts sum to the effect, and are zero where nothing was replaced or nothing is predicted from."""
    checkpoint, _ = opened(name)
    others = TOKENS.copy()
    others[:, 2] = OTHERS[:, 2]
    how = Ablation(kind, corrupted=others if kind == "resample" else None)
    mask = np.arange(8) == np.array([[5], [5]])  # predicted from position 4
    whole = edge_effects(checkpoint, TOKENS, mask, ablation=how, n_measured=0)
    found = edge_effects(checkpoint, TOKENS, mask, ablation=how, n_measured=0, by_position=True)
    assert whole.by_position is None
    assert found.by_position.shape == (len(found.names), 8)
    assert_close(found.by_position.sum(axis=1), whole.integrated, factor=1e4)
    assert not found.by_position[:, 5:].any()
    assert np.abs(found.by_position[:, :5]).max() > 0
    if kind == "resample":
        of_tokens = [name.startswith("tokens -> ") for name in found.names]
        parts = found.by_position[of_tokens]
        assert np.abs(parts[:, 2]).max() > 0
        assert not np.delete(parts, 2, axis=1).any()
        to_logits = [name.endswith("-> logits") for name in found.names]
        assert not np.delete(found.by_position[to_logits], 4, axis=1).any()
    assert "at position" in repr(found)


@pytest.mark.parametrize("kind", ["zero", "mean", "resample"])
def test_a_replaced_layer_is_that_of_a_forward_pass_with_hooks(kind: Any, saved: Any) -> None:
    """GPT-2 of transformers, with the output of a feed-forward layer replaced by a hook."""
    torch = models.torch
    model, folder = saved("gpt2_lm")
    gated = GatedModel(open_checkpoint(folder), TOKENS, MASK, "f", Ablation(kind))
    gates = np.array([not name.startswith("mlp 1 -> ") for name in gated.names], float)
    ids = torch.from_numpy(TOKENS)

    def replace(_module: Any, _inputs: Any, output: Any) -> Any:
        mean = output.mean(dim=(0, 1), keepdim=True).expand_as(output)
        return {"zero": torch.zeros_like(output), "mean": mean, "resample": output.roll(-1, 0)}[kind]

    handle = model.transformer.h[1].mlp.register_forward_hook(replace)
    with torch.no_grad():
        logits = model(ids).logits.double().numpy()
    handle.remove()
    log_p = log_softmax(logits[:, :-1])
    want = -np.take_along_axis(log_p, TOKENS[:, 1:, None], axis=2)[MASK[:, 1:]].mean()
    assert gated.loss(gates) == pytest.approx(want, rel=1e-5)


def test_readers_are_ablated_one_by_one(opened: Any) -> None:
    """Without the edge from the tokens to the queries of one head, its output changes, and no other of that layer."""
    checkpoint, _ = opened("llama")
    gated = GatedModel(checkpoint, TOKENS, MASK, "f")
    closed = np.array([name != "tokens -> 0.2 Q" for name in gated.names], float)
    outputs, whole = (gated._pass(gated._matrix(gates)).layers[0].outputs for gates in (closed, open_gates(gated)))
    changed = [h for h in range(4) if not np.allclose(outputs[h], np.broadcast_to(whole, outputs.shape)[h], rtol=1e-9)]
    assert changed == [2]


@pytest.mark.parametrize("name", ["gpt2_lm", "gemma2"])
def test_the_divergence_is_that_of_the_predictions(name: str, opened: Any) -> None:
    checkpoint, _ = opened(name)
    gated = GatedModel(checkpoint, TOKENS, MASK, "f", Ablation("resample", metric="kl", corrupted=OTHERS))
    p, q = (log_softmax(run(checkpoint, x).logits)[np.roll(MASK, -1, axis=1)] for x in (TOKENS, OTHERS))
    assert_close(gated.loss(np.zeros(len(gated.names))), (np.exp(p) * (p - q)).sum(axis=1).mean(), factor=1e5)
    assert abs(gated.loss(open_gates(gated))) < 1e-12
    assert np.abs(gated.first_order(open_gates(gated))).max() < 1e-12


def test_constants_are_edges_for_zero_only(opened: Any) -> None:
    checkpoint, _ = opened("gpt2_lm")
    writers = {
        kind: {name.split(" -> ")[0] for name in GatedModel(checkpoint, TOKENS, MASK, "f", Ablation(kind)).names}
        for kind in ("zero", "mean", "resample")
    }
    assert {"0.bias", "positions", "mlp 0", "2.3"} <= writers["zero"]
    assert writers["zero"] - writers["mean"] == {"0.bias", "1.bias", "2.bias"}
    assert writers["mean"] - writers["resample"] == {"positions"}


@pytest.mark.parametrize("name", ["gpt2_lm", "llama", "gemma2", "bloom"])
def test_single_precision(name: str, opened: Any) -> None:
    """Every array of a model in single precision is in single precision, and effects agree to its roundoff."""
    checkpoint, weights = opened(name)
    single = read_weights(checkpoint, dtype=np.float32)
    how = Ablation("resample", corrupted=OTHERS)
    gated, want = (GatedModel(w, TOKENS, MASK, "f", how) for w in (single, weights))
    values = gated._forward(open_gates(gated))
    assert {values.delta.dtype, values.final.dtype, values.gates.dtype} == {np.dtype(np.float32)}
    assert {a.dtype for layer in values.layers for a in (layer.reads, layer.written)} == {np.dtype(np.float32)}
    assert gated.names == want.names
    some, exact = (each.first_order(open_gates(gated)) for each in (gated, want))
    assert np.abs(some - exact).max() < 1e-4 * np.abs(exact).max()


def test_constants_have_no_mean_ablation_in_single_precision(opened: Any) -> None:
    """The mean of equal numbers may differ from them by roundoff."""
    checkpoint, _ = opened("bloom")
    tokens = np.random.default_rng(0).integers(2, 50, (3, 7))
    single = read_weights(checkpoint, dtype=np.float32)
    gated = GatedModel(single, tokens, np.arange(7) > np.zeros((3, 1)), "f", Ablation("mean"))
    assert "norm embedding" in gated.writers
    assert not any(name.startswith("norm embedding") or ".bias" in name for name in gated.names)


# ------------------------------------------------------------------------------------------------ effects and searches


@pytest.fixture(scope="module")
def effects(model: Checkpoint) -> EdgeEffects:
    return edge_effects(model, *repeated_segments(1, rng=np.random.default_rng(1)))


def test_integrated_effects_rank_edges_better_than_first_order(effects: EdgeEffects) -> None:
    truth = effects.measured >= 0.1
    for values, least, most in ((effects.integrated, 0.85, 1.0), (effects.first_order, 0.0, 0.85)):
        top = np.argsort(-np.abs(values))[: truth.sum()]
        assert least <= truth[top].mean() <= most
    assert effects.errors == pytest.approx(effects.first_order - effects.measured)
    assert "relative error" in repr(effects)


@pytest.mark.parametrize("by", mostly_slow(["acdc", "integrated", "attribution"], ["integrated", "attribution"]))
def test_searches_meet_the_budget(model: Checkpoint, effects: EdgeEffects, by: Any) -> None:
    text = repeated_segments(1, rng=np.random.default_rng(1))
    found = find_circuit(model, *text, loss_increase=1.0, by=by)
    assert found.loss <= found.full_loss + 1
    assert len(found.kept) + len(found.removed) == len(found.losses) + len(found.kept) == 120
    assert {"tokens -> 0.3 V", "positions -> 0.3 K", "positions -> 0.3 Q"} <= set(found.kept)
    recovery = effects.recovery(found.kept, 0.1)
    assert recovery.n_edges == np.sum(effects.measured >= 0.1)
    assert recovery.precision > 0.7 if by in ("acdc", "integrated") else recovery.recall > 0.5


def test_corrupted_runs_measure_the_divergence(model: Checkpoint) -> None:
    tokens, repeated = repeated_segments(2, rng=np.random.default_rng(3))
    other = np.random.default_rng(4).integers(0, 128, tokens.shape)
    how = Ablation("resample", metric="kl", corrupted=np.where(repeated, tokens, other))
    found = find_circuit(model, tokens, repeated, loss_increase=0.5, by="integrated", ablation=how)
    assert found.metric == "kl"
    assert abs(found.full_loss) < 1e-12
    assert found.loss <= 0.5
    assert "KL divergence" in repr(found)


def test_real_weights(llama: Checkpoint) -> None:
    tokens = np.tile(np.random.default_rng(0).integers(0, 1024, (2, 6)), (1, 2))
    found = edge_effects(llama, tokens, np.broadcast_to(np.arange(12) > 6, tokens.shape), ablation="mean", n_measured=3)
    assert len(found.names) == 1519
    assert np.count_nonzero(~np.isnan(found.measured)) == 3
    assert "mlp 0 -> logits" in [name for name, _ in found.top(2)]
    with refused(ValueError, "EdgeEffects.recovery: all edges must be measured, got 1516 that are not"):
        found.recovery([], 0.1)


def test_models_in_memory(saved: Any) -> None:
    model, folder = saved("gpt2_lm")
    found, again = (edge_effects(m, TOKENS, MASK, n_measured=0) for m in (model, open_checkpoint(folder)))
    assert_close(found.integrated, again.integrated, factor=1e6)


# ------------------------------------------------------------------------------------------------------------ refusals


def test_refusals(model: Checkpoint, effects: EdgeEffects, opened: Any) -> None:
    with refused(ValueError, "Ablation: kind must be 'zero', 'mean' or 'resample', got 'ones'"):
        Ablation("ones")  # type: ignore[arg-type]
    with refused(ValueError, "Ablation: metric must be"):
        Ablation(metric="logits")  # type: ignore[arg-type]
    with refused(ValueError, "Ablation: corrupted must be None for kind='mean'"):
        Ablation("mean", corrupted=OTHERS)
    with refused(ValueError, "edge_effects: ablation must be 'zero', 'mean' or 'resample', got"):
        edge_effects(model, TOKENS, MASK, ablation="ones")  # type: ignore[arg-type]
    with refused(TypeError, "edge_effects: ablation must be a name or an Ablation, got int"):
        edge_effects(model, TOKENS, MASK, ablation=3)  # type: ignore[arg-type]
    with refused(ValueError, "edge_effects: tokens must hold at least two sequences for kind='resample'"):
        edge_effects(model, TOKENS[0], MASK[0], ablation="resample")
    with refused(ValueError, "edge_effects: corrupted must have the shape of tokens"):
        edge_effects(model, TOKENS, MASK, ablation=Ablation("resample", corrupted=OTHERS[:, 1:]))
    with refused(ValueError, "edge_effects: corrupted must lie between 0 and 127, got 500"):
        edge_effects(model, TOKENS, MASK, ablation=Ablation("resample", corrupted=np.full_like(TOKENS, 500)))
    for kept in (["a -> b"], [["a"]]):
        with refused(ValueError, "EdgeEffects.recovery: kept must be names of edges"):
            effects.recovery(kept, 0.1)  # type: ignore[arg-type]
    with refused(TypeError, "EdgeEffects.recovery: least must be a real number, got None"):
        effects.recovery([], None)  # type: ignore[arg-type]
    for by in ("attribution", "gradient"):
        with refused(ValueError, f"find_circuit: by must not be '{by}' for the metric 'kl'"):
            find_circuit(model, TOKENS, MASK, loss_increase=1.0, by=by, ablation=Ablation(metric="kl"))  # type: ignore[arg-type]
    with refused(ValueError, "find_circuit: ablation must be 'zero', with the metric 'loss', for of='paths'"):
        find_circuit(model, TOKENS, MASK, loss_increase=1.0, of="paths", ablation="mean")
    with refused(ValueError, "find_circuit: model must have an unembedding, got a llama"):
        find_circuit(opened("llama_base")[0], TOKENS, MASK, loss_increase=1.0)
