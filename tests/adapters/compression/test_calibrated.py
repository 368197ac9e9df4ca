"""Compression by what a text shows, against transformers itself."""

from __future__ import annotations

import dataclasses
import functools
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from compressed_folders import few_steps
from oracles import refused
from slow_cases import mostly_slow

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import tnlib_adapters  # noqa: E402
from compressed_folders import by_options  # noqa: E402
from safetensors.numpy import load_file, save_file  # noqa: E402
from tnlib_adapters import Budget  # noqa: E402
from tnlib_adapters.checkpoints.checkpoint import open_checkpoint  # noqa: E402
from tnlib_adapters.compression.calibration.calibrate import calibrated_factorisation  # noqa: E402
from tnlib_adapters.compression.calibration.collect_calibration import (  # noqa: E402
    collect_calibration,
    fold_biases,
    fold_biases_of,
)
from tnlib_adapters.compression.compressed_part import compressed_weights, widest_component  # noqa: E402
from tnlib_adapters.compression.evaluate import Reference, evaluate  # noqa: E402
from tnlib_adapters.compression.methods.decompositions import has_rotary_or_norms  # noqa: E402
from tnlib_adapters.compression.methods.out_of_core import Workspace  # noqa: E402
from tnlib_adapters.compression.progress import quiet  # noqa: E402
from tnlib_adapters.compression.report import summarise  # noqa: E402
from tnlib_adapters.compression.request import Request  # noqa: E402
from tnlib_adapters.compression.text import hold_out, sample_batches  # noqa: E402
from tnlib_adapters.factors.expansion import expand  # noqa: E402
from tnlib_adapters.factors.factored_matrix import FactoredMatrix  # noqa: E402
from tnlib_adapters.factors.interpolative import without_gauge  # noqa: E402
from tnlib_adapters.factors.model_weights import OUTSIDE  # noqa: E402
from tnlib_adapters.factors.projections import NAMES as PROJECTIONS  # noqa: E402
from tnlib_adapters.factors.projections import Projections  # noqa: E402
from tnlib_adapters.instrument import fitted_block  # noqa: E402
from tnlib_adapters.instrument.block import Block  # noqa: E402
from tnlib_adapters.instrument.block_passes import OuterLayers, Streams, run_block  # noqa: E402
from tnlib_adapters.instrument.layer_fit import FitStreams, fit_layer, fit_layers  # noqa: E402
from tnlib_adapters.instrument.running_model import Batch, open_running  # noqa: E402
from tnlib_adapters.instrument.weight_inputs import (  # noqa: E402
    draw_tokens,
    find_uses,
    observe_block,
    observe_output,
    of_group,
)
from transformers_models import install, made_up_text, weights_in  # noqa: E402

from tnlib import ArgumentError, FileFormatError, MissingFileError, TnlibError  # noqa: E402

pytestmark = pytest.mark.usefixtures("fit_in_few_steps")
FIT_STEPS = 15

NAMES = ("bert", "gpt2_lm", "opt", "roberta", "llama", "llama_biases", "gptj", "phi", "phi3")
SOME = ("bert", "gpt2_lm", "llama", "phi")


def as_they_are(one: Projections) -> list[FactoredMatrix]:
    biases = {name: {"bias": one.biases[name]} for name in one.biases}
    return [FactoredMatrix("dense", name, {"weight": one.weights[name]} | biases.get(name, {})) for name in PROJECTIONS]


def install_matrices(model, k: int, matrices: list[FactoredMatrix]) -> None:
    install(model, k, expand([*map(without_gauge, matrices)], model.sizes))


def streams_of(model, batches, folder) -> Streams:
    return Streams(batches, model.sizes.d_model, folder=folder)


def first_batch(model) -> Batch:
    return model.batches(made_up_text(30))[-1]


def calibrated_layers(checkpoint, model, batches, workspace=None):
    request = Request.of(Budget(keep=0.5), calibration="text.txt", what="attention")
    streams = Streams(sample_batches(batches, request.tokens), model.sizes.d_model)
    parts = collect_calibration(model, streams, calibrated_factorisation("cpu"), request, workspace or Workspace())
    return [part.load() for part in parts.values()]


def observe(model, batch, uses, layer, generator):
    """Return the inputs of the weights of a layer, and the gradients of a probe of the output at their outputs."""
    outer, streams = OuterLayers(model), []
    with torch.no_grad():
        x, calls = outer.enter(batch)
        for k, call in enumerate(calls):
            streams.append(x)
            x = run_block(model, k, x, call)
    *_, gradient = observe_output(outer, x, batch, of_group(uses, OUTSIDE), generator)
    for k in reversed(range(layer, len(calls))):
        own = of_group(uses, k)
        reads, slopes, gradient = observe_block(model, k, streams[k], calls[k], batch, own, gradient)
    return reads, slopes


@pytest.mark.parametrize("projection", PROJECTIONS)
@pytest.mark.parametrize("name", mostly_slow(NAMES, NAMES[::4]))
def test_gradients_are_those_of_the_model(folders, name, projection):
    """Moving a weight by D changes a probe by the sum of x D p over tokens, to second order."""
    model, checkpoint, layer = open_running(folders[name]), open_checkpoint(folders[name]), 1
    batch = first_batch(model)
    with torch.no_grad():
        out = model(batch)
    uses, key = find_uses(model, weights_in(model)), f"{layer}.{projection}"
    reads, slopes = observe(model, batch, uses, layer, torch.Generator().manual_seed(0))
    old = checkpoint.projections(layer)
    weight = old.weights[projection]
    change = 1e-2 * np.abs(weight).mean() * np.random.default_rng(1).standard_normal(weight.shape)

    def probe() -> float:
        """The same probe as `observe` drew, of the model as it is now."""
        again = torch.Generator().manual_seed(0)
        with torch.no_grad():
            now = model(batch).double()
        if not model.predicts:
            return float((torch.randn(out.shape, generator=again) * now).sum())
        drawn = draw_tokens(out.softmax(-1), again)
        return float((now.log_softmax(-1).gather(-1, drawn)[..., 0] * batch.mask).sum())

    values = []
    for sign in (1.0, -1.0):
        install(model, layer, Projections({**old.weights, projection: weight + sign * change}, old.biases))
        values.append(probe())
    read = reads[uses[key].reads][..., : len(weight)].double().numpy()
    slopes = slopes[key].double().numpy()
    expected = float(np.einsum("bti,ij,btj->", read, change, slopes))
    size = float(np.linalg.norm(read) * np.linalg.norm(change) * np.linalg.norm(slopes))
    assert abs((values[0] - values[1]) / 2 - expected) <= 2e-2 * size
    assert abs(expected) > 1e-6 * size  # the test can tell


@pytest.mark.parametrize("name", mostly_slow(NAMES, NAMES[::2]))
def test_biases_fold_without_a_trace(folders, tmp_path, name):
    """b_K dropped and b_V inside b_O: the model of transformers computes the same."""
    before, after = open_running(folders[name]), open_running(folders[name])
    checkpoint = open_checkpoint(folders[name])
    folded = [
        fold_biases(checkpoint.projections(k), checkpoint.sizes, keys=not has_rotary_or_norms(checkpoint))
        for k in range(checkpoint.n_layers)
    ]
    for one in folded:
        assert checkpoint.architecture.rope or "k" not in one.biases or not one.biases["k"].any()
        assert "o" not in one.biases or "v" not in one.biases or not one.biases["v"].any()
    streams = streams_of(after, after.batches(made_up_text(20)), tmp_path)
    start = [as_they_are(one) for one in folded]
    for k, fitted in enumerate(fit_layers(after, streams, start.__getitem__, n_steps=1, progress=quiet)):
        install_matrices(after, k, fitted)
    batch = first_batch(before)
    with torch.no_grad():
        one, two = (m(batch)[batch.valid] if m.predicts else m(batch) for m in (before, after))
    assert float((one - two).norm() / one.norm()) <= 2e-3  # one step of an exact layer moves it by rounding


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_the_first_layer_is_fitted_on_what_truncated_tables_give(folders, tmp_path, name):
    checkpoint = open_checkpoint(folders[name])
    embeddings = checkpoint.architecture.embeddings[0]
    table = checkpoint.read(f"{embeddings}.weight") / 2
    other = open_running(folders[name])
    batches = other.batches(made_up_text())
    with torch.no_grad():
        original, _ = OuterLayers(other).enter(batches[-1])
        other.model.get_input_embeddings().weight.copy_(torch.from_numpy(table))
        changed, _ = OuterLayers(other).enter(batches[-1])
    assert not torch.equal(original, changed)
    for tables, wanted in (({}, original), ({embeddings: table}, changed)):
        both = FitStreams(open_running(folders[name]), streams_of(other, batches, tmp_path), tables)
        assert torch.equal(both.truncated(0, len(batches) - 1), wanted)
        assert torch.equal(both.original(0, len(batches) - 1), original)


@pytest.mark.parametrize("name", ["gpt2_lm", "llama"])
def test_models_in_memory_and_beyond_are_fitted_alike(name, folders):
    checkpoint, ends = open_checkpoint(folders[name]), []
    model = open_running(folders[name])
    layers = calibrated_layers(checkpoint, model, model.batches(made_up_text()))
    start = layers[1].matrices([len(curve.costs) // 2 for curve in layers[1].curves])
    for limit in (None, 1):
        model = open_running(folders[name], max_weights=limit)
        both = FitStreams(model, Streams(model.batches(made_up_text()), model.sizes.d_model))
        both.advance(Block(model, 0), {})
        fitted = fit_layer(Block(model, 1), both, start, [*both.fitted] * 4)
        ends.append([array for matrix in fitted for array in matrix.arrays.values()])
    starts = [array for matrix in start for array in matrix.arrays.values()]
    assert any("left" in matrix.arrays for matrix in start)
    for before, one, other in zip(starts, *ends, strict=True):
        moved = float(np.linalg.norm(one - before))
        assert moved > 0
        assert float(np.linalg.norm(one - other)) <= 1e-2 * moved


@pytest.mark.parametrize("share", [1e3, 1e30])
def test_a_fit_of_a_block_that_diverges_is_dropped(share, folders, monkeypatch):
    """Also where the error is infinite or no number."""
    monkeypatch.setattr(fitted_block, "_FACTOR_SHARE", share)
    checkpoint, model = open_checkpoint(folders["llama"]), open_running(folders["llama"])
    layers = calibrated_layers(checkpoint, model, model.batches(made_up_text()))
    start = layers[1].matrices([len(curve.costs) // 2 for curve in layers[1].curves])
    both = FitStreams(model, Streams(model.batches(made_up_text()), model.sizes.d_model))
    both.advance(Block(model, 0), {})
    assert fit_layer(Block(model, 1), both, start, [*both.fitted] * 4) is start


@pytest.mark.slow
@pytest.mark.parametrize("name", SOME)
def test_what_is_fitted_lies_nearer_than_what_is_only_truncated(folders, tmp_path, name):
    texts = made_up_text()
    checkpoint, model = open_checkpoint(folders[name]), open_running(folders[name])
    batches = model.batches(texts)
    layers = calibrated_layers(checkpoint, model, batches)
    ranks = [len(curve.costs) // 4 for curve in layers[0].curves]
    before, truncated, fitted = (open_running(folders[name]) for _ in range(3))
    streams = streams_of(fitted, batches, tmp_path)
    start = [layer.matrices(ranks) for layer in layers]
    for k, matrices in enumerate(fit_layers(fitted, streams, start.__getitem__, n_steps=15, progress=quiet)):
        install_matrices(fitted, k, matrices)
    for k, matrices in enumerate(start):
        install_matrices(truncated, k, matrices)
    one, two = (Reference(before, texts).compare(other).measures() for other in (truncated, fitted))
    if before.predicts:
        assert two["divergence (nats a token)"] < one["divergence (nats a token)"]
    else:
        assert two["cosine, mean"] > one["cosine, mean"]


@pytest.mark.parametrize(
    ("name", "layout"),
    mostly_slow([("bert", "dense"), *((name, "factored") for name in NAMES)], [(NAMES[1], "factored")]),
)
def test_a_folder_reloads_and_counts_are_true(folders, name, layout, text, tmp_path, without_pictures):
    report = tnlib_adapters.compress(
        folders[name], tmp_path / "out", Budget(keep=0.6), calibration=text, layout=layout, what="attention"
    )
    assert 0.59 <= report.kept <= 0.6
    assert report.n_after <= 0.6 * report.n_before
    found = evaluate(folders[name], tmp_path / "out", text).measures()
    held = {key.removesuffix(", on held-out text") for key in report.quality if key.endswith("held-out text")}
    assert held == found.keys()
    assert sum(key.endswith("predicted without the fit") for key in report.quality) == 1
    if layout == "factored":
        described = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["layers"]
        counted = sum(
            int(np.prod(shape)) for layer in described for piece in layer for shape in piece["shapes"].values()
        ) + sum(len(piece.get("rows", [])) for layer in described for piece in layer)
        assert counted == report.n_after


LONG = "w1 w2 w3 w4 w5 w6 w7 w8 w9 w10 w11 w12 w13 w14 w15 w16\n"  # and [BOS], for a context of 16


@pytest.mark.parametrize("tokens", mostly_slow([8, 12, 16], [12]))
def test_lines_are_truncated_at_window_and_the_report_counts_them(folders, text, tmp_path, tokens, without_pictures):
    text.write_text(made_up_text() + LONG * 30, encoding="utf-8")
    report = tnlib_adapters.compress(
        folders["bert"],
        tmp_path / "out",
        **by_options(keep=0.6, calibrate=text, window=tokens, effort="low"),
    )
    lines = hold_out(text.read_text(encoding="utf-8").splitlines())[0]
    lengths = [1 + len(line.split()) for line in lines]
    of_all = sum(1 + len(line.split()) > tokens for line in text.read_text(encoding="utf-8").splitlines())
    assert report.calibration["window"] == tokens
    assert report.calibration["sequences"] == len(lines)
    assert report.calibration["truncated"] == of_all
    assert report.calibration["sequences"] + report.calibration["held_out"] == 150
    model = open_running(folders["bert"], max_tokens=tokens)
    assert sum(batch.n_tokens for batch in model.batches("\n".join(lines))) == sum(min(n, tokens) for n in lengths)
    (said,) = [line for line in summarise(report) if line[0] == "calibration text"]
    assert f"{report.calibration['truncated']} of all truncated at {tokens} tokens" in said[2]


def test_a_language_model_reads_windows_of_window(folders, text, tmp_path, without_pictures):
    report = tnlib_adapters.compress(
        folders["gpt2_lm"], tmp_path / "out", **by_options(keep=0.6, calibrate=text, window=8)
    )
    assert "truncated" not in report.calibration
    lines = {name: after for name, _, after in summarise(report)}
    assert "windows of 8 tokens" in lines["calibration text"]
    counts = dict(report.calibration)
    assert counts["read"] == counts["sequences"]
    of_few = summarise(dataclasses.replace(report, calibration={**counts, "read": 3}))
    assert ("calibration text", "", f"3 of {lines['calibration text']}") in of_few


@pytest.mark.parametrize("budget", [{"keep": 0.6}, {"bits": 4}], ids=["calibrated", "quantized"])
def test_a_text_of_one_batch_or_without_held_out_lines_is_named_in_the_report(
    budget, folders, text, tmp_path, without_pictures, monkeypatch
):
    few_steps(monkeypatch, 4)
    text.write_text("\n".join(made_up_text(2).splitlines()[:1] * 2), encoding="utf-8")
    report = tnlib_adapters.compress(folders["bert"], tmp_path / "out", **by_options(calibrate=text, **budget))
    assert report.measured is None or not report.calibration["held_out"]
    lines = {name: after for name, _, after in summarise(report)}
    assert "pass a text of at least 3 lines" in lines["not measured on held-out text"]
    assert "pass at least 2,000 tokens" in lines["fit not validated"]


def test_more_tokens_than_the_context_are_refused(folders, text, tmp_path):
    with pytest.raises(ArgumentError, match=r"window \(--window\) must be at most 16, the context"):
        tnlib_adapters.compress(folders["bert"], tmp_path / "out", **by_options(keep=0.5, calibrate=text, window=17))


def broken(folder: Path, where: Path) -> Path:
    copied = Path(shutil.copytree(folder, where))
    for file in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        (copied / file).unlink(missing_ok=True)
    return copied


def test_bad_text_and_bad_folders_are_refused_before_anything_is_written(folders, text, tmp_path):
    binary, short = tmp_path / "binary", tmp_path / "short"
    binary.write_bytes(b"abc\xff\xfe")
    short.write_text("w1 w2 w3\n")
    without = broken(folders["bert"], tmp_path / "without")
    cases = [
        (folders["bert"], {"calibrate": tmp_path / "none"}, MissingFileError, "must be a text file"),
        (folders["bert"], {"calibrate": binary}, ArgumentError, "UTF-8, got byte 0xff at position 3"),
        (folders["bert"], {"calibrate": short}, ArgumentError, "too few"),
        (folders["bert"], {"calibrate": short, "what": "mlp"}, ArgumentError, "too few"),
        (
            folders["bert"],
            {"calibrate": text, "method": "cp"},
            ArgumentError,
            "works with method 'calibrated', 'quantized', got 'cp'",
        ),
        (without, {"calibrate": text}, TnlibError, "tokenizer"),
    ]
    for source, arguments, error, words in cases:
        with pytest.raises(error, match=words):
            tnlib_adapters.compress(source, tmp_path / "out", **by_options(keep=0.5, **arguments))
        assert not (tmp_path / "out").exists()


def test_refusals_begin_with_the_function_that_was_called(folders: Any, text: Path, tmp_path: Path) -> None:
    short = tmp_path / "short"
    short.write_text("w1\n" * 10)
    damaged = Path(shutil.copytree(folders["gpt2_lm"], tmp_path / "damaged"))
    (damaged / "tokenizer.json").write_text("{}")
    call = functools.partial(tnlib_adapters.compress, out=tmp_path / "out", budget=Budget(keep=0.5), what="attention")
    with refused(FileFormatError, f"compress: the tokenizer of {damaged} must load"):
        call(damaged, calibration=text)
    widest = widest_component(compressed_weights(open_checkpoint(folders["gpt2_lm"]), "attention"))
    sentence = f"at least {widest} tokens, the largest rank of a weight, got "
    with refused(ArgumentError, f"compress: the calibration text must have {sentence}", "too few; add text"):
        call(folders["gpt2_lm"], calibration=short)
    with refused(FileFormatError, f"evaluate: the tokenizer of {damaged} must load"):
        evaluate(damaged, damaged, text)
    (damaged / "tokenizer.json").write_text("{")
    with refused(FileFormatError, f"inspect: {damaged / 'tokenizer.json'} must be JSON"):
        tnlib_adapters.inspect(damaged, tmp_path / "out", text=made_up_text(1))


def test_models_that_do_not_belong_together_are_not_compared(folders, text):
    with pytest.raises(ArgumentError, match="one architecture and size"):
        evaluate(folders["bert"], folders["gpt2_lm"], text)


def test_a_checkpoint_in_double_precision_is_compressed(folders, text, tmp_path):
    shutil.copytree(folders["llama"], tmp_path / "in")
    file = tmp_path / "in" / "model.safetensors"
    tensors = {name: a.astype(np.float64) for name, a in load_file(file).items()}
    save_file(tensors, file, {"format": "pt"})
    found = [
        tnlib_adapters.compress(source, tmp_path / out, Budget(keep=0.5), calibration=text, effort="low").measured
        for source, out in ((folders["llama"], "single"), (tmp_path / "in", "double"))
    ]
    assert found[1] == pytest.approx(found[0], rel=1e-2)


@pytest.mark.parametrize("in_files", [False, True])
@pytest.mark.parametrize("name", mostly_slow(SOME, SOME[:1]))
def test_losses_are_mean_squared_derivatives_by_gates_on_components(folders, name, in_files, tmp_path):
    """The definition: a sum over the tokens of a text, its square, and the mean over texts or tokens."""
    checkpoint, model = open_checkpoint(folders[name]), open_running(folders[name])
    batches, k = model.batches(made_up_text(30)), 1
    workspace = Workspace(0, lambda: tmp_path) if in_files else None
    layers = calibrated_layers(checkpoint, model, batches, workspace)
    folded = model.changed(fold_biases_of(model, keys=not has_rotary_or_norms(checkpoint)))
    uses = find_uses(folded, weights_in(folded))
    observed = [observe(folded, one, uses, k, torch.Generator().manual_seed(2 * b)) for b, one in enumerate(batches)]
    count = sum(batch.n_tokens if model.predicts else len(batch.ids) for batch in batches)
    for projection, weight in layers[k].weights.items():
        left, right = (a.astype(np.float64) for a in (weight.components.left, weight.components.right))
        wanted, key = np.zeros(len(right)), f"{k}.{projection}"
        for reads, slopes in observed:
            x, p = reads[uses[key].reads][..., : len(left)].double().numpy(), slopes[key].double().numpy()
            wanted += (np.einsum("bti,ic,cj,btj->bc", x, left, right, p, optimize=True) ** 2).sum(0)
        np.testing.assert_allclose(
            weight.components.losses, wanted / count, rtol=1e-3, atol=1e-5 * wanted.max() / count
        )
        assert np.all(np.diff(weight.components.losses) <= 0)


@pytest.mark.parametrize("projection", PROJECTIONS)
@pytest.mark.parametrize("name", mostly_slow(SOME, SOME[:1]))
def test_losses_predict_what_a_little_of_every_component_costs(folders, name, projection):
    """Half the sum of all losses, times the square of a small fraction of every component, at random signs."""
    text = made_up_text(60)
    checkpoint, before, after = open_checkpoint(folders[name]), open_running(folders[name]), open_running(folders[name])
    turn, k = 0.02, 1
    layers = calibrated_layers(checkpoint, after, before.batches(text))
    components = layers[k].weights[projection].components
    matrices = layers[k].matrices([len(curve.costs) - 1 for curve in layers[k].curves])
    own = PROJECTIONS.index(projection)
    weight = layers[k].weights[projection].weight
    rows = len(matrices[own].arrays["weight"])  # a bias is a row after these
    measured = 0.0
    for signs in np.random.default_rng(0).choice([-1.0, 1.0], (4, len(components.losses))):
        less = weight - turn * (components.left * signs) @ components.right
        bias = {"bias": less[rows]} if len(less) > rows else {}
        arrays = {**matrices[own].arrays, "weight": less[:rows]} | bias
        changed = [*matrices[:own], dataclasses.replace(matrices[own], arrays=arrays), *matrices[own + 1 :]]
        install_matrices(after, k, changed)
        found = Reference(before, text).compare(after)
        errors = [found.divergence] if found.cosine is None else 1 - found.cosine.astype(np.float64)
        measured += float(np.mean(errors)) / 4
    predicted = components.losses.sum() * turn**2 / 2
    assert predicted / 4 <= measured <= 4 * predicted  # one probe, and second order in the turn
