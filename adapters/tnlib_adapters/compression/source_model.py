"""The checkpoint that is compressed: checked for a request, within limits of memory, and as a running model."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from tnlib import ArgumentError
from tnlib_adapters.checkpoints.checkpoint import Checkpoint, open_checkpoint
from tnlib_adapters.compression.calibration.resumed_run import check_run_folder
from tnlib_adapters.compression.compressed_part import compressed_weights
from tnlib_adapters.compression.methods.out_of_core import CACHE_BYTES
from tnlib_adapters.compression.options import Run
from tnlib_adapters.compression.progress import Progress, quiet
from tnlib_adapters.compression.request import Request
from tnlib_adapters.compression.text import hold_out, read_documents, sample_batches
from tnlib_adapters.files.atomic_folder import check_target, check_text_path
from tnlib_adapters.files.process_memory import BATCH_TOKENS, WEIGHTS, resident_memory
from tnlib_adapters.files.safetensors_file import TensorInfo
from tnlib_adapters.files.tokenizer import MAX_TOKENS

if TYPE_CHECKING:
    from tnlib_adapters.instrument.running_model import Document, RunningModel


_FEWEST_TOKENS = 32  # of a batch
_FLOAT, _DOUBLE = 4, 8
# bytes of libraries that are imported later, to draw the report, and of their buffers, and of torch's after a pass
_LIBRARIES, _OF_PASSES = 150 * 10**6, 150 * 10**6
_COPIES_OF_LOGITS, _COPIES_OF_ACTIVATIONS = 12, 4  # softmaxes of two models; forward pass, kept for backward, gradients


@dataclass(frozen=True)
class Limits:
    """Limits of the memory of a compression."""

    tokens: int = BATCH_TOKENS  # tokens of a batch of a text; one text is never split
    cache: int = CACHE_BYTES  # bytes of factors and streams that are not in use; those beyond are in temporary files
    # bytes of weights of a running model, in float32; those of a larger model are read again in every pass
    weights: int = WEIGHTS


class SourceModel:
    """A checkpoint as a running model, made at its first use and only once.

    Every step that changes weights works on a copy and drops it. The window of the text, the device and the dtype are
    those of a request; the defaults without one.
    """

    def __init__(self, checkpoint: Checkpoint, request: Request | None = None, limits: Limits = Limits()) -> None:
        self.checkpoint, self._limits = checkpoint, limits
        self._window = MAX_TOKENS if request is None else request.window
        self._run = Run() if request is None else request.run

    @cached_property
    def original(self) -> RunningModel:
        """The model with its original weights, which must not be changed; `FileFormatError` if it is damaged."""
        return self.open(self.checkpoint)

    def open(self, checkpoint: Checkpoint | Path) -> RunningModel:
        """Return a checkpoint as a running model that reads texts within the same limits."""
        from tnlib_adapters.instrument.running_model import open_running
        from tnlib_adapters.instrument.stored_weights import placement_of

        return open_running(
            checkpoint,
            "compress",
            self._window,
            batch_tokens=self._limits.tokens,
            max_weights=self._limits.weights,
            placement=placement_of("compress", self._run.device, self._run.dtype),
        )


@dataclass(frozen=True)
class CalibrationText:
    """Sequences of token ids for calibration and evaluation."""

    sequences: Sequence[Sequence[int]]  # token ids
    held_out: Sequence[Sequence[int]]  # of other sequences, for evaluation
    window: int  # tokens of the longest sequence that the model reads
    truncated: int | None  # number of lines that are longer; None for windows

    def summary(self, model: RunningModel, n_tokens: int) -> dict[str, int]:
        """Return how the model reads the text, up to `n_tokens` tokens: see `Report.calibration`."""
        batches = model.batches(self.sequences)
        counts = {
            "window": self.window,
            "sequences": len(self.sequences),
            "read": sum(len(batch.ids) for batch in sample_batches(batches, n_tokens)),
            "held_out": len(self.held_out),
            "batches": len(batches),
        }
        return counts if self.truncated is None else counts | {"truncated": self.truncated}


def read_calibration(
    source: SourceModel, documents: Sequence[Document], progress: Progress = quiet
) -> CalibrationText | None:
    """Return the calibration data as the model reads them; None without any."""
    if not documents:
        return None
    progress("loading the model", 0, 1)  # and torch: ten seconds
    model = source.original
    sequences, held_out = hold_out(model.sequences(documents))
    truncated = None if model.predicts else model.count_truncated(documents)
    progress("loading the model", 1, 1)
    return CalibrationText(sequences, held_out, model.longest, truncated)


def open_source(
    request: Request, source: str | os.PathLike[str], target: Path | None = None
) -> tuple[Checkpoint, list[Document]]:
    """Open a checkpoint and read the documents of a request; raise if `compress` cannot write `target` by it.

    `target` is None if nothing is written.
    """
    if request.folder is not None:
        check_run_folder(request.folder, target)
    documents: list[Document] = []
    if request.calibration is not None:
        documents = read_documents("compress", "calibration", request.calibration.text)
    checkpoint = open_checkpoint(source)
    if target is not None:
        check_target("compress", target, checkpoint.folder.path, force=request.run.force)
        if documents:  # loaded from there at the end
            check_text_path("compress", "OUT", target)
    request.check(checkpoint)
    if documents:
        import tnlib_adapters.instrument  # noqa: F401  raises without torch or transformers, before any work
    return checkpoint, documents


def check_finite(tensors: Sequence[TensorInfo], progress: Progress) -> None:
    """Raise `FileFormatError` if a tensor holds NaN or inf."""
    for done, info in enumerate(tensors):
        progress("checking weights", done, len(tensors))
        info.read_finite()
    progress("checking weights", len(tensors), len(tensors))


def limits_of(checkpoint: Checkpoint, request: Request) -> Limits:
    """Return the limits for `memory` of the run; the defaults if it is None.

    The libraries and the work on the largest weight come first. Of the rest, a batch gets at most half; the smaller
    batches need less. What is left is shared by the factors and the weights of the two running models. `ArgumentError`
    if less than a batch of a few tokens is left.
    """
    if request.run.memory is None:
        return Limits()
    least = least_memory(checkpoint, request)
    if request.run.memory < least:
        megabytes = math.ceil(least / 1e6)
        raise ArgumentError(
            f"compress: memory (--max-memory) must be at least {megabytes}M, that is {megabytes * 10**6:,} bytes, for "
            f"this model and these options, got {request.run.memory:,} bytes; allow more, or choose a "
            "smaller part by what."
        )
    left = request.run.memory - least
    if not request.with_text:
        return Limits(cache=left)
    tokens, per_token = BATCH_TOKENS, _bytes_per_token(checkpoint)
    left += _FEWEST_TOKENS * per_token
    while tokens > _FEWEST_TOKENS and 2 * tokens * per_token > left:
        tokens //= 2
    left -= tokens * per_token
    return Limits(tokens, left // 2, min(left // 4, WEIGHTS))


def least_memory(checkpoint: Checkpoint, request: Request) -> int:
    """Return the bytes of the libraries, of the work on the largest weight, and of a batch of a few tokens."""
    of_batch = 0
    if request.with_text:
        import tnlib_adapters.instrument.running_model  # noqa: F401  resident before any array is made

        of_batch = _OF_PASSES + _FEWEST_TOKENS * _bytes_per_token(checkpoint)
    return resident_memory() + _LIBRARIES + _bytes_in_use(checkpoint, request) + of_batch


def block_parameters(checkpoint: Checkpoint) -> list[int]:
    """Return the parameters of every block.

    >>> from tnlib_adapters import builtin_path, open_checkpoint
    >>> block_parameters(open_checkpoint(builtin_path()))
    [16640, 16640]
    """
    tensors = checkpoint.folder.tensors
    modules = [f"{layer.module}." for layer in checkpoint.wiring.layers]
    return [sum(info.size for name, info in tensors.items() if name.startswith(module)) for module in modules]


def _bytes_in_use(checkpoint: Checkpoint, request: Request) -> int:
    """Return the bytes while the largest weight is decomposed, and of the weights that a running model always holds."""
    tensors, with_text = checkpoint.folder.tensors, request.with_text
    weights = compressed_weights(checkpoint, request.what, with_text=with_text)
    # a copy, two factors and a workspace of the weight, and Gram matrices and their roots at its smaller side
    decomposed = max(4 * _FLOAT * own.weight.size + 5 * _DOUBLE * min(own.weight.shape) ** 2 for own in weights)
    if not with_text:
        return decomposed
    of_blocks = block_parameters(checkpoint)
    outside = sum(info.size for info in tensors.values()) - sum(of_blocks)
    return decomposed + _FLOAT * (outside + 2 * max(of_blocks))


def _bytes_per_token(checkpoint: Checkpoint) -> int:
    """Return the bytes of a token in a batch: its logits, or what a block computes for it."""
    head = checkpoint.wiring.unembedding
    vocabulary = 0 if head is None else max(checkpoint.folder.tensors[head.linear.weight].shape)
    widths = max(block_parameters(checkpoint)) // checkpoint.sizes.d_model  # of all inputs and outputs, about
    return _FLOAT * max(_COPIES_OF_LOGITS * vocabulary, _COPIES_OF_ACTIVATIONS * widths)
