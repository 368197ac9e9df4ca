r"""Queries and keys of every writer, with the divisors of all norms frozen.

With x_i = sum_p x_i^p + b the input of an attention layer (writers behind the norm, and the bias of the norm), queries
are linear in the writers once the divisors of norms of heads and of latent vectors are numbers:

    q_i = sum_p q_i^p,      q_i^p = (x_i^p W_Q * a_i) R_i,      score_ij = scale * sum_pp' <q_i^p, k_j^p'> + offset_(i-j)

where a_i are the weights of these norms over their divisors, R_i the rotation to position i, and the writer "bias" has
b W_Q + b_Q. Keys likewise.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tnlib._typing import Array
from tnlib_adapters.attention.attention import Attention
from tnlib_adapters.circuits.attribution.stream_writers import Writers
from tnlib_adapters.transforms.frozen_heads import FrozenHeads

BIAS = "bias"


@dataclass(frozen=True, eq=False)
class QueryKeyFactors:
    """Queries and keys of one attention layer by writer.

    Parameters
    ----------
    names
        Of the writers, "bias" last if there is one.
    queries
        (heads, writers, n, d_head), scale included.
    keys
        (kv_heads, writers, n, d_head).
    """

    names: tuple[str, ...]
    queries: Array
    keys: Array


def query_key_factors(heads: FrozenHeads, writers: Writers) -> QueryKeyFactors:
    """Return the queries and keys of an attention layer by writer of the stream before its norm."""
    layer, inputs = heads.layer, writers.through(heads.before)
    q, k = (_by_head(inputs, heads, w, b) for w, b in ((layer.W_Q, layer.b_Q), (layer.W_K, layer.b_K)))
    if layer.latent_norm is not None:
        x = heads.input
        q, k = layer.latent_norm.queries(q, x), layer.latent_norm.keys(k, x)
    if layer.head_norm is not None:
        norm = layer.head_norm
        q = q * _norm_factors(q.sum(axis=1), norm.query, norm.eps)[:, None]
        k = k * _norm_factors(k.sum(axis=1), norm.key, norm.eps)[:, None]
    if layer.rotary is not None:
        positions = np.arange(q.shape[2])
        q, k = layer.rotary.rotate(q, positions), layer.rotary.rotate(k, positions)
    names = inputs.names if _constant(heads, layer.W_Q, layer.b_Q) is None else (*inputs.names, BIAS)
    return QueryKeyFactors(names, q * q.dtype.type(layer.scale), k)


def _by_head(inputs: Writers, heads: FrozenHeads, weight: Array, bias: Array | None) -> Array:
    """Return the projections of all writers, (heads, writers, n, d_head), the constant last if there is one."""
    h, d, width = weight.shape
    flat = weight.transpose(1, 0, 2).reshape(d, -1)  # d (h dh)
    parts = inputs.project(flat)  # writer n [d] (h dh)
    constant = _constant(heads, weight, bias)
    if constant is not None:
        parts = np.concatenate([parts, np.broadcast_to(constant.reshape(-1), (1, *parts.shape[1:]))])
    return parts.reshape(*parts.shape[:2], h, width).transpose(2, 0, 1, 3)  # h writer n dh


def _constant(heads: FrozenHeads, weight: Array, bias: Array | None) -> Array | None:
    """Return the queries or keys that do not depend on the stream, (heads, d_head); None for a layer without biases."""
    of_norm = None if heads.before is None else heads.before.bias
    if of_norm is None and heads.layer.b_Q is None and heads.layer.b_K is None:
        return None
    constant = np.zeros((len(weight), weight.shape[2]), weight.dtype) if bias is None else bias
    return constant if of_norm is None else constant + of_norm @ weight  # h [d] dh


def _norm_factors(x: Array, weight: Array, eps: float) -> Array:
    """Return the weights of RMSNorm over its divisors, for vectors x (..., d_head)."""
    factors: Array = weight / np.sqrt(np.square(x).mean(axis=-1, keepdims=True) + eps)
    return factors


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
    layer, kv_head = heads.layer, head // (heads.layer.n_heads // heads.layer.kv_heads)
    sides = []
    for position, index, weight, bias, is_query in (
        (query, head, layer.W_Q, layer.b_Q, True),
        (key, kv_head, layer.W_K, layer.b_K, False),
    ):
        constant = _constant(heads, weight, bias)
        row = np.zeros_like(weight[0, 0]) if constant is None else constant[index]
        x = heads.input[position] - (0 if heads.before is None or heads.before.bias is None else heads.before.bias)
        factors = _column_factors(layer, x @ weight[index] + row, heads.input[position], is_query=is_query)
        sides.append(np.vstack([weight[index], row]) * factors)  # d~ dh
    if layer.rotary is not None:
        sides = [layer.rotary.rotate(side, at) for side, at in zip(sides, (query, key), strict=True)]
    return ScoreForm(sides[0], sides[1], layer.scale)


def _column_factors(layer: Attention, vector: Array, x: Array, *, is_query: bool) -> Array:
    """Return what norms multiply the columns of one query or key (d_head,) of the input x (d_model,) with."""
    factors = np.ones_like(vector)
    if layer.latent_norm is not None:
        divided = layer.latent_norm.queries if is_query else layer.latent_norm.keys
        factors = divided(factors[None, None], x[None])[0, 0]
    if layer.head_norm is not None:
        weight = layer.head_norm.query if is_query else layer.head_norm.key
        factors = factors * _norm_factors(factors * vector, weight, layer.head_norm.eps)
    return factors
