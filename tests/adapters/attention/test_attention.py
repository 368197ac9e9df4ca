"""Attention as operators against transformers' own forward pass, and against dense formulas."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tnlib_adapters
from attention_layers import homogeneous, visible
from oracles import assert_close, normal, refused, unchanged
from tnlib_adapters import Attention

from tnlib import ArgumentError, ArgumentTypeError, LowRank

CASES = ["bert", "bert_masked", "gpt2", "gpt2_lm", "gpt2_unscaled", "gpt2_by_layer", "minilm"]


@pytest.fixture(params=CASES)
def layers(request: pytest.FixtureRequest, saved: Any, recorded: Any) -> list[tuple[Attention, Any]]:
    """Every layer of a saved model, beside what the running model computed in it for its first sequence."""
    checkpoint, run = tnlib_adapters.open_checkpoint(saved(request.param)[1]), recorded(request.param)
    per_layer = zip(run.scores, run.patterns, run.inputs, run.outputs, strict=True)
    return [(checkpoint.attention(i), [a[0] for a in of_layer]) for i, of_layer in enumerate(per_layer)]


def test_every_layer_is_covered(layers: Any) -> None:
    assert len(layers) in (3, 6)
    for layer, _ in layers:
        assert layer.W_Q.dtype == np.float32
        assert all(b is not None and np.abs(b).min() > 0 for b in (layer.b_Q, layer.b_K, layer.b_V, layer.b_O))


def test_scores_are_those_of_the_model(layers: Any) -> None:
    for layer, (scores, _, x, _) in layers:
        seen = visible(scores)
        for head in range(layer.n_heads):
            assert_close(layer.scores(x)[head][seen[head]], scores[head][seen[head]], np.float32)


def test_patterns_are_those_of_the_model(layers: Any) -> None:
    for layer, (scores, patterns, x, _) in layers:
        weights = np.exp(layer.scores(x).astype(np.float64)) * visible(scores)
        # exp turns the roundoff of a score, absolute, into a relative error
        factor = 64 * max(1.0, np.abs(scores[visible(scores)]).max())
        for head in range(layer.n_heads):
            of_head = weights[head] / weights[head].sum(-1, keepdims=True)
            assert_close(of_head, patterns[head], np.float32, factor)


def test_qk_in_homogeneous_coordinates_gives_the_scores(layers: Any) -> None:
    for layer, (scores, _, x, _) in layers:
        x1 = homogeneous(x)
        for head, seen in enumerate(visible(scores)):
            got = layer.scale * (x1 @ (layer.qk(head) @ x1.T))
            assert_close(got[seen], scores[head][seen], np.float32, factor=256)


def test_ov_in_homogeneous_coordinates_gives_the_outputs(layers: Any) -> None:
    for layer, (_, patterns, x, outputs) in layers:
        x1 = homogeneous(x).astype(np.float64)
        written = np.stack([patterns[h] @ (x1 @ layer.ov(h)) for h in range(layer.n_heads)])
        assert not written[..., -1].any()
        assert_close(written[..., :-1].sum(0) + layer.b_O, outputs, np.float32)


def test_frozen_gives_the_outputs_under_the_models_own_patterns(layers: Any) -> None:
    for layer, (_, patterns, x, outputs) in layers:
        terms, constant = frozen = layer.frozen(patterns)
        assert_close(frozen.apply(x), outputs, np.float32)
        assert_close(terms.apply(x) + constant, outputs, np.float32)
        assert_close(layer.frozen(patterns).apply(np.zeros_like(x)), constant, np.float32)
        assert terms.ranks == (layer.n_heads,)


def test_operators_are_held_as_factors(layers: Any) -> None:
    layer, (_, patterns, _, _) = layers[0]
    d, dh = layer.d_model, layer.d_head
    for operator in (layer.qk(0), layer.ov(0)):
        assert isinstance(operator, LowRank)
        assert [a.shape for a in operator.arrays()] == [(d + 1, dh), (dh, d + 1)]
    assert all(isinstance(term, LowRank) and term.ranks == (dh,) for term in layer.frozen(patterns).terms.right)


def test_stacked_holds_all_weights_in_the_order_qkvo(layers: Any) -> None:
    layer, _ = layers[0]
    x = layer.stacked()
    assert x.shape == (4, layer.n_heads, layer.d_model, layer.d_head)
    for one, other in zip(x, (layer.W_Q, layer.W_K, layer.W_V, layer.W_O.transpose(0, 2, 1)), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_negative_layer_counts_from_the_end(saved: Any) -> None:
    checkpoint = tnlib_adapters.open_checkpoint(saved("gpt2_by_layer")[1])  # the scale depends on the layer
    first, last = checkpoint.attention(0), checkpoint.attention(-1)
    assert last.scale == pytest.approx(first.scale / 3)
    np.testing.assert_array_equal(last.W_Q, checkpoint.attention(2).W_Q)


# ------------------------------------------------------------------------------------------------- grouped heads

HEADS, KV, D, DH, N = 6, 2, 8, 3, 5


def grouped(*, biases: bool = True) -> Attention:
    def draw(seed: int, *shape: int) -> np.ndarray:
        return normal(shape, seed=seed)

    b = {"b_Q": (HEADS, DH), "b_K": (KV, DH), "b_V": (KV, DH), "b_O": (D,)}
    return Attention(
        W_Q=draw(0, HEADS, D, DH),
        W_K=draw(1, KV, D, DH),
        W_V=draw(2, KV, D, DH),
        W_O=draw(3, HEADS, DH, D),
        scale=0.3,
        **({name: draw(4 + i, *shape) for i, (name, shape) in enumerate(b.items())} if biases else {}),
    )


@pytest.mark.parametrize("biases", [True, False])
def test_grouped_heads_agree_with_a_dense_sum(biases: bool) -> None:
    layer, x, patterns = grouped(biases=biases), normal((N, D), seed=9), normal((HEADS, N, N), seed=10)
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
    layer = grouped()
    x = layer.stacked()
    assert x.shape == (4, HEADS, D, DH)
    for h in range(HEADS):
        np.testing.assert_array_equal(x[1, h], layer.W_K[h // 3])
        np.testing.assert_array_equal(x[2, h], layer.W_V[h // 3])


def test_patterns_may_be_rectangular_and_integers() -> None:
    layer, x = grouped(), normal((N, D), seed=9)
    shift = np.zeros((HEADS, N - 1, N), int)
    shift[:, np.arange(N - 1), np.arange(1, N)] = 1
    square = np.zeros((HEADS, N, N))
    square[:, :-1] = shift
    assert_close(layer.frozen(shift).apply(x), layer.frozen(square).apply(x)[:-1])


def test_arguments_are_left_alone() -> None:
    layer, x, patterns = grouped(), normal((N, D), seed=9), normal((HEADS, N, N), seed=10)
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
    layer = grouped()
    with refused(ArgumentError, "Attention", name, str(shape)):
        Attention(**(vars(layer) | {name: np.ones(shape)}))


@pytest.mark.parametrize("method", ["qk", "ov"])
def test_heads_that_do_not_exist_are_refused(method: str) -> None:
    call = getattr(grouped(), method)
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
    layer = grouped()
    with refused(ArgumentError, "Attention.scores", "x", "(2, 5, 8)"):
        layer.scores(np.ones((2, N, D)))
    with refused(ArgumentError, "Attention.scores", "x", "(5, 9)"):
        layer.scores(np.ones((N, D + 1)))
    with refused(ArgumentError, "Attention.frozen", "patterns", "(2, 5, 5)"):
        layer.frozen(np.ones((KV, N, N)))
    with refused(ArgumentError, "Attention.frozen", "patterns", "(5, 5)"):
        layer.frozen(np.ones((N, N)))
    with refused(ArgumentTypeError, "Attention.frozen", "patterns"):
        layer.frozen([[1.0], [1.0, 2.0]])
    for n in (None, 2.5, "3"):
        with refused(ArgumentTypeError, "Attention.mask: n must be an integer"):
            layer.mask(n)  # type: ignore[arg-type]
