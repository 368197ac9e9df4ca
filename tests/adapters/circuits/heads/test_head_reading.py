"""The report on one head: against dense circuits of many architectures, and on trained models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from attention_layers import branches, homogeneous
from oracles import assert_close, isometry, normal, refused
from tnlib_adapters import Budget, Checkpoint, builtin_path, compress, fold, open_checkpoint
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
from tnlib_adapters.reference.weights import Weights
from token_streams import token_rows, without_weights

import tnlib

NAMES = ["gpt2_lm", "gpt2_untied", "bert", "opt", "opt_narrow", "llama", "llama_biases", "qwen3", "gemma2", "bloom"]
Opened = tuple[Checkpoint, Weights]


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


def test_spans_name_tokens_that_no_basis_decides(opened: Callable[[str], Opened]) -> None:
    """A head whose values are all equal has one span; its tokens are the longest projections."""
    from tnlib_adapters.circuits.heads.head_reading import vectors_in_tokens

    checkpoint, weights = opened("llama")
    words = read_vocabulary(checkpoint)
    d = checkpoint.sizes.d_model
    basis, other = isometry(d + 1, 4), isometry(d + 1, 4, seed=1)
    form = tnlib.LowRank(basis, other.T)
    (feature,) = vectors_in_tokens(singular_vectors(form), words, None, writes=False, count=3, tokens=4)
    assert feature.number == slice(0, 4)
    lengths = np.linalg.norm(homogeneous(token_rows(weights)) @ basis, axis=1)
    want = np.argsort(-lengths)[:4]
    assert [token for token, _ in feature.left.positive] == list(want)
    assert_close([size for _, size in feature.left.positive], lengths[want])
    assert feature.left.negative == ()


def test_the_previous_token_head_reads_positions(model: Checkpoint) -> None:
    found = read_head(model, 0, 3)
    first = found.qk_tokens[0]
    assert min(first.left.by_position or 0, first.right.by_position or 0) > 0.98
    assert (found.ov_tokens[0].left.by_position or 0) < 0.2  # and writes tokens
    other = read_head(model, 1, 2)
    assert (other.qk_tokens[0].right.by_position or 0) < 0.2


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


@pytest.mark.usefixtures("without_pictures")
def test_a_compressed_model_is_read(tmp_path: Path) -> None:
    compress(builtin_path(), tmp_path / "smaller", Budget(keep=0.7), what="attention")
    smaller = open_checkpoint(tmp_path / "smaller")
    assert copying_scores(smaller).embeddings[1].min() > 0.99
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


@pytest.mark.slow
def test_the_trained_bert_is_read_by_its_words(minilm_path: Path) -> None:
    found = read_head(open_checkpoint(minilm_path), 2, 5)
    assert found.copying is None
    assert found.vocabulary.name(101) == "'[CLS]'"
    assert "no unembedding" in repr(found)


def test_wrong_arguments_are_refused(model: Checkpoint, opened: Callable[[str], Opened]) -> None:
    with refused(ValueError, "head must lie between 0 and 3, got 9"):
        read_head(model, 0, 9)
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
