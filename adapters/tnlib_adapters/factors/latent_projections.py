"""Projections of attention whose queries, keys and values are made from low-rank latent vectors, multiplied out."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tnlib._typing import Array
from tnlib_adapters.architectures.attention_sizes import Sizes
from tnlib_adapters.architectures.wiring import LatentWiring, Linear, NormWiring


def multiply_out(latent: LatentWiring, sizes: Sizes, get: Callable[[str], Array | None]) -> dict[str, Array]:
    """Return the weights "q", "k" and "v" up to the divisors of the norms in between, whose weights are included.

    Heads are side by side. The rotated columns of queries and keys come first; those of the keys are repeated for every
    head. `get` returns None for a tensor that does not exist; weights that need it are left out.
    """
    weights: dict[str, Array] = {}
    n, d, plain = sizes.n_heads, sizes.d_model, sizes.d_head - latent.n_rotated
    query_down = None if latent.query_down is None else _rows(latent.query_down, get)
    query = _through(latent.query_norm, _rows(latent.query_up, get), get)
    if query is not None and (query_down is not None or latent.query_down is None):
        query = query if query_down is None else query_down @ query  # d [r] (h dh)
        heads = query.reshape(d, n, -1)
        weights["q"] = np.concatenate([heads[..., plain:], heads[..., :plain]], axis=-1).reshape(d, -1)
    down, up = _rows(latent.down, get), _through(latent.norm, _rows(latent.up, get), get)
    if down is not None and up is not None:
        heads = (down[:, : latent.rank] @ up).reshape(d, n, -1)  # d [r] (h (plain value))
        rotated = np.broadcast_to(down[:, None, latent.rank :], (d, n, latent.n_rotated))
        weights["k"] = np.concatenate([rotated, heads[..., :plain]], axis=-1).reshape(d, -1)
        weights["v"] = np.ascontiguousarray(heads[..., plain:]).reshape(d, -1)
    return weights


def latent_shapes(latent: LatentWiring, sizes: Sizes) -> dict[str, tuple[int, ...]]:
    """Return the shapes that the tensors must have, by name."""
    plain, into_heads = sizes.d_head - latent.n_rotated, latent.query_rank or sizes.d_model
    shapes = {
        latent.query_up.weight: (sizes.widths["q"], into_heads),
        latent.down.weight: (latent.rank + latent.n_rotated, sizes.d_model),
        latent.norm.weight: (latent.rank,),
        latent.up.weight: (sizes.n_heads * (plain + sizes.d_value), latent.rank),
    }
    if latent.query_down is not None and latent.query_norm is not None:
        shapes |= {latent.query_down.weight: (into_heads, sizes.d_model), latent.query_norm.weight: (into_heads,)}
    return shapes


def _rows(linear: Linear, get: Callable[[str], Array | None]) -> Array | None:
    weight = get(linear.weight)
    return None if weight is None else linear.on_rows(weight)


def _through(norm: NormWiring | None, weight: Array | None, get: Callable[[str], Array | None]) -> Array | None:
    """Return a weight (in, out) times the weights of the norm that it reads from; None if one of them is missing."""
    if norm is None or weight is None:
        return weight
    factors = get(norm.weight)
    return None if factors is None else (norm.offset + factors)[:, None] * weight
