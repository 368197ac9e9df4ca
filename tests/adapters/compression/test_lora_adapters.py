"""LoRA adapters of the difference of two checkpoints, loaded and merged by peft."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint_folders import change_tensors
from oracles import assert_close, refused

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

from click.testing import CliRunner  # noqa: E402
from safetensors.numpy import load_file, save_file  # noqa: E402
from tnlib_adapters import builtin_path, cli, compress, evaluate, extract_adapter  # noqa: E402
from tnlib_adapters.checkpoints.modified import ChangedTensor  # noqa: E402
from tnlib_adapters.compression.adapter.adapted_checkpoint import open_adapted  # noqa: E402
from tnlib_adapters.compression.adapter.rank_choice import ranks_within  # noqa: E402
from transformers_models import inputs, outputs, random_model  # noqa: E402

from tnlib import ArgumentError, ArgumentTypeError, FileFormatError, MissingFileError  # noqa: E402

Saved = Callable[[str], tuple[Any, Path]]
# peft asks transformers for a name that is deprecated
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
NAMES = ("llama", "qwen2", "gpt2_lm", "falcon_new", "phi3", "bert_masked")


def tuned(model: Any, folder: Path, *, everything: bool = False, seed: int = 0) -> Any:
    """Save the model after a change of its weights of attention and feed-forward layers, or of all parameters."""
    new = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in new.named_parameters():
            is_inner = parameter.ndim == 2 and "emb" not in name and "lm_head" not in name and "wte" not in name
            if everything or (is_inner and "wpe" not in name and "predictions" not in name):
                change = torch.randn(parameter.shape, generator=generator)
                if parameter.ndim == 2:
                    left, right = torch.linalg.qr(change)
                    change = (left * 0.8 ** torch.arange(left.shape[1])) @ right  # singular values fall
                parameter.add_(0.1 * change)
    new.save_pretrained(folder)
    return new


def squared(a: Any, b: Any) -> float:
    pairs = zip(a.parameters(), b.parameters(), strict=True)
    return sum(float((x.detach().double() - y.detach().double()).square().sum()) for x, y in pairs)


def merged(model: Any, folder: Path | str) -> Any:
    return peft.PeftModel.from_pretrained(copy.deepcopy(model), folder).merge_and_unload()


@pytest.mark.parametrize("budget", [{"rank": 5}, {"max_error": 0.3}], ids=["rank", "error"])
@pytest.mark.parametrize("name", NAMES)
def test_peft_merges_to_the_stated_error(name: str, budget: dict[str, Any], saved: Saved, tmp_path: Path) -> None:
    model, base = saved(name)
    new = tuned(model, tmp_path / "tuned")
    adapter = extract_adapter(base, tmp_path / "tuned", tmp_path / "adapter", **budget)
    whole = merged(model, tmp_path / "adapter")
    measured = np.sqrt(squared(whole, new) / squared(model, new))
    assert adapter.error == pytest.approx(measured, rel=1e-3)
    assert 0.05 < adapter.error <= budget.get("max_error", 1.0)
    assert adapter.outside == {}
    x = inputs(model)
    far, near = (np.linalg.norm(outputs(m, x) - outputs(new, x)) for m in (model, whole))
    assert near < 0.8 * far


def test_the_adapter_runs_beside_the_base(saved: Saved, tmp_path: Path) -> None:
    model, base = saved("llama")
    tuned(model, tmp_path / "tuned")
    adapter = extract_adapter(base, tmp_path / "tuned", tmp_path / "adapter", max_error=0.2)
    beside = peft.PeftModel.from_pretrained(copy.deepcopy(model), tmp_path / "adapter").eval()
    x = inputs(model)
    assert_close(outputs(beside, x), outputs(merged(model, tmp_path / "adapter"), x), np.float32, factor=256)
    assert len(set(adapter.ranks.values())) > 1
    stated = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert stated["r"] == stated["lora_alpha"] == max(adapter.ranks.values())
    assert stated["rank_pattern"] == stated["alpha_pattern"]
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert sum(a.size for a in tensors.values()) == adapter.n_numbers
    loaded = {name: p.shape for name, p in beside.named_parameters() if "lora_" in name}
    assert {name.replace(".default", ""): shape for name, shape in loaded.items()} == {
        name: a.shape for name, a in tensors.items()
    }


def test_full_rank_is_the_difference(saved: Saved, tmp_path: Path) -> None:
    model, base = saved("llama")
    new, x = tuned(model, tmp_path / "tuned"), inputs(model)
    adapter = extract_adapter(base, tmp_path / "tuned", tmp_path / "adapter", rank=1000)
    assert adapter.error < 1e-6
    assert_close(outputs(merged(model, tmp_path / "adapter"), x), outputs(new, x), np.float32, factor=84)


def test_tensors_outside_count(saved: Saved, tmp_path: Path) -> None:
    model, base = saved("llama")
    new = tuned(model, tmp_path / "tuned", everything=True)
    adapter = extract_adapter(base, tmp_path / "tuned", tmp_path / "adapter", rank=4)
    measured = np.sqrt(squared(merged(model, tmp_path / "adapter"), new) / squared(model, new))
    assert adapter.error == pytest.approx(measured, rel=1e-3)
    assert {"lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"} < adapter.outside.keys()
    with refused(ArgumentError, "extract_adapter: max_error must be at least", "raise it"):
        extract_adapter(base, tmp_path / "tuned", tmp_path / "other", max_error=1e-3)
    assert not (tmp_path / "other").exists()


@pytest.mark.usefixtures("without_pictures")
def test_rounded_weights_are_corrected(saved: Saved, tmp_path: Path) -> None:
    """The two commands of the page: rounded weights, then an adapter that peft merges to the stated error."""
    source, rounded, out = (str(path) for path in (saved("llama")[1], tmp_path / "rounded", tmp_path / "adapter"))
    runner = CliRunner()
    result = runner.invoke(cli.main, ["compress", source, rounded, "--store", "int3", "--layout", "dense"])
    assert result.exit_code == 0, result.output
    result = runner.invoke(cli.main, ["adapter", rounded, source, out, "--max-error", "0.5"])
    assert result.exit_code == 0, result.output
    stated = float(result.output.partition("error of the difference")[2].split()[0])
    load = transformers.AutoModelForCausalLM.from_pretrained
    original, base = (load(folder, dtype=torch.float32) for folder in (source, rounded))
    measured = np.sqrt(squared(merged(base, out), original) / squared(base, original))
    assert stated == pytest.approx(measured, rel=1e-3)
    assert 0.45 < stated <= 0.5
    config = json.loads(Path(out, "adapter_config.json").read_text())
    assert config["target_modules"] == ["k_proj", "o_proj", "q_proj", "v_proj"]  # feed-forward layers were not rounded
    assert len(config["rank_pattern"]) > 1
    errors = [extract_adapter(rounded, source, tmp_path / f"{rank}", rank=rank).error for rank in (2, 6, 12)]
    assert 1 > errors[0] > errors[1] > errors[2] > 0


@pytest.mark.parametrize("name", ["llama", "gpt2_lm"])
def test_an_adapter_is_evaluated_as_its_base_with_it(
    name: str, folders: dict[str, Path], short_text: Path, tmp_path: Path
) -> None:
    """As the merged model of peft in a folder of its own, also where weights are stored as (in, out)."""
    load = transformers.AutoModelForCausalLM.from_pretrained
    base, new = folders[name], Path(shutil.copytree(folders[name], tmp_path / "tuned"))
    tuned(load(base), new)
    extract_adapter(base, new, tmp_path / "adapter", max_error=0.3)
    whole = Path(shutil.copytree(base, tmp_path / "whole"))
    merged(load(base), tmp_path / "adapter").save_pretrained(whole)
    found, wanted = (evaluate(new, out, short_text) for out in (tmp_path / "adapter", whole))
    assert found.divergence == pytest.approx(wanted.divergence, rel=1e-3)
    assert 0 < found.error < 0.5 * evaluate(new, base, short_text).error
    assert found.cache_bytes == wanted.cache_bytes
    assert found.tokens_per_second is not None
    result = CliRunner().invoke(cli.main, ["evaluate", str(new), str(tmp_path / "adapter"), str(short_text)])
    assert result.exit_code == 0, result.output
    assert f"perplexity, after   {found.perplexity_after:.4f}" in result.output


@pytest.mark.parametrize("pattern", ["q_proj", "layers.1.mlp.up_proj", r"layers\.0\..*"])
def test_patterns_of_alpha_are_those_of_peft(
    pattern: str, folders: dict[str, Path], short_text: Path, tmp_path: Path
) -> None:
    load, base = transformers.AutoModelForCausalLM.from_pretrained, folders["llama"]
    tuned(load(base), tmp_path / "tuned")
    extract_adapter(base, tmp_path / "tuned", tmp_path / "adapter", rank=4)
    path = tmp_path / "adapter" / "adapter_config.json"
    changed = json.loads(path.read_text()) | {"alpha_pattern": {pattern: 40, r".*_proj": 1}, "lora_alpha": 2}
    path.write_text(json.dumps(changed))
    whole = merged(load(base), tmp_path / "adapter")
    held = open_adapted(tmp_path / "adapter").folder.tensors
    n_changed = 0
    for name, parameter in whole.named_parameters():
        if name in held:
            difference = held[name].read() - parameter.detach().numpy()
            assert np.abs(difference).max() < 1e-5
            n_changed += isinstance(held[name], ChangedTensor)
    assert n_changed == 7 * whole.config.num_hidden_layers


def refuse_in_evaluate(base: Path, out: Path, text: Path, error: type[Exception], *words: str) -> None:
    with refused(error, "evaluate: ", *words):
        evaluate(base, out, text)


def test_adapters_that_do_not_fit_are_refused(folders: dict[str, Path], short_text: Path, tmp_path: Path) -> None:
    base, out = folders["llama"], tmp_path / "adapter"
    tuned(transformers.AutoModelForCausalLM.from_pretrained(base), tmp_path / "tuned")
    extract_adapter(base, tmp_path / "tuned", out, rank=2)
    config = json.loads((out / "adapter_config.json").read_text())
    for changes, words in (
        ({"use_dora": True}, "must hold False in use_dora, got bool True"),
        ({"layer_replication": [[0, 2]]}, "must hold None in layer_replication, got list"),
        ({"init_lora_weights": "pissa"}, "in init_lora_weights, got pissa"),
        ({"lora_alpha": "2"}, "must hold numbers in lora_alpha and alpha_pattern, got 2"),
        ({"alpha_pattern": [2]}, "must hold a JSON object in alpha_pattern, got list [2]"),
        ({"alpha_pattern": {"(": 2}}, "must hold regular expressions in alpha_pattern"),
        ({"base_model_name_or_path": None}, "must hold a string in base_model_name_or_path, got NoneType None"),
        ({"base_model_name_or_path": str(folders["qwen3"])}, "must hold lora_A of shape (r, "),
        ({"base_model_name_or_path": str(folders["gpt2_lm"])}, "must adapt weights of attention"),
    ):
        (out / "adapter_config.json").write_text(json.dumps(config | changes))
        refuse_in_evaluate(base, out, short_text, FileFormatError, words)
    elsewhere = config | {"base_model_name_or_path": str(tmp_path / "moved")}
    (out / "adapter_config.json").write_text(json.dumps(elsewhere))
    refuse_in_evaluate(
        base, out, short_text, MissingFileError, "must name the folder of the base", "moved", "write its"
    )


@pytest.mark.usefixtures("without_pictures")
def test_factors_that_do_not_fit_are_refused(folders: dict[str, Path], short_text: Path, tmp_path: Path) -> None:
    base, out = folders["llama"], tmp_path / "adapter"
    tuned(transformers.AutoModelForCausalLM.from_pretrained(base), tmp_path / "tuned")
    extract_adapter(base, tmp_path / "tuned", out, rank=2)
    weights = out / "adapter_model.safetensors"
    factors = load_file(weights)
    a = next(name for name in factors if name.endswith("q_proj.lora_A.weight"))
    b = a.replace("lora_A", "lora_B")
    for changes, words in (
        ({a: factors[a][:, :-1].copy()}, "must hold lora_A of shape (r, "),
        ({b: factors[b][:, :-1].copy()}, "must hold lora_A of shape (r, "),
        ({a: None}, "got none and ("),
        ({b: None}, "and none; name the adapter"),
        (dict.fromkeys(factors), "must hold factors of at least one weight, got none"),
    ):
        changed = {name: value for name, value in (factors | changes).items() if value is not None}
        save_file(changed, weights)
        refuse_in_evaluate(base, out, short_text, FileFormatError, words)
    weights.unlink()
    refuse_in_evaluate(base, out, short_text, MissingFileError, "must be in adapter_model.safetensors", "safetensors")
    save_file(factors, weights)
    compress(base, tmp_path / "factored", keep=0.5, method="matrix")
    config = json.loads((out / "adapter_config.json").read_text())
    factored = config | {"base_model_name_or_path": str(tmp_path / "factored")}
    (out / "adapter_config.json").write_text(json.dumps(factored))
    refuse_in_evaluate(base, out, short_text, FileFormatError, "must hold whole weights", "layout='dense'")


def test_a_model_in_memory_is_refused(folders: dict[str, Path], short_text: Path) -> None:
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folders["llama"])
    with refused(ArgumentTypeError, "folder must be", "LlamaForCausalLM"):
        evaluate(folders["llama"], model, short_text)


def test_few_numbers_are_stored() -> None:
    """No other ranks of as many numbers discard less: brute force over two weights."""
    rng = np.random.default_rng(0)
    spectra = {name: np.sort(rng.random(5))[::-1] for name in "ab"}
    total = sum(np.sum(s**2) for s in spectra.values())
    for fraction in (0.05, 0.2, 0.5):
        ranks = ranks_within(spectra, {"a": 3, "b": 3}, fraction * total)
        best = min(
            a + b
            for a in range(1, 6)
            for b in range(1, 6)
            if np.sum(spectra["a"][a:] ** 2) + np.sum(spectra["b"][b:] ** 2) <= fraction * total
        )
        assert sum(ranks.values()) == best


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "either rank or max_error must be given, got neither"),
        ({"rank": 3, "max_error": 0.1}, "got both"),
        ({"rank": 0}, "rank must be at least 1"),
        ({"max_error": 1.0}, "max_error must lie in [0, 1)"),
        ({"max_error": -0.1}, "max_error must lie in [0, 1)"),
        ({"max_error": True}, "max_error must lie in [0, 1)"),
    ],
)
def test_budgets_are_checked(options: dict[str, Any], words: str, saved: Saved, tmp_path: Path) -> None:
    _, base = saved("llama")
    with refused(ArgumentError, "extract_adapter", words):
        extract_adapter(base, base, tmp_path / "out", **options)
    with refused(ArgumentTypeError, "rank"):
        extract_adapter(base, base, tmp_path / "out", rank=2.5)  # type: ignore[arg-type]


def test_other_models_are_refused(saved: Saved, tmp_path: Path) -> None:
    _, base = saved("llama")
    with refused(ArgumentError, "one architecture and size", "a llama and a qwen2"):
        extract_adapter(base, saved("qwen2")[1], tmp_path / "out", rank=2)
    with refused(ArgumentError, "must differ, got equal weights"):
        extract_adapter(base, base, tmp_path / "out", rank=2)
    wide = Path(shutil.copytree(base, tmp_path / "wide"))
    change_tensors(wide, lambda tensors: tensors.update({"model.norm.weight": np.ones(25, np.float32)}))
    with refused(ArgumentError, "differ in the shape of 'model.norm.weight'"):
        extract_adapter(base, wide, tmp_path / "out", rank=2)
    compress(builtin_path("llama"), tmp_path / "factored", keep=0.5)
    with refused(ArgumentError, "must hold whole weights", "layout='dense'"):
        extract_adapter(tmp_path / "factored", builtin_path("llama"), tmp_path / "out", rank=2)
    assert not (tmp_path / "out").exists()


def test_the_command_line(tmp_path: Path) -> None:
    tuned(random_model("llama_tied"), tmp_path / "tuned", everything=True)
    random_model("llama_tied").save_pretrained(tmp_path / "base")
    folders = [str(tmp_path / name) for name in ("base", "tuned", "out")]
    result = CliRunner().invoke(cli.main, ["adapter", *folders, "--rank", "3"])
    assert result.exit_code == 0, result.output
    assert "ranks of 14 weights   3 to 3" in result.output
    assert "without model.embed_tokens.weight" in result.output
    result = CliRunner().invoke(cli.main, ["adapter", *folders, "--rank", "3"])
    assert result.exit_code == 2
    assert "--force" in result.output


@pytest.mark.slow
def test_the_fine_tuned_llama(tmp_path: Path) -> None:
    """The built-in Llama, its inner weights tuned on licences for a few steps, as an adapter of stated error."""
    model = transformers.AutoModelForCausalLM.from_pretrained(builtin_path("llama"), dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(builtin_path("llama"))
    lines = (Path(__file__).parents[3] / "LICENSE").read_text(encoding="utf-8")
    ids = torch.tensor(tokenizer(lines, verbose=False)["input_ids"])
    windows = ids[: len(ids) // 128 * 128].reshape(-1, 128)
    model.save_pretrained(tmp_path / "base")
    new = copy.deepcopy(model)
    inner = [p for name, p in new.named_parameters() if "proj" in name]
    optimiser, losses = torch.optim.AdamW(inner, lr=1e-3), []
    for step in range(40):
        batch = windows[torch.arange(4 * step, 4 * step + 4) % len(windows)]
        loss = new(input_ids=batch, labels=batch).loss
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.8 * losses[0]
    new.save_pretrained(tmp_path / "tuned")
    adapter = extract_adapter(tmp_path / "base", tmp_path / "tuned", tmp_path / "adapter", max_error=0.3)
    whole = merged(model, tmp_path / "adapter")
    assert adapter.error == pytest.approx(np.sqrt(squared(whole, new) / squared(model, new)), rel=1e-3)
    assert 0.29 < adapter.error <= 0.3
    with torch.no_grad():
        of_base, of_new, of_adapter = (
            float(m.eval()(input_ids=windows, labels=windows).loss) for m in (model, new, whole)
        )
    assert of_adapter - of_new < 0.3 * (of_base - of_new)
