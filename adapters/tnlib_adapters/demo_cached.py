"""Demonstration on a sentence encoder in the cache of Hugging Face: calibrated rounding beside rounding to nearest."""

from __future__ import annotations

import importlib.util
import os
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tnlib import ArgumentError, FileFormatError, MissingFileError
from tnlib._validate import as_path
from tnlib_adapters.checkpoints.checkpoint import Checkpoint, open_checkpoint
from tnlib_adapters.compression.compress import compress
from tnlib_adapters.compression.evaluate import evaluate
from tnlib_adapters.compression.options import Budget, Run
from tnlib_adapters.compression.progress import Progress, quiet
from tnlib_adapters.compression.request import PAGE as REPORT_PAGE
from tnlib_adapters.demo import INSIDE, SMALLER, fill, inside
from tnlib_adapters.files.atomic_folder import check_target, whole_folder
from tnlib_adapters.files.folder import path_text
from tnlib_adapters.files.tokenizer import load_tokenizer
from tnlib_adapters.inspection import PAGE as INSPECT_PAGE
from tnlib_adapters.inspection.findings import Finding, findings
from tnlib_adapters.inspection.inspect import inspect

MODEL = "sentence-transformers/all-MiniLM-L6-v2"
BITS = 4.0
_CALIBRATION, _HELD_OUT = 600, 100  # paragraphs
_LENGTHS = range(40, 500)  # characters of a paragraph


@dataclass(frozen=True)
class SizeAndError:
    """Bytes of all weights, and 1 - mean cosine similarity of embeddings of held-out text to the original ones."""

    label: str
    n_bytes: int
    error: float


@dataclass(frozen=True)
class CachedDemo:
    """Results of the demonstration on the cached model.

    Parameters
    ----------
    folder
        Where the compressed model and the inspection page are.
    n_parameters
        Of the model.
    seconds
        Of the calibrated compression.
    original, nearest, calibrated
        The model itself, all weights rounded to nearest in 8 and 4 bits, and calibrated, `BITS` on average.
    findings
        What the inspection found.
    """

    folder: Path
    n_parameters: int
    seconds: float
    original: SizeAndError
    nearest: tuple[SizeAndError, ...]
    calibrated: SizeAndError
    findings: tuple[Finding, ...]


def cached_model() -> Checkpoint | None:
    """Return the model, if it is in the local cache of the Hugging Face hub and can run; nothing is downloaded."""
    if any(importlib.util.find_spec(name) is None for name in ("torch", "transformers")):
        return None
    try:
        checkpoint = open_checkpoint(MODEL)
        load_tokenizer("demo", checkpoint.folder.path)
    except (MissingFileError, FileFormatError, ArgumentError):
        return None
    return checkpoint


def run_cached_demo(
    checkpoint: Checkpoint, out: str | os.PathLike[str], *, force: bool = False, progress: Progress = quiet
) -> CachedDemo:
    """Round the model in three ways, compare the embeddings of held-out paragraphs, and inspect it.

    Parameters and errors are those of `run_demo`.
    """
    target, source = as_path("demo", "out", out), checkpoint.folder.path
    check_target("demo", target, source, force=force)
    with whole_folder(target) as partial_folder, tempfile.TemporaryDirectory() as scratch:
        text, held_out = (Path(scratch) / name for name in ("calibration.txt", "held_out.txt"))
        paragraphs = calibration_paragraphs()
        text.write_text("\n".join(paragraphs[_HELD_OUT:]), encoding="utf-8")
        held_out.write_text("\n".join(paragraphs[:_HELD_OUT]), encoding="utf-8")

        def measured(label: str, folder: Path, n_bytes: int) -> SizeAndError:
            return SizeAndError(label, n_bytes, evaluate(source, folder, held_out, progress=progress).error)

        started, smaller, run = time.perf_counter(), partial_folder / SMALLER, Run(progress=progress)
        report = compress(source, smaller, Budget(bits=BITS), calibration=text, effort="low", run=run)
        seconds = time.perf_counter() - started
        calibrated = measured(f"tnlib, {BITS:g} bits on average, calibrated", smaller, sum(report.bytes_after.values()))
        nearest = []
        for store in ("int8", "int4"):
            rounded = compress(source, Path(scratch) / store, Budget(store=store), run=run)
            label = f"rounded to nearest in {store[3:]} bits"
            nearest.append(measured(label, Path(scratch) / store, sum(rounded.bytes_after.values())))
        inspection = inspect(source, partial_folder / INSIDE, progress=progress)
        check_target("demo", target, source, force=force)
    n_parameters = sum(info.size for info in checkpoint.folder.tensors.values())
    original = SizeAndError("original", sum(report.bytes_before.values()), 0.0)
    return CachedDemo(target, n_parameters, seconds, original, tuple(nearest), calibrated, tuple(findings(inspection)))


def calibration_paragraphs() -> list[str]:
    """Return short paragraphs of Python's reference manual, in the order of its topics."""
    from pydoc_data.topics import topics

    paragraphs = (" ".join(part.split()) for name in sorted(topics) for part in topics[name].split("\n\n"))
    kept = dict.fromkeys(p for p in paragraphs if p[:1].isupper() and p.endswith(".") and len(p) in _LENGTHS)
    return [*kept][: _CALIBRATION + _HELD_OUT]


def cached_story(demo: CachedDemo, width: int = 100) -> list[str]:
    """Return the paragraphs: the model, the compression, its error beside rounding to nearest, what to open."""
    filled = partial(fill, width=width)
    before, after = demo.original, demo.calibrated
    points = sorted((before, *demo.nearest, after), key=lambda point: -point.n_bytes)
    label = max(len(point.label) for point in points)
    rows = [f"  {point.label:<{label}}  {_mb(point):>8}  error {point.error:.4f}" for point in points]
    return [
        filled(
            f"The model: {MODEL}, from the cache of Hugging Face, {demo.n_parameters / 1e6:.1f} million parameters, "
            "which embeds sentences."
        ),
        filled(
            f"The compression: attention, feed-forward layers and embeddings, {_mb(before)} -> {_mb(after)}, "
            f"{before.n_bytes / after.n_bytes:.1f} times smaller, calibrated on {_CALIBRATION} paragraphs of "
            f"Python's manual in {demo.seconds:.0f} seconds (--effort low)."
        ),
        "\n".join([filled(f"Cost: 1 - mean cosine similarity of {_HELD_OUT} embeddings to the original ones."), *rows]),
        filled(f"Conclusion: {comparison(demo)}"),
        inside(demo.findings, width),
        f"Open first: {path_text(demo.folder / SMALLER / REPORT_PAGE)}\n"
        f"Then:       {path_text(demo.folder / INSIDE / INSPECT_PAGE)}",
        "Next: tnlib compress IN OUT --calibrate TEXT",
    ]


def comparison(demo: CachedDemo) -> str:
    """Return how calibrated rounding compares with rounding to nearest at the nearest size."""
    after = demo.calibrated
    beside = min(demo.nearest, key=lambda point: abs(point.n_bytes - after.n_bytes))
    if after.error < beside.error:
        return (
            f"Calibrated rounding has 1/{beside.error / after.error:.1f} of the error of the model {beside.label}, "
            f"at {_mb(after)} and {_mb(beside)}."
        )
    return f"The model {beside.label} has the smaller error here, at {_mb(beside)} and {_mb(after)}."


def _mb(point: SizeAndError) -> str:
    return f"{point.n_bytes / 1e6:.1f} MB"
