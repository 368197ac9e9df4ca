"""A compression beside plain int8: their bytes, their errors on a text, and the first lines of the report."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from compressed_folders import by_options

pytest.importorskip("transformers")
torch = pytest.importorskip("torch")
pytest.importorskip("tokenizers")

import tnlib_adapters  # noqa: E402
import tnlib_adapters.transformers_plugin  # noqa: E402  # registers the layout
from command_line import run_command  # noqa: E402
from tnlib_adapters import Budget, builtin_path, evaluate, open_checkpoint  # noqa: E402
from tnlib_adapters.compression.compressed_part import compressed_weights, plain_bytes  # noqa: E402
from tnlib_adapters.compression.evaluate import round_weights  # noqa: E402
from tnlib_adapters.compression.report import (  # noqa: E402
    RoundedReport,
    headline,
    megabytes,
    part_sizes,
    show_report,
    summarise,
    verdict,
)
from tnlib_adapters.compression.report_page import write_page  # noqa: E402
from tnlib_adapters.instrument.running_model import open_running  # noqa: E402

pytestmark = pytest.mark.usefixtures("fit_in_few_steps", "without_pictures")
FIT_STEPS = 5
NAMES = ("bert", "gpt2_lm", "llama")


@pytest.mark.parametrize("name", NAMES)
def test_its_bytes_are_those_of_the_folder_that_holds_it(name: str, folders: Any, tmp_path: Path) -> None:
    report = tnlib_adapters.compress(
        folders[name], tmp_path / "out", Budget(keep=1, store="int8"), method="matrix", what="attention"
    )
    assert report.plain_bytes == plain_bytes(compressed_weights(open_checkpoint(folders[name]), "attention"))
    assert report.bytes_after["attention"] == report.plain_bytes


@pytest.mark.parametrize("name", NAMES)
def test_a_rounded_model_is_the_folder_in_int8(name: str, folders: Any, text: Path, tmp_path: Path) -> None:
    tnlib_adapters.compress(folders[name], tmp_path / "out", **by_options(keep=1, store="int8", method="matrix"))
    original, stored = open_running(folders[name]), open_running(tmp_path / "out")
    rounded = round_weights(original, compressed_weights(open_checkpoint(folders[name]), "attention"))
    batch = rounded.batches(text.read_text())[0]
    with torch.no_grad():
        one, two, before = (model(batch) for model in (rounded, stored, original))
    assert float((one - two).norm() / one.norm()) <= 1e-5
    assert float((one - before).norm() / one.norm()) > 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_calibrated_factors_in_int8(name: str, folders: Any, text: Path, tmp_path: Path) -> None:
    made = {
        store: tnlib_adapters.compress(
            folders[name], tmp_path / store, Budget(keep=0.6, store=store), calibration=text, what="attention"
        )
        for store in ("float", "int8")
    }
    assert made["int8"].n_after == made["float"].n_after
    assert made["int8"].bytes_after["attention"] < made["float"].bytes_after["attention"] / 2
    apart = evaluate(tmp_path / "float", tmp_path / "int8", text).error
    off = evaluate(folders[name], tmp_path / "float", text).error
    assert 0 < apart < 0.1 * off, "rounding costs next to nothing beside truncation"
    for report in made.values():
        assert report.plain_measured is not None
        assert report.measured is not None
        assert report.plain_measured < report.measured


@pytest.mark.slow
def test_the_first_lines_weigh_bytes_against_errors(folders: Any, text: Path, tmp_path: Path) -> None:
    arguments = ["compress", folders["bert"], tmp_path / "out", "--bits", "6", "--calibrate", text]
    arguments += ["--what", "attention"]
    result = run_command(*arguments, columns=140)
    report = json.loads((tmp_path / "out/tnlib_report.json").read_text())
    before, after = (report[f"bytes_{when}"]["attention"] for when in ("before", "after"))
    assert report["average_bits"] == 8 * after / report["n_before"] <= 6
    first, part, int8, conclusion, *_ = result.stdout.splitlines()
    everything = (megabytes(sum(report[f"bytes_{when}"].values())) for when in ("before", "after"))
    assert first.startswith(f"all weights: {' -> '.join(everything)}; 1 - cosine ")
    bits = f"{report['average_bits']:.2f} bits per"
    assert part == f"attention: {megabytes(before)} -> {megabytes(after)}, {bits} parameter"
    assert f"{report['measured']:.2g} on held-out text" in first
    assert int8.endswith(f" bits; {report['plain_measured']:.2g}")
    assert "lain int8" in conclusion
    assert " kept" not in result.stdout
    assert bits in (tmp_path / "out/README.md").read_text()


@pytest.mark.slow
def test_bits_of_every_weight(folders: Any, text: Path, tmp_path: Path) -> None:
    report = tnlib_adapters.compress(folders["bert"], tmp_path / "out", Budget(bits=6), calibration=text, what="all")
    checkpoint = open_checkpoint(folders["bert"])
    assert Counter(own.of for own in report.rounded if own.of) == dict.fromkeys("qkvo", checkpoint.n_layers)
    assert {own.module for own in report.rounded if not own.of} == {own.module for own in report.matrices}
    n_biases = report.compressed(report.bytes_after) - sum(own.n_bytes for own in report.rounded)
    assert 0 < n_biases < 0.5 * report.compressed(report.bytes_after)
    assert max(report.curve["bits"]) > 8 > 6 > min(report.curve["bits"])
    write_page(report, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    for own in report.rounded:
        name = f"{own.module}, {own.of}" if own.of else own.module
        assert (
            f'<td class="text">{name}</td><td>{own.bits}</td><td>{own.rank or ""}</td><td>{own.group or ""}</td>'
            in page
        )
    assert "% of its" not in page


@pytest.mark.parametrize(("method", "kinds"), [("tucker", "stack"), ("cp", "stack"), ("matrix", "dense")])
def test_whole_arrays_of_a_layer_are_rounded(method: str, kinds: str, tmp_path: Path) -> None:
    report = tnlib_adapters.compress(builtin_path(), tmp_path / "out", **by_options(store="int8", method=method))
    described = open_checkpoint(tmp_path / "out").factored
    assert {description.kind for description in described} == {kinds}
    assert {own.bits for own in report.rounded} == {8}
    assert all(own.rank is None for own in report.rounded)


def test_factors_of_as_many_numbers_are_no_rounded_weights(tmp_path: Path) -> None:
    """The products of all components of the heads hold as many numbers as the weights."""
    report = tnlib_adapters.compress(
        builtin_path(), tmp_path / "out", Budget(store="int8", keep=1), method="heads", what="attention"
    )
    assert report.n_after == report.n_before
    assert report.rounded == []
    assert ("factors stored in", "", "int8") in summarise(report)


@pytest.mark.slow
def test_a_dense_folder_states_what_its_weights_were_rounded_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    report = tnlib_adapters.compress(builtin_path(), tmp_path / "out", **by_options(store="int4", layout="dense"))
    lines = {name: (before, after) for name, before, after in summarise(report)}
    assert lines["stored bits per parameter before multiplying out"] == ("32.00", f"{report.average_bits:.2f}")
    assert report.compressed(report.bytes_after) == report.compressed(report.bytes_before)
    note = (tmp_path / "out" / "README.md").read_text()
    assert f"with attention rounded to {report.average_bits:.2f} bits per parameter" in note
    write_page(report, tmp_path / "page.html")
    assert "<th>kB as integers</th>" in (tmp_path / "page.html").read_text()
    show_report(report, tmp_path / "out")
    assert "kB as integers" in " ".join(capsys.readouterr().out.split())


def test_errors_of_operators_are_explained_beside_an_error_of_the_output(
    folders: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tnlib_adapters.compress(folders["bert"], tmp_path / "out", Budget(keep=0.5), what="attention")
    explained = []
    for changes in ({}, {"measure": "1 - cosine", "measured": 0.1, "plain_measured": 0.01}):
        show_report(dataclasses.replace(report, **changes), tmp_path / "out")
        explained.append("are large where the output depends little on them" in capsys.readouterr().out)
    assert explained == [False, True]


@pytest.mark.parametrize(("measured", "is_missed"), [(0.1, True), (0.05, False)])
def test_a_measured_error_above_max_error_is_stated(
    measured: float, is_missed: bool, folders: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tnlib_adapters.compress(folders["bert"], tmp_path / "out", Budget(keep=0.5), what="attention")
    changes = {"measure": "1 - cosine", "measured": measured, "plain_measured": 0.01, "max_error": 0.05}
    show_report(dataclasses.replace(report, **changes), tmp_path / "out")
    assert ("exceeds --max-error 0.05" in capsys.readouterr().out) == is_missed


@pytest.mark.parametrize("arguments", ["", ", gguf_file='model.gguf'"])
def test_the_code_that_loads_a_folder_names_it(
    arguments: str, folders: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tnlib_adapters.compress(folders["bert"], tmp_path / "out", Budget(keep=0.5), what="attention")
    show_report(dataclasses.replace(report, load=f"model = load(folder{arguments})"), tmp_path / "out")
    assert capsys.readouterr().out.splitlines()[-1] == f"    model = load({str(tmp_path / 'out')!r}{arguments})"


def test_conclusions(folders: Any, tmp_path: Path) -> None:
    report = tnlib_adapters.compress(folders["bert"], tmp_path / "out", Budget(keep=0.5), what="attention")
    assert verdict(report) is None  # nothing was measured on text
    before, after = (megabytes(sum(sizes.values())) for sizes in (report.bytes_before, report.bytes_after))
    assert headline(report) == f"all weights: {before} -> {after}; relative error {report.measured:.2g} of the weights"

    half = {"layout": "gptq", "bytes_after": {"attention": report.n_before // 2, "other": 0}}  # 4 bits per parameter
    exact, rest = (part_sizes(dataclasses.replace(report, **half, average_bits=bits)) for bits in (4.0, 3.5))
    assert exact.endswith("4.00 bits per parameter")
    assert rest == f"{exact}, of which 0.50 are indices and zero points of the layout"

    def of(n_bytes: int, measured: float, *, is_rounded: bool = False) -> str:
        rounded = [RoundedReport("m", "q", 4, None, 0, 9)] if is_rounded else []
        changed = dataclasses.replace(
            report, bytes_after={"attention": n_bytes, "other": 0}, measured=measured, plain_measured=0.1,
            plain_bytes=100, rounded=rounded, n_after=report.n_before if is_rounded else report.n_after,
        )  # fmt: skip
        return str(verdict(changed))

    assert of(50, 0.05) == "this is nearer to the original than plain int8 at fewer bytes"
    assert of(50, 0.2) == "this is smaller: plain int8 is nearer to the original, at 2 times the bytes"
    assert of(50, 0.1) == "this is as near to the original as plain int8 at fewer bytes"
    assert of(200, 0.05) == "this is nearer to the original than plain int8 at 2 times its bytes"
    assert of(200, 0.2).endswith("at fewer bytes: prefer rounding, --calibrate TEXT with --bits")
    assert of(200, 0.2, is_rounded=True).endswith(
        "plain int8 is nearer to the original at fewer bytes: prefer plain int8"
    )
