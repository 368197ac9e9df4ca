"""Plain int8, the rival of every method: the attention's weights rounded as they are, a scale for every output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tnlib_adapters.checkpoints.checkpoint import Checkpoint
from tnlib_adapters.compression.report.report import Report
from tnlib_adapters.factors.int8 import round_slices
from tnlib_adapters.factors.module_factors import is_embedding
from tnlib_adapters.factors.projections import module_names

if TYPE_CHECKING:
    from tnlib_adapters.instrument.running_model import RunningModel

_SCALE = 4  # bytes


def plain_bytes(checkpoint: Checkpoint, what: str = "attention", modules: Sequence[str] = (), bits: int = 8) -> int:
    """Return the bytes of what is compressed, rounded: so many bits a weight, a scale an output, biases as they are."""
    row, tensors = checkpoint.architecture, checkpoint.folder.tensors
    layers = range(0 if what == "mlp" else checkpoint.n_layers)
    names = [name for layer in layers for name in module_names(row, checkpoint.prefix, layer)]
    tables = [f"{checkpoint.prefix}{name}" for name in modules if is_embedding(row, name)]
    count = 0
    for name in (*names, *(f"{checkpoint.prefix}{name}" for name in modules)):
        weight, bias = tensors[f"{name}.weight"], tensors.get(f"{name}.bias")
        count += weight.size * bits // 8 + _SCALE * weight.shape[1 if name in tables or row.stored == "in_out" else 0]
        count += 0 if bias is None else bias.end - bias.begin
    return count


def round_weights(
    model: RunningModel, what: str = "attention", modules: Sequence[str] = (), bits: int = 8
) -> RunningModel:
    """Round the weights of a model in memory that are compressed, and return it."""
    import torch

    from tnlib_adapters.instrument.running_model import find_module

    rows = 0 if model.row.stored == "out_in" else 1
    found: list[tuple[Any, int]] = [
        (module, rows)
        for layer in (() if what == "mlp" else model.layers)
        for module in {id(p.module): p.module for p in layer.projections.values()}.values()
    ]
    found += [(find_module(model.model, name), 1 if is_embedding(model.row, name) else rows) for name in modules]
    for module, outputs in found:
        q, scale = round_slices(module.weight.detach().numpy(), outputs, bits)
        with torch.no_grad():
            module.weight.copy_(torch.from_numpy(q * scale))
    return model


def verdict(report: Report) -> str | None:
    """Say how a compression stands beside plain int8 of the same weights, None where nothing was measured on text."""
    if report.plain_measured is None or report.measured is None:
        return None
    ours, theirs = report.compressed(report.bytes_after), report.plain_bytes
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
