r"""Effective weights of one head with respect to the residual stream: the adjacent norms folded in.

A norm is n(x) diag(w) + b with n(x) = (x - mean) / rms, or x / rms. The input of the head is

    (n(x) diag(w) + b) W + c  =  n(x) (diag(w) W) + (b W + c)

and as the entries of LayerNorm's n sum to zero, the mean of diag(w) W over features has no effect. The directions that
a head reads are therefore directions of the stream, up to division by one number per position.
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
    """A head that reads n(x) and writes into the residual stream.

    Parameters
    ----------
    attention
        Layer with this one head, in float64.
    norm
        Norm before the head, without its weights and biases, which are in `attention`. None if there is none.
    notes
        Sentences on the parts of the model that `attention` omits.
    """

    attention: Attention
    norm: Norm | None
    notes: tuple[str, ...]


def stream_head(function: str, checkpoint: Checkpoint, layer: int, head: int) -> StreamHead:
    """Return one head of a checkpoint, in float64, with the linear part of the adjacent norms folded in."""
    layer = as_index(function, "layer", layer, as_checkpoint(function, checkpoint, "model").n_layers)
    head = as_index(function, "head", head, checkpoint.sizes.n_heads)
    notes: list[str] = []
    attention = _wide(checkpoint.head(layer, head))
    if attention.head_norm is not None:
        attention = attention.numerator()
        notes.append("queries and keys are normalised; the two divisions are left out")
    before, after = read_attention_norms(checkpoint, layer)
    if before is not None:
        attention = _read_through(attention, before)
        notes.append("weights of the norm in front are folded in, its division is left out")
    if after is not None:
        attention = replace(attention, W_O=attention.W_O * after.weight)
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
