r"""Attention-only model with a gate on every edge from a writer to a reader of the residual stream.

    writers   tokens, positions, every head, the output bias of every layer
    readers   queries, keys and values of every head, and the unembedding

A reader receives sum_w g_w x_w over the preceding writers w, plus its own biases. With all gates at 1 this is the
original model. Patterns are always recomputed from the gated queries and keys. With p = softmax(s) by rows and G the
gradient of the loss with respect to the output of a head, one backward pass gives the gradient of every gate:

    dp = G W_O^T v^T        ds = p * (dp - sum_j p_ij dp_ij)        dq = scale ds k        dk = scale ds^T q
    dv = p^T G W_O^T        dx_reader = dq W_Q^T (dk W_K^T, dv W_V^T)        dg_w = <dx_reader, x_w>
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tnlib import ArgumentError
from tnlib._typing import Array
from tnlib_adapters.attention.attention import Attention
from tnlib_adapters.checkpoints.arguments import as_checkpoint
from tnlib_adapters.checkpoints.checkpoint import Checkpoint
from tnlib_adapters.circuits.tokens.targets import Targets, targets_of
from tnlib_adapters.reference.layers import softmax
from tnlib_adapters.reference.weights import Weights, read_weights

SIDES = ("Q", "K", "V")


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
            self._seen = attention.mask(x.shape[1])
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
        return q, k, v, softmax(np.where(self._seen, scores, -np.inf))

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
    row = as_checkpoint(function, model, "model").architecture
    if row.norm_place is not None or row.mlp is not None:
        raise ArgumentError(
            f"{function}: model must have attention layers and nothing else, got a {row.model_type} with norms or "
            "feed-forward layers; split_stream and OpenLayer decompose one of its layers."
        )
    return model


def attention_layers(weights: Weights) -> list[Attention]:
    """Return the layers of an attention-only model."""
    return [b.layer for block in weights.blocks for b in block.branches if isinstance(b.layer, Attention)]
