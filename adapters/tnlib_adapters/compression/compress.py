"""Compress a checkpoint folder into a smaller one, with a report."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tnlib._validate import as_count, as_path
from tnlib_adapters.checkpoints.checkpoint import Checkpoint, open_checkpoint
from tnlib_adapters.compression.activation_statistics.statistics_files import remove_spill_folder
from tnlib_adapters.compression.evaluation.evaluate import measure_on_text, measure_quality
from tnlib_adapters.compression.evaluation.operator_errors import compare_attention, compare_modules, root_mean_square
from tnlib_adapters.compression.evaluation.plain_int8 import plain_bytes
from tnlib_adapters.compression.executor import open_workers
from tnlib_adapters.compression.layouts.narrow import NarrowModel
from tnlib_adapters.compression.limits import limits_of
from tnlib_adapters.compression.methods.factorisation import RELATIVE, Plan
from tnlib_adapters.compression.methods.other_matrices import compressed_weights, left_dense, names_of, role_of
from tnlib_adapters.compression.methods.out_of_core import Workspace
from tnlib_adapters.compression.planner import make_plan
from tnlib_adapters.compression.report.report import MatrixReport, Report, RoundedReport, peak_memory
from tnlib_adapters.compression.report.report_files import write_report
from tnlib_adapters.compression.request import PAGE, REPORT, Progress, Request, quiet
from tnlib_adapters.compression.sizes import count_matrix, plan_bytes, stored_bytes
from tnlib_adapters.compression.source_model import SourceModel, check_finite, open_source, request_placement
from tnlib_adapters.compression.write import loading_code, write_checkpoint
from tnlib_adapters.factors.factored_matrix import Description
from tnlib_adapters.files.atomic_folder import check_target, scratch_folder, whole_folder
from tnlib_adapters.files.folder import other_files, path_text
from tnlib_adapters.files.tokenizer import MAX_TOKENS


def compress(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    keep: float | None = None,
    max_error: float | None = None,
    bits: float | None = None,
    flops: float | None = None,
    method: str = "",
    layout: str = "factored",
    store: str = "float",
    what: str = "attention",
    calibrate: str | os.PathLike[str] | None = None,
    statistics: str | os.PathLike[str] | None = None,
    calibration_tokens: int = MAX_TOKENS,
    spill: str | os.PathLike[str] | None = None,
    cache_bytes: int | None = None,
    max_memory: int | None = None,
    sizes: Mapping[str, int] | None = None,
    cluster: str | None = None,
    workers: int | None = None,
    device: str = "cpu",
    dtype: str = "float32",
    effort: str = "default",
    force: bool = False,
    progress: Progress = quiet,
) -> Report:
    """Write a copy of a checkpoint folder that stores a fraction of the numbers, or fewer bits of each.

    Parameters
    ----------
    source
        Folder with config.json and safetensors, or the name of a model in the local cache of the Hugging Face hub.
    out
        Folder to create; it appears complete or not at all.
    keep
        Fraction in (0, 1] of the numbers in the attention's weights and biases that is stored, all factors counted.
        The result is at most 0.01 below it. Beside `bits`, at most this fraction is stored, in at most so many bits.
    max_error
        Largest predicted error; the smallest size within it is chosen. Without a text, the error is the root mean
        square of the relative errors of the truncated operators and weights; with one, 1 - cosine of the embeddings or
        the divergence of the predictions in nats per token, before the fit. If `keep` is given too, both are met. Only
        for methods that predict their error: without a text all but "cp", with a text "calibrated" and "quantized".
    bits
        Average number of stored bits per number of the compressed part, scales and biases counted. Every weight is
        rounded to integers of 2 to 8 bits, whole or as factors, chosen by their effect on the output (method
        "quantized"); needs a text.
    flops
        Largest fraction in (0, 1] of the multiplications per token in the compressed weights, where two factors of rank
        r of a weight (m, n) take r (m + n), and at most m n; a table of embeddings that is only looked up takes none.
        Beside `keep`, both are met: the numbers that this leaves over go to tables. Only for method "calibrated".
    method
        "heads" truncates the QK and OV operator of each head, "matrix" each weight matrix; "ttm" stores each
        matrix as a TT-matrix, "tucker" and "cp" each layer as one array (projection, head, d_model, d_head). With the
        text of `calibrate`, all but "cp" measure errors on its inputs. "calibrated" requires the text: every weight
        keeps the components with the largest effect on the output, and every layer is fitted to the outputs of the
        original layer. "quantized" requires it too: every weight is rounded so that errors compensate each other, and
        every layer is fitted with rounding. "", the default, is "heads" without a text; with one, "calibrated" for
        `keep` or `max_error`, otherwise "quantized", with 4 bits unless `bits` or `store` is given.
    layout
        "factored" stores the factors; "dense" their products under the original names. "narrow" writes a model of the
        same architecture with a smaller `head_dim` and `intermediate_size`, which loads without tnlib, fitted on the
        text of `calibrate`; `keep` is the fraction of attention and feed-forward layers. Of the other options only
        `calibration_tokens`, `device`, `dtype` and `cache_bytes` apply.
    store
        "float" writes factors in the dtype of the weights, "int8" in one byte per number, rounded to nearest, with a
        scale for every component; "int4", "int3" and "int2" in so many bits per number, packed, with a scale for every
        64 numbers. Biases are not rounded. With `keep` 1 and method "matrix" this is plain rounding of the weights.
        Scales count as bytes, not as numbers. With layout "dense" the products of the rounded factors are written.
    what
        "attention", "mlp" for the matrices of the feed-forward layers, or "all" for both, the token embeddings and the
        unembedding; if these are one matrix, it is factorised once and counted once. `keep` refers to the numbers of
        this part. "matrix" and "calibrated" apply to all of it, "ttm" to attention and feed-forward weights; with the
        other methods, "mlp" is refused and "all" factorises the weights they do not apply to by "matrix". The report
        names embeddings that stay as they are (`left_dense`).
    calibrate
        Calibration text file in UTF-8, representative of the model's use. Needs torch and transformers. A tenth of
        the text is held out to measure the result on.
    statistics
        File of the calibration statistics of "calibrated" and "quantized": created if it does not exist, resumed after
        an interruption, and reused for another size by the same method, of the same model on the same text.
    calibration_tokens
        Tokens that are read of each line of the calibration text: longer lines are truncated. A language model reads
        windows of this many tokens instead, and no line is truncated. At most the context of the model. The report
        has the number of truncated lines.
    spill
        Folder for what "calibrated" and "quantized" keep between blocks: the streams of the text, and statistics. It
        is removed in the end; after an interruption the same call goes on from it, at the block where it stopped.
        None: beside the file of `statistics`, or a temporary folder, from which nothing is resumed.
    cache_bytes
        Memory for factors that are not in use, and second moments of inputs. Those beyond it are written into a hidden
        folder beside `out`, which is removed at the end. None: 512 MiB, or what `max_memory` leaves.
    max_memory
        Bound of the resident memory of the process, in bytes. What the libraries and the work on the largest weight
        leave of it is shared by a batch of the text, the factors in memory and the weights of the running model;
        batches of fewer than 1,024 tokens change the result. None for the defaults.
    sizes
        Instead of `keep`, for layout "narrow": `head_dim`, `intermediate_size` or both, as in config.json.
    cluster
        Address of a Dask scheduler, such as "tcp://10.0.0.1:8786": its workers decompose and round the weights. They
        need tnlib and dask, and no files. The result does not depend on them.
    workers
        The same with so many processes of this machine, of one thread each; without dask. A script that calls
        `compress` so needs ``if __name__ == "__main__":``, because the processes import it.
    device
        Device on which the model runs on the text, as torch names it: "cpu", "cuda", "cuda:1", "mps". Blocks are moved
        there one at a time, and large weights are decomposed there.
    dtype
        Of the weights while they run: "float32", "bfloat16" or "float16". Sums over tokens, the factors that are fitted
        and all that is written are not in it.
    effort
        Passes over the text in which every block is fitted to the original: "low", none; "default", two; "high", 200
        steps for rounded weights and 400 for factors.
    force
        Replace `out` if it is not empty.
    progress
        Called with (stage, done, total).

    Returns
    -------
    Report
        Also written into the folder, as JSON and as a page.

    Raises
    ------
    ArgumentError
        If an argument is invalid, or the method cannot run on this model at this fraction.
    FileFormatError
        If `source` is not a checkpoint of a known architecture, or holds NaN or inf.

    Examples
    --------
    >>> import os, tempfile, tnlib_adapters
    >>> out = os.path.join(tempfile.mkdtemp(), "smaller")
    >>> report = tnlib_adapters.compress(tnlib_adapters.builtin_path(), out, keep=0.5)
    >>> report.n_after <= 0.5 * report.n_before
    True
    """
    started = time.perf_counter()
    options: dict[str, Any] = {
        "keep": keep,
        "max_error": max_error,
        "bits": bits,
        "flops": flops,
        "method": method,
        "layout": layout,
        "store": store,
        "what": what,
        "calibrate": calibrate,
        "statistics": statistics,
        "calibration_tokens": calibration_tokens,
        "spill": spill,
        "max_memory": max_memory,
        "sizes": sizes,
        "cluster": cluster,
        "workers": workers,
        "device": device,
        "dtype": dtype,
        "effort": effort,
    }
    request = Request.of(**options)
    target = as_path("compress", "out", out)
    n_cached = None if cache_bytes is None else as_count("compress", "cache_bytes", cache_bytes, least=0)
    opened = open_source(request, source, target, force=force)
    checkpoint, limits = opened.checkpoint, limits_of(opened.checkpoint, request)
    original = SourceModel(checkpoint, request.calibration_tokens, limits=limits, placement=request_placement(request))
    with scratch_folder(target) as scratch:
        model: type[NarrowModel | _FactoredModel] = NarrowModel if layout == "narrow" else _FactoredModel
        compressed = model(checkpoint, request, Workspace(limits.cache if n_cached is None else n_cached, scratch))
        compressed.fit(original, opened.calibration, progress)
        with whole_folder(target) as partial:
            for step in compressed.write(partial):
                progress(*step)
            written = open_checkpoint(partial)
            measures = compressed.measures(written, original, opened.held_out, progress)
            measures["calibration"] = opened.calibration_summary(original)
            report = _report(checkpoint, written, request, measures, started)
            write_report(report, partial)
            check_target("compress", target, checkpoint.folder.path, force=force)
    if request.spill_folder is not None:
        remove_spill_folder(request.spill_folder)
    return report


def _report(
    before: Checkpoint, after: Checkpoint, request: Request, measures: Mapping[str, Any], started: float
) -> Report:
    """Return the report of a compression that began at `started`, with these measures."""
    folder = before.folder
    return Report(
        source=path_text(folder.path),
        model_type=before.wiring.model_type,
        layout=request.layout,
        keep=request.keep,
        left_out=[path_text(path.relative_to(folder.path)) for path in other_files(folder, (REPORT, PAGE))[1]],
        load=loading_code(after, request.layout),
        seconds=time.perf_counter() - started,
        peak_memory=peak_memory(),
        **measures,
    )


class _FactoredModel:
    """A checkpoint whose weights are factored or rounded; parameters and methods are those of `NarrowModel`."""

    def __init__(self, checkpoint: Checkpoint, request: Request, workspace: Workspace) -> None:
        self._checkpoint, self._request, self._workspace = checkpoint, request, workspace

    def fit(self, source: SourceModel, text: str | None, progress: Progress) -> None:
        """Make the plan of the request, by its workers if it names any."""
        request = self._request
        with open_workers(request.cluster, request.workers) as workers:
            _check_finite(self._checkpoint, request, progress)
            self._workspace.workers = workers
            self._plan = make_plan(source, request, text, progress, self._workspace)

    def write(self, out: Path) -> Iterator[tuple[str, int, int]]:
        """Write the checkpoint into the empty folder `out`; yields (stage, done, total)."""
        return write_checkpoint(self._checkpoint, self._plan, self._request.layout, out)

    def measures(self, after: Checkpoint, source: SourceModel, held_out: str, progress: Progress) -> dict[str, Any]:
        """Return the fields of the report that are measured on the written checkpoint, on the held-out text if any."""
        before, plan, request = self._checkpoint, self._plan, self._request
        quality = measure_quality(before, after)
        on_text = measure_on_text(source, after, request.what, held_out, progress) if held_out else None
        layers, heads, squares = compare_attention(before, after, plan, progress)
        if plan.forecast.measure == RELATIVE:
            squares += compare_modules(before, after, plan)
        with_text = request.calibrate is not None
        names = names_of(before, request.what, with_text=with_text)
        bytes_before, n_other = stored_bytes(before, request.what, names)
        bytes_after, _ = stored_bytes(after, request.what, names)
        return {
            "method": plan.method,
            "kept": plan.kept,
            "n_before": plan.n_before,
            "n_after": plan.n_after,
            "n_other": n_other,
            "bytes_before": bytes_before,
            "bytes_after": bytes_after,
            "layers": layers,
            "heads": heads,
            "quality": {**quality, **(on_text.measures(plan.forecast) if on_text else {})},
            "max_error": request.max_error,
            "bits": request.bits,
            "flops": dict(zip(("before", "after"), plan.flops or (), strict=False)),
            "store": request.store,
            "what": request.what,
            "measure": plan.forecast.measure,
            "predicted": plan.forecast.error,
            "measured": on_text.after.error if on_text else root_mean_square(squares),
            "plain_bytes": plain_bytes(before, request.what, names),
            "plain_measured": on_text.int8.error if on_text else None,
            "average_bits": 8 * plan_bytes(before, plan) / plan.n_before,
            "rounded": _rounded_reports(plan),
            "curve": plan.forecast.curve(),
            "matrices": [_matrix_report(before, plan, name) for name in names],
            "left_dense": left_dense(before, with_text=with_text) if request.what == "all" else {},
        }


def _matrix_report(before: Checkpoint, plan: Plan, name: str) -> MatrixReport:
    tied = before.wiring.is_tied(name)
    role = "embedding and unembedding" if tied else role_of(before.wiring, name).replace("_", "-")
    (description,) = plan.descriptions[name]
    return MatrixReport(name, role, description.kind, count_matrix(before, name), plan.numbers[name])


def _rounded_reports(plan: Plan) -> list[RoundedReport]:
    """Return one report for every weight in integers, if the method spends bits or all weights stay whole."""
    described = [description for own in plan.descriptions.values() for description in own]
    if not plan.forecast.in_bits and not all(description.is_whole for description in described):
        return []
    return [_rounded_report(description) for description in described if description.formats]


def _rounded_report(description: Description) -> RoundedReport:
    formats, shapes = description.formats, description.shapes
    rank = None if description.is_whole else shapes["left"][1]
    n_bits = sum(form.n_bits(shapes[part]) for part, form in formats.items())
    form = next(iter(formats.values()))
    return RoundedReport(description.module, description.of, form.bits, rank, form.group, n_bits // 8)


def _check_finite(checkpoint: Checkpoint, request: Request, progress: Progress) -> None:
    """Refuse NaN and inf in the tensors that are copied, before any work; the others are checked as they are read."""
    factorised = compressed_weights(checkpoint, request.what, with_text=request.calibrate is not None)
    tensors = [info for name, info in checkpoint.folder.tensors.items() if name not in factorised]
    check_finite(tensors, progress)
