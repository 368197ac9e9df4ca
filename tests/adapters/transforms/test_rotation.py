"""Norms and value biases folded, and the residual stream rotated: the model computes the same, here and reloaded."""

from __future__ import annotations

import copy
import functools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint_folders import builtin_copy, change_config, change_tensors
from oracles import assert_close, isometry, refused
from slow_cases import mostly_slow
from tnlib_adapters import (
    Budget,
    builtin_path,
    choose_gauge,
    compress,
    fix_gauge,
    fold,
    norm_divisors,
    open_checkpoint,
    rotate,
    save_checkpoint,
)
from tnlib_adapters.reference.model import Forward, run

import tnlib

LM = ["gpt2_lm", "gpt2_untied", "gptj", "gpt_neox", "gpt_neox_sequential", "opt", "opt_narrow", "llama", "llama_tied"]
LM += ["llama_biases", "mistral_whole", "mixtral", "qwen2", "qwen3", "qwen3_moe_normalised", "gemma", "gemma2"]
LM += ["gemma3", "phi", "phi3", "starcoder2", "falcon", "falcon_new", "falcon_new_one_norm", "falcon_biases"]
LM += ["falcon_alibi", "bloom", "deepseek_v2_direct", "deepseek_v3", "deepseek_v2_groups", "deepseek_v3_experts"]
LM += ["t5", "t5_untied"]
OTHERS = ["gpt2", "bert", "bert_masked", "roberta", "opt_after", "llama_base", "vit", "t5_encoder_gated"]

# Norms that stand in front of what reads from them, and are gone after folding: the architectures that can be rotated.
PLAIN = ["llama", "llama_tied", "llama_biases", "mistral_whole", "qwen2", "qwen3", "gemma", "phi3"]
PLAIN += ["mixtral", "qwen3_moe_normalised", "deepseek_v2_direct", "deepseek_v3"]
PLAIN += ["deepseek_v2_groups", "deepseek_v3_experts", "t5_untied"]
LAYER_NORM = ["gpt2_lm", "gpt2_untied", "gptj", "gpt_neox", "opt", "opt_narrow", "phi", "falcon", "falcon_new"]
LAYER_NORM += ["starcoder2"]


@pytest.fixture(scope="module")
def doubled(saved: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Any, Path]]:
    """Name of a model -> the model in double precision, and its folder."""

    @functools.cache
    def get(name: str) -> tuple[Any, Path]:
        model = copy.deepcopy(saved(name)[0]).double()
        folder = tmp_path_factory.mktemp(name)
        model.save_pretrained(folder)
        return model, folder

    return get


def outputs(model: Any, x: np.ndarray) -> np.ndarray:
    """The last hidden state or the logits that transformers computes."""
    import transformers_models

    return transformers_models.outputs(model, x)


def computed(checkpoint: Any, model: Any, x: np.ndarray) -> Forward:
    """What tnlib computes of a checkpoint of this model, with tokens of the decoder if it has one."""
    from transformers_models import decoder_inputs

    return run(checkpoint, x, decoder_inputs(model, x))


def reloaded(model: Any, checkpoint: Any, out: Path) -> Any:
    from transformers_models import loaded_like

    save_checkpoint(checkpoint, out)
    return loaded_like(model, out)


def examples(model: Any) -> np.ndarray:
    from transformers_models import inputs

    x = inputs(model)
    return x.astype(np.float64) if x.dtype.kind == "f" else x


def assert_same(got: np.ndarray, want: np.ndarray, rtol: float = 1e-10) -> None:
    off = np.linalg.norm(got - want) / np.linalg.norm(want)
    assert off <= rtol


# Whatever its precision, transformers takes some norms and softmaxes in float32.
SINGLE = 2e-6


def with_ones(d: int, seed: int = 0) -> np.ndarray:
    """A rotation that keeps the vector of ones."""
    basis = np.linalg.qr(np.column_stack([np.ones(d), np.random.default_rng(seed).standard_normal((d, d - 1))]))[0]
    turn = np.eye(d)
    turn[1:, 1:] = isometry(d - 1, d - 1, seed=seed + 1)
    found: np.ndarray = basis @ turn @ basis.T
    return found


# ------------------------------------------------------------------------------------------------------------- folding


@pytest.mark.parametrize("name", mostly_slow(LM + OTHERS, (LM + OTHERS)[::5]))
def test_a_folded_model_computes_the_same_in_transformers(name: str, doubled: Any, tmp_path: Path) -> None:
    model, folder = doubled(name)
    folded = fold(open_checkpoint(folder))
    x = examples(model)
    want = outputs(model, x)
    assert_same(outputs(reloaded(model, folded.checkpoint, tmp_path / "out"), x), want, SINGLE)
    assert_same(outputs(reloaded(model, fold(folded.checkpoint).checkpoint, tmp_path / "again"), x), want, SINGLE)


@pytest.mark.parametrize("name", mostly_slow(LM, LM[::4]))
def test_a_folded_model_computes_the_same_here(name: str, doubled: Any) -> None:
    model, folder = doubled(name)
    checkpoint, x = open_checkpoint(folder), examples(model)
    got, want = (computed(one, model, x) for one in (fold(checkpoint).checkpoint, checkpoint))
    assert got.logits is not None
    assert want.logits is not None
    assert_same(got.logits, want.logits)
    for one, other in zip(got.patterns, want.patterns, strict=True):
        assert_same(one, other)


def test_logits_of_folded_t5_keep_their_scale(doubled: Any, tmp_path: Path) -> None:
    """A config without the key of the scale says it by tying; embeddings are no longer tied once norms are folded."""
    model, folder = doubled("t5_untied")
    shutil.copytree(folder, tmp_path / "older")
    change_config(tmp_path / "older", scale_decoder_outputs=..., tie_word_embeddings=True)
    checkpoint, x = open_checkpoint(tmp_path / "older"), examples(model)
    assert checkpoint.wiring.unembedding is not None
    assert checkpoint.wiring.unembedding.scale < 1
    folded = fold(checkpoint).checkpoint
    assert folded.config["tie_word_embeddings"] is False
    assert_same(computed(folded, model, x).logits, computed(checkpoint, model, x).logits)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", PLAIN + LAYER_NORM)
def test_norms_are_plain_afterwards(name: str, doubled: Any) -> None:
    folded = fold(open_checkpoint(doubled(name)[1]))
    plain = 0.0 if name == "gemma" else 1.0
    norms = [n for n in folded.checkpoint.folder.tensors if "norm" in n or ".ln" in n]
    norms = [n for n in norms if "q_norm" not in n and "k_norm" not in n]
    assert norms
    for n in norms:
        values = folded.checkpoint.read(n)
        if n.endswith("weight"):
            assert (values == plain).all()
    layers = [folded.checkpoint.attention(k) for k in range(folded.checkpoint.n_layers)]
    if not folded.left or all("value" not in what for what in folded.left):
        assert all(layer.b_V is None or not layer.b_V.any() for layer in layers)


@pytest.mark.parametrize("name", ["gpt2_lm", "gptj", "gpt_neox", "falcon", "bloom"])
def test_the_stream_is_centred_where_layer_norms_read_it(name: str, doubled: Any) -> None:
    model, folder = doubled(name)
    folded = fold(open_checkpoint(folder))
    seen = run(folded.checkpoint, examples(model))
    start = 1 if name == "bloom" else 0  # its embeddings are normalised, weights and all
    for before, after in zip(seen.residuals[start:], seen.residuals[start + 1 :], strict=False):
        assert abs((after - before).mean(axis=-1)).max() <= 1e-12 * abs(after).max()
    assert any("mean" in what for what in folded.done)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("bert", ["attention.output.LayerNorm.weight: its output is the stream itself"]),
        ("opt_after", ["its output is the stream itself"]),
        ("gpt2", ["the final norm"]),
        ("llama_base", ["norm.weight: the model ends in it"]),
        ("vit", ["layernorm.weight: the model ends in it"]),
        ("qwen2", ["value biases", "has no bias to absorb them"]),
        ("qwen3", ["norms of queries and keys"]),
        ("gemma2", ["applied to the output of a layer"]),
        ("bloom", ["word_embeddings_layernorm.weight: its output is the stream", "ln_f.bias: "]),
        ("gpt2_lm", ["ln_f.bias: lm_head.weight has no bias to absorb it"]),
    ],
)
def test_what_cannot_be_folded_is_said(name: str, words: list[str], doubled: Any) -> None:
    folded = fold(open_checkpoint(doubled(name)[1]))
    for word in words:
        assert any(word in what for what in folded.left), folded.left
        assert word in repr(folded)


def test_another_reader_of_the_final_norm_keeps_it(doubled: Any, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(doubled("llama")[1], tmp_path / "more"))
    change_tensors(folder, lambda tensors: tensors.update({"score.weight": np.ones((2, 24))}))
    folded = fold(open_checkpoint(folder))
    assert any("model.norm.weight: score.weight may read from it" in what for what in folded.left)
    np.testing.assert_array_equal(folded.checkpoint.read("norm.weight"), open_checkpoint(folder).read("norm.weight"))


def test_the_value_biases_of_the_built_in_model(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(builtin_path())
    folded = fold(checkpoint)
    for k in range(2):
        before, after = checkpoint.attention(k), folded.checkpoint.attention(k)
        assert before.b_V is not None
        assert before.b_O is not None
        assert before.b_V.any()
        assert after.b_V is not None
        assert not after.b_V.any()
        want = before.b_O + sum(b @ w for b, w in zip(before.b_V, before.W_O, strict=True))
        assert_close(after.b_O, want, np.float32)
    save_checkpoint(folded.checkpoint, tmp_path / "out")
    x = np.arange(20)
    assert_close(run(open_checkpoint(tmp_path / "out"), x).logits, run(checkpoint, x).logits, np.float32, 200)


# ------------------------------------------------------------------------------------------------------------ rotation


@pytest.mark.parametrize("name", PLAIN)
def test_any_rotation_where_norms_are_root_mean_squares(name: str, doubled: Any, tmp_path: Path) -> None:
    model, folder = doubled(name)
    checkpoint = fold(open_checkpoint(folder)).checkpoint
    r, x = isometry(checkpoint.sizes.d_model, checkpoint.sizes.d_model, seed=3), examples(model)
    turned = rotate(checkpoint, r)
    assert_same(outputs(reloaded(model, turned, tmp_path / "out"), x), outputs(model, x), SINGLE)
    before, after = (computed(one, model, x) for one in (checkpoint, turned))
    for one, other in zip(after.residuals, before.residuals, strict=True):
        assert_same(one, other @ r)
    assert_same(after.logits, before.logits)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", LAYER_NORM)
def test_rotations_that_keep_the_ones_under_layer_norms(name: str, doubled: Any, tmp_path: Path) -> None:
    model, folder = doubled(name)
    checkpoint, x = fold(open_checkpoint(folder)).checkpoint, examples(model)
    d = checkpoint.sizes.d_model
    for sign, out in ((1, "plus"), (-1, "minus")):
        turned = rotate(checkpoint, sign * with_ones(d))
        assert_same(outputs(reloaded(model, turned, tmp_path / out), x), outputs(model, x), SINGLE)
        assert_same(run(turned, x).logits, run(checkpoint, x).logits)  # type: ignore[arg-type]
    with refused(ValueError, "rotate: rotation must preserve the vector of ones", "LayerNorm"):
        rotate(checkpoint, isometry(d, d))


def test_any_rotation_of_an_attention_only_model() -> None:
    checkpoint, x = open_checkpoint(builtin_path()), np.arange(30)
    r = isometry(64, 64, seed=1)
    before, after = run(checkpoint, x), run(rotate(checkpoint, r), x)
    assert_close(after.logits, before.logits, np.float32, 200)
    for one, other in zip(after.residuals, before.residuals, strict=True):
        assert_close(one, other @ r, np.float32, 200)
    back = rotate(rotate(checkpoint, r), r.T)
    for name in checkpoint.folder.tensors:
        assert_close(back.read(name), checkpoint.read(name), np.float32)


def test_operators_turn_with_the_stream() -> None:
    checkpoint, r = open_checkpoint(builtin_path()), isometry(64, 64, seed=1)
    turned, was = rotate(checkpoint, r).attention(1), checkpoint.attention(1)
    wider = np.eye(65)
    wider[:64, :64] = r
    for got, want in ((turned.qk(2), was.qk(2)), (turned.ov(2), was.ov(2))):
        assert_close(np.asarray(got), wider.T @ np.asarray(want) @ wider, np.float32)


def test_hidden_states_come_out_rotated(doubled: Any) -> None:
    checkpoint = fold(open_checkpoint(doubled("opt")[1])).checkpoint
    r = with_ones(24)
    assert_same(run(rotate(checkpoint, r), np.arange(9)).hidden, run(checkpoint, np.arange(9)).hidden @ r)


@pytest.mark.parametrize("name", ["llama", "gpt2_lm", "gemma2", "bloom"])
def test_norms_that_single_out_coordinates_are_refused(name: str, doubled: Any) -> None:
    checkpoint = open_checkpoint(doubled(name)[1])
    checkpoint = fold(checkpoint).checkpoint if name in ("gemma2", "bloom") else checkpoint
    remedy = "call fold first" if name in ("llama", "gpt2_lm") else "cannot be rotated"
    with refused(ValueError, "rotate: the weights of a norm must all be equal", remedy):
        rotate(checkpoint, with_ones(24))


def test_tensors_whose_part_is_not_known_are_refused(doubled: Any) -> None:
    with refused(ValueError, "rotate: every tensor as wide as the stream", "'pooler.dense.bias'", "in a bert"):
        rotate(open_checkpoint(doubled("bert")[1]), np.eye(24))


@pytest.mark.parametrize(
    ("rotation", "words"),
    [
        (np.eye(63), ["(64, 64)", "got float64 of shape (63, 63)"]),
        (1.01 * np.eye(64), ["orthogonal", "numpy.linalg.qr"]),
        (np.ones((64, 64)), ["orthogonal"]),
        (1j * np.eye(64), ["must be real", "complex128"]),
        (np.full((64, 64), np.nan), ["must be finite"]),
        (np.ones(64), ["must have 2 legs"]),
    ],
)
def test_what_is_no_rotation_is_refused(rotation: np.ndarray, words: list[str]) -> None:
    with refused(ValueError, "rotate: rotation", *words):
        rotate(open_checkpoint(builtin_path()), rotation)


def test_a_folder_is_no_checkpoint() -> None:
    for call in (lambda path: rotate(path, np.eye(64)), fold, lambda path: norm_divisors(path, np.ones((2, 64)))):
        with refused(TypeError, ": checkpoint must be a Checkpoint or", "PosixPath; pass open_checkpoint(folder)"):
            call(builtin_path())


@pytest.mark.usefixtures("without_pictures")
def test_compressed_checkpoints_are_refused(tmp_path: Path) -> None:
    compress(builtin_path(), tmp_path / "small", Budget(keep=0.5), what="attention")
    checkpoint = open_checkpoint(tmp_path / "small")
    for words, change in (
        ("rotate: checkpoint", lambda: rotate(checkpoint, np.eye(64))),
        ("fold: checkpoint", lambda: fold(checkpoint)),
        ("fix_gauge: attention", lambda: fix_gauge(checkpoint)),
        ("choose_gauge: checkpoint", lambda: choose_gauge(checkpoint)),
    ):
        with refused(ValueError, words, "stored as factors"):
            change()


# ------------------------------------------------------------------------------------------------------------- writing


def test_a_folder_that_holds_something_is_replaced_by_force_alone(tmp_path: Path) -> None:
    there = builtin_copy(tmp_path / "there")
    (there / "old.txt").write_text("old")
    with refused(ValueError, "save_checkpoint: OUT", "empty"):
        save_checkpoint(open_checkpoint(builtin_path()), there)
    assert (there / "old.txt").read_text() == "old"
    save_checkpoint(open_checkpoint(builtin_path()), there, force=True)
    assert not (there / "old.txt").exists()


def test_subfolders_come_along(tmp_path: Path) -> None:
    """The pooling of a sentence transformer is a folder of its own; the same weights in other formats are not."""
    folder = builtin_copy(tmp_path / "model")
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling/config.json").write_text("{}")
    (folder / "rust_model.ot").write_text("weights")
    save_checkpoint(fold(open_checkpoint(folder)).checkpoint, tmp_path / "out")
    assert (tmp_path / "out/1_Pooling/config.json").read_text() == "{}"
    assert not (tmp_path / "out/rust_model.ot").exists()


def test_small_files_and_the_config_are_carried_along(tmp_path: Path) -> None:
    folder = builtin_copy(tmp_path / "model")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "pytorch_model.bin").write_text("old")
    change_config(folder, note="kept")
    save_checkpoint(rotate(open_checkpoint(folder), np.eye(64)), tmp_path / "out")
    carried = {p.name for p in (tmp_path / "out").iterdir()}
    assert carried == {p.name for p in folder.iterdir()} - {"pytorch_model.bin"}
    assert open_checkpoint(tmp_path / "out").config["note"] == "kept"


def test_shards_stay_shards(tmp_path: Path) -> None:
    from checkpoint_folders import shard

    folder = builtin_copy(tmp_path / "model")
    shard(folder)
    save_checkpoint(fold(open_checkpoint(folder)).checkpoint, tmp_path / "out")
    assert sorted(p.name for p in (tmp_path / "out").glob("*.safetensors")) == ["one.safetensors", "two.safetensors"]
    assert_close(
        run(open_checkpoint(tmp_path / "out"), [1, 2, 3]).hidden,
        run(open_checkpoint(folder), [1, 2, 3]).hidden,
        np.float32,
        200,
    )


def test_half_precision_is_written_in_single(tmp_path: Path) -> None:
    """Rounded to half precision again, a rotated model would be another one."""
    folder = builtin_copy(tmp_path / "model")
    change_tensors(folder, lambda t: t.update({name: a.astype(np.float16) for name, a in t.items()}))
    change_config(folder, dtype="float16")
    checkpoint = open_checkpoint(folder)
    turned = rotate(checkpoint, isometry(64, 64))
    save_checkpoint(turned, tmp_path / "out")
    found = open_checkpoint(tmp_path / "out")
    assert found.config["dtype"] == "float32"
    assert {info.dtype for info in checkpoint.folder.tensors.values()} == {"F16"}
    assert found.folder.tensors["embed.weight"].dtype == "F32"
    assert found.folder.tensors["unembed.bias"].dtype == "F16"  # not on the stream
    x = np.arange(20)
    assert_close(run(found, x).logits, run(checkpoint, x).logits, np.float32, 200)
    assert_close(run(turned, x).logits, run(checkpoint, x).logits, np.float32, 200)


def test_overflow_in_single_precision_is_refused(tmp_path: Path) -> None:
    folder = builtin_copy(tmp_path / "model")

    def blow_up(tensors: dict[str, np.ndarray]) -> None:
        tensors["embed.weight"] = np.full_like(tensors["embed.weight"], 3e38)

    change_tensors(folder, blow_up)
    turned = rotate(open_checkpoint(folder), with_ones(64))
    assert turned.read("embed.weight").shape == (128, 64)
    h = np.linalg.qr(np.column_stack([np.ones(64), np.random.default_rng(0).standard_normal((64, 63))]))[0]
    with refused(tnlib.FileFormatError, "embed.weight", "must be finite"):
        rotate(open_checkpoint(folder), h).read("embed.weight")
