"""Bytes of the attention and loss of the built-in model, compressed and rounded, on held-out sequences."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tnlib._typing import Array
from tnlib_adapters.checkpoints.checkpoint import Checkpoint, open_checkpoint
from tnlib_adapters.checkpoints.modified import wide, with_tensors
from tnlib_adapters.compression.compress import compress
from tnlib_adapters.compression.evaluation.evaluate import loss_on_repeats
from tnlib_adapters.compression.sizes import attention_tensors
from tnlib_adapters.factors.integers import GROUP, IntegerFormat, round_to_nearest
from tnlib_adapters.files.tensor_file import TensorInfo

STORE = "int4"


@dataclass(frozen=True)
class SizeAndLoss:
    """Bytes, bits per original number and multiplications per token of the attention; loss in nats per token."""

    label: str
    n_bytes: int
    bits: float
    multiplications: int
    loss: float


def original(checkpoint: Checkpoint) -> SizeAndLoss:
    """Return the size and loss of the model itself."""
    tensors = _attention(checkpoint)
    n_bytes = sum(info.end - info.begin for info in tensors)
    return _measured("original, float32", n_bytes, checkpoint, checkpoint, loss_on_repeats(checkpoint))


def rounded(checkpoint: Checkpoint, n_bits: int) -> SizeAndLoss:
    """Round the attention weights to nearest, in groups of 64 that share a scale; biases stay as they are."""
    changes, n_bytes = {}, 0
    for info in _attention(checkpoint):
        if len(info.shape) == 1:
            n_bytes += info.end - info.begin
            continue
        form = IntegerFormat(n_bits, 1, 0 if n_bits == 8 else GROUP)
        changes[info.name] = partial(_values, checkpoint, info.name, form)
        n_bytes += form.n_bits(info.shape) // 8
    after = with_tensors(checkpoint, changes)
    return _measured(f"rounded to {n_bits} bits", n_bytes, checkpoint, after, loss_on_repeats(after))


def low_rank(checkpoint: Checkpoint, keep: float, out: Path) -> SizeAndLoss:
    """Compress the model to a folder: the QK and OV operator of every head as factors in 4 bits."""
    report = compress(checkpoint.folder.path, out, keep=keep, store=STORE)
    label = f"low rank, {100 * keep:.0f} % of the numbers, in 4 bits"
    (loss,) = (value for name, value in report.quality.items() if name.endswith("after"))
    return _measured(label, report.compressed(report.bytes_after), checkpoint, open_checkpoint(out), loss)


def _values(checkpoint: Checkpoint, name: str, form: IntegerFormat) -> Array:
    return round_to_nearest(wide(checkpoint, name), form, search=False).values()


def _attention(checkpoint: Checkpoint) -> list[TensorInfo]:
    return [info for layer in range(checkpoint.n_layers) for info in attention_tensors(checkpoint, layer)]


def _measured(label: str, n_bytes: int, before: Checkpoint, after: Checkpoint, loss: float) -> SizeAndLoss:
    bits = 8 * n_bytes / sum(info.size for info in _attention(before))
    return SizeAndLoss(label, n_bytes, bits, _multiplications(after), loss)


def _multiplications(checkpoint: Checkpoint) -> int:
    """Return the multiplications per token: one for every number of a weight or factor, none for biases."""
    if checkpoint.factored is None:
        return sum(info.size for info in _attention(checkpoint) if len(info.shape) == 2)
    return 2 * checkpoint.sizes.d_model * sum(sum(own.ranks) for own in checkpoint.factored)
