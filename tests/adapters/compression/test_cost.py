"""The estimated cost of a compression: refusals, numbers of the headers, and how it grows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tnlib_adapters
from checkpoint_folders import builtin_copy
from click.testing import CliRunner
from compressed_folders import digest
from tnlib_adapters import builtin_path, cli, estimate_cost, open_checkpoint
from tnlib_adapters.compression.cost.choice import choose_limits, tokens_within
from tnlib_adapters.compression.cost.memory import peak_memory_of, temporary_bytes
from tnlib_adapters.compression.cost.passes import Tokens
from tnlib_adapters.compression.cost.shapes import Shapes, shapes_of
from tnlib_adapters.compression.limits import Limits
from tnlib_adapters.compression.request import Request

from tnlib import ArgumentError, TnlibError

TEXT = Path("text.txt")
TOKENS = Tokens(statistics=4096, fit=8192, held_out=1024, chosen=2048, batch=1024)
EVERY_MATRIX = Request(keep=0.5, what="all", method="matrix")
CALIBRATED = Request(keep=0.5, what="all", calibrate=TEXT)
ROUNDED = Request(bits=4.0, what="all", calibrate=TEXT)


def llama(request: Request = CALIBRATED) -> Shapes:
    return shapes_of(open_checkpoint(builtin_path("llama")), request)


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
        {"keep": 0.5, "spill": "folder"},
        {"keep": 0.5, "calibration_tokens": 64},
    ],
    ids=str,
)
def test_compress_and_its_estimate_refuse_in_one_sentence(options: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(TnlibError) as of_compress:
        tnlib_adapters.compress(builtin_path(), tmp_path / "out", **options)
    with pytest.raises(TnlibError) as of_estimate:
        estimate_cost(builtin_path(), **options)
    assert str(of_estimate.value) == str(of_compress.value)


def test_a_short_text_is_refused_as_by_compress(folders: Any, tmp_path: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_text("a few words\n" * 3)
    with pytest.raises(TnlibError) as of_compress:
        tnlib_adapters.compress(folders["llama"], tmp_path / "out", keep=0.5, calibrate=short)
    with pytest.raises(TnlibError) as of_estimate:
        estimate_cost(folders["llama"], keep=0.5, calibrate=short)
    assert str(of_estimate.value) == str(of_compress.value)


def test_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = builtin_copy(tmp_path / "in")
    before = digest(source)
    monkeypatch.chdir(tmp_path)
    estimate_cost(source, keep=0.5)
    assert digest(source) == before
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


@pytest.mark.parametrize("method", ["heads", "matrix", "ttm", "tucker", "cp"])
def test_plain_methods_need_no_text(method: str) -> None:
    cost = estimate_cost(builtin_path(), keep=0.5, method=method)
    assert (cost.method, cost.n_before, cost.tokens, cost.spill) == (method, 33_280, {}, 0)
    assert cost.total_seconds > 0
    assert cost.peak_memory > 0


@pytest.mark.parametrize("options", [{"keep": 0.5}, {"bits": 4}, {"keep": 0.5, "method": "matrix"}], ids=str)
@pytest.mark.parametrize("name", ["llama", "bert"])
def test_a_text_is_counted_and_timed(folders: Any, text: Path, name: str, options: dict[str, Any]) -> None:
    stages: list[str] = []
    cost = estimate_cost(
        folders[name], calibrate=text, what="all", **options, progress=lambda stage, _, __: stages.append(stage)
    )
    assert cost.tokens["statistics"] > 0
    assert {"statistics", "factorisation", "measurement"} <= cost.seconds.keys()
    assert all(value > 0 for value in cost.seconds.values())
    assert cost.passes.keys() == cost.seconds.keys()
    assert (cost.spill > 0) == (cost.method != "matrix")
    assert {"timing decompositions", "timing a block"} == set(stages)


def test_numbers_are_those_of_the_report(tmp_path: Path, without_pictures: None) -> None:
    options = {"keep": 0.5, "method": "matrix", "what": "all"}
    cost = estimate_cost(builtin_path("llama"), **options)
    report = tnlib_adapters.compress(builtin_path("llama"), tmp_path / "out", **options)
    assert cost.n_before == report.n_before
    assert cost.n_bytes == sum(report.bytes_before.values())
    assert cost.bytes_before == report.compressed(report.bytes_before)
    assert 0.95 * cost.bytes_after <= sum(report.bytes_after.values()) <= cost.bytes_after


@pytest.mark.parametrize("request_", [EVERY_MATRIX, CALIBRATED, ROUNDED], ids=lambda own: own.method)
def test_memory_grows_with_every_limit(request_: Request) -> None:
    shapes = llama(request_)
    large = Limits()
    tokens = Tokens() if request_.calibrate is None else TOKENS

    def peak(limits: Limits, tokens: Tokens = tokens) -> int:
        return max(peak_memory_of(shapes, request_, tokens, limits, 0).values())

    assert peak(replace(large, cache=0)) < peak(large)
    assert temporary_bytes(shapes, request_, replace(large, cache=0)) > temporary_bytes(shapes, request_, large) == 0
    if request_.calibrate is not None:
        assert peak(replace(large, weights=0)) < peak(large)
        assert peak(large, replace(tokens, batch=256)) < peak(large)


# ------------------------------------------------------------------------------------------------------- max_memory


def peak_within(limits: Limits, request: Request = CALIBRATED) -> int:
    shapes = llama(request)
    return max(peak_memory_of(shapes, request, tokens_within(LONG, limits), limits, 0).values())


LONG = replace(TOKENS, longest=64)


@pytest.mark.parametrize("share", [1.0, 0.99, 0.97, 0.95, 0.9])
def test_limits_are_the_largest_within_max_memory(share: float) -> None:
    limit = int(share * peak_within(Limits()))
    limits = choose_limits(llama(), replace(CALIBRATED, max_memory=limit), LONG, 0)
    assert peak_within(limits) <= limit
    assert (limits == Limits()) == (share == 1.0)


def test_batches_become_smaller_last() -> None:
    smallest = peak_within(Limits(cache=0, weights=0))
    with_large_batches = choose_limits(llama(), replace(CALIBRATED, max_memory=smallest), LONG, 0)
    assert with_large_batches.tokens == Limits().tokens
    assert choose_limits(llama(), replace(CALIBRATED, max_memory=smallest - 1), LONG, 0).tokens < Limits().tokens


@pytest.mark.parametrize("request_", [EVERY_MATRIX, CALIBRATED], ids=lambda own: own.method)
def test_the_least_possible_memory_is_stated_and_suffices(request_: Request) -> None:
    shapes, tokens = llama(request_), Tokens() if request_.calibrate is None else LONG
    with pytest.raises(ArgumentError, match="compress: max_memory must be at least") as refused:
        choose_limits(shapes, replace(request_, max_memory=1), tokens, 10**8)
    least = int(str(refused.value).split("at least ")[1].split("M")[0]) * 10**6
    limits = choose_limits(shapes, replace(request_, max_memory=least), tokens, 10**8)
    assert limits.cache == 0


@pytest.mark.parametrize(
    ("value", "error"), [(0, ArgumentError), (-1, ArgumentError), (1e9, TypeError), ("4G", TypeError)]
)
def test_max_memory_is_a_number_of_bytes(value: Any, error: type[Exception], tmp_path: Path) -> None:
    with pytest.raises(error, match="compress: max_memory must be"):
        tnlib_adapters.compress(builtin_path(), tmp_path / "out", keep=0.5, max_memory=value)


def test_too_little_memory_is_refused_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="max_memory must be at least"):
        tnlib_adapters.compress(builtin_path(), tmp_path / "out", keep=0.5, max_memory=10**6)
    with pytest.raises(ArgumentError, match="max_memory must be at least"):
        estimate_cost(builtin_path(), keep=0.5, max_memory=10**6)
    assert list(tmp_path.iterdir()) == []


def test_ample_memory_changes_nothing(tmp_path: Path, without_pictures: None) -> None:
    options = {"keep": 0.5, "method": "matrix"}
    for name, limit in (("default", None), ("ample", 10**11)):
        tnlib_adapters.compress(builtin_path(), tmp_path / name, max_memory=limit, **options)
    one, other = (open_checkpoint(tmp_path / name).folder.tensors for name in ("default", "ample"))
    assert all(np.array_equal(one[name].read(), other[name].read()) for name in one)


def test_a_running_model_keeps_its_limits(folders: Any, text: Path) -> None:
    from tnlib_adapters.compression.source_model import SourceModel

    limits = Limits(tokens=128, weights=1)
    source = SourceModel(open_checkpoint(folders["llama"]), max_tokens=32, limits=limits)
    words = text.read_text()
    for model in (source.original, source.original.changed(None)):
        assert max(batch.ids.numel() for batch in model.batches(words)) <= limits.tokens
        assert not model.weights.fit_in_memory
    plain = SourceModel(open_checkpoint(folders["llama"]), max_tokens=32).original
    assert max(batch.ids.numel() for batch in plain.batches(words)) > limits.tokens
    assert plain.weights.fit_in_memory


@pytest.mark.parametrize(
    ("written", "n_bytes"), [("4G", 4 * 10**9), ("4000M", 4 * 10**9), ("1.5gb", 15 * 10**8), ("7", 7)]
)
def test_bytes_on_the_command_line(written: str, n_bytes: float) -> None:
    from tnlib_adapters.cli_options import Bytes

    assert Bytes().convert(written, None, None) == n_bytes


def test_plan_prints_the_estimate() -> None:
    result = CliRunner().invoke(cli.main, ["plan", "builtin", "--keep", "0.5"], env={"COLUMNS": "120"})
    assert result.exit_code == 0, result.output
    for words in ("33,280 numbers", "peak memory", "factorisation", "MB of factors"):
        assert words in result.stdout


@pytest.mark.parametrize("options", ["--keep 2", "--keep 0.5 --max-memory 1M", "--bits 4"])
def test_plan_refuses_as_compress_does(options: str, tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    commands = (["plan", "builtin"], ["compress", "builtin", out])
    refusals = [CliRunner().invoke(cli.main, [*command, *options.split()]) for command in commands]
    assert [result.exit_code for result in refusals] == [2, 2]
    assert refusals[0].stderr.split("at least")[0] == refusals[1].stderr.split("at least")[0]
