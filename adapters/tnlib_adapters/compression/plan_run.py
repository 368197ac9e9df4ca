"""Sizes and time of a compression before it runs: one block is timed, and multiplied by blocks and passes."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

import numpy as np

from tnlib_adapters.checkpoints.checkpoint import Checkpoint
from tnlib_adapters.compression.calibration.quantize import check_bits, forms_of
from tnlib_adapters.compression.compressed_part import compressed_weights, widest_component
from tnlib_adapters.compression.methods.components import components_on_device, second_moments
from tnlib_adapters.compression.methods.decompositions import factorise_layer, has_rotary_or_norms
from tnlib_adapters.compression.methods.method_table import TABLE, resolve
from tnlib_adapters.compression.methods.quantized import Metric, QuantizedWeight
from tnlib_adapters.compression.options import Budget, Calibration, Run
from tnlib_adapters.compression.report import megabytes
from tnlib_adapters.compression.request import Request
from tnlib_adapters.compression.source_model import (
    CalibrationText,
    Limits,
    SourceModel,
    least_memory,
    limits_of,
    open_source,
    read_calibration,
)
from tnlib_adapters.compression.text import check_tokens, sample_batches
from tnlib_adapters.factors.model_weights import ModelWeight, count_parameters, n_bytes, tensors_of

if TYPE_CHECKING:
    from torch import Tensor

    from tnlib_adapters.instrument.running_model import Batch, Document

_LARGEST = 1e9  # m n min(m, n) of a weight that is timed at its own size
_FORWARD = 4  # of the fit: original and fitted streams, and a few batches through later blocks, to choose weights
_EVALUATIONS = 3  # original, compressed, plain int8
_BACKWARD = 4  # passes whose time is that of a forward and a backward pass, with moments or a step of the fit


@dataclass(frozen=True)
class PlannedRun:
    """Sizes and estimated time of a compression; `str` has them as lines.

    Parameters
    ----------
    model_type, method
        Architecture of the model, and method of the compression.
    n_parameters, n_bytes
        Parameters of the model, and their bytes on disk.
    n_before, bytes_before
        The same of the part that is compressed.
    bytes_after
        Bytes of all weights that are written, at most; None if the size follows from `max_error`.
    n_blocks
        Blocks of the model.
    tokens
        Tokens that are read for "statistics", "fit" and "held-out text", padding included; {} without a text.
    memory
        Bytes that suffice as `Run.memory`, and at most a few percent more than the least.
    seconds
        Estimated seconds.

    Examples
    --------
    >>> import tnlib_adapters
    >>> llama, half = tnlib_adapters.builtin_path("llama"), tnlib_adapters.Budget(keep=0.5)
    >>> print(tnlib_adapters.plan(llama, half))
    llama, method heads
    model               787,584 parameters in 4 blocks, 1.58 MB
    compressed part     786,432 parameters, 1.57 MB
    all weights in OUT  at most 0.79 MB
    time                a few seconds
    """

    model_type: str
    method: str
    n_parameters: int
    n_bytes: int
    n_before: int
    bytes_before: int
    bytes_after: int | None
    n_blocks: int
    tokens: Mapping[str, int]
    memory: int
    seconds: float

    def __str__(self) -> str:
        after = "depends on the error" if self.bytes_after is None else f"at most {megabytes(self.bytes_after)}"
        lines = {
            "model": f"{self.n_parameters:,} parameters in {self.n_blocks} blocks, {megabytes(self.n_bytes)}",
            "compressed part": f"{self.n_before:,} parameters, {megabytes(self.bytes_before)}",
            "all weights in OUT": after,
            "tokens": ", ".join(f"{count:,} for {name}" for name, count in self.tokens.items()),
            "memory": f"at least {math.ceil(self.memory / 1e7) * 10:,} MB, with --max-memory" if self.tokens else "",
            "time": duration(self.seconds),
        }
        title = f"{self.model_type}, method {self.method}"
        return "\n".join([title, *(f"{name:<18}  {value}" for name, value in lines.items() if value)])


def plan(
    source: str | os.PathLike[str],
    budget: Budget | None = None,
    *,
    calibration: Calibration | str | os.PathLike[str] | None = None,
    what: str = "all",
    method: str | None = None,
    layout: str = "factored",
    effort: str = "default",
    run: Run = Run(),
) -> PlannedRun:
    """Return the sizes of a compression, and about how long it will take; nothing is written.

    Sizes are those of the file headers. One block is timed on a batch of the text, and the decomposition of one weight
    on a random one; both are multiplied by their number and by that of the passes.

    Parameters
    ----------
    source, budget, calibration, what, method, layout, effort, run
        Those of `compress`.

    Returns
    -------
    PlannedRun
        Parameters and bytes before and after, tokens and seconds.

    Raises
    ------
    ArgumentError, FileFormatError
        As `compress` raises before any work.

    Examples
    --------
    >>> import tnlib_adapters
    >>> llama, half = tnlib_adapters.builtin_path("llama"), tnlib_adapters.Budget(keep=0.5)
    >>> planned = tnlib_adapters.plan(llama, half)
    >>> planned.n_before, planned.bytes_before, planned.bytes_after
    (786432, 1572864, 788736)
    """
    started = time.perf_counter()
    request = Request.of(
        budget, calibration=calibration, what=what, method=method, layout=layout, effort=effort, run=run
    )
    checkpoint, documents = open_source(request, source)
    check_bits(request, checkpoint)
    weights = compressed_weights(checkpoint, request.what, with_text=request.with_text)
    all_bytes, bytes_before = n_bytes(checkpoint.folder.tensors.values()), n_bytes(tensors_of(weights).values())
    n_before = count_parameters(weights)
    limits = limits_of(checkpoint, request)
    memory = int(1.02 * least_memory(checkpoint, request))  # that of the process differs a little in each run
    run.progress("timing a block", 0, 2)
    tokens, of_text = _time_passes(checkpoint, documents, request, limits, weights) if documents else ({}, 0.0)
    run.progress("timing a block", 1, 2)
    of_weights = _time_weights(checkpoint, request, weights)
    run.progress("timing a block", 2, 2)
    return PlannedRun(
        model_type=checkpoint.wiring.model_type,
        method=request.method,
        n_parameters=sum(info.size for info in checkpoint.folder.tensors.values()),
        n_bytes=all_bytes,
        n_before=n_before,
        bytes_before=bytes_before,
        bytes_after=_bytes_after(request, all_bytes, n_before, bytes_before),
        n_blocks=checkpoint.n_layers,
        tokens=tokens,
        memory=memory,
        seconds=time.perf_counter() - started + of_text + of_weights,
    )


def _bytes_after(request: Request, all_bytes: int, n_before: int, bytes_before: int) -> int | None:
    """Return the bytes of all weights that are written, at most; None if they follow from an error."""
    other, budget = all_bytes - bytes_before, request.budget
    if request.layout == "dense":
        return all_bytes
    if budget.bits is not None:
        return other + int(budget.bits * n_before / 8)
    if budget.keep is None and budget.width is None:
        return None
    keep = 1.0 if budget.keep is None else budget.keep
    if budget.width is None:
        return other + int(keep * bytes_before)
    scales = 0.1 if budget.store == "int8" else 0.25  # bits per parameter: a scale for a component, or for 64 of them
    return other + int(keep * n_before * (budget.width + scales) / 8)


def _time_passes(
    checkpoint: Checkpoint,
    documents: Sequence[Document],
    request: Request,
    limits: Limits,
    weights: Sequence[ModelWeight],
) -> tuple[dict[str, int], float]:
    """Return the tokens that are read by stage, and the seconds of all passes over them."""
    from tnlib_adapters.compression.calibration.factorise_and_fit import fit_steps
    from tnlib_adapters.instrument.block_passes import OuterLayers, run_block

    n_blocks = checkpoint.n_layers
    source = SourceModel(checkpoint, request, replace(limits, weights=0))  # one block is read
    model, text = source.original, cast(CalibrationText, read_calibration(source, documents))
    batches, held_out = model.batches(text.sequences), _count(model.batches(text.held_out))
    check_tokens("compress", batches, widest_component(weights))
    outer, batch, k = OuterLayers(model), batches[len(batches) // 2], n_blocks // 2
    x, calls = outer.enter(batch)
    block = _seconds(lambda: run_block(model, k, x, calls[k])) / batch.ids.numel()
    output = _seconds(lambda: outer.leave(x, batch)) / batch.ids.numel()
    observed, fit = _count(sample_batches(batches, request.tokens // 2)), sample_batches(batches, request.tokens)
    in_fit, in_memory = _count(fit), 4 * sum(info.size for info in checkpoint.folder.tensors.values()) <= limits.weights
    of_layer, of_model = (
        steps * in_fit / len(fit)
        for steps in fit_steps(
            len(fit),
            request.effort,
            in_bits=request.in_bits,
            fit_in_memory=in_memory,
            predicts=model.predicts,
        )
    )
    of_output = _EVALUATIONS * held_out + _BACKWARD * (observed + of_model)
    of_block = of_output + _BACKWARD * of_layer + (_FORWARD * in_fit if of_layer else 0)
    tokens = {"statistics": observed, "fit": in_fit, "held-out text": held_out}
    return tokens, of_output * output + n_blocks * of_block * block


def _seconds(call: Callable[[], Tensor]) -> float:
    """Return the seconds of the second call: libraries prepare themselves at the first. Waits for the device."""
    import torch

    with torch.no_grad():
        call().flatten()[0].item()
        started = time.perf_counter()
        call().flatten()[0].item()
    return time.perf_counter() - started


def _count(batches: Sequence[Batch]) -> int:
    """Return the tokens of batches, padding included."""
    return sum(batch.ids.numel() for batch in batches)


def _time_weights(checkpoint: Checkpoint, request: Request, weights: Sequence[ModelWeight]) -> float:
    """Return the seconds to factorise all compressed weights: one is timed, and multiplied by the cubes of the sizes.

    Methods of unit "layer" are timed on the attention of one layer.
    """
    layers, of_layers = {own.group for own in weights if own.of}, 0.0
    if TABLE[request.method].unit == "layer" and layers:
        attention, rotary = checkpoint.projections(min(layers)), has_rotary_or_norms(checkpoint)
        started = time.perf_counter()
        factorise_layer(TABLE[request.method], attention, checkpoint.sizes, rotary=rotary)
        of_layers = len(layers) * (time.perf_counter() - started)
        weights = [own for own in weights if not own.of]
    shapes = sorted((own.shape for own in weights), key=_operations)
    if not shapes:
        return of_layers
    timed = shapes[len(shapes) // 2]
    return of_layers + _time_weight(timed, request) / _operations(timed) * sum(map(_operations, shapes))


def _operations(shape: Sequence[int]) -> int:
    """Return the operations of a decomposition up to a factor, m n min(m, n)."""
    return math.prod(shape) * min(shape)


def _time_weight(shape: Sequence[int], request: Request) -> float:
    """Return the seconds to factorise and round a random weight of a shape; of a large one by a smaller one."""
    row = TABLE["matrix"] if TABLE[request.method].unit == "layer" else TABLE[request.method]
    ratio = max(1.0, (_operations(shape) / _LARGEST) ** (1 / 3))
    m, n = (max(1, round(size / ratio)) for size in shape)
    weight = np.random.default_rng(0).standard_normal((m, n), np.float32)
    reads, slopes = (second_moments(np.random.default_rng(0).standard_normal((2 * k, k), np.float32)) for k in (m, n))
    started = time.perf_counter()
    if request.calibration is None:
        resolve(row.factorise)(weight)
    elif request.in_bits:
        quantized = QuantizedWeight(weight, Metric(reads, slopes), forms=forms_of(request))
        quantized.rounded(next(k for k, option in enumerate(quantized.options) if option.rank is None))
    else:
        components_on_device(weight, reads, slopes, request.run.device)
    return float(ratio**3) * (time.perf_counter() - started)


def duration(seconds: float) -> str:
    """Return a time in the unit that suits it.

    >>> duration(7.4), duration(754), duration(9000)
    ('a few seconds', 'about 13 minutes', 'about 2.5 hours')
    """
    if seconds < 10:
        return "a few seconds"
    if seconds < 90:
        return f"about {seconds:.0f} seconds"
    return f"about {seconds / 60:.0f} minutes" if seconds < 5400 else f"about {seconds / 3600:.1f} hours"
