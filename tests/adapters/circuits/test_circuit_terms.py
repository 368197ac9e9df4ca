"""Streams in named parts, scores and outputs by part, the ten terms, against the forward pass of every architecture."""

from __future__ import annotations

import itertools
import tracemalloc
from pathlib import Path
from typing import Any

import architecture_models
import numpy as np
import pytest
import transformers as tf
from oracles import assert_close, normal, refused
from tnlib_adapters import Attention, Checkpoint, Rotary, open_checkpoint
from tnlib_adapters.attention.norms import HeadNorm
from tnlib_adapters.attention.softmax import softmax
from tnlib_adapters.circuits import OpenLayer, StreamParts, pair_effects, split_stream, ten_terms
from tnlib_adapters.circuits.paths import attention_terms
from tnlib_adapters.reference.model import run
from tnlib_adapters.reference.weights import read_weights

from benchmarks.smollm2 import smollm2


def layer_of(**facts: Any) -> Attention:
    w = [normal(s, seed=i) for i, s in enumerate([(4, 6, 2), (2, 6, 2), (2, 6, 2), (4, 2, 6)])]
    b = [normal(s, seed=9 + i) for i, s in enumerate([(4, 2), (2, 2), (2, 2), (6,)])]
    return Attention(*w, 0.7, *b, **facts)


def parts_of(k: int = 3, n: int = 5) -> StreamParts:
    return StreamParts(tuple("abc"[:k]), normal((k, n, 6), seed=30))


LAYERS = {
    "plain": layer_of(),
    "rotary": layer_of(rotary=Rotary([0.6])),
    "ALiBi": layer_of(alibi=np.array([0.5, 0.2, 0.1, 1.0])),
    "both ways": layer_of(causal=False),
    "window and cap": layer_of(window=2, softcap=1.5),
}


def attend(layer: Attention, x: np.ndarray, *, identity: bool = False) -> np.ndarray:
    seen = layer.mask(len(x))
    pattern = np.where(seen, layer.scores(x), 0) if identity else softmax(np.where(seen, layer.scores(x), -np.inf))
    return layer.frozen(pattern).apply(x)


# ----------------------------------------------------------------------------------------------------- streams in parts

ARCHITECTURES = ["gptj", "gpt_neox", "opt_after", "llama_biases", "gemma2", "bloom", "opt_narrow"]
ARCHITECTURES += ["mixtral", "deepseek_v3", "t5_encoder"]


@pytest.mark.parametrize("name", [n for n in ARCHITECTURES if n in architecture_models.MODELS])
def test_parts_add_up_in_any_architecture(name: str, tmp_path: Path) -> None:
    tf.set_seed(0)
    architecture_models.MODELS[name]().save_pretrained(tmp_path)
    weights = read_weights(open_checkpoint(tmp_path))
    tokens = np.arange(7) + 2
    seen = run(weights, tokens)
    for layer, want in [*enumerate(seen.inputs), (None, seen.hidden)]:
        parts = split_stream(weights, tokens, layer)
        assert len(set(parts.names)) == len(parts.names)
        assert_close(parts.total, want[0], factor=1e4)
    assert {"embedding", "0.0", "1.3", "mlp 0", "mlp 1"} <= set(parts.names)


def test_norms_are_named_by_what_stands_beside_them(tmp_path: Path) -> None:
    for name, norms in (("opt_after", {"norm after 0", "norm after mlp 0"}), ("gptj", {"norm final"})):
        tf.set_seed(0)
        architecture_models.MODELS[name]().save_pretrained(tmp_path / name)
        names = split_stream(open_checkpoint(tmp_path / name), [2, 3, 4]).names
        assert norms <= set(names)


def test_a_head_is_what_it_writes(model: Checkpoint) -> None:
    seen = run(model, [5, 6, 7, 5])
    parts = split_stream(model, [5, 6, 7, 5])
    for layer, head in itertools.product(range(2), range(4)):
        patterns = np.zeros((4, 4, 4))
        patterns[head] = seen.patterns[layer][0, head]
        attention = model.attention(layer)
        alone = attention.frozen(patterns).apply(seen.inputs[layer][0]) - attention.b_O
        assert_close(parts[f"{layer}.{head}"], alone, factor=1e4)
    assert_close(parts["embedding"], seen.residuals[0][0])
    assert_close(parts["1.bias"], np.tile(model.attention(1).b_O, (4, 1)))


def test_merged_parts_add_up() -> None:
    parts = parts_of()
    two = parts.merge({"x": ["b"], "y": ["c", "a"]})
    assert_close(two["y"], parts["a"] + parts["c"])
    assert_close(two.total, parts.total)
    for groups in ({"x": ["a", "b"]}, {"x": ["a", "b", "c"], "y": ["a"]}, {"x": ["a", "b", "c", "d"]}):
        with refused(ValueError, "groups must hold each of the 3 parts once"):
            parts.merge(groups)


# --------------------------------------------------------------------------------------------------- scores and outputs


@pytest.mark.parametrize("name", LAYERS)
def test_scores_split_by_pairs_of_parts(name: str) -> None:
    layer, parts = LAYERS[name], parts_of()
    found = OpenLayer(layer, parts)
    plain = Attention(**{**vars(layer), "softcap": None})
    assert_close(found.score_terms().sum(axis=(0, 1)), plain.scores(parts.total), factor=1e3)
    assert_close(found.scores(), plain.scores(parts.total), factor=1e3)
    one = OpenLayer(layer, parts.merge({"direct": ["a"], "through": ["b", "c"]}))
    assert one.score_terms().shape == (2, 2, 4, 5, 5)
    assert_close(one.score_terms(head=3, query=-1), one.score_terms()[:, :, 3:4, 4:5], factor=10)
    some = one.pattern_terms(head=3, query=-1)
    assert_close(some.terms, one.pattern_terms().terms[:, 3:4, 4:5], factor=1e4)
    assert_close(some.baseline + some.terms.sum(axis=0), one.pattern()[3:4, 4:5], factor=1e6)
    assert_close(one.scores(["direct"], ["through"]), found.scores(["a"], ["b", "c"]), factor=1e3)


def test_terms_of_one_head_and_query_take_their_own_memory_alone(
    model: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = np.arange(96)
    layer = OpenLayer(model.attention(1), split_stream(model, tokens, layer=1))
    whole = layer.scores().nbytes  # also computes queries and keys, once
    tracemalloc.start()
    layer.pattern_terms(head=1, query=5)
    assert tracemalloc.get_traced_memory()[1] < 2.5 * whole < 36 * whole
    tracemalloc.stop()
    monkeypatch.setattr(attention_terms, "LARGEST_TERMS", 10**6)
    for name in ("score_terms", "pattern_terms"):
        with refused(ValueError, f"OpenLayer.{name}: terms must take at most", "pass head and query"):
            getattr(layer, name)()
        getattr(layer, name)(head=1, query=5)


@pytest.mark.parametrize("name", LAYERS)
def test_outputs_split_by_parts(name: str) -> None:
    layer, parts = LAYERS[name], parts_of()
    found = OpenLayer(layer, parts)
    want = attend(layer, parts.total) - layer.b_O
    assert_close(found.output().sum(axis=0), want, factor=1e3)
    assert_close(sum(found.output([p]) for p in parts.names).sum(axis=0), want, factor=1e3)


@pytest.mark.parametrize("name", LAYERS)
def test_with_softmax_replaced_all_terms_add_up(name: str) -> None:
    layer, parts = LAYERS[name], parts_of()
    found = OpenLayer(layer, parts, softmax=False)
    terms = [found.removed([q], [k], [v]) for q, k, v in itertools.product(parts.names, repeat=3)]
    plain = Attention(**{**vars(layer), "softcap": None})
    assert_close(sum(terms).sum(axis=0), attend(plain, parts.total, identity=True) - layer.b_O, factor=1e4)


def test_what_is_removed_is_the_change_of_the_pattern() -> None:
    """A key side that is missing altogether is the layer on a stream whose keys were made without it."""
    layer, parts = layer_of(), parts_of()
    found = OpenLayer(layer, parts)
    q, v = parts.total, parts.total
    k = parts["a"] + parts["c"]
    scores = np.stack([
        0.7 * (q @ layer.W_Q[h] + layer.b_Q[h]) @ (k @ layer.W_K[h // 2] + layer.b_K[h // 2]).T for h in range(4)
    ])  # fmt: skip
    pattern = softmax(np.where(layer.mask(5), scores, -np.inf))
    values = np.stack([pattern[h] @ (v @ layer.W_V[h // 2] + layer.b_V[h // 2]) @ layer.W_O[h] for h in range(4)])
    assert_close(found.removed(key=["b"]), found.output() - values, factor=1e4)
    assert_close(found.removed(query=[], key=[]), np.zeros((4, 5, 6)))


def test_effects_of_pairs_are_readings_of_what_is_removed() -> None:
    found, w = OpenLayer(layer_of(), parts_of()), normal((2, 6))
    for kind, one in (("Q", found.removed(["b"])), ("K", found.removed(key=["b"])), ("V", found.output(["b"]))):
        names, effects = pair_effects(found, kind, w, position=2)  # type: ignore[arg-type]
        assert names == ("a", "b", "c")
        assert effects.shape == (2, 3, 4)
        assert_close(effects[:, 1], w @ one[:, 2].T, factor=1e3)
        assert_close(pair_effects(found, kind, w[0], position=2)[1], effects[0])  # type: ignore[arg-type]


# -------------------------------------------------------------------------------------------------------- the ten terms


@pytest.mark.parametrize("identity", [False, True])
def test_ten_terms_and_the_rest_are_the_model(model: Checkpoint, identity: bool) -> None:
    tokens = np.tile(np.random.default_rng(0).permutation(128)[:10], 2)
    found, seen = ten_terms(model, tokens, softmax=not identity), run(model, tokens)
    assert repr(found).startswith(f"TenTerms({len(tokens)} positions x 64 features; norms: remainder ")
    x = seen.residuals[1][0]
    layer = read_weights(model).blocks[1].branches[0].layer
    assert isinstance(layer, Attention)
    want = x + attend(layer, x, identity=True) if identity else seen.residuals[2][0]
    total = found.arrays.sum(axis=0) + found.remainder
    assert np.linalg.norm(total - want) <= 1e-10 * np.linalg.norm(want)
    if identity:
        assert np.linalg.norm(found.remainder) <= 1e-10 * np.linalg.norm(want)
    else:
        assert np.linalg.norm(found.remainder) > 0.01 * np.linalg.norm(want)
    assert_close(found.by_head.sum(axis=1), found.arrays[2:], factor=1e4)
    split = slice(0, 3) if identity else slice(2, 3)  # under softmax values alone are additive
    assert_close(found.by_pair.sum(axis=1)[split], found.by_head[1:4][split], factor=1e6)


def test_a_pair_of_the_keys_is_the_change_without_it(model: Checkpoint) -> None:
    tokens = np.tile(np.random.default_rng(1).permutation(128)[:8], 2)
    found, parts = ten_terms(model, tokens), split_stream(model, tokens, layer=1)
    assert found.writers == ("0.0", "0.1", "0.2", "0.3", "0.bias")
    layer, x0, written = model.attention(1), parts["embedding"], parts["0.3"]
    assert layer.b_Q is not None
    assert layer.b_V is not None
    scores, seen = layer.scores(parts.total), np.tri(len(tokens), dtype=bool)
    for h in range(4):
        one = layer.scale * (x0 @ layer.W_Q[h] + layer.b_Q[h]) @ (written @ layer.W_K[h]).T
        patterns = [softmax(np.where(seen, s, -np.inf)) for s in (scores[h], scores[h] - one)]
        want = (patterns[0] - patterns[1]) @ (x0 @ layer.W_V[h] + layer.b_V[h]) @ layer.W_O[h]
        assert_close(found.by_pair[1, 3, h], want, factor=1e6)


def test_terms_are_those_of_parts_alone(model: Checkpoint) -> None:
    """Written out: direct or composed on the three sides of a head, with the identity for softmax."""
    tokens = np.array([5, 6, 7, 8, 5, 6])
    found, seen = ten_terms(model, tokens, softmax=False), run(model, tokens)
    layer, x0 = model.attention(1), seen.residuals[0][0]
    x1 = seen.residuals[1][0] - x0
    assert layer.b_Q is not None
    assert layer.b_K is not None
    assert layer.b_V is not None
    for name, h in itertools.product(found.names[2:], range(4)):
        q, k, v = (
            x1 @ w[h] if letter in name else x0 @ w[h] + b[h]
            for letter, w, b in zip(
                "QKV", (layer.W_Q, layer.W_K, layer.W_V), (layer.b_Q, layer.b_K, layer.b_V), strict=True
            )
        )
        want = np.tril(layer.scale * q @ k.T) @ v @ layer.W_O[h]
        assert_close(found.by_head[found.names.index(name) - 2, h], want, factor=1e6)


# --------------------------------------------------------------------------------------- two layers of a deeper model


def assert_terms_sum_to_the_stream(weights: Any, tokens: np.ndarray, layers: tuple[int, int], norm: Any = None) -> None:
    """The stream before the second layer and what the layer writes, from a forward pass."""
    seen = run(weights, tokens)
    written = seen.outputs[layers[1]][0]
    want = seen.residuals[layers[1]][0] + (written if norm is None else norm(written))
    for method in ("ablation", "path_integral"):
        found = ten_terms(weights, tokens, layers=layers, method=method)
        assert_close(found.arrays.sum(axis=0) + found.remainder, want, factor=1e4)
        assert_close(found.by_head.sum(axis=1), found.arrays[2:], factor=1e4)
    assert np.linalg.norm(found.remainder) <= 1e-9 * np.linalg.norm(want)
    assert_close(found.by_pair.sum(axis=1), found.by_head[1:4], factor=1e7)


@pytest.mark.parametrize("name", ["gpt2_lm", "gptj", "gemma2", "opt_after"])
def test_terms_of_two_layers_of_any_model_sum_to_its_stream(name: str, opened: Any) -> None:
    _, weights = opened(name)
    branch = [b for block in weights.blocks for b in block.branches if isinstance(b.layer, Attention)][1]
    assert (branch.behind is not None) == (name == "gemma2")
    assert_terms_sum_to_the_stream(weights, np.arange(7) + 2, (0, 1), branch.behind)


def test_terms_of_two_layers_with_others_between_them(llama: Checkpoint) -> None:
    """A head of layer 3 by its rotated form, on what layer 1 wrote and on the rest of the stream."""
    tokens = np.array([5, 6, 7, 8, 5, 6])
    assert_terms_sum_to_the_stream(read_weights(llama), tokens, (1, 3))
    found, seen = ten_terms(llama, tokens, layers=(1, -1), softmax=False), run(llama, tokens)
    assert found.writers == tuple(f"1.{h}" for h in range(8))
    assert np.linalg.norm(found.remainder) <= 1e-10 * np.linalg.norm(found.arrays.sum(axis=0))
    written, stream, x = seen.outputs[1][0], seen.residuals[3][0], seen.inputs[3][0]
    branch: Any = read_weights(llama).blocks[6].branches[0]
    norm, layer = branch.before, branch.layer
    x1 = written / np.sqrt((stream**2).mean(axis=1, keepdims=True) + norm.eps) * norm.weight
    sides, last = {True: x1, False: x - x1}, len(tokens) - 1
    for name, h in (("", 0), ("Q", 5), ("K", 2), ("V", 7), ("QKV", 1)):
        q, k, v = (sides[letter in name] for letter in "QKV")
        omegas = [layer.qk(h, last - j).full()[:-1, :-1] for j in range(last + 1)]
        scores = np.array([layer.scale * q[last] @ omega @ k[j] for j, omega in enumerate(omegas)])
        want = scores @ v @ layer.ov(h).full()[:-1, :-1]
        assert_close(found.by_head[found.names.index(name or "second") - 2, h, last], want, factor=1e6)
    assert_close(found["direct"] + found["first"], stream, factor=1e4)
    assert_close(found["first"], written, factor=1e4)


@pytest.mark.slow
def test_terms_of_two_layers_of_a_language_model() -> None:
    folder = smollm2()
    if folder is None:
        pytest.skip("SmolLM2 is made by python -m benchmarks.smollm2")
    assert_terms_sum_to_the_stream(read_weights(open_checkpoint(folder)), np.arange(100, 112), (20, 23))


# ------------------------------------------------------------------------------------------------------------ arguments


def test_wrong_arguments_are_refused(model: Checkpoint) -> None:
    with refused(ValueError, "layer must lie between 0 and 1"):
        split_stream(model, [1, 2], layer=2)
    with refused(ValueError, "tokens must be one sequence, got 2"):
        split_stream(model, [[1, 2], [3, 4]])
    found = OpenLayer(layer_of(), parts_of())
    with refused(ValueError, "part must be one of a, b, c, got 'z'"):
        found.scores(["z"])
    with refused(ValueError, "kind must be 'Q', 'K' or 'V'"):
        pair_effects(found, "X", normal((6,)))  # type: ignore[arg-type]
    with refused(ValueError, "parts must have 6 features, got 5"):
        OpenLayer(layer_of(), StreamParts(("a",), normal((1, 4, 5))))
    with refused(ValueError, "normalised queries and keys", "numerator"):
        OpenLayer(layer_of(head_norm=HeadNorm(np.ones(2), np.ones(2), 1e-6)), parts_of())
    for layers, kind, message in (
        ((1, 0), ValueError, "must be an earlier and a later one, got 1 and 0"),
        ((0, 2), ValueError, "layers must lie between 0 and 1, got 2"),
        (1, TypeError, "layers must be two indices, got 1"),
    ):
        with refused(kind, "ten_terms: layers must", message):
            ten_terms(model, [1, 2], layers=layers)  # type: ignore[arg-type]
