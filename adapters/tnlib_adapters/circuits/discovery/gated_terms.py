r"""Attention-only models with a gate on every removable term: an edge, a path, or one of the ten terms by heads.

Edges lead from a writer to a reader of the residual stream:

    writers   tokens, positions, every head, the output bias of every layer
    readers   queries, keys and values of every head, and the unembedding

A reader receives sum_w g_w x_w over the preceding writers w, plus its own biases. With all gates at 1 this is the
original model. Patterns are always recomputed from the gated queries and keys. With p = softmax(s) by rows and G the
gradient of the loss with respect to the output of a head, one backward pass gives the gradient of every gate:

    dp = G W_O^T v^T        ds = p * (dp - sum_j p_ij dp_ij)        dq = scale ds k        dk = scale ds^T q
    dv = p^T G W_O^T        dx_reader = dq W_Q^T (dk W_K^T, dv W_V^T)        dg_w = <dx_reader, x_w>

Paths and ten terms are addends of the final stream, with frozen or recomputed patterns; a gate multiplies an addend.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from tnlib import ArgumentError
from tnlib._typing import Array
from tnlib_adapters.attention.attention import Attention
from tnlib_adapters.checkpoints.checkpoint import Checkpoint, as_checkpoint
from tnlib_adapters.circuits.paths.attention_terms import NAMES, OpenLayer, composed
from tnlib_adapters.circuits.paths.stream_parts import split_stream
from tnlib_adapters.reference.layers import Unembedding, log_softmax, softmax
from tnlib_adapters.reference.model import Forward, check_mask, run
from tnlib_adapters.reference.weights import Weights, read_weights

SIDES = ("Q", "K", "V")
_MOST = 5000  # largest number of paths; each holds its own stream in memory


@dataclass(frozen=True, eq=False)
class Targets:
    """Tokens (b, n), a mask of target tokens, and the affine map to logits; there is no final norm."""

    tokens: Array
    counted: Array
    unembed: Unembedding

    @property
    def at(self) -> Array:
        """Positions whose next token is a target, (b, n)."""
        return np.roll(self.counted, -1, axis=1)

    def loss(self, stream: Array) -> float:
        """Return the mean cross-entropy in nats of a final stream (b, n, d)."""
        return self.loss_of_rows(stream[self.at])

    def loss_of_rows(self, rows: Array) -> float:
        """Return the mean cross-entropy of the target rows (t, d) alone."""
        log_p = log_softmax(self.unembed(rows))  # t vocab
        return float(-np.take_along_axis(log_p, self._actual, axis=1).mean())

    def slope(self, stream: Array) -> Array:
        """Return the gradient of the loss with respect to the final stream, (b, n, d)."""
        out = np.zeros_like(stream)
        out[self.at] = self.slope_of_rows(stream[self.at])
        return out

    def slope_of_rows(self, rows: Array) -> Array:
        """Return the gradient of the loss with respect to the target rows, (t, d)."""
        p = softmax(self.unembed(rows))  # t vocab
        p[np.arange(len(p)), self._actual[:, 0]] -= 1
        return np.asarray(p @ self.unembed.affine.weight.T / len(p))  # t [vocab] d

    @property
    def _actual(self) -> Array:
        return np.asarray(self.tokens[self.counted][:, None])  # t 1, in the order of `at`


def targets_of(weights: Weights, tokens: Array, mask: Array, function: str) -> Targets:
    """Return the targets for tokens and mask, validated."""
    if weights.unembed is None or weights.unembed.cap is not None:
        raise ArgumentError(
            f"{function}: model must have an unembedding that is affine, got a {weights.architecture}; "
            "use a language model without a cap on its logits."
        )
    tokens = weights.embedding.check(function, tokens, weights.context)
    return Targets(tokens, check_mask(function, mask, tokens), weights.unembed)


@dataclass(frozen=True, eq=False)
class _Layer:
    """One layer with weights per query head, and the slice of gates that belongs to it."""

    into: Array  # side h d dh
    biases: Array  # side h 1 1 dh
    out: Array  # h dh d
    bias: Array | None  # d
    scale: float
    edges: slice

    @classmethod
    def of(cls, layer: Attention, n_writers: int, first_edge: int) -> _Layer:
        """Return a layer whose heads have `n_writers` preceding writers; its gates begin at `first_edge`."""
        group = layer.n_heads // layer.kv_heads
        weights = [layer.W_Q, *(np.repeat(w, group, axis=0) for w in (layer.W_K, layer.W_V))]
        zero = np.zeros((layer.n_heads, layer.d_head))
        bias_list = [layer.b_Q, *(None if b is None else np.repeat(b, group, axis=0) for b in (layer.b_K, layer.b_V))]
        biases = np.stack([zero if b is None else b for b in bias_list])[:, :, None, None]
        edges = slice(first_edge, first_edge + n_writers * layer.n_heads * 3)
        return cls(np.stack(weights), biases, layer.W_O, layer.b_O, layer.scale, edges)

    @property
    def n_heads(self) -> int:
        """Number of query heads."""
        return len(self.out)


@dataclass(frozen=True, eq=False)
class _Pass:
    """Activations of a forward pass: writer outputs, queries, keys, values and patterns by layer, final stream."""

    writers: Array  # w b n d
    heads: list[tuple[Array, Array, Array, Array]]  # q, k, v, pattern: h b n dh, h b n n
    final: Array  # b n d


class GatedModel:
    """Attention layers on token and position embeddings with gates (edges,) between them; used by `find_circuit`.

    `names` are the edges, "writer -> reader", in layer order.
    """

    def __init__(self, model: Checkpoint, tokens: Array, mask: Array, function: str) -> None:
        weights = read_weights(attention_only(model, function))
        self.targets: Targets = targets_of(weights, tokens, mask, function)
        embedding: Any = weights.embedding
        x = embedding.tokens[self.targets.tokens]  # b n d
        self._embedded = [x]
        writers = ["tokens"]
        if embedding.positions is not None:
            self._embedded.append(np.broadcast_to(embedding.positions[: x.shape[1]], x.shape))
            writers.append("positions")
        names: list[str] = []
        self._layers: list[_Layer] = []
        for number, attention in enumerate(attention_layers(weights)):
            layer = _Layer.of(attention, len(writers), len(names))
            self._visible = attention.mask(x.shape[1])
            heads = range(layer.n_heads)
            names += [f"{w} -> {number}.{h} {side}" for w in writers for h in heads for side in SIDES]
            writers += [f"{number}.{h}" for h in heads] + ([] if layer.bias is None else [f"{number}.bias"])
            self._layers.append(layer)
        self._last = slice(len(names), len(names) + len(writers))
        self.names = (*names, *(f"{w} -> logits" for w in writers))
        self._latest: tuple[Array, _Pass] | None = None

    def loss(self, gates: Array) -> float:
        """Return the mean cross-entropy with gates (edges,)."""
        return self.targets.loss(self._forward(gates).final)

    def losses_without(self, gates: Array, edges: Array) -> Array:
        """Return the loss with each of `edges` removed, one at a time; only downstream activations are recomputed."""
        activations = self._forward(gates)
        return np.array([self._loss_without(gates, int(edge), activations) for edge in edges])

    def first_order(self, gates: Array) -> Array:
        """Return the first-order increase of the loss from closing each gate, (edges,): minus the derivative."""
        activations = self._forward(gates)
        slope = self.targets.slope(activations.final)  # b n d
        grads = gates[self._last, None, None, None] * slope  # w b n d
        effects = np.zeros(len(gates))
        effects[self._last] = np.tensordot(activations.writers, slope, 3)  # w [b n d]
        end = len(activations.writers)
        for layer, heads in zip(reversed(self._layers), reversed(activations.heads), strict=True):
            end -= layer.n_heads + (layer.bias is not None)
            reads = _backward(layer, heads, grads[end : end + layer.n_heads])  # h side b n d
            effects[layer.edges] = np.tensordot(
                activations.writers[:end], reads, ((1, 2, 3), (2, 3, 4))
            ).ravel()  # w h side [b n d]
            grads[:end] += np.tensordot(self._gates(gates, layer), reads, 2)  # w [h side] b n d
        return -effects

    # -------------------------------------------------------------------------------------------------------- forward

    def _gates(self, gates: Array, layer: _Layer) -> Array:
        return gates[layer.edges].reshape(-1, layer.n_heads, 3)  # w h side

    def _forward(self, gates: Array) -> _Pass:
        """Return the forward pass; the latest is cached because a search evaluates the same gates repeatedly."""
        if self._latest is None or not np.array_equal(self._latest[0], gates):
            self._latest = gates.copy(), self._pass(gates)
        return self._latest[1]

    def _pass(self, gates: Array) -> _Pass:
        x = np.stack(self._embedded)  # w b n d
        heads_by_layer = []
        for layer in self._layers:
            reads = np.tensordot(self._gates(gates, layer), x, ((0,), (0,)))  # h side [w] b n d
            some = [self._head(layer, h, reads[h]) for h in range(layer.n_heads)]
            q, k, v, pattern = (np.stack(parts) for parts in zip(*some, strict=True))
            heads_by_layer.append((q, k, v, pattern))
            x = np.concatenate([x, self._written(layer, heads_by_layer[-1])])
        return _Pass(x, heads_by_layer, np.tensordot(gates[self._last], x, 1))  # [w] b n d

    def _head(self, layer: _Layer, h: int, inputs: Array) -> tuple[Array, Array, Array, Array]:
        """Return queries, keys, values and pattern of one head with inputs (side, b, n, d)."""
        q, k, v = inputs @ layer.into[:, h, None] + layer.biases[:, h]  # side b n [d] dh
        scores = layer.scale * (q @ k.transpose(0, 2, 1))  # b n [dh] n
        return q, k, v, softmax(np.where(self._visible, scores, -np.inf))

    @staticmethod
    def _written(layer: _Layer, head_values: tuple[Array, Array, Array, Array]) -> Array:
        _, _, v, pattern = head_values
        heads = (pattern @ v) @ layer.out[:, None]  # h b n [n'] [dh] d
        return heads if layer.bias is None else np.concatenate([heads, np.broadcast_to(layer.bias, heads[:1].shape)])

    def _loss_without(self, gates: Array, edge: int, activations: _Pass) -> float:
        shut = gates.copy()
        shut[edge] = 0
        first = next((k for k, layer in enumerate(self._layers) if edge < layer.edges.stop), None)
        if first is None:
            return self.targets.loss(np.tensordot(shut[self._last], activations.writers, 1))
        x, n = activations.writers.copy(), len(self._embedded)
        for number, layer in enumerate(self._layers):
            changed = range(layer.n_heads) if number > first else [(edge - layer.edges.start) // 3 % layer.n_heads]
            for h in changed if number >= first else []:
                inputs = np.tensordot(self._gates(shut, layer)[:, h], x[:n], ((0,), (0,)))  # side [w] b n d
                _, _, v, pattern = self._head(layer, h, inputs)
                x[n + h] = pattern @ v @ layer.out[h]
            n += layer.n_heads + (layer.bias is not None)
        return self.targets.loss(np.tensordot(shut[self._last], x, 1))


def _backward(layer: _Layer, head_values: tuple[Array, Array, Array, Array], grads: Array) -> Array:
    """Return the gradients of head inputs, (h, side, b, n, d), from those of head outputs, (h, b, n, d)."""
    q, k, v, p = head_values
    dz = grads @ layer.out.transpose(0, 2, 1)[:, None]  # h b n [d] dh
    dp = dz @ v.swapaxes(-1, -2)  # h b n [dh] n'
    ds = layer.scale * p * (dp - (p * dp).sum(axis=-1, keepdims=True))
    sides = np.stack([ds @ k, ds.swapaxes(-1, -2) @ q, p.swapaxes(-1, -2) @ dz], axis=1)  # h side b n dh
    return np.asarray(sides @ layer.into.transpose(1, 0, 3, 2)[:, :, None])  # h side b n [dh] d


# ------------------------------------------------------------------------------------------------------------ the model


def attention_only(model: Checkpoint, function: str) -> Checkpoint:
    """Return the model; raise `ArgumentError` unless it consists of attention layers with bilinear scores."""
    wiring = as_checkpoint(function, model, "model").wiring
    if not wiring.is_attention_only:
        raise ArgumentError(
            f"{function}: model must have attention layers and nothing else, got a {wiring.model_type} with norms or "
            "feed-forward layers; split_stream and OpenLayer decompose one of its layers."
        )
    return model


def attention_layers(weights: Weights) -> list[Attention]:
    """Return the layers of an attention-only model."""
    return [b.layer for block in weights.blocks for b in block.branches if isinstance(b.layer, Attention)]


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

    def _rows(self, gates: Array) -> Array:
        return np.asarray(self._fixed + np.tensordot(gates, self._terms, 1))  # [term] t d


def path_terms(model: Checkpoint, tokens: Array, mask: Array, function: str) -> AdditiveTerms:
    """Return all paths through heads with frozen patterns; paths that start at a bias are always included."""
    weights, targets, forward = _forward_pass(model, tokens, mask, function)
    layers = attention_layers(weights)
    count = prod(1 + layer.n_heads for layer in layers)
    if count > _MOST:
        raise ArgumentError(
            f"{function}: of='paths' must be of a stack with at most {_MOST:,} paths, got {count:,}; choose 'edges', "
            "or sum paths by order and head with path_losses."
        )
    streams = {"direct": forward.residuals[0]}  # b n d
    for number, layer in enumerate(layers):
        group, patterns = layer.n_heads // layer.kv_heads, forward.patterns[number]  # b h n n
        for name, s in list(streams.items()):
            before = "" if name == "direct" else f"{name} "
            for h in range(layer.n_heads):
                v = s @ layer.W_V[h // group]  # b n [d] dh
                streams[f"{before}{number}.{h}"] = patterns[:, h] @ v @ layer.W_O[h]  # b n [n'] [dh] d
    rows = np.stack([s[targets.at] for s in streams.values()])
    return AdditiveTerms(targets, tuple(streams), rows, forward.residuals[-1][targets.at])


def ten_terms_by_heads(model: Checkpoint, tokens: Array, mask: Array, function: str) -> AdditiveTerms:
    """Return the ten terms of two layers: composition terms split by pairs of heads, the others by head.

    A term of the scores is the change of the output on its removal, with patterns recomputed. The softmax remainder and
    the output bias of layer 1 are always included.
    """
    weights, targets, forward = _forward_pass(model, tokens, mask, function)
    layers = attention_layers(weights)
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


def _forward_pass(model: Checkpoint, tokens: Array, mask: Array, function: str) -> tuple[Weights, Targets, Forward]:
    weights = read_weights(attention_only(model, function))
    targets = targets_of(weights, tokens, mask, function)
    return weights, targets, run(weights, targets.tokens)
