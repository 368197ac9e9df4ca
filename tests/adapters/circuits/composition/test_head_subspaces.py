"""Principal angles and overlaps of the subspaces of heads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles import assert_close, isometry, norm, normal, refused
from tnlib_adapters import Attention, Checkpoint, fold, open_checkpoint
from tnlib_adapters.circuits import (
    bigrams,
    head_subspace,
    operator_similarities,
    principal_angles,
    read_vocabulary,
    subspace_overlaps,
)
from transformers_models import random_model


def layers(n_layers: int = 2, *, d: int = 12, dh: int = 3) -> list[Attention]:
    shapes = [(4, d, dh), (2, d, dh), (2, d, dh), (4, dh, d)]
    return [Attention(*(normal(s, seed=10 * k + i) for i, s in enumerate(shapes)), 0.5) for k in range(n_layers)]


@given(st.integers(2, 9), st.integers(1, 6), st.integers(1, 6), st.integers(0, 50))
def test_overlap_is_the_mean_squared_cosine(d: int, p: int, q: int, seed: int) -> None:
    one, other = normal((d, p), seed=seed), normal((d, q), seed=seed + 1)
    found = principal_angles(one, other)
    (u, v) = (np.linalg.svd(x, full_matrices=False)[0] for x in (one, other))
    cosines = np.linalg.svd(u.T @ v, compute_uv=False)
    assert_close(np.cos(found.angles), cosines)
    assert abs(found.overlap - np.square(cosines).mean()) < 1e-12
    assert (np.diff(found.angles) >= -1e-12).all()


@pytest.mark.parametrize("largest", [0.3, 1.5])
def test_small_angles_beside_large_ones_keep_their_digits(largest: float) -> None:
    angles = np.array([1e-9, 1e-4, largest])
    one = np.eye(6)[:, :3]
    other = np.vstack([np.diag(np.cos(angles)), np.diag(np.sin(angles))])
    rotation = np.linalg.qr(normal((6, 6), seed=0))[0]
    for pair in ((one, other), (rotation @ other, rotation @ one), (one, other[:, :2]), (other[:, :2], one)):
        np.testing.assert_allclose(principal_angles(*pair).angles[:2], angles[:2], rtol=1e-6, atol=2e-16)


@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("operator", ["QK", "OV"])
def test_similarities_are_cosines_of_the_whole_operators(operator: Any, centred: bool) -> None:
    some = layers(3)
    found = operator_similarities(some, operator, centred=centred)
    c = np.eye(12) - centred / 12
    whole = [(layer.qk(h) if operator == "QK" else layer.ov(h)).full()[:-1, :-1] for layer in some for h in range(4)]
    flat = np.stack([(c @ a @ c).ravel() for a in whole])
    flat /= np.linalg.norm(flat, axis=1, keepdims=True)
    assert_close(found.cosines.reshape(12, 12), flat @ flat.T)
    assert found.deviation == 1 / (12 - centred)
    pairs = found.largest(66)
    assert len({frozenset((a, b)) for a, b, _ in pairs}) == 66
    in_group = [a[0] == b[0] and a[1] // 2 == b[1] // 2 for a, b, _ in pairs]
    assert sum(in_group) == 6 == sum(in_group[-6:])  # pairs with common keys and values come last
    sizes = [abs(cosine) for _, _, cosine in pairs[:-6]]
    assert sizes == sorted(sizes, reverse=True)


def test_random_rotations_give_the_deviation_of_similarities() -> None:
    rng, a, b = np.random.default_rng(0), normal((6, 6), seed=1), normal((6, 6), seed=2)
    turns = np.linalg.qr(rng.standard_normal((20000, 2, 6, 6)))[0] * rng.choice([-1, 1], (20000, 2, 1, 6))
    drawn = np.einsum("ij,nij->n", a, turns[:, 0] @ b @ turns[:, 1]) / (norm(a) * norm(b))
    assert abs(drawn.mean()) < 5 * drawn.std() / np.sqrt(len(drawn))
    assert drawn.std() == pytest.approx(1 / 6, rel=0.05)


def test_zero_operators_and_distances(opened: Any) -> None:
    weights = layers(1)[0]
    silent = Attention(weights.W_Q, weights.W_K, weights.W_V, 0 * weights.W_O, 0.5)
    assert not operator_similarities([weights, silent], "OV").cosines[1].any()
    with refused(ValueError, "operator must be 'QK' or 'OV', got 'O'"):
        operator_similarities([weights], "O")  # type: ignore[arg-type]
    with refused(ValueError, "distance"):
        operator_similarities(opened("llama")[0], "QK")


def test_small_angles_keep_their_digits() -> None:
    tilted = np.eye(6)[:, :2].copy()
    tilted[3, 1] = 1e-9
    assert principal_angles(np.eye(6)[:, :2], tilted).angles[1] == pytest.approx(1e-9, rel=1e-6)


@pytest.mark.parametrize(("n", "p", "q"), [(2, 1, 1), (5, 1, 1), (6, 2, 3), (6, 4, 5), (9, 3, 3)])
def test_chance_is_what_random_rotations_give(n: int, p: int, q: int) -> None:
    rng = np.random.default_rng(0)
    q_factors = np.linalg.qr(rng.standard_normal((20000, n, p)))[0]  # uniform subspaces, whatever the signs
    drawn = np.square(q_factors[:, :q]).sum(axis=(1, 2)) / min(p, q)  # with the first q axes
    found = principal_angles(np.eye(n)[:, :p], np.eye(n)[:, :q])
    assert abs(found.chance - drawn.mean()) < 5 * drawn.std() / np.sqrt(len(drawn))
    assert found.deviation == pytest.approx(drawn.std(), rel=0.05)


def test_what_leaves_no_choice_has_no_deviation() -> None:
    found = principal_angles(isometry(4, 4), isometry(4, 2))
    assert found.overlap == pytest.approx(1)
    assert (found.chance, found.deviation, found.sigmas) == (1, 0, 0)


def test_dependent_columns_span_less() -> None:
    one = np.outer(normal((7,)), normal((3,)))
    found = principal_angles(one, normal((7, 2), seed=1))
    assert len(found.angles) == 1
    assert found.chance == pytest.approx(2 / 7)
    assert len(principal_angles(np.zeros((7, 2)), one).angles) == 0


@pytest.mark.parametrize("sides", [("O", "K"), ("Q", "Q"), ("V", "O")])
@pytest.mark.parametrize("centred", [False, True])
def test_overlaps_are_those_of_each_pair(sides: Any, centred: bool) -> None:
    stack = layers()
    found = subspace_overlaps(stack, *sides, centred=centred)
    project = np.eye(12) - centred / 12
    ones = np.linalg.svd(np.ones((12, 1)))[0][:, 1:] if centred else np.eye(12)  # of what is left
    for at in [(0, 1, 1, 2), (1, 3, 0, 0), (0, 2, 0, 3), (1, 1, 1, 1)]:
        bases = [project @ head_subspace(stack[at[2 * k]], at[2 * k + 1], sides[k]) for k in (0, 1)]
        want = principal_angles(*(ones.T @ basis for basis in bases))
        got = (found.overlaps[at], found.chance[at], found.deviation[at])
        assert got == pytest.approx((want.overlap, want.chance, want.deviation), rel=1e-10)
        assert found.sigmas[at] == pytest.approx(want.sigmas, rel=1e-8)


def test_heads_that_share_keys_share_their_subspace() -> None:
    found = subspace_overlaps(layers(), "K", "K")
    assert_close(found.overlaps[0, 0, 0, 1], 1.0)
    assert found.overlaps[0, 0, 0, 2] < 0.99
    shared = {((layer, head), (layer, head + 1)) for layer in range(2) for head in (0, 2)}
    assert {(first, second) for first, second, _ in found.largest(4)} == shared


def test_subspaces_do_not_know_how_a_head_is_split() -> None:
    (layer, _), turn = layers(), normal((3, 3), seed=9)
    other = Attention(
        layer.W_Q @ turn, layer.W_K @ np.linalg.inv(turn).T, layer.W_V, np.linalg.inv(turn) @ layer.W_O, 0.5
    )
    for side in ("Q", "K", "O"):
        one, two = (head_subspace(a, 2, side) for a in (layer, other))  # type: ignore[arg-type]
        assert norm(one @ one.T - two @ two.T) < 1e-10


def test_keys_of_induction_heads_lie_where_the_previous_token_head_writes(model: Checkpoint) -> None:
    found = subspace_overlaps(model, "O", "K")
    assert {pair[0] for pair in found.largest(4)} == {(0, 3)}
    assert {pair[1] for pair in found.largest(4)} == {(1, head) for head in range(4)}
    assert found.sigmas[0, 3, 1].min() > 20
    assert np.abs(found.sigmas[0, :3, 1]).max() < 5
    assert subspace_overlaps(model, "O", "V").sigmas[0, 3, 1].max() < 0  # values look elsewhere
    assert "0.3" in repr(found)


def test_a_folded_gpt2_is_centred(tmp_path: Path) -> None:
    random_model("gpt2_lm").save_pretrained(tmp_path)
    folded = fold(open_checkpoint(tmp_path)).checkpoint
    found = subspace_overlaps(folded, "O", "V")
    assert_close(found.chance, np.full_like(found.chance, 6 / 23))


def test_wrong_arguments_are_refused(model: Checkpoint, tmp_path: Path) -> None:
    with refused(ValueError, "head_subspace: head must lie between 0 and 3"):
        head_subspace(model.attention(0), 4, "O")
    with refused(ValueError, "principal_angles", "(3, 1)", "(4, 1)"):
        principal_angles(np.ones((3, 1)), np.ones((4, 1)))
    words = read_vocabulary(model)
    with refused(ValueError, "bigrams: tokens must lie between 0 and 127, got 128"):
        bigrams(model, [5, 128], vocabulary=words)
    with refused(ValueError, "bigrams: tokens must be integers", "float64"):
        bigrams(model, [0.5], vocabulary=words)
    with refused(ValueError, "bigrams: k must be at most 128", "got 129"):
        bigrams(model, k=129, vocabulary=words)
    random_model("bert").save_pretrained(tmp_path)
    with refused(ValueError, "bigrams: model must have an unembedding", "bert"):
        bigrams(open_checkpoint(tmp_path))
