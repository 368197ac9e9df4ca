"""Whole models on one sequence as affine maps of the stream: equal to transformers, and contributions that add up."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from oracles import assert_close, normal, refused
from slow_cases import mostly_slow
from tnlib_adapters import Checkpoint, FrozenAttention, FrozenModel, circuits, freeze, open_checkpoint
from tnlib_adapters.frozen.frozen_feed_forward import FrozenFeedForward
from tnlib_adapters.reference.layers import ACTIVATIONS
from tnlib_adapters.reference.model import run
from tnlib_adapters.reference.weights import read_weights

models = pytest.importorskip("transformers_models")

TWO_STREAMS = {"t5", "t5_untied"}
EVERY = sorted(set(models.MODELS) - TWO_STREAMS)
FEW = ["gpt2_lm", "gpt_neox", "llama", "gemma2", "bert", "mixtral", "deepseek_v3", "bloom"]
LOCAL_MAPS = ["secant", "jacobian"]
CASES = [(n, m) for n in EVERY for m in LOCAL_MAPS]


def hidden(model: FrozenModel, stream: np.ndarray) -> np.ndarray:
    return stream if model.final_norm is None else model.final_norm.apply(stream)


# ------------------------------------------------------------------------------------------------- the whole model


@pytest.mark.parametrize(("name", "local_map"), mostly_slow(CASES, [(n, m) for n, m in CASES if n in FEW]))
def test_the_sum_over_paths_is_the_stream_of_transformers(name: str, local_map: Any, saved: Any, recorded: Any) -> None:
    want = recorded(name)
    model = freeze(open_checkpoint(saved(name)[1]), want.tokens[0], feed_forward=local_map)
    before_attention = [b for b in model.blocks if isinstance(b.layers[0], FrozenAttention)]
    for block, residual in zip(before_attention, want.residuals, strict=True):
        assert np.linalg.norm(block.stream - residual[0]) <= 1e-5 * np.linalg.norm(residual[0])
    final = model.apply(model.embedding)
    assert_close(final, model.stream, factor=1e3)
    if want.hidden.shape[1:] == final.shape:  # narrow embeddings: transformers has left the stream here already
        assert np.linalg.norm(hidden(model, final) - want.hidden[0]) <= 1e-5 * np.linalg.norm(want.hidden[0])


@pytest.mark.parametrize("local_map", LOCAL_MAPS)
@pytest.mark.parametrize("name", FEW)
def test_single_precision(name: str, local_map: Any, saved: Any, recorded: Any) -> None:
    want = recorded(name)
    weights = read_weights(open_checkpoint(saved(name)[1]), dtype=np.float32)
    model = freeze(weights, want.tokens[0], feed_forward=local_map)
    final = hidden(model, model.apply(model.embedding))
    assert final.dtype == np.float32
    assert np.linalg.norm(final - want.hidden[0]) <= 1e-5 * np.linalg.norm(want.hidden[0])


@pytest.mark.slow
@pytest.mark.parametrize("local_map", LOCAL_MAPS)
def test_trained_models(local_map: Any, llama: Checkpoint, minilm_path: Any) -> None:
    tokens = np.random.default_rng(0).integers(5, 200, size=24)
    for checkpoint in (llama, open_checkpoint(minilm_path)):
        model = freeze(checkpoint, tokens, feed_forward=local_map)
        assert_close(model.apply(model.embedding), run(checkpoint, tokens).residuals[-1][0], factor=1e4)
        assert (max(model.remainders.values(), default=0) > 0) == (local_map == "jacobian")


@pytest.mark.parametrize("tokens", [[0, 5, 6, 2, 1, 1], [1, 0, 5, 1, 6, 2]])
def test_padding_of_roberta_takes_no_position(tokens: list[int], saved: Any) -> None:
    model, folder = saved("roberta")
    padding = model.config.pad_token_id
    ids = models.torch.tensor([[padding if token == 1 else token + 10 for token in tokens]])
    with models.torch.no_grad():
        want = model.roberta(ids).last_hidden_state[0].numpy()
    assert np.linalg.norm(freeze(open_checkpoint(folder), ids).stream - want) <= 1e-5 * np.linalg.norm(want)


def test_attention_only_models_are_their_stack(model: Checkpoint) -> None:
    tokens = [5, 6, 7, 5, 6]
    frozen, seen = freeze(model, tokens), run(model, tokens)
    stack = freeze(model, patterns=[patterns[0] for patterns in seen.patterns])
    x = normal(frozen.embedding.shape, seed=1)
    assert_close(frozen.apply(x), stack.apply(x), factor=1e3)
    found = circuits.path_contributions(stack, frozen.embedding, model.read("unembed.weight")[7])
    contributions = circuits.logit_contributions(frozen, 7)
    assert_close(contributions.through, found.through.sum(axis=0), factor=1e4)
    assert_close(contributions.direct, found.last.sum(axis=0), factor=1e4)
    assert_close(contributions.by_position, found.by_source.sum(axis=0), factor=1e4)


# ------------------------------------------------------------------------------------------------------- its layers


@pytest.mark.parametrize("name", FEW)
def test_adjoints(name: str, saved: Any, recorded: Any) -> None:
    model = freeze(open_checkpoint(saved(name)[1]), recorded(name).tokens[0], feed_forward="jacobian")
    x, y = (normal(model.embedding.shape, seed=seed) for seed in (1, 2))
    for block in model.blocks:
        for branch, layer in zip(block.branches, block.layers, strict=True):
            adjoint = branch.pull_back(y)[0]
            assert np.vdot(y, branch.linear(x)) == pytest.approx(np.vdot(adjoint, x), rel=1e-10)
            if isinstance(layer, FrozenAttention):
                assert_close(layer.terms.apply(x), branch.linear(x), factor=1e3)
                assert_close(layer.terms.H.apply(y), adjoint, factor=1e3)


@pytest.mark.parametrize("name", ["gpt2_lm", "llama"])
def test_the_jacobian_is_the_derivative_and_the_secant_leaves_no_remainder(name: str, opened: Any) -> None:
    _, weights = opened(name)
    jacobian, secant = (freeze(weights, np.arange(6), feed_forward=m) for m in ("jacobian", "secant"))
    feed_forward = weights.blocks[1].branches[0].layer
    x = weights.blocks[1].branches[0].before(jacobian.blocks[1].stream)
    step = 1e-5 * normal(x.shape, seed=3)
    (layer,), (without,) = jacobian.blocks[1].layers, secant.blocks[1].layers
    change = (feed_forward(x + step) - feed_forward(x - step)) / 2
    assert np.linalg.norm(layer.parts[0].linear(step) - change) <= 1e-6 * np.linalg.norm(change)
    assert layer.remainder is not None
    assert without.remainder is None
    for one in (layer, without):
        assert_close(one.apply(jacobian.blocks[1].stream), feed_forward(x), factor=1e3)


@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_slopes_of_activations(name: str) -> None:
    f, x = ACTIVATIONS[name], np.concatenate([np.linspace(-9.03, 9, 61), [1e-9, -1e-9, 300.0, -300.0]])
    step = 1e-6
    assert_close(f.derivative(x[:61]), (f(x[:61] + step) - f(x[:61] - step)) / (2 * step), factor=1e7)
    for dtype in (np.float32, np.float64):
        u = np.append(x, 0).astype(dtype)
        before, slopes = u.copy(), f.secant(u)
        assert slopes.dtype == f(u).dtype == dtype
        assert np.array_equal(u, before)
        assert np.isfinite(slopes).all()
    assert f.secant(np.zeros(1))[0] == pytest.approx(f(np.full(1, step))[0] / step, abs=1e-5)  # from the right


# ---------------------------------------------------------------------------------------------------- contributions


@pytest.mark.parametrize("local_map", LOCAL_MAPS)
@pytest.mark.parametrize("name", ["gpt2_lm", "gpt_neox", "llama", "gemma3", "mixtral", "bloom"])
def test_contributions_add_up_to_the_logit_of_transformers(
    name: str, local_map: Any, saved: Any, recorded: Any
) -> None:
    checkpoint, want = open_checkpoint(saved(name)[1]), recorded(name)
    found = circuits.logit_contributions(freeze(checkpoint, want.tokens[0], feed_forward=local_map), 7, position=5)
    logits = want.logits[0, 5]
    assert abs(found.total - logits[7]) <= 1e-5 * np.linalg.norm(logits)
    assert found.by_position.sum() + found.by_source.sum() == pytest.approx(found.total, rel=1e-9)
    assert found.direct.sum() + found.direct_sources.sum() == pytest.approx(found.total, rel=1e-9)
    assert any(source.endswith("remainder") for source in found.sources) == (local_map == "jacobian")
    assert np.all(found.by_position[6:] == 0)  # causal


@pytest.mark.parametrize("name", ["gpt_neox", "gemma2", "bert_masked", "deepseek_v3"])
def test_what_a_part_writes_reaches_the_end_on_all_paths(name: str, saved: Any, recorded: Any) -> None:
    """Against the linear parts of all later blocks, applied to what one part writes."""
    model = freeze(open_checkpoint(saved(name)[1]), recorded(name).tokens[0], feed_forward="jacobian")
    vector = normal((model.embedding.shape[1],), seed=4)
    found = circuits.logit_contributions(model, direction=vector, position=4)

    def at_the_end(block: int, written: np.ndarray, paths: bool) -> float:
        after = model.blocks[block].after
        x = written if after is None else after.linear(written)
        for later in model.blocks[block + 1 :]:
            x = later.linear(x) if paths else x if later.after is None else later.after.linear(x)
        return float((x if model.final_norm is None else model.final_norm.linear(x))[4] @ vector)

    for k, block in enumerate(model.blocks):
        for layer, name_of in zip(block.layers, block.names, strict=True):
            if isinstance(layer, FrozenFeedForward):
                writers = {name_of: layer.linear(block.stream)}
            else:
                a, b = layer.terms.left, layer.terms.right
                writers = {f"{name_of}.{h}": a[h] @ block.stream @ np.asarray(b[h]).T for h in range(len(a))}
            for part, written in writers.items():
                at = found.names.index(part)
                assert found.through[at] == pytest.approx(at_the_end(k, written, paths=True), rel=1e-8)
                assert found.direct[at] == pytest.approx(at_the_end(k, written, paths=False), rel=1e-8)


@pytest.mark.parametrize("local_map", LOCAL_MAPS)
@pytest.mark.parametrize("name", ["gpt2_lm", "gpt_neox", "gemma2", "bert_masked", "mixtral"])
def test_contributions_at_one_position_need_no_other_output_of_the_last_layers(
    name: str, local_map: Any, saved: Any, recorded: Any
) -> None:
    model = freeze(open_checkpoint(saved(name)[1]), recorded(name).tokens[0], feed_forward=local_map)
    vector = normal((model.embedding.shape[1],), seed=4)
    first = circuits.logit_contributions(model, direction=vector, position=4)
    values = first.direct, first.direct_sources, first.total
    if not model.blocks[-1].has_attention:
        assert "branches" not in vars(model.blocks[-1])
    assert len(model.stream) == len(model.embedding)  # computes all outputs
    second = circuits.logit_contributions(model, direction=vector, position=4)
    for one, other in zip(values, (second.direct, second.direct_sources, second.total), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-12)


def test_an_argmax_of_torch_is_a_token(llama: Checkpoint) -> None:
    frozen, logits = freeze(llama, [5, 6, 7]), run(llama, [5, 6, 7]).logits[0, -1]
    token: Any = models.torch.from_numpy(logits).argmax()
    assert circuits.logit_contributions(frozen, token).total == pytest.approx(float(logits.max()))
    with refused(TypeError, "logit_contributions: token must be an integer"):
        circuits.logit_contributions(frozen, token > 0)


@pytest.mark.parametrize("name", ["llama", "gptj"])
def test_a_pair_of_tokens_is_the_difference_of_their_logits(name: str, saved: Any) -> None:
    weights = read_weights(open_checkpoint(saved(name)[1]))
    bias = normal(weights.unembed.affine.weight.shape[1:])
    unembed = replace(weights.unembed, affine=replace(weights.unembed.affine, bias=bias))
    frozen, logits = (f(replace(weights, unembed=unembed), [5, 6, 7]) for f in (freeze, run))
    first, second, both = (circuits.logit_contributions(frozen, token) for token in (9, 4, (9, 4)))
    assert both.total == pytest.approx(logits.logits[0, -1, 9] - logits.logits[0, -1, 4])
    for part in ("direct", "through", "direct_sources"):
        assert_close(getattr(both, part), getattr(first, part) - getattr(second, part))
    with refused(TypeError, "logit_contributions: token must be an integer"):
        circuits.logit_contributions(frozen, (9, 4, 3))  # type: ignore[arg-type]


def test_tables(llama: Checkpoint) -> None:
    frozen = freeze(llama, np.arange(9), feed_forward="jacobian")
    assert repr(frozen).startswith("FrozenModel(4 layers of 8, 8, 8, 8 heads, 4 feed-forward layers, on 9 positions")
    assert "remainder of a feed-forward layer at most" in repr(frozen)
    table = repr(circuits.logit_contributions(frozen, 9))
    assert "through" in table
    assert "remainders" in table
    assert "experts" in repr(FrozenFeedForward((None, None), None, None, np.zeros((2, 3)), None))  # type: ignore[arg-type]


# ---------------------------------------------------------------------------------------------------------- bad input


def test_bad_arguments_are_refused(llama: Checkpoint, saved: Any) -> None:
    frozen = freeze(llama, [5, 6, 7])
    with refused(TypeError, "freeze: tokens or patterns must be given, got neither"):
        freeze(llama)  # type: ignore[call-overload]
    with refused(TypeError, "freeze: tokens or patterns must be given, got both"):
        freeze(llama, [5, 6], patterns=[])  # type: ignore[call-overload]
    with refused(ValueError, "freeze: feed_forward must be 'secant' or 'jacobian', got 'tangent'"):
        freeze(llama, [5, 6], feed_forward="tangent")  # type: ignore[call-overload]
    with refused(ValueError, "freeze: tokens must be one sequence, got 2"):
        freeze(llama, [[5, 6], [6, 7]])
    with refused(ValueError, "freeze: tokens must lie between 0"):
        freeze(llama, [5, 10**6])
    with refused(TypeError, "logit_contributions: model must be a FrozenModel"):
        circuits.logit_contributions(llama, 5)  # type: ignore[arg-type]
    with refused(TypeError, "logit_contributions: token or direction must be given, got neither"):
        circuits.logit_contributions(frozen)
    with refused(ValueError, "logit_contributions: token must lie between 0"):
        circuits.logit_contributions(frozen, 10**6)
    with refused(ValueError, "logit_contributions: directions must be real, got complex128"):
        circuits.logit_contributions(frozen, direction=1j * np.ones(128))
    with refused(ValueError, "logit_contributions: direction must have one axis"):
        circuits.logit_contributions(frozen, direction=np.eye(128))
    with refused(ValueError, "logit_contributions: model must have an unembedding"):
        circuits.logit_contributions(freeze(open_checkpoint(saved("bert")[1]), [5, 6]), 5)
