"""The layout `gguf` in llama.cpp: a trained Llama generates as in transformers."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

LLAMA_CPP = Path(os.environ.get("LLAMA_CPP_SOURCE", "")) / "vendor" / "llama.cpp"
if find_spec("llama_cpp") is None or not LLAMA_CPP.exists():  # imported, it opens files that it never closes
    pytest.skip("llama.cpp is not built: make engines", allow_module_level=True)
pytest.importorskip("sentencepiece", reason="the converter of llama.cpp is not installed: make engines")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from engines.trained_llama import train  # noqa: E402
from tnlib_adapters import Budget, builtin_path, compress, open_checkpoint  # noqa: E402
from tnlib_adapters.compression.gguf_file import write_gguf  # noqa: E402
from transformers_models import made_up_text  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.engines]

GENERATE = """
import json, sys
import llama_cpp
file, prompts, count = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
model = llama_cpp.Llama(file, n_ctx=128, n_threads=1, type_k=0, type_v=0, verbose=False)
for prompt in prompts:
    model.reset()
    tokens = model.generate(prompt, top_k=1, temp=0.0, repeat_penalty=1.0)
    print(json.dumps([next(tokens) for _ in range(count)]))
"""
LOGITS = """
import json, sys, numpy
import llama_cpp
tokens = json.loads(sys.argv[2])
model = llama_cpp.Llama(sys.argv[1], n_ctx=128, n_threads=1, type_k=0, type_v=0, logits_all=True, verbose=False)
model.eval(tokens)
numpy.save(sys.argv[3], model.scores[: len(tokens)])
"""
TOKENIZE = """
import json, sys
import llama_cpp
print(json.dumps(llama_cpp.Llama(sys.argv[1], vocab_only=True, verbose=False).tokenize(sys.argv[2].encode())))
"""
COUNT = 64


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained Llama with a tokenizer that the converter knows, and some of its text beside it."""
    folder = tmp_path_factory.mktemp("trained") / "model"
    train(folder, LLAMA_CPP)
    return folder


def prompts(folder: Path) -> list[list[int]]:
    """Tokens of the beginnings of some sentences."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    return [tokenizer(text)["input_ids"] for text in ("Return the", "The file is", "If the argument")]


def in_transformers(folder: Path, **options: Any) -> list[list[int]]:
    """Greedy continuations of the prompts."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options).eval()
    greedy: dict[str, Any] = {"max_new_tokens": COUNT, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    found = []
    for prompt in prompts(folder):
        x = torch.tensor([prompt])
        found.append(model.generate(x, attention_mask=torch.ones_like(x), **greedy)[0, len(prompt) :].tolist())
    return found


def converted(folder: Path) -> Path:
    """The folder as a GGUF file in single precision."""
    file = folder.with_suffix(".gguf")
    command = [sys.executable, str(LLAMA_CPP / "convert_hf_to_gguf.py"), str(folder)]
    subprocess.run([*command, "--outfile", str(file), "--outtype", "f32"], check=True, capture_output=True, text=True)
    return file


def in_llama_cpp(folder: Path, file: Path) -> list[list[int]]:
    """The same continuations, in a process of its own: llama.cpp ends it where a model does not fit."""
    command = [sys.executable, "-c", GENERATE, str(file), json.dumps(prompts(folder)), str(COUNT)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_the_original_generates_the_same(source: Path) -> None:
    assert in_llama_cpp(source, converted(source)) == in_transformers(source)


# llama.cpp rounds activations to 8 bits; a random model amplifies the error
@pytest.mark.parametrize(("bits", "tolerance"), [(5.5, 0.02), (4.0, 0.1)], ids=["blocks of 32", "K-quants"])
def test_a_written_file_generates_the_same(bits: float, tolerance: float, tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="transformers reads GGUF files with it")
    out, text, x = tmp_path / "gguf", tmp_path / "text.txt", [*range(30, 70)]
    text.write_text(made_up_text(), encoding="utf-8")
    trained = builtin_path("llama") if bits == 5.5 else wide(tmp_path / "wide")
    compress(trained, out, Budget(bits=bits), calibration=text, layout="gguf", effort="low")
    arguments = [str(out / "model.gguf"), json.dumps(x), str(tmp_path / "logits.npy")]
    subprocess.run([sys.executable, "-c", LOGITS, *arguments], check=True, capture_output=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(out, gguf_file="model.gguf", dtype=torch.float32)

    def logits(tokens: list[int]) -> np.ndarray:
        with torch.no_grad():
            return model(torch.tensor([tokens])).logits[0].numpy()

    wanted = logits(x)
    assert np.abs(np.load(tmp_path / "logits.npy") - wanted).max() <= tolerance * np.abs(wanted).max()
    there, here = in_llama_cpp(out, out / "model.gguf"), in_transformers(out, gguf_file="model.gguf")
    for prompt, *both in zip(prompts(out), there, here, strict=True):
        differ = next((k for k, tokens in enumerate(zip(*both, strict=True)) if len({*tokens}) > 1), None)
        if differ is not None:  # the two likeliest tokens are a tie within that error
            last = logits(prompt + both[1][:differ])[-1]
            assert np.ptp(last[[tokens[differ] for tokens in both]]) <= tolerance * np.abs(last).max()


def wide(folder: Path) -> Path:
    """A random Llama whose matrices fill super-blocks of 256."""
    sizes = {"hidden_size": 256, "head_dim": 32, "intermediate_size": 512, "num_hidden_layers": 2}
    config = transformers.AutoConfig.from_pretrained(builtin_path("llama"), initializer_range=0.1, **sizes)
    torch.manual_seed(0)
    shutil.copytree(builtin_path("llama"), folder)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


DIGITS = {"type": "Digits", "individual_digits": True}


@pytest.mark.parametrize("steps", [[], [DIGITS]], ids=["gpt-2", "smollm"])
def test_text_is_split_as_by_the_tokenizer(steps: list[Any], tmp_path: Path) -> None:
    folder = shutil.copytree(builtin_path("llama"), tmp_path / "model")
    content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [*steps, content["pre_tokenizer"]]}
    (folder / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    write_gguf(open_checkpoint(folder), tmp_path / "model.gguf")
    text = "It's  12 of 345.\n\n\tdef x1(): return '\u00e9\u6f22'  007"
    command = [sys.executable, "-c", TOKENIZE, str(tmp_path / "model.gguf"), text]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert json.loads(done.stdout) == transformers.AutoTokenizer.from_pretrained(folder)(text)["input_ids"]
