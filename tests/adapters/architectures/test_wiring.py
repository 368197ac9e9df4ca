"""The wiring of a model: every tensor in one role, for every architecture, in folders and in loaded models."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoint_folders import change_config, change_tensors
from oracles import refused
from tnlib_adapters import builtin_path, open_checkpoint
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
    folder = Path(str(saved("llama_tied")[1]))
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    change_tensors(tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"]}))
    unembedding = open_checkpoint(tmp_path).wiring.unembedding
    assert unembedding is not None
    assert unembedding.tied
    assert not unembedding.shared
    change_config(tmp_path, tie_word_embeddings=False)
    unembedding = open_checkpoint(tmp_path).wiring.unembedding
    assert unembedding is not None
    assert not unembedding.tied


def test_models_without_a_head_have_no_unembedding(saved: Any) -> None:
    for name in ("bert", "llama_base", "vit"):
        wiring = open_checkpoint(saved(name)[1]).wiring
        assert wiring.unembedding is None
        assert wiring.final_norm is None or wiring.final_norm.place == "final"


def test_norms(saved: Any) -> None:
    def first(name: str) -> Any:
        return open_checkpoint(saved(name)[1]).wiring.layers[0]

    gemma, qwen, bert = first("gemma3"), first("qwen3"), first("bert")
    assert {norm.offset for norm in (gemma.attention.norm, *gemma.attention.head_norms)} == {1.0}
    assert {norm.offset for norm in (qwen.attention.norm, *qwen.attention.head_norms)} == {0.0}
    assert (gemma.attention.norm.kind, gemma.attention.norm.place, gemma.attention.output_norm.place) == (
        *("rms", "pre", "output"),
    )
    assert (bert.attention.norm.kind, bert.attention.norm.place) == ("layer", "post")
    assert bert.attention.pre_norm is None

    one, two = first("falcon_new_one_norm"), first("falcon_new")
    assert one.attention.norm == one.feed_forward.norm
    assert two.attention.norm.name.endswith("ln_attn")
    assert two.feed_forward.norm.name.endswith("ln_mlp")


def test_fused_and_parallel_feed_forward_layers(saved: Any) -> None:
    phi3 = open_checkpoint(saved("phi3")[1]).wiring.layers[0]
    assert phi3.feed_forward is not None
    assert phi3.feed_forward.gate == phi3.feed_forward.up
    assert len(phi3.feed_forward.matrices) == 2
    assert not phi3.parallel
    assert open_checkpoint(saved("gptj")[1]).wiring.layers[0].parallel


def test_experts(saved: Any, tmp_path: Path) -> None:
    dense, sparse = open_checkpoint(saved("qwen3_moe_normalised")[1]).wiring.layers
    assert dense.experts is None
    assert dense.feed_forward_layers == (dense.feed_forward,)
    assert sparse.feed_forward is None
    assert sparse.experts is not None
    assert sparse.experts.routing.normalised
    assert (len(sparse.feed_forward_layers), sparse.experts.n_chosen) == (5, 3)
    other = open_checkpoint(saved("qwen3_moe")[1]).wiring.layers[0].experts
    assert other is not None
    assert not other.routing.normalised
    folder = Path(str(saved("mixtral")[1]))
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    for wrong in ({"num_experts_per_tok": 6}, {"num_local_experts": 10**9}, {"num_local_experts": "5"}):
        change_config(tmp_path, num_local_experts=5, num_experts_per_tok=2)
        change_config(tmp_path, **wrong)
        with refused(FileFormatError, "open_checkpoint", "num_local_experts", str(*wrong.values())):
            open_checkpoint(tmp_path)


def test_routing_in_groups(saved: Any, tmp_path: Path) -> None:
    dense, sparse = open_checkpoint(saved("deepseek_v3_experts")[1]).wiring.layers
    assert dense.experts is None
    assert sparse.experts is not None
    assert sparse.experts.shared is not None
    assert sparse.experts.correction == "model.layers.1.mlp.gate.e_score_correction_bias"
    routing = sparse.experts.routing
    assert (routing.scores, routing.n_groups, routing.n_chosen_groups, routing.n_best) == ("sigmoid", 3, 2, 2)
    assert (routing.factor, routing.normalised, sparse.experts.n_chosen) == (1.7, True, 4)
    plain = open_checkpoint(saved("deepseek_v2_experts")[1]).wiring.layers[0].experts
    assert plain is not None
    assert (plain.routing.scores, plain.routing.n_groups, plain.routing.normalised) == ("softmax", 1, False)
    assert plain.correction is None
    folder = Path(str(saved("deepseek_v3_experts")[1]))
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    for wrong, said in (
        ({"n_group": 4}, "2 of 4 groups"),  # of 9 experts
        ({"n_group": 9}, "2 of 9 groups"),  # too small to rank by two experts
        ({"n_group": "3"}, "n_group in"),
        ({"topk_group": 4}, "4 of 3 groups"),
        ({"num_experts_per_tok": 7}, "enough to choose 7 from"),
        ({"routed_scaling_factor": 0.0}, "routed_scaling_factor in"),
        ({"scoring_func": "softmax"}, "scoring_func of a deepseek_v3 must be 'sigmoid'"),
        ({"topk_method": "greedy"}, "topk_method of a deepseek_v3 must be 'noaux_tc'"),
    ):
        change_config(tmp_path, n_group=3, topk_group=2, num_experts_per_tok=4, routed_scaling_factor=1.7)
        change_config(tmp_path, scoring_func=..., topk_method=...)
        change_config(tmp_path, **wrong)
        with refused(FileFormatError, "open_checkpoint", said):
            open_checkpoint(tmp_path)


def test_latent_vectors(saved: Any, tmp_path: Path) -> None:
    direct, through = (open_checkpoint(saved(name)[1]).wiring for name in ("deepseek_v2_direct", "deepseek_v2"))
    latent = direct.layers[0].attention.latent
    assert latent is not None
    assert latent.query_down is None
    assert [linear.name.split(".")[-1] for linear in direct.layers[0].attention.inputs] == [
        *("q_proj", "kv_a_proj_with_mqa"),
    ]
    assert [linear.name.split(".")[-1] for linear in through.layers[1].attention.matrices] == [
        *("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"),
    ]
    assert (through.sizes.d_head, through.sizes.d_value) == (10, 5)
    folder = Path(str(saved("deepseek_v3")[1]))
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    for wrong, said in (
        ({"first_k_dense_replace": 1}, "n_routed_experts"),
        ({"attention_bias": True}, "variant is not known"),
        ({"kv_lora_rank": None}, "kv_lora_rank"),
        ({"v_head_dim": 0}, "v_head_dim"),
        ({"q_lora_rank": 3}, "q_b_proj.weight' must have shape (40, 3)"),
    ):
        change_config(tmp_path, first_k_dense_replace=2, attention_bias=False, kv_lora_rank=8, v_head_dim=5)
        change_config(tmp_path, **wrong)
        with refused(FileFormatError, "open_checkpoint", said):
            open_checkpoint(tmp_path)


def test_relative_biases(saved: Any, tmp_path: Path) -> None:
    wiring = open_checkpoint(saved("t5_encoder_gated")[1]).wiring
    biases = {layer.attention.relative_bias for layer in wiring.layers}
    assert len(biases) == 1  # of the first layer
    assert all(layer.feed_forward and layer.feed_forward.gate for layer in wiring.layers)
    folder = Path(str(saved("t5_encoder")[1]))
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    for wrong, said in (
        ({"is_encoder_decoder": True}, "'decoder.block.0.layer.0.SelfAttention.q.weight' of shape (24, 24) is missing"),
        ({"is_encoder_decoder": ...}, "'decoder.block.0.layer.0.SelfAttention.q.weight' of shape (24, 24) is missing"),
        ({"is_decoder": True}, "is_decoder of a t5 must be False"),
        ({"relative_attention_num_buckets": 14}, "multiple of 4"),
        ({"relative_attention_max_distance": 3}, "less than four times relative_attention_max_distance"),
        ({"relative_attention_num_buckets": 16}, "relative_attention_bias.weight' must have shape (16, 4)"),
    ):
        sizes = {"relative_attention_num_buckets": 12, "relative_attention_max_distance": 7}
        change_config(tmp_path, is_encoder_decoder=False, is_decoder=False, **sizes)
        change_config(tmp_path, **wrong)
        with refused(FileFormatError, "open_checkpoint", said):
            open_checkpoint(tmp_path)


def test_encoder_and_decoder(saved: Any, tmp_path: Path) -> None:
    wiring = open_checkpoint(saved("t5_untied")[1]).wiring
    assert wiring.encoder is not None
    assert (wiring.encoder.n_layers, wiring.sizes.n_layers) == (1, 5)
    assert [layer.attention.cross for layer in wiring.layers] == [False, False, True, False, True]
    assert [layer.attention.causal for layer in wiring.layers] == [False, True, False, True, False]
    assert [layer.feed_forward is None for layer in wiring.layers] == [False, True, False, True, False]
    crossed = wiring.layers[4].attention
    assert [linear.name.split(".", 3)[3] for linear in crossed.inputs] == ["layer.1.EncDecAttention.q"]
    assert [linear.name[-1] for linear in crossed.memory_inputs] == ["k", "v"]
    assert crossed.relative_bias is None
    tables = {bias.table.name.split(".")[0] for layer in wiring.layers if (bias := layer.attention.relative_bias)}
    assert tables == {"encoder", "decoder"}
    assert wiring.layers[2].feed_forward is not None
    assert wiring.layers[2].feed_forward.gate is not None
    assert (wiring.final_norm.name, wiring.encoder.final_norm.name) == (  # type: ignore[union-attr]
        *("decoder.final_layer_norm", "encoder.final_layer_norm"),
    )
    assert wiring.unembedding is not None
    assert (wiring.unembedding.linear.name, wiring.unembedding.scale) == ("lm_head", 1.0)
    tied = open_checkpoint(saved("t5")[1]).wiring.unembedding
    assert tied is not None
    assert (tied.linear.name, tied.scale) == ("shared", pytest.approx(24**-0.5))

    folder = Path(str(saved("t5")[1]))
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    change_config(tmp_path, num_decoder_layers=..., num_layers=1)  # as many as the encoder
    assert open_checkpoint(tmp_path).n_layers == 3
    for wrong, said in (
        ({"num_decoder_layers": "1"}, "num_decoder_layers"),
        ({"num_decoder_layers": 0}, "num_decoder_layers"),
        ({"num_decoder_layers": 2**16}, "config.json states more layers than there are"),
        ({"relative_attention_max_distance": 6}, "less than twice relative_attention_max_distance"),
    ):
        change_config(tmp_path, num_decoder_layers=1, relative_attention_max_distance=7)
        change_config(tmp_path, **wrong)
        with refused(FileFormatError, "open_checkpoint", said):
            open_checkpoint(tmp_path)


def test_the_built_in_model_is_attention_only(saved: Any) -> None:
    assert open_checkpoint(builtin_path()).wiring.is_attention_only
    assert not open_checkpoint(saved("gpt2")[1]).wiring.is_attention_only


def test_factors_of_a_matrix_that_the_model_has_not(tmp_path: Path) -> None:
    for file in builtin_path().iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    modules = {"mlp.up": {"kind": "low_rank", "shapes": {"left": [3, 1], "right": [1, 3]}}}
    section = {"quant_method": "tnlib", "version": 1, "method": "matrix", "layers": [[], []], "modules": modules}
    change_config(tmp_path, quantization_config=section)
    with refused(FileFormatError, "open_checkpoint", "'mlp.up'", "compress again"):
        open_checkpoint(tmp_path)
