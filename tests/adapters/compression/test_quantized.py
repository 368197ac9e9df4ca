"""Quantization on a calibration text: bits in the files, reloaded models, errors on held-out text."""

from __future__ import annotations

import functools
import json
import math
import re
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import run_command
from compressed_folders import digest, few_steps, leave_out_pictures, read_tensors
from oracles import refused
from slow_cases import mostly_slow

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("tnlib_adapters.transformers_plugin")

import tnlib_adapters  # noqa: E402
from compressed_folders import by_options  # noqa: E402
from tnlib_adapters import Budget, builtin_path, compress, open_checkpoint  # noqa: E402
from tnlib_adapters.compression.calibration.factorise_and_fit import ChosenWeights, fit_blocks  # noqa: E402
from tnlib_adapters.compression.calibration.quantize import check_bits, factorise_quantized  # noqa: E402
from tnlib_adapters.compression.methods.out_of_core import Workspace  # noqa: E402
from tnlib_adapters.compression.report import Report  # noqa: E402
from tnlib_adapters.compression.request import Request  # noqa: E402
from tnlib_adapters.compression.source_model import SourceModel  # noqa: E402
from tnlib_adapters.compression.text import sample_batches  # noqa: E402
from tnlib_adapters.compression.write import plan_bytes  # noqa: E402
from tnlib_adapters.factors.expansion import expand  # noqa: E402
from tnlib_adapters.instrument.block import Block  # noqa: E402
from tnlib_adapters.instrument.block_passes import Streams  # noqa: E402
from tnlib_adapters.instrument.layer_fit import FitStreams  # noqa: E402
from tnlib_adapters.instrument.running_model import open_running  # noqa: E402
from tnlib_adapters.reference.model import run  # noqa: E402
from transformers import BertConfig, BertModel  # noqa: E402
from transformers_models import (  # noqa: E402  # noqa: E402
    BERT_SIZES,
    inputs,
    install,
    loaded_like,
    made_up_text,
    outputs,
    random_model,
    save_with_tokenizer,
)

from tnlib import ArgumentError  # noqa: E402

pytestmark = pytest.mark.usefixtures("fit_in_few_steps", "without_pictures")
FIT_STEPS = 4

Compressed = Callable[..., tuple[Report, Path]]
WHAT = ("attention", "mlp", "all")
ATTENTION, FEED_FORWARD, TABLES = (
    r"\.(self_attn|attn|attention)\.",
    r"\.(mlp|intermediate|output)\.",
    r"(embed_tokens|wte|word_embeddings|lm_head)\.",
)


@pytest.fixture(scope="module")
def compressed(folders: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Compressed]:
    """Name of a model and options of `compress` -> report and folder; made once, in few steps of the fit."""
    place = tmp_path_factory.mktemp("quantized")
    made_up, code = place / "text.txt", place / "code.txt"
    made_up.write_text(made_up_text(), encoding="utf-8")
    code.write_text(Path(tarfile.__file__).read_text(encoding="utf-8")[3000:23_000], encoding="utf-8")

    @functools.cache
    def get(name: str, **options: Any) -> tuple[Report, Path]:
        out = place / "-".join([name, *map(str, options.values())])
        options = {"calibrate": code if name == "builtin" else made_up, "what": "attention"} | options
        if options["calibrate"] is not None:
            options["folder"] = place / f"{name}-{options['what']}-statistics"
        return compress(
            builtin_path("llama") if name == "builtin" else folders[name], out, **by_options(**options)
        ), out

    with pytest.MonkeyPatch.context() as patch:
        few_steps(patch, 4)
        leave_out_pictures(patch)
        yield get


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Name of a model -> its folder in bfloat16, with norms and one tensor of its attention in float32."""
    made = {}
    for name, widened in (("bert", "1.attention.self.value.bias"), ("llama", "1.self_attn.k_proj.weight")):
        model = random_model(name).bfloat16()
        for path, parameter in model.named_parameters():
            if "norm" in path.lower() or path.endswith(widened):
                parameter.data = parameter.data.float()
        made[name] = save_with_tokenizer(model, tmp_path_factory.mktemp(f"mixed-{name}"))
    return made


def stored_bits(source: Path, out: Path, what: str) -> float:
    """Return the bits in the files per number of the source, over the tensors of the compressed part."""
    parts = {"attention": ATTENTION, "mlp": FEED_FORWARD, "all": f"{ATTENTION}|{FEED_FORWARD}|{TABLES}"}

    def is_compressed(name: str) -> bool:
        if what == "mlp" and re.search(ATTENTION, f".{name}"):
            return False
        return bool(re.search(parts[what], f".{name}")) and not re.search(
            r"norm|ln_|\.attn\.(bias|masked)", name.lower()
        )

    before, after = ({n: t for n, t in read_tensors(f).items() if is_compressed(n)} for f in (source, out))
    sizes = {"F64": 64, "F32": 32, "F16": 16, "BF16": 16, "U8": 8, "I8": 8}
    return sum(sizes[t.dtype] * t.values.size for t in after.values()) / sum(t.values.size for t in before.values())


SLOW = pytest.mark.slow
BUDGETS = [
    *((name, what, bits) for name in ("bert", "gpt2_lm") for what in WHAT for bits in (4, 5.5)),
    *(("llama", what, bits) for what in WHAT for bits in (2.4, 3, 3.7, 6.5)),
    *(("builtin", what, bits) for what in WHAT for bits in (1.2, 2.3, 4)),
]


@pytest.mark.parametrize(
    ("name", "what", "bits"),
    mostly_slow(BUDGETS, [("bert", "attention", 4), ("llama", "mlp", 3)]),
)
def test_files_hold_at_most_the_bits_of_the_budget(
    name: str, what: str, bits: float, folders: Any, compressed: Compressed
) -> None:
    report, out = compressed(name, what=what, bits=bits)
    source = builtin_path("llama") if name == "builtin" else folders[name]
    measured = stored_bits(source, out, what)
    assert 0.85 * bits <= measured <= bits  # tiny matrices have few and coarse options
    assert (report.method, report.bits, report.keep, report.what) == ("quantized", bits, None, what)
    assert 8 * report.compressed(report.bytes_after) / report.n_before == pytest.approx(measured, rel=1e-12)


MIXED: list[dict[str, Any]] = [
    {"bits": 6, "what": "all"},
    {"bits": 3.5},
    {"keep": 0.5, "method": "matrix", "what": "all", "calibrate": None},
    {"keep": 0.5, "method": "calibrated"},
    {"keep": 0.6, "method": "heads", "store": "int8", "calibrate": None},
]


@pytest.mark.parametrize(
    "options", mostly_slow(MIXED, MIXED[::2]), ids=lambda options: options.get("method", "quantized")
)
@pytest.mark.parametrize("name", mostly_slow(["bert", "llama"], ["bert"]))
def test_bytes_of_mixed_dtypes_are_those_of_the_files(
    name: str, options: dict[str, Any], mixed: dict[str, Path], text: Path, tmp_path: Path
) -> None:
    """Weights in bfloat16, norms in float32, and one weight or bias of the second layer in float32."""
    source, what = mixed[name], options.get("what", "attention")
    report = compress(source, tmp_path / "out", **by_options(**{"calibrate": text, **options}))
    n_bits = stored_bits(source, tmp_path / "out", what) * report.n_before
    assert report.average_bits * report.n_before == pytest.approx(n_bits, rel=1e-12)
    dtypes = {stored.dtype for stored in read_tensors(tmp_path / "out").values() if stored.values.size}
    assert {"BF16", "F32"} <= dtypes


@pytest.mark.parametrize("name", mostly_slow(["bert", "llama"], ["llama"]))
def test_costs_in_mixed_dtypes_are_the_bits_in_the_files(
    name: str, mixed: dict[str, Path], text: Path, tmp_path: Path
) -> None:
    factorisation = factorise_quantized(
        SourceModel(open_checkpoint(mixed[name])), text.read_text(), Request.of(Budget(bits=3), calibration=text)
    )
    choice = factorisation.select(Budget(bits=5))
    curves = [curve for part in factorisation.parts.values() for curve in part.curves]
    costs = sum(int(curve.costs[option]) for curve, option in zip(curves, choice, strict=True))
    assert costs == 8 * plan_bytes(open_checkpoint(mixed[name]), factorisation.plan_of(choice))


KEPT = [("bert", "attention", 5, 0.6), ("llama", "all", 4, 0.8), ("builtin", "attention", 2.6, 0.5)]


@SLOW
@pytest.mark.parametrize(("name", "what", "bits", "keep"), KEPT)
def test_fewer_numbers_in_fewer_bits(
    name: str, what: str, bits: float, keep: float, folders: Any, compressed: Compressed
) -> None:
    report, out = compressed(name, what=what, bits=bits, keep=keep)
    source = builtin_path("llama") if name == "builtin" else folders[name]
    assert (report.method, report.bits, report.keep) == ("quantized", bits, keep)
    assert 0.85 * keep < report.kept <= keep
    assert 0.8 * bits < stored_bits(source, out, what) <= bits
    described = open_checkpoint(out).factored
    assert described is not None
    numbers = sum(math.prod(shape) for description in described for shape in description.shapes.values())
    assert numbers <= report.n_after <= keep * report.n_before
    without = compressed(name, what=what, bits=bits)[0]
    assert without.kept > keep
    assert report.predicted > without.predicted
    assert compressed(name, what=what, bits=bits, keep=1.0)[0].predicted <= 1.01 * without.predicted  # more options


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "what", "bits"),
    [
        *((name, what, 4) for name in ("bert", "gpt2_lm", "llama", "gemma") for what in WHAT),
        *((name, what, 2.4) for name in ("llama", "gemma") for what in WHAT),  # some weights as factors
    ],
)
def test_numpy_and_transformers_compute_the_same_from_the_folder(
    name: str, what: str, bits: float, compressed: Compressed, tmp_path: Path
) -> None:
    model = random_model(name)
    x = inputs(model)
    (_, out), (_, dense) = (compressed(name, what=what, bits=bits, layout=layout) for layout in ("factored", "dense"))
    small = loaded_like(model, out)
    wanted = outputs(loaded_like(model, dense), x)
    size = np.abs(wanted).max()
    assert np.abs(wanted - outputs(model, x)).max() > 1e-3 * size
    np.testing.assert_allclose(outputs(small, x), wanted, atol=1e-5 * size)
    forward = run(open_checkpoint(out), x)
    np.testing.assert_allclose(forward.hidden if forward.logits is None else forward.logits, wanted, atol=1e-5 * size)
    small.save_pretrained(tmp_path / "again")
    np.testing.assert_array_equal(outputs(loaded_like(model, tmp_path / "again"), x), outputs(small, x))
    np.testing.assert_allclose(outputs(small.dequantize(), x), wanted, atol=1e-5 * size)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert", pytest.param("builtin", marks=SLOW)])
def test_more_bits_lose_less(name: str, compressed: Compressed) -> None:
    reports = [compressed(name, bits=bits)[0] for bits in (4, 5, 7)]
    predicted = [report.predicted for report in reports]
    assert None not in predicted
    assert predicted == sorted(predicted, reverse=True)
    assert reports[-1].measured < 0.1 * reports[0].measured


@pytest.mark.parametrize("what", ["attention", pytest.param("all", marks=SLOW)])
@pytest.mark.parametrize("bits", mostly_slow([8, 4, 3, 2], [8, 3]))
def test_a_store_gives_all_weights_its_bits(bits: int, what: str, compressed: Compressed) -> None:
    report, out = compressed("llama", what=what, store=f"int{bits}")
    described = open_checkpoint(out).factored
    assert described is not None
    formats = [form for description in described for form in description.formats.values()]
    assert len(formats) == (8 if what == "attention" else 8 + 6 + 2)
    assert {form.bits for form in formats} == {bits}
    assert report.method == "quantized"


@pytest.mark.parametrize("name", ["llama", pytest.param("builtin", marks=SLOW)])
def test_at_four_bits_a_text_helps(name: str, compressed: Compressed, folders: Any, tmp_path: Path) -> None:
    """Fewer bits than plain rounding in groups of 64, and a smaller error on a text that neither has read."""
    source = builtin_path("llama") if name == "builtin" else folders[name]
    unseen = tmp_path / "unseen.txt"
    text = Path(tarfile.__file__).read_text(encoding="utf-8")[30_000:36_000]
    unseen.write_text(text if name == "builtin" else made_up_text(60, seed=5), encoding="utf-8")
    errors, bits = [], []
    for options in ({"bits": 4}, {"store": "int4", "calibrate": None}):
        _, out = compressed(name, **options)
        errors.append(tnlib_adapters.evaluate(source, out, unseen).error)
        bits.append(stored_bits(source, out, "attention"))
    assert bits[0] < bits[1]
    assert errors[0] < 0.7 * errors[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", mostly_slow(["bert", "llama"], ["llama"]))
def test_an_error_is_met_by_the_prediction_in_as_few_bits_as_it_takes(
    name: str, compressed: Compressed, folders: Any
) -> None:
    errors = (0.3, 0.1) if name == "llama" else (0.03, 0.01)
    sizes = []
    for max_error in errors:
        report, out = compressed(name, max_error=max_error)
        assert report.predicted is not None
        assert 0.5 * max_error < report.predicted <= max_error
        sizes.append(stored_bits(folders[name], out, "attention"))
    assert sizes[0] < sizes[1] < 6
    report, out = compressed(name, max_error=errors[0], bits=math.ceil(sizes[0] * 100) / 100)
    assert report.predicted <= errors[0]
    with refused(ArgumentError, "compress: max_error=", "no allocation of method 'quantized' within"):
        compressed(name, max_error=errors[1], bits=sizes[0])


@pytest.mark.slow
def test_four_bits_are_the_default_with_a_text(compressed: Compressed, folders: Any) -> None:
    report, out = compressed("bert")
    assert (report.method, report.bits) == ("quantized", 4)
    files, others = digest(out), digest(compressed("bert", bits=4)[1])
    assert [name for name in files if files[name] != others[name]] == ["tnlib_report.json"]  # it holds the time


def test_the_same_bytes_twice_and_the_source_as_it_was(folders: Any, text: Path, tmp_path: Path) -> None:
    before = digest(folders["llama"])
    for k in range(2):
        compress(folders["llama"], tmp_path / f"{k}", Budget(bits=4), calibration=text, what="all")
    one, other = ((tmp_path / f"{k}" / "model.safetensors").read_bytes() for k in range(2))
    assert one == other
    assert digest(folders["llama"]) == before


@pytest.mark.slow
def test_bits_on_the_command_line(folders: Any, text: Path, tmp_path: Path) -> None:
    arguments = ["compress", folders["llama"], tmp_path / "out", "--bits", "5"]
    alone = run_command(*arguments, status=2)
    assert "compress: bits must come with a text" in alone.output
    run_command(*arguments, "--what", "attention", "--calibrate", text)
    assert 4.5 <= stored_bits(folders["llama"], tmp_path / "out", "attention") <= 5
    assert json.loads((tmp_path / "out" / "tnlib_report.json").read_text())["bits"] == 5
    run_command(*arguments[:2], tmp_path / "both", "--bits", "5", "--keep", "0.6", "--calibrate", text)
    report = json.loads((tmp_path / "both" / "tnlib_report.json").read_text())
    assert (report["bits"], report["keep"]) == (5, 0.6)
    assert report["kept"] <= 0.6
    assert report["average_bits"] <= 5


BAD: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    **{f"bits of {bits!r}": ({"bits": bits}, ("bits must lie in (0, 32]", f"got {bits!r}")) for bits in (0, -1, 40)},
    **{
        f"bits of {bits!r}": ({"bits": bits}, ("bits must lie in (0, 32]", repr(bits)))
        for bits in (math.nan, math.inf, "4", True, 4j)
    },
    "no text": ({"bits": 4, "calibrate": None}, ("bits must come with a text", "--calibrate")),
    "method without a text": ({"method": "quantized", "calibrate": None}, ("method 'quantized' needs a text",)),
    "too few bits": ({"bits": 0.05}, ("bits must be at least ", "for layout 'factored' on this model", "got 0.05")),
    "too few numbers": (
        {"bits": 4, "keep": 0.02},
        ("keep must be at least 0.", "for method 'quantized' within 4 bits on this model, got 0.02", "allow more bits"),
    ),
    "keep beside an error": (
        {"method": "quantized", "keep": 0.5, "max_error": 0.1},
        ("keep must come with bits, not with max_error, for method 'quantized', got 0.5 and 0.1", "pass bits"),
    ),
    "keep beside store": (
        {"method": "quantized", "keep": 0.5, "store": "int4"},
        ("store='int4' gives all weights the same", "pass either it or one"),
    ),
    "beside store": ({"bits": 4, "store": "int4"}, ("store='int4' gives all weights", "pass either it or one")),
    "error beside store": (
        {"max_error": 0.1, "method": "quantized", "store": "int4"},
        ("store='int4' gives all weights the same", "pass either it or one"),
    ),
    "calibrated": ({"bits": 4, "method": "calibrated"}, ("bits are a budget of method 'quantized'", "'calibrated'")),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_options_are_refused_in_a_sentence(case: str, folders: Any, text: Path, tmp_path: Path) -> None:
    options, words = BAD[case]
    with refused(ArgumentError, *words):
        compress(folders["bert"], tmp_path / "out", **by_options(**{"calibrate": text, **options}))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("what", WHAT)
@pytest.mark.parametrize("name", mostly_slow(["bert", "gpt2", "llama"], ["gpt2", "llama"]))
def test_fewer_bits_than_the_smallest_forms_take_are_refused_before_any_work(
    name: str, what: str, folders: Any, text: Path
) -> None:
    """The bound from the shapes is the sum of the smallest costs of all weights."""
    checkpoint = open_checkpoint(folders[name])

    def of(bits: float) -> Request:
        return Request.of(Budget(bits=bits), calibration=text, what=what)

    factorisation = factorise_quantized(SourceModel(checkpoint), made_up_text(), of(1.0))
    smallest = sum(int(curve.costs[0]) for part in factorisation.parts.values() for curve in part.curves)
    check_bits(of((smallest + 0.5) / factorisation.n_before), checkpoint)
    with refused(ArgumentError, "bits must be at least", "on this model"):
        check_bits(of((smallest - 0.5) / factorisation.n_before), checkpoint)


@pytest.mark.parametrize("seed", mostly_slow(range(2), [0]))
@pytest.mark.parametrize("bits", mostly_slow([3, 8], [3]))
def test_the_fit_is_never_worse_than_the_rounded_weights(seed: int, bits: int, tmp_path: Path) -> None:
    """On the held-out batches it is chosen by; a model of one layer has no layers behind it that change later."""
    torch.manual_seed(seed)
    model = BertModel(BertConfig(**BERT_SIZES | {"num_hidden_layers": 1})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    source = save_with_tokenizer(model, tmp_path / "model")
    checkpoint, text = open_checkpoint(source), made_up_text(60, seed)
    running = open_running(source)
    batches = running.batches(text)
    factorisation = factorise_quantized(
        SourceModel(checkpoint),
        text,
        Request.of(Budget(store=f"int{bits}"), calibration="text.txt", what="attention"),
    )
    options = dict(zip(factorisation.parts, factorisation.by_part(factorisation.select(Budget())), strict=True))
    streams = Streams(sample_batches(batches, 65_536), running.sizes.d_model, folder=tmp_path)
    errors = {}
    for n_steps in (0, 1, 30):
        chosen = ChosenWeights(running, factorisation.parts, options)
        ((_, matrices),) = fit_blocks(chosen, streams, n_steps, Workspace())
        after = open_running(source)
        projections = checkpoint.projections(0).updated(expand(matrices, checkpoint.sizes))
        install(after, 0, projections)
        both = FitStreams(running, streams)
        errors[n_steps] = both.errors(Block(after, 0), [{}])[0]
    assert errors[1] <= errors[0]
    assert errors[30] <= errors[0]
    assert errors[0] > 0


@pytest.mark.parametrize("zeros", ["columns", "values"])
@pytest.mark.parametrize(
    "options", mostly_slow([{"bits": 4}, {"store": "int3"}, {"store": "int8"}], [{"bits": 4}]), ids=str
)
def test_zeros_stay_zeros(options: dict[str, Any], zeros: str, text: Path, tmp_path: Path) -> None:
    """Groups of zeros have the scale 0, and a matrix without effect has no loss in any number of bits.

    Queries without effect may be stored as factors, whose grid has no 0.
    """
    model = random_model("llama")
    attention = model.model.layers[1].self_attn
    with torch.no_grad():
        model.get_input_embeddings().weight[7] = 0
        attention.q_proj.weight[:3] = 0
        attention.v_proj.weight[:2] = 0
        if zeros == "values":
            attention.v_proj.weight[:] = 0
    source = save_with_tokenizer(model, tmp_path / "model")
    report = compress(source, tmp_path / "out", **by_options(what="all", calibrate=text, **options))
    assert report.measured is not None
    assert np.isfinite(report.measured)
    rounded = open_checkpoint(tmp_path / "out").projections(1).weights
    if zeros == "columns":
        assert not rounded["q"][:, :3].any()
        assert not rounded["v"][:, :2].any()
    else:
        assert not rounded["v"].any()
    assert all(np.isfinite(weight).all() for weight in rounded.values())
