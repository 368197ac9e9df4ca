"""Previous-token, duplicate-token and induction scores, from attention patterns and from weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attention_layers import branches
from oracles import assert_close, normal, refused
from tnlib_adapters import Attention, Checkpoint, open_checkpoint
from tnlib_adapters.circuits import pattern_scores, repeat_scores, score_shares, weight_scores
from tnlib_adapters.reference.weights import Weights
from token_streams import N, meet, stream
from transformers_models import random_model

NAMES = ["gpt2_lm", "bert", "opt", "gptj", "llama_biases", "llama_yarn", "mistral", "gemma2", "bloom"]
Opened = tuple[Checkpoint, Weights]


def test_scores_of_patterns_are_means_over_positions() -> None:
    tokens = np.array([[4, 9, 4, 4, 9, 1]])
    pattern = np.tril(normal((6, 6)) ** 2)
    pattern /= pattern.sum(axis=1, keepdims=True)
    found = pattern_scores([pattern[None]], tokens)
    assert_close(found.previous, [[np.diag(pattern, -1).mean()]])
    same = [pattern[2, 0], pattern[3, [0, 2]].sum(), pattern[4, 1]]
    assert_close(found.duplicate, [[np.mean(same)]])
    behind = [pattern[2, 1], pattern[3, 1], pattern[4, 2]]  # of 4 at 0 and 2, of 9 at 1; 3 itself is no earlier one
    assert_close(found.induction, [[np.mean(behind)]])
    assert found.chance["previous"] == pytest.approx(np.mean([1 / 2, 1 / 3, 1 / 4, 1 / 5, 1 / 6]))
    assert found.chance["duplicate"] == pytest.approx(np.mean([1 / 3, 2 / 4, 1 / 5]))


def test_heads_that_see_everything_are_measured_against_that() -> None:
    pattern = np.full((2, 3, 4, 4), 0.25)
    found = pattern_scores([pattern], np.array([[1, 2, 1, 2], [3, 3, 4, 4]]))
    for doing in ("previous", "duplicate", "induction"):
        assert_close(getattr(found, doing), np.full((1, 3), found.chance[doing]))
    assert np.isnan(pattern_scores([pattern[:1]], [1, 2, 3, 4]).induction).all()
    assert pattern_scores([pattern[:1]], [1, 2, 3, 4]).largest("induction", 3) == []


def test_trained_heads_do_what_is_known_of_them(model: Checkpoint) -> None:
    found = repeat_scores(model, length=40)
    assert found.largest("previous", 1)[0][0] == (0, 3)
    assert found.previous[0, 3] > 0.9
    assert np.delete(found.previous.ravel(), 3).max() < 0.1
    assert found.induction[1].min() > 0.6
    assert found.induction[0].max() < 0.05
    assert found.duplicate.max() < 0.05
    assert "induction" in repr(found)


def divided(rows: np.ndarray, norm: Any) -> np.ndarray:
    return rows if norm is None else norm(rows)


def standing_out(scores: np.ndarray) -> float:
    """Mean of the diagonal over the root mean square, keys centred."""
    scores = scores - scores.mean(axis=1, keepdims=True)
    return float(np.diag(scores).mean() / np.sqrt(np.square(scores).mean()))


def mean_scores(attention: Attention, q: np.ndarray, k: np.ndarray) -> np.ndarray:
    return np.mean([meet(attention, q, k, distance, 0) for distance in range(1, N)], axis=0)


@pytest.mark.parametrize("name", ["gpt2_lm", "opt", "gptj", "llama_biases", "llama_yarn", "gemma2", "bloom"])
def test_matching_is_that_of_all_pairs_of_tokens(name: str, opened: Callable[[str], Opened]) -> None:
    checkpoint, weights = opened(name)
    found = weight_scores(checkpoint, length=N)
    embedding = weights.embedding
    alone = divided(embedding.tokens + (0 if embedding.segment is None else embedding.segment), embedding.norm)
    first, second = branches(weights)[:2]
    for head, writer in ((0, 1), (3, 2)):
        x = divided(alone, second.before)
        layer, k = second.layer, head // (second.layer.n_heads // second.layer.kv_heads)
        bias = [0 if b is None else b for b in (layer.b_Q, layer.b_K)]
        q = x @ layer.W_Q[head] + (bias[0] if isinstance(bias[0], int) else bias[0][head])
        own = x @ layer.W_K[k] + (bias[1] if isinstance(bias[1], int) else bias[1][k])
        assert found.duplicate[1, head] == pytest.approx(standing_out(mean_scores(layer, q, own)), abs=1e-8)
        y = np.concatenate([divided(alone, first.before), np.ones((50, 1))], axis=1)
        written = (y @ first.layer.ov(writer).full())[:, :-1]
        written = written if first.behind is None else written * first.behind.weight
        if second.before is not None:
            centred = written - written.mean(axis=1, keepdims=True) if second.before.centred else written
            written = centred * second.before.weight
        want = standing_out(mean_scores(layer, q, written @ layer.W_K[k]))
        assert found.matching[0, writer, 1, head] == pytest.approx(want, abs=1e-8)
    assert np.isnan(found.matching[1:, :, 1]).all()
    assert np.isnan(found.matching[:, :, 0]).all()
    others = second.layer.mask(N).sum() / N - 1  # on average over queries
    highest = np.vectorize(lambda margin: highest_by_quadrature(margin, others))(found.matching[0, :, 1])
    assert np.allclose(found.induction[1], (found.previous[0][:, None] * highest).max(axis=0), atol=1e-7)
    assert not found.induction[0].any()
    assert found.chance["induction"] == pytest.approx(highest_by_quadrature(0, others))


def highest_by_quadrature(margin: float, n: float) -> float:
    """Probability that `margin` plus a normal deviation is above n others."""
    from scipy.integrate import quad
    from scipy.stats import norm

    return float(quad(lambda x: norm.pdf(x) * norm.cdf(margin + x) ** n, -8, 8)[0])


@pytest.mark.parametrize("name", NAMES)
def test_previous_is_in_the_pattern_of_the_mean_token(name: str, opened: Callable[[str], Opened]) -> None:
    checkpoint, weights = opened(name)
    found = weight_scores(checkpoint, length=N)
    for layer, head in ((0, 0), (1, 3)):
        attention, x = branches(weights)[layer].layer, stream(weights, layer)
        scores = attention.scores(x.tokens.mean(axis=0) + x.positions)[head]
        scores = np.where(attention.mask(N), scores, -np.inf)
        pattern = np.exp(scores - scores.max(axis=1, keepdims=True))
        pattern /= pattern.sum(axis=1, keepdims=True)
        assert found.previous[layer, head] == pytest.approx(np.diag(pattern, -1).mean(), abs=1e-10)


def test_weights_tell_the_induction_circuit(model: Checkpoint) -> None:
    found, patterns = weight_scores(model), repeat_scores(model)
    assert found.previous[0, 3] == pytest.approx(patterns.previous[0, 3], abs=0.02)
    assert np.delete(found.previous.ravel(), 3).max() < 0.1
    assert all(found.writer(1, head) == (0, 3) for head in range(4))
    assert found.matching[0, 3, 1].min() > 3  # of at most 4
    assert found.matching[0, :3, 1].max() < 1
    assert np.abs(found.induction - patterns.induction).max() < 0.1
    assert found.writer(0, 0) is None
    assert "induction" in repr(found)


def test_weights_and_patterns_agree_on_the_trained_llama(llama: Checkpoint) -> None:
    told, seen = weight_scores(llama), repeat_scores(llama, length=40, n_sequences=6)
    assert told.previous.argmax() == seen.previous.argmax() == 2 * 8 + 5
    assert np.corrcoef(told.previous.ravel(), seen.previous.ravel())[0, 1] > 0.9
    strongest = {head for head, _ in seen.largest("induction", 3)}
    assert strongest == {divmod(int(k), 8) for k in np.argsort(-told.induction, axis=None)[:3]}
    assert min(share for _, share in seen.largest("induction", 3)) > 1.5 * seen.chance["induction"]
    for layer, head in np.ndindex(told.induction.shape):
        writer = told.writer(layer, head)
        assert told.induction[layer, head] == (0 if writer is None else told.shares[(*writer, layer, head)])
    writer = told.writer(3, 5)
    assert writer is not None
    assert writer[0] == 2
    assert min(told.previous[writer], seen.previous[writer]) > 0.5


@pytest.mark.slow
def test_the_trained_bert_has_heads_that_go_by_position(minilm_path: Path) -> None:
    bert = open_checkpoint(minilm_path)
    positions = [score_shares(bert, 0, head, length=32).position for head in range(12)]
    told = weight_scores(bert, length=32)
    assert max(positions) > 0.8
    assert told.previous[0].argmax() == repeat_scores(bert, length=16, n_sequences=1).previous[0].argmax()


def test_wrong_arguments_are_refused(model: Checkpoint, opened: Callable[[str], Opened], tmp_path: Path) -> None:
    with refused(ValueError, "score_shares: length must be an integer from 2 to 96", "97"):
        score_shares(model, 0, 0, length=97)
    with refused(ValueError, "score_shares: tokens must lie between 0 and 127, got 128"):
        score_shares(model, 0, 0, tokens=[3, 128])
    with refused(ValueError, "pattern_scores: patterns of layer 0", "(1, 1, 4, 4)"):
        pattern_scores([np.ones((1, 4, 4))], [1, 2, 3])
    with refused(ValueError, "pattern_scores: patterns must hold at least one layer"):
        pattern_scores([], [1, 2, 3])
    with refused(ValueError, "run: tokens must hold at most 96"):
        repeat_scores(model, length=49)
    with refused(ValueError, "weight_scores", "qwen3", "normalises", "repeat_scores"):
        weight_scores(opened("qwen3")[0])
    random_model("vit").save_pretrained(tmp_path)
    with refused(ValueError, "repeat_scores: model must read tokens", "vit"):
        repeat_scores(open_checkpoint(tmp_path))
    with refused(ValueError, "score_shares: model must read tokens", "vit"):
        score_shares(open_checkpoint(tmp_path), 0, 0)
