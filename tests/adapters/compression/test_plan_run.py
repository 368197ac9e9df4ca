"""Sizes and time of a compression before it runs, and the limits that `max_memory` sets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tnlib_adapters
from checkpoint_folders import builtin_copy
from command_line import run_command
from compressed_folders import by_options, digest
from slow_cases import mostly_slow
from tnlib_adapters import Budget, Run, builtin_path, open_checkpoint, plan
from tnlib_adapters.compression.request import Request
from tnlib_adapters.compression.source_model import Limits, limits_of

from tnlib import ArgumentError, ArgumentTypeError, TnlibError

TEXT = Path("text.txt")
EVERY_MATRIX = Request.of(Budget(keep=0.5), method="matrix")
CALIBRATED = Request.of(Budget(keep=0.5), calibration=TEXT)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"keep": 2.0},
        {"bits": 4},
        {"keep": 0.5, "method": "calibrated"},
        {"keep": 0.5, "what": "mlp"},
        {"keep": 0.5, "method": "tucker", "what": "mlp"},
        {"keep": 0.5, "calibrate": "missing.txt"},
        {"keep": 0.5, "calibrate": __file__},
        {"keep": 0.5, "folder": "folder"},
        {"keep": 0.5, "window": 64},
    ],
    ids=str,
)
def test_compress_and_plan_refuse_in_one_sentence(options: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(TnlibError) as of_compress:
        tnlib_adapters.compress(builtin_path(), tmp_path / "out", **by_options(**options))
    with pytest.raises(TnlibError) as of_plan:
        plan(builtin_path(), **by_options(**options))
    assert str(of_plan.value) == str(of_compress.value)


def test_a_short_text_is_refused_as_by_compress(folders: Any, tmp_path: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_text("a few words\n" * 3)
    with pytest.raises(TnlibError) as of_compress:
        tnlib_adapters.compress(folders["llama"], tmp_path / "out", **by_options(keep=0.5, calibrate=short))
    with pytest.raises(TnlibError) as of_plan:
        plan(folders["llama"], Budget(keep=0.5), calibration=short, what="attention")
    assert str(of_plan.value) == str(of_compress.value)


@pytest.mark.parametrize(
    "call", [plan, lambda *own, **named: tnlib_adapters.compress(own[0], "out", *own[1:], **named)]
)
def test_arguments_of_other_types_are_refused(call: Callable[..., Any]) -> None:
    with pytest.raises(ArgumentTypeError, match=r"compress: budget must be a Budget, got 0\.5; pass for example"):
        call(builtin_path("llama"), 0.5)
    with pytest.raises(ArgumentTypeError, match="compress: run must be a Run, got 'cuda'; pass for example Run"):
        call(builtin_path("llama"), Budget(keep=0.5), run="cuda")
    with pytest.raises(ArgumentTypeError, match="Calibration: text must be a path, got 3"):
        call(builtin_path("llama"), Budget(keep=0.5), calibration=3)
    with pytest.raises(TypeError, match="unexpected keyword argument 'keep'"):
        call(builtin_path("llama"), keep=0.5)


def test_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = builtin_copy(tmp_path / "in")
    before = digest(source)
    monkeypatch.chdir(tmp_path)
    plan(source, Budget(keep=0.5), what="attention")
    assert digest(source) == before
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


@pytest.mark.parametrize("method", ["heads", "matrix", "ttm", "tucker", "cp"])
def test_plain_methods_need_no_text(method: str) -> None:
    run = plan(builtin_path(), Budget(keep=0.5), method=method, what="attention")
    assert (run.method, run.n_before, run.tokens) == (method, 33_280, {})
    assert run.seconds > 0


@pytest.mark.parametrize("options", [{"keep": 0.5}, {"bits": 4}], ids=str)
@pytest.mark.parametrize("name", mostly_slow(["llama", "bert", "gpt2"], ["llama"]))
def test_a_text_is_counted_and_a_block_is_timed(folders: Any, text: Path, name: str, options: dict[str, Any]) -> None:
    stages: list[str] = []
    run = plan(
        folders[name],
        **by_options(calibrate=text, what="all", progress=lambda stage, _, __: stages.append(stage), **options),
    )
    assert run.tokens["statistics"] > 0
    assert "fit" in run.tokens
    assert run.seconds > 0
    assert plan(folders[name], **by_options(calibrate=text, what="all", max_memory=2 * run.memory, **options)).tokens
    with pytest.raises(ArgumentError, match=r"memory .* must be at least"):
        plan(folders[name], **by_options(calibrate=text, what="all", max_memory=run.memory // 2, **options))
    assert set(stages) == {"timing a block"}


@pytest.mark.parametrize("what", ["attention", "mlp", "all"])
def test_sizes_are_those_of_the_report(tmp_path: Path, without_pictures: None, what: str) -> None:
    options = {"keep": 0.5, "method": "matrix", "what": what}
    run = plan(builtin_path("llama"), **by_options(**options))
    report = tnlib_adapters.compress(builtin_path("llama"), tmp_path / "out", **by_options(**options))
    assert run.n_before == report.n_before
    assert run.n_bytes == sum(report.bytes_before.values())
    assert run.bytes_before == report.compressed(report.bytes_before)
    assert 0.95 * run.bytes_after <= sum(report.bytes_after.values()) <= run.bytes_after


# ------------------------------------------------------------------------------------------------------- max_memory


def test_the_least_possible_memory_is_stated_and_suffices() -> None:
    checkpoint = open_checkpoint(builtin_path("llama"))
    with pytest.raises(ArgumentError, match=r"compress: memory \(--max-memory\) must be at least") as refused:
        limits_of(checkpoint, replace(CALIBRATED, run=Run(memory=1)))
    least = int(str(refused.value).split("at least ")[1].split("M")[0]) * 10**6
    limits = limits_of(checkpoint, replace(CALIBRATED, run=Run(memory=least + 10**7)))  # the process may have grown
    assert limits.tokens < Limits().tokens
    assert limits.cache + 2 * limits.weights < 10**8


@pytest.mark.parametrize(
    ("value", "error"), [(0, ArgumentError), (-1, ArgumentError), (1e9, TypeError), ("4G", TypeError)]
)
def test_max_memory_is_a_number_of_bytes(value: Any, error: type[Exception], tmp_path: Path) -> None:
    with pytest.raises(error, match="Run: memory must be"):
        tnlib_adapters.compress(builtin_path(), tmp_path / "out", **by_options(keep=0.5, max_memory=value))


def test_too_little_memory_is_refused_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"memory .* must be at least"):
        tnlib_adapters.compress(builtin_path(), tmp_path / "out", **by_options(keep=0.5, max_memory=10**6))
    with pytest.raises(ArgumentError, match=r"memory .* must be at least"):
        plan(builtin_path(), Budget(keep=0.5), what="attention", run=Run(memory=10**6))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("written", "n_bytes"), [("4G", 4 * 10**9), ("4000M", 4 * 10**9), ("1.5gb", 15 * 10**8), ("7", 7)]
)
def test_bytes_on_the_command_line(written: str, n_bytes: float) -> None:
    from tnlib_adapters.cli_options import Bytes

    assert Bytes().convert(written, None, None) == n_bytes


def test_plan_prints_sizes_and_time() -> None:
    result = run_command("plan", "builtin", "--keep", "0.5", "--what", "attention")
    for words in ("33,280 parameters", "at most 0.16 MB", "a few seconds"):
        assert words in result.stdout


@pytest.mark.parametrize("options", ["--keep 2", "--keep 0.5 --max-memory 1M", "--bits 4"])
def test_plan_refuses_as_compress_does(options: str, tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    commands = (["plan", "builtin"], ["compress", "builtin", out])
    refusals = [run_command(*command, *options.split(), status=2) for command in commands]
    of_plan, of_compress = (refusal.stderr.split("at least")[0] for refusal in refusals)
    assert of_plan.replace(" plan: ", " compress: ") == of_compress
    assert "compress: " not in of_plan
