"""Build the compression report by measuring the written checkpoint."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import numpy as np

from tnlib._typing import Array
from tnlib_adapters.checkpoints.checkpoint import Checkpoint
from tnlib_adapters.compression.evaluation.error_measures import RELATIVE
from tnlib_adapters.compression.evaluation.operator_errors import compare_layer
from tnlib_adapters.compression.evaluation.quality import OnText
from tnlib_adapters.compression.methods.int8_baseline import plain_bytes
from tnlib_adapters.compression.methods.other_matrices import names_of
from tnlib_adapters.compression.plan import Plan
from tnlib_adapters.compression.progress import Progress
from tnlib_adapters.compression.report.memory import peak_memory
from tnlib_adapters.compression.report.report import HeadReport, LayerReport, Report
from tnlib_adapters.compression.request import Request
from tnlib_adapters.compression.sizes import count_attention, stored_bytes
from tnlib_adapters.compression.write import other_files
from tnlib_adapters.factors.attention_factors import Piece


def measured_report(
    before: Checkpoint,
    after: Checkpoint,
    plan: Plan,
    request: Request,
    quality: Mapping[str, float],
    on_text: OnText | None,
    progress: Progress,
    started: float,
) -> Report:
    """Return the report of a compression that began at `started`, with quality measures of the whole model."""
    layers, heads = _compare_layers(before, after, plan, progress)
    names = names_of(before, request.what)
    bytes_before, n_other = stored_bytes(before, request.what, names)
    bytes_after, _ = stored_bytes(after, request.what, names)
    return Report(
        source=str(before.folder.path),
        model_type=before.architecture.model_type,
        method=plan.method,
        layout=request.layout,
        keep=request.keep,
        kept=plan.kept,
        n_before=plan.n_before,
        n_after=plan.n_after,
        n_other=n_other,
        bytes_before=bytes_before,
        bytes_after=bytes_after,
        layers=layers,
        heads=heads,
        quality={**quality, **(on_text.measures(plan.forecast) if on_text else {})},
        left_out=[str(path.relative_to(before.folder.path)) for path in other_files(before)[1]],
        max_error=request.max_error,
        store=request.store,
        what=request.what,
        measure=plan.forecast.measure,
        predicted=plan.forecast.error,
        measured=on_text.after.error if on_text else measured_error(before, after, plan, heads),
        plain_bytes=plain_bytes(before, request.what, names),
        plain_measured=on_text.rounded.error if on_text else None,
        curve={"kept": list(plan.forecast.kept), "predicted": list(plan.forecast.errors)},
        seconds=time.perf_counter() - started,
        peak_memory=peak_memory(),
    )


def _compare_layers(
    before: Checkpoint, after: Checkpoint, plan: Plan, progress: Progress
) -> tuple[list[LayerReport], list[HeadReport]]:
    layers, heads, numbers = [], [], count_attention(before)
    for layer, pieces in enumerate(plan.layers):
        progress("measuring errors", layer, before.n_layers)
        ranks = _ranks(pieces, before.sizes.n_heads)
        reports, qk, ov = compare_layer(layer, before.attention(layer), after.attention(layer), ranks)
        worst = max(max(head.qk_error, head.ov_error) for head in reports)
        n_after = plan.layer_numbers[layer] if pieces else numbers[layer]
        layers.append(LayerReport(layer, qk, ov, worst, numbers[layer], n_after))
        heads += reports
    progress("measuring errors", before.n_layers, before.n_layers)
    return layers, heads


def _ranks(pieces: Sequence[Piece], n_heads: int) -> list[tuple[int | None, int | None]]:
    """Return each query head's QK and OV rank if the factors are per head, else None."""
    ranks: dict[str, list[int | None]] = {"qk": [None] * n_heads, "vo": [None] * n_heads}
    for piece in pieces:
        if piece.ranks:
            ranks[piece.of] = [rank for rank in piece.ranks for _ in range(n_heads // len(piece.ranks))]
    return list(zip(ranks["qk"], ranks["vo"], strict=True))


def measured_error(before: Checkpoint, after: Checkpoint, plan: Plan, heads: Sequence[HeadReport]) -> float | None:
    """Return the root mean square over blocks of the relative error, the quantity that a plan without text predicts.

    A block is a unit of truncation: the operators of a head, or the weights that a piece replaces. None for a plan with
    a text.
    """
    if plan.forecast.measure != RELATIVE:
        return None
    n_groups, per_layer = before.sizes.kv_heads, before.sizes.n_heads
    squares: list[float] = []
    for layer, pieces in enumerate(plan.layers):
        layer_heads = heads[layer * per_layer : (layer + 1) * per_layer]
        old, new = (checkpoint.projections(layer).weights for checkpoint in (before, after))
        for piece in pieces:
            if piece.of in ("qk", "vo"):
                size = per_layer // n_groups
                squares += [_of_group(layer_heads[k * size : (k + 1) * size], piece.of) for k in range(n_groups)]
            else:
                squares.append(_of_weights(old, new, piece.of))
    for piece in plan.modules:
        original, compressed = ({"w": checkpoint.read(f"{piece.of}.weight")} for checkpoint in (before, after))
        squares.append(_of_weights(original, compressed, "w"))
    return float(np.sqrt(np.mean(squares)))


def _of_group(heads: Sequence[HeadReport], operator: str) -> float:
    """Return the squared relative error of the operators of all query heads of one key and value head."""
    errors = [(h.qk_error, h.qk_spectrum) if operator == "qk" else (h.ov_error, h.ov_spectrum) for h in heads]
    sizes = np.array([np.linalg.norm(spectrum) for _, spectrum in errors])
    largest = float(sizes.max())
    if largest == 0:
        return 0.0
    shares = (sizes / largest) ** 2
    return float(np.sum([error**2 for error, _ in errors] * shares) / np.sum(shares))


def _of_weights(old: Mapping[str, Array], new: Mapping[str, Array], names: str) -> float:
    """Return the squared relative error of these projections, concatenated."""
    size = np.linalg.norm([np.linalg.norm(old[name].astype(np.float64)) for name in names])
    distance = np.linalg.norm([np.linalg.norm(old[name].astype(np.float64) - new[name]) for name in names])
    return float((distance / size) ** 2) if size > 0 else 0.0
