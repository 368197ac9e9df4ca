"""Plain int8, the rival of every method: the attention's weights rounded as they are, a scale for every output."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tnlib_adapters.attention.checkpoint import Checkpoint
from tnlib_adapters.checkpoints.int8 import round_slices
from tnlib_adapters.checkpoints.projections import module_names
from tnlib_adapters.compression.report import Report

if TYPE_CHECKING:
    from tnlib_adapters.torch.hooks.running import RunningModel

_SCALE = 4  # bytes


def plain_bytes(checkpoint: Checkpoint) -> int:
    """Return the bytes of the attention in plain int8: a byte a weight, a scale an output, biases as they are."""
    count, tensors = 0, checkpoint.folder.tensors
    outputs = 0 if checkpoint.architecture.stored == "out_in" else 1
    for layer in range(checkpoint.n_layers):
        for module in module_names(checkpoint.architecture, checkpoint.prefix, layer):
            weight, bias = tensors[f"{module}.weight"], tensors.get(f"{module}.bias")
            count += weight.size + _SCALE * weight.shape[outputs]
            count += 0 if bias is None else bias.end - bias.begin
    return count


def round_attention(model: RunningModel) -> RunningModel:
    """Round the attention's weights of a model in memory, and return it."""
    import torch

    outputs = 0 if model.row.stored == "out_in" else 1
    for layer in model.layers:
        modules: dict[int, Any] = {id(p.module): p.module for p in layer.projections.values()}
        for module in modules.values():
            q, scale = round_slices(module.weight.detach().numpy(), outputs)
            with torch.no_grad():
                module.weight.copy_(torch.from_numpy(q * scale))
    return model


def verdict(report: Report) -> str | None:
    """Say how a compression stands beside plain int8 of the same weights, None where nothing was measured on text."""
    if report.plain_measured is None or report.measured is None:
        return None
    ours, theirs = report.bytes_after["attention"], report.plain_bytes
    smaller, nearer = ours < theirs, report.measured <= report.plain_measured
    said = {
        (True, True): "this is smaller and nearer to the original",
        (True, False): "this is smaller, plain int8 nearer to the original",
        (False, True): "this is nearer to the original, plain int8 smaller",
        (
            False,
            False,
        ): "plain int8 is both smaller and nearer to the original: prefer it, or store these factors in it",
    }[smaller, nearer]
    if (smaller, nearer) == (False, False) and report.store == "int8":
        said = "plain int8 is both smaller and nearer to the original: prefer it"
    rounded = f"{theirs / 1e6:.2f} MB with {report.measure} {report.plain_measured:.2g}"
    return (
        f"plain int8 of the same weights takes {rounded}, this {ours / 1e6:.2f} MB with {report.measured:.2g}: {said}"
    )
