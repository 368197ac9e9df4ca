r"""Choice of the gauge in which the weights of a model are cheapest to round; the model computes the same function.

A model is rounded in the basis in which it is stored. Where that basis is free, each part has a closed form:

    residual stream      x R,  R = diag(signs) (H (x) Q)        after the gains of the norms are folded
    values and outputs   W_V G and G^-1 W_O                     balanced, G^T W_V^T W_V G = G^-1 W_O W_O^T G^-T, then R
    queries and keys     W_Q G and W_K G^-T                     the same on unrotated columns; equal norms on a plane

H is a Hadamard matrix of the largest power of two that divides the width, Q a random orthogonal matrix of the rest, so
that no entry of R is much larger than the others: entries of x R are sums over all of x with both signs, and nearly
normally distributed (Chee et al., QuIP, 2023; Ashkboos et al., QuaRot, 2024). LayerNorm, which subtracts the mean,
allows the rotations that preserve the vector of ones.

Balanced weights minimise |W_V|^2 + |W_O|^2 over all G. The scales of feed-forward units with a linear branch are free,
too, but stay as trained: equal sizes before and behind a unit do not lower the errors of rounding. Singular values of a
weight do not change under a rotation of the stream, so that truncated ranks cost the same in every basis of the stream.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import numpy as np

from tnlib import ArgumentError
from tnlib._typing import Array
from tnlib.linalg.orthogonal import qr_positive
from tnlib_adapters.attention.attention import Attention
from tnlib_adapters.attention.head_gauge import Columns, fix_heads
from tnlib_adapters.checkpoints.checkpoint import Checkpoint, accepts_models, as_dense
from tnlib_adapters.checkpoints.residual_stream import read_stream
from tnlib_adapters.transforms.folding import Transformed, fold_norms
from tnlib_adapters.transforms.gauge_fixing import in_every_layer
from tnlib_adapters.transforms.rotation import complement_of_ones, rotate


@accepts_models
def choose_gauge(checkpoint: Checkpoint, *, seed: int = 0) -> Transformed:
    """Return the model in a basis whose weights have entries of nearly equal size, computing the same function.

    Parameters
    ----------
    checkpoint
        Any checkpoint whose attention is not stored as factors.
    seed
        Of signs and of small orthogonal matrices.

    Returns
    -------
    Transformed
        `.checkpoint`, `.done` and `.left`, which names every freedom that the model does not have, and why. The
        unembedding stays tied to the embeddings: `fold` first for one of its own, if that prevents a rotation.

    Raises
    ------
    ArgumentError
        If the attention is stored as factors.

    References
    ----------
    S. Ashkboos et al., "QuaRot: Outlier-Free 4-Bit Inference in Rotated LLMs", NeurIPS 2024.

    Examples
    --------
    >>> import tnlib_adapters
    >>> from tnlib_adapters.reference.model import run
    >>> model = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path("llama"))
    >>> chosen = choose_gauge(model)
    >>> [f"{run(one, [5, 6, 5]).logits.max():.3f}" for one in (model, chosen.checkpoint)]
    ['7.650', '7.650']
    """
    chosen = as_dense("choose_gauge", checkpoint, "choose the gauge")
    done: list[str] = []
    left: list[str] = []
    for step in (rotate_stream, turn_heads):
        chosen = step(chosen, seed, done, left)
    return Transformed(chosen, tuple(done), tuple(left))


def incoherent_rotation(n: int, rng: np.random.Generator) -> Array:
    """Return diag(signs) (H (x) Q) (n, n), H the largest Hadamard matrix of a power of two that divides n."""
    size = n & -n
    rest = qr_positive(rng.standard_normal((n // size, n // size)))[0]
    hadamard: Array = np.ones((1, 1))
    while len(hadamard) < size:
        hadamard = np.kron([[1.0, 1.0], [1.0, -1.0]], hadamard)
    rotation: Array = rng.choice([-1.0, 1.0], n)[:, None] * np.kron(hadamard / np.sqrt(size), rest)
    return rotation


# ------------------------------------------------------------------------------------------------------------- stream


def rotate_stream(checkpoint: Checkpoint, seed: int, done: list[str], left: list[str]) -> Checkpoint:
    """Fold the norms and rotate the stream, if every norm commutes with the rotation afterwards."""
    if checkpoint.wiring.unembedding is None:
        left.append("the residual stream: the model returns it")
        return checkpoint
    folded, d, rng = fold_norms(checkpoint, [], []), checkpoint.sizes.d_model, np.random.default_rng(seed)
    if any(norm.kind == "layer" for norm in read_stream(folded).norms):
        basis = complement_of_ones(d)
        rotation = basis @ incoherent_rotation(d - 1, rng) @ basis.T + 1.0 / d  # the projector on ones
    else:
        rotation = incoherent_rotation(d, rng)
    try:
        rotated = rotate(folded, rotation)
    except ArgumentError as refused:
        left.append(f"the residual stream: {str(refused).removeprefix('rotate: ').rstrip('.')}")
        return checkpoint
    done.append("norms folded, and the residual stream rotated by a Hadamard matrix with signs")
    return rotated


# -------------------------------------------------------------------------------------------------------------- heads


def turn_heads(checkpoint: Checkpoint, seed: int, done: list[str], left: list[str]) -> Checkpoint:
    """Balance the products of all heads, and rotate the columns that are free."""
    first = checkpoint.wiring.layers[0].attention
    if first.latent is not None:
        left.append("heads: their queries, keys and values are made from latent vectors")
        return checkpoint
    done.append("values and outputs of heads, balanced and rotated by a Hadamard matrix with signs")
    layer = checkpoint.attention(0)
    if layer.head_norm is not None:
        left.append("queries and keys: the norms of both are not invariant under a change of basis")
    elif not Columns.of(layer.rotary, layer.d_head).still.size:
        done.append("queries and keys, balanced on every rotary plane")
        left.append("rotations of queries and keys: they must commute with rotary embeddings")
    else:
        done.append("queries and keys, balanced and rotated on columns without rotary embeddings")
    return in_every_layer(checkpoint, functools.partial(turned_heads, seed=seed))


def turned_heads(layer: Attention, *, seed: int) -> Attention:
    """Return the layer with balanced heads, rotated where columns are free."""
    rng = np.random.default_rng(seed)
    balanced = fix_heads(layer, "choose_gauge")
    of_values = np.stack([incoherent_rotation(layer.d_value, rng) for _ in range(layer.kv_heads)])
    new: dict[str, Any] = {
        "W_V": balanced.W_V @ of_values,
        "W_O": balanced.repeated(of_values).transpose(0, 2, 1) @ balanced.W_O,
        "b_V": None if balanced.b_V is None else np.einsum("hi,hij->hj", balanced.b_V, of_values),
    }
    still = Columns.of(layer.rotary, layer.d_head).still
    if still.size and layer.head_norm is None:
        of_keys = np.tile(np.eye(layer.d_head), (layer.kv_heads, 1, 1))
        for matrix in of_keys:
            matrix[np.ix_(still, still)] = incoherent_rotation(len(still), rng)
        for name, rotations in (("Q", balanced.repeated(of_keys)), ("K", of_keys)):
            weight, bias = getattr(balanced, f"W_{name}"), getattr(balanced, f"b_{name}")
            new[f"W_{name}"] = weight @ rotations  # h d [dh] dh
            new[f"b_{name}"] = None if bias is None else np.einsum("hi,hij->hj", bias, rotations)
    arrays: dict[str, Any] = {
        name: None if array is None else array.astype(getattr(layer, name).dtype) for name, array in new.items()
    }
    return replace(balanced, **arrays)
