"""Limits of the memory of a compression, which trade it for time and disk."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tnlib import ArgumentError
from tnlib_adapters.checkpoints.checkpoint import Checkpoint
from tnlib_adapters.compression.methods.other_matrices import compressed_weights
from tnlib_adapters.compression.methods.out_of_core import CACHE_BYTES
from tnlib_adapters.compression.request import Request
from tnlib_adapters.files.process_memory import BATCH_TOKENS, WEIGHTS, resident_memory

_FEWEST_TOKENS = 32  # of a batch
_FLOAT, _DOUBLE = 4, 8
_LIBRARIES = 150 * 10**6  # bytes of libraries that are imported later, to draw the report, and of their buffers
_COPIES_OF_LOGITS, _COPIES_OF_ACTIVATIONS = 12, 4  # softmaxes of two models; forward pass, kept for backward, gradients


@dataclass(frozen=True)
class Limits:
    """Limits of the memory of a compression.

    Parameters
    ----------
    tokens
        Tokens of a batch of a text; one text is never split.
    cache
        Bytes of factors that are not in use; those beyond are in temporary files.
    weights
        Bytes of weights of a running model, in float32; those of a larger model are read again in every pass.
    """

    tokens: int = BATCH_TOKENS
    cache: int = CACHE_BYTES
    weights: int = WEIGHTS


def limits_of(checkpoint: Checkpoint, request: Request) -> Limits:
    """Return the limits for `memory` of the run; the defaults if it is None.

    The libraries and the work on the largest weight come first. Of the rest, a batch gets at most half; the smaller
    batches need less. What is left is shared by the factors and the weights of the two running models.

    Raises
    ------
    ArgumentError
        If less than a batch of a few tokens is left.
    """
    if request.run.memory is None:
        return Limits()
    with_text = request.with_text
    if with_text:
        import tnlib_adapters.instrument.running_model  # noqa: F401  resident before any array is made
    least = resident_memory() + _LIBRARIES + _bytes_in_use(checkpoint, request)
    per_token = _bytes_per_token(checkpoint) if with_text else 0
    left = request.run.memory - least
    if left < _FEWEST_TOKENS * per_token:
        megabytes = math.ceil((least + _FEWEST_TOKENS * per_token) / 1e6)
        raise ArgumentError(
            f"compress: memory (--max-memory) must be at least {megabytes}M, that is {megabytes * 10**6:,} bytes, for "
            f"this model and these options, got {request.run.memory:,} bytes; allow more, or choose a "
            "smaller part by what."
        )
    if not with_text:
        return Limits(cache=min(left, CACHE_BYTES))
    tokens = BATCH_TOKENS
    while tokens > _FEWEST_TOKENS and 2 * tokens * per_token > left:
        tokens //= 2
    left -= tokens * per_token
    return Limits(tokens, min(left // 2, CACHE_BYTES), min(left // 4, WEIGHTS))


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
    shapes = [tensors[name].shape for name in compressed_weights(checkpoint, request.what, with_text=with_text)]
    # a copy, two factors and a workspace of the weight, and Gram matrices and their roots at its smaller side
    decomposed = max(4 * _FLOAT * math.prod(shape) + 5 * _DOUBLE * min(shape) ** 2 for shape in shapes)
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
