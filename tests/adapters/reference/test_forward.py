"""The float64 forward pass against transformers' own in double precision, and the built-in model's loss."""

from __future__ import annotations

import copy
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint_folders import change_config, change_tensors
from oracles import assert_close, refused, unchanged
from tnlib_adapters import builtin_path, open_checkpoint
from tnlib_adapters.attention.softmax import log_softmax
from tnlib_adapters.data.repeats import repeated_segments
from tnlib_adapters.reference.layers import ACTIVATIONS, Affine, Norm, Unembedding
from tnlib_adapters.reference.model import Forward, loss, run
from tnlib_adapters.reference.weights import Weights, read_weights

from tnlib import ArgumentError, ArgumentTypeError, FileFormatError

CHANCE = math.log(128)


@pytest.fixture(scope="module")
def weights() -> Weights:
    return read_weights(open_checkpoint(builtin_path()))


# ------------------------------------------------------------------------------------------- against transformers


# weights of the embedding, a cap on logits, a narrow unembedding, a context without end
@pytest.mark.parametrize("name", ["gpt2_lm", "gpt2_untied", "gemma2", "opt_narrow", "bloom"])
def test_the_loss_is_that_of_the_model(name: str, saved: Any) -> None:
    torch = pytest.importorskip("torch")
    model, folder = saved(name)
    tokens = np.random.default_rng(2).integers(2, 50, size=(3, 10))
    mask = np.random.default_rng(3).random((3, 10)) < 0.5
    mask[:, 0] = False
    labels = torch.from_numpy(np.where(mask, tokens, -100))[:, 1:]
    with torch.no_grad():
        logits = copy.deepcopy(model).double()(torch.from_numpy(tokens)).logits[:, :-1]
        want = torch.nn.functional.cross_entropy(logits.mT, labels)  # -100: does not count
    got = loss(open_checkpoint(folder), tokens, mask)
    assert got == pytest.approx(float(want), rel=1e-6)
    if name.startswith("gpt2"):  # the others compute parts in single precision whatever their dtype
        assert_close(got, float(want), factor=1000)


@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_activations_are_those_of_transformers(name: str) -> None:
    torch = pytest.importorskip("torch")
    from transformers.activations import ACT2FN
    from transformers.models.bloom.modeling_bloom import bloom_gelu_forward

    x = np.concatenate([np.linspace(-12, 12, 97), [-800.0, 800.0]])
    theirs = bloom_gelu_forward if name == "gelu_bloom" else ACT2FN[name]
    np.testing.assert_allclose(ACTIVATIONS[name](x), theirs(torch.from_numpy(x)).numpy(), rtol=1e-9, atol=1e-15)


@pytest.mark.parametrize("cap", [None, 3.0])
def test_log_partitions_over_blocks_of_the_vocabulary(cap: float | None) -> None:
    rng = np.random.default_rng(0)
    unembed = Unembedding(Affine(rng.standard_normal((8, 9000)), 100 * rng.standard_normal(9000)), cap)
    x, tokens = rng.standard_normal((5, 8)), np.array([0, 4095, 4096, 8999, 17])
    chosen = np.take_along_axis(log_softmax(unembed(x)), tokens[:, None], axis=1)[:, 0]
    assert_close(unembed.logits_of(x, tokens) - unembed.log_partitions(x), chosen, factor=1e3)


def test_one_large_entry_beside_thousands_in_single_precision() -> None:
    """Rows of layers are in Fortran order, where numpy adds one by one: a large first term hides small ones."""
    rng = np.random.default_rng(0)
    logits, stream = rng.standard_normal((4, 4096)), rng.standard_normal((4, 4096))
    logits[:, 0], stream[:, 0] = 20, 5000
    single, double = (
        Unembedding(Affine(np.eye(4096, dtype=dtype), None), None).log_partitions(logits.astype(dtype))
        for dtype in (np.float32, np.float64)
    )
    assert np.abs(single - double).max() <= 2e-6
    one, other = (
        Norm(np.ones(4096, dtype), None, 1e-5)(np.asfortranarray(stream, dtype)) for dtype in (np.float32, np.float64)
    )
    assert single.dtype == one.dtype == np.float32
    assert np.abs(one / other - 1)[:, 0].max() <= 1e-6


@pytest.mark.parametrize("activation", ["relu", "gelu_pytorch_tanh"])
def test_the_activation_is_the_one_of_the_config(activation: str, tmp_path: Path) -> None:
    models = pytest.importorskip("transformers_models")
    models.quiet()
    config = models.BertConfig(**models.BERT_SIZES, hidden_act=activation, layer_norm_eps=0.1)
    torch = models.torch
    torch.manual_seed(0)
    model = models.BertModel(config).eval().double()
    model.save_pretrained(tmp_path)
    tokens = np.arange(12).reshape(2, 6)
    with torch.no_grad():
        want = model(torch.from_numpy(tokens)).last_hidden_state.numpy()
    assert_close(run(open_checkpoint(tmp_path), tokens).hidden, want, factor=1000)


def test_older_names_of_layer_norms_are_read(saved: Any, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(saved("bert")[1], tmp_path / "older"))

    def older(name: str) -> str:
        return name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")

    def rename(tensors: dict[str, np.ndarray]) -> None:
        for name in list(tensors):
            tensors[older(name)] = tensors.pop(name)

    change_tensors(folder, rename)
    tokens = np.arange(8)
    want = run(open_checkpoint(saved("bert")[1]), tokens).hidden
    np.testing.assert_array_equal(run(open_checkpoint(folder), tokens).hidden, want)


# ---------------------------------------------------------------------------------------------- the built-in model


def test_the_built_in_model_continues_repeated_segments(weights: Weights) -> None:
    tokens, repeated = repeated_segments(64, rng=np.random.default_rng(0))
    assert loss(weights, tokens, repeated) < 0.5
    elsewhere = ~repeated
    elsewhere[:, 0] = False
    assert loss(weights, tokens, elsewhere) > CHANCE - 0.1  # nothing predicts what is random


def test_the_built_in_architecture_written_out(weights: Weights) -> None:
    checkpoint = open_checkpoint(builtin_path())
    tokens = np.random.default_rng(0).integers(0, 128, size=20)
    x = checkpoint.read("embed.weight").astype(float)[tokens] + checkpoint.read("positions.weight")[:20]
    for n in range(2):
        q, k, v, o = (
            (checkpoint.read(f"layers.{n}.attention.{m}.weight"), checkpoint.read(f"layers.{n}.attention.{m}.bias"))
            for m in ("query", "key", "value", "output")
        )
        queries, keys, values = ((x @ w.T + b).reshape(20, 4, 16) for w, b in (q, k, v))
        scores = np.einsum("ihc,jhc->hij", queries, keys) / 4
        weight = np.exp(scores) * np.tril(np.ones((20, 20)))
        mixed = np.einsum("hij,jhc->ihc", weight / weight.sum(-1, keepdims=True), values)
        x = x + mixed.reshape(20, 64) @ o[0].T + o[1]
    logits = x @ checkpoint.read("unembed.weight").T + checkpoint.read("unembed.bias")
    got = run(weights, tokens)
    assert got.logits is not None
    assert_close(got.hidden[0], x, factor=1000)
    assert_close(got.logits[0], logits, factor=1000)


# --------------------------------------------------------------------------------------------------- what it gives


def test_shapes(weights: Weights) -> None:
    got = run(weights, np.zeros((3, 7), int))
    assert [a.shape for a in got.patterns] == [(3, 4, 7, 7)] * 2
    assert [a.shape for a in (*got.residuals, *got.inputs, *got.outputs)] == [(3, 7, 64)] * 7
    assert got.hidden.shape == (3, 7, 64)
    assert got.logits is not None
    assert got.logits.shape == (3, 7, 128)
    assert repr(got) == "Forward(2 layers, hidden (3, 7, 64), logits (3, 7, 128))"


def test_a_batch_is_its_sequences(weights: Weights) -> None:
    tokens = np.random.default_rng(0).integers(0, 128, size=(3, 11))
    together = run(weights, tokens)
    for i, sequence in enumerate(tokens):
        assert_close(run(weights, sequence).hidden[0], together.hidden[i], factor=1000)


def test_weights_are_read_once_for_many_batches(weights: Weights, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(np, "fromfile", None)
    tokens = np.arange(5, dtype=np.uint8)
    mask = np.arange(5) > 2
    with unchanged(tokens, mask):
        assert isinstance(run(weights, tokens), Forward)
        assert loss(weights, tokens, mask) > 0


# ------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        ([0, 128], ("between 0 and 127", "got 128")),
        ([0, -1], ("between 0 and 127", "got -1")),
        ([0.0, 1.0], ("integers", "float64")),
        ([True, False], ("integers", "bool")),
        ([], ("shape (0,)",)),
        (3, ("shape ()",)),
        (np.zeros((2, 0), int), ("shape (2, 0)",)),
        (np.zeros((1, 2, 3), int), ("shape (1, 2, 3)",)),
        (np.zeros(97, int), ("at most 96", "got 97")),
    ],
)
def test_impossible_tokens_are_refused(tokens: Any, words: tuple[str, ...], weights: Weights) -> None:
    with refused(ArgumentError, "run: tokens", *words):
        run(weights, tokens)
    with refused(ArgumentError, "loss: tokens", *words):
        loss(weights, tokens, [False, True])


def test_ragged_tokens_are_refused(weights: Weights) -> None:
    with refused(ArgumentTypeError, "run: tokens"):
        run(weights, [[1, 2], [3]])


@pytest.mark.parametrize(
    "mask", [[True, True, True], [False, False, False], [False, True], [0, 1, 1], [[False, True, True]] * 2]
)
def test_impossible_masks_are_refused(mask: Any, weights: Weights) -> None:
    with refused(ArgumentError, "loss: mask", "(1, 3)", "False at the first position"):
        loss(weights, [1, 2, 3], mask)


def test_a_loss_without_unembedding_is_refused(saved: Any) -> None:
    with refused(ArgumentError, "loss: model", "bert", "hidden states"):
        loss(open_checkpoint(saved("bert")[1]), [1, 2, 3], [False, True, True])


def spoiled(saved: Any, name: str, to: Path, **config: Any) -> Path:
    folder = Path(shutil.copytree(saved(name)[1], to / name))
    change_config(folder, **config)
    return folder


def test_an_unknown_activation_is_refused(saved: Any, tmp_path: Path) -> None:
    folder = spoiled(saved, "bert", tmp_path, hidden_act="mish")
    with refused(ArgumentError, "read_weights", "hidden_act", "gelu_new", "'mish'"):
        read_weights(open_checkpoint(folder))
    change_config(folder, hidden_act={"gelu": 1})
    with refused(FileFormatError, "open_checkpoint: hidden_act", "a string", "{'gelu': 1}"):
        open_checkpoint(folder)


def test_missing_and_spoiled_tensors_are_refused_by_name(saved: Any, tmp_path: Path) -> None:
    folder = spoiled(saved, "gpt2_lm", tmp_path)
    name = "transformer.h.1.mlp.c_fc.weight"
    change_tensors(folder, lambda t: t.update({name: t[name] * np.nan}))
    with refused(FileFormatError, repr(name), "nan"):
        read_weights(open_checkpoint(folder))
    change_tensors(folder, lambda t: t.pop(name))
    with refused(FileFormatError, repr(name)):
        read_weights(open_checkpoint(folder))
    folder = spoiled(saved, "falcon_new", tmp_path)
    change_tensors(folder, lambda tensors: tensors.pop("transformer.h.1.ln_attn.weight"))
    with refused(FileFormatError, "h.1.input_layernorm.weight"):
        read_weights(open_checkpoint(folder))


def test_what_a_tokenizer_returns_is_read_and_so_is_text(llama: Any) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(llama.folder.path)
    both = tokenizer(["The list is sorted.", "The file is"], padding=False)
    one = tokenizer("The list is sorted.")
    want = run(llama, one["input_ids"]).hidden
    assert np.array_equal(run(llama, one).hidden, want)
    assert np.array_equal(run(llama, tokenizer("The list is sorted.", return_tensors="np")).hidden, want)
    assert np.array_equal(run(llama, "The list is sorted.").hidden, want)
    without = open_checkpoint(builtin_path())  # has no tokenizer
    with refused(TypeError, "run: tokens must be token numbers", "'some text'", 'tokenizer(text)["input_ids"]'):
        run(without, "some text")
    rows = [ids + [0] * (8 - len(ids)) for ids in both["input_ids"]]
    masked = {"input_ids": rows, "attention_mask": [[int(k < len(ids)) for k in range(8)] for ids in both["input_ids"]]}
    with refused(ValueError, "without padding"):
        run(llama, masked)  # type: ignore[arg-type]
