"""Layers of attention compared with each other, and with what a model computed."""

from __future__ import annotations

from typing import Any

import numpy as np
from oracles import normal
from tnlib_adapters import Attention
from tnlib_adapters.reference.weights import Weights

ARRAYS = ("W_Q", "W_K", "W_V", "W_O", "b_Q", "b_K", "b_V", "b_O")


def visible(scores: np.ndarray) -> np.ndarray:
    """Where a score is not masked: masks are the lowest finite number."""
    return scores > -1e30


def from_the_diagonal(layer: Attention, scores: np.ndarray) -> np.ndarray:
    """Scores of the model with ALiBi counted from the query: it counts from the first key, which shifts whole rows."""
    if layer.alibi is None:
        return scores
    return scores - layer.alibi[:, None, None] * np.arange(scores.shape[1])[:, None]


def scores_of(layer: Attention, x: np.ndarray, read: np.ndarray) -> np.ndarray:
    """Scores of queries of x and keys of what the layer reads, which are the same but for cross-attention."""
    return layer.scores(x, read) if layer.cross else layer.scores(x)


def mask_of(layer: Attention, x: np.ndarray, read: np.ndarray) -> np.ndarray:
    """Mask of queries of x and keys of what the layer reads."""
    return layer.mask(len(x), len(read)) if layer.cross else layer.mask(len(x))


def homogeneous(x: np.ndarray) -> np.ndarray:
    return np.concatenate([x, np.ones_like(x[:, :1])], axis=1)


def branches(weights: Weights) -> list[Any]:
    """The attention layers of a model with the norms beside them."""
    return [b for block in weights.blocks for b in block.branches if isinstance(b.layer, Attention)]


def same_layer(one: Attention, other: Attention) -> None:
    for name in (*ARRAYS, "alibi"):
        mine, theirs = getattr(one, name), getattr(other, name)
        assert (mine is None) == (theirs is None)
        if mine is not None:
            np.testing.assert_array_equal(mine, theirs)
    facts = ("scale", "softcap", "causal", "window", "context", "cross")
    assert [getattr(one, f) for f in facts] == [getattr(other, f) for f in facts]
    if one.rotary is not None and other.rotary is not None:
        np.testing.assert_array_equal(one.rotary.frequencies, other.rotary.frequencies)
        assert (one.rotary.pairs, one.rotary.factor) == (other.rotary.pairs, other.rotary.factor)
    assert (one.rotary is None) == (other.rotary is None)
    if one.head_norm is not None and other.head_norm is not None:
        np.testing.assert_array_equal(one.head_norm.query, other.head_norm.query)
        np.testing.assert_array_equal(one.head_norm.key, other.head_norm.key)
    assert (one.head_norm is None) == (other.head_norm is None)


def grouped_layer(*, biases: bool = True, seed: int = 0) -> Attention:
    """Six query heads of 3 on two key and value heads, d_model 8, scale 0.3, in double precision."""
    weights = {"W_Q": (6, 8, 3), "W_K": (2, 8, 3), "W_V": (2, 8, 3), "W_O": (6, 3, 8)}
    shapes = weights | ({"b_Q": (6, 3), "b_K": (2, 3), "b_V": (2, 3), "b_O": (8,)} if biases else {})
    return Attention(scale=0.3, **{name: normal(s, seed=seed + k) for k, (name, s) in enumerate(shapes.items())})


def narrow_values_layer(seed: int = 0, *, biases: bool = True, **options: Any) -> Attention:
    """Four query heads of 4 on two key heads, values of 3, d_model 6, scale 0.7, in double precision."""
    weights = {"W_Q": (4, 6, 4), "W_K": (2, 6, 4), "W_V": (2, 6, 3), "W_O": (4, 3, 6)}
    shapes = weights | ({"b_Q": (4, 4), "b_K": (2, 4), "b_V": (2, 3), "b_O": (6,)} if biases else {})
    arrays = {name: normal(shape, seed=seed + k) for k, (name, shape) in enumerate(shapes.items())}
    return Attention(scale=0.7, **arrays, **options)
