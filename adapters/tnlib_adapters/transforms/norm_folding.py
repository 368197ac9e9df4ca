"""The weights and biases of norms folded into the maps that read from them, and what is left of a norm."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

from tnlib import ArgumentError
from tnlib._typing import Array
from tnlib._validate import as_array
from tnlib_adapters.checkpoints.arguments import as_checkpoint
from tnlib_adapters.checkpoints.checkpoint import Checkpoint
from tnlib_adapters.checkpoints.modified import wide, with_tensors
from tnlib_adapters.checkpoints.residual_stream import Leg, Reader, StreamNorm, full_name, read_stream, unembedding

Changes = dict[str, Callable[[], Array]]


def norm_divisors(checkpoint: Checkpoint, x: Array) -> Array:
    """Return what the norms of a model divide each position of the stream x (n, d_model) by, (n,) in float64.

    LayerNorm divides by sqrt(variance + eps), RMSNorm by sqrt(mean square + eps).

    Raises
    ------
    ArgumentError
        If the model has no norms, or x has another width.

    Examples
    --------
    An attention layer behind its norm is linear in the stream once patterns and divisors are fixed:
    `checkpoint.attention(layer).frozen(patterns, divisors=norm_divisors(checkpoint, x))`, of a folded checkpoint.
    """
    row, d = as_checkpoint("norm_divisors", checkpoint).architecture, checkpoint.sizes.d_model
    if row.norm_eps is None:
        raise ArgumentError(
            f"norm_divisors: checkpoint must have norms, got a {row.model_type}, which has none; leave divisors out."
        )
    x = as_array("norm_divisors", "x", x, ndim=2).astype(np.float64)
    if x.shape[1] != d:
        raise ArgumentError(
            f"norm_divisors: x must have shape (positions, {d}), got {x.shape}; pass the stream of one sequence."
        )
    centred = x - x.mean(axis=1, keepdims=True) if row.norm == "layer" else x
    divisors: Array = np.sqrt(np.square(centred).mean(axis=1) + float(row.get(checkpoint.config, row.norm_eps)))
    return divisors


def untied(checkpoint: Checkpoint, left: list[str]) -> Checkpoint:
    """Give the logits weights of their own where they share those of the embeddings."""
    name, row = unembedding(checkpoint), checkpoint.architecture
    stream = read_stream(checkpoint)
    if name is None or not any(r.weight.tensor in _tables(checkpoint) for n in stream.norms for r in n.readers):
        return checkpoint
    # a model without a head is saved without a prefix
    if checkpoint.prefix == "" or row.unembed[0] in row.embeddings or stream.unknown:
        left.append("the final norm: what reads from it is not known, or it is the embeddings")
        return checkpoint
    table = str(full_name(checkpoint, f"{name}.weight"))
    changes = {f"{row.unembed[0]}.weight": functools.partial(wide, checkpoint, table)}
    return with_tensors(checkpoint, changes, {"tie_word_embeddings": False})


def _tables(checkpoint: Checkpoint) -> set[str]:
    return {str(full_name(checkpoint, f"{name}.weight")) for name in checkpoint.architecture.embeddings}


def fold_norms(checkpoint: Checkpoint, done: list[str], left: list[str]) -> Checkpoint:
    """Fold every norm that stands in front of what reads from it; `done` and `left` take down what was folded."""
    changes: Changes = {}
    stream, shared, count = read_stream(checkpoint), _tables(checkpoint), 0
    config = {}
    for norm in stream.norms:
        final = any(reader == stream.head for reader in norm.readers)
        if norm.place != "before":
            left.append(f"{norm.weight}: {_WHY[norm.place]}")
        elif final and stream.unknown:
            left.append(f"{norm.weight}: {stream.unknown[0]} may read from it, too")
        elif not any(reader.weight.tensor in shared for reader in norm.readers):
            found = _fold_norm(checkpoint, norm, left)
            changes |= found
            count += bool(found)
            if final and found and unembedding(checkpoint) not in checkpoint.architecture.embeddings:
                # a checkpoint may hold a copy of tied weights, which are tied no more
                config["tie_word_embeddings"] = False
    if count:
        done.append(f"{count} norms, into the weights that read from them")
    return with_tensors(checkpoint, changes, config)


_WHY = {
    "after": "its output is the stream itself, which other parts read as well",
    "behind": "it stands behind a map that writes, and divides by what was written",
    "output": "the model ends in it",
}


def _fold_norm(checkpoint: Checkpoint, norm: StreamNorm, left: list[str]) -> Changes:
    """Return the changed tensors of a norm and of all that reads from it."""
    plus_one = checkpoint.architecture.norm == "rms + 1"
    taken_up = norm.bias is None or all(reader.bias for reader in norm.readers)
    centre = checkpoint.architecture.norm == "layer" and taken_up
    weight = functools.partial(_weight, checkpoint, norm, plus_one=plus_one)
    changes: Changes = {norm.weight: lambda: np.full_like(weight(), 0.0 if plus_one else 1.0)}
    if norm.bias and taken_up:
        changes[norm.bias] = lambda: np.zeros_like(weight())
    elif norm.bias:
        bare = next(reader.weight.tensor for reader in norm.readers if not reader.bias)
        if np.any((weight() == 0) & (wide(checkpoint, norm.bias) != 0)):
            left.append(f"{norm.weight}: it has zeros where its bias has none, and {bare} has no bias to take that up")
            return {}
        left.append(f"{norm.bias}: {bare} has no bias to take it up; it stays, divided by the weights")
        changes[norm.bias] = functools.partial(_divided, checkpoint, norm.bias, weight)
    for reader in norm.readers:
        changes[reader.weight.tensor] = functools.partial(_scaled, checkpoint, reader.weight, weight, centre)
        if norm.bias and taken_up:
            changes[str(reader.bias)] = functools.partial(_with_bias, checkpoint, reader, norm.bias)
    return changes


def _weight(checkpoint: Checkpoint, norm: StreamNorm, *, plus_one: bool) -> Array:
    return wide(checkpoint, norm.weight) + (1.0 if plus_one else 0.0)


def _divided(checkpoint: Checkpoint, bias: str, weight: Callable[[], Array]) -> Array:
    b, w = wide(checkpoint, bias), weight()
    return np.divide(b, w, out=np.zeros_like(b), where=w != 0)


def _scaled(checkpoint: Checkpoint, of: Leg, weight: Callable[[], Array], centre: bool) -> Array:
    x = np.moveaxis(wide(checkpoint, of.tensor), of.leg, 0)  # d ...
    x = (x.T * weight()).T
    if centre:
        x = x - x.mean(axis=0)
    out: Array = np.moveaxis(x, 0, of.leg)
    return out


def _with_bias(checkpoint: Checkpoint, reader: Reader, bias: str) -> Array:
    w = np.moveaxis(wide(checkpoint, reader.weight.tensor), reader.weight.leg, 0)  # d out
    out: Array = wide(checkpoint, str(reader.bias)) + wide(checkpoint, bias) @ w  # [d] out
    return out
