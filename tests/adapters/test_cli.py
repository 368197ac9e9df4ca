"""The commands as a user types them: tables, exit statuses, one sentence for whatever is wrong."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tnlib_adapters
from checkpoint_folders import (
    CONFIG,
    WEIGHTS,
    builtin_copy,
    change_config,
    change_tensors,
)
from command_line import run_command
from compressed_folders import attention_tensors, digest, n_attention, read_config
from oracles import assert_one_sentence
from slow_cases import mostly_slow
from tnlib_adapters import Budget, builtin_path, cli, open_checkpoint
from tnlib_adapters.compression.methods.method_table import METHODS
from tnlib_adapters.compression.options import LAYOUTS
from tnlib_adapters.compression.report import megabytes

KEY = "layers.1.attention.key.weight"


# --------------------------------------------------------------------------------------------------------- compress


@pytest.mark.usefixtures("without_pictures")
@pytest.mark.parametrize("layout", ["factored", "dense"])
@pytest.mark.parametrize("method", METHODS)
def test_compress(method: str, layout: str, tmp_path: Path) -> None:
    source, out = builtin_copy(tmp_path / "in"), tmp_path / "out"
    untouched = digest(source)
    result = run_command(
        "compress", source, out, "--keep", "0.5", "--what", "attention", "--method", method, "--layout", layout
    )
    assert digest(source) == untouched
    report = json.loads((out / "tnlib_report.json").read_text())
    assert (report["method"], report["layout"], report["keep"]) == (method, layout, 0.5)
    assert n_attention(out) == (report["n_after"] if layout == "factored" else report["n_before"])
    for layer in report["layers"]:
        cells = (layer["layer"], f"{layer['qk_error']:.4f}", f"{layer['ov_error']:.4f}", f"{layer['worst']:.4f}",
                 f"{layer['n_before']:,}", f"{layer['n_after']:,}")  # fmt: skip
        assert [line for line in result.stdout.splitlines() if all(str(cell) in line for cell in cells)]
    assert f"{report['kept']:.4f} of the parameters of attention kept" in result.stdout
    assert megabytes(sum(report["bytes_after"].values())) in result.stdout
    assert result.stdout.splitlines()[-3:] == [
        f"written to {out}, with tnlib_report.html; load it with:",
        "    import tnlib_adapters",
        f"    checkpoint = tnlib_adapters.open_checkpoint('{out}')",
    ]


@pytest.mark.usefixtures("without_pictures")
def test_defaults(tmp_path: Path) -> None:
    run_command("compress", "builtin", tmp_path / "out", "--keep", "0.5", "--what", "attention")
    section = read_config(tmp_path / "out")["quantization_config"]
    assert section["method"] == "heads"
    assert section["quant_method"] == "tnlib"


@pytest.mark.usefixtures("without_pictures")
def test_progress_goes_to_the_terminal_and_tables_to_the_pipe(tmp_path: Path) -> None:
    result = run_command("compress", "builtin", tmp_path / "out", "--keep", "0.5", "--what", "attention")
    for stage in ("checking weights", "factorising", "writing tensors", "measuring errors"):
        assert stage in result.stderr
        assert stage not in result.stdout
    assert "QK error" not in result.stderr


@pytest.mark.usefixtures("without_pictures")
def test_force_replaces_what_was_there(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "old.txt").write_text("old")
    refusal = run_command("compress", "builtin", out, "--keep", "0.5", "--what", "attention", status=2)
    assert "--force" in refusal.stderr
    assert os.listdir(out) == ["old.txt"]
    run_command("compress", "builtin", out, "--keep", "0.5", "--what", "attention", "--force")
    assert not (out / "old.txt").exists()
    assert open_checkpoint(out).n_layers == 2
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.usefixtures("without_pictures")
def test_a_folder_called_builtin_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    builtin_copy(tmp_path / "builtin")
    change_tensors(tmp_path / "builtin", lambda t: t.update({KEY: 2 * t[KEY]}))
    monkeypatch.chdir(tmp_path)
    run_command("compress", "builtin", "out", "--keep", "1", "--what", "attention")
    ours, theirs = (open_checkpoint(folder).attention(1).qk(0).norm() for folder in ("out", builtin_path()))
    assert ours > 1.5 * theirs


# -------------------------------------------------------------------------------------------------------- bad input


def shorten(file: Path, by: int) -> None:
    file.write_bytes(file.read_bytes()[:-by])


def put(name: str, value: float) -> Callable[[Path], None]:
    return lambda folder: change_tensors(folder, lambda t: t[name].__setitem__((3, 5), value))


def narrow(folder: Path) -> None:
    def cut(tensors: dict[str, np.ndarray]) -> None:
        for name, a in tensors.items():
            tensors[name] = a[tuple(slice(61) if n == 64 else slice(None) for n in a.shape)]

    change_tensors(folder, cut)
    change_config(folder, hidden_size=61, num_attention_heads=1)


def too_large_for_half(folder: Path) -> None:
    """Every weight fits; a factor that gathers the norm of them all does not."""

    def enlarge(tensors: dict[str, np.ndarray]) -> None:
        for name, a in tensors.items():
            tensors[name] = (a * (6e4 / np.abs(a).max() if "attention" in name else 1)).astype("f2")

    change_tensors(folder, enlarge)


def compressed(folder: Path) -> None:
    small = folder.parent / "small"
    tnlib_adapters.compress(folder, small, Budget(keep=0.5), what="attention")
    shutil.rmtree(folder)
    small.rename(folder)


@dataclass(frozen=True)
class Bad:
    """How to break IN, what to type instead of the usual, and what the sentence must say, {place} being the folder."""

    words: tuple[str, ...]
    damage: Callable[[Path], Any] = lambda folder: None
    options: dict[str, str] = field(default_factory=dict)
    out: str = "out"
    source: str = "in"

    def said(self, place: Path) -> tuple[str, ...]:
        return tuple(word.replace("{place}", str(place)) for word in self.words)


BAD: dict[str, Bad] = {
    "missing IN": Bad(
        ("compress: IN must exist, found no folder at {place}/nowhere; check the path.",), source="nowhere"
    ),
    "IN is the weight file": Bad(
        (f"the file {{place}}/in/{WEIGHTS}; pass the folder that contains it, {{place}}/in.",), source=f"in/{WEIGHTS}"
    ),
    "calibrated without a text": Bad(
        ("'calibrated' needs a text", "--calibrate TEXT"), options={"--method": "calibrated"}
    ),
    "IN is a file": Bad(("file.txt",), source="file.txt"),
    "no config": Bad((CONFIG,), lambda f: (f / CONFIG).unlink()),
    "unknown architecture": Bad(
        ("'mamba'", "bert", "gpt2", "tnlib_attention_only"), lambda f: change_config(f, model_type="mamba")
    ),
    "weights cut short": Bad((WEIGHTS,), lambda f: shorten(f / WEIGHTS, 100)),
    "shape against the config": Bad(
        (KEY.replace("1", "0").replace("key", "query"), "(32, 32)"), lambda f: change_config(f, hidden_size=32)
    ),
    "NaN in the attention": Bad((KEY, "nan"), put(KEY, np.nan)),
    "integer weights": Bad((KEY,), lambda f: change_tensors(f, lambda t: t.update({KEY: t[KEY].astype("i1")}))),
    "inf in a tensor that is only copied": Bad(("'unembed.weight'", "inf"), put("unembed.weight", np.inf)),
    "NaN in a tensor that is only copied": Bad(("'positions.weight'", "nan"), put("positions.weight", np.nan)),
    "compressed already": Bad(("compressed already",), compressed),
    "prime width": Bad(("'ttm'", "61 is prime"), narrow, {"--method": "ttm"}),
    "too large for the dtype": Bad(("F16", "tnlib.qkvo_core"), too_large_for_half, {"--method": "tucker"}),
    **{f"keep {keep}": Bad(("(0, 1]",), options={"--keep": keep}) for keep in ("0", "-1", "1.5", "nan", "inf")},
    "too little kept": Bad(("at least 0.0462", "'matrix'"), options={"--keep": "0.02", "--method": "matrix"}),
    "OUT has files": Bad(("full", "--force"), out="full"),
    "OUT in IN": Bad(("outside IN",), out="in/out"),
    "no place for OUT": Bad(("missing", "make it first"), out="missing/out"),
}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with IN, and with what else OUT may meet."""
    place = tmp_path / "place"
    place.mkdir()
    builtin_copy(place / "in")
    (place / "file.txt").write_text("text")
    (place / "full").mkdir()
    (place / "full/kept.txt").write_text("kept")
    monkeypatch.chdir(tmp_path)
    return place


def command(bad: Bad, place: Path) -> list[str]:
    options = {"--keep": "0.5", "--what": "attention"} | bad.options
    return [
        "compress",
        str(place / bad.source),
        str(place / bad.out),
        *(word for pair in options.items() for word in pair),
    ]


@pytest.mark.usefixtures("without_pictures")
@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_sentence_and_no_change(case: str, place: Path) -> None:
    bad = BAD[case]
    bad.damage(place / "in")
    untouched = digest(place)
    result = run_command(*command(bad, place), status=2)
    assert isinstance(result.exception, SystemExit)
    assert result.stdout == ""
    assert_one_sentence(result.stderr, bad.said(place))
    assert digest(place) == untouched


@pytest.mark.usefixtures("without_pictures")
@pytest.mark.parametrize("case", [name for name, bad in BAD.items() if bad.out == "out" and bad.source == "in"])
def test_with_force_the_old_folder_outlives_every_refusal(case: str, place: Path) -> None:
    bad = BAD[case]
    bad.damage(place / "in")
    untouched = digest(place)
    result = run_command(*command(Bad(bad.words, options=bad.options, out="full"), place), "--force", status=2)
    assert_one_sentence(result.stderr, bad.said(place))
    assert digest(place) == untouched


def run_python(*arguments: str | Path, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(path for path in sys.path if path)
    env = os.environ | {"PYTHONPATH": path, "COLUMNS": "80"}
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, cwd=folder, env=env, check=False
    )


@pytest.mark.parametrize(
    "case",
    mostly_slow(["missing IN", "NaN in a tensor that is only copied", "too large for the dtype"], ["missing IN"]),
)
def test_a_real_process_says_the_same(case: str, place: Path) -> None:
    bad = BAD[case]
    bad.damage(place / "in")
    untouched = digest(place)
    done = run_python("-m", "tnlib_adapters.cli", *command(bad, place))
    assert done.returncode == 2
    assert done.stdout == ""
    assert_one_sentence(done.stderr, bad.said(place))
    assert digest(place) == untouched


USAGE: dict[str, tuple[list[str], tuple[str, ...]]] = {
    "no number": (["--keep", "abc"], ("--keep", "'abc'")),
    "no fraction": ([], ("--keep",)),
    "unknown method": (["--keep", "0.5", "--what", "attention", "--method", "fourier"], ("fourier", *METHODS)),
    "unknown layout": (["--keep", "0.5", "--what", "attention", "--layout", "sparse"], ("sparse", *LAYOUTS)),
    "ONNX graph": (["--layout", "onnx"], ("'onnx' is not a layout", "tnlib export-onnx SMALL OUT")),
    "unknown option": (["--keep", "0.5", "--what", "attention", "--kep", "1"], ("--kep",)),
}


@pytest.mark.parametrize("case", USAGE)
def test_wrong_usage_is_explained(case: str, place: Path) -> None:
    options, words = USAGE[case]
    untouched = digest(place)
    result = run_command("compress", place / "in", place / "out", *options, status=2)
    assert result.stdout == ""
    assert all(word in result.stderr for word in words)
    assert "Traceback" not in result.stderr
    assert digest(place) == untouched


TEXTS: dict[str, tuple[str, str]] = {
    "missing": ("nowhere.txt", "found none at nowhere.txt; check the path"),
    "a folder": ("full", "found none at full; check the path"),
    "no UTF-8": ("latin.txt", "UTF-8, got byte 0xe9 at position 3 of latin.txt"),
    "empty": ("empty.txt", "must hold text, got none in empty.txt"),
    "blank": ("blank.txt", "must hold text, got none in blank.txt"),
    "without a tokenizer": ("file.txt", "needs a tokenizer beside the weights, found none in"),
}
WITH_A_TEXT: dict[str, list[str]] = {
    "compress": ["compress", "in", "out", "--keep", "0.5", "--what", "attention", "--calibrate"],
    "evaluate": ["evaluate", "in", "in"],
}


@pytest.mark.parametrize("case", TEXTS)
@pytest.mark.parametrize("name", WITH_A_TEXT)
def test_texts_that_cannot_be_read(name: str, case: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    file, words = TEXTS[case]
    (place / "latin.txt").write_bytes("caf\u00e9".encode("latin-1"))
    (place / "empty.txt").touch()
    (place / "blank.txt").write_text("  \n\n")
    untouched = digest(place)
    monkeypatch.chdir(place)
    result = run_command(*WITH_A_TEXT[name], file, status=2)
    assert_one_sentence(result.stderr, (f"{name}: ", words))
    assert digest(place) == untouched


EVALUATE: dict[str, tuple[list[str], tuple[str, ...]]] = {
    "missing IN": (["nowhere", "in"], ("nowhere", "check the path")),
    "missing OUT": (["in", "nowhere"], ("nowhere", "check the path")),
    "missing path": (
        ["./nowhere", "in"],
        ("Error: evaluate: IN must exist, found no folder at ./nowhere; check the path.",),
    ),
    "unknown name": (
        ["in", "nowhere"],
        (
            "Error: evaluate: OUT must exist, found no folder at nowhere; check the path, or name a model of the "
            "package, 'builtin' or 'builtin-llama', or, for a model on the hub, download it first: hf download "
            "nowhere.",
        ),
    ),
    "built-in OUT": (["small", "builtin-llama"], ("the original must come first", "swap IN and OUT")),
    "no checkpoint": (["in", "full"], (CONFIG,)),
    "swapped": (["small", "in"], ("the original must come first", "got the compression small first; swap IN and OUT.")),
}


@pytest.mark.usefixtures("without_pictures")
@pytest.mark.parametrize("case", EVALUATE)
def test_evaluate_refuses_in_one_sentence(case: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    arguments, words = EVALUATE[case]
    (place / "in" / "tokenizer.json").touch()
    monkeypatch.chdir(place)
    if "small" in arguments:
        tnlib_adapters.compress("in", "small", Budget(keep=0.5), what="attention")
    result = run_command("evaluate", *arguments, "file.txt", status=2)
    assert_one_sentence(result.stderr, words)


def test_what_is_not_installed_is_named(place: Path) -> None:
    """Tables of numpy alone do without torch; a text does not."""
    (place / "in" / "tokenizer.json").touch()
    arguments = ["compress", "in", "out", "--keep", "0.5", "--what", "attention", "--calibrate", "file.txt"]
    code = f"import sys; sys.modules['torch'] = None; from tnlib_adapters.cli import main; main({arguments})"
    done = run_python("-c", code, folder=place)
    assert done.returncode == 2
    assert_one_sentence(done.stderr, ("needs 'tnlib[torch]', found no torch", "pip install '.[torch]' in a checkout"))
    assert not (place / "out").exists()


# ------------------------------------------------------------------------------------------------------ light to load


HEAVY = ("torch", "transformers", "matplotlib", "numba", "quimb", "tensorly", "scipy.linalg", "sentence_transformers")
HELP = "from tnlib_adapters.cli import main; main(['compress', '--help'], standalone_mode=False)"
LIGHT = {
    "import": ("import tnlib_adapters; dir(tnlib_adapters)", HEAVY),
    "help": (HELP, (*HEAVY, "numpy", "rich")),
}


@pytest.mark.parametrize("case", LIGHT)
def test_nothing_heavy_is_loaded_before_it_is_used(case: str) -> None:
    code, unwanted = LIGHT[case]
    done = run_python("-c", f"{code}\nimport sys\nprint('\\nLOADED', *sys.modules)")
    assert done.returncode == 0, done.stderr
    loaded = set(done.stdout.rpartition("LOADED")[2].split())
    assert "tnlib_adapters" in loaded
    assert loaded.isdisjoint(unwanted)


@pytest.mark.parametrize("call", ["inspect .", "plan .", "compress . out", "compress builtin out --keep 2"])
def test_errors_begin_with_the_name_of_the_command(call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not with that of the function that raised them."""
    monkeypatch.chdir(tmp_path)
    command, *arguments = call.split()
    assert run_command(command, *arguments, status=2).stderr.startswith(f"Error: {command}: ")


def test_help_names_every_method_and_option() -> None:
    for name in ("compress", "plan"):
        shown = " ".join(run_command(name, "--help").stdout.split())
        assert "|".join(METHODS) in shown
        assert "--keep" in shown
        assert '"builtin"' in shown
    run_command("--version")


@pytest.mark.parametrize("name", cli.main.commands)
def test_every_command_has_the_short_option_of_help_in_every_context(name: str) -> None:
    """Click caches the option at the first call, also at one without the group."""
    command = cli.main.commands[name]
    context = command.make_context(name, [], resilient_parsing=True)
    assert set(command.get_help_option_names(context)) == {"-h", "--help"}


def test_help_shows_whole_summaries_and_an_example_of_every_command() -> None:
    shown = run_command("--help", columns=60).stdout
    examples = [shlex.split(line)[1:] for line in shown.splitlines() if line.strip().startswith("tnlib ")]
    assert sorted(name for name, *_ in examples) == sorted(cli.main.commands)
    for name, *arguments in examples:
        command = cli.main.commands[name]
        assert command.help
        assert " ".join(command.help.partition("\n\n")[0].split()) in " ".join(shown.split())
        assert command.make_context(name, arguments).params  # raises where an option or argument is unknown


def test_attention_alone_shrinks(tmp_path: Path) -> None:
    """The command in one process from end to end, pictures included."""
    run_command("compress", "builtin", tmp_path / "out", "--keep", "0.25", "--what", "attention", "--method", "matrix")
    ours, theirs = attention_tensors(tmp_path / "out"), attention_tensors(builtin_path())
    assert sum(t.values.size for t in ours.values()) <= 0.25 * sum(t.values.size for t in theirs.values())
    assert (tmp_path / "out/tnlib_report.html").read_text().count("<svg") == 1
