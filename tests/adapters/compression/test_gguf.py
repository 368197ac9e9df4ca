"""Layout gguf: blocks as the package gguf reads them, models as transformers reads them, and what is refused."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from oracles import refused

gguf = pytest.importorskip("gguf")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from tnlib_adapters import Budget, builtin_path, compress, open_checkpoint, plan  # noqa: E402
from tnlib_adapters.compression.engine_layouts import K_QUANTS  # noqa: E402
from tnlib_adapters.compression.gguf_file import write_gguf  # noqa: E402
from tnlib_adapters.compression.methods.compensated_rounding import refit_scales, round_compensated  # noqa: E402
from tnlib_adapters.compression.methods.components import rounding_loss  # noqa: E402
from tnlib_adapters.factors.engine_tensors import DESCRIBE, ENCODE  # noqa: E402
from tnlib_adapters.factors.gguf_blocks import GGUF, TYPES, block_formats, type_of  # noqa: E402
from tnlib_adapters.factors.integers import IntegerFormat  # noqa: E402
from tnlib_adapters.factors.rounding import round_to_nearest  # noqa: E402
from tnlib_adapters.files.folder import write_folder  # noqa: E402
from tnlib_adapters.files.safetensors_file import Entry  # noqa: E402
from transformers_models import made_up_text  # noqa: E402

from tnlib import ArgumentError  # noqa: E402

pytestmark = pytest.mark.usefixtures("fit_in_few_steps", "without_pictures")
WIDTHS = (2, 3, 4, 5, 6, 8)
WIDE = {"hidden_size": 256, "head_dim": 32, "intermediate_size": 512, "num_hidden_layers": 2}
UNTIED = {
    "head_dim": 32,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e4},
    "tie_word_embeddings": False,
    "vocab_size": 1030,  # more than the tokenizer has, and no multiple of 32
}


@pytest.fixture(params=["trained", "untied", "wide"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The built-in Llama, or a random one of other sizes."""
    if request.param == "trained":
        return builtin_path("llama")
    return random_llama(tmp_path / request.param, UNTIED if request.param == "untied" else WIDE)


def random_llama(folder: Path, sizes: Any) -> Path:
    """A Llama of these sizes with the tokenizer of the built-in one."""
    config = transformers.AutoConfig.from_pretrained(builtin_path("llama"), **sizes)
    torch.manual_seed(0)
    shutil.copytree(builtin_path("llama"), folder)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def rounded(source: Path, out: Path) -> tuple[Any, dict[str, Any]]:
    """A checkpoint with its matrices in blocks of all types that they hold, rounded to nearest, and their values."""
    values = dict[str, Any]()
    model, formats, entries = open_checkpoint(source), dict[str, IntegerFormat](), list[Entry]()
    for k, (name, info) in enumerate(model.folder.tensors.items()):
        if len(info.shape) < 2:
            entries.append(Entry(name, info.dtype, info))
            continue
        module, forms = name.removesuffix(".weight"), block_formats(info.shape[1], WIDTHS)
        formats[module] = forms[k % len(forms)]
        integers = round_to_nearest(info.read().T, formats[module])
        values[name] = integers.values().T
        stored = ENCODE[GGUF](integers)
        entries += [Entry(f"{module}.{own}", dtype, array) for own, (dtype, array) in stored.items()]
    config = {**model.config, "quantization_config": DESCRIBE[GGUF](formats)}
    out.mkdir()
    list(write_folder(model.folder, {"model.safetensors": entries}, config, out))
    return open_checkpoint(out), values


def greedy(model: Any) -> list[int]:
    x = torch.arange(5, 45)[None]
    options: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    return model.eval().generate(x, attention_mask=torch.ones_like(x), **options)[0].tolist()


def uneven(form: IntegerFormat, n_in: int = 512) -> np.ndarray:
    """Columns with small, equal, positive and zero entries."""
    weight = 0.03 * np.random.default_rng(form.bits).standard_normal((n_in, 6)).astype(np.float32)
    weight[n_in // 2 :, 1] *= 1e-4
    weight[:64, 2] = np.abs(weight[:64, 2])
    weight[:, 3] = 0
    weight[:48, 4] = 0.5
    return weight


@pytest.mark.parametrize("kind", TYPES)
def test_blocks_are_read_bit_for_bit(kind: str) -> None:
    form = TYPES[kind].form
    for integers in (round_to_nearest(uneven(form), form), round_compensated(uneven(form), form, np.eye(512) + 0.5)):
        ((_, stored),) = ENCODE[GGUF](integers).values()
        assert np.array_equal(gguf.dequantize(stored, gguf.GGMLQuantizationType[kind]), integers.values().T)
        assert 8 * stored.size == form.n_bits(integers.codes.shape)
        assert np.array_equal(form.stored_scales(integers.scales), integers.scales)


@pytest.mark.parametrize("kind", [kind for kind, own in TYPES.items() if own.form.in_super_blocks])
def test_scales_in_super_blocks_cost_little(kind: str) -> None:
    form, weight = TYPES[kind].form, np.random.default_rng(0).standard_normal((1024, 8)).astype(np.float32)
    floats = IntegerFormat(form.bits, 0, form.group, has_zero=True)
    lost = [np.square(weight - round_to_nearest(weight, own).values()).sum() for own in (form, floats)]
    assert lost[0] <= (0.85 if form.has_minimum else 1.05) * lost[1]  # a minimum is worth a quarter of the error


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("kind", [kind for kind, own in TYPES.items() if own.form.in_super_blocks])
def test_refitted_scales_lose_no_more(kind: str, axis: int) -> None:
    rng, form = np.random.default_rng(3), replace(TYPES[kind].form, axis=axis)
    weight = rng.standard_normal((256, 24)).astype(np.float32)
    mixed = [rng.standard_normal((n, n)) * np.arange(1, n + 1) ** -0.5 for n in weight.shape]
    reads, slopes = (own @ own.T / len(own) + 0.1 * np.eye(len(own)) for own in mixed)
    sides = (weight, reads, slopes) if axis == 0 else (weight.T, slopes, reads)
    nearest, rounded = round_to_nearest(sides[0], form), round_compensated(sides[0], form, *sides[1:])
    losses = [rounding_loss(sides[0] - own.values(), *sides[1:]) for own in (nearest, rounded)]
    assert losses[1] < 0.8 * losses[0]
    refitted = refit_scales(sides[0], nearest, None, None)
    assert np.array_equal(form.stored_scales(refitted.scales), refitted.scales)
    squares = [np.square(sides[0] - own.values()).sum() for own in (nearest, refitted)]
    assert squares[1] <= squares[0]


def test_a_width_has_one_type() -> None:
    assert [type_of(form) for form in block_formats(96, WIDTHS)] == ["Q4_0", "Q5_0", "Q8_0"]
    forms = block_formats(768, WIDTHS)
    assert {type_of(form) for form in forms} == {"Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q8_0"}
    assert {form.bits: form.n_bits((768, 2)) / 1536 for form in forms} == K_QUANTS


@pytest.mark.slow
def test_transformers_reads_the_weights_bit_for_bit(source: Path, tmp_path: Path) -> None:
    checkpoint, values = rounded(source, tmp_path / "rounded")
    write_gguf(checkpoint, tmp_path / "model.gguf")
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", dtype=torch.float32)
    own = {name: torch.from_numpy(np.array(info.read())) for name, info in checkpoint.folder.tensors.items()}
    assert all(np.array_equal(own[name].numpy(), of_codes) for name, of_codes in values.items())
    found = read.state_dict()
    assert {*own} <= {*found}
    for name, read_here in own.items():
        assert torch.equal(found[name], read_here), name
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
    assert {tensor.tensor_type.name for tensor in matrices} <= {"Q4_0", "Q5_0", "Q8_0"}
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


@pytest.mark.parametrize(
    ("model", "budget", "words"),
    [
        ("in", Budget(bits=2.6), "at least 2.625"),
        (builtin_path("llama"), Budget(bits=4.0), "at least 4.5 for layout 'gguf' on this model"),
        (builtin_path("llama"), Budget(store="int3"), "store must be of 4, 5, 8 bits"),
    ],
)
def test_widths_that_no_block_holds_are_refused(model: Any, budget: Budget, words: str, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(made_up_text(), encoding="utf-8")
    with refused(ArgumentError, words):
        compress(model, tmp_path / "out", budget, calibration=tmp_path / "text.txt", layout="gguf")


MIXED = {"hidden_size": 96, "head_dim": 32, "intermediate_size": 256, "num_hidden_layers": 1}


@pytest.mark.parametrize("function", [compress, plan])
def test_fewer_bits_than_the_types_of_the_rows_take_are_refused(function: Any, tmp_path: Path) -> None:
    source = random_llama(tmp_path / "in", MIXED)
    (tmp_path / "text.txt").write_text(made_up_text(), encoding="utf-8")
    options: dict[str, Any] = {"calibration": tmp_path / "text.txt", "layout": "gguf"}
    tensors = open_checkpoint(source).folder.tensors.values()
    shapes = [info.shape for info in tensors if len(info.shape) == 2]
    n_parameters = sum(math.prod(shape) for shape in shapes)
    n_bits = sum(math.prod(shape) * (2.625 if shape[1] == 256 else 4.5) for shape in shapes)
    fewest = math.ceil(100 * n_bits / n_parameters) / 100
    assert 2.625 < n_bits / n_parameters < 4.5
    call = partial(function, source, **({} if function is plan else {"out": tmp_path / "out"}))
    with refused(ArgumentError, f"compress: bits must be at least {fewest:g} for layout 'gguf' on this model", "raise"):
        call(budget=Budget(bits=fewest - 0.02), **options)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "text.txt"]
    result = call(budget=Budget(bits=fewest), effort="low", **options)  # accepted, and met
    if function is compress:
        assert n_bits / n_parameters <= result.average_bits <= fewest
