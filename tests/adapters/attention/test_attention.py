"""Attention as operators against transformers' own forward pass, and against dense formulas."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tnlib_adapters
from attention_layers import grouped_layer, homogeneous
from oracles import assert_close, normal, refused, unchanged
from tnlib_adapters import Attention

from tnlib import ArgumentError, ArgumentTypeError


def test_a_negative_layer_counts_from_the_end(saved: Any) -> None:
    checkpoint = tnlib_adapters.open_checkpoint(saved("gpt2_by_layer")[1])  # the scale depends on the layer
    first, last = checkpoint.attention(0), checkpoint.attention(-1)
    assert last.scale == pytest.approx(first.scale / 3)
    np.testing.assert_array_equal(last.W_Q, checkpoint.attention(2).W_Q)


# ------------------------------------------------------------------------------------------------- grouped heads

HEADS, KV, D, DH, N = 6, 2, 8, 3, 5


@pytest.mark.parametrize("biases", [True, False])
def test_grouped_heads_agree_with_a_dense_sum(biases: bool) -> None:
    layer, x, patterns = grouped_layer(biases=biases), normal((N, D), seed=9), normal((HEADS, N, N), seed=10)
    out = np.zeros((N, D)) if layer.b_O is None else np.tile(layer.b_O, (N, 1))
    for h in range(HEADS):
        g = h // 3  # three query heads share each key head
        q, k, v = x @ layer.W_Q[h], x @ layer.W_K[g], x @ layer.W_V[g]
        if biases:
            q, k, v = q + layer.b_Q[h], k + layer.b_K[g], v + layer.b_V[g]
        scores = 0.3 * np.einsum("ik,jk->ij", q, k)
        x1 = homogeneous(x)
        assert_close(layer.scores(x)[h], scores)
        assert_close(layer.scale * x1 @ layer.qk(h).full() @ x1.T, scores)
        assert_close(x1 @ layer.ov(h).full(), np.concatenate([v @ layer.W_O[h], np.zeros((N, 1))], axis=1))
        out += patterns[h] @ v @ layer.W_O[h]
    assert_close(layer.frozen(patterns).apply(x), out)
    assert "on 2 key and value heads" in repr(layer)


def test_grouped_heads_are_repeated_in_the_stack() -> None:
    layer = grouped_layer()
    x = layer.stacked()
    assert x.shape == (4, HEADS, D, DH)
    for h in range(HEADS):
        np.testing.assert_array_equal(x[1, h], layer.W_K[h // 3])
        np.testing.assert_array_equal(x[2, h], layer.W_V[h // 3])


def test_patterns_may_be_rectangular_and_integers() -> None:
    layer, x = grouped_layer(), normal((N, D), seed=9)
    shift = np.zeros((HEADS, N - 1, N), int)
    shift[:, np.arange(N - 1), np.arange(1, N)] = 1
    square = np.zeros((HEADS, N, N))
    square[:, :-1] = shift
    assert_close(layer.frozen(shift).apply(x), layer.frozen(square).apply(x)[:-1])


def test_arguments_are_left_alone() -> None:
    layer, x, patterns = grouped_layer(), normal((N, D), seed=9), normal((HEADS, N, N), seed=10)
    with unchanged(layer.W_Q, layer.W_O, layer.b_V, x, patterns):
        layer.scores(x)
        layer.frozen(patterns).apply(x)
        layer.qk(0).full()
        layer.ov(0).full()


# ------------------------------------------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("W_K", (KV, D, DH + 1)),
        ("W_K", (4, D, DH)),
        ("W_K", (0, D, DH)),
        ("W_Q", (D, HEADS * DH)),
        ("W_V", (HEADS, D, DH)),
        ("W_O", (HEADS, D, DH)),
        ("b_Q", (HEADS * DH,)),
        ("b_K", (HEADS, DH)),
        ("b_V", (KV, D)),
        ("b_O", (1, D)),
    ],
)
def test_shapes_that_contradict_each_other_are_refused(name: str, shape: tuple[int, ...]) -> None:
    layer = grouped_layer()
    with refused(ArgumentError, "Attention", name, str(shape)):
        Attention(**(vars(layer) | {name: np.ones(shape)}))


@pytest.mark.parametrize("method", ["qk", "ov"])
def test_heads_that_do_not_exist_are_refused(method: str) -> None:
    call = getattr(grouped_layer(), method)
    np.testing.assert_array_equal(call(-1).left, call(5).left)
    for head in (6, -7):
        with refused(ArgumentError, f"Attention.{method}", "head", "between 0 and 5", str(head)):
            call(head)
    for wrong in (1.0, "0", True, None):
        with refused(ArgumentTypeError, f"Attention.{method}", "head"):
            call(wrong)


def test_layers_that_do_not_exist_are_refused(saved: Any) -> None:
    checkpoint = tnlib_adapters.open_checkpoint(saved("bert")[1])
    with refused(ArgumentError, "Checkpoint.attention", "layer", "between 0 and 2", "3"):
        checkpoint.attention(3)
    with refused(ArgumentTypeError, "Checkpoint.attention", "layer"):
        checkpoint.attention("0")
    for length in ("9", np.ones(2), 2.5):
        with refused(ArgumentTypeError, "Checkpoint.attention: length must be an integer"):
            checkpoint.attention(0, length=length)
        with refused(ArgumentTypeError, "Checkpoint.head: length must be an integer"):
            checkpoint.head(0, 0, length=length)
    for name in (None, 3, np.ones(2)):
        with refused(ArgumentTypeError, "Checkpoint: the name of a tensor must be a string"):
            checkpoint.read(name)


def test_inputs_of_the_wrong_shape_are_refused() -> None:
    layer = grouped_layer()
    with refused(ArgumentError, "Attention.scores", "x", "(2, 5, 8)"):
        layer.scores(np.ones((2, N, D)))
    with refused(ArgumentError, "Attention.scores", "x", "(5, 9)"):
        layer.scores(np.ones((N, D + 1)))
    with refused(ArgumentTypeError, "Attention.frozen", "patterns"):
        layer.frozen([[1.0], [1.0, 2.0]])
    for n in (None, 2.5, "3"):
        with refused(ArgumentTypeError, "Attention.mask: n must be an integer"):
            layer.mask(n)  # type: ignore[arg-type]
