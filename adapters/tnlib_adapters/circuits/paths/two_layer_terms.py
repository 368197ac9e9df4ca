"""Ten-term decomposition of the final stream of two attention layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tnlib import ArgumentError
from tnlib._typing import Array
from tnlib._validate import is_one_of
from tnlib_adapters.checkpoints.arguments import as_checkpoint
from tnlib_adapters.checkpoints.checkpoint import Checkpoint
from tnlib_adapters.circuits.paths.attention_layer import OpenLayer
from tnlib_adapters.circuits.paths.stream_parts import split_stream
from tnlib_adapters.reference.weights import read_weights

NAMES = ("direct", "first", "second", "Q", "K", "V", "QK", "QV", "KV", "QKV")


@dataclass(frozen=True, eq=False)
class TenTerms:
    """Ten terms of a network of two attention layers, and the softmax remainder.

    Parameters
    ----------
    names
        Without composition "direct", "first" (layer 0 alone) and "second" (layer 1 alone). "Q", "K", "V": layer 1 reads
        layer 0 through one side; "QK", "QV", "KV", "QKV": through two or all sides.
    arrays
        (10, n, d_model). The direct term includes the output bias of layer 1.
    by_head
        (8, heads, n, d_model): the last eight terms, by head of layer 1.
    by_pair
        (3, writers, heads, n, d_model): "Q", "K" and "V" by pairs of an output of layer 0 and a head of layer 1. With
        softmax replaced by the identity the sum over writers is the term. Under softmax this holds for "V"; in "Q" and
        "K" an entry is the change on removal of that pair alone.
    writers
        Names of the outputs of layer 0: its heads, and its biases if it has any.
    rest
        (n, d_model): the final stream minus all ten terms. Zero to roundoff if softmax is replaced by the identity.
    """

    names: tuple[str, ...]
    arrays: Array
    by_head: Array
    by_pair: Array
    writers: tuple[str, ...]
    rest: Array

    def __getitem__(self, name: str) -> Array:
        if not is_one_of(name, self.names):
            raise ArgumentError(f"TenTerms: name must be one of {', '.join(self.names)}, got {name!r}; choose one.")
        array: Array = self.arrays[self.names.index(name)]
        return array


def ten_terms(model: Checkpoint, tokens: Array, *, softmax: bool = True) -> TenTerms:
    """Decompose the final stream of an attention-only model of two layers into ten terms.

    The pattern of layer 0 is frozen. Queries, keys and values of layer 1 read the embedding or the output of layer 0:
    eight terms, one per choice for scores and values. Under softmax a term is the change when its part of the scores is
    removed and the pattern recomputed, so the ten terms leave a remainder.

    Parameters
    ----------
    model
        Two layers without norms and feed-forward layers.
    tokens
        (n,), integers: one sequence.
    softmax
        If False, the attention weights of layer 1 are its scores, and the ten terms sum to the output.

    Raises
    ------
    ArgumentError
        If the model does not consist of two attention layers.

    References
    ----------
    N. Elhage et al., "A Mathematical Framework for Transformer Circuits" (2021).

    Examples
    --------
    >>> import tnlib_adapters
    >>> model = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path())
    >>> found = ten_terms(model, [5, 6, 7, 8, 5, 6])
    >>> logits = found.arrays[:, -1] @ model.read("unembed.weight")[7]      # of 7, which followed the first 6
    >>> found.names[logits.argmax()]
    'K'
    """
    row = as_checkpoint("ten_terms", model, "model").architecture
    if row.norm_place is not None or row.mlp is not None or model.n_layers != 2:
        raise ArgumentError(
            f"ten_terms: model must have two attention layers and nothing else, got a {row.model_type} of "
            f"{model.n_layers} layers; OpenLayer splits one layer of any model."
        )
    weights = read_weights(model)
    parts = split_stream(weights, tokens, layer=1)
    attention = weights.blocks[1].branches[0].layer
    layer = OpenLayer(attention, parts, softmax=softmax)  # type: ignore[arg-type]
    direct, *writers = parts.names
    by_head = np.stack([composed(layer, letters, writers) for letters in ("", *NAMES[3:])])
    by_pair = np.stack([[composed(layer, letter, [writer]) for writer in writers] for letter in "QKV"])
    bias = 0 if layer.attention.b_O is None else layer.attention.b_O
    written = layer.output().sum(axis=0) + bias
    first = np.sum([parts[writer] for writer in writers], axis=0)
    arrays = np.concatenate([[parts[direct] + bias, first], by_head.sum(axis=1)])
    return TenTerms(NAMES, arrays, by_head, by_pair, tuple(writers), parts.total + written - arrays.sum(axis=0))


def composed(layer: OpenLayer, letters: str, writers: Sequence[str]) -> Array:
    """Return head outputs (heads, n, d_model) if the sides in `letters` read `writers` and the others the embedding."""
    embedding = layer.parts.names[:1]
    return layer.removed(*(writers if letter in letters else embedding for letter in "QKV"))
