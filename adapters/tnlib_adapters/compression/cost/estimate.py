"""Estimate what a compression costs before it runs, by a short measurement."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tnlib import ArgumentError
from tnlib_adapters.checkpoints.checkpoint import Checkpoint
from tnlib_adapters.compression.calibration.fit_by_block import fit_steps
from tnlib_adapters.compression.cost.choice import choose_limits, tokens_within
from tnlib_adapters.compression.cost.decomposition_timing import time_decompositions, time_layer
from tnlib_adapters.compression.cost.memory import peak_memory_of, spill_bytes, temporary_bytes
from tnlib_adapters.compression.cost.passes import Times, Tokens, seconds_by_stage
from tnlib_adapters.compression.cost.shapes import Shapes, shapes_of
from tnlib_adapters.compression.layouts.layout_table import SMALLER_MODELS
from tnlib_adapters.compression.limits import Limits
from tnlib_adapters.compression.methods.head_products import has_rotary_or_norms
from tnlib_adapters.compression.methods.other_matrices import names_of, widest_component, widest_input
from tnlib_adapters.compression.request import STORES, Progress, Request, quiet
from tnlib_adapters.compression.source_model import CheckedSource, open_source
from tnlib_adapters.compression.text import check_tokens, sample_batches
from tnlib_adapters.files.process_memory import resident_memory
from tnlib_adapters.files.tokenizer import MAX_TOKENS

if TYPE_CHECKING:
    from tnlib_adapters.instrument.block_timing import BlockTimes
    from tnlib_adapters.instrument.running_model import Batch, RunningModel

_LOADED = 2**26  # bytes that are read to time the reading of weights


@dataclass(frozen=True)
class Cost:
    """Estimated cost of a compression.

    Parameters
    ----------
    model_type, method
        Architecture of the model, and method of the compression.
    n_parameters, n_bytes
        Numbers of the model, and their bytes on disk.
    n_before, bytes_before
        The same of the part that is compressed.
    bytes_after
        Bytes of all weights that are written, at most; None if the size follows from `max_error`.
    tokens
        Tokens that are read for "statistics", "fit" and "held-out text"; {} without a text.
    passes
        Work of every stage, in forward passes of the model over the text of the fit (of the statistics without a fit);
        {} without a text.
    seconds
        Seconds of every stage.
    memory
        Peak resident memory of every stage, in bytes.
    spill
        Bytes of streams and statistics between the blocks, in the folder of `spill` or in a temporary one.
    temporary
        Bytes of temporary files beside OUT, of factors that do not fit into memory.
    limits
        Tokens of a batch, bytes of factors and bytes of weights that are kept in memory.
    measured_in
        Seconds that the measurement took.

    Examples
    --------
    >>> import tnlib_adapters
    >>> cost = tnlib_adapters.estimate_cost(tnlib_adapters.builtin_path(), keep=0.5)
    >>> cost.n_before
    33280
    """

    model_type: str
    method: str
    n_parameters: int
    n_bytes: int
    n_before: int
    bytes_before: int
    bytes_after: int | None
    tokens: Mapping[str, int]
    passes: Mapping[str, float]
    seconds: Mapping[str, float]
    memory: Mapping[str, int]
    spill: int
    temporary: int
    limits: Limits
    measured_in: float

    @property
    def total_seconds(self) -> float:
        """Seconds of all stages."""
        return sum(self.seconds.values())

    @property
    def peak_memory(self) -> int:
        """Peak resident memory of the process, in bytes."""
        return max(self.memory.values())


def estimate_cost(
    source: str | os.PathLike[str],
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
    max_memory: int | None = None,
    progress: Progress = quiet,
) -> Cost:
    """Return what `compress` would cost with these options: passes over the text, seconds, memory and disk.

    Nothing is written. A forward pass of one block on one batch and one decomposition of every shape of weight are
    timed on random weights, at smaller sizes if they are large; weights of the checkpoint are not read, but for some
    megabytes to time the reading.

    Parameters
    ----------
    source
        Folder with config.json and safetensors, or the name of a model in the local cache of the Hugging Face hub.
    keep, max_error, bits, flops, method, layout, store, what
        As in `compress`.
    calibrate, statistics, calibration_tokens, spill, max_memory
        As in `compress`.
    progress
        Called with (stage, done, total).

    Returns
    -------
    Cost
        Seconds and peak memory by stage, and the bytes on disk.

    Raises
    ------
    ArgumentError, FileFormatError
        As `compress` raises before any work.

    Examples
    --------
    >>> import tnlib_adapters
    >>> cost = tnlib_adapters.estimate_cost(tnlib_adapters.builtin_path(), keep=0.5, method="matrix")
    >>> cost.bytes_before, cost.bytes_after
    (133120, 157184)
    """
    started = time.perf_counter()
    _check_layout(layout)
    request = Request.of(
        keep=keep,
        max_error=max_error,
        bits=bits,
        flops=flops,
        method=method,
        layout=layout,
        store=store,
        what=what,
        calibrate=calibrate,
        statistics=statistics,
        calibration_tokens=calibration_tokens,
        spill=spill,
        max_memory=max_memory,
    )
    opened = open_source(request, source)
    shapes = shapes_of(opened.checkpoint, request)
    text = None if opened.calibration is None else _Text.of(opened, request)
    memory = resident_memory()
    tokens = Tokens() if text is None else text.tokens
    limits = choose_limits(shapes, request, tokens, memory)
    tokens = tokens_within(tokens, limits)
    fit_in_memory = 4 * shapes.n_parameters <= limits.weights
    times = _times(opened.checkpoint, shapes, request, text, progress)
    n_batches = math.ceil(tokens.fit / max(1, tokens.batch))
    steps = fit_steps(n_batches, in_bits=request.in_bits, fit_in_memory=fit_in_memory) if request.fits_model else 0
    seconds = seconds_by_stage(shapes, request, tokens, times, steps, fit_in_memory=fit_in_memory)
    if request.statistics is not None and request.statistics.exists():
        seconds = {name: value for name, value in seconds.items() if name != "statistics"}
    read = {"statistics": tokens.statistics, "fit": tokens.fit, "held-out text": tokens.held_out}
    forward = sum(shapes.blocks) / times.timed * times.forward + times.head
    pass_of_text = (tokens.fit or tokens.statistics) * forward
    return Cost(
        model_type=opened.checkpoint.wiring.model_type,
        method=request.method,
        n_parameters=shapes.n_parameters,
        n_bytes=shapes.n_bytes,
        n_before=shapes.n_before,
        bytes_before=shapes.bytes_before,
        bytes_after=_bytes_after(shapes, request),
        tokens={name: count for name, count in read.items() if count},
        passes={name: own / pass_of_text for name, own in seconds.items()} if pass_of_text else {},
        seconds=seconds,
        memory=peak_memory_of(shapes, request, tokens, limits, memory),
        spill=spill_bytes(shapes, request, tokens, limits),
        temporary=temporary_bytes(shapes, request, limits),
        limits=limits,
        measured_in=time.perf_counter() - started,
    )


def _check_layout(layout: str) -> None:
    if layout in SMALLER_MODELS:
        raise ArgumentError(
            f"estimate_cost: the cost of layout {layout!r} is not estimated; pass 'factored' or 'dense'."
        )


def limits_of(opened: CheckedSource, request: Request) -> Limits:
    """Return the limits with which a compression stays within `max_memory`; the defaults if it is None.

    Raises
    ------
    ArgumentError
        If there are none, or the text is too short.
    """
    if request.max_memory is None:
        return Limits()
    text = None if opened.calibration is None else _Text.of(opened, request)
    tokens = Tokens() if text is None else text.tokens
    return choose_limits(shapes_of(opened.checkpoint, request), request, tokens, resident_memory())


@dataclass(frozen=True)
class _Text:
    """The calibration text in batches of a model without weights."""

    model: RunningModel
    batches: list[Batch]
    tokens: Tokens

    @classmethod
    def of(cls, opened: CheckedSource, request: Request) -> _Text:
        """Read the text of a request; raise if it is too short."""
        from tnlib_adapters.compression.calibration import collect_calibration, whitening
        from tnlib_adapters.instrument.layer_fit import n_held_out
        from tnlib_adapters.instrument.running_model import open_without_weights

        model = open_without_weights(opened.checkpoint, "compress", request.calibration_tokens)
        batches = model.batches(opened.calibration or "")
        if request.fits_model:
            check_tokens("compress", batches, widest_component(opened.checkpoint, request.what), "components")
        else:
            check_tokens("compress", batches, widest_input(opened.checkpoint, request.what))
        n_statistics = collect_calibration.TOKENS_OF_STATISTICS if request.fits_model else whitening.TOKENS_OF_INPUTS
        statistics = sample_batches(batches, n_statistics)
        fit = sample_batches(batches, collect_calibration.TOKENS_OF_FIT) if request.fits_model else []
        held_out = model.batches(opened.held_out)
        tokens = Tokens(
            statistics=_count(statistics),
            fit=_count(fit),
            held_out=_count(held_out),
            chosen=_count(fit[: n_held_out(len(fit))]),
            batch=max(batch.ids.numel() for batch in batches),
            longest=max(batch.ids.shape[1] for batch in batches),
        )
        return cls(model, batches, tokens)


def _count(batches: list[Batch]) -> int:
    """Return the tokens of batches, padding included."""
    return sum(batch.ids.numel() for batch in batches)


def _times(checkpoint: Checkpoint, shapes: Shapes, request: Request, text: _Text | None, progress: Progress) -> Times:
    """Measure the times of the parts of a compression."""
    rotary = has_rotary_or_norms(checkpoint)
    times = Times(
        decompositions=time_decompositions(shapes, request, progress),
        layer=time_layer(checkpoint.sizes, shapes, request, rotary),
        load=_time_load(checkpoint),
    )
    if text is None:
        return times
    progress("timing a block", 0, 1)
    block = _time_block(checkpoint, shapes, request, text)
    progress("timing a block", 1, 1)
    return replace(
        times,
        forward=block.forward,
        observed=block.observed,
        head=block.head,
        elementwise=block.elementwise,
        timed=shapes.blocks[shapes.largest],
    )


def _time_block(checkpoint: Checkpoint, shapes: Shapes, request: Request, text: _Text) -> BlockTimes:
    from tnlib_adapters.instrument.block_timing import time_block
    from tnlib_adapters.instrument.weight_inputs import find_places

    names = names_of(checkpoint, request.what, with_text=True)
    places = find_places(text.model, names, attention=bool(shapes.layers))
    return time_block(text.model, places, shapes.largest, text.batches[-1])


def _time_load(checkpoint: Checkpoint) -> float:
    """Return the seconds per number to read weights from the files and convert them to single precision."""
    n_read, seconds = 0, 0.0
    for info in sorted(checkpoint.folder.tensors.values(), key=lambda info: info.size):
        if n_read and 4 * (n_read + info.size) > _LOADED:
            break
        started = time.perf_counter()
        info.read_finite()
        seconds += time.perf_counter() - started
        n_read += info.size
    return seconds / n_read


def _bytes_after(shapes: Shapes, request: Request) -> int | None:
    """Return the bytes of all weights that are written, at most; None if they follow from an error."""
    other = shapes.n_bytes - shapes.bytes_before
    if request.layout == "dense":
        return shapes.n_bytes
    if request.bits is not None:
        return other + int(request.bits * shapes.n_before / 8)
    if request.keep is None and request.width is None:
        return None
    keep = 1.0 if request.keep is None else request.keep
    if request.width is None:
        return other + int(keep * shapes.bytes_before)
    scales = 0.25 if request.store != "int8" else 0.1  # bits per number: one scale for 64 numbers, or for a component
    return other + int(keep * shapes.n_before * ((STORES[request.store] or 0) + scales) / 8)
