"""Projections of one attention layer: out of tensors and back, stacked, and as products of matrices."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, TypeVar

import numpy as np

from tnlib._typing import Array
from tnlib_adapters.architectures.grouped_heads import Sizes as Sizes
from tnlib_adapters.architectures.wiring import AttentionWiring, LatentWiring, Linear, NormWiring

NAMES = ("q", "k", "v", "o")
T = TypeVar("T", bound=Any)  # array of some library


@dataclass(frozen=True)
class Projections:
    """Weights that act on rows, x @ weight + bias, with heads concatenated in the inner dimension.

    `weights` holds "q" of shape (d_model, heads * d_head), "k" and "v" of shape (d_model, kv_heads * d_head) and "o"
    of shape (heads * d_head, d_model); `biases` holds those that the architecture has.
    """

    weights: Mapping[str, Array]
    biases: Mapping[str, Array]

    def updated(self, other: Projections) -> Projections:
        """Return the projections with those of `other` replaced."""
        return Projections({**self.weights, **other.weights}, {**self.biases, **other.biases})


@dataclass(frozen=True)
class Products:
    """Weights that act on rows, each a product of matrices: arrays, or tensors of another library."""

    # Name -> matrices whose product is the weight: all or none of "q", "k", "v" and "o", and modules outside the
    # attention. The product of "q", "k" or "v" may have the bias as an additional last row. Biases of modules are not
    # included.
    factors: Mapping[str, tuple[Any, ...]]
    biased: frozenset[str] = frozenset()  # projections with a bias: a row, one of `biases`, or 0
    biases: Mapping[str, Any] = field(default_factory=dict)

    def expand(self, sizes: Sizes) -> Projections:
        """Multiply out: projections by letter, other weights by module."""
        weights, biases = {}, {}
        for name, matrices in self.factors.items():
            product = reduce(operator.matmul, matrices)
            n_in, _ = sizes.sides(name) if name in NAMES else product.shape
            weights[name] = product[:n_in]
            if name in self.biased:
                biases[name] = product[n_in:].sum(0)  # one row, or none
        return Projections(weights, {**biases, **self.biases})


def stored_shapes(attention: AttentionWiring) -> dict[str, tuple[int, ...]]:
    """Return the expected shapes of the attention tensors of one layer, by name."""
    sizes = attention.sizes
    shapes: dict[str, tuple[int, ...]] = {}
    for letters, linear in attention.projections.items():
        sides = sizes.sides(letters)
        shapes[linear.weight] = sides[::-1] if linear.stored == "out_in" else sides
        shapes |= {linear.bias: sides[1:]} if linear.bias else {}
    if attention.relative_bias is not None:
        shapes[attention.relative_bias.table.weight] = (attention.relative_bias.n_bins, sizes.n_heads)
    shapes |= latent_shapes(attention.latent, sizes) if attention.latent else {}
    return shapes | {norm.weight: (sizes.d_head,) for norm in attention.head_norms}


def take_apart(attention: AttentionWiring, get: Callable[[str], Array | None]) -> Projections:
    """Build the projections of a layer from its tensors; `get` returns None for a name that does not exist."""
    weights = multiply_out(attention.latent, attention.sizes, get) if attention.latent else {}
    biases: dict[str, Array] = {}
    for letters, linear in attention.projections.items():
        weight, bias = get(linear.weight), get(linear.bias) if linear.bias else None
        if weight is not None:
            weights |= _split(attention, letters, linear.on_rows(weight))
        if bias is not None:
            biases |= _split(attention, letters, bias)
    return Projections(weights, biases)


def put_together(attention: AttentionWiring, projections: Projections) -> dict[str, Array]:
    """Return the tensors of a layer as the architecture stores them: the inverse of `take_apart`."""
    tensors = join_modules(attention, projections, np.concatenate)
    return {name: np.ascontiguousarray(values) for name, values in tensors.items()}


def join_modules(
    attention: AttentionWiring, projections: Projections, concatenate: Callable[[list[Any], int], Any]
) -> dict[str, Any]:
    """Return the tensors of a layer, views if possible, in the library of `concatenate`."""
    tensors: dict[str, Any] = {}
    for letters, linear in attention.projections.items():
        weight = join([projections.weights[name] for name in letters], attention.group_layout, concatenate)  # in out
        tensors[linear.weight] = linear.on_rows(weight)  # transposed again
        if all(name in projections.biases for name in letters):
            biases = [projections.biases[name] for name in letters]
            tensors[f"{linear.module}.bias"] = join(biases, attention.group_layout, concatenate)
    return tensors


def columns_of_head(attention: AttentionWiring, letters: str, name: str, head: int) -> slice:
    """Return the slice of a query head in the inner dimension of the module that holds the projection."""
    sizes = attention.sizes
    columns = _split(attention, letters, np.arange(sum(sizes.widths[other] for other in letters)))[name]
    width, number = sizes.of_head(name), head if name in "qo" else sizes.kv_head(head)
    begin = int(columns[number * width])
    return slice(begin, begin + width)


def _split(attention: AttentionWiring, letters: str, fused: Array) -> dict[str, Array]:
    """Split a fused weight or bias into projections along its last axis."""
    sizes = attention.sizes
    if len(letters) == 1:
        return {letters: fused}
    if attention.fused == "blocks":
        ends = np.cumsum([sizes.widths[name] for name in letters])[:-1]
        return dict(zip(letters, np.split(fused, ends, axis=-1), strict=True))
    shape = (*fused.shape[:-1], sizes.kv_heads, -1, sizes.d_head)
    by_group = fused.reshape(shape)  # ... kv (queries of the group, its key, its value) dh
    parts = (by_group[..., :-2, :], by_group[..., -2, :], by_group[..., -1, :])
    return {name: part.reshape(*fused.shape[:-1], -1) for name, part in zip("qkv", parts, strict=True)}


def join(parts: list[T], groups: tuple[int, int] | None, concatenate: Callable[[list[T], int], T]) -> T:
    """Concatenate projections along the last axis; with `groups`, those of `AttentionWiring`, by key head."""
    if len(parts) == 1:
        return parts[0]
    if groups is None:
        return concatenate(parts, -1)
    n_groups, d_head = groups
    legs = [part.reshape(*part.shape[:-1], n_groups, -1, d_head) for part in parts]  # ... group heads dh
    joined: T = concatenate(legs, -2).reshape(*parts[0].shape[:-1], sum(part.shape[-1] for part in parts))
    return joined


def stack(projections: Projections, sizes: Sizes) -> Array:
    """Return these weights as one array (projection, key head, d_model, d_head).

    Query heads that share a key and value head are along the first axis: their queries, the key, the value, their
    outputs.
    """
    parts = []
    for name in NAMES:
        weight = projections.weights[name]
        on_columns = weight.T if name == "o" else weight  # d_model (kv head of kv dh)
        by_group = on_columns.reshape(sizes.d_model, sizes.kv_heads, -1, sizes.d_head)
        parts.append(by_group.transpose(2, 1, 0, 3))  # (head of kv) kv d dh
    return np.concatenate(parts)


def unstack(x: Array) -> Projections:
    """Undo `stack`."""
    weights = {}
    for name, part in rows_of_stack(len(x)).items():
        flat = x[part].transpose(2, 1, 0, 3).reshape(x.shape[2], -1)  # d_model (kv head of kv dh)
        weights[name] = flat.T if name == "o" else flat
    return Projections(weights, {})


def rows_of_stack(n_rows: int) -> dict[str, slice]:
    """Return the slice of every projection along the first axis of a stack with `n_rows` entries.

    >>> rows_of_stack(6)["k"]
    slice(2, 3, None)
    """
    group = n_rows // 2 - 1  # query heads of a key head, and as many outputs; one key, one value
    ends = (0, group, group + 1, group + 2, n_rows)
    return {name: slice(*ends[k : k + 2]) for k, name in enumerate(NAMES)}


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
