"""Frozen attention: the affine map of a layer, its algebra, its Schmidt form and trains over finer legs."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
import scipy.sparse.linalg
import tnlib_adapters
from attention_layers import grouped_layer
from oracles import assert_close, assert_fit, normal, refused, unchanged
from tnlib_adapters import Attention, FrozenAttention
from tnlib_adapters.reference.model import run

import tnlib

MODELS = ["builtin", "gpt2", "gpt2_by_layer", "bert"]
HEADS, D, DH, N = 6, 8, 3, 5


def stochastic(heads: int, n: int, m: int | None = None, seed: int = 0) -> np.ndarray:
    """Positive weights, rows summing to one."""
    a = np.exp(normal((heads, n, m or n), seed=seed))
    return a / a.sum(axis=2, keepdims=True)


# --------------------------------------------------------------------------------------------- the model's own output


@pytest.mark.parametrize("name", MODELS)
def test_outputs_of_the_forward_pass_under_its_own_patterns(name: str, saved: Any) -> None:
    folder = tnlib_adapters.builtin_path() if name == "builtin" else saved(name)[1]
    checkpoint = tnlib_adapters.open_checkpoint(folder)
    seen = run(checkpoint, np.random.default_rng(0).integers(1, 50, size=12))
    for k, (patterns, x, want) in enumerate(zip(seen.patterns, seen.inputs, seen.outputs, strict=True)):
        frozen = checkpoint.attention(k).frozen(patterns[0])
        got = frozen.apply(x[0])
        assert np.linalg.norm(got - want[0]) <= 1e-10 * np.linalg.norm(want[0])
        as_matrix = scipy.sparse.linalg.aslinearoperator(frozen.terms) @ x[0].ravel() + frozen.constant.ravel()
        assert np.linalg.norm(as_matrix - want[0].ravel()) <= 1e-10 * np.linalg.norm(want[0])


@pytest.mark.parametrize("name", ["gpt2_lm", "opt", "phi", "llama", "qwen2", "gemma", "phi3"])
def test_a_layer_behind_its_norm_is_linear_in_the_stream(name: str, saved: Any) -> None:
    """Patterns and the norm's divisors fixed, everything else of the norm folded into the weights."""
    checkpoint = tnlib_adapters.fold(tnlib_adapters.open_checkpoint(saved(name)[1])).checkpoint
    seen = run(checkpoint, np.random.default_rng(0).integers(2, 50, size=9))
    for k, (patterns, x, want) in enumerate(zip(seen.patterns, seen.residuals, seen.outputs, strict=False)):
        divisors = tnlib_adapters.norm_divisors(checkpoint, x[0])
        frozen = checkpoint.attention(k).frozen(patterns[0], divisors=divisors)
        # weights in float32 are centred to roundoff of float32
        assert np.linalg.norm(frozen.apply(x[0]) - want[0]) <= 2e-6 * np.linalg.norm(want[0])


def test_divisors_divide_the_columns_of_patterns() -> None:
    attention, patterns, x = grouped_layer(), stochastic(HEADS, N), normal((N, D), seed=4)
    divisors = np.arange(1.0, N + 1)
    got = attention.frozen(patterns, divisors=divisors)
    assert_close(got.apply(x), attention.frozen(patterns).apply(x / divisors[:, None]))
    for wrong in (np.ones(N + 1), np.zeros(N), -np.ones(N), np.ones((N, 1))):
        with refused(ValueError, "Attention.frozen: divisors must be 5 positive numbers", "norm_divisors"):
            attention.frozen(patterns, divisors=wrong)


def test_divisors_of_models_without_norms_are_refused(saved: Any) -> None:
    with refused(ValueError, "norm_divisors: checkpoint must have norms", "tnlib_attention_only"):
        tnlib_adapters.norm_divisors(tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path()), np.ones((3, 64)))
    with refused(ValueError, "norm_divisors: x must have shape (positions, 24)", "(3, 23)"):
        tnlib_adapters.norm_divisors(tnlib_adapters.open_checkpoint(saved("llama")[1]), np.ones((3, 23)))


# ---------------------------------------------------------------------------------------------------------- the form


@pytest.mark.parametrize("biases", [True, False])
@pytest.mark.parametrize("m", [N, 7])
def test_the_dense_matrix_in_the_order_of_the_conventions(biases: bool, m: int) -> None:
    attention, patterns = grouped_layer(biases=biases), stochastic(HEADS, N, m)
    with unchanged(patterns):
        terms, constant = attention.frozen(patterns)
    heads = [np.kron(patterns[h], (attention.W_V[h // 3] @ attention.W_O[h]).T) for h in range(HEADS)]
    assert_close(terms.full(), sum(heads))
    assert_close(terms.H.full(), sum(heads).T)
    assert terms.norm() == pytest.approx(np.linalg.norm(sum(heads)))
    want = np.zeros((N, D))
    if biases:
        assert attention.b_V is not None
        assert attention.b_O is not None
        want = want + attention.b_O
        for h in range(HEADS):
            want = want + np.outer(patterns[h].sum(axis=1), attention.b_V[h // 3] @ attention.W_O[h])
    assert_close(constant, want)


def test_one_value_head_is_one_array_in_several_terms() -> None:
    attention = grouped_layer()
    terms = attention.frozen(stochastic(HEADS, N)).terms
    for h, term in enumerate(terms.right):
        assert np.shares_memory(term.right, attention.W_V[h // 3])
        assert np.shares_memory(term.left, attention.W_O[h])


def test_a_long_sequence_of_a_wide_layer() -> None:
    """(n d)^2 would be 10^12 numbers and one d x d four million: what is held beside the patterns is less than that."""
    d, n, heads, dh = 2048, 512, 4, 8
    w = normal((4, heads, d, dh)).astype(np.float32)
    attention = Attention(w[0], w[1], w[2], w[3].transpose(0, 2, 1), 1.0, b_V=w[0, :, 0], b_O=w[0, 0, :, 0])
    patterns, x = stochastic(heads, n).astype(np.float32), normal((n, d)).astype(np.float32)
    tracemalloc.start()
    frozen = attention.frozen(patterns)
    y, length = frozen.apply(x), frozen.terms.norm()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert y.shape == (n, d)
    assert length > 0
    assert peak < 4 * (4 * n * d + 2 * patterns.size)  # a few arrays of the stream, and the patterns in range


# -------------------------------------------------------------------------------------------------------- the algebra


def test_composition_and_sums_are_those_of_the_maps() -> None:
    one, other = (grouped_layer(seed=s).frozen(stochastic(HEADS, N, seed=s)) for s in (0, 20))
    x = normal((N, D), seed=9)
    second = other @ one
    assert isinstance(second, FrozenAttention)
    assert_close(second.apply(x), other.apply(one.apply(x)), factor=500)
    assert second.terms.ranks == (HEADS * HEADS,)
    assert all(isinstance(term, tnlib.LowRank) and term.ranks == (DH,) for term in second.terms.right)
    assert_close((one + other).apply(x), one.apply(x) + other.apply(x))


def test_other_kinds_are_refused() -> None:
    frozen = grouped_layer().frozen(stochastic(HEADS, N))
    with pytest.raises(TypeError):
        frozen + 1
    with pytest.raises(TypeError):
        frozen @ np.ones((N, D))


# --------------------------------------------------------------------------------------- fewer terms, and finer legs


@pytest.mark.parametrize("rtol", [None, 0.05, 0.3])
def test_the_schmidt_form_of_a_trained_layer(rtol: float | None) -> None:
    checkpoint = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path())
    seen = run(checkpoint, np.random.default_rng(0).integers(0, 128, size=6))
    terms = checkpoint.attention(1).frozen(seen.patterns[1][0]).terms
    fit = tnlib.round(terms, rtol=rtol)
    assert_fit(fit, terms.full(), rtol=rtol)
    assert fit.value.ranks[0] <= 4
    paired = terms.full().reshape(6, 64, 6, 64).transpose(0, 2, 1, 3).reshape(36, -1)
    s = np.linalg.svd(paired, compute_uv=False)
    kept = [np.linalg.norm(term) for term in fit.value.right]
    np.testing.assert_allclose(kept, s[: len(kept)], atol=1e-10 * s[0])


@pytest.mark.parametrize("rtol", [None, 0.2])
def test_a_trained_layer_as_a_train_over_finer_legs(rtol: float | None) -> None:
    checkpoint = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path())
    seen = run(checkpoint, np.random.default_rng(0).integers(0, 128, size=6))
    terms = checkpoint.attention(0).frozen(seen.patterns[0][0]).terms
    legs = (2, 3, 8, 8)  # six positions, 64 features
    fit = tnlib.ttm_svd(terms, legs, legs, rtol=rtol)
    assert_fit(fit, terms.full(), rtol=rtol)
    x = seen.inputs[0][0]
    got = (fit.value @ x.ravel()).reshape(x.shape)
    allowed = (fit.error + 1e-12) * np.linalg.norm(terms.full()) * np.linalg.norm(x)
    assert np.linalg.norm(got - terms.apply(x)) <= allowed


# ---------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("patterns", "words"),
    [
        (np.ones((5, N, N)), ["(heads, n, n') with 6 heads", "(5, 5, 5)"]),
        (np.ones((N, N)), ["(heads, n, n')", "(5, 5)"]),
        (np.ones((1, HEADS, N, N)), ["(1, 6, 5, 5)", "one matrix per head"]),
        (np.full((HEADS, N, N), np.nan), ["patterns must be finite", "index (0, 0, 0)"]),
        (np.ones((HEADS, 0, 0)), ["no leg of size 0"]),
    ],
)
def test_impossible_patterns_are_refused(patterns: Any, words: list[str]) -> None:
    with refused(ValueError, "Attention.frozen: patterns", "got", *words):
        grouped_layer().frozen(patterns)


def test_more_positions_than_the_context_are_refused() -> None:
    attention = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path()).attention(0)
    with refused(ValueError, "Attention.frozen: patterns", "at most 96 positions", "(4, 97, 97)"):
        attention.frozen(np.ones((4, 97, 97)))
