"""A checkpoint folder in, a smaller checkpoint folder out."""

from __future__ import annotations

import os
import time

from tnlib._validate import as_path
from tnlib_adapters.checkpoints.checkpoint import Checkpoint, open_checkpoint
from tnlib_adapters.compression.calibration.statistics_file import check_statistics_file
from tnlib_adapters.compression.calibration.text import hold_out, read_text
from tnlib_adapters.compression.choices import PAGE, REPORT
from tnlib_adapters.compression.evaluation.quality import measure_on_text, measure_quality
from tnlib_adapters.compression.planner import make_plan
from tnlib_adapters.compression.progress import Progress, quiet
from tnlib_adapters.compression.report.measured import measured_report
from tnlib_adapters.compression.report.page import write_page
from tnlib_adapters.compression.report.report import Report
from tnlib_adapters.compression.request import Request
from tnlib_adapters.compression.write import write_checkpoint
from tnlib_adapters.files.atomic_folder import check_target, whole_folder


def compress(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    keep: float | None = None,
    max_error: float | None = None,
    method: str = "",
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
        divergence of the predictions in nats a token, before the fit. With `keep` too, both must be met. Not with
        "cp", nor with a text and any other method than "calibrated": they do not know their error beforehand.
    method
        "heads" truncates each head's QK and OV operator as one, "matrix" each weight matrix; "ttm" stores each
        matrix as a TT-matrix, "tucker" and "cp" each layer as one array (projection, head, d_model, d_head). All but
        "cp" count errors where the text of `calibrate` has the inputs, if there is one; "calibrated" needs it: every
        weight keeps the components that matter to the output, and every layer is fitted to what the original layer
        wrote. "", the default, is "heads" without a text, and "calibrated" with one.
    layout
        "factored" stores the factors; "dense" the multiplied-out weights under their original names.
    store
        "float" writes factors in the dtype of the weights, "int8" in one byte a number with a scale for every
        component, rounded to nearest; biases stay as they are. With `keep` 1 and method "matrix" that is plain
        rounding of the weights. Scales count as bytes, not as numbers.
    what
        "attention", "mlp" for the matrices of the feed-forward layers, or "all" for both and the embeddings of tokens
        (where these do not make the predictions as well, nor are scaled). `keep` is then the fraction of the numbers in
        all of them. Matrices outside the attention are stored as products of low rank, or as they are.
    calibrate
        Text file in UTF-8 like what the model is to be used on. Needs torch and transformers. A tenth of the text is
        held out, to measure the result on.
    statistics
        File for what the text shows "calibrated" of the weights: made where there is none, gone on with after an
        interruption, and used again for another size of the same model on the same text.
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
    request = Request(
        keep=keep,
        max_error=max_error,
        method=method,
        layout=layout,
        store=store,
        what=what,
        calibrate=None if calibrate is None else as_path("compress", "calibrate", calibrate),
        statistics=None if statistics is None else as_path("compress", "statistics", statistics),
    )
    target = as_path("compress", "out", out)
    if request.statistics is not None:
        check_statistics_file(request.statistics, target)
    seen, held_out = _read_calibration(request)
    checkpoint = open_checkpoint(source)
    check_target("compress", target, checkpoint.folder.path, force=force)
    request.check(checkpoint)
    _check_finite(checkpoint, progress)
    plan = make_plan(checkpoint, request, seen, progress)

    with whole_folder(target) as partial:
        for step in write_checkpoint(checkpoint, plan, layout, partial, in_int8=request.in_int8):
            progress(*step)
        written = open_checkpoint(partial)
        quality = measure_quality(checkpoint, written)
        on_text = measure_on_text(checkpoint, written, what, held_out, progress) if held_out else None
        report = measured_report(checkpoint, written, plan, request, quality, on_text, progress, started)
        report.write(partial / REPORT)
        write_page(report, partial / PAGE)
        check_target("compress", target, checkpoint.folder.path, force=force)
    return report


def _read_calibration(request: Request) -> tuple[str | None, str]:
    """Return the text that is looked at, None where there is none, and what is held out of it to measure on."""
    if request.calibrate is None:
        return None, ""
    return hold_out(read_text("compress", "calibrate", request.calibrate))


def _check_finite(checkpoint: Checkpoint, progress: Progress) -> None:
    """Refuse NaN and inf in any tensor, also one that is only copied, before any work."""
    tensors = list(checkpoint.folder.tensors.values())
    for done, info in enumerate(tensors):
        progress("checking weights", done, len(tensors))
        info.read_finite()
    progress("checking weights", len(tensors), len(tensors))
