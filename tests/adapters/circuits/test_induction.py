"""Induction built of deltas, and found in the built-in model: patterns, weights, and what is lost without a head."""

from __future__ import annotations

import dataclasses
import heapq
import inspect
import math
import textwrap
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tnlib_adapters
from oracles import assert_close, normal, refused
from tnlib_adapters import Attention, Checkpoint, builtin_path, open_checkpoint
from tnlib_adapters.attention.softmax import log_softmax, softmax
from tnlib_adapters.circuits import (
    OpenLayer,
    composition_score,
    find_induction,
    pattern_scores,
    split_stream,
    toy_induction,
)
from tnlib_adapters.circuits.discovery.target_loss import targets_of
from tnlib_adapters.circuits.heads.attention_knockout import losses_without_attention
from tnlib_adapters.circuits.heads.induction_heads import Induction
from tnlib_adapters.circuits.heads.pattern_scores import induction_targets
from tnlib_adapters.data.repeats import repeated_segments
from tnlib_adapters.reference.model import loss, run
from tnlib_adapters.reference.weights import Branch, Weights, read_weights

import tnlib
from tnlib.interop import quimb as network


@pytest.fixture(scope="module")
def found(model: Checkpoint) -> Induction:
    return find_induction(model, rng=5)


# ------------------------------------------------------------------------------------------------------ out of deltas


def segment_twice(n: int, d: int, seed: int) -> np.ndarray:
    return np.tile(normal((n, d), seed=seed), (2, 1))


@pytest.mark.parametrize("seed", range(5))
def test_the_toy_looks_at_what_followed_and_copies_it(seed: int) -> None:
    x = segment_twice(12, 64, seed)
    toy = toy_induction(x)
    later = np.arange(12, 23)
    assert np.array_equal(toy.pattern[later].argmax(axis=1), later - 11)
    assert toy.pattern[later, later - 11].min() > 0.8
    similar = toy.output[later] @ x[:12].T
    assert np.array_equal(similar.argmax(axis=1), later - 11)


def test_the_toy_is_a_pattern_of_its_scores() -> None:
    x = segment_twice(6, 16, 9)
    toy = toy_induction(x)
    before = np.concatenate([np.zeros((1, 16)), x[:-1]])
    scores = x @ before.T
    assert_close(network.contract(toy.network, legs=("query", "key")), scores, factor=1e3)
    weights = np.tril(np.exp(scores / 4))
    assert_close(toy.pattern, weights / weights.sum(axis=1, keepdims=True), factor=1e4)
    assert_close(toy.output, toy.pattern @ x, factor=1e3)
    assert isinstance(toy.head, tnlib.KroneckerTerms)
    assert {"X", "MATCH", "SHIFT"} == set(toy.network.tags)
    assert all(set(np.unique(toy.network[tag].data)) <= {0.0, 1.0} for tag in ("MATCH", "SHIFT"))


def test_random_vectors_that_do_not_repeat_are_not_attended_to() -> None:
    toy = toy_induction(normal((24, 64), seed=0))
    assert toy.pattern[12:].max() < 0.7


def test_what_the_toy_takes() -> None:
    x = segment_twice(4, 8, 0)
    want = toy_induction(x)
    assert_close(toy_induction(np.asfortranarray(x)).pattern, want.pattern)
    assert_close(toy_induction(x.astype(np.float32)).pattern, want.pattern, factor=1e10)
    assert toy_induction(np.ones((1, 3))).pattern == 1
    with refused(ValueError, "toy_induction: x must be real"):
        toy_induction(x + 1j)
    with refused(ValueError, "toy_induction: x must"):
        toy_induction(x[0])


# ------------------------------------------------------------------------------------------------ in a trained model


def test_the_previous_token_head(found: Induction) -> None:
    assert found.previous_head == (0, 3)
    assert found.previous_token[0, 3] > 0.8
    assert np.delete(found.previous_token.ravel(), 3).max() < 0.1


def test_layer_one_is_induction_heads_that_copy(found: Induction) -> None:
    assert found.induction_heads == ((1, 0), (1, 1), (1, 2), (1, 3))
    assert found.induction[1].min() > 0.5
    assert found.induction[0].max() < 0.1
    assert found.copying[1].min() > 0.95
    assert found.copying[0].max() < 0


def test_keys_read_the_previous_token_head_above_chance(model: Checkpoint, found: Induction) -> None:
    assert np.isnan(found.composition[0]).all()
    assert found.composition[1].min() > 1.8
    layers = [model.attention(layer) for layer in range(2)]
    for h in range(4):
        score = composition_score(layers[0].ov(3), layers[1].qk(h).T)
        assert_close(found.composition[1, h], score.multiple, factor=1e10)
        others = [composition_score(layers[0].ov(a), layers[1].qk(h).T).multiple for a in range(3)]
        assert max(others) < score.multiple


def test_without_the_previous_token_head_in_the_keys_induction_is_lost(found: Induction) -> None:
    """Of the gap to chance at least 80 % goes with head 0.3, under 10 % with any other."""
    assert found.lost[0, 3] >= 0.8
    assert np.abs(found.lost[0, :3]).max() < 0.1
    assert np.isnan(found.lost[1]).all()
    assert found.chance == math.log(128)
    assert found.loss < 0.15 * found.chance


def test_losses_are_those_of_another_forward_pass(model: Checkpoint) -> None:
    """The same check by OpenLayer: scores of layer 1 without what one head put into the keys."""
    found = find_induction(model, n=2, rng=3)
    tokens, repeated = repeated_segments(2, rng=np.random.default_rng(3))
    assert_close(found.loss, loss(model, tokens, repeated), factor=1e4)
    weights, seen = read_weights(model), run(model, tokens)
    for head in range(4):
        losses = []
        for k, sequence in enumerate(tokens):
            layer = OpenLayer(weights.blocks[1].branches[0].layer, split_stream(weights, sequence, layer=1))
            at = np.flatnonzero(repeated[k]) - 1
            without = layer.removed(key=[f"0.{head}"]).sum(axis=0)[at]
            log_p = log_softmax(weights.unembed(seen.residuals[2][k, at] - without))
            losses.extend(-log_p[np.arange(len(at)), sequence[at + 1]])
        share = (np.mean(losses) - found.loss) / (found.chance - found.loss)
        assert abs(share - found.lost[0, head]) < 1e-9


def test_patterns_are_those_of_the_texts_that_losses_are_of(model: Checkpoint) -> None:
    found = find_induction(model, n=3, rng=1)
    tokens, _ = repeated_segments(3, rng=np.random.default_rng(1))
    patterns = run(model, tokens).patterns
    back = [patterns[0][b, :, i, i - 1] for b in range(3) for i in range(1, 96)]
    assert_close(found.previous_token[0], np.mean(back, axis=0), factor=1e4)
    assert_close(found.induction, pattern_scores(patterns, tokens).induction)


def test_it_reads_as_a_table(found: Induction) -> None:
    lines = repr(found).splitlines()
    assert lines[0].startswith("Previous-token head 0.3; loss on repeats 0.")
    assert len(lines) == 2 + 8
    assert lines[5].split()[0] == "0.3"
    assert "%" in lines[5]
    assert find_induction.__doc__ is not None
    assert tnlib_adapters.circuits.find_induction is find_induction


def test_effects_are_those_of_patterns_without_the_targets(model: Checkpoint) -> None:
    """Attention knock-out written out: the pattern of one head without the targets, rescaled."""
    found = find_induction(model, n=2, rng=3)
    tokens, repeated = repeated_segments(2, rng=np.random.default_rng(3))
    weights, seen = read_weights(model), run(model, tokens)
    layer, targets = weights.blocks[1].branches[0].layer, induction_targets(tokens)
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


def test_single_precision() -> None:
    llama = open_checkpoint(builtin_path("llama"))
    double, single = (find_induction(llama, n=2, length=8, dtype=dtype) for dtype in (np.float64, np.float32))
    assert double.effect.dtype == np.float64
    for name in ("effect", "standard_error", "previous_token", "induction"):
        np.testing.assert_allclose(getattr(single, name), getattr(double, name), atol=1e-5)
    assert np.abs(single.effect - double.effect).max() > 0


@pytest.mark.parametrize("name", ["gemma2", "opt_after", "gpt_neox", "bloom", "deepseek_v3", "gpt2_lm not causal"])
@pytest.mark.parametrize("n", [2, 20])
def test_heads_are_knocked_out_one_by_one(name: str, n: int, opened: Any) -> None:
    """Norms behind a layer, norms on the stream and parallel layers: the pattern of one head changed in its layer."""
    _, weights = opened(name.split()[0])
    weights = sees_later(weights) if name.endswith("not causal") else weights
    tokens = np.tile(np.random.default_rng(0).integers(2, 50, (n, 5)), (1, 2))
    mask, blocked = np.broadcast_to(np.arange(10) > 5, tokens.shape), induction_targets(tokens)
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


def test_intervals_are_those_of_student(found: Induction) -> None:
    """With two sequences the interval of a mean is wide: an effect of twenty standard errors is undecided."""
    effect, error = np.array([[0.0, 0.0], [1.0, 0.1]]), np.array([[0.0, 0.0], [0.05, 0.0]])
    few, many = (
        dataclasses.replace(found, effect=effect, standard_error=error, n_sequences=count) for count in (2, 30)
    )
    assert (few.causal_heads, few.undecided_heads) == ((), ((1, 0),))
    assert (many.causal_heads, many.undecided_heads) == (((1, 0),), ())


@pytest.mark.parametrize("seed", range(4))
def test_causal_heads_of_the_built_in_model(model: Checkpoint, seed: int) -> None:
    found = find_induction(model, n=24, rng=seed)
    assert {(1, 1), (1, 2)} <= set(found.causal_heads) <= set(found.induction_heads)
    assert set(found.causal_heads) | set(found.undecided_heads) <= {(0, 3), *found.induction_heads}


def test_induction_heads_of_the_built_in_llama() -> None:
    """On the first lines of a file of Python, twice."""
    llama = open_checkpoint(builtin_path("llama"))
    found = find_induction(llama, n=16, length=20, text=python_tokens(), rng=0)
    assert {(3, 4), (3, 5), (3, 7)} <= set(found.causal_heads) | set(found.undecided_heads)
    assert set(found.causal_heads) <= {(3, h) for h in range(4, 8)}
    assert found.previous_head == (2, 5)
    assert len(repr(found).splitlines()) == 2 + 16


def python_tokens() -> np.ndarray:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_file(str(builtin_path("llama") / "tokenizer.json"))
    return np.array(tokenizer.encode("".join(inspect.getsource(module) for module in (textwrap, heapq))).ids)


@pytest.mark.parametrize("name", ["gpt2_lm", "gpt_neox", "gemma2", "qwen3", "opt_after", "deepseek_v3"])
def test_every_architecture(name: str, opened: Any) -> None:
    found = find_induction(opened(name)[0], n=3, length=6)
    assert np.isfinite(found.effect).all()
    assert np.isfinite(found.standard_error).all()
    assert np.isnan(found.composition).all() == (name in ("qwen3", "deepseek_v3"))


def test_models_that_are_refused(opened: Any) -> None:
    model = open_checkpoint(builtin_path())
    with refused(ValueError, "find_induction: model must have an unembedding, got a llama"):
        find_induction(opened("llama_base")[0])
    with refused(ValueError, "find_induction: n must be"):
        find_induction(model, n=1)
    with refused(ValueError, "find_induction: length must be at most 48, half the context of the model, got 49"):
        find_induction(model, length=49)
    with refused(ValueError, "find_induction: text must be at least 24 token numbers"):
        find_induction(model, text=[1, 2, 3])
    with refused(ValueError, "find_induction: text must lie between 0 and 127"):
        find_induction(model, text=np.full(50, 500))


def test_segments_are_counted_and_drawn() -> None:
    rng = np.random.default_rng(0)
    for wrong in ({"n": "a"}, {"n": 2.5}, {"context": None}, {"vocab": [1]}, {"rng": 0}, {"distinct": "yes"}):
        with refused(TypeError, f"repeated_segments: {next(iter(wrong))} must be"):
            repeated_segments(**({"n": 1, "rng": rng} | wrong))  # type: ignore[arg-type]
    for wrong in ({"n": -1}, {"context": 47}, {"vocab": 0}, {"vocab": 95, "distinct": True}):
        with refused(ValueError, f"repeated_segments: {next(iter(wrong))} must be at least"):
            repeated_segments(**({"n": 1, "rng": rng} | wrong))  # type: ignore[arg-type]
