"""Standard output and error of the commands: refused streams, encodings, narrow terminals."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import pytest
from checkpoint_folders import CONFIG
from click.testing import CliRunner
from oracles import assert_one_sentence
from tnlib_adapters import cli, cli_session

COMPRESS = ["compress", "builtin", "--method", "matrix", "--keep", "0.5", "--what", "attention"]
FULL = Path("/dev/full")
pytestmark = pytest.mark.usefixtures("without_pictures")
on_linux = pytest.mark.skipif(not FULL.exists(), reason="a device that is always full")


def of_a_process(*arguments: str, **environment: str) -> dict[str, Any]:
    path = os.pathsep.join(path for path in sys.path if path)
    return {
        "args": [sys.executable, "-m", "tnlib_adapters.cli", *arguments],
        "stderr": subprocess.PIPE,
        "text": True,
        "env": os.environ | {"PYTHONPATH": path, "COLUMNS": "80"} | environment,
    }


@on_linux
def test_a_full_device_is_one_sentence_after_the_files_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with FULL.open("w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        with pytest.raises(SystemExit) as ended:
            cli.main([*COMPRESS, str(tmp_path / "out")])
    assert ended.value.code == cli_session.OUTPUT_REFUSED == 3
    assert_one_sentence(capsys.readouterr().err, ("standard output", "No space left", "complete"))
    assert (tmp_path / "out" / CONFIG).exists()


@pytest.mark.slow
@on_linux
def test_python_does_not_complain_about_a_full_device_at_its_end() -> None:
    with FULL.open("w") as full:
        done = subprocess.run(**of_a_process("compress", "--help"), stdout=full, check=False)
    assert done.returncode == 3
    assert len(done.stderr.splitlines()) == 1
    with FULL.open("w") as full:
        refused = subprocess.run(**of_a_process("compress", "nowhere", "out") | {"stderr": full}, check=False)
    assert refused.returncode == 2


def full_device() -> TextIO:
    return FULL.open("w")


def pipe_without_a_reader() -> TextIO:
    reader, writer = os.pipe()
    os.close(reader)
    return open(writer, "w")


def no_stream() -> None:
    """Standard error of a program without a console."""


@pytest.mark.parametrize("refusing", [pytest.param(full_device, marks=on_linux), pipe_without_a_reader, no_stream])
def test_standard_error_that_refuses_the_bars_does_not_end_the_work(
    refusing: Callable[[], TextIO | None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    stream = refusing()
    monkeypatch.setattr(sys, "stderr", stream)
    cli.main([*COMPRESS, str(tmp_path / "out")], standalone_mode=False)
    assert "written to" in capsys.readouterr().out
    assert (tmp_path / "out" / CONFIG).exists()
    if stream is not None:
        with pytest.raises(OSError, match=r"No space left|Broken pipe"):  # the bars were written to it
            stream.close()


def test_a_pipe_whose_reader_has_gone_is_quiet() -> None:
    with pipe_without_a_reader() as gone:
        done = subprocess.run(**of_a_process("compress", "--help"), stdout=gone, check=False)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.parametrize("charset", ["latin-1", "ascii", "utf-8"])
def test_encodings_that_lack_a_character(charset: str, tmp_path: Path) -> None:
    out = tmp_path / "pl\u00e9 \u4e2d"
    runner = CliRunner(charset=charset)
    result = runner.invoke(cli.main, [*COMPRESS, str(out)], env={"COLUMNS": "120"})
    assert result.exit_code == 0, result.output
    *_, written, _, last = result.stdout.splitlines()
    assert "written to" in written
    assert ("\u4e2d" in last) == (charset == "utf-8")
    assert (r"\u4e2d" in last) == (charset == "latin-1")  # click writes UTF-8 where it finds ASCII
    assert "Traceback" not in result.output
    assert runner.invoke(cli.main, ["compress", "n\u4e2d", "out", "--keep", "1", "--what", "attention"]).exit_code == 2


@pytest.mark.slow
def test_the_c_locale(tmp_path: Path) -> None:
    out = tmp_path / "pl\u00e9 \u4e2d"
    done = subprocess.run(
        **of_a_process(*COMPRESS, str(out), LC_ALL="C", PYTHONUTF8="0"), stdout=subprocess.PIPE, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert "method matrix" in done.stdout
    assert (out / CONFIG).exists()


def test_narrow_terminals_show_every_cell(tmp_path: Path) -> None:
    arguments = ["compress", "builtin", str(tmp_path / "out"), "--keep", "0.5", "--what", "attention"]
    shown = CliRunner().invoke(cli.main, arguments, env={"COLUMNS": "20"}).stdout.splitlines()
    report = json.loads((tmp_path / "out/tnlib_report.json").read_text())
    rows = [[cell.strip() for cell in line.split("\u2502")[1:-1]] for line in shown if "\u2502" in line]
    errors = [[f"{layer[key]:.4f}" for key in ("qk_error", "ov_error", "worst")] for layer in report["layers"]]
    assert rows == [
        *(
            [str(layer["layer"]), *of_layer, f"{layer['n_before']:,}", f"{layer['n_after']:,}"]
            for layer, of_layer in zip(report["layers"], errors, strict=True)
        ),
        ["all", "", "", "", f"{report['n_before']:,}", f"{report['n_after']:,}"],
    ]
