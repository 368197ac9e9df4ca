r"""The linear parts of norms and the value biases, folded into the weights beside them; the model computes the same.

With n(x) the norm without its weights, n(x) = (x - mean) / rms or x / rms, a norm and what reads from it are

    (n diag(w) + b) W + c  =  n (diag(w) W) + (c + b W)

so w and b vanish into W and c. As the entries of LayerNorm's n sum to zero, a constant added to a column of W changes
nothing, and what is written into a stream that only LayerNorms read may have its mean taken off. Rows of
patterns sum to one, so a value bias arrives as it is: b_O + sum_h b_V^h W_O^h.

N. Elhage et al., "A Mathematical Framework for Transformer Circuits" (2021), section "Handling layer normalization".
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from tnlib import ArgumentError
from tnlib._typing import Array
from tnlib_adapters.checkpoints.arguments import as_checkpoint
from tnlib_adapters.checkpoints.checkpoint import Checkpoint
from tnlib_adapters.checkpoints.modified import wide, with_tensors
from tnlib_adapters.checkpoints.residual_stream import Leg, read_stream, unembedding
from tnlib_adapters.factors.projections import Projections, module_names, put_together, take_apart
from tnlib_adapters.transforms.norm_folding import Changes, fold_norms, untied


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
    if as_checkpoint("fold", checkpoint).pieces is not None:
        raise ArgumentError(
            "fold: checkpoint must hold its weights as they came, got one that is stored as factors; "
            "fold first, then compress."
        )
    done: list[str] = []
    left: list[str] = []
    folded = fold_norms(untied(checkpoint, left), done, left)
    folded = _fold_value_biases(folded, done, left)
    folded = _centre_writers(folded, done)
    if checkpoint.architecture.qk_norm:
        left.append("the norms of queries and keys: they act inside the heads, where rotary embeddings come next")
    return Folded(folded, tuple(done), tuple(left))


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
