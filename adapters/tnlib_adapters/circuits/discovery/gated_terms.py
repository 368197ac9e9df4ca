"""Attention-only models as a sum of terms with a gate on each: paths with frozen patterns, or ten terms by heads.

The terms are addends of the final stream, with frozen or recomputed patterns; a gate multiplies an addend.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

import numpy as np

from tnlib import ArgumentError
from tnlib._typing import Array
from tnlib_adapters.checkpoints.checkpoint import Checkpoint, as_checkpoint
from tnlib_adapters.circuits.discovery.target_loss import Targets, targets_of
from tnlib_adapters.circuits.paths.attention_terms import NAMES, OpenLayer, composed
from tnlib_adapters.circuits.paths.stream_parts import split_stream
from tnlib_adapters.reference.model import Forward, run
from tnlib_adapters.reference.weights import Weights, attention_layers, read_weights

_MOST = 5000  # largest number of paths; each holds its own stream in memory


class AdditiveTerms:
    """Terms (terms, t, d) of the predicting rows of the final stream, with gates; the remainder is always added."""

    def __init__(self, targets: Targets, names: tuple[str, ...], terms: Array, total: Array) -> None:
        self.targets, self.names, self._terms = targets, names, terms
        self._fixed = total - terms.sum(axis=0)  # t d

    def loss(self, gates: Array) -> float:
        """Return the mean cross-entropy of the sum of gated terms."""
        return self.targets.loss_of_rows(self._rows(gates))

    def losses_without(self, gates: Array, terms: Array) -> Array:
        """Return the loss without each of `terms`, one at a time."""
        rows = self._rows(gates)
        return np.array([self.targets.loss_of_rows(rows - gates[k] * self._terms[k]) for k in terms])

    def first_order(self, gates: Array) -> Array:
        """Return minus the derivative of the loss with respect to every gate, (terms,)."""
        slope = self.targets.slope_of_rows(self._rows(gates))
        return -np.asarray(np.tensordot(self._terms, slope, 2))  # term [t d]

    def first_order_between(self, fraction: float) -> Array:
        """Return the same with all gates at this fraction."""
        return self.first_order(np.full(len(self.names), fraction))

    def _rows(self, gates: Array) -> Array:
        return np.asarray(self._fixed + np.tensordot(gates, self._terms, 1))  # [term] t d


def path_terms(model: Checkpoint, tokens: Any, mask: Array | None, function: str) -> AdditiveTerms:
    """Return all paths through heads with frozen patterns; paths that start at a bias are always included."""
    weights, targets, forward = _forward_pass(model, tokens, mask, function)
    layers = list(attention_layers(weights.blocks))
    count = prod(1 + layer.n_heads for layer in layers)
    if count > _MOST:
        raise ArgumentError(
            f"{function}: of='paths' must be of a stack with at most {_MOST:,} paths, got {count:,}; choose 'edges', "
            "or sum paths by order and head with path_losses."
        )
    streams = {"direct": forward.residuals[0]}  # b n d
    for number, layer in enumerate(layers):
        patterns = forward.patterns[number].swapaxes(0, 1)  # h b n n
        for name, s in list(streams.items()):
            before = "" if name == "direct" else f"{name} "
            written = layer.head_outputs(patterns, layer.values(s[None], constant=0.0))  # h b n d
            streams |= {f"{before}{number}.{h}": output for h, output in enumerate(written)}
    rows = np.stack([s[targets.at] for s in streams.values()])
    return AdditiveTerms(targets, tuple(streams), rows, forward.residuals[-1][targets.at])


def ten_terms_by_heads(model: Checkpoint, tokens: Any, mask: Array | None, function: str) -> AdditiveTerms:
    """Return the ten terms of two layers: composition terms split by pairs of heads, the others by head.

    A term of the scores is the change of the output on its removal, with patterns recomputed. The softmax remainder and
    the output bias of layer 1 are always included.
    """
    weights, targets, forward = _forward_pass(model, tokens, mask, function)
    layers = list(attention_layers(weights.blocks))
    if len(layers) != 2:
        raise ArgumentError(
            f"{function}: of='terms' must be of a model of two layers, got {len(layers)}; choose 'edges' or 'paths'."
        )
    names: tuple[str, ...] = ()
    terms = []
    for sequence, at in zip(targets.tokens, targets.at, strict=True):
        layer = OpenLayer(layers[1], split_stream(weights, sequence, layer=1))
        sequence_terms = dict(_terms(layer, at))
        names = tuple(sequence_terms)
        terms.append(np.stack(list(sequence_terms.values())))
    return AdditiveTerms(targets, names, np.concatenate(terms, axis=1), forward.residuals[-1][targets.at])


def _terms(layer: OpenLayer, at: Array) -> Iterator[tuple[str, Array]]:
    """Yield names and rows (t, d) of all terms for one sequence."""
    embedding, *first = layer.parts.names
    for name in layer.parts.names:
        yield ("direct" if name == embedding else name), layer.parts[name][at]
    for letters in ("", *NAMES[3:]):
        for writers in [[name] for name in first] if len(letters) == 1 else [first]:
            for h, rows in enumerate(composed(layer, letters, writers)[:, at]):
                pair = [letters, *writers] if len(letters) == 1 else [letters]
                yield " ".join([*pair, f"1.{h}"]).strip(), rows


def _forward_pass(
    model: Checkpoint, tokens: Any, mask: Array | None, function: str
) -> tuple[Weights, Targets, Forward]:
    wiring = as_checkpoint(function, model, "model").wiring
    if not wiring.is_attention_only:
        raise ArgumentError(
            f"{function}: model must have attention layers and nothing else, got a {wiring.model_type} with norms or "
            "feed-forward layers; split_stream and OpenLayer decompose one of its layers."
        )
    weights = read_weights(model)
    targets = targets_of(weights, tokens, mask, function)
    return weights, targets, run(weights, targets.tokens)
