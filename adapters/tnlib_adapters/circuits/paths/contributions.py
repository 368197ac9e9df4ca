r"""Path expansion of attention layers with frozen patterns: contributions of all paths without enumerating them.

A stack is the product of (1 + K_l), K_l = sum_h A^h (x) (W_V^h W_O^h)^T. It expands into a sum over paths: lists of
heads, at most one per layer. The order of a path is its number of heads. By order, streams S and readouts R follow

    S_l^m = S_(l-1)^m + K_l S_(l-1)^(m-1),        R_(l-1)^m = R_l^m + K_l^T R_l^(m-1)

and the sum over all paths of order i + 1 + j through one head is sum_ij <R_l^j, K_l,h S_(l-1)^i>. Biases enter after
their layer as paths of order 0. The cost is linear in layers times orders; the number of paths is (1 + heads)^layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise, product
from math import prod
from typing import Any

import numpy as np

from tnlib import ArgumentError, ArgumentTypeError, KroneckerTerms, LowRank
from tnlib._typing import Array
from tnlib._validate import as_array, as_count
from tnlib.linalg.threads import parallel_matmul, single_threaded_blas
from tnlib_adapters.attention.validation import as_index
from tnlib_adapters.circuits.arguments import as_directions
from tnlib_adapters.frozen.frozen_stack import FrozenStack, Head


@dataclass(frozen=True, eq=False)
class ConcatenatedHeads:
    """The heads of a layer concatenated: input weights (d, R), output weights (R, d), and the columns of each head."""

    patterns: Array
    into: Array
    out: Array
    head_columns: tuple[slice, ...]
    constant: Array

    @classmethod
    def of(cls, terms: KroneckerTerms, constant: Array) -> ConcatenatedHeads:
        """Return the concatenated heads of one layer; right matrices of the terms act on columns."""
        pairs = [(b.right.T, b.left.T) if isinstance(b, LowRank) else (b.T, np.eye(len(b))) for b in terms.right]
        ends = np.cumsum([0] + [p.shape[1] for p, _ in pairs])
        head_columns = tuple(slice(a, b) for a, b in pairwise(ends))
        into, out = np.concatenate([p for p, _ in pairs], axis=1), np.concatenate([q for _, q in pairs])
        return cls(terms.left, into, out, head_columns, constant)

    def read(self, s: Array) -> list[Array]:
        """Return per head A s W_V, (..., n, r), of streams (..., n, d)."""
        v = _times(s, self.into)  # ... n [d] R
        return [
            a @ v[..., columns] for a, columns in zip(self.patterns, self.head_columns, strict=True)
        ]  # ... n [n'] r

    def write(self, read: Sequence[Array]) -> Array:
        """Return the sum of the head outputs, (..., n, d)."""
        return _times(np.concatenate(read, axis=-1), self.out)  # ... n [R] d

    def write_transposed(self, reading: Array) -> list[Array]:
        """Return per head R W_O^T, (..., n, r), for readouts R (..., n, d)."""
        projected = _times(reading, self.out.T)  # ... n [d] R
        return [projected[..., columns] for columns in self.head_columns]

    def read_transposed(self, by_head: Sequence[Array]) -> Array:
        """Return the readouts pulled back to the input stream of the heads, (..., n, d)."""
        readouts = [a.T @ readout for a, readout in zip(self.patterns, by_head, strict=True)]  # ... n' [n] r
        return _times(np.concatenate(readouts, axis=-1), self.into.T)  # ... n' [R] d


def _times(x: Array, w: Array) -> Array:
    """Return x @ w for x (..., n, d) as one product, threaded by `parallel_matmul`."""
    return parallel_matmul(x.reshape(-1, x.shape[-1]), w).reshape(*x.shape[:-1], w.shape[1])  # (... n) [d] r


def forward_by_order(layers: Sequence[ConcatenatedHeads], x: Array, m: int) -> Iterator[Array]:
    """Yield the streams (order, n, d) before every layer and after the last."""
    s = x[None]
    for layer in layers:
        yield s
        s = with_one_more_head(s, layer.write(layer.read(s)), m)
        s[0] += layer.constant
    yield s


def with_one_more_head(s: Array, through: Array, m: int) -> Array:
    """Return s plus the contribution of one more head, (..., order, n, d); the last order is m + 1 or more."""
    *lead, orders, n, d = s.shape
    out = np.zeros((*lead, min(orders + 1, m + 2), n, d), np.result_type(s, through))
    out[..., :orders, :, :] = s
    highest = out.shape[-3] - 1
    out[..., 1:, :, :] += through[..., :highest, :, :]
    out[..., -1, :, :] += through[..., highest:, :, :].sum(axis=-3)
    return out


def padded(a: Array, m: int, axis: int = 1) -> Array:
    """Pad the axis of orders with zeros up to order m + 1."""
    return np.pad(a, [(0, m + 2 - size if k == axis else 0) for k, size in enumerate(a.shape)])


def by_sum(pairs: Array, m: int) -> Array:
    """Sum pairs (k, j, i) of orders after and before a head by total order i + 1 + j, (k, order)."""
    out = np.zeros((len(pairs), m + 2), pairs.dtype)
    for j in range(pairs.shape[1]):
        for i in range(pairs.shape[2]):
            out[:, min(i + 1 + j, m + 1)] += pairs[:, j, i]
    return out


def heads_of(layers: Sequence[ConcatenatedHeads]) -> tuple[Head, ...]:
    """Return the heads as (layer, head), first layer first."""
    return tuple((number, head) for number, layer in enumerate(layers) for head in range(len(layer.patterns)))


def path_arguments(function: str, stack: Any, x: Any) -> tuple[list[ConcatenatedHeads], Array]:
    """Return the layers of a stack and the input stream, validated."""
    check_stack(function, stack)
    layers = [ConcatenatedHeads.of(layer.terms, layer.constant) for layer in stack.layers]
    x = as_array(function, "x", x)
    if x.shape != layers[0].constant.shape:
        raise ArgumentError(
            f"{function}: x must have shape (positions, features) = {layers[0].constant.shape}, got {x.shape}; "
            "pass the input stream of the first layer, of one sequence."
        )
    return layers, x


def check_stack(function: str, stack: Any) -> None:
    """Raise `ArgumentTypeError` unless `stack` is a FrozenStack."""
    if not isinstance(stack, FrozenStack):
        raise ArgumentTypeError(
            f"{function}: stack must be a FrozenStack, got {type(stack).__name__}; "
            "freeze(checkpoint, patterns) makes one."
        )


def longest_order(function: str, max_order: int | None, n_layers: int) -> int:
    """Return the largest order that is listed separately."""
    return n_layers if max_order is None else min(as_count(function, "max_order", max_order, least=0), n_layers)


@dataclass(frozen=True, eq=False, repr=False)
class Paths:
    """All paths through a stack, evaluated lazily.

    Iteration yields the paths by order, the direct path first, as tuples of heads (layer, head). Indexing with such a
    tuple returns the operator of the path, one Kronecker product (a virtual head).

    Parameters
    ----------
    stack
        Layers with frozen patterns.

    References
    ----------
    N. Elhage et al., "A Mathematical Framework for Transformer Circuits" (2021).

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
        operator = None
        for layer, head in heads:
            terms = layers[layer].terms
            h = as_index("Paths", "head", head, terms.ranks[0])
            of_head = KroneckerTerms(terms.left[[h]], [terms.right[h]])
            operator = of_head if operator is None else of_head @ operator
        return KroneckerTerms(np.eye(n)[None], [np.eye(d)]) if operator is None else operator


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

    References
    ----------
    N. Elhage et al., "A Mathematical Framework for Transformer Circuits" (2021).

    Examples
    --------
    >>> import tnlib_adapters
    >>> from tnlib_adapters.reference.model import run
    >>> model = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path())
    >>> forward = run(model, [5, 6, 7, 8, 5, 6])
    >>> stack = tnlib_adapters.freeze(model, [patterns[0] for patterns in forward.patterns])
    >>> direction = model.read("unembed.weight")[7]
    >>> found = path_contributions(stack, forward.residuals[0][0], direction)
    >>> # no head, one, two; largest single head
    >>> found.by_order[:3].round(1), found.heads[found.last[1].argmax()]
    (array([-0.3,  3.4, -1.4]), (1, 0))
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
    >>> forward = run(model, [5, 6, 7, 8, 5, 6])
    >>> stack = tnlib_adapters.freeze(model, [patterns[0] for patterns in forward.patterns])
    >>> direction = model.read("unembed.weight")[7]
    >>> found = path_contributions(stack, forward.residuals[0][0], direction)
    >>> logit = found.total + model.read("unembed.bias")[7]
    >>> f"{logit:.3f} = {forward.logits[0, -1, 7]:.3f}"
    '1.678 = 1.678'
    >>> found.by_order.round(2)  # of paths through 0, 1, 2 and more heads
    array([-0.29,  3.37, -1.39,  0.  ])
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
        queried = layer.write_transposed(reading)  # per head: k order n r
        pairs = [np.tensordot(a, v, ([2, 3], [1, 2])) for a, v in zip(queried, arrived, strict=True)]  # k j i [n r]
        through.append(np.stack([by_sum(p, m) for p in pairs], axis=-1))  # k order h
        last.append(np.stack([by_sum(p[:, :1], m) for p in pairs], axis=-1))
        reading = with_one_more_head(reading, layer.read_transposed(queried), m)
    by_source = padded((reading * x).sum(axis=-1), m)  # k order n [d]
    by_layer = np.stack(by_bias[::-1], axis=-1)  # k order layer
    chosen = slice(None) if vectors.ndim == 2 else 0  # without the first axis for a single direction
    return PathContributions(
        total=total[chosen],
        by_order=(by_source.sum(axis=2) + by_layer.sum(axis=2))[chosen],
        by_source=by_source[chosen],
        by_bias=by_layer[chosen],
        through=np.concatenate(through[::-1], axis=-1)[chosen],
        last=np.concatenate(last[::-1], axis=-1)[chosen],
        heads=heads_of(layers),
    )


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

    References
    ----------
    N. Elhage et al., "A Mathematical Framework for Transformer Circuits" (2021), path expansion.

    Examples
    --------
    >>> import numpy as np, tnlib_adapters
    >>> from tnlib_adapters.reference.model import run
    >>> model = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path())
    >>> forward = run(model, [5, 6, 7, 5])
    >>> stack = tnlib_adapters.freeze(model, [patterns[0] for patterns in forward.patterns])
    >>> orders = stream_by_order(stack, forward.residuals[0][0])
    >>> orders.shape, bool(np.allclose(orders.sum(axis=0), forward.residuals[-1][0]))
    ((4, 4, 64), True)
    """
    layers, x = path_arguments("stream_by_order", stack, x)
    m = longest_order("stream_by_order", max_order, len(layers))
    *_, last = forward_by_order(layers, x, m)
    return padded(last, m, axis=0)
