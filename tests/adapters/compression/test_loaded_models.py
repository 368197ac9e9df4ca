"""What `tnlib compress` wrote, loaded by transformers: equal to the dense layout, which needs nothing of ours.

How factored layers compute without being multiplied out is the matter of test_modules.py and test_reload.py.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from compressed_folders import digest, leave_out_pictures
from slow_cases import mostly_slow
from tnlib_adapters import Budget, compress, open_checkpoint

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("tnlib_adapters.transformers_plugin")

METHODS = ["heads", "matrix", "ttm", "tucker", "cp"]
# model that was saved -> classes that load it
CLASSES = {
    "bert": ["AutoModel", "BertModel"],
    "bert_masked": ["AutoModelForMaskedLM", "BertForMaskedLM"],
    "gpt2": ["AutoModel", "GPT2Model"],
    "gpt2_lm": ["AutoModelForCausalLM", "GPT2LMHeadModel", "GPT2Model"],
    "gpt2_untied": ["GPT2LMHeadModel"],
}
ISSUES = ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")

Folders = Callable[..., Path]


@pytest.fixture(scope="module", autouse=True)
def without_pictures() -> Iterator[None]:
    """Nothing here looks at the report, and drawing takes most of the time of a small compression."""
    with pytest.MonkeyPatch.context() as patch:
        leave_out_pictures(patch)
        yield


@pytest.fixture(scope="module")
def folders(saved: Callable[[str], Any], tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """(model, method, layout) -> OUT of half the numbers, made once."""
    base = tmp_path_factory.mktemp("reload")

    def get(model: str, method: str, layout: str = "factored") -> Path:
        out = base / f"{model}-{method}-{layout}"
        if out.exists():
            return out
        compress(saved(model)[1], out, Budget(keep=0.5), method=method, layout=layout, what="attention")
        return out

    return get


def load(folder: Path, cls: str, **options: Any) -> Any:
    """Load with a class of transformers, which must find a place for every tensor and a tensor for every place."""
    model, info = getattr(transformers, cls).from_pretrained(folder, output_loading_info=True, **options)
    assert {key: list(info[key]) for key in ISSUES} == {key: [] for key in ISSUES}
    return model.eval()


def load_dense(folder: Path, cls: str, **options: Any) -> Any:
    """Load factors and multiply them out."""
    return load(folder, cls, **options).dequantize().eval()


def output(model: Any) -> np.ndarray:
    tokens = torch.arange(1, 19).reshape(2, 9)
    with torch.no_grad():
        return model(tokens)[0].float().numpy()


def state(model: Any) -> dict[str, np.ndarray]:
    return {name: a.float().numpy() for name, a in model.state_dict().items()}


def assert_same_state(a: dict[str, np.ndarray], b: dict[str, np.ndarray], tolerance: float) -> None:
    assert a.keys() == b.keys()
    for name in a:
        scale = np.abs(b[name]).max(initial=0)
        np.testing.assert_allclose(a[name], b[name], rtol=0, atol=tolerance * scale, err_msg=name)


CASES = [(model, cls, method) for model, classes in CLASSES.items() for cls in classes for method in METHODS]


@pytest.mark.parametrize(("model", "cls", "method"), mostly_slow(CASES, CASES[::16]))
def test_factored_and_dense_folders_load_to_the_same_model(model: str, cls: str, method: str, folders: Folders) -> None:
    ours, theirs = load_dense(folders(model, method), cls), load(folders(model, method, "dense"), cls)
    assert type(ours) is type(theirs)
    assert_same_state(state(ours), state(theirs), 2e-6)
    np.testing.assert_allclose(output(ours), output(theirs), atol=2e-5)
    assert not any("tnlib" in name for name, _ in ours.named_modules())
    assert [name for name, _ in ours.named_modules()] == [name for name, _ in theirs.named_modules()]
    assert {n: p.requires_grad for n, p in ours.named_parameters()} == {
        n: p.requires_grad for n, p in theirs.named_parameters()
    }


PLAIN = """
import json, sys
import torch, transformers
transformers.logging.disable_progress_bar()
found = {}
for folder, name in json.loads(sys.argv[1]):
    model = getattr(transformers, name).from_pretrained(folder).eval()
    with torch.no_grad():
        found[folder] = model(torch.arange(1, 19).reshape(2, 9))[0].flatten()[:40].tolist()
assert "tnlib" not in sys.modules and "tnlib_adapters" not in sys.modules
print(json.dumps(found))
"""


@pytest.mark.slow
def test_the_dense_layout_needs_nothing_of_ours(folders: Folders) -> None:
    cases = [(m, CLASSES[m][-1], how) for m in ("bert_masked", "gpt2_lm") for how in METHODS]
    wanted = [(str(folders(m, how, "dense")), cls) for m, cls, how in cases]
    done = subprocess.run(
        [sys.executable, "-c", PLAIN, json.dumps(wanted)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for (model, cls, how), (folder, _) in zip(cases, wanted, strict=True):
        got = output(load(folders(model, how), cls)).flatten()[:40]
        np.testing.assert_allclose(got, found[folder], atol=2e-5)


@pytest.mark.parametrize("method", METHODS)
def test_compression_changes_what_the_model_says(method: str, folders: Folders, saved: Callable[[str], Any]) -> None:
    """Otherwise the comparisons above could all hold with the original weights."""
    before = output(load(saved("bert")[1], "BertModel"))
    assert np.abs(output(load(folders("bert", method), "BertModel")) - before).max() > 1e-2


@pytest.mark.parametrize("method", mostly_slow(METHODS, ["matrix"]))
@pytest.mark.parametrize("model", ["bert_masked", "gpt2_lm"])
def test_tied_weights_stay_tied(model: str, method: str, folders: Folders) -> None:
    loaded = load(folders(model, method), "GPT2LMHeadModel" if model == "gpt2_lm" else "BertForMaskedLM")
    assert loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight


def test_what_was_not_tied_stays_apart(folders: Folders) -> None:
    loaded = load(folders("gpt2_untied", "heads"), "GPT2LMHeadModel")
    assert not torch.equal(loaded.get_output_embeddings().weight, loaded.get_input_embeddings().weight)


@pytest.mark.parametrize("method", mostly_slow(METHODS, ["heads", "cp"]))
@pytest.mark.parametrize("model", ["bert_masked", "gpt2_lm"])
def test_multiplied_out_and_saved_it_is_an_ordinary_model(
    model: str, method: str, folders: Folders, tmp_path: Path
) -> None:
    cls = "GPT2LMHeadModel" if model == "gpt2_lm" else "BertForMaskedLM"
    untouched = digest(folders(model, method))
    loaded = load_dense(folders(model, method), cls)
    loaded.save_pretrained(tmp_path / "again")
    assert "quantization_config" not in json.loads((tmp_path / "again" / "config.json").read_text())
    again = load(tmp_path / "again", cls)
    assert_same_state(state(again), state(loaded), 0)
    np.testing.assert_array_equal(output(again), output(loaded))
    assert open_checkpoint(tmp_path / "again").factored is None
    assert compress(tmp_path / "again", tmp_path / "smaller", Budget(keep=0.4), what="attention").kept <= 0.4
    assert digest(folders(model, method)) == untouched


@pytest.mark.parametrize("method", mostly_slow(METHODS, ["heads", "cp"]))
@pytest.mark.parametrize("model", ["bert_masked", "gpt2_lm"])
def test_gradients_reach_every_parameter(model: str, method: str, folders: Folders) -> None:
    loaded = load(folders(model, method), "GPT2LMHeadModel" if model == "gpt2_lm" else "BertForMaskedLM").train()
    tokens = torch.arange(1, 19).reshape(2, 9)
    loaded(tokens, labels=tokens).loss.backward()
    trained = {name: p for name, p in loaded.named_parameters() if p.numel()}  # names of factored weights stay, empty
    for name, parameter in trained.items():
        assert parameter.grad is not None, name
    attention = [p.grad for n, p in trained.items() if "attn" in n or "attention" in n]
    assert all(torch.isfinite(grad).all() for grad in attention)
    assert any(grad.abs().max() > 0 for grad in attention)


@pytest.mark.parametrize("method", mostly_slow(METHODS, ["heads", "ttm"]))
@pytest.mark.parametrize("model", ["bert", "gpt2_lm"])
def test_loaded_in_half_precision(model: str, method: str, folders: Folders) -> None:
    cls = CLASSES[model][1]
    half = load_dense(folders(model, method), cls, dtype=torch.bfloat16)
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    # factors are rounded first and multiplied then, so several roundings of 2**-9 add up
    assert_same_state(state(half), state(load(folders(model, method, "dense"), cls)), 16 * 2.0**-9)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["factored", "dense"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", ["bert", "gpt2_lm"])
def test_sources_in_half_precision(
    name: str, dtype: str, layout: str, saved: Callable[[str], Any], folders: Folders, tmp_path: Path
) -> None:
    cls = CLASSES[name][1]
    model = load(saved(name)[1], cls, dtype=getattr(torch, dtype))
    model.save_pretrained(tmp_path / "in")
    compress(tmp_path / "in", tmp_path / "out", Budget(keep=0.5), method="matrix", layout=layout, what="attention")
    loaded = load(tmp_path / "out", cls)
    loaded = loaded.dequantize() if layout == "factored" else loaded
    assert {str(p.dtype) for p in loaded.parameters()} == {f"torch.{dtype}"}
    step = 2.0**-11 if dtype == "float16" else 2.0**-8
    assert_same_state(state(loaded), state(load(folders(name, "matrix", "dense"), cls)), 40 * step)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["bert_masked", "gpt2_lm"])
def test_sources_in_shards(
    name: str, method: str, saved: Callable[[str], Any], folders: Folders, tmp_path: Path
) -> None:
    cls = "GPT2LMHeadModel" if name == "gpt2_lm" else "BertForMaskedLM"
    load(saved(name)[1], cls).save_pretrained(tmp_path / "in", max_shard_size="20KB")
    assert len(list((tmp_path / "in").glob("*.safetensors"))) > 2
    compress(tmp_path / "in", tmp_path / "out", Budget(keep=0.5), method=method, what="attention")
    assert_same_state(state(load(tmp_path / "out", cls)), state(load(folders(name, method), cls)), 1e-6)


@pytest.mark.slow
def test_every_number_kept_is_the_model_that_came(saved: Callable[[str], Any], tmp_path: Path) -> None:
    for name, cls in (("bert", "BertModel"), ("gpt2_lm", "GPT2LMHeadModel")):
        for method in METHODS:
            compress(saved(name)[1], tmp_path / f"{name}-{method}", Budget(keep=1), method=method, what="attention")
            got = output(load(tmp_path / f"{name}-{method}", cls))
            np.testing.assert_allclose(got, output(load(saved(name)[1], cls)), atol=5e-5)


def test_damaged_factors_are_refused(folders: Folders, tmp_path: Path) -> None:
    broken = Path(shutil.copytree(folders("bert", "heads"), tmp_path / "broken"))
    config = json.loads((broken / "config.json").read_text())
    config["quantization_config"]["version"] = 99
    (broken / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="version 99"):
        transformers.AutoModel.from_pretrained(broken)
