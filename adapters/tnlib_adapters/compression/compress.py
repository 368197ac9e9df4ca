"""Compress a checkpoint folder into a smaller one, with a report."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from tnlib._typing import Array
from tnlib._validate import as_path
from tnlib_adapters.architectures.wiring import Wiring
from tnlib_adapters.checkpoints.checkpoint import Checkpoint, open_checkpoint
from tnlib_adapters.compression.calibration.quantize import check_bits
from tnlib_adapters.compression.calibration.resumed_run import CalibrationFolder
from tnlib_adapters.compression.compressed_part import (
    compressed_weights,
    error_weight,
    left_dense,
    plain_bytes,
    stored_bytes,
)
from tnlib_adapters.compression.engine_layouts import GGUF, GGUF_FILE
from tnlib_adapters.compression.evaluate import measure_on_text, text_measures
from tnlib_adapters.compression.executor import Workers
from tnlib_adapters.compression.gguf_file import to_gguf
from tnlib_adapters.compression.methods.decompositions import FactorisedWeight, factorise_layer, has_rotary_or_norms
from tnlib_adapters.compression.methods.factorisation import RELATIVE, Factorisation, Factorised, ModuleWeights, Plan
from tnlib_adapters.compression.methods.method_table import TABLE, Method, resolve
from tnlib_adapters.compression.methods.out_of_core import LazyPart, StoredMatrices, Workspace
from tnlib_adapters.compression.operator_errors import compare_attention, compare_modules, root_mean_square
from tnlib_adapters.compression.options import Budget, Calibration, Run
from tnlib_adapters.compression.progress import Progress, quiet
from tnlib_adapters.compression.report import MatrixReport, Report, RoundedReport
from tnlib_adapters.compression.report_page import write_report
from tnlib_adapters.compression.request import PAGE, REPORT, Request
from tnlib_adapters.compression.source_model import (
    CalibrationText,
    SourceModel,
    check_finite,
    limits_of,
    open_source,
    read_calibration,
)
from tnlib_adapters.compression.text import TokenSequences
from tnlib_adapters.compression.write import loading_code, plan_bytes, write_checkpoint
from tnlib_adapters.factors.factored_matrix import rounded
from tnlib_adapters.factors.model_weights import ModelWeight, count_parameters
from tnlib_adapters.files.atomic_folder import check_target, scratch_folder, whole_folder
from tnlib_adapters.files.folder import other_files, path_text
from tnlib_adapters.files.process_memory import peak_memory, release_free_memory


def compress(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    budget: Budget | None = None,
    *,
    calibration: Calibration | str | os.PathLike[str] | None = None,
    what: str = "all",
    method: str | None = None,
    layout: str = "factored",
    effort: str = "default",
    run: Run = Run(),
) -> Report:
    """Write a copy of a checkpoint folder that stores a fraction of the parameters, or fewer bits of each.

    Parameters
    ----------
    source
        Folder with config.json and safetensors, or the name of a model in the local cache of the Hugging Face hub.
    out
        Folder to create; it appears complete or not at all.
    budget
        Size of the part that is compressed. None with calibration data: 4 bits per parameter on average.
    calibration
        Text file or other data, see `Calibration`, representative of the model's use.
    what
        "all" for attention, feed-forward layers, token embeddings and unembedding; "linear" for attention and
        feed-forward layers alone, to which layouts of engines turn "all"; "attention", or "mlp" for the matrices of the
        feed-forward layers. One matrix for embeddings and unembedding is factorised and counted once. The report names
        embeddings that stay as they are. Models with experts need "attention".
    method
        Without calibration data "heads" truncates the QK and OV operator of each head, "matrix" each weight matrix;
        "ttm" stores each matrix as a TT-matrix, "tucker" and "cp" each layer as one array (projection, head, d_model,
        d_head); weights they do not apply to are factorised by "matrix". With them "calibrated" keeps the components of
        every weight with the largest effect on the output, "quantized" rounds it so that errors compensate each other;
        then the result is fitted to the outputs of the original. None is "heads", or "matrix" for "mlp" and plain
        rounding; with calibration data "calibrated" for `keep` or `flops` without `bits`, otherwise "quantized".
    layout
        "factored" stores the factors; "dense" their products under the original names. "gptq", "compressed-tensors" and
        "onnxruntime" store linear layers as integers of inference engines, which load them without tnlib; "gguf" all
        matrices of a Llama and its tokenizer in one file for llama.cpp. Integers need calibration data.
    effort
        Passes over the text in which the result is fitted to the original: "low", none; "default", two; "high", six.
        Factors are fitted block by block before, in two passes or, with "high", 400 steps. Blocks alone are fitted of
        encoders, and of models that do not fit in memory: rounded weights in two passes or 200 steps, factors in six
        passes or 400 steps; beyond memory in one. Of the whole model at most 200 batches are read.
    run
        Device, memory, executor, progress and whether a folder `out` is replaced, such as ``Run(device="cuda")``.

    Returns
    -------
    Report
        Also written into the folder, as JSON and as a page.

    Raises
    ------
    ArgumentError
        If an argument is invalid, or the method cannot run on this model at this size.
    FileFormatError
        If `source` is not a checkpoint of a known architecture, or holds NaN or inf.

    References
    ----------
    E. Frantar et al., "GPTQ" (2023), error-compensated rounding; A. Tseng et al., "Model-Preserving Adaptive Rounding"
    (2025), moments of output gradients; S. K. Esser et al., "Learned Step Size Quantization" (2020), and M. Chen et
    al., "EfficientQAT" (2025), fitted scales; N. Shazeer and M. Stern, "Adafactor" (2018), steps of codes and factors.

    Examples
    --------
    >>> import os, tempfile
    >>> from tnlib_adapters import Budget, builtin_path, compress
    >>> out = os.path.join(tempfile.mkdtemp(), "smaller")
    >>> report = compress(builtin_path("llama"), out, Budget(keep=0.5))
    >>> report.n_before, report.n_after
    (786432, 393152)
    """
    started = time.perf_counter()
    request = Request.of(
        budget, calibration=calibration, what=what, method=method, layout=layout, effort=effort, run=run
    )
    progress, target = run.progress, as_path("compress", "out", out)
    checkpoint, documents = open_source(request, source, target)
    check_bits(request, checkpoint)
    limits = limits_of(checkpoint, request)
    original = SourceModel(checkpoint, request, limits)
    # tensors that are copied are checked before any work, the others as they are read
    read = {own.weight.name for own in compressed_weights(checkpoint, request.what, with_text=request.with_text)}
    check_finite([info for name, info in checkpoint.folder.tensors.items() if name not in read], progress)
    text = read_calibration(original, documents, progress)
    with scratch_folder(target) as scratch:
        workspace = Workspace(limits.cache, scratch, Workers.of(run.executor))
        plan = make_plan(original, request, None if text is None else text.sequences, workspace)
        release_free_memory()  # what the factorisation took, before a second model is in memory
        with whole_folder(target) as unfinished:
            for step in write_checkpoint(checkpoint, plan, layout, unfinished):
                progress(*step)
            written = open_checkpoint(unfinished)
            report = _report(original, written, plan, request, text, started)
            write_report(report, unfinished)
            if layout == GGUF:
                to_gguf(written, unfinished / GGUF_FILE)
            check_target("compress", target, checkpoint.folder.path, force=run.force)
    if request.folder is not None:
        CalibrationFolder(request.folder).finish()
    return report


def _report(
    source: SourceModel, after: Checkpoint, plan: Plan, request: Request, text: CalibrationText | None, started: float
) -> Report:
    """Return the report of a compression that began at `started`, measured on the written checkpoint.

    Outputs are measured on the held-out text, if there is any.
    """
    before, folder, what, budget = source.checkpoint, source.checkpoint.folder, request.what, request.budget
    progress, held_out, with_text = request.run.progress, [] if text is None else text.held_out, request.with_text
    weights = compressed_weights(before, what, with_text=with_text)
    compressed, int8 = None, None
    if held_out:
        compressed, int8 = measure_on_text(source, after, weights, held_out, progress, plan.matrices.workspace)
    layers, heads, squares = compare_attention(before, after, plan, progress)
    if plan.forecast.measure == RELATIVE:
        squares += compare_modules(before, after, plan)
    bytes_before, n_other = stored_bytes(before, weights)
    return Report(
        source=path_text(folder.path),
        model_type=before.wiring.model_type,
        method=plan.method,
        layout=request.layout,
        keep=budget.keep,
        kept=plan.kept,
        n_before=plan.n_before,
        n_after=plan.n_after,
        n_other=n_other,
        bytes_before=bytes_before,
        bytes_after=stored_bytes(after, weights)[0],
        layers=layers,
        heads=heads,
        left_out=[path_text(path.relative_to(folder.path)) for path in other_files(folder, (REPORT, PAGE))[1]],
        quality=text_measures(compressed, plan.forecast) if compressed else {},
        max_error=budget.max_error,
        bits=budget.bits,
        flops=dict(zip(("before", "after"), plan.flops or (), strict=False)),
        store=budget.store,
        what=what,
        plain_bytes=plain_bytes(weights),
        plain_measured=int8.error if int8 else None,
        average_bits=8 * plan_bytes(before, plan) / plan.n_before,
        rounded=_rounded_reports(plan),
        measure=plan.forecast.measure,
        predicted=plan.forecast.error,
        measured=compressed.error if compressed else root_mean_square(squares),
        curve=plan.forecast.curve(),
        calibration={} if text is None else text.summary(source.original, request.tokens),
        load=loading_code(after, request.layout),
        matrices=[_matrix_report(plan, own) for own in weights if not own.of],
        left_dense=left_dense(before, with_text=with_text) if what == "all" else {},
        seconds=time.perf_counter() - started,
        peak_memory=peak_memory(),
    )


def _matrix_report(plan: Plan, weight: ModelWeight) -> MatrixReport:
    role = weight.role.replace("_", "-") if weight.tied_key is None else "embedding and unembedding"
    (description,) = plan.descriptions[weight.module]
    n_after = plan.numbers[weight.module]
    return MatrixReport(weight.module, role, description.kind, count_parameters([weight]), n_after)


def _rounded_reports(plan: Plan) -> list[RoundedReport]:
    """Return one report for every weight in integers, if the method spends bits or all weights stay whole."""
    described = [description for of_module in plan.descriptions.values() for description in of_module]
    if not plan.forecast.in_bits and not all(description.is_whole for description in described):
        return []
    reports = []
    for description in (description for description in described if description.formats):
        formats, shapes = description.formats, description.shapes
        form, rank = next(iter(formats.values())), None if description.is_whole else shapes["left"][1]
        n_bits = sum(form.n_bits(shapes[part]) for part, form in formats.items())
        reports.append(RoundedReport(description.module, description.of, form.bits, rank, form.group, n_bits // 8))
    return reports


def make_plan(source: SourceModel, request: Request, text: TokenSequences | None, workspace: Workspace) -> Plan:
    """Return the factors for a request, chosen by the calibration text if there is one, and rounded if requested.

    `workspace` has the memory and the temporary files of the factors. Raises `ArgumentError` if no allocation meets the
    request, or the text is too short.
    """
    progress = request.run.progress
    if text is None:
        factorisation = factorise(source.checkpoint, request.method, progress, what=request.what, workspace=workspace)
    else:
        with_text = resolve(TABLE[request.method].factorise)
        factorisation = replace(with_text(source, text, request, workspace), workspace=workspace)
    plan = factorisation.plan_of(factorisation.select(request.budget), progress, is_last=True)
    del factorisation  # and its files
    if request.budget.width is None or request.in_bits:
        return plan
    return round_plan(plan, source.checkpoint.wiring, request.budget.width)


def round_plan(plan: Plan, wiring: Wiring, bits: int) -> Plan:
    """Return a plan with all factors rounded to the nearest integers of `bits` bits."""
    matrices = StoredMatrices(plan.matrices.workspace)
    for module, of_module in plan.matrices.items():
        matrices.add(module, [rounded(matrix, bits, by_row=wiring.is_embedding(module)) for matrix in of_module])
    return replace(plan, matrices=matrices)


def factorise(
    checkpoint: Checkpoint,
    method: str,
    progress: Progress = quiet,
    *,
    what: str = "attention",
    workspace: Workspace | None = None,
) -> Factorisation:
    """Factorise the weights of a checkpoint by a method of `METHODS`, or by "matrix" where it does not apply.

    The model and the method are those of a checked request. `workspace` has the memory and temporary files of the
    factors; None for the default memory, without files.
    """
    row, weights, workspace = TABLE[method], compressed_weights(checkpoint, what), workspace or Workspace()
    modules = {own.module: own for own in weights}
    rotary, parts = has_rotary_or_norms(checkpoint), dict[str, LazyPart]()

    def calls() -> Iterator[Callable[[], Factorised]]:
        """Yield the calls with all arrays they need, which are read when a call is submitted."""
        for own in modules.values():
            if own.of:
                yield partial(factorise_layer, row, checkpoint.projections(own.group), checkpoint.sizes, rotary=rotary)
            else:
                applied = row if own.role in row.applies_to else TABLE["matrix"]
                yield partial(_factorise_module, applied, own.read(), 0 if own.bias is None else own.bias.size)

    factorised = workspace.workers.map(calls())
    for done, module in enumerate(modules):
        progress("factorising", done, len(modules))
        parts[module] = LazyPart(next(factorised), workspace)
    progress("factorising", len(modules), len(modules))
    return Factorisation(
        method,
        parts,
        count_parameters(weights),
        predicts_error=row.predicts_error,
        weights={module: error_weight(checkpoint, own) for module, own in modules.items()},
        workspace=workspace,
    )


def _factorise_module(method: Method, weight: Array, n_bias: int) -> ModuleWeights:
    return ModuleWeights({"": FactorisedWeight(weight, resolve(method.factorise)(weight))}, n_bias)
