r"""Rank-one edits of a feed-forward layer as a key-value memory.

The down projection maps hidden values k (the key) to an output v = k W + b (the value). Of all matrices W' that map one
key k* to another value v*, the nearest to W over the keys of a text is

    W' = W + u (v* - k* W - b) / (u . k*),     u = C^-1 k*,     C the second moments E[k k^T] of the keys,

the minimum of E|k W' - k W|^2 = tr (W' - W)^T C (W' - W) under k* W' + b = v*, by a Lagrange multiplier for every
output. With C = 1 it is the smallest change of the weights, but changes the outputs on the text more.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from tnlib import ArgumentError
from tnlib._typing import Array
from tnlib._validate import as_array
from tnlib.linalg.solve import solve_gram
from tnlib_adapters.architectures.wiring import FeedForwardWiring, Linear
from tnlib_adapters.attention.attention import Attention
from tnlib_adapters.attention.validation import as_index
from tnlib_adapters.checkpoints.checkpoint import Checkpoint, accepts_models, as_one_stream
from tnlib_adapters.checkpoints.modified import wide, with_tensors
from tnlib_adapters.reference.layers import FeedForward
from tnlib_adapters.reference.model import attend
from tnlib_adapters.reference.weights import Block, read_weights

_BATCH = 16  # sequences whose streams are in memory at once


@accepts_models
def feed_forward_keys(checkpoint: Checkpoint, tokens: Array, layer: int) -> Array:
    """Return the inputs of the down projection of a feed-forward layer on token sequences, (batch, n, d_ff) in float64.

    Parameters
    ----------
    checkpoint
        A model with one residual stream.
    tokens
        (n,) or (batch, n), integers.
    layer
        Index of a layer with one feed-forward layer, from 0.

    Raises
    ------
    ArgumentError
        If tokens do not fit the model, or the layer has no feed-forward layer or a mixture of experts.

    References
    ----------
    M. Geva et al., "Transformer Feed-Forward Layers Are Key-Value Memories", EMNLP 2021.

    Examples
    --------
    >>> import tnlib_adapters
    >>> llama = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path("llama"))
    >>> feed_forward_keys(llama, [5, 6, 7], 2).shape
    (1, 3, 320)
    """
    layer, _ = _memory("feed_forward_keys", checkpoint, layer)
    weights = read_weights(checkpoint)
    checked = weights.embedding.check("feed_forward_keys", tokens, weights.context)
    batches = np.array_split(checked, -(-len(checked) // _BATCH))
    return np.concatenate([_keys_of_batch(weights.blocks, weights.embedding(batch), layer) for batch in batches])


@accepts_models
def edit_memory(
    checkpoint: Checkpoint, layer: int, key: ArrayLike, value: ArrayLike, *, moments: ArrayLike
) -> Checkpoint:
    """Return the model with one feed-forward layer that maps `key` to `value`, by a change of rank one (ROME).

    Parameters
    ----------
    checkpoint
        A model with one residual stream, whose down projection is stored dense.
    layer
        Index of a layer with one feed-forward layer, from 0. Layers that share its weights change too.
    key
        (d_ff,): the input of the down projection at which the output is changed, for example
        `feed_forward_keys(checkpoint, prompt, layer)[0, -1]`.
    value
        (d_model,): its new output, bias included, before any norm behind the layer.
    moments
        (d_ff, d_ff), positive semidefinite: second moments of the keys of a text, `keys.T @ keys / len(keys)`, up to a
        factor. The identity gives the smallest change of the weights.

    Returns
    -------
    Checkpoint
        The changed weight is computed when it is read. `save_checkpoint` writes it.

    Raises
    ------
    ArgumentError
        If an array does not fit the layer, `moments` is not real and symmetric, or the key is zero or outside of the
        range of `moments`.

    References
    ----------
    K. Meng et al., "Locating and Editing Factual Associations in GPT", NeurIPS 2022, equation 2.

    Examples
    --------
    >>> import numpy as np, tnlib_adapters
    >>> llama = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path("llama"))
    >>> keys = feed_forward_keys(llama, np.arange(256), 3)[0]
    >>> edited = edit_memory(llama, 3, keys[-1], np.ones(128), moments=np.eye(320))
    >>> w = edited.read("layers.3.mlp.down_proj.weight").T
    >>> bool(np.allclose(keys[-1] @ w, 1, atol=1e-5))
    True
    """
    layer, wiring = _memory("edit_memory", checkpoint, layer)
    name = wiring.down.weight
    if checkpoint.factored is not None or name not in checkpoint.folder.tensors:
        raise ArgumentError(
            "edit_memory: checkpoint must hold dense weights, got one that is stored as factors; edit first, then "
            "compress."
        )
    d_ff, d_model = wiring.down.on_rows(np.empty(checkpoint.folder.tensors[name].shape)).shape
    key, value = _as_vector("key", key, d_ff), _as_vector("value", value, d_model)
    direction = _direction(key, moments)  # u / (u . k*), (d_ff,)
    if wiring.down.bias is not None:
        value = value - wide(checkpoint, wiring.down.bias)
    return with_tensors(checkpoint, {name: functools.partial(_edited, checkpoint, wiring.down, key, value, direction)})


def _edited(checkpoint: Checkpoint, down: Linear, key: Array, value: Array, direction: Array) -> Array:
    """Return the stored weight whose output for `key` is `value`, before the bias."""
    weight = down.on_rows(wide(checkpoint, down.weight))  # d_ff d_model
    changed = weight + np.outer(direction, value - key @ weight)
    return np.asarray(down.on_rows(changed))  # transposed back, as stored


def _direction(key: Array, moments: ArrayLike) -> Array:
    """Return C^-1 k / (k . C^-1 k) for the key k and the second moments C."""
    c = as_array("edit_memory", "moments", moments, ndim=2)
    is_real_square = c.shape == (len(key), len(key)) and c.dtype.kind != "c"
    if not is_real_square or not np.allclose(c, c.T, rtol=1e-5, atol=1e-6 * float(np.abs(c).max())):
        raise ArgumentError(
            f"edit_memory: moments must be real and symmetric of shape (d_ff, d_ff) = ({len(key)}, {len(key)}), got "
            f"{c.dtype} of shape {c.shape}; pass keys.T @ keys."
        )
    c = c.astype(np.float64)
    u = solve_gram(key[None], (c + c.T) / 2)[0]
    product = float(u @ key)
    if not product > 0 or np.linalg.norm(c @ u - key) > 1e-3 * np.linalg.norm(key):
        raise ArgumentError(
            "edit_memory: key must be non-zero and in the range of moments, got one outside of it; take the moments of "
            "more text, or add a multiple of the identity."
        )
    return np.asarray(u / product)


def _as_vector(parameter: str, x: ArrayLike, n: int) -> Array:
    vector = as_array("edit_memory", parameter, x, ndim=1)
    if len(vector) != n or vector.dtype.kind == "c":
        raise ArgumentError(
            f"edit_memory: {parameter} must be real of shape ({n},), got {vector.dtype} of shape {vector.shape}; pass "
            "one position of a sequence."
        )
    return vector.astype(np.float64)


def _memory(function: str, checkpoint: Checkpoint, layer: int) -> tuple[int, FeedForwardWiring]:
    """Return the index of a layer and its feed-forward layer."""
    model = as_one_stream(function, checkpoint)
    index = as_index(function, "layer", layer, model.n_layers)
    wiring = model.wiring.layers[index].feed_forward
    if wiring is None:
        kind = "none" if model.wiring.layers[index].experts is None else "a mixture of experts"
        raise ArgumentError(f"{function}: layer {index} must have one feed-forward layer, got {kind}; name another.")
    return index, wiring


def _keys_of_batch(blocks: Sequence[Block], x: Array, layer: int) -> Array:
    """Return the keys (batch, n, d_ff) of one layer for embedded tokens (batch, n, d_model)."""
    n_attentions = 0
    for block in blocks:
        n_attentions += sum(isinstance(branch.layer, Attention) for branch in block.branches)
        for branch in block.branches:
            if isinstance(branch.layer, FeedForward) and n_attentions == layer + 1:
                return branch.layer.hidden(x if branch.before is None else branch.before(x))
        x = block.run(x, lambda attention, read: attend(attention, read)[1])
    raise AssertionError  # `_memory` has found the layer
