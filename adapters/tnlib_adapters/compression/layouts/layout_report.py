"""Report of a checkpoint that was written as a smaller model."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np

from tnlib_adapters.attention.attention import Attention
from tnlib_adapters.checkpoints.checkpoint import Checkpoint
from tnlib_adapters.compression.evaluation.evaluate import Evaluation
from tnlib_adapters.compression.evaluation.operator_errors import compare_layer
from tnlib_adapters.compression.layouts.layout_request import LayoutRequest
from tnlib_adapters.compression.layouts.smaller_model import SmallerModel
from tnlib_adapters.compression.methods.factorisation import measure_of_text
from tnlib_adapters.compression.report.report import HeadReport, LayerReport, Report, peak_memory
from tnlib_adapters.compression.request import PAGE, REPORT
from tnlib_adapters.compression.sizes import attention_tensors, cache_bytes
from tnlib_adapters.compression.write import loading_code
from tnlib_adapters.files.folder import other_files, path_text
from tnlib_adapters.files.tensor_file import STORED_AS, widest_float


def report_layout(
    before: Checkpoint,
    after: Checkpoint,
    smaller: SmallerModel[Any],
    request: LayoutRequest,
    evaluation: Evaluation,
    started: float,
) -> Report:
    """Return the report of a compression that began at `started`; `evaluation` is on held-out text."""
    layers, heads = _compare(before, after, smaller.what)
    n_before, n_after = (sum(numbers) for numbers in zip(*((own.n_before, own.n_after) for own in layers), strict=True))
    left_out = other_files(before.folder, (REPORT, PAGE))[1]
    return Report(
        source=path_text(before.folder.path),
        model_type=before.wiring.model_type,
        method="calibrated",
        layout=request.layout.name,
        keep=request.keep,
        kept=n_after / n_before,
        n_before=n_before,
        n_after=n_after,
        n_other=sum(info.size for info in before.folder.tensors.values()) - n_before,
        bytes_before=_bytes(before, n_before),
        bytes_after=_bytes(after, n_after),
        layers=layers,
        heads=heads,
        quality={f"{name}, on held-out text": value for name, value in evaluation.measures().items()},
        left_out=[path_text(path.relative_to(before.folder.path)) for path in left_out],
        what=smaller.what,
        measure=measure_of_text(before),
        measured=evaluation.error,
        cache_bytes={"before": cache_bytes(before), "after": cache_bytes(after)},
        load=loading_code(after, "dense"),
        seconds=time.perf_counter() - started,
        peak_memory=peak_memory(),
    )


def _compare(before: Checkpoint, after: Checkpoint, what: str) -> tuple[list[LayerReport], list[HeadReport]]:
    """Return the errors of the operators of all heads, and the numbers of every layer."""
    layers, heads = [], []
    for k in range(before.n_layers):
        original, narrow = before.attention(k), after.attention(k)
        reports, qk, ov = compare_layer(k, original, _rescaled(_without_norm(narrow), original.scale))
        worst = max(max(head.qk_error, head.ov_error) for head in reports)
        layers.append(LayerReport(k, qk, ov, worst, _numbers(before, k, what), _numbers(after, k, what)))
        heads += reports
    return layers, heads


def _without_norm(layer: Attention) -> Attention:
    """Return a layer whose latent vectors are far below the eps of their norm: that divides by the root of eps."""
    norm = layer.latent_norm
    if norm is None:
        return layer
    root = np.sqrt(norm.eps)
    divisors = np.where(np.arange(layer.W_K.shape[-1]) < norm.n_rotated, 1.0, root)
    return replace(layer, W_K=layer.W_K / divisors, W_V=layer.W_V / root, latent_norm=None)


def _rescaled(layer: Attention, scale: float) -> Attention:
    """Return a layer with the same scores by another scale: reports compare QK operators without it."""
    factor = layer.scale / scale
    b_q = None if layer.b_Q is None else factor * layer.b_Q
    return replace(layer, W_Q=factor * layer.W_Q, b_Q=b_q, scale=scale)


def _numbers(checkpoint: Checkpoint, k: int, what: str) -> int:
    """Return the numbers of the part of a layer that becomes smaller."""
    layer = checkpoint.wiring.layers[k]
    tensors = checkpoint.folder.tensors
    names = [name for matrix in layer.feed_forward_matrices for name in (matrix.weight, matrix.bias) if name in tensors]
    attention = sum(info.size for info in attention_tensors(checkpoint, k)) if what != "mlp" else 0
    return attention + (sum(tensors[name].size for name in names if name) if what != "attention" else 0)


def _bytes(checkpoint: Checkpoint, numbers: int) -> dict[str, int]:
    """Return the bytes of the part that becomes smaller, as "matrices", and of the rest."""
    total = sum(info.end - info.begin for info in checkpoint.folder.tensors.values())
    dtype = widest_float(attention_tensors(checkpoint, 0))
    own = numbers * STORED_AS[dtype].itemsize
    return {"attention": 0, "matrices": own, "other": total - own}
