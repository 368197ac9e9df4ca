"""Singular directions of scores on a text, and min-max values of a form."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles import assert_close, isometry, normal, refused
from tnlib_adapters import Checkpoint
from tnlib_adapters.circuits import form_maximum, minmax_values, singular_vectors, text_directions
from tnlib_adapters.reference.model import run

import tnlib


@given(st.integers(1, 4), st.integers(1, 6), st.integers(1, 9), st.integers(0, 99), st.booleans())
def test_features_are_the_svd_of_the_scores(rank: int, d: int, n: int, seed: int, constant: bool) -> None:
    size = d + constant
    form = tnlib.LowRank(normal((size, rank), seed=seed), normal((rank, size), seed=seed + 1))
    x = normal((n, d), seed=seed + 2)
    tilde = np.column_stack([x, np.ones(n)]) if constant else x
    scores = tilde @ form.full() @ tilde.T
    found = text_directions(form, x)
    r = len(found.values)
    assert r <= min(rank, n, size)
    assert_close(found.scores(max(1, r)), scores, factor=1e4)
    assert_close(found.queries.T @ found.queries, np.eye(r), factor=1e3)
    assert_close(found.keys.T @ found.keys, np.eye(r), factor=1e3)
    for directions, activations in ((found.query_directions, found.queries), (found.key_directions, found.keys)):
        assert directions.shape == (size, r)
        scale = np.linalg.norm(tilde) * np.linalg.norm(directions) + 1
        assert np.linalg.norm(tilde @ directions - activations) <= 1e-9 * scale


def test_no_other_features_are_nearer_to_the_scores_of_the_text(model: Checkpoint) -> None:
    tokens = np.tile(np.random.default_rng(0).permutation(128)[:20], 2)
    x = run(model, tokens).inputs[1][0]
    tilde = np.column_stack([x, np.ones(len(x))])
    for head in range(4):
        form = model.attention(1).qk(head)
        scores = tilde @ form.full() @ tilde.T
        found, of_weights = text_directions(form, x), singular_vectors(form)
        left, right = tilde @ of_weights.left, tilde @ of_weights.right.T
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
    assert len(found.values) + found.n_zero == d
    np.testing.assert_allclose([found.value(k) for k in range(1, d + 1)], want, atol=1e-12 * np.linalg.norm(full))


@pytest.mark.parametrize("k", [1, 2, 5])
def test_no_subspace_guarantees_more(k: int) -> None:
    form = tnlib.LowRank(normal((12, 4), seed=1), normal((4, 12), seed=2))
    full, found = form.full(), minmax_values(form)

    def least(basis: np.ndarray) -> float:
        return float(np.linalg.eigvalsh(basis.T @ (full + full.T) @ basis / 2)[0])

    if k <= 4:  # as many values as are positive in general
        assert least(found.directions[:, :k]) == pytest.approx(found.value(k), abs=1e-10)
    assert max(least(isometry(12, k, np.float64, seed)) for seed in range(200)) <= found.value(k) + 1e-10


def test_wrong_input_is_refused(model: Checkpoint) -> None:
    form = model.attention(0).qk(0)
    with refused(ValueError, "text_directions: inputs must have shape (n, 64)"):
        text_directions(form, np.ones((3, 60)))
    with refused(TypeError, "text_directions: form must be a LowRank"):
        text_directions(np.eye(3), np.ones((3, 3)))  # type: ignore[arg-type]
    with refused(TypeError, "minmax_values: form must be a LowRank"):
        minmax_values(np.eye(3))  # type: ignore[arg-type]
    with refused(ValueError, "MinMaxValues.value: k must be at most 65"):
        minmax_values(form).value(66)
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
    found = text_directions(real, np.eye(2))
    with refused(ValueError, "TextDirections.top: k must lie between 0 and 1, got 2"):
        found.top(2)
    with refused(ValueError, "TextDirections.top: count must be at least 1"):
        found.top(0, 0)


def test_reprs_name_the_leading_values(model: Checkpoint) -> None:
    assert repr(minmax_values(model.attention(0).qk(0))).endswith("; 33 further ones are 0)")
    assert (
        repr(minmax_values(tnlib.LowRank(np.eye(3)[:, :1], np.eye(3)[:1])))
        == "MinMaxValues(1, 0; 1 further ones are 0)"
    )


def test_of_a_text_without_scores_nothing_is_left() -> None:
    found = text_directions(tnlib.LowRank(np.zeros((4, 2)), np.ones((2, 4))), np.ones((3, 4)))
    assert found.values.shape == found.shares.shape == (0,)
    assert found.query_directions.shape == found.key_directions.shape == (4, 0)
    assert np.array_equal(found.scores(1), np.zeros((3, 3)))
