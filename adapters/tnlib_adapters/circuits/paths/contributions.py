r"""Path expansion of attention layers with frozen patterns: contributions of all paths without enumerating them.

A stack is the product of (1 + K_l), K_l = sum_h A^h (x) (W_V^h W_O^h)^T. It expands into a sum over paths: lists of
heads, at most one per layer. The order of a path is its number of heads. By order, streams S and readouts R follow

    S_l^m = S_(l-1)^m + K_l S_(l-1)^(m-1),        R_(l-1)^m = R_l^m + K_l^T R_l^(m-1)

and the sum over all paths of order i + 1 + j through one head is sum_ij <R_l^j, K_l,h S_(l-1)^i>. Biases enter after
their layer as paths of order 0. The cost is linear in layers times orders; the number of paths is (1 + heads)^layers.
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
    """All paths through a stack, evaluated lazily.

    Iteration yields the paths by order, the direct path first, as tuples of heads (layer, head). Indexing with such a
    tuple returns the operator of the path, one Kronecker product (a virtual head).

    Parameters
    ----------
    stack
        Layers with frozen patterns.

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
        """Return the number of paths, of one order or in total."""
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
            matrix = terms.right[h]
            left = terms.left[h] if number == 0 else terms.left[h] @ left
            right = matrix if number == 0 else _after(matrix, right)
        return KroneckerTerms(left[None], [right])


@dataclass(frozen=True, eq=False)
class PathContributions:
    """Contributions of the paths of a stack to linear readouts of its output, returned by `path_contributions`.

    For a single direction the first axis is absent from all arrays. The axis of orders has entries for 0, 1, ...,
    max_order heads and a last entry, the remainder, for all longer paths.

    Parameters
    ----------
    total
        (directions,): the readout of the full output, biases included.
    by_order
        (directions, orders): sum equal to the total.
    by_source
        (directions, orders, positions): paths from the stream at a source position; together with `by_bias` they sum to
        `by_order`.
    by_bias
        (directions, orders, layers): paths that start at the biases of a layer.
    through
        (directions, orders, heads): all paths that contain a head. A path of m heads counts for each of them, so the
        sum over heads is m times the entry of `by_order`.
    last
        (directions, orders, heads): the paths whose last head it is. The sum over heads is the entry of `by_order`, for
        every order but 0.
    heads
        The heads as (layer, head), in the order of the axis of heads.
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
    """Return the contributions of all paths to directions of the output at one position, by order, head and source.

    Parameters
    ----------
    stack
        Layers with frozen patterns.
    x
        (n, d_model), the input stream of the first layer.
    directions
        (d_model,) or (directions, d_model), for example a column of the unembedding for a logit, the difference of two
        columns for a logit difference, or the identity for the full output vector.
    position
        Output position.
    max_order
        Longer paths are summed in one entry. None: the number of layers.

    Raises
    ------
    ArgumentError
        If shapes do not match the stack, or `position` is out of range.

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
    vectors = as_directions("path_contributions", directions, d)
    at = as_index("path_contributions", "position", position, n)
    m = longest_order("path_contributions", max_order, len(layers))
    reading = np.zeros((len(np.atleast_2d(vectors)), 1, n, d), np.result_type(x, vectors))  # k order n d
    reading[:, 0, at] = np.atleast_2d(vectors)

    streams = list(forward_by_order(layers, x, m))
    total = reading[:, 0, at] @ streams[-1].sum(axis=0)[at]  # k [d]
    by_bias, through, last = [], [], []
    for layer, s in zip(reversed(layers), reversed(streams[:-1]), strict=True):
        by_bias.append(padded(np.tensordot(reading, layer.constant, 2), m))  # k order [n d]
        arrived = layer.read(s)  # per head: order n r
        queried = layer.ask(reading)  # per head: k order n r
        pairs = [np.tensordot(a, v, ([2, 3], [1, 2])) for a, v in zip(queried, arrived, strict=True)]  # k j i [n r]
        through.append(np.stack([by_sum(p, m) for p in pairs], axis=-1))  # k order h
        last.append(np.stack([by_sum(p[:, :1], m) for p in pairs], axis=-1))
        reading = longer(reading, layer.ask_back(queried), m)
    by_source = padded((reading * x).sum(axis=-1), m)  # k order n [d]
    by_layer = np.stack(by_bias[::-1], axis=-1)  # k order layer
    contributions = PathContributions(
        total=total,
        by_order=by_source.sum(axis=2) + by_layer.sum(axis=2),
        by_source=by_source,
        by_bias=by_layer,
        through=np.concatenate(through[::-1], axis=-1),
        last=np.concatenate(last[::-1], axis=-1),
        heads=heads_of(layers),
    )
    return contributions if vectors.ndim == 2 else _first(contributions)


@single_threaded_blas
def stream_by_order(stack: FrozenStack, x: Array, *, max_order: int | None = None) -> Array:
    """Return the output stream of the last layer as a sum over path orders, (orders, n, d_model).

    Entry m is the sum of all paths of m heads, biases included. The last entry is the exact remainder, all paths of
    more than `max_order` heads; it is zero if `max_order` is None.

    Parameters
    ----------
    stack
        Layers with frozen patterns.
    x
        (n, d_model), the input stream of the first layer.
    max_order
        Largest order. None: the number of layers.

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


def _after(left: Any, right: Any) -> Any:
    """Return one @ right, factored if either of the two is."""
    if isinstance(left, LowRank) and not isinstance(right, LowRank):
        return LowRank(left.left, left.right @ right)
    if isinstance(right, LowRank) and not isinstance(left, LowRank):
        return LowRank(left @ right.left, right.right)
    out: Array | LowRank = left @ right
    return out


def _first(contributions: PathContributions) -> PathContributions:
    arrays = {name: value[0] for name, value in vars(contributions).items() if name != "heads"}
    return PathContributions(**arrays, heads=contributions.heads)
