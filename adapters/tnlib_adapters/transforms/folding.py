r"""Fold the linear parts of norms and the value biases into adjacent weights; the model computes the same function.

With n(x) the norm without its weights, n(x) = (x - mean) / rms or x / rms, a norm and the map that reads it are

    (n diag(w) + b) W + c  =  n (diag(w) W) + (c + b W)

so w and b are absorbed by W and c. As the entries of LayerNorm's n sum to zero, a constant added to a column of W has
no effect, and the mean over features may be subtracted from all outputs into a stream that only LayerNorms read. Rows
of patterns sum to one, so a value bias reaches the output unchanged: b_O + sum_h b_V^h W_O^h.

N. Elhage et al., "A Mathematical Framework for Transformer Circuits" (2021), section "Handling layer normalization".
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from tnlib import ArgumentError
from tnlib._typing import Array
from tnlib._validate import as_array
from tnlib_adapters.architectures.wiring import (
    AttentionWiring,
    Linear,
    NormWiring,
    Wiring,
)
from tnlib_adapters.checkpoints.checkpoint import Checkpoint, accepts_models, as_checkpoint, as_dense
from tnlib_adapters.checkpoints.modified import wide, with_tensors
from tnlib_adapters.checkpoints.residual_stream import StreamAxis, read_stream
from tnlib_adapters.factors.projections import Projections, put_together, take_apart

Changes = dict[str, Callable[[], Array]]
_WHY = {
    "post": "its output is the stream itself, which other layers read as well",
    "output": "it is applied to the output of a layer",
    "final": "the model ends in it",
}


@accepts_models
def norm_divisors(checkpoint: Checkpoint, x: Array) -> Array:
    r"""Return the divisors of the norms of a model at each position of the stream x (n, d_model), (n,) in float64.

    LayerNorm divides by :math:`\sqrt{v + \epsilon}`, v the variance over the features, RMSNorm by
    :math:`\sqrt{m + \epsilon}`, m their mean square.

    Raises
    ------
    ArgumentError
        If the model has no norms, or x has another width.

    References
    ----------
    J. L. Ba, J. R. Kiros, G. E. Hinton, "Layer Normalization" (2016); B. Zhang, R. Sennrich, "Root Mean Square Layer
    Normalization" (2019).

    Examples
    --------
    An attention layer after its norm is linear in the stream if patterns and divisors are frozen:
    `checkpoint.attention(layer).frozen(patterns, divisors=norm_divisors(checkpoint, x))`, of a folded checkpoint.

    >>> import numpy as np, tnlib_adapters
    >>> llama = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path("llama"))
    >>> norm_divisors(llama, np.full((2, 128), 3.0)).round(4)  # RMSNorm, eps 1e-6
    array([3., 3.])
    """
    wiring = as_checkpoint("norm_divisors", checkpoint).wiring
    norm, d = wiring.layers[0].attention.norm, wiring.sizes.d_model
    if norm is None:
        raise ArgumentError(
            f"norm_divisors: checkpoint must have norms, got a {wiring.model_type}, which has none; leave divisors out."
        )
    x = as_array("norm_divisors", "x", x, ndim=2).astype(np.float64)
    if x.shape[1] != d:
        raise ArgumentError(
            f"norm_divisors: x must have shape (positions, {d}), got {x.shape}; pass the stream of one sequence."
        )
    centred = x - x.mean(axis=1, keepdims=True) if norm.kind == "layer" else x
    divisors: Array = np.sqrt(np.square(centred).mean(axis=1) + norm.required_eps("norm_divisors"))
    return divisors


def untied(checkpoint: Checkpoint, left: list[str]) -> Checkpoint:
    """Return the checkpoint with an unembedding of its own if it shares the weights of the embeddings."""
    wiring, unembedding = checkpoint.wiring, checkpoint.wiring.unembedding
    if wiring.final_norm is None or unembedding is None or unembedding.reader.weight != wiring.embedding.table.weight:
        return checkpoint
    if checkpoint.prefix == "" or read_stream(checkpoint).unknown:  # a model without a head is saved without a prefix
        left.append("the final norm: the maps that read it are unknown, or are the embeddings")
        return checkpoint
    changes = {unembedding.own_weight: functools.partial(wide, checkpoint, unembedding.linear.weight)}
    return with_tensors(checkpoint, changes, wiring.untied_config)


def fold_norms(checkpoint: Checkpoint, done: list[str], left: list[str]) -> Checkpoint:
    """Fold every norm whose output only known maps read; append notes to `done` and `left`."""
    changes: Changes = {}
    wiring, stream, count = checkpoint.wiring, read_stream(checkpoint), 0
    config: dict[str, bool] = {}
    for norm, readers in [*stream.norms.items(), *_latent_norms(wiring)]:
        if norm.place not in ("pre", "latent"):
            left.append(f"{norm.weight}: {_WHY[norm.place]}")
        elif norm == wiring.final_norm and stream.unknown:
            left.append(f"{norm.weight}: {stream.unknown[0]} may read from it, too")
        elif not any(reader.weight == wiring.embedding.table.weight for reader in readers):
            changes_of_norm = _fold_norm(checkpoint, norm, readers, left)
            changes |= changes_of_norm
            count += bool(changes_of_norm)
            if norm == wiring.final_norm and changes_of_norm and wiring.unembedding and not wiring.unembedding.shared:
                # a checkpoint may hold a copy of tied weights, which must not be tied again
                config |= wiring.untied_config
    if count:
        done.append(f"{count} norms, into the weights that read from them")
    return with_tensors(checkpoint, changes, config)


def _latent_norms(wiring: Wiring) -> Iterator[tuple[NormWiring, tuple[Linear, ...]]]:
    """Yield the norms of latent vectors, each with the map to the heads that reads from it."""
    for latent in (layer.attention.latent for layer in wiring.layers):
        if latent is not None:
            yield latent.norm, (latent.up,)
            if latent.query_norm is not None:
                yield latent.query_norm, (latent.query_up,)


def _fold_norm(checkpoint: Checkpoint, norm: NormWiring, readers: Sequence[Linear], left: list[str]) -> Changes:
    """Return the changed tensors of a norm and of the maps that read it."""
    taken_up = norm.bias is None or all(reader.bias for reader in readers)
    centre = norm.kind == "layer" and taken_up
    weight = functools.partial(_weight, checkpoint, norm)
    changes: Changes = {norm.weight: lambda: np.full_like(weight(), 1.0 - norm.offset)}
    if norm.bias and taken_up:
        changes[norm.bias] = lambda: np.zeros_like(weight())
    elif norm.bias:
        bare = next(reader.weight for reader in readers if not reader.bias)
        if np.any((weight() == 0) & (wide(checkpoint, norm.bias) != 0)):
            left.append(
                f"{norm.weight}: it has zeros where its bias is not zero, and {bare} has no bias to absorb that"
            )
            return {}
        left.append(f"{norm.bias}: {bare} has no bias to absorb it; it stays, divided by the weights")
        changes[norm.bias] = functools.partial(_divided, checkpoint, norm.bias, weight)
    for reader in readers:
        changes[reader.weight] = functools.partial(_scaled, checkpoint, reader, weight, centre)
        if norm.bias and taken_up:
            changes[str(reader.bias)] = functools.partial(_with_bias, checkpoint, reader, norm.bias)
    return changes


def _weight(checkpoint: Checkpoint, norm: NormWiring) -> Array:
    return norm.offset + wide(checkpoint, norm.weight)


def _divided(checkpoint: Checkpoint, bias: str, weight: Callable[[], Array]) -> Array:
    b, w = wide(checkpoint, bias), weight()
    return np.divide(b, w, out=np.zeros_like(b), where=w != 0)


def _scaled(checkpoint: Checkpoint, reader: Linear, weight: Callable[[], Array], centre: bool) -> Array:
    x = reader.on_rows(wide(checkpoint, reader.weight)) * weight()[:, None]  # d out
    scaled: Array = reader.on_rows(x - x.mean(axis=0) if centre else x)  # transposed again
    return scaled


def _with_bias(checkpoint: Checkpoint, reader: Linear, bias: str) -> Array:
    w = reader.on_rows(wide(checkpoint, reader.weight))  # d out
    out: Array = wide(checkpoint, str(reader.bias)) + wide(checkpoint, bias) @ w  # [d] out
    return out


@dataclass(frozen=True, repr=False)
class Transformed:
    """A model that computes the same function with other weights, returned by `fold` and `choose_gauge`.

    Parameters
    ----------
    checkpoint
        The same function; tensors are computed when they are read, and `save_checkpoint` writes them.
    done
        Sentences on what was changed.
    left
        Sentences on what was not changed, and why.

    Examples
    --------
    The weights of norms become part of the layers behind them, and are then 1:

    >>> import tnlib_adapters
    >>> llama = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path("llama"))
    >>> found = tnlib_adapters.fold(llama)
    >>> found.done, found.checkpoint.read("layers.0.input_layernorm.weight")[:3].tolist()
    (('9 norms, into the weights that read from them',), [1.0, 1.0, 1.0])
    """

    checkpoint: Checkpoint
    done: tuple[str, ...]
    left: tuple[str, ...]

    def __repr__(self) -> str:
        lines = [f"Transformed {self.checkpoint!r}"]
        lines += [f"  done   {what}" for what in self.done]
        return "\n".join(lines + [f"  left   {what}" for what in self.left])


@accepts_models
def fold(checkpoint: Checkpoint) -> Transformed:
    """Fold norms into the maps that read them and value biases into output biases; centre weights where that is exact.

    Parameters
    ----------
    checkpoint
        Any checkpoint whose attention is not stored as factors.

    Returns
    -------
    Transformed
        `.checkpoint`, `.done` and `.left`. The division of a norm is not linear and stays. Norms of models that
        normalise the stream itself, norms of queries and keys, and biases that no other bias can absorb stay as well.

    Raises
    ------
    ArgumentError
        If the attention is stored as factors.

    References
    ----------
    N. Elhage et al., "A Mathematical Framework for Transformer Circuits" (2021).

    Examples
    --------
    >>> import tnlib_adapters
    >>> fold(tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path())).done
    ('value biases of 2 layers, into the output biases',)
    """
    done: list[str] = []
    left: list[str] = []
    folded = fold_norms(untied(as_dense("fold", checkpoint, "fold"), left), done, left)
    folded = _fold_value_biases(folded, done, left)
    folded = _centre_writers(folded, done)
    if any(layer.attention.head_norms for layer in checkpoint.wiring.layers):
        left.append("the norms of queries and keys: they act inside the heads, before rotary embeddings")
    return Transformed(folded, tuple(done), tuple(left))


# ------------------------------------------------------------------------------------------------------- value biases


def _fold_value_biases(checkpoint: Checkpoint, done: list[str], left: list[str]) -> Checkpoint:
    changes: Changes = {}
    layers = 0
    for layer in checkpoint.wiring.layers:
        bias_of = {name: linear.bias for names, linear in layer.attention.projections.items() for name in names}
        values, output = bias_of.get("v"), bias_of["o"]
        if values is None:
            continue
        if output is None:
            left.append(f"the value biases {values}: the output of attention has no bias to absorb them")
            continue
        layers += 1
        for name in (values, output):
            changes[name] = functools.partial(_value_bias, checkpoint, layer.attention, name)
    if layers:
        done.append(f"value biases of {layers} layers, into the output biases")
    return with_tensors(checkpoint, changes)


def _value_bias(checkpoint: Checkpoint, attention: AttentionWiring, name: str) -> Array:
    """Return the new value bias or output bias."""
    sizes = attention.sizes
    was = take_apart(attention, lambda tensor: wide(checkpoint, tensor))
    per_head = sizes.repeated(was.biases["v"].reshape(sizes.kv_heads, -1))
    biases = {
        "v": np.zeros_like(was.biases["v"]),
        "o": was.biases["o"] + per_head.reshape(-1) @ was.weights["o"],  # [h dh] d
    }
    after = was.updated(Projections({}, biases))
    return put_together(attention, after)[name]


# ------------------------------------------------------------------------------------------------------------ centring


def _centre_writers(checkpoint: Checkpoint, done: list[str]) -> Checkpoint:
    """Subtract the mean from all outputs into the stream if only LayerNorms read it."""
    stream = read_stream(checkpoint)
    normed = {reader.weight for readers in stream.norms.values() for reader in readers}
    raw = [reader for reader in stream.readers if reader.weight not in normed]
    ends_in_norm = checkpoint.wiring.final_norm or checkpoint.wiring.unembedding
    only_layer_norms = stream.norms and all(norm.kind == "layer" for norm in stream.norms)
    if not only_layer_norms or raw or not ends_in_norm or stream.unknown:
        return checkpoint
    changes: Changes = {
        leg.tensor: functools.partial(_centred, checkpoint, leg)
        for leg in stream.writers
        if leg.tensor not in normed  # tied embeddings are read as well
    }
    done.append("the mean over features of outputs into the stream, which LayerNorm subtracts")
    return with_tensors(checkpoint, changes)


def _centred(checkpoint: Checkpoint, leg: StreamAxis) -> Array:
    x = wide(checkpoint, leg.tensor)
    centred: Array = x - x.mean(axis=leg.axis, keepdims=True)
    return centred
