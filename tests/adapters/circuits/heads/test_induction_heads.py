"""The induction circuit of the built-in models: heads, composition, copying, effects."""

from __future__ import annotations

import dataclasses
import heapq
import inspect
import math
import textwrap
from typing import Any

import numpy as np
import pytest
from oracles import assert_close, refused
from slow_cases import mostly_slow
from tnlib_adapters import Checkpoint, builtin_path, open_checkpoint
from tnlib_adapters.attention.softmax import log_softmax
from tnlib_adapters.circuits import (
    OpenLayer,
    composition_score,
    find_induction,
    pattern_scores,
    split_stream,
)
from tnlib_adapters.circuits.heads.induction_heads import Induction
from tnlib_adapters.data.repeats import repeated_segments
from tnlib_adapters.reference.model import loss, run
from tnlib_adapters.reference.weights import read_weights


@pytest.fixture(scope="module")
def found(model: Checkpoint) -> Induction:
    return find_induction(model, rng=5)


def test_layer_one_is_induction_heads_that_copy(found: Induction) -> None:
    assert found.previous_head == (0, 3)
    assert found.induction_heads == ((1, 0), (1, 1), (1, 2), (1, 3))
    assert found.copying[1].min() > 0.95
    assert found.copying[0].max() < 0


def test_keys_read_the_previous_token_head_above_chance(model: Checkpoint, found: Induction) -> None:
    assert np.isnan(found.composition[0]).all()
    assert found.composition[1].min() > 1.8
    layers = [model.attention(layer) for layer in range(2)]
    for h in range(4):
        score = composition_score(layers[0].ov(3), layers[1].qk(h).T)
        assert_close(found.composition[1, h], score.multiple, factor=1e10)


def test_without_the_previous_token_head_in_the_keys_induction_is_lost(found: Induction) -> None:
    """Of the gap to chance at least 80 % goes with head 0.3, under 10 % with any other."""
    assert found.lost[0, 3] >= 0.8
    assert np.abs(found.lost[0, :3]).max() < 0.1
    assert np.isnan(found.lost[1]).all()
    assert found.chance == math.log(128)
    assert found.loss < 0.15 * found.chance


def test_losses_are_those_of_another_forward_pass(model: Checkpoint) -> None:
    """The same check by OpenLayer: scores of layer 1 without what one head put into the keys."""
    found = find_induction(model, n=2, rng=3)
    tokens, repeated = repeated_segments(2, rng=np.random.default_rng(3))
    assert_close(found.loss, loss(model, tokens, repeated), factor=1e4)
    weights, seen = read_weights(model), run(model, tokens)
    for head in range(4):
        losses = []
        for k, sequence in enumerate(tokens):
            layer = OpenLayer(weights.blocks[1].branches[0].layer, split_stream(weights, sequence, layer=1))
            at = np.flatnonzero(repeated[k]) - 1
            without = layer.removed(key=[f"0.{head}"]).sum(axis=0)[at]
            log_p = log_softmax(weights.unembed(seen.residuals[2][k, at] - without))
            losses.extend(-log_p[np.arange(len(at)), sequence[at + 1]])
        share = (np.mean(losses) - found.loss) / (found.chance - found.loss)
        assert abs(share - found.lost[0, head]) < 1e-9


def test_patterns_are_those_of_the_texts_that_losses_are_of(model: Checkpoint) -> None:
    found = find_induction(model, n=3, rng=1)
    tokens, _ = repeated_segments(3, rng=np.random.default_rng(1))
    patterns = run(model, tokens).patterns
    back = [patterns[0][b, :, i, i - 1] for b in range(3) for i in range(1, 96)]
    assert_close(found.previous_token[0], np.mean(back, axis=0), factor=1e4)
    assert_close(found.induction, pattern_scores(patterns, tokens).induction)


def test_it_reads_as_a_table(found: Induction) -> None:
    lines = repr(found).splitlines()
    assert lines[0].startswith("Previous-token head 0.3; loss on repeats 0.")
    assert len(lines) == 2 + 8
    assert lines[5].split()[0] == "0.3"
    assert "%" in lines[5]


def test_previous_token_heads_are_among_the_printed_rows(found: Induction) -> None:
    """In deep models they have small effects: they do not attend to induction targets themselves."""
    shape = (6, 9)
    lost, effect = np.full(shape, np.nan), np.ones(shape)
    lost[3, [0, 7]], effect[3] = (1.5, 0.2), 0
    others = ("previous_token", "induction", "composition", "copying", "standard_error")
    deep = dataclasses.replace(found, lost=lost, effect=effect, **dict.fromkeys(others, effect))
    lines = repr(deep).splitlines()
    assert len(lines) == 2 + 16 + 2
    assert {"3.0", "3.7"} < {line.split()[0] for line in lines}
    assert lines[-1].startswith("lost above 100%")
    assert len(repr(found).splitlines()) == 2 + 8


def test_single_precision(llama: Checkpoint) -> None:
    double, single = (find_induction(llama, n=2, length=8, dtype=dtype) for dtype in (np.float64, np.float32))
    assert double.effect.dtype == np.float64
    for name in ("effect", "standard_error", "previous_token", "induction"):
        np.testing.assert_allclose(getattr(single, name), getattr(double, name), atol=1e-5)
    assert np.abs(single.effect - double.effect).max() > 0


def test_intervals_are_those_of_student(found: Induction) -> None:
    """With two sequences the interval of a mean is wide: an effect of twenty standard errors is undecided."""
    effect, error = np.array([[0.0, 0.0], [1.0, 0.1]]), np.array([[0.0, 0.0], [0.05, 0.0]])
    few, many = (
        dataclasses.replace(found, effect=effect, standard_error=error, n_sequences=count) for count in (2, 30)
    )
    assert (few.causal_heads, few.undecided_heads) == ((), ((1, 0),))
    assert (many.causal_heads, many.undecided_heads) == (((1, 0),), ())


@pytest.mark.parametrize("seed", mostly_slow(range(4), [0]))
def test_causal_heads_of_the_built_in_model(model: Checkpoint, seed: int) -> None:
    found = find_induction(model, n=24, rng=seed)
    assert {(1, 1), (1, 2)} <= set(found.causal_heads) <= set(found.induction_heads)
    assert set(found.causal_heads) | set(found.undecided_heads) <= {(0, 3), *found.induction_heads}


@pytest.mark.slow
def test_induction_heads_of_the_built_in_llama(llama: Checkpoint) -> None:
    """On the first lines of a file of Python, twice."""
    found = find_induction(llama, n=16, length=20, text=python_tokens(), rng=0)
    assert {(3, 4), (3, 5), (3, 7)} <= set(found.causal_heads) | set(found.undecided_heads)
    assert set(found.causal_heads) <= {(3, h) for h in range(4, 8)}
    assert found.previous_head == (2, 5)
    assert len(repr(found).splitlines()) == 2 + 16 + 1


def python_tokens() -> np.ndarray:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_file(str(builtin_path("llama") / "tokenizer.json"))
    return np.array(tokenizer.encode("".join(inspect.getsource(module) for module in (textwrap, heapq))).ids)


@pytest.mark.parametrize("name", ["gpt2_lm", "gpt_neox", "gemma2", "qwen3", "opt_after", "deepseek_v3"])
def test_every_architecture(name: str, opened: Any) -> None:
    found = find_induction(opened(name)[0], n=3, length=6)
    assert np.isfinite(found.effect).all()
    assert np.isfinite(found.standard_error).all()
    assert np.isnan(found.composition).all() == (name in ("qwen3", "deepseek_v3"))


def test_models_that_are_refused(opened: Any) -> None:
    model = open_checkpoint(builtin_path())
    with refused(ValueError, "find_induction: model must have an unembedding, got a llama"):
        find_induction(opened("llama_base")[0])
    with refused(ValueError, "find_induction: n must be"):
        find_induction(model, n=1)
    with refused(ValueError, "find_induction: length must be at most 48, half the context of the model, got 49"):
        find_induction(model, length=49)
    with refused(ValueError, "find_induction: text must be one text of at least 24 tokens, got shape (1, 3)"):
        find_induction(model, text=[1, 2, 3])
    with refused(ValueError, "find_induction: text must lie between 0 and 127"):
        find_induction(model, text=np.full(50, 500))


def test_segments_are_counted_and_drawn() -> None:
    rng = np.random.default_rng(0)
    for wrong in ({"n": "a"}, {"n": 2.5}, {"context": None}, {"vocab": [1]}, {"rng": 0}, {"distinct": "yes"}):
        with refused(TypeError, f"repeated_segments: {next(iter(wrong))} must be"):
            repeated_segments(**({"n": 1, "rng": rng} | wrong))  # type: ignore[arg-type]
    for wrong in ({"n": -1}, {"context": 47}, {"vocab": 0}, {"vocab": 95, "distinct": True}):
        with refused(ValueError, f"repeated_segments: {next(iter(wrong))} must be at least"):
            repeated_segments(**({"n": 1, "rng": rng} | wrong))  # type: ignore[arg-type]
