r"""One head as it meets the residual stream: the weights of the norms beside it are part of what it reads and writes.

A norm is n(x) diag(w) + b with n(x) = (x - mean) / rms, or x / rms. What a head reads through it is

    (n(x) diag(w) + b) W + c  =  n(x) (diag(w) W) + (b W + c)

and as the entries of LayerNorm's n sum to zero, the mean of diag(w) W over features counts for nothing. So the
directions that a head reads are directions of the stream, up to a division by one number per position.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tnlib._typing import Array
from tnlib_adapters.attention.attention import Attention
from tnlib_adapters.attention.indices import as_index
from tnlib_adapters.checkpoints.arguments import as_checkpoint
from tnlib_adapters.checkpoints.checkpoint import Checkpoint
from tnlib_adapters.reference.layers import Norm
from tnlib_adapters.reference.weights import read_attention_norms


@dataclass(frozen=True, eq=False)
class StreamHead:
    """A head that reads n(x) and writes into the stream.

    Parameters
    ----------
    attention
        A layer of this one head, in float64.
    norm
        What divides the stream in front of it; its weights and biases are in `attention`. None where nothing does.
    notes
        Sentences on what is not in `attention`.
    """

    attention: Attention
    norm: Norm | None
    notes: tuple[str, ...]


def stream_head(function: str, checkpoint: Checkpoint, layer: int, head: int) -> StreamHead:
    """Read one head of a checkpoint, with the linear part of the norms beside it folded in."""
    layer = as_index(function, "layer", layer, as_checkpoint(function, checkpoint, "model").n_layers)
    head = as_index(function, "head", head, checkpoint.sizes.n_heads)
    notes: list[str] = []
    attention = _wide(checkpoint.head(layer, head))
    if attention.head_norm is not None:
        attention = attention.numerator()
        notes.append("queries and keys are normalised; the two divisions are left out")
    before, behind = read_attention_norms(checkpoint, layer)
    if before is not None:
        attention = _read_through(attention, before)
        notes.append("weights of the norm in front are folded in, its division is left out")
    if behind is not None:
        attention = replace(attention, W_O=attention.W_O * behind.weight)
        notes.append("weights of the norm behind are folded in, its division is left out")
    return StreamHead(attention, before, tuple(notes))


def _read_through(attention: Attention, norm: Norm) -> Attention:
    changed: dict[str, Any] = {}
    for name in "QKV":
        w, b = getattr(attention, f"W_{name}"), getattr(attention, f"b_{name}")
        if norm.bias is not None:
            b = norm.bias @ w + (0 if b is None else b)  # h [d] dh
        w = norm.weight[:, None] * w
        changed |= {f"W_{name}": w - w.mean(axis=1, keepdims=True) if norm.centred else w, f"b_{name}": b}
    return replace(attention, **changed)


def _wide(attention: Attention) -> Attention:
    wide: dict[str, Array] = {n: a.astype(np.float64) for n, a in vars(attention).items() if isinstance(a, np.ndarray)}
    return replace(attention, **wide)  # type: ignore[arg-type]
