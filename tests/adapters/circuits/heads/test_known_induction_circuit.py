"""A two-layer model made of deltas, whose circuit is known: its heads and its edges are found."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from tnlib_adapters import Checkpoint, open_checkpoint
from tnlib_adapters.circuits import find_circuit, find_induction, weight_scores
from tnlib_adapters.data.repeats import repeated_segments
from tnlib_adapters.reference.model import run

VOCAB, CONTEXT, SHARPNESS = 48, 48, 20.0
D_MODEL = 3 * VOCAB + CONTEXT
COLUMNS = {"token": 0, "position": VOCAB, "before": VOCAB + CONTEXT, "next": 2 * VOCAB + CONTEXT}  # of the stream


def delta(block: str, shift: int = 0) -> np.ndarray:
    """Entry (k, b + k - shift) is 1 in the columns b, b + 1, ... of a block of the stream."""
    size = CONTEXT if block == "position" else VOCAB
    out = np.zeros((D_MODEL, D_MODEL), np.float32)
    out[:size, COLUMNS[block] : COLUMNS[block] + size] = np.eye(size, k=-shift)
    return out


@pytest.fixture(scope="module")
def deltas(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """Head 0.0 copies the preceding token to `before`; head 1.0 matches it with the token and writes `next`."""
    folder: Path = tmp_path_factory.mktemp("deltas")
    config = {"model_type": "tnlib_attention_only", "vocab_size": VOCAB, "hidden_size": D_MODEL}
    config |= {"num_attention_heads": 1, "num_hidden_layers": 2, "max_position_embeddings": CONTEXT, "dtype": "float32"}
    keys = delta("before")
    keys[:VOCAB, COLUMNS["position"]] = -1.0  # every token avoids position 0, which has no preceding token
    gain = np.float32(SHARPNESS * np.sqrt(D_MODEL))
    first = (gain * delta("position"), delta("position", shift=1), delta("token"), delta("before").T)
    second = (gain * delta("token"), keys, delta("token"), delta("next").T)
    tensors = {"embed.weight": delta("token")[:VOCAB], "positions.weight": delta("position")[:CONTEXT]}
    tensors |= {"unembed.weight": SHARPNESS * delta("next")[:VOCAB], "unembed.bias": np.zeros(VOCAB, np.float32)}
    for layer, weights in enumerate((first, second)):
        for name, weight in zip(("query", "key", "value", "output"), weights, strict=True):
            tensors[f"layers.{layer}.attention.{name}.weight"] = weight
            tensors[f"layers.{layer}.attention.{name}.bias"] = np.zeros(D_MODEL, np.float32)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: np.ascontiguousarray(a, np.float32) for name, a in tensors.items()}, folder / "model.safetensors")
    return open_checkpoint(folder)


def test_every_second_occurrence_is_continued(deltas: Checkpoint) -> None:
    tokens = np.tile(np.random.default_rng(0).permutation(VOCAB)[:20], 2)
    predicted = run(deltas, tokens).logits[0].argmax(axis=1)  # type: ignore[index]
    assert np.array_equal(predicted[20:-1], tokens[21:])


def test_its_heads_are_found(deltas: Checkpoint) -> None:
    found, by_weights = find_induction(deltas, n=4), weight_scores(deltas)
    assert (found.previous_head, found.induction_heads) == ((0, 0), ((1, 0),))
    assert found.previous_token[0, 0] > 0.999
    assert found.copying[1, 0] == pytest.approx(1, abs=1e-6)
    assert (by_weights.previous.argmax(), by_weights.induction.argmax()) == (0, 1)
    assert by_weights.writer(1, 0) == (0, 0)


def test_its_circuit_is_found(deltas: Checkpoint) -> None:
    rng = np.random.default_rng(0)
    tokens, repeated = repeated_segments(4, vocab=VOCAB, context=CONTEXT, rng=rng, distinct=True)
    found = find_circuit(deltas, tokens, repeated, loss_increase=0.01)
    writes = {"positions -> 0.0 Q", "positions -> 0.0 K", "tokens -> 0.0 V", "0.0 -> 1.0 K"}
    copies = {"tokens -> 1.0 Q", "tokens -> 1.0 V", "1.0 -> logits", "positions -> 1.0 K"}
    assert set(found.kept) == writes | copies
