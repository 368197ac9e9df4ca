"""Models larger than the memory: every block is read once a text, when it is needed, and the results are the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from oracles import refused
from slow_cases import mostly_slow

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from compressed_folders import by_options  # noqa: E402
from tnlib_adapters import compress, open_checkpoint  # noqa: E402
from tnlib_adapters.compression import evaluate as evaluation  # noqa: E402
from tnlib_adapters.compression.calibration.collect_calibration import StatisticsPasses  # noqa: E402
from tnlib_adapters.compression.calibration.group_moments import RoundingMoments  # noqa: E402
from tnlib_adapters.compression.evaluate import (  # noqa: E402
    Evaluation,
    Reference,
    round_weights,
)
from tnlib_adapters.compression.methods.out_of_core import Workspace  # noqa: E402
from tnlib_adapters.compression.progress import quiet  # noqa: E402
from tnlib_adapters.compression.source_model import SourceModel  # noqa: E402
from tnlib_adapters.factors import expansion  # noqa: E402
from tnlib_adapters.factors.projections import Products  # noqa: E402
from tnlib_adapters.instrument import stored_weights  # noqa: E402
from tnlib_adapters.instrument.block import Block  # noqa: E402
from tnlib_adapters.instrument.block_passes import OuterLayers, Streams, forward, run_block  # noqa: E402
from tnlib_adapters.instrument.layer_fit import FitStreams  # noqa: E402
from tnlib_adapters.instrument.running_model import Batch, RunningModel, find_module, open_running  # noqa: E402
from tnlib_adapters.instrument.weight_inputs import find_uses  # noqa: E402
from tnlib_adapters.reference.model import run  # noqa: E402
from tnlib_adapters.reference.weights import read_weights  # noqa: E402
from transformers_models import MODELS, made_up_text, random_model, save_with_tokenizer, weights_in  # noqa: E402

from benchmarks.bits import collect  # noqa: E402
from tnlib import FileFormatError  # noqa: E402

NAMES = [name for name in MODELS if name not in ("vit", "t5", "t5_untied")]  # of text, of one stack
QUICK = ["bert_masked", "gpt2_lm", "gptj", "mixtral", "bloom", "t5_encoder", "deepseek_v3_experts"]


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
        outer = OuterLayers(by_block)
        x, calls = outer.enter(batch)
        for k, call in enumerate(calls):
            x = run_block(by_block, k, x, call)
        assert torch.equal(outer.leave(x, batch), whole(batch))


@pytest.mark.parametrize("options", [{"keep": 0.5}, {"keep": 0.5, "what": "all", "method": "matrix"}], ids=str)
@pytest.mark.parametrize("name", mostly_slow(["bert", "gpt2_lm", "llama"], ["gpt2_lm"]))
def test_a_compressed_folder_is_multiplied_out(
    name: str, options: dict[str, Any], tmp_path: Path, without_pictures: None
) -> None:
    folder = save_with_tokenizer(random_model(name), tmp_path / "in")
    compress(folder, tmp_path / "out", **by_options(**options))
    model, theirs = open_running(tmp_path / "out"), loaded_by_transformers(tmp_path / "out", name)
    batch = some_batch()
    arguments = {"input_ids": batch.ids, "attention_mask": batch.mask}
    with torch.no_grad():
        found, wanted = (m(**arguments)[0][batch.valid].double() for m in (model.model, theirs))
    assert float((found - wanted).norm()) <= 1e-5 * float(wanted.norm())


def test_large_weights_are_multiplied_out_in_single_precision(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without_pictures: None
) -> None:
    compress(llama, tmp_path / "out", **by_options(keep=0.5, what="all", method="matrix"))
    tensors = open_checkpoint(tmp_path / "out").folder.tensors
    wanted = {name: info.read() for name, info in tensors.items() if isinstance(info, expansion.ExpandedTensor)}
    monkeypatch.setattr(expansion, "LARGE_TABLE", 1)
    assert len(wanted) > 1
    for name, values in wanted.items():
        found = tensors[name].read()
        assert found.dtype == values.dtype == np.float32
        assert not np.array_equal(found, values)
        assert np.linalg.norm(found - values) <= 1e-6 * np.linalg.norm(values)


@pytest.mark.parametrize("name", ["bert", "gpt2_lm", "t5_encoder"])
def test_statistics_do_not_depend_on_what_is_in_memory(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_with_tokenizer(random_model(name), tmp_path)
    found = []
    for limit in (stored_weights.IN_MEMORY, 1):
        monkeypatch.setattr(stored_weights, "IN_MEMORY", limit)
        model = open_running(folder)
        workspace = None if limit > 1 else Workspace(0, lambda: tmp_path)
        found.append(collect(model, find_uses(model, weights_in(model)), [some_batch()], workspace))
    assert found[0].reads.keys() == found[1].reads.keys()
    for part in ("reads", "slopes", "scales"):
        one, other = (getattr(statistics, part) for statistics in found)
        for key, values in one.items():
            np.testing.assert_array_equal(other[key], values)


@pytest.mark.parametrize("in_memory", [False, True])
@pytest.mark.parametrize("name", ["gpt2_lm", "llama"])
def test_weights_that_are_replaced_are_not_in_memory(
    name: str, in_memory: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block with factors in the place of some weights computes the same without these weights."""
    if not in_memory:
        monkeypatch.setattr(stored_weights, "IN_MEMORY", 1)
    model = open_running(save_with_tokenizer(random_model(name), tmp_path))
    down = model.wiring.layers[1].feed_forward.down
    block, (_, calls), x = (
        Block(model, 1),
        OuterLayers(model).enter(some_batch()),
        torch.ones(2, 7, model.sizes.d_model),
    )
    inner = down.on_rows(np.empty(find_module(model.model, down.name).weight.shape)).shape[0]
    factors = (torch.eye(inner), torch.ones(inner, model.sizes.d_model))
    weights = block.weights(Products({down.name: factors}))
    wanted, own = block.run(x, calls[1], weights), block.run(x, calls[1])
    with block.without(weights):
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


N_LAYERS = 6
LLAMA = {"vocab_size": 50, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": N_LAYERS}
TEXT = made_up_text(300)  # several batches
LIMITS = (stored_weights.IN_MEMORY, 1)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**LLAMA, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32)
    return save_with_tokenizer(transformers.LlamaForCausalLM(config).eval(), tmp_path_factory.mktemp("llama"))


@pytest.fixture
def limited(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    return lambda n_bytes: monkeypatch.setattr(stored_weights, "IN_MEMORY", n_bytes)


@pytest.mark.parametrize("name", mostly_slow(["llama", "bert", "t5_encoder", "gpt2_lm"], ["llama", "t5_encoder"]))
def test_evaluations_do_not_depend_on_what_is_in_memory(
    name: str, llama: Path, tmp_path: Path, limited: Callable[[int], None]
) -> None:
    folder = llama if name == "llama" else save_with_tokenizer(random_model(name), tmp_path)
    found = []
    for limit in LIMITS:
        limited(limit)
        source = SourceModel(open_checkpoint(folder))
        found.append(
            Reference(source.original, TEXT).compare(round_weights(source.original, weights_in(source.original)))
        )
    one, other = found
    assert one.error > 0
    assert replace(one, cosine=None) == replace(other, cosine=None)
    np.testing.assert_array_equal(one.cosine, other.cosine)


def test_streams_are_split_by_texts(llama: Path) -> None:
    model = open_running(llama, batch_tokens=128)
    streams = Streams(model.batches(TEXT), 3)
    wanted = []
    for k, batch in enumerate(streams.batches):
        wanted.append(torch.randn(*batch.ids.shape, 3))
        streams.write("stream-0", k, wanted[-1])
    streams.finish("stream-0")
    most = 2 * streams.batches[0].ids.shape[1]  # the shortest texts come first
    split = streams.split(most)
    assert len(split.batches) > len(streams.batches) > 1
    assert max(batch.ids.numel() for batch in split.batches if len(batch.ids) > 1) <= most
    found = [split.read("stream-0", k) for k in range(len(split.batches))]
    for whole, parts in (([b.ids for b in streams.batches], [b.ids for b in split.batches]), (wanted, found)):
        texts, again = ([text for batch in batches for text in batch] for batches in (whole, parts))
        assert all(torch.equal(*pair) for pair in zip(texts, again, strict=True))


def test_streams_that_are_missing_are_made_from_the_last_before_them(llama: Path) -> None:
    model = open_running(llama)
    outer, n = OuterLayers(model), len(model.layers)
    streams = Streams(model.batches(TEXT), model.sizes.d_model)
    forward(outer, streams)
    wanted = {k: streams.read(f"stream-{k}", 0) for k in range(n + 1)}
    for k in (0, 2, n):
        streams.remove(f"stream-{k}")
    ran = list[int]()
    forward(outer, streams, lambda k, _: ran.append(k), inputs=[2])
    assert set(ran) == {1, n - 1}
    assert all(torch.equal(streams.read(f"stream-{k}", 0), wanted[k]) for k in (2, n))


@pytest.mark.parametrize("keeps_inputs", [True, False])
def test_streams_stay_for_the_fit_of_layers_alone(keeps_inputs: bool, llama: Path) -> None:
    model = open_running(llama)
    batches, n = model.batches(TEXT), len(model.layers)
    streams = Streams(batches, model.sizes.d_model, keeps_inputs=keeps_inputs)
    moments_of = partial(RoundingMoments, model, batches, Workspace())
    passes = StatisticsPasses(model, find_uses(model, weights_in(model)), batches, streams, moments_of, quiet)
    of_group = dict(passes.run())
    assert len(of_group) == n
    stored = {file.name for file in streams.folder.iterdir()}
    assert stored == {f"stream-{k}" for k in (range(n + 1) if keeps_inputs else (n,))}


def test_no_weights_of_the_model_are_in_memory_beside_others(llama: Path, limited: Callable[[int], None]) -> None:
    """Statistics are handed on, and the tables of another model read, when those of a large model are dropped."""
    limited(1)
    model = open_running(llama)
    batches, table = model.batches(TEXT), np.ones((model.vocab_size, model.sizes.d_model), np.float32)
    streams = Streams(batches, model.sizes.d_model)
    moments_of = partial(RoundingMoments, model, batches, Workspace())
    passes = StatisticsPasses(model, find_uses(model, weights_in(model, "all")), batches, streams, moments_of, quiet)
    loaded = {group: set(model.weights._loaded) for group, _ in passes.run()}
    assert loaded == {group: set() for group in range(-1, len(model.layers))}
    read, change = list[set[int]](), model.changed

    def changed(*args: Any) -> RunningModel:
        read.append(set(model.weights._loaded))
        return change(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunningModel, "changed", lambda _, *args: changed(*args))
        FitStreams(model, streams, {"embed_tokens": table})
    assert read == [set()]


def evaluated_by_batches(before: RunningModel, after: RunningModel) -> Evaluation:
    """The definition: all logits of a batch at once, in double precision."""
    batches, sums = before.batches(TEXT), np.zeros(4)
    for batch in batches:
        with torch.no_grad():
            p, q = (model(batch).double().log_softmax(-1)[:, :-1] for model in (before, after))
        valid, wanted = batch.valid[:, 1:], batch.ids[:, 1:, None]
        losses = [-log.gather(-1, wanted)[..., 0][valid].sum().item() for log in (p, q)]
        sums += [*losses, (p.exp() * (p - q)).sum(-1)[valid].sum().item(), valid.sum().item()]
    before_, after_, divergence = (sums[:3] / sums[3]).tolist()
    n_texts, n_tokens = sum(len(batch.ids) for batch in batches), sum(batch.n_tokens for batch in batches)
    return Evaluation(n_texts, n_tokens, None, float(np.exp(before_)), float(np.exp(after_)), divergence)


@pytest.mark.parametrize("n_logits", mostly_slow([1, 333, evaluation.LOGITS_AT_A_TIME], [333]))
def test_logits_are_compared_in_slices(n_logits: int, llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "LOGITS_AT_A_TIME", n_logits)
    before = open_running(llama)
    after = before.changed(lambda k, values: {n: 0.5 * v if k >= 0 else v for n, v in values.items()})
    wanted = evaluated_by_batches(before, after).measures()
    found = Reference(before, TEXT).compare(after)
    assert found.error > 1e-4
    assert found.measures() == pytest.approx(wanted, rel=1e-4)  # logits are in single precision


@pytest.mark.parametrize("name", ["bert", "gptj", "mixtral"])
def test_the_reference_computes_the_same_block_by_block(name: str, folders: Any) -> None:
    checkpoint = open_checkpoint(folders[name])
    stored = read_weights(checkpoint, in_memory=False)
    found = run(stored, [5, 6, 7, 5])
    whole = read_weights(checkpoint)
    wanted = run(whole, [5, 6, 7, 5])
    assert (stored.context, len(stored.blocks)) == (whole.context, len(whole.blocks))
    assert len(stored.blocks[1:]) == len(whole.blocks) - 1
    for one, other in zip(found.patterns, wanted.patterns, strict=True):
        np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(found.hidden, wanted.hidden)


def test_a_model_shares_its_tables_with_changed_ones(llama: Path, limited: Callable[[int], None]) -> None:
    def address(model: RunningModel) -> int:
        model.load(stored_weights.OUTSIDE)
        return int(model.model.get_input_embeddings().weight.data_ptr())

    for limit in LIMITS:
        limited(limit)
        model = open_running(llama)
        original, other = address(model), round_weights(model, weights_in(model))
        assert address(other) == original
        other = round_weights(model, weights_in(model, "all"))
        assert address(other) != address(model)
