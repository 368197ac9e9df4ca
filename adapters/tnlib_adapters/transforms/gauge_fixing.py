r"""Gauge fixing of attention layers: one representative of all weights that compute the same function.

The operators of a layer do not determine its weights. With query heads that share a key and value head as one group,

    W_Q G and W_K G^-T      G commuting with the rotations of positions: see `attention.head_gauge`
    W_V H and H^-1 W_O      any invertible H
    b_K                     its contribution common to all scores of a query
    b_V                     absorbed by b_O, as the rows of patterns sum to one
    the order of heads      of groups that share a key head, and of queries within them

are free. Where queries and keys are normalised, G must keep their norm.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, overload

import numpy as np

from tnlib import ArgumentError, ArgumentTypeError
from tnlib._typing import Array
from tnlib_adapters.attention.attention import Attention
from tnlib_adapters.attention.head_gauge import fix_heads, rank_heads
from tnlib_adapters.checkpoints.checkpoint import Checkpoint, accepts_models, as_dense, as_layer
from tnlib_adapters.checkpoints.modified import with_tensors
from tnlib_adapters.factors.projections import NAMES, Projections, put_together


@overload
def fix_gauge(attention: Attention) -> Attention: ...
@overload
def fix_gauge(attention: Checkpoint) -> Checkpoint: ...
@accepts_models
def fix_gauge(attention: Attention | Checkpoint) -> Attention | Checkpoint:
    """Return the layer, or the model, in the gauge that depends only on the function it computes.

    Parameters
    ----------
    attention
        An attention layer, or a checkpoint whose attention is not stored as factors: every layer is fixed.

    Returns
    -------
    Attention or Checkpoint
        The same function of the stream, if rows of patterns sum to one, in the same precision; weights of checkpoints
        in half precision become float32, and are computed when they are read. Per key head,
        W_V is balanced with all W_O that read it, and W_K with all W_Q: columns orthogonal, of equal lengths on both
        sides, descending, those beyond the rank zero; with rotary embeddings this holds for unrotated columns, and
        plane by plane for the others. Biases are one more row; signs are fixed on keys and values. The key bias is
        zero on unrotated columns if there is no soft cap, the value bias if there is an output bias. Heads are sorted
        by the norm of W_O, then of W_Q, the largest first, groups that share a key head before the heads within them;
        with ALiBi and relative biases, which belong to head indices, the order stays. With norms of queries and keys
        only signs and quarter turns of planes are free, rotations where the two weights of a plane are equal, and the
        scale of these weights against each other.

    Raises
    ------
    ArgumentError
        If the attention is stored as factors, or complex.

    References
    ----------
    N. Elhage et al., "A Mathematical Framework for Transformer Circuits" (2021): what a head computes are the products
    :math:`W_Q W_K^T` and :math:`W_V W_O`.

    Examples
    --------
    >>> import numpy as np, tnlib_adapters
    >>> from dataclasses import replace
    >>> layer = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path()).attention(0)
    >>> g = np.random.default_rng(0).standard_normal((16, 16))
    >>> other = {
    ...     "W_V": layer.W_V[::-1] @ g,
    ...     "W_O": np.linalg.inv(g) @ layer.W_O[::-1],
    ...     "b_V": layer.b_V[::-1] @ g,
    ... }
    >>> other |= {name: getattr(layer, name)[::-1] for name in ("W_Q", "W_K", "b_Q", "b_K")}
    >>> one, same = fix_gauge(layer), fix_gauge(replace(layer, **other))
    >>> f"{np.abs(one.W_V - same.W_V).max():.3f}", f"{np.abs(one.W_Q - same.W_Q).max():.3f}"
    ('0.000', '0.000')
    """
    if isinstance(attention, Attention):
        return _fix_layer(attention)
    if not isinstance(attention, Checkpoint):
        raise ArgumentTypeError(
            f"fix_gauge: attention must be an Attention or a Checkpoint, got {type(attention).__name__}; "
            "pass Attention.from_module(...) or open_checkpoint(folder)."
        )
    as_dense("fix_gauge", attention, "fix the gauge", "attention")
    if attention.wiring.layers[0].attention.latent is not None:
        raise ArgumentError(
            f"fix_gauge: attention must hold one weight per projection, got a {attention.wiring.model_type}, whose "
            "queries, keys and values are made from latent vectors; fix one layer, attention(layer).numerator()."
        )
    return in_every_layer(attention, _fix_layer)


def in_every_layer(checkpoint: Checkpoint, change: Callable[[Attention], Attention]) -> Checkpoint:
    """Return the model with every attention layer changed; layers are computed when they are read."""
    # consecutive reads are mostly of one layer, and each tensor needs all of that layer
    compute = functools.lru_cache(maxsize=1)(functools.partial(_tensors, checkpoint, change))
    changes: dict[str, Callable[[], Array]] = {
        name: functools.partial(lambda layer, name: compute(layer)[name], layer, name)
        for layer in range(checkpoint.n_layers)
        for name in _names(checkpoint, layer)
    }
    return with_tensors(checkpoint, changes)


def head_order(attention: Attention) -> Array:
    """Return the order of heads of `fix_gauge`: head p of the fixed layer is head order[p] of this one.

    Parameters
    ----------
    attention
        One layer.

    Returns
    -------
    Array
        (heads,), query heads; those that share a key head stay together.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        As `fix_gauge` does.

    Examples
    --------
    >>> import tnlib_adapters
    >>> layer = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path()).attention(0)
    >>> [int(head) for head in head_order(fix_gauge(layer))]
    [0, 1, 2, 3]
    """
    return _order(fix_heads(as_layer("head_order", attention), "head_order"))


def _fix_layer(layer: Attention) -> Attention:
    fixed = fix_heads(layer, "fix_gauge")
    order, group = _order(fixed), fixed.group_size  # keeps groups together
    return fixed.of_heads(order, order[::group] // group)


def _order(fixed: Attention) -> Array:
    return rank_heads(fixed) if fixed.alibi is None and fixed.relative_bias is None else np.arange(fixed.n_heads)


def _names(checkpoint: Checkpoint, layer: int) -> list[str]:
    """Return the names of the tensors of a layer that change."""
    attention = checkpoint.wiring.layers[layer].attention
    names = [name for linear in attention.projections.values() for name in (linear.weight, linear.bias)]
    return [name for name in names if name] + [norm.weight for norm in attention.head_norms]


def _tensors(checkpoint: Checkpoint, change: Callable[[Attention], Attention], layer: int) -> dict[str, Array]:
    """Return the tensors of a layer, changed."""
    changed, attention = change(checkpoint.attention(layer)), checkpoint.wiring.layers[layer].attention
    arrays: dict[str, Any] = put_together(attention, _side_by_side(changed))
    if changed.head_norm is not None:
        of_norms = changed.head_norm.query, changed.head_norm.key
        arrays |= {norm.weight: w - norm.offset for norm, w in zip(attention.head_norms, of_norms, strict=True)}
    return arrays


def _side_by_side(layer: Attention) -> Projections:
    """Return weights and biases with heads side by side."""
    weights = {name: getattr(layer, f"W_{name.upper()}") for name in NAMES}  # h d dh, or h dh d for "o"
    biases = {name: bias for name in NAMES if (bias := getattr(layer, f"b_{name.upper()}")) is not None}
    return Projections(
        {
            name: w.reshape(-1, w.shape[2]) if name == "o" else w.transpose(1, 0, 2).reshape(w.shape[1], -1)
            for name, w in weights.items()
        },
        {name: bias.reshape(-1) for name, bias in biases.items()},
    )
