"""Attention scores by writer of the query and of the key, against the scores of transformers."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from oracles import refused
from slow_cases import mostly_slow
from tnlib_adapters import Checkpoint, builtin_path, circuits, freeze, open_checkpoint
from tnlib_adapters.circuits import PairAttribution, QKAttributions, qk_attributions, save_score_graph
from tnlib_adapters.reference.model import run
from tnlib_adapters.reference.weights import read_weights

models = pytest.importorskip("transformers_models")

EVERY = sorted(set(models.MODELS) - {"t5", "t5_untied"})
# rotary halves and pairs, grouped heads, biases, norms of heads, latent vectors, ALiBi, post-norms, a soft cap
FEW = ["gpt2_lm", "gptj", "llama_biases", "qwen3", "deepseek_v3", "bloom", "bert", "gemma2"]
CAPPED = ("gemma2",)
# whose scores differ by a constant for every query: ALiBi of another origin
SHIFTED = ("bloom", "bloom_six_heads", "falcon_alibi")


@pytest.fixture(scope="module")
def induction() -> tuple[QKAttributions, np.ndarray]:
    """The built-in model on a repeated segment."""
    tokens = np.tile(np.random.default_rng(0).permutation(128)[:20], 2)
    return qk_attributions(open_checkpoint(builtin_path()), tokens), tokens


@pytest.mark.parametrize("name", mostly_slow(EVERY, FEW))
def test_every_score_is_the_sum_of_its_pairs(name: str, saved: Any, recorded: Any) -> None:
    want = recorded(name)
    found = qk_attributions(freeze(open_checkpoint(saved(name)[1]), want.tokens[0]))
    assert len(found.layers) == len(want.scores)
    for layer, scores in enumerate(want.scores):
        for head in range(scores.shape[1]):
            keys = (3, 5)
            got = [found.score(layer, head, 7, key) for key in keys]
            theirs = scores[0, head, 7, list(keys)]
            if theirs.min() < -1e4:  # masked by a window
                continue
            ours = np.array([score.total for score in got])
            if name in CAPPED:
                cap = [h.layer.softcap for block in found.model.blocks for h in block.heads if h][layer]
                ours = cap * np.tanh(ours / cap)
            if name in SHIFTED:
                ours, theirs = ours - ours[0], theirs - theirs[0]
            np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5 * np.abs(scores[scores > -1e4]).max())
            for score in got:
                components, values = score.components()
                np.testing.assert_allclose(components.sum(axis=0), score.pairs, rtol=1e-9, atol=1e-9)
                assert len(score.names) == len(score.pairs)
                assert np.all(np.diff(values) <= 0)


@pytest.mark.parametrize("name", FEW)
def test_heads_are_sums_over_the_text(name: str, opened: Any) -> None:
    checkpoint, weights = opened(name)
    model = freeze(weights, np.arange(8) + 2)
    found = qk_attributions(model)
    attentions = [heads for block in model.blocks for heads in block.heads if heads is not None]
    for layer, heads in enumerate(attentions):
        scores = dataclasses.replace(heads.layer, softcap=None).scores(heads.input)
        visible = heads.layer.mask(8)
        weight = (heads.patterns - visible / visible.sum(axis=1, keepdims=True)) / 8
        totals = np.where(visible, weight * scores, 0).sum(axis=(1, 2))
        for head, total in enumerate(totals):
            assert found.head(layer, head).total == pytest.approx(total, rel=1e-9, abs=1e-12)
    single = qk_attributions(checkpoint, np.arange(8) + 2).head(0, 0)
    np.testing.assert_allclose(single.pairs, found.head(0, 0).pairs, atol=1e-5)


def test_writers_are_those_of_the_split_stream() -> None:
    tokens, llama = [5, 6, 7, 5, 6], open_checkpoint(builtin_path("llama"))
    found, parts = qk_attributions(freeze(llama, tokens)), circuits.split_stream(llama, tokens, layer=1)
    layer = circuits.OpenLayer(llama.attention(1), parts)
    score, terms = found.score(1, 2, 4, 1), layer.score_terms()
    for a, b in (("0.3", "0.1"), ("mlp 0", "0.3")):
        want = terms[parts.names.index(a), parts.names.index(b), 2, 4, 1]
        values = score.pairs[score.names.index(a), score.names.index(b)]
        assert values == pytest.approx(want, rel=1e-6, abs=1e-8)


def test_induction_heads_match_tokens_with_the_previous_token_head(induction: Any) -> None:
    found, tokens = induction
    for head in range(3):
        assert found.head(1, head).top(1)[0][:2] == ("tokens", "0.3")
        assert found.score(1, head, query=30, key=11).top(1)[0][:2] == ("tokens", "0.3")
    assert found.head(0, 3).top(1)[0][:2] == ("positions", "positions")
    assert {row[0] for row in found.top(3)} <= {"1.0", "1.1", "1.2", "1.3", "0.3"}
    seen = run(open_checkpoint(builtin_path()), tokens)
    assert found.score(1, 2, 30, 11).weight == pytest.approx(seen.patterns[1][0, 2, 30, 11], rel=1e-3)


def test_single_precision_weights(model: Checkpoint) -> None:
    tokens, single = [5, 6, 7, 5, 6], read_weights(model, dtype=np.float32)
    got, want = run(single, tokens), run(model, tokens)
    assert got.hidden.dtype == got.patterns[0].dtype == np.float32
    assert freeze(single, tokens).stream.dtype == np.float32
    assert np.linalg.norm(got.hidden - want.hidden) <= 1e-6 * np.linalg.norm(want.hidden)


# ------------------------------------------------------------------------------------------------ tables and pictures


def test_tables(induction: Any) -> None:
    found, _ = induction
    assert repr(found).startswith("QKAttributions of 8 heads on 40 tokens")
    assert "all others" in repr(found.score(1, 2, 30, 11))
    assert "score of head 1.2, query 30, key 11" in repr(found.score(1, 2, 30, 11))


def test_pictures_name_the_largest_writers_and_sum_the_others(induction: Any) -> None:
    found, _ = induction
    figure = circuits.heat_map(found.head(1, 2))
    names = [text.get_text() for text in figure.axes[0].get_xticklabels()]
    assert {"0.3", "tokens"} <= set(names)
    pairs = np.random.default_rng(0).standard_normal((30, 30))
    many = PairAttribution("many", tuple(map(str, range(30))), pairs, 0.0)
    image = circuits.heat_map(many).axes[0].get_images()[0].get_array()
    assert image.shape == (15, 15)
    assert image.sum() == pytest.approx(pairs.sum())


# ------------------------------------------------------------------------------------------------ circuit-tracer's JSON


def test_graphs_hold_scores_as_sums_of_links(induction: Any, tmp_path: Path) -> None:
    found, tokens = induction
    scores = [found.score(1, 2, 30, 11), found.score(1, 0, 25, 6)]
    names = [str(token) for token in tokens]
    save_score_graph(tmp_path / "graphs", scores[0], names, slug="first")
    for _ in range(2):
        file = save_score_graph(tmp_path / "graphs", scores, names, slug="both", count=5)
    index = json.loads((tmp_path / "graphs" / "graph-metadata.json").read_text())
    assert [graph["slug"] for graph in index["graphs"]] == ["first", "both"]
    graph = json.loads(file.read_text())
    nodes = {node["node_id"]: node for node in graph["nodes"]}
    assert len(nodes) == len(graph["nodes"]) == len({node["feature"] for node in graph["nodes"]})
    assert graph["metadata"]["prompt_tokens"] == names
    ends = [node for node in graph["nodes"] if node["feature_type"] == "logit"]
    assert [node["is_target_logit"] for node in ends] == [True, False]
    for node, score in zip(ends, scores, strict=True):
        links = [link for link in graph["links"] if link["target"] == node["node_id"]]
        assert len(links) == 6
        assert sum(link["weight"] for link in links) == pytest.approx(score.total)
        assert float(node["clerp"].split("(p=")[1].split(")")[0]) == pytest.approx(score.weight, abs=1e-3)
    assert all(link["source"] in nodes and link["target"] in nodes for link in graph["links"])
    assert {"E_30", "0.3_11"} <= nodes.keys()
    assert all(0 <= node["ctx_idx"] < len(names) for node in graph["nodes"])


# ---------------------------------------------------------------------------------------------------------- bad input


def test_bad_arguments_are_refused(induction: Any, model: Checkpoint, tmp_path: Path) -> None:
    found, _ = induction
    score = found.score(1, 2, 30, 11)
    with refused(TypeError, "qk_attributions: tokens must be given with a model"):
        qk_attributions(model)
    with refused(TypeError, "qk_attributions: tokens must be None with a frozen model", "leave them out"):
        qk_attributions(found.model, [5, 6])
    with refused(ValueError, "qk_attributions: tokens must be integers", "input_ids"):
        qk_attributions(model, [])
    with refused(TypeError, "qk_attributions: tokens must be an array of numbers"):
        qk_attributions(model, [[5, 6], [7]])
    with refused(TypeError, "qk_attributions: model must be a Checkpoint or a transformers model, got FrozenStack"):
        qk_attributions(freeze(model, patterns=[np.eye(3)[None].repeat(4, axis=0)] * 2))  # type: ignore[arg-type]
    with refused(ValueError, "QKAttributions.score: query must lie between 0 and 39"):
        found.score(1, 2, 40, 11)
    with refused(ValueError, "QKAttributions.head: layer must lie between"):
        found.head(2, 0)
    with refused(TypeError, "save_score_graph: scores must be ScoreAttributions"):
        save_score_graph(tmp_path, [], ["a"])
    with refused(ValueError, "save_score_graph: tokens must name all positions, got 3 names and position 30"):
        save_score_graph(tmp_path, score, ["a"] * 3)
    with refused(TypeError, "save_score_graph: tokens must be a list of names"):
        save_score_graph(tmp_path, score, [1] * 40)  # type: ignore[list-item]
    for slug in ("", "a/b", "..", "graph-metadata"):
        with refused(ValueError, "save_score_graph: slug must be a file name"):
            save_score_graph(tmp_path, score, ["a"] * 40, slug=slug)
    (tmp_path / "graph-metadata.json").write_text("{")
    with refused(ValueError, "save_score_graph", "graph-metadata.json must be JSON"):
        save_score_graph(tmp_path, score, ["a"] * 40)
    assert [path.name for path in tmp_path.iterdir()] == ["graph-metadata.json"]
    with refused(ValueError, "save_score_graph: folder must be a folder, got the file"):
        save_score_graph(tmp_path / "graph-metadata.json", score, ["a"] * 40)
    with refused(TypeError, "heat_map: compositions must be Compositions or a PairAttribution"):
        circuits.heat_map(3)  # type: ignore[arg-type]
