"""Copying scores and bigrams against dense circuits from tokens to logits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attention_layers import branches, homogeneous
from checkpoint_folders import change_config
from oracles import assert_close, normal, refused
from tnlib_adapters import Checkpoint, builtin_path, open_checkpoint
from tnlib_adapters.circuits import (
    bigrams,
    copying,
    copying_scores,
    read_vocabulary,
    repeat_scores,
    weight_scores,
)
from tnlib_adapters.circuits.effective_head import stream_head
from tnlib_adapters.circuits.tokens.largest_logits import largest_logits
from tnlib_adapters.reference.model import run
from tnlib_adapters.reference.weights import Weights, read_weights
from token_streams import token_rows, without_weights
from transformers_models import random_model

from tnlib import ArgumentError

NAMES = ["gpt2_lm", "gpt2_untied", "bert", "opt", "opt_narrow", "llama", "llama_biases", "qwen3", "gemma2", "bloom"]
Opened = tuple[Checkpoint, Weights]


def dense_circuit(weights: Weights, layer: int, head: int, tokens: Any = slice(None)) -> np.ndarray:
    """The map from tokens to logits, rows centred: one number for every pair of tokens."""
    branch = branches(weights)[layer]
    x = token_rows(weights)[tokens]
    x = x if branch.before is None else branch.before(x)
    attention = branch.layer
    written = (homogeneous(x) @ attention.ov(head).full())[:, :-1]
    written = written if branch.behind is None else written * branch.behind.weight
    final = weights.final_norm
    if final is not None:
        written = (written - written.mean(axis=1, keepdims=True) if final.centred else written) * final.weight
    logits = written @ weights.unembed.affine.weight
    return logits - logits.mean(axis=1, keepdims=True)


@pytest.mark.parametrize("name", [n for n in NAMES if n != "bert"])
def test_copying_is_that_of_the_dense_circuit(name: str, opened: Callable[[str], Opened]) -> None:
    checkpoint, weights = opened(name)
    for layer, head in ((0, 1), (1, 3)):
        dense, found = dense_circuit(weights, layer, head), copying(checkpoint, layer, head)
        values = np.linalg.eigvals(dense)
        assert abs(found.eigenvalues.sum() - np.trace(dense)) < 1e-8 * np.abs(values).sum()
        assert found.score == pytest.approx(values.real.sum() / np.abs(values).sum(), abs=1e-6)
        largest = np.sort(np.abs(values))[::-1][: len(found.eigenvalues)]
        np.testing.assert_allclose(np.abs(found.eigenvalues), largest, atol=1e-6 * largest[0])
        assert (found.ranks == (dense >= np.diag(dense)[:, None]).sum(axis=1) - 1).all()
        assert found.accuracy(len(dense)) == 1
        assert copying_scores(checkpoint, inputs="embeddings").embeddings[layer, head] == pytest.approx(
            found.score, abs=1e-6
        )


def test_a_vector_added_to_the_unembedding_changes_nothing(tmp_path: Path) -> None:
    from dataclasses import replace

    from tnlib_adapters.circuits.tokens.copying import circuit_copying

    random_model("gpt2_untied").double().save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    words, head = read_vocabulary(checkpoint), stream_head("stream_head", checkpoint, 1, 0)
    moved = replace(words, unembed=words.unembed + 5 * normal((words.unembed.shape[1],)))
    one, other = (circuit_copying(head, w, np.arange(len(w))) for w in (words, moved))
    np.testing.assert_allclose(other.eigenvalues, one.eigenvalues, atol=1e-9 * abs(one.eigenvalues[0]))
    assert (one.ranks == other.ranks).all()


def test_a_sample_of_tokens_is_of_all_of_them(model: Checkpoint) -> None:
    whole, part = copying(model, 1, 0), copying(model, 1, 0, sample=40, rng=1)
    assert len(part.ranks) == 40
    assert np.isin(part.ranks, whole.ranks).all()
    assert (part.eigenvalues == whole.eigenvalues).all()
    assert "of 40 tokens" in repr(part)
    assert len(copying(model, 1, 0, sample=500).ranks) == 128


def test_induction_heads_copy_and_nothing_else_does(model: Checkpoint) -> None:
    scores = copying_scores(model).embeddings
    assert scores[1].min() > 0.99
    assert scores[0].max() < 0.5
    assert min(copying(model, 1, head).accuracy(5) for head in range(4)) > 10 * 5 / 128


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2_untied", "llama", "bloom"])
def test_sums_over_a_vocabulary_of_several_blocks(name: str, tmp_path: Path) -> None:
    """5000 tokens: two blocks of rows, and three of logits."""
    model = random_model(name)
    model.resize_token_embeddings(5000, mean_resizing=False)
    model.double().save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    weights, head, words = (
        read_weights(checkpoint),
        stream_head("stream_head", checkpoint, 1, 3),
        read_vocabulary(checkpoint),
    )
    rows = token_rows(weights)
    assert_close(words.variance, rows.var(axis=1))
    x = homogeneous(without_weights(rows, head.norm))  # token d~
    assert_close(words.second_moments(head.norm), x.T @ x / 5000)
    unembed, final = weights.unembed.affine.weight, weights.final_norm  # d token
    between = final.weight[:, None] * ((unembed - unembed.mean(axis=1, keepdims=True)) @ x)
    between = between - between.mean(axis=0) if final.centred else between
    assert_close(words.between(head.norm), between, factor=1024)

    tokens = np.array([0, 1676, 1677, 4095, 4096, 4999])  # first and last ones of blocks
    circuit, found = dense_circuit(weights, 1, 3, tokens), copying(checkpoint, 1, 3)
    own = circuit[np.arange(len(tokens)), tokens]
    assert (found.ranks[tokens] == (circuit >= own[:, None]).sum(axis=1) - 1).all()
    ov = head.attention.ov(0).full()[:, :-1]  # d~ d
    assert found.eigenvalues.sum() == pytest.approx(np.trace(between @ ov), rel=1e-9)
    logits = (rows[tokens] if final is None else final(rows[tokens])) @ unembed
    likeliest, pairs = np.argsort(-logits, axis=1)[:, :3], bigrams(checkpoint, k=3)
    np.testing.assert_array_equal(pairs.successors[tokens], likeliest)
    probabilities = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    assert_close(pairs.probabilities[tokens], np.take_along_axis(probabilities, likeliest, axis=1), factor=1024)


@pytest.mark.parametrize("block", [None, 44])
@pytest.mark.parametrize("name", ["gpt2_lm", "gpt2_untied", "opt_narrow", "gemma2", "llama_tied", "bloom"])
def test_bigrams_are_those_of_a_model_without_layers(
    name: str, block: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one block, and in blocks of which the last is smaller; a tied model with an RMSNorm makes half of them."""
    from dataclasses import replace

    from tnlib_adapters.reference.model import run

    random_model(name).double().save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    if block is not None:
        sizes = {"bigrams._BLOCK": block, "bigrams._ROWS": 14, "bigrams._COPIED": 5, "largest_logits._GROUP": 5}
        for name, value in sizes.items():
            monkeypatch.setattr(f"tnlib_adapters.circuits.tokens.{name}", value)
    weights = read_weights(checkpoint)
    bare = replace(weights, blocks=(), embedding=replace(weights.embedding, positions=None))
    logits = run(bare, np.arange(50)[:, None]).logits[:, 0]
    p = np.exp(logits - logits.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    found = bigrams(checkpoint, k=4)
    assert_close(found.probabilities, -np.sort(-p, axis=1)[:, :4], factor=1e3)
    assert_close(np.take_along_axis(p, found.successors, axis=1), found.probabilities, factor=1e3)
    some = bigrams(checkpoint, [7, 3], k=4)
    assert (some.successors == found.successors[[7, 3]]).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_probabilities_count_every_logit_that_is_not_below_rounding(dtype: type) -> None:
    """One large logit above 2,999 that lie 0 to 60 below it: their sum is from most of the total to below rounding."""
    rng, gaps = np.random.default_rng(0), np.arange(0, 61, 2)
    logits = (5 - gaps[:, None] - rng.uniform(0, 0.1, (len(gaps), 3000))).astype(dtype)
    logits[np.arange(len(gaps)), rng.integers(0, 3000, len(gaps))] = 5
    exact = np.exp(logits.astype(np.float64) - 5)
    exact /= exact.sum(axis=1, keepdims=True)
    tokens, probabilities = largest_logits(logits.copy(), 20)
    np.testing.assert_array_equal(tokens[:, 0], logits.argmax(axis=1))
    sizes = np.take_along_axis(logits, tokens, axis=1)
    np.testing.assert_array_equal(sizes, -np.sort(-logits, axis=1)[:, :20])
    exact = np.take_along_axis(exact, tokens, axis=1)
    rounding = (8 + gaps) * float(np.finfo(dtype).eps)  # of sums, and of the differences of logits
    assert (np.abs(probabilities / exact - 1).max(axis=1) < rounding).all()


def test_tied_ends_say_the_token_itself_and_random_tokens_nothing(model: Checkpoint, llama: Checkpoint) -> None:
    found = bigrams(llama, k=1)
    assert (found.successors[:, 0] == found.tokens).mean() > 0.8
    assert "  ' self'  ' self'  " in repr(
        bigrams(llama, [t for t in range(1024) if found.vocabulary.name(t) == "' self'"])
    )
    assert bigrams(model).probabilities.max() < 2 / 128
    assert "128 tokens" in repr(bigrams(model))


def test_inputs_of_the_first_layer_are_streams_of_single_tokens(llama: Any) -> None:
    words = read_vocabulary(llama, inputs="first layer")
    for token in (3, 700):
        stream = run(llama, [token]).residuals[1][0, 0]
        assert np.allclose(words.table[token], stream, atol=1e-5 * np.abs(stream).max())
    scores, one = copying_scores(llama), copying_scores(llama, inputs=words)
    assert scores.first_layer[2, 3] == pytest.approx(copying(llama, 2, 3, inputs=words).score, abs=1e-6)
    assert np.abs(scores.first_layer - scores.embeddings).max() > 0.1
    assert "head  embeddings  first layer" in repr(scores)
    assert np.array_equal(one.first_layer, scores.first_layer)
    assert one.embeddings is None
    assert "embeddings" not in repr(one)
    assert "first layer" in repr(copying(llama, 2, 3, inputs=words, sample=10))
    for function in (read_vocabulary, copying_scores):
        with refused(ArgumentError, "inputs", "'first layer'"):
            function(llama, inputs="middle")


def test_copying_of_a_model_that_cannot_be_run(tmp_path: Path) -> None:
    random_model("gpt2_lm").save_pretrained(tmp_path)
    change_config(tmp_path, activation_function="unknown")
    scores = copying_scores(open_checkpoint(tmp_path))
    assert scores.first_layer is None
    assert np.isfinite(scores.embeddings).all()


@pytest.mark.slow
def test_name_movers_of_smollm2(smollm2: Checkpoint) -> None:
    """The stream after the first layer is right for 23.0, the embedding for 29.1."""
    scores = copying_scores(smollm2)
    assert scores.embeddings[23, 0] < 0 < 0.95 < scores.first_layer[23, 0]
    assert scores.first_layer[29, 1] < 0.5 < 0.95 < scores.embeddings[29, 1]


def test_mean_inputs_of_a_text_take_the_place_of_the_mean_embedding(llama: Any) -> None:
    tokens = np.arange(40) + 7
    forward = run(llama, tokens)
    found = weight_scores(llama, inputs=forward)
    layer, head = 2, 5
    mean = forward.inputs[layer][0].mean(axis=0)
    alone = llama.head(layer, head)
    pattern = alone.patterns_of(alone.scores(np.tile(mean, (256, 1))))[0]
    assert found.previous[layer, head] == pytest.approx(np.diagonal(pattern, -1).mean(), abs=1e-5)
    assert np.array_equal(found.duplicate, weight_scores(llama).duplicate)
    assert "mean input of every layer" in repr(found)
    same = weight_scores(llama, inputs={"input_ids": tokens.tolist()})
    assert np.allclose(same.previous, found.previous, atol=1e-4)
    with refused(ValueError, "weight_scores: inputs must lie between 0 and 1023, got 5000"):
        weight_scores(llama, inputs=[5000])


def test_inputs_may_be_a_text(llama: Checkpoint, model: Checkpoint) -> None:
    transformers = pytest.importorskip("transformers")
    text = "for name in values:"
    ids = transformers.PreTrainedTokenizerFast.from_pretrained(builtin_path("llama"))(text)["input_ids"]
    found = weight_scores(llama, inputs=text, length=16).previous
    assert np.array_equal(found, weight_scores(llama, inputs=ids, length=16).previous)
    with refused(TypeError, "weight_scores: inputs must be token numbers, got the text 'for name"):
        weight_scores(model, inputs=text)


def test_deep_models_are_scored_on_mean_inputs(llama: Any, model: Checkpoint, opened: Callable[[str], Opened]) -> None:
    """Unless positions are learned, which a mean over positions lacks."""
    found = weight_scores(llama, length=32)
    assert "heads read the mean input of every layer on random tokens" in repr(found)
    assert np.abs(found.previous - weight_scores(llama, inputs="embeddings", length=32).previous).max() > 0.1
    for shallow in (model, opened("gpt2_lm")[0]):
        assert "heads read the mean embedding" in repr(weight_scores(shallow, length=16))


@pytest.mark.slow
def test_previous_token_and_induction_heads_of_smollm2(smollm2: Checkpoint) -> None:
    found, patterns = weight_scores(smollm2), repeat_scores(smollm2, n_sequences=1, rng=1)
    for of_weights, measured in ((found.previous, patterns.previous), (found.induction, patterns.induction)):
        assert np.corrcoef(of_weights.ravel(), measured.ravel())[0, 1] > 0.8
