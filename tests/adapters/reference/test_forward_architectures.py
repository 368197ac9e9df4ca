"""The forward pass of every row of the table of architectures against transformers' own."""

from __future__ import annotations

import copy
import shutil
from typing import Any

import numpy as np
import pytest
from checkpoint_folders import change_config, change_tensors
from oracles import assert_close, refused
from tnlib_adapters import open_checkpoint
from tnlib_adapters.reference.model import Forward, loss, run
from tnlib_adapters.reference.weights import read_weights

from tnlib import ArgumentError, ArgumentTypeError, FileFormatError

pytest.importorskip("torch")
models = pytest.importorskip("transformers_models")

NAMES = [*sorted(models.MODELS), "minilm"]
WITHOUT_LOGITS = {"bert", "bert_masked", "minilm", "roberta", "llama_base", "vit", "t5_encoder", "t5_encoder_gated"}


def layer_by_layer(got: Forward, want: Any, factor: float, dtype: type = np.float32) -> None:
    per_layer = [(got.patterns, want.patterns), (got.inputs, want.inputs), (got.outputs, want.outputs)]
    for ours, theirs in [*per_layer, (got.residuals[:-1], want.residuals)]:
        assert len(ours) == len(theirs) >= 2
        for one, other in zip(ours, theirs, strict=True):
            assert one.dtype == np.float64
            assert_close(one, other, dtype, factor)
    if want.hidden.shape == got.hidden.shape:  # narrow embeddings: transformers has left the stream here already
        assert_close(got.hidden, want.hidden, dtype, factor)
    if want.logits is not None:
        assert_close(got.logits, want.logits, dtype, factor)


@pytest.mark.parametrize("name", NAMES)
def test_everything_agrees_with_the_model(name: str, saved: Any, recorded: Any) -> None:
    want = recorded(name)
    layer_by_layer(run(open_checkpoint(saved(name)[1]), want.tokens, want.decoder_tokens), want, factor=256)


IN_DOUBLE = ["bert", "bert_masked", "gpt2", "gpt2_lm", "gpt2_untied", "gpt2_unscaled", "gpt2_by_layer", "minilm"]


@pytest.mark.parametrize("name", IN_DOUBLE)
def test_everything_agrees_with_the_model_in_double_precision(name: str, saved: Any, recorded: Any) -> None:
    want = models.record(copy.deepcopy(saved(name)[0]).double(), recorded(name).tokens)
    layer_by_layer(run(open_checkpoint(saved(name)[1]), want.tokens), want, 1000, np.float64)


@pytest.mark.parametrize("name", ["t5_encoder", "t5_encoder_gated"])
def test_configs_that_name_no_activation(name: str, saved: Any, recorded: Any, tmp_path: Any) -> None:
    folder = shutil.copytree(saved(name)[1], tmp_path / "older")
    change_config(folder, dense_act_fn=..., is_gated_act=...)
    assert_close(run(open_checkpoint(folder), recorded(name).tokens).hidden, recorded(name).hidden, np.float32, 256)


def test_encoder_and_decoder(saved: Any, recorded: Any) -> None:
    checkpoint, tokens = open_checkpoint(saved("t5")[1]), recorded("t5").tokens
    weights = read_weights(checkpoint)
    assert (len(weights.encoder), len(weights.blocks)) == (4, 3)
    got = run(weights, tokens[0], tokens[0, :3])
    assert got.memory is not None
    assert got.memory.shape == (1, 9, 24)
    assert [pattern.shape[2:] for pattern in got.patterns] == [(9, 9), (9, 9), (3, 3), (3, 9)]
    assert [stream.shape[1] for stream in got.residuals] == [9, 9, 3, 3, 3]
    assert run(open_checkpoint(saved("llama")[1]), tokens).memory is None
    with refused(ArgumentError, "run: decoder_tokens must be given for a t5"):
        run(checkpoint, tokens)
    with refused(ArgumentError, "run: decoder_tokens must hold as many sequences as tokens, got 1 and 2"):
        run(checkpoint, tokens, tokens[0])
    with refused(ArgumentError, "run: decoder_tokens must be None for a llama without a decoder"):
        run(open_checkpoint(saved("llama")[1]), tokens, tokens)
    with refused(ArgumentError, "loss: model must have one residual stream, got a t5"):
        loss(weights, tokens, np.arange(9) + np.zeros((2, 1)) > 0)


def test_logits_of_older_configs_are_scaled_where_embeddings_are_tied(saved: Any, recorded: Any, tmp_path: Any) -> None:
    for name, tied in (("t5", True), ("t5_untied", False)):
        folder = shutil.copytree(saved(name)[1], tmp_path / name)
        change_config(folder, scale_decoder_outputs=..., tie_word_embeddings=tied)
        want = recorded(name)
        assert_close(
            run(open_checkpoint(folder), want.tokens, want.decoder_tokens).logits, want.logits, np.float32, 256
        )


def test_models_without_unembedding_end_in_hidden_states(saved: Any) -> None:
    for name in NAMES:
        assert (read_weights(open_checkpoint(saved(name)[1])).unembed is None) == (name in WITHOUT_LOGITS)


@pytest.mark.parametrize(("name", "n_tokens"), [("llama_dynamic", 41), ("phi3_longrope", 25), ("llama_yarn", 30)])
def test_long_sequences(name: str, n_tokens: int, saved: Any) -> None:
    from transformers_models import inputs, random_model, record

    want = record(random_model(name), inputs(saved(name)[0], n_tokens))
    checkpoint = open_checkpoint(saved(name)[1])
    layer_by_layer(run(read_weights(checkpoint, length=n_tokens), want.tokens), want, factor=1000)
    if name != "llama_yarn":
        with refused(ArgumentError, "run: tokens", f"got {n_tokens}"):
            run(checkpoint, want.tokens)


def test_images_of_the_wrong_shape_are_refused(saved: Any) -> None:
    weights = read_weights(open_checkpoint(saved("vit")[1]))
    image = np.random.default_rng(0).standard_normal((3, 12, 12))
    assert run(weights, image).hidden.shape == (1, 10, 24)
    for shape in ((1, 12, 12), (3, 12, 16), (3, 12, 11), (12, 12)):
        with refused(ArgumentError, "run: images", "(batch, 3, height, width)", str(shape[-1])):
            run(weights, np.ones(shape))
    with refused(ArgumentTypeError, "run: images"):
        run(weights, "image")


@pytest.mark.parametrize(
    ("name", "tensor", "shape"),
    [
        ("llama", "model.layers.1.mlp.gate_proj.weight", (41, 24)),
        ("phi3", "model.layers.1.mlp.gate_up_proj.weight", (80, 31)),
        ("opt_narrow", "model.decoder.project_in.weight", (24, 9)),
        ("gemma2", "model.layers.0.pre_feedforward_layernorm.weight", (15,)),
        ("vit", "embeddings.cls_token", (1, 24)),
        ("bert", "embeddings.word_embeddings.weight", (50, 23)),
        ("bert", "embeddings.LayerNorm.bias", (1, 24)),
        ("bert", "encoder.layer.1.intermediate.dense.bias", (41,)),
    ],
)
def test_shapes_that_contradict_the_config_are_refused(
    name: str, tensor: str, shape: tuple[int, ...], saved: Any, tmp_path: Any
) -> None:
    folder = shutil.copytree(saved(name)[1], tmp_path / "changed")
    change_tensors(folder, lambda tensors: tensors.update({tensor: np.ones(shape, np.float32)}))
    with refused(FileFormatError, "read_weights", tensor.removeprefix("model."), str(shape)):
        read_weights(open_checkpoint(folder))
