"""Whether all starts of the spectral radius reduction reach one maximum on trained heads: on some they do."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tnlib_adapters import builtin_path, open_checkpoint
from tnlib_adapters.circuits import spectral_reduction


def stack(layer: int, kind: str) -> np.ndarray:
    """(head, d_model, d_model), weights without biases."""
    attention = open_checkpoint(builtin_path()).attention(layer)
    pair = (attention.W_Q, attention.W_K.transpose(0, 2, 1)) if kind == "QK" else (attention.W_V, attention.W_O)
    return (pair[0] @ pair[1]).astype(float)


@pytest.mark.parametrize("d", [1, 2])
def test_complex_matrices_for_the_scores_of_layer_zero_agree(d: int) -> None:
    found = spectral_reduction(stack(0, "QK"), d, variables="abb", n_starts=10)
    assert found.reached_best() >= 9
    assert (
        min(found.similarity(found.best, k) for k in range(10) if found.fitness[k] > 0.999999 * found.fitness.max())
        > 0.95
    )


@pytest.mark.parametrize("d", [1, 2])
def test_for_the_copying_heads_of_layer_one_they_do_not(d: int) -> None:
    found = spectral_reduction(stack(1, "OV"), d, variables="abb", n_starts=20)
    assert found.reached_best() < 20
    other = int(found.fitness.argmin())
    assert found.fitness[other] < 0.99 * found.fitness.max()
    assert found.similarity(found.best, other) < 0.9


@pytest.mark.slow
def test_nor_for_twelve_heads_of_a_trained_encoder(minilm_path: Path) -> None:
    attention = open_checkpoint(minilm_path).attention(0)
    found = spectral_reduction(attention.W_V @ attention.W_O, 1, variables="abb", n_starts=12)
    assert found.reached_best() < 12
    assert found.fitness.min() < 0.999 * found.fitness.max()


def test_real_matrices_disagree_more() -> None:
    for layer, kind in ((0, "QK"), (0, "OV"), (1, "OV")):
        found = spectral_reduction(stack(layer, kind), 2, variables="abb", field="real", n_starts=20)
        assert found.fitness.min() < 0.9 * found.fitness.max()
