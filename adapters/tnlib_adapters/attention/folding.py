r"""The linear parts of norms and the value biases, folded into the weights beside them; the model computes the same.

With n(x) the norm without its weights, n(x) = (x - mean) / rms or x / rms, a norm and what reads from it are

    (n diag(w) + b) W + c  =  n (diag(w) W) + (c + b W)

so w and b vanish into W and c. As the entries of LayerNorm's n sum to zero, a constant added to every column of W
changes nothing, and what is written into a stream that only LayerNorms read may have its mean taken off. Rows of
patterns sum to one, so a value bias arrives as it is: b_O + sum_h b_V^h W_O^h.

N. Elhage et al., "A Mathematical Framework for Transformer Circuits" (2021), section "Handling layer normalization".
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tnlib import ArgumentError
from tnlib._typing import Array
from tnlib_adapters.attention.changed import wide, with_tensors
from tnlib_adapters.attention.checkpoint import Checkpoint
from tnlib_adapters.attention.stream import Leg, Reader, StreamNorm, full_name, read_stream, unembedding
from tnlib_adapters.checkpoints.projections import Projections, module_names, put_together, take_apart

Changes = dict[str, Callable[[], Array]]


@dataclass(frozen=True, repr=False)
class Folded:
    """A model whose norms and value biases are folded, and what could not be.

    Parameters
    ----------
    checkpoint
        Computes the same; tensors are folded when they are read, and `save_checkpoint` writes them.
    done
        Sentences on what was folded.
    left
        Sentences on what was not, and why.
    """

    checkpoint: Checkpoint
    done: tuple[str, ...]
    left: tuple[str, ...]

    def __repr__(self) -> str:
        lines = [f"Folded {self.checkpoint!r}"]
        lines += [f"  folded   {what}" for what in self.done]
        return "\n".join(lines + [f"  left     {what}" for what in self.left])


def fold(checkpoint: Checkpoint) -> Folded:
    """Fold norms into what reads from them, value biases into output biases, and centre weights where that is exact.

    Parameters
    ----------
    checkpoint
        Any whose attention is not stored as factors.

    Returns
    -------
    Folded
        `.checkpoint`, `.done` and `.left`. The division of a norm is not linear and stays; so do the norms of models
        that normalise the stream itself, norms of queries and keys, and biases that nothing can take up.

    Raises
    ------
    ArgumentError
        If the attention is stored as factors.

    Examples
    --------
    >>> import tnlib_adapters
    >>> fold(tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path())).done
    ('value biases of 2 layers, into the output biases',)
    """
    if checkpoint.pieces is not None:
        raise ArgumentError(
            "fold: checkpoint must hold its weights as they came, got one that is stored as factors; "
            "fold first, then compress."
        )
    done: list[str] = []
    left: list[str] = []
    folded = _fold_norms(_untied(checkpoint, left), done, left)
    folded = _fold_value_biases(folded, done, left)
    folded = _centre_writers(folded, done)
    if checkpoint.architecture.qk_norm:
        left.append("the norms of queries and keys: they act inside the heads, where rotary embeddings come next")
    return Folded(folded, tuple(done), tuple(left))


# ------------------------------------------------------------------------------------------------------------- norms


def _untied(checkpoint: Checkpoint, left: list[str]) -> Checkpoint:
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


def _fold_norms(checkpoint: Checkpoint, done: list[str], left: list[str]) -> Checkpoint:
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


# ------------------------------------------------------------------------------------------------------- value biases


def _fold_value_biases(checkpoint: Checkpoint, done: list[str], left: list[str]) -> Checkpoint:
    changes: Changes = {}
    layers, row, tensors = 0, checkpoint.architecture, checkpoint.folder.tensors
    for layer in range(checkpoint.n_layers):
        held = {
            name: f"{module}.bias" for module, h in module_names(row, checkpoint.prefix, layer).items() for name in h
        }
        if held["v"] not in tensors:
            continue
        if held["o"] not in tensors:
            left.append(f"the value biases {held['v']}: the output of attention has no bias to take them up")
            continue
        layers += 1
        for name in (held["v"], held["o"]):
            changes[name] = functools.partial(_value_bias, checkpoint, layer, name)
    if layers:
        done.append(f"value biases of {layers} layers, into the output biases")
    return with_tensors(checkpoint, changes)


def _value_bias(checkpoint: Checkpoint, layer: int, name: str) -> Array:
    """Return one of the two biases that change."""
    row, sizes = checkpoint.architecture, checkpoint.sizes
    tensors = checkpoint.folder.tensors
    was = take_apart(row, sizes, checkpoint.prefix, layer, lambda n: wide(checkpoint, n) if n in tensors else None)
    per_head = was.biases["v"].reshape(sizes.kv_heads, -1).repeat(sizes.n_heads // sizes.kv_heads, axis=0)
    biases = {
        "v": np.zeros_like(was.biases["v"]),
        "o": was.biases["o"] + per_head.reshape(-1) @ was.weights["o"],  # [h dh] d
    }
    after = was.updated(Projections({}, biases))
    return put_together(row, sizes, checkpoint.prefix, layer, after)[name]


# ------------------------------------------------------------------------------------------------------------ centring


def _centre_writers(checkpoint: Checkpoint, done: list[str]) -> Checkpoint:
    """Take the mean off what is written, where nothing but LayerNorms reads the stream."""
    stream, row = read_stream(checkpoint), checkpoint.architecture
    normed = {reader.weight.tensor for norm in stream.norms for reader in norm.readers}
    raw = [reader for reader in stream.readers if reader.weight.tensor not in normed]
    ends_in_norm = any(norm.place == "output" for norm in stream.norms) or unembedding(checkpoint) is not None
    if row.norm != "layer" or not stream.norms or raw or not ends_in_norm or stream.unknown:
        return checkpoint
    changes: Changes = {
        leg.tensor: functools.partial(_centred, checkpoint, leg)
        for leg in stream.writers
        if leg.tensor not in normed  # tied embeddings are read as well
    }
    done.append("the mean of what is written into the stream, which LayerNorm takes off")
    return with_tensors(checkpoint, changes)


def _centred(checkpoint: Checkpoint, leg: Leg) -> Array:
    x = wide(checkpoint, leg.tensor)
    centred: Array = x - x.mean(axis=leg.leg, keepdims=True)
    return centred
