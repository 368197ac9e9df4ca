"""Layout gguf: blocks as the package gguf reads them, models as transformers reads them, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from oracles import refused

gguf = pytest.importorskip("gguf")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from tnlib_adapters import Budget, builtin_path, compress, open_checkpoint  # noqa: E402
from tnlib_adapters.compression.gguf_file import blocks, write_gguf  # noqa: E402
from tnlib_adapters.factors.engine_tensors import COMPRESSED_TENSORS, DESCRIBE, ENCODE  # noqa: E402
from tnlib_adapters.factors.integers import IntegerFormat, round_to_nearest  # noqa: E402
from tnlib_adapters.files.folder import write_folder  # noqa: E402
from tnlib_adapters.files.safetensors_file import Entry  # noqa: E402
from transformers_models import made_up_text  # noqa: E402

from tnlib import ArgumentError  # noqa: E402

pytestmark = pytest.mark.usefixtures("fit_in_few_steps", "without_pictures")
WIDTHS = {4: "Q4_0", 5: "Q5_0", 8: "Q8_0"}
UNTIED = {
    "head_dim": 32,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e4},
    "tie_word_embeddings": False,
    "vocab_size": 1030,  # more than the tokenizer has, and no multiple of 32
}


@pytest.fixture(params=["trained", "untied"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The built-in Llama, or a random one of other sizes."""
    if request.param == "trained":
        return builtin_path("llama")
    config = transformers.AutoConfig.from_pretrained(builtin_path("llama"), **UNTIED)
    torch.manual_seed(0)
    folder = shutil.copytree(builtin_path("llama"), tmp_path / "untied")
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def rounded(source: Path, out: Path) -> Any:
    """A checkpoint with its matrices in integers of 4, 5 and 8 bits, rounded to nearest."""
    model, formats, entries = open_checkpoint(source), dict[str, IntegerFormat](), list[Entry]()
    for k, (name, info) in enumerate(model.folder.tensors.items()):
        if len(info.shape) < 2:
            entries.append(Entry(name, info.dtype, info))
            continue
        module, bits = name.removesuffix(".weight"), [*WIDTHS][k % 3]
        formats[module] = IntegerFormat(bits, 0, 32, has_zero=True)
        integers = round_to_nearest(info.read().T, formats[module])
        stored = ENCODE[COMPRESSED_TENSORS](integers, "F16")
        entries += [Entry(f"{module}.{own}", dtype, array) for own, (dtype, array) in stored.items()]
    config = {**model.config, "quantization_config": DESCRIBE[COMPRESSED_TENSORS](formats)}
    out.mkdir()
    list(write_folder(model.folder, {"model.safetensors": entries}, config, out))
    return open_checkpoint(out)


def greedy(model: Any) -> list[int]:
    x = torch.arange(5, 45)[None]
    options: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    return model.eval().generate(x, attention_mask=torch.ones_like(x), **options)[0].tolist()


@pytest.mark.parametrize("bits", WIDTHS)
def test_blocks_are_read_bit_for_bit(bits: int) -> None:
    integers = round_to_nearest(
        np.random.default_rng(bits).standard_normal((96, 5)), IntegerFormat(bits, 0, 32, has_zero=True)
    )
    codes = integers.codes.T.astype(np.int16) + (128 if bits == 8 else 0)
    stored = blocks(codes, integers.scales.T, bits)
    read = gguf.dequantize(stored, gguf.GGMLQuantizationType[WIDTHS[bits]])
    assert np.array_equal(read, integers.values().T)


@pytest.mark.slow
def test_transformers_reads_the_weights_bit_for_bit(source: Path, tmp_path: Path) -> None:
    checkpoint = rounded(source, tmp_path / "rounded")
    write_gguf(checkpoint, tmp_path / "model.gguf")
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", dtype=torch.float32)
    own = {name: torch.from_numpy(np.array(info.read())) for name, info in checkpoint.folder.tensors.items()}
    found = read.state_dict()
    assert {*own} <= {*found}
    for name, values in own.items():
        assert torch.equal(found[name], values), name
    wanted = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    wanted.load_state_dict(own, strict=False)
    assert read.config.rope_parameters == wanted.config.rope_parameters
    assert greedy(read) == greedy(wanted)
    text = "Return the number of  tokens, 12 of 345.\n\n\u00e9"
    tokenizers = [transformers.AutoTokenizer.from_pretrained(source)]
    tokenizers.append(transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file="model.gguf"))
    assert tokenizers[0](text)["input_ids"] == tokenizers[1](text)["input_ids"]


@pytest.mark.slow
def test_compress_writes_one_file_within_the_budget(tmp_path: Path) -> None:
    source, out = builtin_path("llama"), tmp_path / "out"
    (tmp_path / "text.txt").write_text(made_up_text(), encoding="utf-8")
    report = compress(source, out, Budget(bits=6.0), calibration=tmp_path / "text.txt", layout="gguf")
    assert not list(out.glob("*.safetensors*"))
    assert json.loads((out / "config.json").read_text()) == json.loads((source / "config.json").read_text())
    tensors = gguf.GGUFReader(out / "model.gguf").tensors
    matrices = [tensor for tensor in tensors if len(tensor.shape) > 1]
    assert len(matrices) == 29  # q, k, v, o, gate, up, down in 4 layers, and the tied table
    assert len({tensor.tensor_type.name for tensor in matrices}) > 1
    assert {tensor.tensor_type.name for tensor in matrices} <= {*WIDTHS.values()}
    assert 8 * sum(int(tensor.n_bytes) for tensor in matrices) <= 6.0 * report.n_before
    read = transformers.AutoModelForCausalLM.from_pretrained(out, gguf_file="model.gguf", dtype=torch.float32)
    before = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    with torch.no_grad():
        logits = [model(torch.arange(5, 45)[None]).logits for model in (read, before)]
    assert torch.linalg.norm(logits[0] - logits[1]) < 0.05 * torch.linalg.norm(logits[1])


def change_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def change_tokenizer(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    change(content)
    (folder / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")


WORDS, SCALED = {"type": "Whitespace"}, {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
UNWRITABLE: dict[str, Callable[[Path], None]] = {
    "a Llama": lambda folder: change_config(folder, hidden_act="gelu"),
    "not scaled": lambda folder: change_config(folder, rope_parameters=SCALED),
    "splits text": lambda folder: change_tokenizer(folder, lambda own: own.update(pre_tokenizer=WORDS)),
    "at most 1024 tokens": lambda folder: change_tokenizer(folder, one_token_more),
}


def one_token_more(tokenizer: dict[str, Any]) -> None:
    tokenizer["added_tokens"].append(tokenizer["added_tokens"][0] | {"id": 1024, "content": "<more>"})


@pytest.mark.parametrize("word", UNWRITABLE)
def test_a_model_that_cannot_be_written_is_refused_before_any_work(word: str, tmp_path: Path) -> None:
    folder = shutil.copytree(builtin_path("llama"), tmp_path / "in")
    (tmp_path / "text.txt").write_text(made_up_text(), encoding="utf-8")
    UNWRITABLE[word](folder)
    with refused(ArgumentError, word):
        compress(folder, tmp_path / "out", Budget(bits=5.0), calibration=tmp_path / "text.txt", layout="gguf")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "text.txt"]


def test_fewer_bits_than_a_block_takes_are_refused() -> None:
    with refused(ArgumentError, "at least 4.5"):
        compress("in", "out", Budget(bits=4.0), calibration="text.txt", layout="gguf")
