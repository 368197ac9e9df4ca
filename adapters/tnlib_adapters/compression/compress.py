"""A checkpoint folder in, a smaller checkpoint folder out."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tnlib import ArgumentError
from tnlib._validate import as_path
from tnlib_adapters.attention.checkpoint import Checkpoint, open_checkpoint
from tnlib_adapters.checkpoints.factored import Piece
from tnlib_adapters.compression.calibration import calibrate as calibrated_plan
from tnlib_adapters.compression.modules import names_of
from tnlib_adapters.compression.names import BY_TEXT, LAYOUTS, PAGE, REPORT, STORES, WHAT
from tnlib_adapters.compression.page import write_page
from tnlib_adapters.compression.plain import plain_bytes, round_weights
from tnlib_adapters.compression.plan import Plan, Progress, check_budget, check_method, quiet
from tnlib_adapters.compression.quality import measure_quality
from tnlib_adapters.compression.report import (
    LayerReport,
    Report,
    compare_layer,
    count_attention,
    measured_error,
    stored_bytes,
)
from tnlib_adapters.compression.statistics_file import check_statistics_file
from tnlib_adapters.compression.text import hold_out, read_text
from tnlib_adapters.compression.whitening import PLAIN
from tnlib_adapters.compression.whole import check_target, whole_folder
from tnlib_adapters.compression.whole_model import check_what, plan_whole
from tnlib_adapters.compression.write import other_files, write_checkpoint


def compress(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    keep: float | None = None,
    max_error: float | None = None,
    method: str = "heads",
    layout: str = "factored",
    store: str = "float",
    what: str = "attention",
    calibrate: str | os.PathLike[str] | None = None,
    statistics: str | os.PathLike[str] | None = None,
    force: bool = False,
    progress: Progress = quiet,
) -> Report:
    """Write a copy of a checkpoint folder whose attention stores at most `keep` of its numbers, or errs so little.

    Parameters
    ----------
    source
        Folder with config.json and safetensors.
    out
        Folder to make; it appears whole or not at all.
    keep
        Fraction in (0, 1] of the numbers in the attention's weights and biases that is still stored, every
        factor counted. What is written lies at most 0.01 under it.
    max_error
        In the place of `keep`: the smallest size whose predicted error is within this. Without a text that is the root
        mean square of the relative errors of all that is truncated; with one, 1 - cosine of the embeddings or the
        divergence of the predictions in nats a token, before the fit. With `keep` too, both must be met.
    method
        "heads" truncates each head's QK and OV operator as one, "matrix" each weight matrix; "ttm" stores each
        matrix as a TT-matrix, "tucker" and "cp" each layer as one array (projection, head, d_model, d_head).
    layout
        "factored" stores the factors; "dense" the multiplied-out weights under their original names.
    store
        "float" writes factors in the dtype of the weights, "int8" in one byte a number with a scale for every
        component, rounded to nearest; biases stay as they are. With `keep` 1 and method "matrix" that is plain
        rounding of the weights. Scales count as bytes, not as numbers.
    what
        "attention", "mlp" for the matrices of the feed-forward layers, or "all" for both and the embeddings of tokens
        (where these do not make the predictions as well). `keep` is then the fraction of the numbers in all of them.
        Matrices outside the attention are stored as products of low rank, or as they are.
    calibrate
        Text file in UTF-8 like what the model is to be used on. With method "heads" every head keeps what the text
        shows to matter, and every layer is fitted to what the original layer wrote; "matrix" truncates every weight,
        "whitened" every head's operators, where the inputs of the layer are, and neither fits. Needs torch and
        transformers. A tenth of the text is held out, to measure the result on.
    statistics
        File for what the text shows: made where there is none, gone on with after an interruption, and used again
        for another size of the same model on the same text.
    force
        Replace `out` where it has files in it.
    progress
        Called with (stage, done, total).

    Returns
    -------
    Report
        Also written into the folder, as JSON and as a page.

    Raises
    ------
    ArgumentError
        If an argument is off, or the model cannot run the method at this fraction.
    FileFormatError
        If `source` is no checkpoint that tnlib knows.

    Examples
    --------
    >>> import os, tempfile, tnlib_adapters
    >>> out = os.path.join(tempfile.mkdtemp(), "smaller")
    >>> report = tnlib_adapters.compress(tnlib_adapters.builtin_path(), out, keep=0.5)
    >>> report.n_after <= 0.5 * report.n_before
    True
    """
    started = time.perf_counter()
    keep, max_error = check_budget(keep, max_error)
    target = as_path("compress", "out", out)
    _check_choices(layout, store, what)
    text = None if calibrate is None else _calibration(calibrate, method)
    kept_in = None if statistics is None else as_path("compress", "statistics", statistics)
    if kept_in is not None:
        if text is None:
            raise ArgumentError("compress: statistics must come with the text of calibrate; pass that too.")
        check_statistics_file(kept_in, target)
    checkpoint = open_checkpoint(source)
    check_target("compress", target, checkpoint.folder.path, force=force)
    check_method(checkpoint, method, by_text=calibrate is not None)
    check_what(checkpoint, what)
    _check_finite(checkpoint, progress)
    if what == "attention" and text is not None and method not in PLAIN:
        plan = calibrated_plan(checkpoint, text[0], keep, progress, max_error=max_error, statistics=kept_in)
    else:
        seen = None if text is None else text[0]
        plan = plan_whole(checkpoint, what, method, seen, (keep, max_error), progress, kept_in)

    with whole_folder(target) as partial:
        for step in write_checkpoint(checkpoint, plan, layout, partial, in_int8=store == "int8"):
            progress(*step)
        written = open_checkpoint(partial)
        report = _report(checkpoint, written, plan, (keep, max_error), (layout, store, what), progress, started)
        if text is not None:
            names = names_of(checkpoint, what)
            found, measured, plain = _quality_on(text[1], source, partial, plan, (what, names), progress)
            report.quality.update(found)
            report = replace(report, measured=measured, plain_measured=plain)
        report.write(partial / REPORT)
        write_page(report, partial / PAGE)
        check_target("compress", target, checkpoint.folder.path, force=force)
    return report


def _check_choices(layout: str, store: str, what: str) -> None:
    """Raise unless each is one of its kind, and they go together."""
    for name, value, known in (("layout", layout, LAYOUTS), ("store", store, STORES), ("what", what, WHAT)):
        if value not in known:
            raise ArgumentError(
                f"compress: {name} must be one of {', '.join(known)}, got {value!r}; choose one of them."
            )
    if store == "int8" and layout == "dense":
        raise ArgumentError("compress: store='int8' needs layout 'factored', got 'dense'; leave one of them out.")


def _calibration(path: str | os.PathLike[str], method: str) -> tuple[str, str]:
    """Return the text to calibrate on, and the text to measure on."""
    if method not in BY_TEXT:
        raise ArgumentError(
            f"compress: calibrate works with method {', '.join(map(repr, BY_TEXT))}, got {method!r}; leave one of them "
            "out."
        )
    return hold_out(read_text("compress", "calibrate", path))


def _quality_on(
    text: str,
    before: str | os.PathLike[str],
    after: Path,
    plan: Plan,
    compressed: tuple[str, Sequence[str]],
    progress: Progress,
) -> tuple[dict[str, float], float | None, float | None]:
    """Return how far the two checkpoints lie apart on a text, beside what was predicted; that, and of plain int8.

    A text that is too short says nothing.
    """
    from tnlib_adapters.compression.evaluate import evaluate_running
    from tnlib_adapters.torch.hooks.running import open_running

    if not text:
        return {}, None, None
    original = open_running(before)
    found = evaluate_running(original, open_running(after), text, progress)
    rounded = round_weights(open_running(before), *compressed)
    plain = evaluate_running(original, rounded, text, progress).error
    measured = {f"{name}, on held-out text": value for name, value in found.measures().items()}
    predicted = plan.forecast.error
    if predicted is not None:
        name, value = ("divergence", predicted) if found.cosine is None else ("cosine", 1 - predicted)
        measured[f"{name}, predicted without the fit"] = value
    return measured, found.error, plain


def _check_finite(checkpoint: Checkpoint, progress: Progress) -> None:
    """Refuse NaN and inf in any tensor, also one that is only copied, before any work."""
    tensors = list(checkpoint.folder.tensors.values())
    for done, info in enumerate(tensors):
        progress("checking weights", done, len(tensors))
        info.read_finite()
    progress("checking weights", len(tensors), len(tensors))


def _report(
    before: Checkpoint,
    after: Checkpoint,
    plan: Plan,
    asked: tuple[float | None, float | None],
    stored: tuple[str, str, str],
    progress: Progress,
    started: float,
) -> Report:
    layers, heads = [], []
    for layer, pieces in enumerate(plan.layers):
        progress("measuring errors", layer, before.n_layers)
        old, new = before.attention(layer), after.attention(layer)
        found, qk, ov = compare_layer(layer, old, new, _ranks(pieces, before.sizes.n_heads))
        heads += found
        worst = max(max(head.qk_error, head.ov_error) for head in found)
        n_before = count_attention(before, layer)
        n_after = plan.layer_numbers[layer] if pieces else n_before
        layers.append(LayerReport(layer, qk, ov, worst, n_before, n_after))
    progress("measuring errors", before.n_layers, before.n_layers)
    names = names_of(before, stored[2])
    bytes_before, n_other = stored_bytes(before, stored[2], names)
    bytes_after, _ = stored_bytes(after, stored[2], names)
    return Report(
        source=str(before.folder.path),
        model_type=before.architecture.model_type,
        method=plan.method,
        layout=stored[0],
        keep=asked[0],
        kept=plan.kept,
        n_before=plan.n_before,
        n_after=plan.n_after,
        n_other=n_other,
        bytes_before=bytes_before,
        bytes_after=bytes_after,
        seconds=time.perf_counter() - started,
        peak_memory=peak_memory(),
        layers=layers,
        heads=heads,
        quality=measure_quality(before, after),
        left_out=[str(path.relative_to(before.folder.path)) for path in other_files(before)[1]],
        max_error=asked[1],
        store=stored[1],
        what=stored[2],
        measure=plan.forecast.measure,
        predicted=plan.forecast.error,
        measured=measured_error(before, after, plan, heads),
        plain_bytes=plain_bytes(before, stored[2], names),
        curve={"kept": list(plan.forecast.kept), "predicted": list(plan.forecast.errors)},
    )


def _ranks(pieces: Sequence[Piece], n_heads: int) -> list[tuple[int | None, int | None]]:
    """Return each head's QK and OV rank where the factors are per head."""
    by_kind: dict[str, Sequence[Any]] = {
        piece.of: [rank for rank in piece.ranks for _ in range(n_heads // len(piece.ranks))]
        for piece in pieces
        if piece.ranks
    }
    none = [None] * n_heads
    return list(zip(by_kind.get("qk", none), by_kind.get("vo", none), strict=True))


def peak_memory() -> int:
    """Return the largest resident size of this process so far, in bytes."""
    status = Path("/proc/self/status")
    if status.is_file():  # getrusage would count the process that started this one in
        return next(int(line.split()[1]) for line in status.read_text().splitlines() if line[:5] == "VmHWM") * 1024
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # in bytes on macOS, the system without /proc
