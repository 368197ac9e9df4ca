"""Weights that are read when they are needed: all at once, or one block at a time, the model computes the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from oracles import refused
from slow_cases import mostly_slow
from tnlib_adapters import compress, open_checkpoint
from transformers_models import MODELS, made_up_text, random_model, save_with_tokenizer

from tnlib import FileFormatError

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tnlib_adapters.compression.activation_statistics.statistics import collect  # noqa: E402
from tnlib_adapters.compression.evaluation.evaluate import evaluate_running  # noqa: E402
from tnlib_adapters.factors.projections import Products  # noqa: E402
from tnlib_adapters.instrument import stored_weights  # noqa: E402
from tnlib_adapters.instrument.block import Block  # noqa: E402
from tnlib_adapters.instrument.block_passes import Frame, run_block  # noqa: E402
from tnlib_adapters.instrument.running_model import Batch, RunningModel, find_module, open_running  # noqa: E402
from tnlib_adapters.instrument.weight_inputs import find_places  # noqa: E402

NAMES = [name for name in MODELS if name not in ("vit", "t5", "t5_untied")]  # of text, of one stack
QUICK = ["bert_masked", "gpt2_lm", "gptj", "mixtral", "bloom", "t5_encoder", "deepseek_v3_experts"]


@pytest.fixture
def one_block_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_weights, "IN_MEMORY", 1)


def some_batch() -> Batch:
    """Two texts, the second of them shorter."""
    ids = torch.from_numpy(np.random.default_rng(0).integers(2, 49, size=(2, 7)))
    mask = torch.tensor([[1] * 7, [1] * 5 + [0] * 2])
    return Batch(ids, mask)


def n_blocks_in_memory(model: RunningModel) -> int:
    return sum(not any(p.is_meta for p in layer.block.parameters()) for layer in model.layers)


def loaded_by_transformers(folder: Path, name: str) -> Any:
    predicts = open_checkpoint(folder).wiring.unembedding is not None
    loader = transformers.AutoModelForTextEncoding if name.startswith("t5") else transformers.AutoModel
    loader = transformers.AutoModelForCausalLM if predicts else loader
    return loader.from_pretrained(str(folder), dtype=torch.float32).eval()


@pytest.mark.parametrize("name", mostly_slow(NAMES, QUICK))
def test_the_model_of_transformers(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All weights in memory, one block at a time by hooks, and one block at a time by hand."""
    folder = save_with_tokenizer(random_model(name), tmp_path)
    batch, whole = some_batch(), open_running(folder)
    arguments: dict[str, Any] = {"input_ids": batch.ids, "attention_mask": batch.mask}
    arguments |= {"use_cache": False} if whole.predicts else {}
    with torch.no_grad():
        wanted = loaded_by_transformers(folder, name)(**arguments)[0]
        assert torch.equal(whole.model(**arguments)[0], wanted)
        monkeypatch.setattr(stored_weights, "IN_MEMORY", 1)
        by_block = open_running(folder)
        assert n_blocks_in_memory(by_block) == 0
        assert torch.equal(by_block.model(**arguments)[0], wanted)
        assert n_blocks_in_memory(by_block) == 1
        frame = Frame(by_block)
        x, calls = frame.enter(batch)
        for k, call in enumerate(calls):
            x = run_block(by_block, k, x, call)
        assert torch.equal(frame.leave(x, batch), whole(batch))


@pytest.mark.parametrize("options", [{"keep": 0.5}, {"keep": 0.5, "what": "all", "method": "matrix"}], ids=str)
@pytest.mark.parametrize("name", ["bert", "gpt2_lm", "llama"])
def test_a_compressed_folder_is_multiplied_out(
    name: str, options: dict[str, Any], tmp_path: Path, without_pictures: None
) -> None:
    folder = save_with_tokenizer(random_model(name), tmp_path / "in")
    compress(folder, tmp_path / "out", **options)
    model, theirs = open_running(tmp_path / "out"), loaded_by_transformers(tmp_path / "out", name)
    batch = some_batch()
    arguments = {"input_ids": batch.ids, "attention_mask": batch.mask}
    with torch.no_grad():
        found, wanted = (m(**arguments)[0][batch.valid].double() for m in (model.model, theirs))
    assert float((found - wanted).norm()) <= 1e-5 * float(wanted.norm())


@pytest.mark.parametrize("name", ["bert", "gpt2_lm", "t5_encoder"])
def test_statistics_do_not_depend_on_what_is_in_memory(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_with_tokenizer(random_model(name), tmp_path)
    found = []
    for limit in (stored_weights.IN_MEMORY, 1):
        monkeypatch.setattr(stored_weights, "IN_MEMORY", limit)
        model = open_running(folder)
        found.append(collect(model, find_places(model), [some_batch()]))
    assert found[0].reads.keys() == found[1].reads.keys()
    for one, other in ((found[0].reads, found[1].reads), (found[0].slopes, found[1].slopes)):
        for key, values in one.items():
            np.testing.assert_array_equal(other[key], values)


@pytest.mark.usefixtures("one_block_in_memory")
def test_a_change_is_made_whenever_a_block_is_loaded(saved: Callable[[str], tuple[Any, Path]], tmp_path: Path) -> None:
    folder = save_with_tokenizer(saved("gpt2_lm")[0], tmp_path)
    model = open_running(folder)
    silent = model.changed(lambda k, values: {n: 0 * v if k >= 0 else v for n, v in values.items()})
    batch = some_batch()
    for _ in range(2):  # blocks are loaded again
        with torch.no_grad():
            x, _ = Frame(silent).enter(batch)
            assert torch.equal(Frame(silent).leave(x, batch), silent(batch))
    assert evaluate_running(model, model, made_up_text(20)).error == 0
    assert evaluate_running(model, silent, made_up_text(20)).error > 0


@pytest.mark.usefixtures("one_block_in_memory")
@pytest.mark.parametrize("name", ["gpt2_lm", "llama"])
def test_weights_that_are_replaced_are_not_in_memory(name: str, tmp_path: Path) -> None:
    """A block with factors in the place of some weights computes the same without these weights."""
    model = open_running(save_with_tokenizer(random_model(name), tmp_path))
    down = model.wiring.layers[1].feed_forward.down
    block, (_, calls), x = Block(model, 1), Frame(model).enter(some_batch()), torch.ones(2, 7, model.sizes.d_model)
    inner = down.on_rows(np.empty(find_module(model.model, down.name).weight.shape)).shape[0]
    factors = (torch.eye(inner), torch.ones(inner, model.sizes.d_model))
    weights = block.weights(Products({down.name: factors}))
    wanted, own = block.run(x, calls[1], weights), block.run(x, calls[1])
    with block.without(block.replaced_by(weights)):
        assert sum(p.is_meta for p in block.layer.block.parameters()) == 1
        assert torch.equal(block.run(x, calls[1], weights), wanted)
    assert torch.equal(block.run(x, calls[1]), own)
    assert not any(p.is_meta for p in block.layer.block.parameters())


@pytest.mark.parametrize("what", ["missing", "left over", "of another shape"])
def test_an_incomplete_model_is_refused_by_the_name_of_a_tensor(what: str, tmp_path: Path) -> None:
    from checkpoint_folders import change_tensors

    folder = save_with_tokenizer(random_model("bert"), tmp_path)
    name = "encoder.layer.1.output.LayerNorm.weight"

    def change(tensors: dict[str, Any]) -> None:
        if what == "missing":
            del tensors[name]
        elif what == "left over":
            tensors["encoder.layer.7.output.LayerNorm.weight"] = tensors[name]
        else:
            tensors[name] = np.append(tensors[name], tensors[name][:1])

    change_tensors(folder, change)
    with refused(FileFormatError, "evaluate", "LayerNorm.weight", what):
        open_running(folder)
