"""Shares of content and position in the variance of scores, against sums over all tokens and positions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from attention_layers import branches
from oracles import normal
from tnlib_adapters import Checkpoint
from tnlib_adapters.circuits import score_shares
from tnlib_adapters.reference.weights import Weights
from token_streams import N, meet, pieces

NAMES = ["gpt2_lm", "bert", "opt", "gptj", "llama_biases", "llama_yarn", "mistral", "gemma2", "bloom"]
Opened = tuple[Checkpoint, Weights]


def dense_shares(weights: Weights, layer: int, head: int, p: np.ndarray) -> tuple[np.ndarray, float]:
    """Every token at every position: scores of the three parts of the query, split by means over keys."""
    attention = branches(weights)[layer].layer
    q, q_at, k, k_at = pieces(weights, layer, head)
    common = p @ q + q_at.mean(axis=0)
    table = np.zeros((3, 3))
    for i in range(N):
        seen = np.flatnonzero(attention.mask(N)[i])
        parts = [np.tile(common, (len(q), 1)), q - p @ q, np.tile(q_at[i] - q_at.mean(axis=0), (len(q), 1))]
        scores = np.stack(
            [np.stack([meet(attention, part, k + k_at[j], i, j) for j in seen], axis=2) for part in parts]
        )  # part s t j
        if attention.alibi is not None:
            scores[0] -= attention.alibi[head] / attention.scale * (i - seen)
        whole = scores.sum(axis=0)
        over_tokens = np.einsum("pstj,t->psj", scores, p)[:, :, None]
        mean = over_tokens.mean(axis=3, keepdims=True)
        of_token = scores.mean(axis=3, keepdims=True) - mean
        of_both = scores - mean - of_token - (over_tokens - mean)
        for column, split in enumerate((of_token, over_tokens - mean, of_both)):
            products = (split * np.broadcast_to(whole, scores.shape)).mean(axis=3)  # part s t
            table[:, column] += np.einsum("pst,s,t->p", products, p, p)
    table /= N
    return table / table.sum(), float(np.sqrt(table.sum()) * attention.scale)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("drawn", [None, [3, 7, 7, 20, 41]])
def test_shares_are_sums_over_all_tokens_and_positions(
    name: str, drawn: list[int] | None, opened: Callable[[str], Opened]
) -> None:
    checkpoint, weights = opened(name)
    p = np.full(50, 1 / 50) if drawn is None else np.bincount(drawn, minlength=50) / len(drawn)
    for layer, head in ((0, 3), (1, 1)):
        want, deviation = dense_shares(weights, layer, head, p)
        found = score_shares(checkpoint, layer, head, tokens=drawn, length=N)
        np.testing.assert_allclose(found.shares, want, atol=1e-9)
        assert found.deviation == pytest.approx(deviation, rel=1e-9)
        assert found.shares.sum() == pytest.approx(1)
        assert found.content + found.position + found.shares[:, 2].sum() == pytest.approx(1)


def test_a_vector_moved_from_tokens_to_positions_changes_no_share(model: Checkpoint) -> None:
    from tnlib_adapters.circuits import read_vocabulary

    words, shift = read_vocabulary(model), normal((64,))
    table = words.table + shift.astype(np.float32)
    moved = replace(words, table=table, positions=words.positions - shift)
    one, other = (score_shares(model, 1, 0, vocabulary=w).shares for w in (words, moved))
    np.testing.assert_allclose(other, one, atol=1e-4)


def test_the_previous_token_head_goes_by_positions(model: Checkpoint) -> None:
    found = score_shares(model, 0, 3)
    assert found.position > 0.99
    assert found.shares[2, 1] > 0.9  # and asks by its own
    assert found.deviation > 5 * max(score_shares(model, 0, head).deviation for head in range(3))
    assert "position" in repr(found)
