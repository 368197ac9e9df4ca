"""Effects of single singular directions, beside forward passes with the operator written out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from oracles import assert_close, refused
from tnlib_adapters import Attention, Checkpoint, builtin_path, open_checkpoint
from tnlib_adapters.circuits import LogitDifference, singular_vector_effects
from tnlib_adapters.data.coded_letters import coded_letters
from tnlib_adapters.reference.model import loss, run
from tnlib_adapters.reference.weights import Weights, read_weights

from benchmarks.smollm2 import smollm2

TOKENS = np.random.default_rng(0).integers(3, 50, (2, 6))
MASK = np.broadcast_to(np.arange(6) > 3, TOKENS.shape)


def without(weights: Weights, number: int, head: int, operator: str, k: int) -> tuple[Weights, float]:
    """Weights with the k-th singular triple taken from the dense operator of one head, and its singular value.

    The factor that stays is divided out: W_O or W_K by least squares.
    """
    blocks, count = [], 0
    value = 0.0
    for block in weights.blocks:
        branches = []
        for branch in block.branches:
            layer: Any = branch.layer
            if isinstance(layer, Attention):
                if count == number:
                    layer = layer.of_heads(range(layer.n_heads))
                    side = operator[-1] if operator != "QK" else "Q"
                    changed = layer.with_bias(side).copy()
                    fixed = {"OV": layer.W_O[head], "QK": layer.with_bias("K", head).T}.get(operator)
                    right = np.eye(layer.d_head) if fixed is None else fixed
                    u, s, vh = np.linalg.svd(changed[head] @ right)
                    changed[head] -= s[k] * np.outer(u[:, k], vh[k]) @ np.linalg.pinv(right)
                    arrays: Any = {f"W_{side}": changed[:, :-1], f"b_{side}": changed[:, -1]}
                    layer, value = replace(layer, **arrays), s[k]
                count += 1
            branches.append(replace(branch, layer=layer))
        blocks.append(replace(block, branches=tuple(branches)))
    return replace(weights, blocks=tuple(blocks)), value


@pytest.mark.parametrize(
    ("name", "operators"),
    [("gpt2_lm", "OV QK Q K"), ("gemma2", "OV Q"), ("gptj", "OV K"), ("opt_after", "OV QK"), ("qwen3", "Q")],
)
def test_effects_are_those_of_the_operator_without_a_direction(name: str, operators: str, opened: Any) -> None:
    """Norms behind a layer, norms on the stream, parallel layers, grouped heads, normalised queries and keys."""
    _, weights = opened(name)
    before = loss(weights, TOKENS, MASK)
    for number, head, k in ((0, 1, 0), (1, 2, 1)):
        for operator in operators.split():
            found = singular_vector_effects(weights, TOKENS, MASK, number, head, operator=operator)  # type: ignore[arg-type]
            changed, value = without(weights, number, head, operator, k)
            want = loss(changed, TOKENS, MASK) - before
            assert abs(want) > 1e-9
            assert found.effects[k] == pytest.approx(want, rel=1e-5)
            assert_close(found.vectors.values[k], value, factor=1e4)
            assert found.unmasked == pytest.approx(before)


def test_metrics_and_many_sequences(opened: Any) -> None:
    _, weights = opened("llama")
    tokens = np.random.default_rng(1).integers(3, 50, (40, 6))  # more than run at once with two directions
    mask = np.broadcast_to(np.arange(6) == 5, tokens.shape)
    others = (tokens[:, 5] + 1) % 50
    changed, _ = without(weights, 0, 3, "OV", 1)
    clean, masked = (run(w, tokens).logits[:, 4] for w in (weights, changed))  # type: ignore[index]
    rows = np.arange(40)
    differences = [(z[rows, others] - z[rows, tokens[:, 5]]).mean() for z in (clean, masked)]
    found = singular_vector_effects(weights, tokens, mask, 0, 3, metric=LogitDifference(others))
    assert found.effects[1] == pytest.approx(differences[1] - differences[0])
    p, q = (np.exp(z - z.max(axis=1, keepdims=True)) for z in (clean, masked))
    p, q = (x / x.sum(axis=1, keepdims=True) for x in (p, q))
    of_kl = singular_vector_effects(weights, tokens, mask, 0, 3, metric="kl")
    assert of_kl.effects[1] == pytest.approx((p * np.log(p / q)).sum(axis=1).mean())
    assert of_kl.unmasked == pytest.approx(0, abs=1e-12)


def test_equal_singular_values_are_masked_together(opened: Any) -> None:
    """All directions of an operator whose singular values are 1, together: the head writes nothing."""
    _, weights = opened("gpt2_lm")
    block = weights.blocks[0]
    layer: Any = block.branches[0].layer
    identity = np.broadcast_to(np.eye(layer.d_model, layer.d_head), layer.W_V.shape)
    flat = replace(layer, W_V=identity, b_V=np.zeros_like(layer.b_V), W_O=identity.swapaxes(1, 2))
    silent = replace(flat, W_O=flat.W_O * (np.arange(layer.n_heads) != 1)[:, None, None])

    def with_layer(changed: Attention) -> Weights:
        branches = (replace(block.branches[0], layer=changed), *block.branches[1:])
        return replace(weights, blocks=(replace(block, branches=branches), *weights.blocks[1:]))

    found = singular_vector_effects(with_layer(flat), TOKENS, MASK, 0, 1)
    assert found.effects == pytest.approx([loss(with_layer(silent), TOKENS, MASK) - found.unmasked])
    assert f"0 to {layer.d_head - 1}" in repr(found)


def test_four_directions_carry_a_letter() -> None:
    tokens, answers = coded_letters(16, rng=1)
    found = singular_vector_effects(open_checkpoint(builtin_path("known_circuit")), tokens, answers, 0, 0)
    assert (found.effects > 0.05).tolist() == [True] * 4 + [False] * 4
    assert found.to_frame().direction[:4].sort_values().tolist() == [0, 1, 2, 3]
    assert "OV of head 0.0" in repr(found)


def test_refusals(model: Checkpoint, llama: Checkpoint) -> None:
    with refused(ValueError, "operator must be 'OV', 'Q' or 'K' for this model", "rotary embeddings", "'Q' or 'K'"):
        singular_vector_effects(llama, TOKENS, MASK, 0, 0, operator="QK")
    with refused(ValueError, "singular_vector_effects: operator must be 'OV', 'QK', 'Q' or 'K', got 'VO'"):
        singular_vector_effects(model, TOKENS, MASK, 0, 0, operator="VO")  # type: ignore[arg-type]
    with refused(ValueError, "singular_vector_effects: head must lie between 0 and 3, got 4"):
        singular_vector_effects(model, TOKENS, MASK, 1, 4)
    with refused(ValueError, "metric must be 'loss' or 'kl', got 'nats'"):
        singular_vector_effects(model, TOKENS, MASK, 1, 0, metric="nats")  # type: ignore[arg-type]


@pytest.mark.slow
def test_directions_of_a_language_model() -> None:
    folder = smollm2()
    if folder is None:
        pytest.skip("SmolLM2 is made by python -m benchmarks.smollm2")
    weights = read_weights(open_checkpoint(folder))
    found = singular_vector_effects(weights, TOKENS, MASK, 23, 3)
    changed, _ = without(weights, 23, 3, "OV", 5)
    assert found.effects[5] == pytest.approx(loss(changed, TOKENS, MASK) - found.unmasked, rel=1e-4)
