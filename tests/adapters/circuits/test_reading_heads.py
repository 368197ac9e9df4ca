"""One head read: against dense circuits of small models of many architectures, and on trained ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attention_layers import branches, homogeneous
from hypothesis import given
from hypothesis import strategies as st
from oracles import assert_close, isometry, norm, normal, refused
from slow_cases import mostly_slow
from tnlib_adapters import Checkpoint, builtin_path, compress, fold, open_checkpoint
from tnlib_adapters.circuits import (
    bigrams,
    copying,
    copying_scores,
    form_maximum,
    read_head,
    read_vocabulary,
    singular_vectors,
)
from tnlib_adapters.circuits.effective_head import stream_head
from tnlib_adapters.files.tokenizer import token_names
from tnlib_adapters.reference.weights import Weights, read_weights
from transformers_models import random_model

import tnlib

NAMES = ["gpt2_lm", "gpt2_untied", "bert", "opt", "opt_narrow", "llama", "llama_biases", "qwen3", "gemma2", "bloom"]

Opened = tuple[Checkpoint, Weights]


def token_rows(weights: Weights) -> np.ndarray:
    """What the stream holds of each token alone."""
    embedding = weights.embedding
    rows = embedding.tokens + (0 if embedding.segment is None else embedding.segment)
    return rows if embedding.norm is None else embedding.norm(rows)


def without_weights(x: np.ndarray, norm_in_front: Any) -> np.ndarray:
    """The division of a norm alone."""
    if norm_in_front is None:
        return x
    x = x - x.mean(axis=1, keepdims=True) if norm_in_front.centred else x
    return x / np.sqrt(np.square(x).mean(axis=1, keepdims=True) + norm_in_front.eps)


def dense_circuit(weights: Weights, layer: int, head: int, tokens: Any = slice(None)) -> np.ndarray:
    """The map from tokens to logits, rows centred: one number for every pair of tokens."""
    branch = branches(weights)[layer]
    x = token_rows(weights)[tokens]
    x = x if branch.before is None else branch.before(x)
    attention = branch.layer
    written = (homogeneous(x) @ attention.ov(head).full())[:, :-1]
    written = written if branch.behind is None else written * branch.behind.weight
    final = weights.final_norm
    if final is not None:
        written = (written - written.mean(axis=1, keepdims=True) if final.centred else written) * final.weight
    logits = written @ weights.unembed.affine.weight
    return logits - logits.mean(axis=1, keepdims=True)


# ---------------------------------------------------------------------------------------------------- heads and norms


@pytest.mark.parametrize("name", NAMES)
def test_a_head_with_its_norm_scores_and_writes_as_before(name: str, opened: Callable[[str], Opened]) -> None:
    checkpoint, weights = opened(name)
    x = normal((5, checkpoint.sizes.d_model), seed=3) + 0.3
    for layer, branch in enumerate(branches(weights)):
        read = x if branch.before is None else branch.before(x)
        for head in (0, 3):
            found = stream_head("stream_head", checkpoint, layer, head)
            bare = without_weights(x, branch.before)
            assert_close(found.attention.scores(bare)[0], branch.layer.numerator().scores(read)[head])
            want = (homogeneous(read) @ branch.layer.ov(head).full())[:, :-1]
            want = want if branch.behind is None else want * branch.behind.weight
            assert_close((homogeneous(bare) @ found.attention.ov(0).full())[:, :-1], want, factor=256)


@pytest.mark.parametrize("name", NAMES)
def test_directions_meet_tokens_as_in_the_model(name: str, opened: Callable[[str], Opened]) -> None:
    checkpoint, weights = opened(name)
    words, found = read_vocabulary(checkpoint), stream_head("stream_head", checkpoint, 1, 2)
    columns = normal((checkpoint.sizes.d_model + 1, 3), seed=1)
    bare = without_weights(token_rows(weights), found.norm)
    assert_close(words.read(columns, found.norm), homogeneous(bare) @ columns)
    assert len(words) == len(bare)


# ---------------------------------------------------------------------------------------------------------- features


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


def test_spans_name_tokens_that_no_basis_decides(opened: Callable[[str], Opened]) -> None:
    """A head whose values are all equal has one span; its tokens are the longest projections."""
    from tnlib_adapters.circuits.heads.head_reading import read_tokens

    checkpoint, weights = opened("llama")
    words = read_vocabulary(checkpoint)
    d = checkpoint.sizes.d_model
    basis, other = isometry(d + 1, 4), isometry(d + 1, 4, seed=1)
    form = tnlib.LowRank(basis, other.T)
    (feature,) = read_tokens(singular_vectors(form), words, None, writes=False, count=3, tokens=4)
    assert feature.number == slice(0, 4)
    lengths = np.linalg.norm(homogeneous(token_rows(weights)) @ basis, axis=1)
    want = np.argsort(-lengths)[:4]
    assert [token for token, _ in feature.left.positive] == list(want)
    assert_close([size for _, size in feature.left.positive], lengths[want])
    assert feature.left.negative == ()


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


# ------------------------------------------------------------------------------------------------------- the maximum


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


# ----------------------------------------------------------------------------------------------------------- copying


@pytest.mark.parametrize("name", [n for n in NAMES if n != "bert"])
def test_copying_is_that_of_the_dense_circuit(name: str, opened: Callable[[str], Opened]) -> None:
    checkpoint, weights = opened(name)
    for layer, head in ((0, 1), (1, 3)):
        dense, found = dense_circuit(weights, layer, head), copying(checkpoint, layer, head)
        values = np.linalg.eigvals(dense)
        assert abs(found.eigenvalues.sum() - np.trace(dense)) < 1e-8 * np.abs(values).sum()
        assert found.score == pytest.approx(values.real.sum() / np.abs(values).sum(), abs=1e-6)
        largest = np.sort(np.abs(values))[::-1][: len(found.eigenvalues)]
        np.testing.assert_allclose(np.abs(found.eigenvalues), largest, atol=1e-6 * largest[0])
        assert (found.ranks == (dense >= np.diag(dense)[:, None]).sum(axis=1) - 1).all()
        assert found.accuracy(len(dense)) == 1
        assert copying_scores(checkpoint)[layer, head] == pytest.approx(found.score, abs=1e-6)


def test_a_vector_added_to_the_unembedding_changes_nothing(tmp_path: Path) -> None:
    from dataclasses import replace

    from tnlib_adapters.circuits.tokens.copying_and_bigrams import circuit_copying

    random_model("gpt2_untied").double().save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    words, head = read_vocabulary(checkpoint), stream_head("stream_head", checkpoint, 1, 0)
    moved = replace(words, unembed=words.unembed + 5 * normal((words.unembed.shape[1],)))
    one, other = (circuit_copying(head, w, np.arange(len(w))) for w in (words, moved))
    np.testing.assert_allclose(other.eigenvalues, one.eigenvalues, atol=1e-9 * abs(one.eigenvalues[0]))
    assert (one.ranks == other.ranks).all()


def test_a_sample_of_tokens_is_of_all_of_them(model: Checkpoint) -> None:
    whole, part = copying(model, 1, 0), copying(model, 1, 0, sample=40, rng=1)
    assert len(part.ranks) == 40
    assert np.isin(part.ranks, whole.ranks).all()
    assert (part.eigenvalues == whole.eigenvalues).all()
    assert "of 40 tokens" in repr(part)
    assert len(copying(model, 1, 0, sample=500).ranks) == 128


def test_induction_heads_copy_and_nothing_else_does(model: Checkpoint) -> None:
    scores = copying_scores(model)
    assert scores[1].min() > 0.99
    assert scores[0].max() < 0.5
    assert min(copying(model, 1, head).accuracy(5) for head in range(4)) > 10 * 5 / 128


def test_the_previous_token_head_reads_positions(model: Checkpoint) -> None:
    found = read_head(model, 0, 3)
    first = found.qk_tokens[0]
    assert min(first.left.by_position or 0, first.right.by_position or 0) > 0.98
    assert (found.ov_tokens[0].left.by_position or 0) < 0.2  # and writes tokens
    other = read_head(model, 1, 2)
    assert (other.qk_tokens[0].right.by_position or 0) < 0.2


@pytest.mark.parametrize("name", mostly_slow(["gpt2_untied", "llama", "bloom"], ["gpt2_untied"]))
def test_sums_over_a_vocabulary_of_several_blocks(name: str, tmp_path: Path) -> None:
    """5000 tokens: two blocks of rows, and three of logits."""
    model = random_model(name)
    model.resize_token_embeddings(5000, mean_resizing=False)
    model.double().save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    weights, head, words = (
        read_weights(checkpoint),
        stream_head("stream_head", checkpoint, 1, 3),
        read_vocabulary(checkpoint),
    )
    rows = token_rows(weights)
    assert_close(words.variance, rows.var(axis=1))
    x = homogeneous(without_weights(rows, head.norm))  # token d~
    assert_close(words.second_moments(head.norm), x.T @ x / 5000)
    unembed, final = weights.unembed.affine.weight, weights.final_norm  # d token
    between = final.weight[:, None] * ((unembed - unembed.mean(axis=1, keepdims=True)) @ x)
    between = between - between.mean(axis=0) if final.centred else between
    assert_close(words.between(head.norm), between, factor=1024)

    tokens = np.array([0, 1676, 1677, 4095, 4096, 4999])  # first and last ones of blocks
    circuit, found = dense_circuit(weights, 1, 3, tokens), copying(checkpoint, 1, 3)
    own = circuit[np.arange(len(tokens)), tokens]
    assert (found.ranks[tokens] == (circuit >= own[:, None]).sum(axis=1) - 1).all()
    ov = head.attention.ov(0).full()[:, :-1]  # d~ d
    assert found.eigenvalues.sum() == pytest.approx(np.trace(between @ ov), rel=1e-9)
    logits = (rows[tokens] if final is None else final(rows[tokens])) @ unembed
    likeliest, pairs = np.argsort(-logits, axis=1)[:, :3], bigrams(checkpoint, k=3)
    np.testing.assert_array_equal(pairs.successors[tokens], likeliest)
    probabilities = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    assert_close(pairs.probabilities[tokens], np.take_along_axis(probabilities, likeliest, axis=1), factor=1024)


# ------------------------------------------------------------------------------------------------------- whole heads


@pytest.mark.parametrize("name", [*NAMES, "llama_base"])
def test_heads_of_any_architecture_are_read(name: str, opened: Callable[[str], Opened]) -> None:
    checkpoint, _ = opened(name)
    turning = checkpoint.attention(0).rotary is not None or checkpoint.attention(0).alibi is not None
    found = read_head(checkpoint, 1, -1, distance=2 if turning else None, n_vectors=2, tokens=3)
    text = repr(found)
    assert text.startswith("head ")
    assert (found.layer, found.head) == (1, 3)
    assert ("distance 2" in text) == turning
    assert ("there is no unembedding" in text) == (found.copying is None) == (name in ("bert", "llama_base"))
    assert ("normalised" in text) == (name == "qwen3")
    assert len(found.qk_tokens) == len(found.ov_tokens) == 2
    assert all(len(side.positive) == 3 for f in found.qk_tokens for side in (f.left, f.right))
    for feature in found.ov_tokens:
        assert feature.right.constant == 0


@pytest.mark.parametrize("name", ["gpt2_untied", "llama", "gemma2"])
def test_folded_norms_change_no_reading(name: str, opened: Callable[[str], Opened]) -> None:
    checkpoint, _ = opened(name)
    folded = fold(checkpoint).checkpoint
    at = None if name == "gpt2_untied" else 2
    one, other = (read_head(c, 1, 2, distance=at, n_vectors=1) for c in (checkpoint, folded))
    assert_close(other.qk.values, one.qk.values, np.float32)
    assert other.qk_tokens[0].left.positive[0][0] == one.qk_tokens[0].left.positive[0][0]
    assert (bigrams(checkpoint, k=2).successors == bigrams(folded, k=2).successors).all()


def test_a_compressed_model_is_read(tmp_path: Path) -> None:
    compress(builtin_path(), tmp_path / "smaller", keep=0.7)
    smaller = open_checkpoint(tmp_path / "smaller")
    assert copying_scores(smaller)[1].min() > 0.99
    assert read_head(smaller, 0, 3).qk_tokens[0].left.by_position > 0.98


def test_ends_of_a_feature_are_the_extreme_tokens(opened: Callable[[str], Opened]) -> None:
    checkpoint, weights = opened("gpt2_untied")
    found = read_head(checkpoint, 0, 1, n_vectors=1, tokens=50)
    bare = without_weights(token_rows(weights), branches(weights)[0].before)
    along = homogeneous(bare) @ found.qk.left[:, 0]
    assert [token for token, _ in found.qk_tokens[0].left.positive] == list(np.argsort(-along))
    assert [token for token, _ in found.qk_tokens[0].left.negative] == list(np.argsort(along))
    written = found.ov.right[0, :-1]
    logits = (written - written.mean()) * weights.final_norm.weight @ weights.unembed.affine.weight
    assert [token for token, _ in found.ov_tokens[0].right.positive] == list(np.argsort(-logits))


def test_the_trained_bert_is_read_by_its_words(minilm_path: Path) -> None:
    found = read_head(open_checkpoint(minilm_path), 2, 5)
    assert found.copying is None
    assert found.vocabulary.name(101) == "'[CLS]'"
    assert "no unembedding" in repr(found)


# ------------------------------------------------------------------------------------------------------------- names


def test_names_are_those_of_the_tokenizer(tmp_path: Path) -> None:
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(builtin_path("llama"))
    names = token_names(builtin_path("llama"))
    assert names is not None
    assert len(names) == len(tokenizer) == 1024
    whole = [token for token in range(1, 1024) if not names[token].startswith("<0x")]
    assert len(whole) > 850
    assert all(names[token] == tokenizer.decode([token]) for token in whole)
    assert names[0] == "<|endoftext|>"
    words = {"a": 0, "\u0120b": 1, "\u00e9": 2}  # as GPT-2 keeps them; the last one is a byte of no letter
    (tmp_path / "vocab.json").write_text(json.dumps(words), encoding="utf-8")
    assert token_names(tmp_path) == {0: "a", 1: " b", 2: "<0xE9>"}


def test_folders_without_a_tokenizer_have_numbers(model: Checkpoint, tmp_path: Path) -> None:
    assert token_names(builtin_path()) is None
    assert read_vocabulary(model).name(17) == "17"
    (tmp_path / "vocab.txt").write_text("[PAD]\nthe\n##s\n", encoding="utf-8")
    assert token_names(tmp_path) == {0: "[PAD]", 1: "the", 2: "##s"}
    pieces = {"model": {"vocab": [["<s>", 0.0], ["\u2581the", -1.0]]}, "added_tokens": [{"id": 2, "content": "<new>"}]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(pieces), encoding="utf-8")
    assert token_names(tmp_path) == {0: "<s>", 1: " the", 2: "<new>"}
    (tmp_path / "tokenizer.json").write_text("{", encoding="utf-8")
    with refused(ValueError, "token_names", "must be JSON"):
        token_names(tmp_path)


def tokenizer(**changes: Any) -> str:
    content = {"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": [{"id": 2, "content": "<new>"}], "decoder": None}
    return json.dumps({key: value for key, value in (content | changes).items() if value is not ...})


DAMAGED = {
    "list": ("tokenizer.json", "[]", "a JSON object"),
    "null": ("tokenizer.json", "null", "a JSON object"),
    "model that is null": ("tokenizer.json", tokenizer(model=None), "in model,"),
    "model that is a list": ("tokenizer.json", tokenizer(model=[]), "in model,"),
    "vocabulary that is null": ("tokenizer.json", tokenizer(model={"vocab": None}), "in model.vocab,"),
    "number that is text": ("tokenizer.json", tokenizer(model={"vocab": {"a": "0"}}), "an integer"),
    "number that is a truth": ("tokenizer.json", tokenizer(model={"vocab": {"a": True}}), "an integer"),
    "number that is negative": ("tokenizer.json", tokenizer(model={"vocab": {"a": -1}}), "an integer"),
    "number of many digits": ("tokenizer.json", tokenizer(model={"vocab": {"a": 10**90}}), "an integer"),
    "piece without a score": ("tokenizer.json", tokenizer(model={"vocab": [["a"]]}), "in model.vocab[0],"),
    "piece that is a number": ("tokenizer.json", tokenizer(model={"vocab": [["a", 0], [1, 1]]}), "in model.vocab[1],"),
    "piece of two letters": ("tokenizer.json", tokenizer(model={"vocab": ["ab"]}), "in model.vocab[0],"),
    "added tokens that are null": ("tokenizer.json", tokenizer(added_tokens=None), "in added_tokens,"),
    "added token that is text": ("tokenizer.json", tokenizer(added_tokens=["a"]), "in added_tokens[0],"),
    "added token without a number": (
        "tokenizer.json",
        tokenizer(added_tokens=[{"content": "a"}]),
        "added_tokens[0].id",
    ),
    "added token without text": ("tokenizer.json", tokenizer(added_tokens=[{"id": 0}]), "added_tokens[0].content"),
    "repeated key": ("tokenizer.json", '{"model": {"vocab": {"a": 0, "a": 1}}}', "duplicate key 'a'"),
    "deep": ("tokenizer.json", tokenizer(decoder=0).replace(": 0}", ": " + "[" * 900 + "]" * 900 + "}"), "nested"),
    "deeper": ("tokenizer.json", "[" * 100_000, "nested"),
    "lone surrogate": ("vocab.json", '{"\\ud800": 0}', "surrogates"),
    "list of words": ("vocab.json", '["a"]', "a JSON object"),
    "words without numbers": ("vocab.json", '{"a": null}', "an integer"),
    "number as a fraction": ("vocab.json", '{"a": 1.0}', "an integer"),
    "not a number": ("vocab.json", '{"a": NaN}', "JSON"),
    "bytes": ("vocab.json", b'{"\xff": 0}', "utf-8"),
    "lines of bytes": ("vocab.txt", b"a\n\xff\n", "UTF-8"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_tokenizers_are_refused_by_file_and_place(case: str, tmp_path: Path) -> None:
    name, content, says = DAMAGED[case]
    file = tmp_path / name
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with refused(tnlib.FileFormatError, f"token_names: {file} must", says, "save the tokenizer again"):
        token_names(tmp_path)


def test_lines_end_where_a_line_ends(tmp_path: Path) -> None:
    """Some characters separate lines for str.splitlines alone; they are words of multilingual vocabularies."""
    (tmp_path / "vocab.txt").write_bytes("a\r\n\u2028\n\x85\n\n##b".encode())
    assert token_names(tmp_path) == {0: "a", 1: "\u2028", 2: "\x85", 3: "", 4: "##b"}


# --------------------------------------------------------------------------------------------------------- arguments


def test_wrong_arguments_are_refused(model: Checkpoint, opened: Callable[[str], Opened]) -> None:
    with refused(TypeError, "read_head: model", "Checkpoint", "str"):
        read_head("builtin", 0, 0)  # type: ignore[arg-type]
    with refused(ValueError, "head must lie between 0 and 3, got 9"):
        read_head(model, 0, 9)
    with refused(ValueError, "layer must lie between 0 and 1, got 2"):
        copying(model, 2, 0)
    with refused(ValueError, "read_head: distance must be given", "rotary"):
        read_head(opened("llama")[0], 0, 0)
    with refused(ValueError, "copying: model must have an unembedding", "bert"):
        copying(opened("bert")[0], 0, 0)
    with refused(ValueError, "copying_scores: model must have an unembedding", "bert"):
        copying_scores(opened("bert")[0])
    with refused(TypeError, "singular_vectors: operator must be a LowRank", "ndarray"):
        singular_vectors(np.eye(3))  # type: ignore[arg-type]
    with refused(TypeError, "form_maximum: form must be a LowRank"):
        form_maximum(np.eye(3))  # type: ignore[arg-type]
    with refused(ValueError, "form_maximum: form must be square", "(3, 2)"):
        form_maximum(tnlib.LowRank(np.ones((3, 1)), np.ones((1, 2))))
