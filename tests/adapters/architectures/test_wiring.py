"""The wiring of a model: every tensor in one role, for every architecture, in folders and in loaded models."""

from __future__ import annotations

import dataclasses
import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoint_folders import change_config, change_tensors
from oracles import refused
from tnlib_adapters import builtin_path, open_checkpoint
from tnlib_adapters.architectures.table import ARCHITECTURES
from tnlib_adapters.architectures.wiring import ExpertsWiring, Linear, NormWiring
from tnlib_adapters.attention.layer_arguments import wire_model
from tnlib_adapters.checkpoints.residual_stream import read_stream

from tnlib import FileFormatError

pytest.importorskip("torch")
models = pytest.importorskip("transformers_models")
LANGUAGE_MODELS = [name for name in models.MODELS if name not in ("bert", "bert_masked", "roberta", "vit")]


def tensors_of(part: Any) -> Iterator[str]:
    """Tensor names in a part of a wiring."""
    if isinstance(part, Linear | NormWiring):
        yield from (name for name in (part.weight, part.bias) if name)
    elif dataclasses.is_dataclass(part) and not isinstance(part, type):
        if hasattr(part, "class_token"):
            yield from (name for name in (part.positions, part.segments, part.class_token) if name)
        if isinstance(part, ExpertsWiring) and part.correction:
            yield part.correction
        for field in dataclasses.fields(part):
            yield from tensors_of(getattr(part, field.name))
    elif isinstance(part, tuple):
        for one in part:
            yield from tensors_of(one)
    elif isinstance(part, dict):
        yield from tensors_of(tuple(part.values()))


@pytest.mark.parametrize("name", LANGUAGE_MODELS)
def test_every_tensor_has_a_role(name: str, saved: Any) -> None:
    checkpoint = open_checkpoint(saved(name)[1])
    assert set(tensors_of(checkpoint.wiring)) == checkpoint.folder.tensors.keys()
    assert read_stream(checkpoint).unknown == ()


@pytest.mark.parametrize("name", ["bert", "vit"])
def test_heads_of_encoders_have_no_role(name: str, saved: Any) -> None:
    checkpoint = open_checkpoint(saved(name)[1])
    others = checkpoint.folder.tensors.keys() - set(tensors_of(checkpoint.wiring))
    assert {other.split(".")[0] for other in others} == {"pooler"}
    assert set(read_stream(checkpoint).unknown) == others


@pytest.mark.parametrize(("name", "of_a_layer"), [("gpt2_lm", 2), ("llama", 3), ("phi3", 2), ("mixtral", 0)])
def test_matrices_outside_the_attention(name: str, of_a_layer: int, saved: Any) -> None:
    checkpoint = open_checkpoint(saved(name)[1])
    wiring = checkpoint.wiring
    assert [len(layer.feed_forward_matrices) for layer in wiring.layers] == [of_a_layer] * checkpoint.n_layers
    *matrices, table = [name for name in wiring.matrices if not wiring.is_unembedding(name)]
    assert len(matrices) == of_a_layer * checkpoint.n_layers
    assert wiring.is_embedding(table)
    assert not any(wiring.is_embedding(name) for name in matrices)
    head = [] if name == "gpt2_lm" else ["lm_head"]  # that of GPT-2 is its embedding
    assert [*wiring.matrices] == [*matrices, table, *head]
    assert wiring.tied_key == ("wte.unembedding" if name == "gpt2_lm" else None)


@pytest.mark.parametrize("name", ["gpt2_lm", "llama", "bert", "vit", "opt_narrow", "gemma3"])
def test_a_loaded_model_is_wired_as_its_folder(name: str, saved: Any) -> None:
    model, folder = saved(name)
    stored, loaded = open_checkpoint(folder), wire_model(model, "test")
    parameters = dict(model.named_parameters())
    assert set(tensors_of(loaded)) <= parameters.keys()
    assert len([*tensors_of(loaded)]) == len([*tensors_of(stored.wiring)])
    for a, b in zip(tensors_of(loaded), tensors_of(stored.wiring), strict=True):
        assert tuple(parameters[a].shape) == stored.folder.tensors[b].shape


@pytest.mark.parametrize(
    ("name", "tied", "shared"),
    [("gpt2_lm", True, True), ("gpt2_untied", False, False), ("llama", False, False), ("llama_tied", True, True)],
)
def test_tied_embeddings(name: str, tied: bool, shared: bool, saved: Any) -> None:
    unembedding = open_checkpoint(saved(name)[1]).wiring.unembedding
    assert unembedding is not None
    assert (unembedding.tied, unembedding.shared) == (tied, shared)


def test_a_stored_copy_of_tied_embeddings(saved: Any, tmp_path: Path) -> None:
    folder = shutil.copytree(saved("llama_tied")[1], tmp_path / "copy")
    change_tensors(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"]}))
    unembedding = open_checkpoint(folder).wiring.unembedding
    assert unembedding is not None
    assert unembedding.tied
    assert not unembedding.shared
    change_config(folder, tie_word_embeddings=False)
    unembedding = open_checkpoint(folder).wiring.unembedding
    assert unembedding is not None
    assert not unembedding.tied


def test_models_without_a_head_have_no_unembedding(saved: Any) -> None:
    for name in ("bert", "llama_base", "vit"):
        wiring = open_checkpoint(saved(name)[1]).wiring
        assert wiring.unembedding is None
        assert wiring.final_norm is None or wiring.final_norm.place == "final"


# name of a model: the config that it is saved with, and configs that are refused with these words
REFUSED: dict[str, tuple[dict[str, Any], list[tuple[dict[str, Any], str]]]] = {
    "mixtral": (
        {"num_local_experts": 5, "num_experts_per_tok": 2},
        [
            ({"num_experts_per_tok": 6}, "num_local_experts"),
            ({"num_local_experts": 10**9}, "num_local_experts"),
            ({"num_local_experts": "5"}, "num_local_experts"),
        ],
    ),
    "deepseek_v3_experts": (
        {"n_group": 3, "topk_group": 2, "num_experts_per_tok": 4, "routed_scaling_factor": 1.7}
        | {"scoring_func": ..., "topk_method": ...},
        [
            ({"n_group": 4}, "2 of 4 groups"),  # of 9 experts
            ({"n_group": 9}, "2 of 9 groups"),  # too small to rank by two experts
            ({"n_group": "3"}, "n_group in"),
            ({"topk_group": 4}, "4 of 3 groups"),
            ({"num_experts_per_tok": 7}, "enough to choose 7 from"),
            ({"routed_scaling_factor": 0.0}, "routed_scaling_factor in"),
            ({"scoring_func": "softmax"}, "scoring_func of a deepseek_v3 must be 'sigmoid'"),
            ({"topk_method": "greedy"}, "topk_method of a deepseek_v3 must be 'noaux_tc'"),
        ],
    ),
    "deepseek_v3": (
        {"first_k_dense_replace": 2, "attention_bias": False, "kv_lora_rank": 8, "v_head_dim": 5},
        [
            ({"first_k_dense_replace": 1}, "n_routed_experts"),
            ({"attention_bias": True}, "variant is not known"),
            ({"kv_lora_rank": None}, "kv_lora_rank"),
            ({"v_head_dim": 0}, "v_head_dim"),
            ({"q_lora_rank": 3}, "q_b_proj.weight' must have shape (40, 3)"),
        ],
    ),
    "t5_encoder": (
        {"is_encoder_decoder": False, "is_decoder": False}
        | {"relative_attention_num_buckets": 12, "relative_attention_max_distance": 7},
        [
            (
                {"is_encoder_decoder": True},
                "'decoder.block.0.layer.0.SelfAttention.q.weight' of shape (24, 24) is missing",
            ),
            (
                {"is_encoder_decoder": ...},
                "'decoder.block.0.layer.0.SelfAttention.q.weight' of shape (24, 24) is missing",
            ),
            ({"is_decoder": True}, "is_decoder of a t5 must be False"),
            ({"relative_attention_num_buckets": 14}, "multiple of 4"),
            ({"relative_attention_max_distance": 3}, "less than four times relative_attention_max_distance"),
            ({"relative_attention_num_buckets": 16}, "relative_attention_bias.weight' must have shape (16, 4)"),
        ],
    ),
    "t5": (
        {"num_decoder_layers": 1, "num_layers": 1, "relative_attention_max_distance": 7},
        [
            ({"num_decoder_layers": "1"}, "num_decoder_layers"),
            ({"num_decoder_layers": 0}, "num_decoder_layers"),
            ({"num_decoder_layers": 2**16}, "config.json states more layers than there are"),
            ({"relative_attention_max_distance": 6}, "less than twice relative_attention_max_distance"),
        ],
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_configs_that_contradict_themselves_or_the_tensors_are_refused(name: str, saved: Any, tmp_path: Path) -> None:
    folder, (config, wrong_configs) = shutil.copytree(saved(name)[1], tmp_path / name), REFUSED[name]
    for wrong, said in wrong_configs:
        change_config(folder, **config)
        change_config(folder, **wrong)
        with refused(FileFormatError, "open_checkpoint", said):
            open_checkpoint(folder)


def test_a_decoder_has_as_many_layers_as_its_encoder_unless_stated(saved: Any, tmp_path: Path) -> None:
    folder = shutil.copytree(saved("t5")[1], tmp_path / "t5")
    change_config(folder, num_decoder_layers=..., num_layers=1)
    assert open_checkpoint(folder).n_layers == 3  # two of them in the block of the decoder


def test_the_built_in_model_is_attention_only(saved: Any) -> None:
    assert open_checkpoint(builtin_path()).wiring.is_attention_only
    assert not open_checkpoint(saved("gpt2")[1]).wiring.is_attention_only


def test_factors_of_a_matrix_that_the_model_has_not(tmp_path: Path) -> None:
    folder = shutil.copytree(builtin_path(), tmp_path / "copy")
    modules = {"mlp.up": {"kind": "low_rank", "shapes": {"left": [3, 1], "right": [1, 3]}}}
    section = {"quant_method": "tnlib", "version": 1, "method": "matrix", "layers": [[], []], "modules": modules}
    change_config(folder, quantization_config=section)
    with refused(FileFormatError, "open_checkpoint", "'mlp.up'", "compress again"):
        open_checkpoint(folder)


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_an_architecture_can_be_sent_to_another_process(model_type: str) -> None:
    row = ARCHITECTURES[model_type]
    assert repr(pickle.loads(pickle.dumps(row))) == repr(row)  # partial functions compare by identity
