"""Models and tokenizers are loaded whole and without running code of their folder."""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_folders import WEIGHTS, change_config
from safetensors.torch import load_file, save_file
from tnlib_adapters import Budget, builtin_path, compress, evaluate, inspect, open_checkpoint
from tnlib_adapters.instrument.running_model import open_running
from transformers_models import save_with_tokenizer

from tnlib import FileFormatError

CODE = """
from pathlib import Path
Path({mark!r}).touch()
from transformers import {base}
class Foreign({base}):
    pass
"""


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return Path(shutil.copytree(builtin_path("llama"), tmp_path / "llama"))


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "text.txt"
    file.write_text("the cat sat on the mat and looked at the dog\n" * 200, encoding="utf-8")
    return file


def change(folder: Path, work: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """Change the tensors of a folder in bfloat16, which numpy cannot hold."""
    tensors = load_file(folder / WEIGHTS)
    work(tensors)
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})


def bring_code(folder: Path, mark: Path) -> None:
    """Let the folder bring a tokenizer, a config and a model of its own, whose import leaves a mark."""
    for part, base, file in (
        ("AutoTokenizer", "PreTrainedTokenizerFast", "tokenizer_config.json"),
        ("AutoConfig", "LlamaConfig", "config.json"),
        ("AutoModelForCausalLM", "LlamaForCausalLM", "config.json"),
    ):
        (folder / f"foreign_{part.lower()}.py").write_text(CODE.format(mark=str(mark), base=base))
        content = json.loads((folder / file).read_text()) if (folder / file).is_file() else {}
        reference: Any = f"foreign_{part.lower()}.Foreign"
        content.setdefault("auto_map", {})[part] = [reference, reference] if part == "AutoTokenizer" else reference
        if part == "AutoTokenizer":
            content["tokenizer_class"] = "Foreign"
        (folder / file).write_text(json.dumps(content))


def run_compress(folder: Path, text: Path, out: Path) -> None:
    compress(folder, out, Budget(keep=0.9), calibration=text, what="attention")


def run_evaluate(folder: Path, text: Path, out: Path) -> None:
    evaluate(folder, folder, text)


def run_inspect(folder: Path, text: Path, out: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:  # drawing takes seconds, and loads no code
        patch.setattr("tnlib_adapters.inspection.inspect.page_of", lambda inspection, progress: "page")
        inspect(folder, out, text="the cat")


Command = Callable[[Path, Path, Path], None]


@pytest.mark.parametrize("command", [run_compress, run_evaluate, run_inspect])
def test_code_of_a_folder_is_not_run(
    command: Command, llama: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without_pictures: None
) -> None:
    mark = tmp_path / "mark"
    bring_code(llama, mark)
    monkeypatch.setattr(sys, "stdin", StringIO("y\n" * 100))
    with contextlib.suppress(FileFormatError):  # where the tokenizer is known by no other name
        command(llama, text, tmp_path / "out")
    assert not mark.exists()
    assert sys.stdin.read() == "y\n" * 100


@pytest.mark.parametrize("command", [run_compress, run_evaluate])
def test_a_model_with_a_tensor_missing_is_refused_by_its_name(
    command: Command, llama: Path, text: Path, tmp_path: Path, without_pictures: None
) -> None:
    """transformers would initialise it at random."""
    name = "model.layers.1.mlp.up_proj.weight"
    change(llama, lambda t: t.pop(name))
    with pytest.raises(FileFormatError, match=r"layers\.1\.mlp\.up_proj\.weight"):
        command(llama, text, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_model_with_a_layer_too_many_is_refused(llama: Path, text: Path) -> None:
    change_config(llama, num_hidden_layers=open_checkpoint(llama).n_layers - 1)
    with pytest.raises(FileFormatError, match=r"left over"):
        evaluate(llama, llama, text)


def test_a_tensor_of_another_shape_is_refused(llama: Path, text: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    change(llama, lambda t: t.update({name: torch.cat([t[name], t[name][:1]])}))
    with pytest.raises(FileFormatError, match=r"layers\.0\.mlp\.up_proj\.weight"):
        evaluate(llama, llama, text)


@pytest.mark.parametrize("content", ["[]", '{"model": null}', "[" * 100_000, "\xff"])
def test_a_damaged_tokenizer_is_one_sentence(content: str, llama: Path, text: Path) -> None:
    (llama / "tokenizer.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(FileFormatError, match=r"tokenizer"):
        evaluate(llama, llama, text)


@pytest.mark.parametrize("name", ["bert", "bert_masked", "gpt2", "gpt2_lm", "opt_after", "gpt_neox", "falcon_alibi"])
def test_whole_models_load(name: str, saved: Any, tmp_path: Path) -> None:
    folder = save_with_tokenizer(saved(name)[0], tmp_path)
    model = open_running(folder).model
    assert not any(parameter.requires_grad for parameter in model.parameters())
