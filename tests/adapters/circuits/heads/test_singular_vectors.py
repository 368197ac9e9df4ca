"""Singular vectors and maxima of bilinear forms, and the singular directions of scores on a text."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles import assert_close, isometry, norm, normal, refused
from tnlib_adapters import Checkpoint
from tnlib_adapters.circuits import (
    form_maximum,
    minmax_values,
    singular_vectors,
    text_directions,
)
from tnlib_adapters.reference.model import run

import tnlib


def test_features_are_the_decomposition(model: Checkpoint) -> None:
    operator = model.attention(1).qk(2)
    found = singular_vectors(operator)
    assert_close((found.left * found.values) @ found.right, operator.full(), np.float32)
    assert len(found) == len(found.values) == 16
    assert found.spans == ()
    assert 1 <= found.effective_rank <= 16


def test_equal_values_are_one_span() -> None:
    s = [5.0, 3.0, 3.0, 3.0, 1.0]
    left, right = isometry(9, 5), isometry(8, 5, seed=1)
    turn = np.eye(5)
    turn[1:4, 1:4] = isometry(3, 3, seed=2)
    operators = [tnlib.LowRank(left @ t * s, t.T @ right.T) for t in (np.eye(5), turn)]
    for operator in operators:
        found = singular_vectors(operator)
        assert [g.stop - g.start for g in found.groups] == [1, 3, 1]
        assert found.spans == (slice(1, 4),)
        projector = left[:, 1:4] @ left[:, 1:4].T
        assert norm(found.left[:, 1:4] @ found.left[:, 1:4].T - projector) < 1e-12
    near = tnlib.LowRank(left * [5.0, 3.01, 3.0, 2.99, 1.0], right.T)
    assert singular_vectors(near).spans == ()
    assert singular_vectors(near, rtol=0.01).spans == (slice(1, 4),)


@pytest.mark.parametrize("scale", [1e-150, 1.0, 1e150])
def test_what_is_roundoff_is_no_feature(scale: float) -> None:
    left = normal((20, 5)) @ normal((5, 8), seed=1)
    found = singular_vectors(tnlib.LowRank(scale * left, normal((8, 20), seed=2)))
    assert len(found) == 5
    assert found.left.shape == (20, 5)
    assert found.right.shape == (5, 20)


def test_a_zero_head_has_no_features() -> None:
    found = singular_vectors(tnlib.LowRank(np.zeros((5, 2)), np.zeros((2, 5))))
    assert len(found) == len(found.values) == found.effective_rank == 0
    assert form_maximum(tnlib.LowRank(np.zeros((5, 2)), np.zeros((2, 5)))).value == 0


@given(st.integers(1, 7), st.integers(1, 4), st.integers(0, 50), st.sampled_from([1e-150, 1.0, 1e150]))
def test_the_maximum_is_the_largest_singular_value(d: int, r: int, seed: int, scale: float) -> None:
    form = tnlib.LowRank(scale * normal((d, r), seed=seed), normal((r, d), seed=seed + 1))
    dense, found = form.full(), form_maximum(form)
    top = np.linalg.norm(dense / scale, 2) * scale
    slack = 1e-12 * top
    assert abs(found.value - top) <= slack
    assert abs(found.left @ dense @ found.right - found.value) <= slack
    values = np.linalg.eigvalsh((dense + dense.T) / 2)
    assert abs(found.symmetric - values[-1]) <= slack
    assert abs(found.lowest - values[0]) <= slack
    assert abs(found.direction @ dense @ found.direction - found.symmetric) <= slack
    assert max(found.symmetric, -found.lowest) <= found.value + slack
    for vector in (found.left, found.right, found.direction):
        assert abs(norm(vector) - 1) < 1e-12
    for seed in range(5):
        x, y = (v / norm(v) for v in normal((2, d), seed=seed))
        assert x @ dense @ y <= found.value + slack
        assert found.lowest - slack <= x @ dense @ x <= found.symmetric + slack


def test_a_pair_can_score_where_no_vector_scores_with_itself() -> None:
    turn = tnlib.LowRank(np.eye(2), np.array([[0.0, 1.0], [-1.0, 0.0]]))
    found = form_maximum(turn)
    assert found.value == pytest.approx(1)
    assert abs(found.symmetric) < 1e-15


@given(st.integers(1, 4), st.integers(1, 6), st.integers(2, 9), st.integers(0, 99), st.booleans())
def test_features_are_the_svd_of_the_scores(rank: int, d: int, n: int, seed: int, constant: bool) -> None:
    size = d + constant
    form = tnlib.LowRank(normal((size, rank), seed=seed), normal((rank, size), seed=seed + 1))
    x = normal((n, d), seed=seed + 2)
    tilde = np.column_stack([x, np.ones(n)]) if constant else x
    centred = tilde - tilde.mean(axis=0)  # softmax does not see the mean over keys
    scores = tilde @ form.full() @ centred.T
    found = text_directions(form, x)
    r = len(found.values)
    assert r <= min(rank, n, size)
    assert_close(found.scores(max(1, r)), scores, factor=1e4)
    assert_close(found.queries.T @ found.queries, np.eye(r), factor=1e3)
    assert_close(found.keys.T @ found.keys, np.eye(r), factor=1e3)
    for inputs, directions, activations in (
        (tilde, found.query_directions, found.queries),
        (centred, found.key_directions, found.keys),
    ):
        assert directions.shape == (size, r)
        scale = np.linalg.norm(tilde) * np.linalg.norm(directions) + 1
        assert np.linalg.norm(inputs @ directions - activations) <= 1e-9 * scale


def test_no_other_features_are_nearer_to_the_scores_of_the_text(model: Checkpoint) -> None:
    tokens = np.tile(np.random.default_rng(0).permutation(128)[:20], 2)
    x = run(model, tokens).inputs[1][0]
    tilde = np.column_stack([x, np.ones(len(x))])
    for head in range(4):
        form = model.attention(1).qk(head)
        scores = tilde @ form.full() @ (tilde - tilde.mean(axis=0)).T
        found, of_weights = text_directions(form, x), singular_vectors(form)
        left, right = tilde @ of_weights.left, (tilde - tilde.mean(axis=0)) @ of_weights.right.T
        for k in (1, 3, 8):
            by_weights = (left[:, :k] * of_weights.values[:k]) @ right[:, :k].T
            by_text = np.linalg.norm(scores - found.scores(k))
            assert by_text <= np.linalg.norm(scores - by_weights) * (1 + 1e-6)
        assert found.shares.sum() == pytest.approx(1, abs=1e-6)
    queries, keys = found.top(0, 3)
    assert len(queries) == len(keys) == 3


@given(st.integers(1, 3), st.integers(1, 7), st.integers(0, 99))
def test_minmax_values_are_eigenvalues_of_the_symmetric_part(rank: int, d: int, seed: int) -> None:
    form = tnlib.LowRank(normal((d, rank), seed=seed), normal((rank, d), seed=seed + 1))
    full = form.full()
    want = np.linalg.eigvalsh((full + full.T) / 2)[::-1]
    found = minmax_values(form)
    np.testing.assert_allclose(found, want, atol=1e-12 * np.linalg.norm(full))


@pytest.mark.parametrize("k", [1, 2, 5])
def test_no_subspace_guarantees_more(k: int) -> None:
    form = tnlib.LowRank(normal((12, 4), seed=1), normal((4, 12), seed=2))
    full, found = form.full(), minmax_values(form)

    def least(basis: np.ndarray) -> float:
        return float(np.linalg.eigvalsh(basis.T @ (full + full.T) @ basis / 2)[0])

    assert max(least(isometry(12, k, np.float64, seed)) for seed in range(200)) <= found[k - 1] + 1e-10


def test_wrong_input_is_refused(model: Checkpoint) -> None:
    form = model.attention(0).qk(0)
    with refused(ValueError, "text_directions: inputs must have shape (n, 64)"):
        text_directions(form, np.ones((3, 60)))
    with refused(TypeError, "text_directions: form must be a LowRank"):
        text_directions(np.eye(3), np.ones((3, 3)))  # type: ignore[arg-type]
    with refused(TypeError, "minmax_values: form must be a LowRank"):
        minmax_values(np.eye(3))  # type: ignore[arg-type]
    with refused(ValueError, "minmax_values: form must be real, got complex128"):
        minmax_values(tnlib.LowRank(1j * np.eye(2), np.eye(2)))
    with refused(ValueError, "form_maximum: form must be real, got complex128"):
        form_maximum(tnlib.LowRank(1j * np.eye(2), np.eye(2)))
    real = tnlib.LowRank(np.eye(2), np.eye(2))
    with refused(ValueError, "text_directions: form must be real, got complex128"):
        text_directions(tnlib.LowRank(1j * np.eye(2), np.eye(2)), np.eye(2))
    with refused(ValueError, "text_directions: inputs must be real, got complex128"):
        text_directions(real, 1j * np.eye(2))
    with refused(ValueError, "text_directions: form must be square, got shape (2, 3)"):
        text_directions(tnlib.LowRank(np.eye(2), np.ones((2, 3))), np.eye(2))
    with refused(ValueError, "text_directions: inputs must have at least two positions, got 1"):
        text_directions(real, np.ones((1, 2)))
    found = text_directions(real, np.eye(2))
    with refused(ValueError, "TextDirections.top: k must lie between 0 and 0, got 2"):
        found.top(2)
    with refused(ValueError, "TextDirections.top: count must be at least 1"):
        found.top(0, 0)


def test_of_a_text_without_scores_nothing_is_left() -> None:
    found = text_directions(tnlib.LowRank(np.zeros((4, 2)), np.ones((2, 4))), np.ones((3, 4)))
    assert found.values.shape == found.shares.shape == (0,)
    assert found.query_directions.shape == found.key_directions.shape == (4, 0)
    assert np.array_equal(found.scores(1), np.zeros((3, 3)))
