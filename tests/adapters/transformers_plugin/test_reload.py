"""Factored folders in transformers, factors kept: the function, the gradients and the files of the dense model."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from compressed_folders import attention_tensors, few_steps, leave_out_pictures, read_config, read_tensors
from oracles import assert_close, refused
from slow_cases import mostly_slow

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("tnlib_adapters.transformers_plugin")

from compressed_folders import by_options  # noqa: E402
from tnlib_adapters import Budget, compress, open_checkpoint  # noqa: E402
from tnlib_adapters.transformers_plugin import FactoredLinear  # noqa: E402
from transformers_models import made_up_text, quiet, random_model, save_with_tokenizer  # noqa: E402  # noqa: E402

from tnlib import FileFormatError  # noqa: E402

CLASSES = {
    "bert_masked": "BertForMaskedLM",
    "gpt2_lm": "GPT2LMHeadModel",
    "opt": "OPTForCausalLM",
    "roberta": "RobertaForMaskedLM",
}
METHODS = ["heads", "matrix", "ttm", "tucker", "cp", "calibrated"]
CASES = [
    *(("bert_masked", method) for method in ("heads", "matrix", "ttm", "calibrated")),
    *(("gpt2_lm", method) for method in METHODS),
    ("opt", "heads"),
    ("opt", "calibrated"),
    ("roberta", "tucker"),
    ("roberta", "calibrated"),
]
each_case = pytest.mark.parametrize(("model", "method"), mostly_slow(CASES, CASES[::3]))
ONE_OF_EACH = [("gpt2_lm", "heads"), ("bert_masked", "matrix"), ("gpt2_lm", "tucker"), ("bert_masked", "calibrated")]
one_of_each = pytest.mark.parametrize(("model", "method"), ONE_OF_EACH)
TOKENS = torch.arange(3, 21).reshape(2, 9)

Folders = Callable[[str, str], Path]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(model, method) -> a factored folder of 45 % of the attention, made once."""
    quiet()
    base = tmp_path_factory.mktemp("reload")
    (base / "text.txt").write_text(made_up_text(), encoding="utf-8")

    def get(model: str, method: str) -> Path:
        source, out = base / model, base / f"{model}-{method}"
        if not source.exists():
            source.mkdir()
            save_with_tokenizer(random_model(model), source)
        if not out.exists():
            calibrated = method == "calibrated"
            options = {"calibrate": base / "text.txt"} if calibrated else {"method": method}
            compress(source, out, **by_options(keep=0.45, **options))
        return out

    with pytest.MonkeyPatch.context() as patch:
        leave_out_pictures(patch)
        few_steps(patch, 3)
        yield get


def load(folder: Path, model: str, **options: Any) -> Any:
    """Load with a class of transformers, which must find a place for every tensor and a tensor for every place."""
    loaded, info = getattr(transformers, CLASSES[model]).from_pretrained(folder, output_loading_info=True, **options)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")), info
    return loaded.eval()


def logits(model: Any) -> np.ndarray:
    with torch.no_grad():
        return model(TOKENS).logits.double().numpy()


def numbers(model: Any) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


# ------------------------------------------------------------------------------------------------------- the function


@each_case
def test_the_same_as_the_dense_model(model: str, method: str, folders: Folders) -> None:
    """To float32 roundoff, and in double precision to that of double precision."""
    for dtype, name in ((torch.float64, np.float64), (torch.float32, np.float32)):
        factored = load(folders(model, method), model, dtype=dtype)
        got = logits(factored)
        assert any(isinstance(module, FactoredLinear) for module in factored.modules())
        dense = factored.dequantize()
        assert not any(isinstance(module, FactoredLinear) for module in dense.modules())
        assert_close(got, logits(dense), name)


def test_without_the_plugin_one_sentence_names_the_import(folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folders("gpt2_lm", "heads")
    auto = pytest.importorskip("transformers.quantizers.auto")
    monkeypatch.delitem(auto.AUTO_QUANTIZATION_CONFIG_MAPPING, "tnlib")
    with pytest.raises(ValueError, match=r"`import tnlib_adapters\.transformers_plugin` before from_pretrained"):
        transformers.AutoModelForCausalLM.from_pretrained(folder)


@one_of_each
def test_layers_refuse_input_of_another_width(model: str, method: str, folders: Folders) -> None:
    factored = [one for one in load(folders(model, method), model).modules() if isinstance(one, FactoredLinear)]
    assert factored
    for layer in factored:
        for x in (torch.ones(3, layer.in_features + 1), torch.ones(0)):
            with refused(ValueError, type(layer).__name__, f"(..., {layer.in_features})", f"got {tuple(x.shape)}"):
                layer(x)


@each_case
def test_what_is_in_memory_is_what_is_in_the_file(model: str, method: str, folders: Folders) -> None:
    factored = load(folders(model, method), model)
    stored = {name: tensor.values for name, tensor in attention_tensors_of(folders(model, method), model).items()}
    held = {name: p.detach().numpy() for name, p in factored.named_parameters()}
    for name, values in stored.items():
        (own,) = [full for full in held if full == name or full.endswith(f".{name}") or name.endswith(f".{full}")]
        np.testing.assert_array_equal(held.pop(own), values.astype(np.float32))
    assert not [name for name in held if "attn" in name and "layer_norm" not in name and not name.endswith("norm.bias")]
    before = open_checkpoint(folders(model, method))
    n_dense = sum(a.size for layer in range(before.n_layers) for a in before.projections(layer).weights.values())
    n_dense += sum(a.size for layer in range(before.n_layers) for a in before.projections(layer).biases.values())
    n_stored = sum(values.size for values in stored.values())
    assert n_stored < 0.46 * n_dense
    assert numbers(factored) == numbers(copy.deepcopy(factored).dequantize()) - n_dense + n_stored


def attention_tensors_of(folder: Path, model: str) -> dict[str, Any]:
    """The projections' tensors and what stands in their place, for every architecture here."""
    if model in ("bert_masked", "gpt2_lm"):
        return attention_tensors(folder)
    own = (".tnlib.", ".q_proj.", ".k_proj.", ".v_proj.", ".out_proj.", ".attention.self.", ".attention.output.dense.")
    return {name: tensor for name, tensor in read_tensors(folder).items() if any(part in name for part in own)}


@one_of_each
@pytest.mark.parametrize(("dtype", "step"), [("float16", 2.0**-11), ("bfloat16", 2.0**-8)])
def test_half_precision(model: str, method: str, dtype: str, step: float, folders: Folders) -> None:
    half = load(folders(model, method), model, dtype=getattr(torch, dtype))
    assert {str(p.dtype) for p in half.parameters()} == {f"torch.{dtype}"}
    want = logits(copy.deepcopy(half).double())
    assert np.abs(logits(half) - want).max() <= 60 * step * np.abs(want).max()


@one_of_each
def test_moved_to_another_dtype_after_loading(model: str, method: str, folders: Folders) -> None:
    loaded = load(folders(model, method), model)
    want = logits(loaded)
    assert {str(p.dtype) for p in loaded.double().parameters()} == {"torch.float64"}
    assert_close(logits(loaded), want, np.float32)
    assert {str(p.dtype) for p in loaded.half().parameters()} == {"torch.float16"}


@pytest.mark.parametrize("method", METHODS)
def test_generation(method: str, folders: Folders) -> None:
    """Greedily, with the cache of keys and values, one token after the other."""
    factored = load(folders("gpt2_lm", method), "gpt2_lm", dtype=torch.float64)
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    found = factored.generate(TOKENS, **options)
    assert found.shape == (2, 15)
    assert torch.equal(found, factored.dequantize().generate(TOKENS, **options))
    ahead = found[:, :-1]
    with torch.no_grad():
        assert torch.equal(factored(ahead).logits.argmax(-1)[:, -6:], found[:, -6:])


# ----------------------------------------------------------------------------------------------------------- training


@each_case
def test_gradients_are_the_dense_ones_through_the_factors(model: str, method: str, folders: Folders) -> None:
    factored = load(folders(model, method), model, dtype=torch.float64)
    dense = copy.deepcopy(factored).dequantize()
    for one in (factored, dense):
        one(TOKENS, labels=TOKENS).loss.backward()

    homes = [name for name, module in factored.named_modules() if name.endswith(".tnlib")]
    assert len(homes) == factored.config.num_hidden_layers
    for home in homes:
        factors = dict(factored.get_submodule(home).named_parameters())
        assert all(p.requires_grad for p in factors.values())
        total = {name: torch.zeros_like(p) for name, p in factors.items()}
        for name, module in replaced(factored, home.removesuffix(".tnlib")):
            other = dense.get_submodule(name)
            weight = other.weight.grad if isinstance(other, transformers.pytorch_utils.Conv1D) else other.weight.grad.T
            outputs, ahead = [module.matrix()], [weight]
            if module.bias is None and module.added() is not None:
                outputs, ahead = [*outputs, module.added()], [*ahead, other.bias.grad]
            found = torch.autograd.grad(outputs, list(factors.values()), ahead, allow_unused=True)
            for part, gradient in zip(factors, found, strict=True):
                total[part] += 0 if gradient is None else gradient
        for part, parameter in factors.items():
            assert parameter.grad is not None
            if parameter.numel():  # of heads without a rank there is none
                assert_close(parameter.grad.numpy(), total[part].numpy(), factor=4096)
    norms = [name for name, p in factored.named_parameters() if ".tnlib." not in name and "orm" in name and p.numel()]
    assert norms
    for name in norms:
        ours, theirs = (dict(one.named_parameters())[name].grad.numpy() for one in (factored, dense))
        assert_close(ours, theirs, factor=4096)


def replaced(model: Any, attention: str) -> list[tuple[str, Any]]:
    """The modules that stand for projections, by name, below one attention module."""
    found = [
        (name, module)
        for name, module in model.named_modules()
        if name.startswith(f"{attention}.") and hasattr(module, "to_dense")
    ]
    return [(name, module) for name, module in found if not any(name.startswith(f"{other}.") for other, _ in found)]


@one_of_each
def test_a_step_of_training_and_back_to_a_folder(model: str, method: str, folders: Folders, tmp_path: Path) -> None:
    loaded = load(folders(model, method), model).train()
    before = logits(loaded.eval())
    loaded(TOKENS, labels=TOKENS).loss.backward()
    torch.optim.SGD(loaded.parameters(), lr=0.1).step()
    after = logits(loaded)
    assert np.abs(after - before).max() > 1e-3
    loaded.save_pretrained(tmp_path / "trained")
    assert_close(logits(load(tmp_path / "trained", model)), after, np.float32)


# ------------------------------------------------------------------------------------------------------------- files


@each_case
def test_saved_again_it_is_the_folder_it_came_from(model: str, method: str, folders: Folders, tmp_path: Path) -> None:
    source = folders(model, method)
    loaded = load(source, model)
    loaded.save_pretrained(tmp_path / "again")
    key = "quantization_config"
    assert read_config(tmp_path / "again")[key] == read_config(source)[key]
    before, after = read_tensors(source), read_tensors(tmp_path / "again")
    assert sum(t.values.size for t in after.values()) == sum(t.values.size for t in before.values())
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        np.testing.assert_array_equal(after[name].values, tensor.values)
        assert after[name].dtype == tensor.dtype

    assert_close(logits(load(tmp_path / "again", model)), logits(loaded), np.float32)  # products of other addresses
    ours, theirs = (open_checkpoint(folder) for folder in (tmp_path / "again", source))
    for name, weight in ours.projections(1).weights.items():
        np.testing.assert_array_equal(weight, theirs.projections(1).weights[name])


@one_of_each
def test_state_dicts(model: str, method: str, folders: Folders) -> None:
    loaded = load(folders(model, method), model)
    want, saved = logits(loaded), copy.deepcopy(loaded.state_dict())
    with torch.no_grad():
        for parameter in loaded.parameters():
            parameter.zero_()
    assert not np.array_equal(logits(loaded), want)
    loaded.load_state_dict(saved)
    np.testing.assert_array_equal(logits(loaded), want)


def test_the_dense_model_is_saved_as_one(folders: Folders, tmp_path: Path) -> None:
    dense = load(folders("opt", "calibrated"), "opt").dequantize()
    dense.save_pretrained(tmp_path / "dense")
    assert "quantization_config" not in read_config(tmp_path / "dense")
    np.testing.assert_array_equal(logits(load(tmp_path / "dense", "opt")), logits(dense))


@pytest.mark.parametrize("bias", [True, False])
def test_layers_without_biases_get_none(bias: bool, tmp_path: Path) -> None:
    quiet()
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 40, "vocab_size": 50}
    torch.manual_seed(0)
    config = transformers.OPTConfig(
        **sizes, word_embed_proj_dim=24, max_position_embeddings=16, enable_bias=bias, pad_token_id=1
    )
    transformers.OPTForCausalLM(config).save_pretrained(tmp_path / "in")
    compress(tmp_path / "in", tmp_path / "out", Budget(keep=0.5), method="matrix", what="attention")
    loaded = load(tmp_path / "out", "opt")
    layers = [module for module in loaded.modules() if isinstance(module, FactoredLinear)]
    assert len(layers) == 8
    assert {layer.bias is not None for layer in layers} == {bias}
    want = logits(loaded)
    dense = loaded.dequantize()
    assert {(m.bias is not None) for n, m in dense.named_modules() if n.endswith("_proj")} == {bias}
    assert_close(want, logits(dense), np.float32)


# ------------------------------------------------------------------------------------------------------ and the rest


@pytest.mark.slow
@pytest.mark.parametrize(("model", "method"), [("gpt2_lm", "heads"), ("bert_masked", "calibrated")])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the compiler's own parts
def test_compiled_without_a_break(model: str, method: str, folders: Folders) -> None:
    loaded = load(folders(model, method), model)
    want = logits(loaded)
    torch.compiler.reset()
    compiled = torch.compile(loaded, fullgraph=True, backend="eager")
    with torch.no_grad():
        assert_close(compiled(TOKENS).logits.numpy(), want, np.float32)


@one_of_each
def test_copies_are_independent(model: str, method: str, folders: Folders) -> None:
    loaded = load(folders(model, method), model)
    want, twin = logits(loaded), copy.deepcopy(loaded)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(1.5)
    np.testing.assert_array_equal(logits(loaded), want)
    assert not np.array_equal(logits(twin), want)


DAMAGE: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a part is missing": lambda piece: piece["shapes"].pop("left"),
    "factors that do not meet": lambda piece: piece["shapes"].update(left=[24, 1]),
    "of another width": lambda piece: piece["shapes"].update(left=[23, piece["shapes"]["left"][1]]),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
@pytest.mark.parametrize("method", ["heads", "matrix"])
def test_factors_that_do_not_fit_are_refused(
    method: str, damage: Callable[[dict[str, Any]], Any], folders: Folders, tmp_path: Path
) -> None:
    broken = Path(shutil.copytree(folders("bert_masked", method), tmp_path / "broken"))
    config = json.loads((broken / "config.json").read_text())
    piece = next(p for p in config["quantization_config"]["layers"][0] if "left" in p["shapes"])
    damage(piece)
    (broken / "config.json").write_text(json.dumps(config))
    with pytest.raises(FileFormatError, match="do not make a layer of kind"):
        transformers.AutoModel.from_pretrained(broken)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("budget", "what"), [(Budget(keep=0.5), "attention"), (Budget(keep=1, store="int8"), "all")], ids=["floats", "int8"]
)
def test_sentences_of_a_trained_model(minilm_path: Path, tmp_path: Path, budget: Budget, what: str) -> None:
    sentence_transformers = pytest.importorskip("sentence_transformers")
    texts = ["A train runs through the night.", "Tensors have legs.", "The matrix is the product of its factors."]
    compress(minilm_path, tmp_path / "out", budget, what=what, method="matrix")
    model = sentence_transformers.SentenceTransformer(str(tmp_path / "out"), device="cpu")
    of_layer = 4 if what == "attention" else 6
    assert sum(isinstance(module, FactoredLinear) for module in model.modules()) == 6 * of_layer
    assert next(model.parameters()).dtype == torch.float32  # that of the other modules is made the same
    found = model.encode(texts, show_progress_bar=False)
    model[0].auto_model.dequantize()
    assert not any(isinstance(module, FactoredLinear) for module in model.modules())
    assert_close(found, model.encode(texts, show_progress_bar=False), np.float32, factor=256)
