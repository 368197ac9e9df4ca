"""Attention weights as sums over terms of the scores: exact sums, bounded quadrature, axioms of path integrals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import assert_close, normal, refused
from tnlib_adapters import Checkpoint
from tnlib_adapters.attention.softmax import softmax
from tnlib_adapters.circuits import OpenLayer, softmax_attributions, split_stream, ten_terms
from tnlib_adapters.reference.model import run

MASK = np.tri(7, dtype=bool)
CAPS = [None, 50.0, 2.0, 0.3]


def pattern(scores: np.ndarray, cap: float | None) -> np.ndarray:
    capped = scores if cap is None else cap * np.tanh(scores / cap)
    return softmax(np.where(MASK, capped, -np.inf))


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**31), n_terms=st.integers(1, 5), size=st.floats(-2, 1.5), cap=st.sampled_from(CAPS))
def test_terms_sum_to_the_pattern(seed: int, n_terms: int, size: float, cap: float | None) -> None:
    terms = 10**size * np.random.default_rng(seed).standard_normal((n_terms, 2, 7, 7))
    found = softmax_attributions(terms, MASK, softcap=cap)
    want = pattern(terms.sum(axis=0), cap)
    assert np.abs(found.baseline + found.terms.sum(axis=0) - want).max() < 1e-9 * max(1, 10**size)
    assert np.all(np.abs(found.remainder).sum(axis=-1) <= found.bound.sum(axis=0) + 1e-11)
    assert np.abs(found.terms.sum(axis=-1)).max() < 1e-10 * max(1, 10**size)
    assert np.all(found.terms[..., ~MASK] == 0)
    assert_close(found.baseline, np.broadcast_to(MASK / MASK.sum(axis=1, keepdims=True), want.shape))


@pytest.mark.parametrize("cap", CAPS)
@pytest.mark.parametrize("size", [0.1, 3.0, 30.0])
@pytest.mark.parametrize("rtol", [1e-1, 1e-3, 1e-6])
def test_the_error_of_every_term_is_within_its_bound(cap: float | None, size: float, rtol: float) -> None:
    terms = size * normal((3, 7, 7), seed=1)
    found, fine = (softmax_attributions(terms, MASK, softcap=cap, rtol=r) for r in (rtol, 1e-13))
    errors = np.abs(found.terms - fine.terms).sum(axis=-1)
    assert np.all(errors <= found.bound + 1e-10)
    sizes = np.abs(np.where(MASK, terms, 0)).max(axis=-1) * 2
    assert np.all(found.bound <= rtol * sizes + 1e-300)
    assert fine.n_nodes > found.n_nodes


def test_the_integral_is_that_of_another_quadrature() -> None:
    terms = normal((2, 7, 7), seed=2)
    total, steps = terms.sum(axis=0), (np.arange(4000) + 0.5) / 4000
    want = np.zeros_like(terms)
    for a in steps:
        p = pattern(a * total, None)
        want += p * (terms - (p * terms).sum(axis=-1, keepdims=True)) / len(steps)
    assert np.abs(softmax_attributions(terms, MASK).terms - want).max() < 1e-6


def test_the_quadrature_has_two_nodes_at_least() -> None:
    """The bound is that of Gauss quadrature of at least two nodes."""
    assert softmax_attributions(0.1 * normal((2, 7, 7), seed=4), MASK, rtol=0.9).n_nodes == 2


def test_axioms() -> None:
    """Linear in the split, blind to constants of a row, zero for terms that do not matter."""
    terms = normal((3, 7, 7), seed=3)
    found = softmax_attributions(terms, MASK).terms
    merged = softmax_attributions(np.stack([terms[0], terms[1] + terms[2]]), MASK).terms
    assert_close(merged, np.stack([found[0], found[1] + found[2]]), factor=1e5)
    shifted = softmax_attributions(np.concatenate([terms, np.ones((1, 7, 7))]), MASK).terms
    assert_close(shifted, np.concatenate([found, np.zeros((1, 7, 7))]), factor=1e5)


@pytest.mark.parametrize("seed", range(3))
def test_the_ten_terms_sum_to_the_output(model: Checkpoint, seed: int) -> None:
    tokens = np.tile(np.random.default_rng(seed).permutation(128)[:12], 2)
    found, ablated = (ten_terms(model, tokens, method=method) for method in ("path_integral", "ablation"))
    final = run(model, tokens).residuals[-1][0]
    assert_close(found.arrays.sum(axis=0), final, factor=1e7)
    assert np.linalg.norm(found.remainder) <= 1e-9 * np.linalg.norm(final) < np.linalg.norm(ablated.remainder)
    assert_close(found.by_pair.sum(axis=1), found.by_head[1:4], factor=1e7)  # writers add up under softmax
    for same in ("direct", "first"):
        assert_close(found[same], ablated[same])


@pytest.mark.parametrize("name", ["gpt2_lm", "gpt_neox", "llama", "gemma2", "bloom"])
def test_any_split_of_any_architecture(name: str, opened: Any) -> None:
    checkpoint, weights = opened(name)
    tokens = np.random.default_rng(0).integers(2, 50, 7)
    attention = next(b.layer for block in weights.blocks[1:] for b in block.branches if hasattr(b.layer, "W_Q"))
    layer = OpenLayer(attention, split_stream(weights, tokens, layer=1))
    found, n_parts = layer.pattern_terms(), len(layer.parts.names)
    assert len(found.terms) == n_parts**2
    want = run(checkpoint, tokens).patterns[1][0]
    assert_close(found.baseline + found.terms.sum(axis=0), want, factor=1e8)


def test_refusals(model: Checkpoint) -> None:
    with refused(ValueError, "softmax_attributions: score_terms must be real, (terms, ..., n, n')"):
        softmax_attributions(np.ones((3, 3)))
    with refused(ValueError, "softmax_attributions: visible must be bool of shape (3, 3)"):
        softmax_attributions(np.ones((2, 3, 3)), np.zeros((3, 3), bool))
    with refused(TypeError, "softmax_attributions: rtol must be a real number, got '1e-3'"):
        softmax_attributions(np.ones((2, 3, 3)), rtol="1e-3")  # type: ignore[arg-type]
    for rtol in (0, 1, -1.0, float("nan")):
        with refused(ValueError, "softmax_attributions: rtol must lie between 0 and 1"):
            softmax_attributions(np.ones((2, 3, 3)), rtol=rtol)
    with refused(ValueError, "ten_terms: method must be 'ablation' or 'path_integral', got 'shapley'"):
        ten_terms(model, [5, 6], method="shapley")  # type: ignore[arg-type]
    layer = OpenLayer(model.attention(1), split_stream(model, [5, 6], layer=1), softmax=False)
    with refused(ValueError, "OpenLayer.pattern_terms: softmax must be True"):
        layer.pattern_terms()
