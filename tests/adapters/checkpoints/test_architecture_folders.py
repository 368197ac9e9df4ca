"""Folders of all ages and their configs: read, refused where they do not fit, compressed where they can be."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attention_layers import same_layer
from checkpoint_folders import CONFIG, INDEX, change_config, change_tensors
from oracles import assert_close, refused
from tnlib_adapters import Attention, Budget, open_checkpoint

from tnlib import ArgumentError, FileFormatError

pytest.importorskip("torch")
models = pytest.importorskip("architecture_models")


# ------------------------------------------------------------------------------------------------ folders of all ages


@pytest.mark.parametrize("name", ["bert_masked", "gpt2_lm", "llama", "gpt_neox", "falcon_new", "gemma2", "vit"])
@pytest.mark.parametrize(("dtype", "sharded"), [("bfloat16", False), ("float16", True), ("float32", True)])
def test_half_precision_and_shards_are_read(name: str, dtype: str, sharded: bool, tmp_path: Path) -> None:
    import torch
    from transformers_models import random_model

    model = random_model(name).to(getattr(torch, dtype))
    model.save_pretrained(tmp_path, max_shard_size="5KB" if sharded else "1GB")
    assert (tmp_path / INDEX).exists() == sharded
    checkpoint = open_checkpoint(tmp_path)
    for layer in range(checkpoint.n_layers):
        same_layer(checkpoint.attention(layer), Attention.from_module(model, layer))


# What transformers 4 wrote in the place of rope_parameters.
OLDER: dict[str, dict[str, Any]] = {
    "llama": {"rope_theta": 10000.0, "rope_scaling": None},
    "llama_linear": {"rope_theta": 100.0, "rope_scaling": {"type": "linear", "factor": 3.0}},
    "llama_yarn": {"rope_theta": 100.0, "rope_scaling": {"rope_type": "yarn", **models.YARN}},
    "llama_3": {
        "rope_theta": 100.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    },
    "gpt_neox": {"rotary_emb_base": 100, "rotary_pct": 0.5},
    "gpt_neox_sequential": {},
    "phi": {"rope_theta": 100.0, "partial_rotary_factor": 0.5, "rope_scaling": None},
    "phi3_longrope": {
        "rope_theta": 100.0,
        "partial_rotary_factor": 0.5,
        "rope_scaling": {"type": "su", "short_factor": [1.0, 1.3], "long_factor": [2.0, 5.0]},
    },
    "falcon": {},
    "gemma": {"rope_theta": 10000.0},
    "gemma3": {
        "rope_theta": 100.0,
        "rope_scaling": {"rope_type": "linear", "factor": 2.0},
        "rope_local_base_freq": 50.0,
        "sliding_window_pattern": 2,
        "layer_types": ...,
    },
    "qwen2_window": {"rope_theta": 10000.0, "layer_types": ...},
    "qwen3": {"rope_theta": 10000.0, "layer_types": ...},
    "qwen3_moe": {"rope_theta": 10000.0, "num_local_experts": ..., "num_experts": 5},
    "mixtral": {"rope_theta": 1e6},
    "deepseek_v3": {
        "rope_theta": 100.0,
        "rope_scaling": {"type": "yarn", "mscale": 0.8, "mscale_all_dim": 0.6, **models.YARN},
    },
    "starcoder2": {"rope_theta": 10000.0},
    "bloom": {"n_head": ..., "num_attention_heads": 4, "hidden_size": ..., "n_embed": 24},
}


@pytest.mark.parametrize("name", sorted(OLDER))
def test_names_of_older_configs_are_read(name: str, saved: Any, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(saved(name)[1], tmp_path / "older"))
    change_config(folder, rope_parameters=..., head_dim=open_checkpoint(folder).sizes.d_head, **OLDER[name])
    assert "rope_parameters" not in json.loads((folder / CONFIG).read_text())
    for layer in (0, 1):
        same_layer(open_checkpoint(folder).attention(layer), open_checkpoint(saved(name)[1]).attention(layer))


@pytest.mark.parametrize(
    ("name", "values", "words"),
    [
        ("llama", {"rope_parameters": {"rope_type": "mrope"}}, ("rope_type", "llama3", "yarn", "'mrope'")),
        ("gemma2", {"rope_parameters": {"full_attention": {"rope_theta": 100.0}}}, ("'full_attention'", "all layers")),
        ("llama", {"rope_parameters": ["x"]}, ("rope_parameters", "an object", "['x']")),
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": "x"}}, ("factor", "'x'")),
        ("llama", {"rope_parameters": {"rope_type": "llama3", "factor": 2.0}}, ("low_freq_factor", "found none")),
        ("llama", {"rope_parameters": {"rope_type": "longrope", "long_factor": [1.0]}}, ("short_factor", "3 numbers")),
        ("llama", {"rope_parameters": {"partial_rotary_factor": 0.5}}, ("even number", "got 3")),
        ("gptj", {"rotary_dim": None}, ("rotary_dim", "got None")),
        ("gptj", {"rotary_dim": 10}, ("even number of at most 8", "got 10")),
        ("llama", {"num_key_value_heads": 3}, ("multiple of the count of key and value heads", "4 and 3")),
        ("llama", {"num_key_value_heads": 0}, ("num_key_value_heads", "integer from 1", "got 0")),
        ("llama", {"num_key_value_heads": 4}, ("layers.0.self_attn.k_proj.weight", "(24, 24)", "(12, 24)")),
        ("llama", {"head_dim": 8}, ("layers.0.self_attn.q_proj.weight", "(32, 24)", "(24, 24)")),
        ("qwen3", {"head_dim": "x"}, ("head_dim", "'x'")),
        ("phi", {"qk_layernorm": True}, ("qk_layernorm", "True")),
        ("bloom", {"apply_residual_connection_post_layernorm": True}, ("apply_residual", "True")),
        ("bert", {"position_embedding_type": "relative_key_query"}, ("position_embedding_type", "relative_key_query")),
        ("bert", {"is_decoder": True}, ("is_decoder", "True")),
        ("gpt2", {"add_cross_attention": True}, ("add_cross_attention", "True")),
    ],
)
def test_configs_that_do_not_fit_are_refused(
    name: str, values: dict[str, Any], words: tuple[str, ...], saved: Any, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(saved(name)[1], tmp_path / "changed"))
    change_config(folder, **values)
    with refused(FileFormatError, "open_checkpoint: ", *words):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("phi3", "model.layers.1.self_attn.qkv_proj.weight"),
        ("qwen3", "model.layers.0.self_attn.k_norm.weight"),
        ("bloom", "transformer.h.0.self_attention.dense.weight"),
    ],
)
def test_missing_tensors_are_named(name: str, tensor: str, saved: Any, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(saved(name)[1], tmp_path / "changed"))
    change_tensors(folder, lambda tensors: tensors.pop(tensor))
    with refused(FileFormatError, "open_checkpoint: ", repr(tensor), "missing"):
        open_checkpoint(folder)


def test_null_is_an_answer_where_a_missing_key_is_none(saved: Any, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(saved("gemma2")[1], tmp_path / "changed"))
    keys = ("attn_logit_softcapping", "query_pre_attn_scalar", "layer_types", "sliding_window")
    change_config(folder, **dict.fromkeys(keys, ...))
    layer = open_checkpoint(folder).attention(0)
    assert (layer.softcap, layer.scale, layer.window) == (50.0, 1 / 16, 4096)
    assert open_checkpoint(folder).attention(1).window is None
    change_config(folder, attn_logit_softcapping=None)
    assert open_checkpoint(folder).attention(0).softcap is None

    folder = Path(shutil.copytree(saved("mistral_whole")[1], tmp_path / "mistral"))
    assert open_checkpoint(folder).attention(0).window is None
    change_config(folder, sliding_window=...)
    assert open_checkpoint(folder).attention(0).window == 4096


# ------------------------------------------------------------------------------------------------------ compression


@pytest.mark.parametrize("name", ["opt", "opt_after", "roberta"])
def test_what_has_learned_positions_is_compressed_and_reloaded(
    name: str, saved: Any, recorded: Any, tmp_path: Path, without_pictures: None
) -> None:
    pytest.importorskip("tnlib_adapters.transformers_plugin")
    from tnlib_adapters import compress
    from transformers_models import record

    model, folder = saved(name)
    compress(folder, tmp_path / "out", Budget(keep=1.0), what="attention")
    loaded = type(model).from_pretrained(tmp_path / "out", attn_implementation="eager").eval()
    want, got = recorded(name), record(loaded, recorded(name).tokens)
    assert_close(got.hidden, want.hidden, np.float32, factor=256)


def test_images_are_not_calibrated_on_text(saved: Any, tmp_path: Path) -> None:
    from tnlib_adapters import compress

    _, folder = saved("vit")
    (tmp_path / "text").write_text("one two three\n" * 50)
    with refused(ArgumentError, "compress: IN must read text, got a vit", "reads images"):
        compress(folder, tmp_path / "out", Budget(keep=0.5), calibration=tmp_path / "text", what="attention")
    assert not (tmp_path / "out").exists()
