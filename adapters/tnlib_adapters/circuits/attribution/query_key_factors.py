"""Queries and keys of every writer, with the divisors of all norms frozen.

With x_i = sum_p x_i^p + b the input of an attention layer (writers behind the norm, and the bias of the norm), queries
are linear in the writers once the divisors of norms of heads and of latent vectors are numbers:

    q_i = sum_p q_i^p,    q_i^p = (x_i^p W_Q * a_i) R_i,    score_ij = scale * sum_pp' <q_i^p, k_j^p'> + offset_(i-j)

where a_i are the weights of these norms over their divisors, R_i the rotation to position i, and the writer "bias" has
b W_Q + b_Q. Keys likewise.

Writers are tokens, positions, heads, feed-forward layers and biases. The output of the heads of a layer is kept as two
factors, values (heads, n, d_head) and W_O (heads, d_head, d_model), so that a projection of all writers multiplies W_O,
not n rows of every head. A norm keeps this form: its divisors belong to the values, its weight and centring to W_O.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from tnlib._typing import Array
from tnlib_adapters.frozen.frozen_heads import FrozenHeads, FrozenNorm
from tnlib_adapters.frozen.frozen_model import FrozenBlock, FrozenModel

BIASES = "output biases"


@dataclass(frozen=True, eq=False)
class WriterGroup:
    """Writers with outputs values[k] @ out[k]; `out` is None where `values` are the outputs."""

    names: tuple[str, ...]  # of the writers
    values: Array  # (writers, n, r), or (writers, n, d_model)
    out: Array | None = None  # (writers, r, d_model), or None

    def project(self, weight: Array, out: Array) -> None:
        """Write the outputs times a matrix (d_model, columns) into `out` (writers, n, columns)."""
        if self.out is None or self.values.shape[1] < self.out.shape[1]:
            np.matmul(self.outputs(), weight, out=out)  # writer n [d] c
            return
        k, r, d = self.out.shape
        projected = (self.out.reshape(-1, d) @ weight).reshape(k, r, -1)  # (writer r) [d] c
        np.matmul(self.values, projected, out=out)  # writer n [r] c

    def outputs(self) -> Array:
        """Return the outputs, (writers, n, d_model)."""
        return self.values if self.out is None else np.asarray(self.values @ self.out)  # writer n [r] d

    def at(self, positions: Array) -> WriterGroup:
        """Return the writers at some positions."""
        return WriterGroup(self.names, self.values[:, positions], self.out)

    def through(self, norm: FrozenNorm | None) -> WriterGroup:
        """Return the writers behind a norm, without its bias; as they are for None."""
        if norm is None:
            return self
        if self.out is None:
            return WriterGroup(self.names, norm.linear(self.values))
        out = norm.norm.centre(self.out) * norm.norm.weight
        return WriterGroup(self.names, self.values / norm.divisors, out)


Writers = Sequence[WriterGroup]  # all writers of a stream, whose outputs sum to it, in order of the model


def writers_before_attention(model: FrozenModel) -> Iterator[tuple[FrozenHeads, Writers]]:
    """Yield every attention layer with the writers of the stream before it, before its norm.

    The biases of all layers before it, of norms and outputs of attention, are one writer.
    """
    parts = model.embedding_parts
    groups = [WriterGroup(tuple(parts), np.stack(list(parts.values())))]
    biases = np.zeros_like(model.embedding)
    for block in model.blocks:
        constant = [WriterGroup((BIASES,), biases[None])] if biases.any() else []
        yield from ((heads, (*groups, *constant)) for heads in block.heads if heads is not None)
        groups += _written(block)
        biases = biases + sum(heads.constant for heads in block.heads if heads is not None)
        if block.after is not None:
            groups, biases = [group.through(block.after) for group in groups], block.after.apply(biases)


def _written(block: FrozenBlock) -> list[WriterGroup]:
    """Return what heads and feed-forward layers of a block add to the stream."""
    groups = []
    for branch, name in zip(block.branches, block.names, strict=True):
        if isinstance(branch, FrozenHeads):
            values = branch.linear_values if branch.behind is None else branch.linear_values / branch.behind.divisors
            names = tuple(f"{name}.{h}" for h in range(len(values)))
            groups.append(WriterGroup(names, values, branch.output_weights))
        else:
            groups.append(WriterGroup((name,), branch.output[None]))
    return groups


BIAS = "bias"


def writer_names(heads: FrozenHeads, writers: Writers) -> tuple[str, ...]:
    """Return the names of the writers of queries and keys, "bias" last if there is one."""
    names = tuple(name for group in writers for name in group.names)
    return (*names, BIAS) if _has_constant(heads) else names


def query_key_factors(heads: FrozenHeads, writers: Writers, kv_head: int) -> tuple[Array, Array]:
    """Return the queries and keys of the heads of a key head, by writer of the stream before the norm of the layer.

    Queries are (heads of the group, writers, n, d_head), scale included, keys (writers, n, d_head). One group at a time
    bounds the memory: the factors of all heads would be as large as all writers twice.
    """
    layer, x = heads.layer, heads.input
    projected = _project(heads, writers, layer.query_heads(kv_head), kv_head)
    q, k, positions = projected[:-1], projected[-1], np.arange(len(x))
    q = layer.as_queries(q, x, positions, total=q.sum(axis=1, keepdims=True))
    k = layer.as_keys(k, x, positions, total=k.sum(axis=0))
    return q * q.dtype.type(layer.scale), k


def _project(heads: FrozenHeads, writers: Writers, query_heads: Sequence[int], kv_head: int) -> Array:
    """Return queries of some heads, then the keys of one, by writer, (heads + 1, writers, n, d_head), "bias" last."""
    layer, norm, n = heads.layer, heads.before, len(heads.input)
    weight = np.concatenate([layer.W_Q[query_heads], layer.W_K[[kv_head]]])
    h, d, width = weight.shape
    flat = weight.transpose(1, 0, 2).reshape(d, -1)  # d (h dh)
    if norm is not None:  # rows behind the norm are centred, weighted and divided: so are the columns, but the last
        flat = norm.norm.centre((norm.norm.weight[:, None] * flat).T).T
    n_writers, has_constant = sum(len(group.names) for group in writers), _has_constant(heads)
    projected, start = np.empty((n_writers + has_constant, n, h * width), flat.dtype), 0
    for group in writers:
        group.project(flat, out=projected[start : start + len(group.names)])
        start += len(group.names)
    if norm is not None:
        projected[:n_writers] /= norm.divisors
    if has_constant:
        constants = [_constant(heads, layer.W_Q[k], layer.b_Q, k) for k in query_heads]
        projected[n_writers] = np.concatenate([*constants, _constant(heads, layer.W_K[kv_head], layer.b_K, kv_head)])
    by_head = projected.reshape(-1, n, h, width).transpose(2, 0, 1, 3)  # h writer n dh
    return np.ascontiguousarray(by_head)


def _has_constant(heads: FrozenHeads) -> bool:
    """Test if queries or keys have a part that does not depend on the stream."""
    has_norm_bias = heads.before is not None and heads.before.bias is not None
    return has_norm_bias or heads.layer.b_Q is not None or heads.layer.b_K is not None


def _constant(heads: FrozenHeads, weight: Array, biases: Array | None, head: int) -> Array:
    """Return the part of the queries or keys of a head that does not depend on the stream, (d_head,)."""
    constant: Array = np.zeros_like(weight[0]) if biases is None else biases[head]
    of_norm = None if heads.before is None else heads.before.bias
    return constant if of_norm is None else np.asarray(constant + of_norm @ weight)  # [d] dh


@dataclass(frozen=True, eq=False)
class ScoreForm:
    """The bilinear form of one score: scale * x~_i query key^T x~_j^T, all divisors frozen.

    Parameters
    ----------
    query, key
        (d_model + 1, d_head): maps of the input and of the constant coordinate, which holds the bias of the norm too.
    scale
        Factor of the score.
    """

    query: Array
    key: Array
    scale: float


def score_form(heads: FrozenHeads, head: int, query: int, key: int) -> ScoreForm:
    """Return the form of the score of one head between two positions."""
    layer, kv_head = heads.layer, heads.layer.kv_head(head)
    q = np.vstack([layer.W_Q[head], _constant(heads, layer.W_Q[head], layer.b_Q, head)])  # d~ dh
    k = np.vstack([layer.W_K[kv_head], _constant(heads, layer.W_K[kv_head], layer.b_K, kv_head)])
    x, y = heads.input[query], heads.input[key]
    of_query, of_key = layer.with_bias("Q", head), layer.with_bias("K", kv_head)
    return ScoreForm(
        layer.as_queries(q, x, np.array(query), total=x @ of_query[:-1] + of_query[-1]),
        layer.as_keys(k, y, np.array(key), total=y @ of_key[:-1] + of_key[-1]),
        layer.scale,
    )
