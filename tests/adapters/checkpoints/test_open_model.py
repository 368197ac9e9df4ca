"""Models in memory as checkpoints: the same tensors and results as from their folder, without a copy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tnlib_adapters
from oracles import refused
from slow_cases import mostly_slow
from tnlib_adapters import Checkpoint, builtin_path, circuits, freeze, open_checkpoint, open_model
from tnlib_adapters.checkpoints import weight_stacks
from tnlib_adapters.reference.model import run
from tnlib_adapters.reference.weights import read_weights

models = pytest.importorskip("transformers_models")
torch = pytest.importorskip("torch")

# names that differ in files: modules of ViT, experts of Mixtral and DeepSeek, two stacks, the unembedding of GPT-NeoX
FEW = ["gpt2_lm", "llama", "vit", "mixtral", "deepseek_v3_experts", "t5", "gpt_neox", "gemma2", "bert"]


@pytest.fixture(scope="module")
def llama() -> tuple[Any, Checkpoint]:
    """The built-in language model, in memory and from its folder."""
    folder = builtin_path("llama")
    model = models.transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval(), open_checkpoint(folder)


@pytest.mark.parametrize("name", mostly_slow(sorted(models.MODELS), FEW))
def test_a_model_is_its_folder(name: str, saved: Any) -> None:
    model, folder = saved(name)
    x = models.inputs(model)
    y = models.decoder_inputs(model, x)
    got, want = (run(checkpoint, x, y) for checkpoint in (open_model(model), open_checkpoint(folder)))
    assert np.array_equal(got.hidden, want.hidden)
    assert got.logits is None or np.array_equal(got.logits, want.logits)
    in_memory, in_file = (set(c.folder.tensors) for c in (open_model(model), open_checkpoint(folder)))
    assert in_memory - {"lm_head.weight"} == in_file - {"embed_out.weight", "lm_head.weight"}


def test_weights_are_not_copied(llama: Any) -> None:
    model, _ = llama
    checkpoint = open_model(model)
    name = "model.layers.1.mlp.up_proj.weight"
    stored = checkpoint.read(name)
    assert np.shares_memory(stored, model.get_parameter(name).detach().numpy())
    assert not stored.flags.writeable
    weights = read_weights(model, dtype=np.float32)
    assert np.shares_memory(weights.blocks[3].branches[0].layer.up.weight, stored)
    assert checkpoint.config["hidden_size"] == 128
    assert repr(checkpoint).startswith("Checkpoint(llama, 4 layers, 8 heads of 16 on 2 key and value heads")


def test_half_precision_and_one_head(llama: Any) -> None:
    model, _ = llama
    half = models.transformers.AutoModelForCausalLM.from_pretrained(builtin_path("llama"), dtype=torch.bfloat16)
    got, want = open_model(half), half.get_parameter("model.layers.0.self_attn.q_proj.weight")
    assert np.array_equal(got.read("model.layers.0.self_attn.q_proj.weight"), want.detach().float().numpy())
    head = open_model(model).head(2, 5)
    assert np.array_equal(head.W_Q[0], open_model(model).attention(2).W_Q[5])


TOKENS = [5, 6, 7, 8, 5, 6]
FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "run": lambda m: run(m, TOKENS).hidden,
    "freeze": lambda m: freeze(m, TOKENS).stream,
    "qk_attributions": lambda m: circuits.qk_attributions(m, TOKENS).head(2, 1).pairs,
    "split_stream": lambda m: circuits.split_stream(m, TOKENS).arrays,
    "compositions": lambda m: circuits.compositions(m, "V").scores,
    "subspace_overlaps": lambda m: circuits.subspace_overlaps(m, "O", "V").overlaps,
    "repeat_scores": lambda m: circuits.repeat_scores(m, length=8).previous,
    "weight_scores": lambda m: circuits.weight_scores(m).previous,
    "copying_scores": lambda m: circuits.copying_scores(m).first_layer,
    "bigrams": lambda m: circuits.bigrams(m, k=1).successors,
    "fold": lambda m: tnlib_adapters.fold(m).checkpoint.attention(1).W_Q,
    "heads": lambda m: weight_stacks.heads(m, "V").array,
    "norm_divisors": lambda m: tnlib_adapters.norm_divisors(m, np.ones((3, 128))),
    "keyword": lambda m: read_weights(checkpoint=m).blocks[0].branches[0].layer.W_Q,
}


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
def test_functions_of_checkpoints_take_models(name: str, llama: Any) -> None:
    got, want = (np.asarray(FUNCTIONS[name](model)) for model in llama)
    assert np.array_equal(got, want, equal_nan=got.dtype.kind == "f")


def test_a_model_is_saved(llama: Any, tmp_path: Path) -> None:
    model, checkpoint = llama
    tnlib_adapters.save_checkpoint(model, tmp_path / "out")
    reloaded = models.transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, reloaded.get_parameter(name))
    assert (tmp_path / "out" / "tokenizer.json").exists() == (checkpoint.folder.path / "tokenizer.json").exists()


def test_wrapped_models(llama: Any) -> None:
    """nnsight's, and TransformerLens' bridge, whose modules stand around those of transformers."""
    model, _ = llama
    for module, attribute in (("nnsight.modeling", "_module"), ("transformer_lens.model_bridge", "original_model")):
        wrapper = type("Wrapper", (), {"__module__": module})()
        setattr(wrapper, attribute, model)
        assert np.array_equal(run(wrapper, TOKENS).hidden, run(model, TOKENS).hidden)
    wrapper._weights_processed = True
    with refused(ValueError, "open_model: weights of model must be those of transformers", "enable_compatibility_mode"):
        open_model(wrapper)


def test_compiled_models(llama: Any) -> None:
    """The module that torch.compile returns, without the compiler, whose import warns."""
    model, _ = llama
    compiled = type("OptimizedModule", (torch.nn.Module,), {"__module__": "torch._dynamo.eval_frame"})()
    compiled._orig_mod, compiled.config = model, model.config
    assert np.array_equal(run(compiled, TOKENS).hidden, run(model, TOKENS).hidden)


@pytest.mark.parametrize(("before", "after"), [("bfloat16", "float16"), ("float32", "bfloat16")])
def test_a_dtype_changed_after_opening_is_refused(before: str, after: str) -> None:
    """The bits of a number would be read as those of another dtype."""
    model = models.transformers.AutoModelForCausalLM.from_pretrained(
        builtin_path("llama"), dtype=getattr(torch, before)
    )
    checkpoint = open_model(model)
    model.to(getattr(torch, after))
    with refused(ValueError, "open_model: parameter", "open the model again"):
        run(checkpoint, TOKENS)
    assert np.isfinite(run(model, TOKENS).hidden).all()


def test_nnsight(llama: Any) -> None:
    nnsight = pytest.importorskip("nnsight")
    assert open_model(nnsight.NNsight(llama[0])).n_layers == 4


def test_other_objects_are_refused(llama: Any) -> None:
    for other in (None, "path", torch.nn.Linear(2, 2), np.eye(2)):
        with refused(TypeError, "open_model: model must be a model of transformers", type(other).__name__):
            open_model(other)
    with refused(TypeError, "freeze: checkpoint must be a Checkpoint or a transformers model"):
        freeze(torch.nn.Linear(2, 2), [1, 2])  # type: ignore[call-overload]
    with torch.device("meta"):
        empty = models.transformers.AutoModelForCausalLM.from_config(llama[0].config)
    with refused(ValueError, "open_model: parameter", "must hold floating-point numbers", "meta"):
        open_model(empty)


@pytest.mark.parametrize("name", ["gpt2_lm", "gpt_neox"])
def test_transformer_lens(name: str, saved: Any) -> None:
    bridges = pytest.importorskip("transformer_lens.model_bridge")
    folder = saved(name)[1]
    model = type(saved(name)[0]).from_pretrained(folder)
    want = run(model, TOKENS).hidden
    bridge = bridges.TransformerBridge.boot_transformers(str(folder), hf_model=model, load_weights=False)
    assert np.array_equal(run(bridge, TOKENS).hidden, want)
