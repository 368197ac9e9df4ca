"""Composition scores: dense operators, chance by averages over rotations, folded norms, trained models."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from oracles import assert_close, normal, refused, unchanged
from tnlib_adapters import Attention, Checkpoint, Rotary, circuits, fold, open_checkpoint
from tnlib_adapters.attention.norms import HeadNorm
from tnlib_adapters.circuits import composition_score, compositions, heat_map, stream_moments
from tnlib_adapters.reference.model import run

import tnlib


def layers(n_layers: int = 3, *, heads: int = 4, kv_heads: int = 2, d: int = 7, dh: int = 3, **facts: Any) -> list:
    """Layers with every bias, on shared keys and values."""
    found = []
    for layer in range(n_layers):
        w = [
            normal(s, seed=10 * layer + i) for i, s in enumerate([(heads, d, dh), (kv_heads, d, dh), (kv_heads, d, dh)])
        ]
        o, *b = (
            normal(s, seed=10 * layer + 5 + i)
            for i, s in enumerate([(heads, dh, d), (heads, dh), (kv_heads, dh), (kv_heads, dh)])
        )
        found.append(Attention(*w, o, 0.5, *b, **facts))
    return found


def dense(layer: Attention, head: int, kind: str, distance: int | None = None) -> np.ndarray:
    """What reads, written out from the weights."""
    g = head // (layer.n_heads // layer.kv_heads)
    if kind == "V":
        out = np.zeros((layer.d_model + 1,) * 2)
        out[:, :-1] = np.vstack([layer.W_V[g], layer.b_V[g]]) @ layer.W_O[head]
        return out
    q, k = np.vstack([layer.W_Q[head], layer.b_Q[head]]), np.vstack([layer.W_K[g], layer.b_K[g]])
    if layer.rotary is not None:
        q = layer.rotary.rotate(q, distance)
    return q @ k.T if kind == "Q" else k @ q.T


def signed_permutations(d: int) -> list[np.ndarray]:
    """A finite group of rotations over which second moments are those of all rotations."""
    return [
        np.diag(signs) @ np.eye(d)[list(order)]
        for order in itertools.permutations(range(d))
        for signs in itertools.product([1.0, -1.0], repeat=d)
    ]


def homogeneous(u: np.ndarray) -> np.ndarray:
    return np.block([[u, np.zeros((len(u), 1))], [np.zeros((1, len(u))), np.ones((1, 1))]])


def two_operators(d: int) -> tuple[tnlib.LowRank, tnlib.LowRank]:
    left = tnlib.LowRank(normal((5, 2)), normal((2, d + 1), seed=1))
    return left, tnlib.LowRank(normal((d + 1, 3)), normal((3, 4)))


@pytest.mark.parametrize("d", [1, 2, 3])
def test_chance_is_the_mean_square_over_a_group_of_rotations(d: int) -> None:
    left, right = two_operators(d)
    a, b = left.full(), right.full()
    squares = [np.linalg.norm(a @ homogeneous(u) @ b) ** 2 for u in signed_permutations(d)]
    want = np.sqrt(np.mean(squares)) / np.linalg.norm(a) / np.linalg.norm(b)
    assert composition_score(left, right).chance == pytest.approx(want, rel=1e-12)


@pytest.mark.parametrize("d", [2, 3, 4])
def test_centred_chance_is_the_mean_square_over_permutations(d: int) -> None:
    """Permutations leave the vector of ones, and act on what is left without an invariant subspace."""
    left, right = two_operators(d)
    a, b = left.full(), right.full()
    turns = [homogeneous(np.eye(d)[list(order)]) for order in itertools.permutations(range(d))]
    want = np.sqrt(np.mean([np.linalg.norm(a @ u @ b) ** 2 for u in turns]))
    got = composition_score(left, right, centred=True).chance
    assert got == pytest.approx(want / np.linalg.norm(a) / np.linalg.norm(b), rel=1e-12)


@pytest.mark.parametrize("centred", [False, True])
def test_without_biases_chance_is_one_over_the_root_of_the_width(centred: bool) -> None:
    a = np.vstack([normal((16, 3)) - centred * normal((16, 3)).mean(axis=0), np.zeros(3)])
    found = composition_score(tnlib.LowRank(normal((17, 3)), a.T), tnlib.LowRank(a, normal((3, 17))), centred=centred)
    assert found.chance == pytest.approx(1 / np.sqrt(16 - centred), rel=1e-12)


def test_a_bias_lowers_score_and_chance_alike() -> None:
    left = tnlib.LowRank(normal((9, 2)), np.hstack([normal((2, 8)), np.zeros((2, 1))]))
    plain = np.vstack([normal((8, 2), seed=3), np.zeros(2)])
    biased = np.vstack([plain[:-1], 10 * np.ones(2)])
    one, other = (composition_score(left, tnlib.LowRank(p, np.eye(2, 9))) for p in (plain, biased))
    assert other.chance < 0.5 * one.chance
    assert other.multiple == pytest.approx(one.multiple, rel=1e-12)


@pytest.mark.parametrize("scale", [1e-200, 1.0, 1e200])
def test_scores_know_no_scale(scale: float) -> None:
    a, b = tnlib.LowRank(normal((6, 2)), normal((2, 5))), tnlib.LowRank(normal((5, 2)), normal((2, 6)))
    want, got = composition_score(a, b), composition_score(tnlib.LowRank(scale * a.left, scale * a.right), b)
    assert (got.score, got.chance) == pytest.approx((want.score, want.chance), rel=1e-12)


def test_zero_operators_score_zero() -> None:
    found = composition_score(
        tnlib.LowRank(np.zeros((6, 2)), normal((2, 5))), tnlib.LowRank(normal((5, 2)), normal((2, 6)))
    )
    assert (found.score, found.chance, found.multiple) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize("kind", ["Q", "K", "V"])
@pytest.mark.parametrize("rotary", [None, Rotary([0.7])])
@pytest.mark.parametrize("centred", [False, True])
def test_scores_are_those_of_dense_operators(kind: Any, rotary: Rotary | None, centred: bool) -> None:
    stack = layers(rotary=rotary)
    distance = None if rotary is None else 3
    found = compositions(stack, kind, distance=distance, centred=centred)
    p = homogeneous(np.eye(7) - centred / 7)
    for i, j in itertools.product(range(3), range(3)):
        for g, h in itertools.product(range(4), range(4)):
            if i >= j:
                assert np.isnan(found.scores[i, g, j, h])
                continue
            a, b = (p @ dense(stack[k], head, what, distance) @ p for k, head, what in ((i, g, "V"), (j, h, kind)))
            want = np.linalg.norm(a @ b) / np.linalg.norm(a) / np.linalg.norm(b)
            one = composition_score(tnlib.LowRank(a, np.eye(8)), tnlib.LowRank(b, np.eye(8)), centred=centred)
            got = found[(i, g), (j, h)]
            assert (got.score, got.chance) == pytest.approx((want, one.chance), rel=1e-10)


@pytest.mark.parametrize("kind", ["Q", "K", "V"])
def test_moments_weigh_what_is_read(kind: Any) -> None:
    stack = layers(2)
    x = [np.hstack([normal((20, 7), seed=s), np.ones((20, 1))]) for s in (50, 51)]
    found = compositions(stack, kind, moments=[y.T @ y / 20 for y in x])
    for g, h in itertools.product(range(4), range(4)):
        a = x[0] @ dense(stack[0], g, "V") / np.sqrt(20)
        b = dense(stack[1], h, kind) @ (np.eye(8) if kind == "V" else x[1].T)
        want = np.linalg.norm(a @ b) / np.linalg.norm(a) / np.linalg.norm(b)
        one = composition_score(tnlib.LowRank(a, np.eye(8)), tnlib.LowRank(b, np.eye(b.shape[1])))
        got = found[(0, g), (1, h)]
        assert (got.score, got.chance) == pytest.approx((want, one.chance), rel=1e-8)


@pytest.mark.parametrize("scale", [1e-250, 1e250])
def test_the_scale_of_moments_cancels(scale: float) -> None:
    m = normal((8, 8))
    want, got = (compositions(layers(2), "Q", moments=[c * m.T @ m] * 2) for c in (1.0, scale))
    np.testing.assert_allclose(got.scores[0, :, 1], want.scores[0, :, 1], rtol=1e-8)


def test_moments_of_one_position_and_of_the_model(model: Checkpoint) -> None:
    seen = run(model, [[3, 4, 5], [6, 7, 8]])
    x = np.concatenate([seen.inputs[1].reshape(6, 64), np.ones((6, 1))], axis=1)
    assert_close(stream_moments(seen)[1], sum(np.outer(row, row) for row in x) / 6)
    found = compositions(model, "K", moments=stream_moments(run(model, [3])))  # of rank one
    assert np.isfinite(found.scores[0, :, 1]).all()


def test_weights_are_left_alone() -> None:
    stack = layers(2)
    with unchanged(*(a for w in stack for a in (w.W_Q, w.W_K, w.W_V, w.W_O))):
        compositions(stack, "K", centred=True)


def test_one_layer_has_no_pairs() -> None:
    found = compositions(layers(1), "Q")
    assert np.isnan(found.scores).all()
    assert found.largest(3) == []
    assert "0 pairs" in repr(found)


def test_induction_heads_compose_with_the_previous_token_head_by_their_keys(model: Checkpoint) -> None:
    found = compositions(model, "K")
    pairs = found.largest(4)
    assert {writer for writer, _, _ in pairs} == {(0, 3)}
    assert {reader for _, reader, _ in pairs} == {(1, h) for h in range(4)}
    assert all(score.multiple > 1.5 for *_, score in pairs)
    others = np.delete(found.multiples[0, :, 1], 3, axis=0)
    assert others.max() < min(score.multiple for *_, score in pairs)
    assert compositions(model, "V").multiples[0, :, 1].max() < 1.5


@pytest.fixture(scope="module")
def gpt2_with_norms(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """A GPT-2 whose norm weights and biases, and all other biases, are far from their initial values."""
    tf.set_seed(1)
    model = tf.GPT2LMHeadModel(tf.GPT2Config(vocab_size=20, n_positions=8, n_embd=12, n_layer=3, n_head=3))
    rng = np.random.default_rng(2)
    for name, parameter in model.named_parameters():
        if "ln_" in name or name.endswith("bias"):
            values = (
                rng.lognormal(0, 1.5, parameter.shape) if name.endswith("weight") else rng.normal(size=parameter.shape)
            )
            parameter.data.copy_(torch.from_numpy(values))
    folder = tmp_path_factory.mktemp("gpt2")
    model.save_pretrained(folder)
    return open_checkpoint(folder)


@pytest.mark.parametrize("kind", ["Q", "K", "V"])
def test_norms_of_a_checkpoint_are_folded(kind: Any, gpt2_with_norms: Checkpoint) -> None:
    found, want = compositions(gpt2_with_norms, kind), compositions(fold(gpt2_with_norms).checkpoint, kind)
    np.testing.assert_allclose(found.multiples, want.multiples, rtol=1e-5)
    folded = [fold(gpt2_with_norms).checkpoint.attention(k) for k in range(3)]
    np.testing.assert_allclose(want.scores, compositions(folded, kind, centred=True).scores)
    pairs, folded_pairs = ([pair[:2] for pair in scores.largest(27)] for scores in (found, want))
    assert pairs == folded_pairs
    as_stored = compositions([gpt2_with_norms.attention(k) for k in range(3)], kind, centred=True)
    assert [pair[:2] for pair in as_stored.largest(27)] != pairs, "the norm weights change the ranking"
    assert as_stored.notes == ()
    assert "folded: 7 norms, into the weights that read from them" in found.notes
    assert "note: folded: value biases of 3 layers, into the output biases" in repr(found)


@pytest.mark.parametrize("kind", ["Q", "K", "V"])
def test_moments_are_those_of_the_model_before_folding(kind: Any, gpt2_with_norms: Checkpoint) -> None:
    folded, tokens = fold(gpt2_with_norms).checkpoint, np.arange(16).reshape(2, 8)
    found, want = (
        compositions(model, kind, moments=stream_moments(run(model, tokens))) for model in (gpt2_with_norms, folded)
    )
    np.testing.assert_allclose(found.scores, want.scores, rtol=1e-4)


def test_overlaps_fold_norms_as_well(gpt2_with_norms: Checkpoint) -> None:
    found = circuits.subspace_overlaps(gpt2_with_norms, "O", "K")
    want = circuits.subspace_overlaps(fold(gpt2_with_norms).checkpoint, "O", "K")
    np.testing.assert_allclose(found.overlaps, want.overlaps, atol=1e-5)
    assert "note: folded: 7 norms" in repr(found)


def test_the_picture_names_every_head(model: Checkpoint) -> None:
    ax = heat_map(compositions(model, "K")).axes[0]
    assert [t.get_text() for t in ax.get_yticklabels()] == ["0.0", "0.1", "0.2", "0.3"]
    assert [t.get_text() for t in ax.get_xticklabels()] == ["1.0", "1.1", "1.2", "1.3"]
    assert_close(np.asarray(ax.images[0].get_array()), compositions(model, "K").multiples[0, :, 1])
    wide = heat_map(compositions(layers(12), "Q"))
    assert wide.axes[0].get_xticklabels()[0].get_text() == "layer 1"


def test_wrong_arguments_are_refused() -> None:
    stack = layers(2)
    with refused(ValueError, "(4, 7, 3)", "(2, 7, 3)"):
        compositions([*stack, *layers(1, heads=2)], "V")
    with refused(ValueError, "moments must be one matrix per layer, 2, got 1"):
        compositions(stack, "V", moments=[np.eye(8)])
    with refused(ValueError, "moments of layer 0", "(8, 8)", "(7, 7)"):
        compositions(stack, "V", moments=[np.eye(7), np.eye(7)])
    with refused(ValueError, "moments of layer 1 must be symmetric"):
        compositions(stack, "V", moments=[np.eye(8), np.triu(np.ones((8, 8)))])
    with refused(ValueError, "heat_map: compositions must have pairs"):
        heat_map(compositions(layers(1), "Q"))
    with refused(ValueError, "normalised", "numerator"):
        compositions(layers(2, head_norm=HeadNorm(np.ones(3), np.ones(3), 1e-6)), "K")
    with refused(ValueError, "right must have as many rows", "(4, 5)", "(6, 6)"):
        composition_score(
            tnlib.LowRank(np.ones((6, 1)), np.ones((1, 6))), tnlib.LowRank(np.ones((4, 1)), np.ones((1, 5)))
        )
    with refused(TypeError, "left must be a LowRank", "ndarray"):
        composition_score(np.eye(3), tnlib.LowRank(np.ones((3, 1)), np.ones((1, 3))))  # type: ignore[arg-type]
