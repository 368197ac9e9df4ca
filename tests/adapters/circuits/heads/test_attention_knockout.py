"""Attention knock-out, written out one head at a time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from oracles import assert_close
from tnlib_adapters import Attention, Checkpoint
from tnlib_adapters.attention.softmax import log_softmax, softmax
from tnlib_adapters.circuits import (
    find_induction,
)
from tnlib_adapters.circuits.discovery.target_loss import targets_of
from tnlib_adapters.circuits.heads.attention_knockout import losses_without_attention
from tnlib_adapters.circuits.heads.pattern_scores import attention_targets
from tnlib_adapters.data.repeats import repeated_segments
from tnlib_adapters.reference.model import loss, run
from tnlib_adapters.reference.weights import Branch, Weights, read_weights


def test_effects_are_those_of_patterns_without_the_targets(model: Checkpoint) -> None:
    """Attention knock-out written out: the pattern of one head without the targets, rescaled."""
    found = find_induction(model, n=2, rng=3)
    tokens, repeated = repeated_segments(2, rng=np.random.default_rng(3))
    weights, seen = read_weights(model), run(model, tokens)
    layer, targets = weights.blocks[1].branches[0].layer, attention_targets(tokens)["induction"]
    changes = []
    for k, sequence in enumerate(tokens):
        x, patterns = seen.inputs[1][k], seen.patterns[1][k].copy()
        left = np.where(targets[k], 0, patterns[2])
        patterns[2] = left / left.sum(axis=1, keepdims=True)
        at = np.flatnonzero(repeated[k]) - 1
        streams = seen.residuals[2][k], seen.residuals[1][k] + layer.output(patterns, x)
        whole, without = (-log_softmax(weights.unembed(s[at]))[np.arange(len(at)), sequence[at + 1]] for s in streams)
        changes.append(np.mean(without - whole))
    assert_close(found.effect[1, 2], np.mean(changes), factor=1e6)
    assert_close(found.standard_error[1, 2], abs(changes[0] - changes[1]) / 2, factor=1e6)


def sees_later(weights: Weights) -> Weights:
    """Return weights whose attention has no causal mask."""

    def opened(branch: Branch) -> Branch:
        layer = branch.layer
        return replace(branch, layer=replace(layer, causal=False)) if isinstance(layer, Attention) else branch

    blocks = tuple(replace(block, branches=tuple(map(opened, block.branches))) for block in weights.blocks)
    return replace(weights, blocks=blocks)


@pytest.mark.parametrize("name", ["gemma2", "opt_after", "gpt_neox", "bloom", "deepseek_v3", "gpt2_lm not causal"])
@pytest.mark.parametrize("n", [2, 20])
def test_heads_are_knocked_out_one_by_one(name: str, n: int, opened: Any) -> None:
    """Norms behind a layer, norms on the stream and parallel layers: the pattern of one head changed in its layer."""
    _, weights = opened(name.split()[0])
    weights = sees_later(weights) if name.endswith("not causal") else weights
    tokens = np.tile(np.random.default_rng(0).integers(2, 50, (n, 5)), (1, 2))
    mask, blocked = np.broadcast_to(np.arange(10) > 5, tokens.shape), attention_targets(tokens)["induction"]
    losses, without = losses_without_attention(weights, targets_of(weights, tokens, mask, "f"), blocked)
    assert losses[1] == pytest.approx(loss(weights, tokens[1], mask[1]))
    layers = [b.layer for block in weights.blocks for b in block.branches if hasattr(b.layer, "W_Q")]
    assert without.shape == (len(layers), layers[0].n_heads, n)
    for number, head in ((0, 1), (1, 2), (1, 3)):
        changed = without_targets(weights, number, head, tokens[1], blocked[1])
        log_p = log_softmax(changed[np.flatnonzero(mask[1]) - 1])
        want = -log_p[np.arange(len(log_p)), tokens[1, mask[1]]].mean()
        assert without[number, head, 1] == pytest.approx(want)


def without_targets(weights: Any, number: int, head: int, tokens: np.ndarray, blocked: np.ndarray) -> np.ndarray:
    """The logits if one head of one layer does not attend to `blocked`, by a forward pass written out."""
    x, count = weights.embedding(tokens[None])[0], 0
    for block in weights.blocks:
        added = np.zeros_like(x)
        for branch in block.branches:
            read = x if branch.before is None else branch.before(x)
            if hasattr(branch.layer, "W_Q"):
                patterns = softmax(np.where(branch.layer.mask(len(x)), branch.layer.scores(read), -np.inf))
                if count == number:
                    left = np.where(blocked, 0, patterns[head])
                    sums = left.sum(axis=1, keepdims=True)
                    patterns[head] = left / np.where(sums > 0, sums, 1)
                written, count = branch.layer.output(patterns, read), count + 1
            else:
                written = branch.layer(read)
            added += written if branch.behind is None else branch.behind(written)
        x = x + added if block.after is None else block.after(x + added)
    return weights.unembed(x if weights.final_norm is None else weights.final_norm(x))
