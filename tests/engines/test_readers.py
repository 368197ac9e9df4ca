"""Layouts of engines in the engines' own readers, which run in an environment without tnlib."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

PYTHON = Path(os.environ.get("READERS_PYTHON", ""))
if not PYTHON.is_file():
    pytest.skip("gptqmodel and onnxruntime-genai are not installed: make engines", allow_module_level=True)
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tnlib_adapters import Budget, builtin_path, compress, open_checkpoint  # noqa: E402
from transformers_models import made_up_text  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.engines]
PROMPT, COUNT = [*range(30, 70)], 16

IN_GPTQMODEL = """
import json, sys, numpy, torch
from gptqmodel import BACKEND, GPTQModel
folder, prompt, count, out = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
model = GPTQModel.load(folder, device="cpu", backend=BACKEND.TORCH, dtype=torch.bfloat16).model.float()
x = torch.tensor([prompt])
with torch.no_grad():
    numpy.save(out, model(x).logits.numpy())
print(json.dumps(model.generate(x, max_new_tokens=count, do_sample=False)[0, len(prompt):].tolist()))
"""
IN_ONNXRUNTIME = """
import json, sys, numpy
import onnxruntime_genai as genai
folder, prompt, count, out = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
model = genai.Model(folder)
options = genai.GeneratorParams(model)
options.set_search_options(max_length=len(prompt) + count, do_sample=False)
generator = genai.Generator(model, options)
generator.append_tokens(numpy.array(prompt, numpy.int32))
numpy.save(out, generator.get_output("logits"))
found = []
while len(found) < count and not generator.is_done():
    generator.generate_next_token()
    found.append(int(generator.get_next_tokens()[0]))
print(json.dumps(found))
"""


def run_in_reader(command: Sequence[str]) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([PYTHON, *command], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def written(layout: str, place: Path) -> tuple[Path, Any]:
    """A compressed built-in Llama, and the dense model that its integers stand for."""
    text = place / "text.txt"
    text.write_text(made_up_text(), encoding="utf-8")
    compress(builtin_path("llama"), place / "out", Budget(bits=4.5), calibration=text, layout=layout, effort="low")
    model = transformers.AutoModelForCausalLM.from_pretrained(builtin_path("llama"), dtype=torch.float32).eval()
    tensors = open_checkpoint(place / "out").folder.tensors
    model.load_state_dict({name: torch.from_numpy(np.array(info.read())) for name, info in tensors.items()}, False)
    return place / "out", model


def compare(model: Any, script: str, folder: Path, place: Path) -> float:
    """The largest difference of logits, relative to the largest; greedy tokens are equal."""
    arguments = [str(folder), json.dumps(PROMPT), str(COUNT), str(place / "logits.npy")]
    found = json.loads(run_in_reader(["-c", script, *arguments]).splitlines()[-1])
    x = torch.tensor([PROMPT])
    with torch.no_grad():
        wanted = model(x).logits.numpy()
    tokens = model.generate(x, max_new_tokens=COUNT, do_sample=False)[0, len(PROMPT) :].tolist()
    assert found == tokens
    return float(np.abs(np.load(place / "logits.npy") - wanted).max() / np.abs(wanted).max())


def test_gptqmodel(tmp_path: Path) -> None:
    folder, model = written("gptq", tmp_path)
    widths = json.loads((folder / "config.json").read_text())["quantization_config"]["dynamic"].values()
    assert len({own["bits"] for own in widths}) > 1
    assert compare(model, IN_GPTQMODEL, folder, tmp_path) <= 1e-5


def test_onnxruntime_genai(tmp_path: Path) -> None:
    folder, model = written("onnxruntime", tmp_path)
    options = ["disable_qkv_fusion=true", "shared_embeddings=false", "nodes_to_exclude=/lm_head/MatMul"]
    command = ["-m", "onnxruntime_genai.models.builder", "-m", "gptq", "-i", str(folder), "-o", str(tmp_path / "onnx")]
    run_in_reader([*command, "-p", "int4", "-e", "cpu", "--extra_options", *options, "accuracy_level=1"])
    assert compare(model, IN_ONNXRUNTIME, tmp_path / "onnx", tmp_path) <= 0.01
