"""The built-in Llama: an ordinary folder of transformers, a model that has learned, and ours equal to theirs."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tarfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from compressed_folders import few_steps
from tnlib_adapters import Budget, builtin_path, cli, compress, open_checkpoint
from tnlib_adapters.reference.model import loss

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
models = pytest.importorskip("transformers_models")

PYTHON_TEXT = Path(__file__).parents[3] / "adapters/training/python_text.py"
LLAMA = builtin_path("llama")
WINDOW = 256


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return transformers.AutoTokenizer.from_pretrained(LLAMA)


@pytest.fixture(scope="module")
def model() -> Any:
    models.quiet()
    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    return transformers.AutoModelForCausalLM.from_pretrained(LLAMA, **options).eval()


@pytest.fixture(scope="module")
def text() -> str:
    """The source of a module that the model was not trained on."""
    spec = importlib.util.spec_from_file_location("python_text", PYTHON_TEXT)
    assert spec is not None
    assert spec.loader is not None
    python_text = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(python_text)
    assert python_text.is_held_out("tarfile")
    return Path(tarfile.__file__).read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def windows(tokenizer: Any, text: str) -> np.ndarray:
    """The first windows of the text behind its licence, (8, context)."""
    tokens = np.array(tokenizer(text[3000:], verbose=False)["input_ids"])
    return tokens[: 8 * WINDOW].reshape(8, WINDOW)


def nats(model: Any, tokens: np.ndarray) -> np.ndarray:
    """The loss of each token after the first of its window."""
    ids = torch.from_numpy(tokens)
    with torch.no_grad():
        logits = model(ids).logits[:, :-1]
    return torch.nn.functional.cross_entropy(logits.mT, ids[:, 1:], reduction="none").numpy()


# ------------------------------------------------------------------------------------------------------- the folder


def test_the_folder_is_small_and_of_the_stated_shape() -> None:
    assert sum(file.stat().st_size for file in LLAMA.iterdir()) < 2_500_000
    checkpoint = open_checkpoint(LLAMA)
    assert {info.dtype for info in checkpoint.folder.tensors.values()} == {"BF16"}
    layer = checkpoint.attention(0)
    assert (checkpoint.n_layers, layer.n_heads, layer.kv_heads, layer.d_head, layer.d_model) == (4, 8, 2, 16, 128)
    assert layer.rotary is not None
    assert layer.context == WINDOW


@pytest.mark.slow
def test_transformers_loads_it_without_a_warning() -> None:
    """In a process of its own, since warnings are shown once."""
    script = (
        "import sys; from transformers import AutoModelForCausalLM, AutoTokenizer, logging\n"
        "logging.disable_progress_bar()\n"
        "words = AutoTokenizer.from_pretrained(sys.argv[1])('Return the', return_tensors='pt')\n"
        "model = AutoModelForCausalLM.from_pretrained(sys.argv[1])\n"
        "print(model.generate(**words, max_new_tokens=2, do_sample=False).shape[1] - words['input_ids'].shape[1])\n"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", script, str(LLAMA)], capture_output=True, text=True)
    assert (done.returncode, done.stderr, done.stdout.strip()) == (0, "", "2")


@pytest.mark.parametrize(
    "words", ["def f(x):\n\n    return x\n", "naïve “façade” 数 🦀\t\r\n", " a  b   c", "\x00 \x7f"]
)
def test_the_tokenizer_gives_back_any_text(words: str, tokenizer: Any) -> None:
    assert tokenizer.decode(tokenizer(words)["input_ids"]) == words


def test_documents_end_in_one_token(tokenizer: Any) -> None:
    config = json.loads((LLAMA / "config.json").read_text())
    assert tokenizer("<|endoftext|>")["input_ids"] == [config["eos_token_id"]]
    assert len(tokenizer) == config["vocab_size"]


def test_the_command_line_knows_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cli._folder("inspect", "builtin-llama") == LLAMA
    assert cli._folder("inspect", "builtin") == builtin_path("induction")
    (tmp_path / "builtin-llama").mkdir()
    monkeypatch.chdir(tmp_path)
    assert cli._folder("inspect", "builtin-llama") == Path("builtin-llama")


# ------------------------------------------------------------------------------------------------ what it has learned


def test_it_predicts_text_that_it_has_not_seen(model: Any, tokenizer: Any, text: str, windows: np.ndarray) -> None:
    """Better than counts of single tokens of this very text, and than what deflate makes of the whole of it."""
    counts = np.bincount(windows.ravel()) / windows.size
    each = nats(model, windows)
    assert each.mean() < 0.7 * -np.log(counts[windows[:, 1:]]).mean()
    n_bytes = sum(len(tokenizer.decode(row[1:]).encode()) for row in windows)
    bits = each.sum() / np.log(2)
    assert bits / n_bytes < 8 * len(zlib.compress(text.encode(), 9)) / len(text.encode())


def silenced(layer: Any) -> Any:
    return layer.self_attn.register_forward_hook(lambda module, args, out: (0 * out[0], *out[1:]))


@pytest.mark.slow
def test_attention_matters(model: Any, windows: np.ndarray) -> None:
    """Without any it knows the last token alone, and the loss without one layer is higher than with it."""
    whole = nats(model, windows).mean()
    hooks = []
    try:
        for layer in model.model.layers:
            hooks.append(silenced(layer))
            assert nats(model, windows).mean() > whole + 0.01
            hooks.pop().remove()
        hooks = [silenced(layer) for layer in model.model.layers]
        assert nats(model, windows).mean() > whole + 0.5
    finally:
        for hook in hooks:
            hook.remove()


# ------------------------------------------------------------------------------------------------- ours beside theirs


@pytest.mark.slow
def test_the_loss_is_that_of_transformers(model: Any, windows: np.ndarray) -> None:
    mask = np.ones(windows.shape, bool)
    mask[:, 0] = False
    ours, theirs = loss(open_checkpoint(LLAMA), windows, mask), nats(model, windows).mean()
    assert abs(ours - theirs) < 1e-5 * theirs


# ------------------------------------------------------------------------------------- compress, reload and generate


@pytest.mark.slow
@pytest.mark.usefixtures("without_pictures")
def test_compressed_it_still_predicts_and_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: Any, tokenizer: Any, text: str, windows: np.ndarray
) -> None:
    pytest.importorskip("tnlib_adapters.transformers_plugin")
    few_steps(monkeypatch, 15)  # quick, and a little worse
    (tmp_path / "text").write_text(text[40_000:48_000], encoding="utf-8")
    report = compress(LLAMA, tmp_path / "out", Budget(keep=0.5), calibration=tmp_path / "text", what="attention")
    assert report.kept <= 0.5
    assert (tmp_path / "out/model.safetensors").stat().st_size < (LLAMA / "model.safetensors").stat().st_size

    smaller = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    before, after = nats(model, windows).mean(), nats(smaller, windows).mean()
    assert after < before + 0.4  # without any attention it is 0.5 and more, see above
    mask = np.ones(windows.shape, bool)
    mask[:, 0] = False
    assert abs(loss(open_checkpoint(tmp_path / "out"), windows, mask) - after) < 1e-5 * after

    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    prompt = again("    def read(self, size=-1):\n", return_tensors="pt")
    assert torch.equal(
        prompt["input_ids"], tokenizer("    def read(self, size=-1):\n", return_tensors="pt")["input_ids"]
    )
    written = smaller.generate(**prompt, max_new_tokens=20, min_new_tokens=20, do_sample=False)
    assert written.shape[1] == prompt["input_ids"].shape[1] + 20
    assert len(set(written[0].tolist())) > 5


@pytest.mark.usefixtures("without_pictures")
@pytest.mark.parametrize(("method", "keep", "lost"), [("heads", 0.75, 0.05), ("matrix", 0.5, 0.3)])
def test_compressed_without_a_text_it_still_predicts(
    method: str, keep: float, lost: float, tmp_path: Path, model: Any, windows: np.ndarray
) -> None:
    """Planes left out of queries and keys would cost ten times as much."""
    pytest.importorskip("tnlib_adapters.transformers_plugin")
    compress(LLAMA, tmp_path / "out", Budget(keep=keep), method=method, what="attention")
    smaller = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    assert nats(smaller, windows).mean() < nats(model, windows).mean() + lost
