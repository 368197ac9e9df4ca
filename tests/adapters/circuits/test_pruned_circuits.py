"""Circuits that are left: losses computed anew by another forward pass, gradients by differences, induction."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import transformers as tf
from oracles import assert_close, normal, refused
from safetensors.numpy import save_file
from tnlib_adapters import Checkpoint, open_checkpoint
from tnlib_adapters.attention.softmax import log_softmax, softmax
from tnlib_adapters.circuits import find_circuit
from tnlib_adapters.circuits.discovery import term_searches
from tnlib_adapters.circuits.discovery.circuit_search import Circuit, Of
from tnlib_adapters.circuits.discovery.edge_ablation import Ablation, GatedModel
from tnlib_adapters.circuits.discovery.gated_terms import path_terms, ten_terms_by_heads
from tnlib_adapters.circuits.discovery.term_searches import Gated
from tnlib_adapters.data.repeats import repeated_segments
from tnlib_adapters.reference.model import loss, run

HEADS = [f"{layer}.{head}" for layer in range(2) for head in range(4)]


@pytest.fixture(scope="module")
def text() -> tuple[np.ndarray, np.ndarray]:
    return repeated_segments(2, rng=np.random.default_rng(7))


def loss_of_edges(model: Checkpoint, tokens: np.ndarray, mask: np.ndarray, kept: set[str]) -> float:
    """The model written out head by head, each side reading the writers that an edge leads from."""
    stream = {
        "tokens": model.read("embed.weight").astype(float)[tokens],
        "positions": np.tile(model.read("positions.weight").astype(float)[: tokens.shape[1]], (len(tokens), 1, 1)),
    }

    def read(reader: str) -> np.ndarray:
        some = [x for name, x in stream.items() if f"{name} -> {reader}" in kept]
        return np.sum(some, axis=0) if some else np.zeros_like(stream["tokens"])

    for number in range(model.n_layers):
        layer = model.attention(number)
        written = {}
        for h in range(layer.n_heads):
            q, k, v = (
                read(f"{number}.{h} {side}") @ w[h].astype(float) + b[h]
                for side, w, b in zip(
                    "QKV", (layer.W_Q, layer.W_K, layer.W_V), (layer.b_Q, layer.b_K, layer.b_V), strict=True
                )
            )
            scores = np.where(layer.mask(tokens.shape[1]), layer.scale * q @ k.transpose(0, 2, 1), -np.inf)
            written[f"{number}.{h}"] = softmax(scores) @ v @ layer.W_O[h].astype(float)
        stream |= written | {f"{number}.bias": np.broadcast_to(layer.b_O, stream["tokens"].shape)}
    logits = read("logits") @ model.read("unembed.weight").astype(float).T + model.read("unembed.bias")
    log_p = log_softmax(logits[:, :-1])
    return -float(np.take_along_axis(log_p, tokens[:, 1:, None], axis=2)[mask[:, 1:]].mean())


# --------------------------------------------------------------------------------------------------------------- gates


@pytest.mark.parametrize(
    ("make", "count"),
    [
        (GatedModel, 2 * 4 * 3 + (2 + 5) * 4 * 3 + (2 + 5 + 5)),
        (path_terms, 5 * 5),
        (ten_terms_by_heads, 1 + 5 + 4 + 3 * 5 * 4 + 4 * 4),
    ],
)
def test_gates_of_every_kind_of_term(
    model: Checkpoint, text: tuple[np.ndarray, np.ndarray], make: type[GatedModel], count: int
) -> None:
    """Open gates are the model, slopes are differences, and a single closed gate is computed from what follows it."""
    gated, rng = make(model, *text, "f"), np.random.default_rng(1)
    assert len(set(gated.names)) == len(gated.names) == count
    assert_close(gated.loss(np.ones(count)), loss(model, *text), factor=1e4)
    gates = (rng.random(count) > 0.2).astype(float)
    some = rng.choice(count, 25, replace=False)
    want = [gated.loss(np.where(np.arange(count) == k, 0, gates)) for k in some]
    assert_close(gated.losses_without(gates, some), np.array(want), factor=1e4)
    at, way, h = 1 + 0.1 * normal((count,), seed=0), normal((count,), seed=1), 1e-5
    difference = (gated.loss(at + h * way) - gated.loss(at - h * way)) / (2 * h)
    assert abs(-gated.first_order(at) @ way - difference) < 1e-6 * abs(difference)


# ------------------------------------------------------------------------------------------------------ what is left


@pytest.mark.slow
@pytest.mark.parametrize(
    ("by", "increase"),
    list(itertools.product(["greedy", "gradient"], [0.0, 0.1, 1.0])),
)
def test_edges_that_are_left_keep_the_loss(
    model: Checkpoint, text: tuple[np.ndarray, np.ndarray], by: str, increase: float
) -> None:
    found = find_circuit(model, *text, loss_increase=increase, by=by)  # type: ignore[arg-type]
    again = loss_of_edges(model, *text, set(found.kept))
    assert_close(found.loss, again, factor=1e6)
    assert_close(found.full_loss, loss(model, *text), factor=1e4)
    assert again <= found.full_loss + increase + 1e-12
    assert_close(found.losses[-1], found.loss, factor=1e4)
    assert np.all(found.losses <= found.full_loss + increase)
    assert len(found.kept) + len(found.removed) == len(set(found.kept) | set(found.removed)) == 120


@pytest.mark.slow
def test_of_a_greedy_circuit_nothing_more_can_go(model: Checkpoint, text: tuple[np.ndarray, np.ndarray]) -> None:
    for of in ("edges", "terms", "paths"):
        found = find_circuit(model, *text, loss_increase=0.5, of=of)  # type: ignore[arg-type]
        assert len(found.kept) > 0
        assert np.all(found.loss + found.effects > found.full_loss + 0.5)
    fewer = {name: find_circuit(model, *text, loss_increase=name).kept for name in (0.1, 1.0)}
    assert len(fewer[1.0]) < len(fewer[0.1])


@pytest.mark.slow
def test_the_induction_circuit_is_left(model: Checkpoint, text: tuple[np.ndarray, np.ndarray]) -> None:
    """Of 120 edges under 20: positions to the previous-token head, that to keys of layer 1, which copy to logits."""
    found = find_circuit(model, *text, loss_increase=1.0)
    assert len(found.kept) < 20
    previous = {"tokens -> 0.3 V", "positions -> 0.3 Q", "positions -> 0.3 K"}
    assert previous <= set(found.kept)
    worth = dict(zip(found.kept, found.effects, strict=True))
    assert min(worth[name] for name in previous) > 3
    induction = [h for h in range(4) if f"1.{h} -> logits" in found.kept]
    assert induction
    for h in induction:
        assert {f"0.3 -> 1.{h} K", f"tokens -> 1.{h} Q", f"tokens -> 1.{h} V"} <= set(found.kept)
    assert not any(name.startswith(("0.0", "0.1", "0.2")) for name in found.kept)


@pytest.mark.slow
def test_by_gradient_the_induction_circuit_is_in_what_is_left(
    model: Checkpoint, text: tuple[np.ndarray, np.ndarray]
) -> None:
    found = find_circuit(model, *text, loss_increase=1.0, by="gradient")
    assert len(found.kept) < 60
    most = [found.kept[k] for k in np.argsort(-found.effects)]
    assert set(most[:3]) == {"tokens -> 0.3 V", "positions -> 0.3 Q", "positions -> 0.3 K"}
    assert any({f"0.3 -> 1.{h} K", f"tokens -> 1.{h} V", f"1.{h} -> logits"} <= set(most[3:12]) for h in range(4))


@pytest.mark.parametrize("by", ["greedy", "gradient"])
def test_of_the_ten_terms_k_composition_is_left(
    model: Checkpoint, text: tuple[np.ndarray, np.ndarray], by: str
) -> None:
    found = find_circuit(model, *text, loss_increase=1.0, by=by, of="terms")  # type: ignore[arg-type]
    order = [found.kept[k] for k in np.argsort(-found.effects)]
    assert len(order) < 10
    assert all(name.startswith("K 0.3 1.") for name in order[:2])
    assert found.loss <= found.full_loss + 1


@pytest.mark.parametrize("by", ["greedy", "gradient"])
def test_of_paths_those_through_layer_one_alone_are_left(
    model: Checkpoint, text: tuple[np.ndarray, np.ndarray], by: str
) -> None:
    found = find_circuit(model, *text, loss_increase=0.1, by=by, of="paths")  # type: ignore[arg-type]
    assert (
        {"1.1", "1.2"}
        <= set(found.kept)
        <= {*HEADS[4:], "direct"} | {f"0.{a} 1.{b}" for a in range(4) for b in range(4)}
    )
    assert len(found.kept) < 10


def test_left_out_paths_are_subtracted(model: Checkpoint, text: tuple[np.ndarray, np.ndarray]) -> None:
    """One path, by its operator: the stream without it, unembedded."""
    import tnlib_adapters
    from tnlib_adapters.circuits import Paths

    tokens, mask = text[0][:1], text[1][:1]
    gated, seen = path_terms(model, tokens, mask, "f"), run(model, tokens)
    paths = Paths(tnlib_adapters.freeze(model, [patterns[0] for patterns in seen.patterns]))
    stream = seen.residuals[2][0] - paths[(0, 3), (1, 1)].apply(seen.residuals[0][0])
    log_p = log_softmax(stream @ model.read("unembed.weight").astype(float).T + model.read("unembed.bias"))
    at = np.flatnonzero(mask[0])
    want = -log_p[at - 1, tokens[0, at]].mean()
    found = gated.losses_without(np.ones(25), np.array([gated.names.index("0.3 1.1")]))
    assert_close(found[0], want, factor=1e6)


@pytest.mark.parametrize(("of", "by"), [("edges", "acdc"), ("paths", "greedy"), ("terms", "gradient")])
def test_a_circuit_is_pruned_further(model: Checkpoint, text: tuple[np.ndarray, np.ndarray], of: Of, by: str) -> None:
    first = find_circuit(model, *text, loss_increase=0.3, of=of, by="integrated")
    found = find_circuit(model, *text, loss_increase=1.0, of=first, by=by)  # type: ignore[arg-type]
    assert set(found.kept) < set(first.kept)
    assert len(found.kept) + len(found.removed) == len(first.kept) + len(first.removed)
    assert set(first.removed) <= set(found.removed)
    assert found.loss <= found.full_loss + 1.0 + 1e-12
    make = {"edges": GatedModel, "paths": path_terms, "terms": ten_terms_by_heads}[of]
    gated: Gated = make(model, *text, "f")  # type: ignore[operator]
    assert_close(found.loss, gated.loss(np.isin(gated.names, found.kept).astype(float)), factor=1e4)
    with refused(ValueError, "of must be a circuit that meets the budget"):
        find_circuit(model, *text, loss_increase=0.0, of=found, by="acdc")
    other = replace(first, kept=("9.9", *first.kept))
    with refused(
        ValueError, "of must be a kind of term, or a circuit of this model with the same ablation, got one with '9.9'"
    ):
        find_circuit(model, *text, loss_increase=1.0, of=other)


# ------------------------------------------------------------------------------------------------- what is said of it


def test_it_reads_as_a_table() -> None:
    found = Circuit("paths", ("0.3", "1.2"), np.array([0.5, 2.0]), ("direct",), np.array([0.3]), 0.25, 0.3)
    assert repr(found).splitlines()[0] == "2 of 3 paths, loss 0.300; with all of them 0.250"
    assert repr(found).splitlines()[2].split() == ["1.2", "2.000"]
    terms = replace(found, of="terms")
    assert repr(terms).startswith("2 of 3 terms and the softmax remainder, loss 0.300; with all of them 0.250")


def test_what_is_refused(model: Checkpoint, text: tuple[np.ndarray, np.ndarray], tmp_path: Path) -> None:
    for bad, words in (
        (
            {"by": "chance"},
            "by must be 'greedy', 'gradient', 'acdc', 'attribution' or 'integrated', got 'chance'",
        ),
        ({"of": "heads"}, "of must be 'edges', 'terms' or 'paths', got 'heads'"),
        ({"loss_increase": -1.0}, "loss_increase must be a number of nats from 0 on, got -1.0"),
        ({"loss_increase": float("nan")}, "loss_increase must be a number"),
    ):
        with refused(ValueError, words):
            find_circuit(model, *text, **{"loss_increase": 0.1, **bad})  # type: ignore[arg-type]
    with refused(ValueError, "mask must be bool of shape"):
        find_circuit(model, text[0], text[1][:, 1:], loss_increase=0.1)
    tf.set_seed(0)
    config = tf.GPT2Config(vocab_size=128, n_positions=96, n_embd=16, n_layer=2, n_head=2)
    tf.GPT2LMHeadModel(config).save_pretrained(tmp_path)
    with refused(ValueError, "model must have attention layers and nothing else, got a gpt2"):
        find_circuit(open_checkpoint(tmp_path), *text, loss_increase=0.1, of="terms")


# ----------------------------------------------------------------------------------------- more layers, random weights


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """Three layers of three heads of 2, scores large enough to choose."""
    folder = tmp_path_factory.mktemp("deep")
    tensors = {"embed.weight": normal((11, 6), seed=1), "positions.weight": normal((9, 6), seed=2)}
    tensors |= {"unembed.weight": normal((11, 6), seed=3), "unembed.bias": normal((11,), seed=4)}
    for layer, (k, name) in itertools.product(range(3), enumerate(("query", "key", "value", "output"))):
        tensors[f"layers.{layer}.attention.{name}.weight"] = normal((6, 6), seed=10 * layer + k)
        tensors[f"layers.{layer}.attention.{name}.bias"] = normal((6,), seed=10 * layer + k + 5)
    save_file({name: a.astype(np.float32) for name, a in tensors.items()}, folder / "model.safetensors")
    config = {"model_type": "tnlib_attention_only", "vocab_size": 11, "hidden_size": 6, "num_attention_heads": 3}
    config |= {"num_hidden_layers": 3, "max_position_embeddings": 9}
    (folder / "config.json").write_text(json.dumps(config))
    return open_checkpoint(folder)


@pytest.mark.parametrize("share", [0.05, 0.3, 0.95])
def test_shut_gates_are_a_model_that_reads_less(deep: Checkpoint, share: float) -> None:
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 11, (3, 8))
    mask = np.arange(8) > np.array([[0], [2], [5]])
    gated = GatedModel(deep, tokens, mask, "f")
    gates = (rng.random(len(gated.names)) > share).astype(float)
    kept = {name for name, gate in zip(gated.names, gates, strict=True) if gate}
    assert_close(gated.loss(gates), loss_of_edges(deep, tokens, mask, kept), factor=1e6)


def test_paths_through_three_layers(deep: Checkpoint) -> None:
    tokens, mask = np.arange(7) % 5, np.arange(7) > 2
    gated = path_terms(deep, tokens, mask, "f")
    assert len(gated.names) == 4**3
    assert_close(gated.loss(np.ones(64)), loss(deep, tokens, mask), factor=1e4)
    found = find_circuit(deep, tokens, mask, loss_increase=0.2, of="paths")
    assert found.loss <= found.full_loss + 0.2
    with refused(ValueError, "of='terms' must be of a model of two layers, got 3"):
        find_circuit(deep, tokens, mask, loss_increase=0.2, of="terms")


def test_a_circuit_may_be_empty(deep: Checkpoint) -> None:
    tokens, mask = np.arange(7) % 5, np.arange(7) > 2
    found = find_circuit(deep, tokens, mask, loss_increase=1e6)
    assert found.kept == ()
    assert_close(found.loss, loss_of_edges(deep, tokens[None], mask[None], set()), factor=1e4)
    assert repr(found).startswith(f"0 of {len(found.removed)} edges")


@pytest.mark.parametrize("kind", ["zero", "mean", "resample"])
def test_edges_that_no_path_connects_change_nothing(deep: Checkpoint, kind: str) -> None:
    rng = np.random.default_rng(2)
    tokens = rng.integers(0, 11, (3, 8))
    gated = GatedModel(deep, tokens, np.arange(8) > np.zeros((3, 1)), "f", Ablation(kind))
    dropped = 0
    for _ in range(5):
        gates = (rng.random(len(gated.names)) > 0.93).astype(float)
        for from_sources in (False, True):
            connected = gated.connected(gates, from_sources=from_sources)
            edges = [name.split(" -> ") for name, gate in zip(gated.names, connected, strict=True) if gate]
            writers = {writer for writer, _ in edges}
            read = {reader.split(" ")[0] for _, reader in edges}
            assert read <= {*writers, "logits"}
            if from_sources:
                assert {w for w in writers if w[0].isdigit() and not w.endswith("bias")} <= read
            if kind == "resample" or not from_sources:  # other unreached writers are constants
                assert_close(gated.loss(connected), gated.loss(gates), factor=1e4)
            dropped += int((gates - connected).sum())
    assert dropped > 20
    found = find_circuit(deep, tokens, np.arange(8) > np.zeros((3, 1)), loss_increase=0.3, by="acdc", ablation=kind)
    pairs = [name.split(" -> ") for name in found.kept]
    assert {reader.split(" ")[0] for _, reader in pairs} <= {"logits", *(writer for writer, _ in pairs)}
    assert found.loss <= found.full_loss + 0.3 + 1e-9
    assert len(found.losses) == len(found.removed)


class Costs:
    """A loss that is a sum over the removed terms."""

    def __init__(self, costs: np.ndarray) -> None:
        self.costs, self.names = costs, tuple(map(str, range(len(costs))))

    def loss(self, gates: np.ndarray) -> float:
        return float((1 - gates) @ self.costs)

    def losses_without(self, gates: np.ndarray, terms: np.ndarray) -> np.ndarray:
        return np.asarray(self.loss(gates) + self.costs[terms])

    def first_order(self, gates: np.ndarray) -> np.ndarray:
        return self.costs

    def first_order_between(self, fraction: float) -> np.ndarray:
        return self.costs


def test_long_searches_say_how_long(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(term_searches, "MANY", 15)
    for by, least in (("greedy", 20), ("acdc", None), ("integrated", None)):
        caplog.clear()
        pruned = term_searches.prune(Costs(np.arange(10.0)), 6.0, by)  # type: ignore[arg-type]
        assert sorted(pruned.removed)[:3] == [0, 1, 2]
        messages = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        assert messages == ([f"search {by!r} of 10 terms: at least {least} evaluations of the loss"] if least else [])


def test_negative_effects_are_said() -> None:
    found = Circuit("edges", ("a", "b"), np.array([0.3, -0.2]), (), np.empty(0), 1.0, 1.0)
    assert repr(found).endswith("1 kept edges have negative effects: without one of them alone the loss is lower")
    assert "negative" not in repr(replace(found, effects=np.array([0.3, -1e-9])))
