r"""Paths through attention layers with fixed patterns, and what all of them contribute, without listing them.

A stack is the product of (1 + K_l), K_l = sum_h A^h (x) (W_V^h W_O^h)^T, and the sum over all paths: lists of heads, at
most one a layer. Their order is the count of their heads. Sorted by order, streams go forward and readings go back,

    S_l^m = S_(l-1)^m + K_l S_(l-1)^(m-1),        R_(l-1)^m = R_l^m + K_l^T R_l^(m-1)

and all paths of order i + 1 + j through one head are sum_ij <R_l^j, K_l,h S_(l-1)^i>. Biases enter behind their layer,
as paths of order 0 from there. The work grows with layers and orders, the count of paths as (1 + heads)^layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, pairwise, product
from math import prod
from typing import Any

import numpy as np

from tnlib import ArgumentError, ArgumentTypeError, KroneckerTerms, LowRank
from tnlib._typing import Array
from tnlib._validate import as_count
from tnlib.linalg.threads import single_threaded_blas
from tnlib_adapters.attention.frozen.residual_product import Head
from tnlib_adapters.attention.frozen.stack import FrozenStack
from tnlib_adapters.attention.indices import as_index
from tnlib_adapters.circuits.paths.path_orders import (
    by_sum,
    check_stack,
    forward_by_order,
    heads_of,
    longer,
    longest_order,
    padded,
    path_arguments,
)
from tnlib_adapters.circuits.tokens.targets import as_directions


@dataclass(frozen=True, eq=False, repr=False)
class Paths:
    """All paths through a stack, each made when it is asked for.

    Iterating yields the paths, by order, the direct one first: tuples of heads (layer, head). Indexed by such a tuple
    it returns the operator of the path, one Kronecker product: a virtual head.

    Parameters
    ----------
    stack
        Layers with fixed patterns.

    Examples
    --------
    >>> import numpy as np, tnlib_adapters
    >>> model = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path())
    >>> uniform = np.tril(np.ones((4, 10, 10))) / np.arange(1, 11)[:, None]
    >>> paths = Paths(tnlib_adapters.freeze(model, [uniform, uniform]))
    >>> len(paths), list(paths)[-1]
    (25, ((0, 3), (1, 3)))
    >>> paths[(0, 3), (1, 3)].right[0].ranks                         # as narrow as a head
    (16,)
    """

    stack: FrozenStack

    def __post_init__(self) -> None:
        check_stack("Paths", self.stack)

    def __repr__(self) -> str:
        return f"Paths({self.count():,} through {self.stack!r})"

    def __len__(self) -> int:
        return self.count()

    def count(self, order: int | None = None) -> int:
        """Return how many paths there are, of one order or in all."""
        heads = self.stack.operator.ranks
        if order is None:
            return prod(1 + h for h in heads)
        return sum(prod(chosen) for chosen in combinations(heads, as_count("Paths.count", "order", order, least=0)))

    def __iter__(self) -> Iterator[tuple[Head, ...]]:
        heads = self.stack.operator.ranks
        for order in range(len(heads) + 1):
            for layers in combinations(range(len(heads)), order):
                for chosen in product(*(range(heads[layer]) for layer in layers)):
                    yield tuple(zip(layers, chosen, strict=True))

    def __getitem__(self, path: tuple[Head, ...]) -> KroneckerTerms:
        layers = self.stack.layers
        n, d = layers[0].constant.shape
        if not isinstance(path, tuple) or not all(isinstance(head, tuple) and len(head) == 2 for head in path):
            raise ArgumentTypeError(
                f"Paths: path must be a tuple of heads (layer, head), got {path!r}; one head alone is ((0, 3),)."
            )
        heads = [(as_index("Paths", "layer", layer, len(layers)), head) for layer, head in path]
        if any(a >= b for (a, _), (b, _) in pairwise(heads)):
            raise ArgumentError(
                f"Paths: path must go up from layer to layer, got {path}; name each layer at most once."
            )
        left: Array = np.eye(n)
        right: Any = np.eye(d)
        for number, (layer, head) in enumerate(heads):
            terms = layers[layer].terms
            h = as_index("Paths", "head", head, terms.ranks[0])
            one = terms.right[h]
            left = terms.left[h] if number == 0 else terms.left[h] @ left
            right = one if number == 0 else _after(one, right)
        return KroneckerTerms(left[None], [right])


@dataclass(frozen=True, eq=False)
class PathContributions:
    """What the paths of a stack add to some readings of its output; made by `path_contributions`.

    Where one direction was given, the first leg is missing everywhere. The leg of orders has an entry for 0, 1, ...,
    max_order heads and a last one for all longer paths together: the remainder.

    Parameters
    ----------
    total
        (directions,): the reading itself, bias and all.
    by_order
        (directions, orders): sums to the total.
    by_source
        (directions, orders, positions): of paths that begin in the stream at a position; with `by_bias` they sum to
        `by_order`.
    by_bias
        (directions, orders, layers): of paths that begin in the biases of a layer.
    through
        (directions, orders, heads): of all paths through a head, whatever else they go through. A path of m heads
        counts for each of them, so that the sum over heads is m times that of the order.
    last
        (directions, orders, heads): of the paths whose last head it is. The sum over heads is that of the order, for
        every order but 0.
    heads
        Which head is which, (layer, head).
    """

    total: Array
    by_order: Array
    by_source: Array
    by_bias: Array
    through: Array
    last: Array
    heads: tuple[Head, ...]


@single_threaded_blas
def path_contributions(
    stack: FrozenStack, x: Array, directions: Array, *, position: int = -1, max_order: int | None = None
) -> PathContributions:
    """Return what all paths add to directions of the output at one position: by order, by head, by source position.

    Parameters
    ----------
    stack
        Layers with fixed patterns.
    x
        (n, d_model), the stream in front of the first layer.
    directions
        (d_model,) or (directions, d_model): a logit is the column of the unembedding, a difference of two logits that
        of two columns. The identity gives the whole output vector.
    position
        Where the output is read.
    max_order
        Longer paths are summed in one entry. None: up to the count of layers.

    Raises
    ------
    ArgumentError
        If shapes do not fit the stack, or there is no such position.

    References
    ----------
    N. Elhage et al., "A Mathematical Framework for Transformer Circuits" (2021).

    Examples
    --------
    >>> import numpy as np, tnlib_adapters
    >>> from tnlib_adapters.reference.model import run
    >>> model = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path())
    >>> seen = run(model, [5, 6, 7, 8, 5, 6])
    >>> stack = tnlib_adapters.freeze(model, [patterns[0] for patterns in seen.patterns])
    >>> found = path_contributions(stack, seen.residuals[0][0], model.read("unembed.weight")[7])
    >>> bool(np.isclose(found.total + model.read("unembed.bias")[7], seen.logits[0, -1, 7]))
    True
    >>> bool(np.isclose(found.by_order.sum(), found.total))
    True
    """
    layers, x = path_arguments("path_contributions", stack, x)
    n, d = x.shape
    given = as_directions("path_contributions", directions, d)
    at = as_index("path_contributions", "position", position, n)
    m = longest_order("path_contributions", max_order, len(layers))
    reading = np.zeros((len(np.atleast_2d(given)), 1, n, d), np.result_type(x, given))  # k order n d
    reading[:, 0, at] = np.atleast_2d(given)

    streams = list(forward_by_order(layers, x, m))
    total = reading[:, 0, at] @ streams[-1].sum(axis=0)[at]  # k [d]
    by_bias, through, last = [], [], []
    for layer, s in zip(reversed(layers), reversed(streams[:-1]), strict=True):
        by_bias.append(padded(np.tensordot(reading, layer.constant, 2), m))  # k order [n d]
        arrived = layer.read(s)  # per head: order n r
        asked = layer.ask(reading)  # per head: k order n r
        pairs = [np.tensordot(a, v, ([2, 3], [1, 2])) for a, v in zip(asked, arrived, strict=True)]  # k j i [n r]
        through.append(np.stack([by_sum(p, m) for p in pairs], axis=-1))  # k order h
        last.append(np.stack([by_sum(p[:, :1], m) for p in pairs], axis=-1))
        reading = longer(reading, layer.ask_back(asked), m)
    by_source = padded((reading * x).sum(axis=-1), m)  # k order n [d]
    by_layer = np.stack(by_bias[::-1], axis=-1)  # k order layer
    found = PathContributions(
        total=total,
        by_order=by_source.sum(axis=2) + by_layer.sum(axis=2),
        by_source=by_source,
        by_bias=by_layer,
        through=np.concatenate(through[::-1], axis=-1),
        last=np.concatenate(last[::-1], axis=-1),
        heads=heads_of(layers),
    )
    return found if given.ndim == 2 else _first(found)


@single_threaded_blas
def stream_by_order(stack: FrozenStack, x: Array, *, max_order: int | None = None) -> Array:
    """Return the stream behind the last layer as a sum over orders of paths, (orders, n, d_model).

    Entry m is the sum of all paths of m heads, biases included; the last entry that of all paths of more than
    `max_order` heads, the exact remainder, which is zero where `max_order` is None.

    Parameters
    ----------
    stack
        Layers with fixed patterns.
    x
        (n, d_model), the stream in front of the first layer.
    max_order
        None: the count of layers.

    Examples
    --------
    >>> import numpy as np, tnlib_adapters
    >>> from tnlib_adapters.reference.model import run
    >>> model = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path())
    >>> seen = run(model, [5, 6, 7, 5])
    >>> stack = tnlib_adapters.freeze(model, [patterns[0] for patterns in seen.patterns])
    >>> orders = stream_by_order(stack, seen.residuals[0][0])
    >>> orders.shape, bool(np.allclose(orders.sum(axis=0), seen.residuals[-1][0]))
    ((4, 4, 64), True)
    """
    layers, x = path_arguments("stream_by_order", stack, x)
    m = longest_order("stream_by_order", max_order, len(layers))
    last = list(forward_by_order(layers, x, m))[-1]
    out: Array = padded(last[None], m)[0]
    return out


def _after(one: Any, right: Any) -> Any:
    """Return one @ right, as factors wherever one of them is."""
    if isinstance(one, LowRank) and not isinstance(right, LowRank):
        return LowRank(one.left, one.right @ right)
    if isinstance(right, LowRank) and not isinstance(one, LowRank):
        return LowRank(one @ right.left, right.right)
    out: Array | LowRank = one @ right
    return out


def _first(found: PathContributions) -> PathContributions:
    arrays = {name: value[0] for name, value in vars(found).items() if name != "heads"}
    return PathContributions(**arrays, heads=found.heads)
