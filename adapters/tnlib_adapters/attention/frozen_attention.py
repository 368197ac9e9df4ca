"""One attention layer with frozen patterns: an affine map of the sequence, linear part a sum of Kronecker products.

Also the tensor network diagrams of frozen attention: one layer, a product of layers, a sum over paths, applied to x.
`Diagram.evaluate` takes x (n, d_model), the constant c (n, d_model), and for every layer A (heads, n, n) with B (heads,
d_model, d_model), or with the factors left (heads, d_model, r) and right (heads, r, d_model) of all heads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tnlib import ArgumentError, KroneckerTerms
from tnlib._typing import Array
from tnlib._validate import as_array
from tnlib.drawing.diagram import Diagram, Leg, Node
from tnlib.formats.diagrams import kronecker_terms_diagram

_MOST = 3  # largest number of layers drawn one by one
_DROP = 1.3  # distance from the stream down to the patterns
_REACH = 1.0  # length of an open leg


def of_affine(terms: KroneckerTerms, title: str, *, is_residual: bool) -> Diagram:
    """Return the diagram of terms x + c, plus x if `is_residual`."""
    diagram = _Row(terms)
    diagram.add_layer(terms, "", is_residual=is_residual, has_constant=True)
    return diagram.finished(f"{title}, applied to x, plus the constant c")


def of_product(factors: Sequence[KroneckerTerms], *, constant: bool = False) -> Diagram:
    """Return the diagram of (1 + K_L) ... (1 + K_1) x; the layer applied first is on the right.

    Of many layers, those between the first and the last are one function, "layers 2 to L - 1".
    """
    diagram, count = _Row(factors[0]), len(factors)
    for k, terms in enumerate(factors, 1):
        if count <= _MOST or k in (1, count):
            diagram.add_layer(terms, f"$_{{{k}}}$", is_residual=True, has_constant=constant and k == count)
        elif k == 2:
            diagram.add_function(f"layers 2 to {count - 1}")
    names = [f"(1 + K$_{{{k}}}$)" if count <= _MOST or k in (1, count) else "..." for k in range(count, 0, -1)]
    product = " ".join(name for n, name in enumerate(names) if name != "..." or names[n - 1] != "...")
    return diagram.finished(f"{count} layers, {product} x" + (" + constant c" if constant else ""))


class _Row:
    """Layers in a row from right to left, on two legs: position and stream."""

    def __init__(self, terms: KroneckerTerms) -> None:
        self.sizes = terms.left.shape[1], terms.right[0].shape[0]
        self.nodes, self.legs, self.x = [Node("tensor", "x", (0.0, 0.0))], list[Leg](), 0.0
        self.stream = (0, 0), (0, 1)  # node and axis of position and stream

    def add_function(self, label: str, step: float = 2.0) -> int:
        """Add a function of the stream on the left, and return its node."""
        self.x -= step
        self.nodes.append(Node("function", label, (self.x, 0.0)))
        node = len(self.nodes) - 1
        self._join(node)
        self.stream = (node, 0), (node, 1)
        return node

    def add_layer(self, terms: KroneckerTerms, mark: str, *, is_residual: bool, has_constant: bool) -> None:
        """Add K x, plus x if `is_residual`, plus the constant."""
        start = self.add_function("", 1.2)
        below = kronecker_terms_diagram(terms)
        x0, x1, _, _ = below.bounds
        below, first = below.moved(self.x - 0.5 - x1, -_DROP), len(self.nodes)
        self.nodes += [replace(node, label=node.label + mark if node.label else "") for node in below.nodes]
        total = len(self.nodes)
        end = self.x - 1.0 - (x1 - x0)
        if is_residual:
            self.stream = (start, 2), (start, 3)
        self.x = end
        self.nodes.append(Node("function", "+" if is_residual or has_constant else "", (end, 0.0)))
        if is_residual:
            self._join(total)
        for leg in below.legs:
            a, b = leg.a + first, None if leg.b is None else leg.b + first
            if leg.end is None:
                self.legs.append(replace(leg, a=a, b=b))
            elif leg.name.startswith("b"):
                turn = ((self.nodes[start].position[0], leg.end[1]),)
                self.legs.append(Leg(start, a, "", leg.size, via=turn, axes=(int(leg.name[1]), None)))
            else:
                turn = ((end, leg.end[1]),)
                self.legs.append(Leg(a, total, "", leg.size, via=turn, axes=(None, int(leg.name[1]))))
        if has_constant:
            self.nodes.append(Node("matrix", "c", (end, 1.2)))
            self.legs += [Leg(total + 1, total, "", n, axes=(k, k)) for k, n in enumerate(self.sizes)]
        self.stream = (total, 0), (total, 1)

    def finished(self, title: str) -> Diagram:
        """Return the diagram with open legs on the left."""
        names = zip(("position", "stream"), self.stream, self.sizes, (0.2, -0.2), strict=True)
        for name, (node, axis), n, y in names:
            end, via = (self.x - _REACH, y), ((self.x, y),)
            self.legs.append(Leg(node, None, name, n, end, via, axes=(axis, None)))
        return Diagram(tuple(self.nodes), tuple(self.legs), title)

    def _join(self, node: int) -> None:
        for k, ((source, axis), n) in enumerate(zip(self.stream, self.sizes, strict=True)):
            self.legs.append(Leg(source, node, "", n, axes=(axis, k)))


@dataclass(frozen=True, eq=False, repr=False)
class FrozenAttention:
    r"""A layer with frozen patterns: the affine map ``x -> terms x + constant``; unpacks to the two.

    Addition adds outputs, and `second @ first` is composition. The product of two heads is a virtual head,
    :math:`(A_2 \otimes B_2)(A_1 \otimes B_1) = A_2 A_1 \otimes B_2 B_1`, with the smaller of the two ranks.

    Parameters
    ----------
    terms
        :math:`\sum_h A^h \otimes (W_V^h W_O^h)^T` on arrays (positions, d_model).
    constant
        (positions, d_model): the contribution of the value and output biases.

    References
    ----------
    N. Elhage et al., "A Mathematical Framework for Transformer Circuits" (2021).

    Examples
    --------
    >>> import numpy as np, tnlib_adapters
    >>> layer = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path()).attention(0)
    >>> uniform = layer.frozen(np.tril(np.ones((4, 10, 10))) / np.arange(1, 11)[:, None])
    >>> uniform
    FrozenAttention(4 terms on 10 positions x 64 features, and a constant)
    >>> (uniform @ uniform).terms.ranks
    (16,)
    """

    terms: KroneckerTerms
    constant: Array

    __array_ufunc__ = None  # numpy must defer to __rmatmul__

    def __repr__(self) -> str:
        n, d = self.constant.shape
        return f"FrozenAttention({self.terms.ranks[0]} terms on {n} positions x {d} features, and a constant)"

    def __iter__(self) -> Iterator[Any]:
        return iter((self.terms, self.constant))

    def apply(self, x: Array) -> Array:
        """Return the layer's output (positions, d_model) for x (positions, d_model)."""
        return self.terms.apply(x) + self.constant

    def diagram(self) -> Diagram:
        """Return the diagram for `tnlib.draw`."""
        return of_affine(self.terms, kronecker_terms_diagram(self.terms).title, is_residual=False)

    def __add__(self, other: Any) -> FrozenAttention:
        if not isinstance(other, FrozenAttention):
            return NotImplemented
        return FrozenAttention(self.terms + other.terms, self.constant + other.constant)

    def __matmul__(self, other: Any) -> FrozenAttention:
        if not isinstance(other, FrozenAttention):
            return NotImplemented
        return FrozenAttention(self.terms @ other.terms, self.apply(other.constant))


def as_patterns(method: str, patterns: Array, heads: int) -> Array:
    """Return attention weights (heads, n, n'), validated."""
    patterns = as_array(f"Attention.{method}", "patterns", patterns)
    if patterns.ndim != 3 or len(patterns) != heads:
        raise ArgumentError(
            f"Attention.{method}: patterns must have shape (heads, n, n') with {heads} heads, "
            f"got {patterns.shape}; pass one matrix per head."
        )
    return patterns


def as_divisors(method: str, divisors: Array, n: int) -> Array:
    """Return the divisors of n positions, validated."""
    a = as_array(f"Attention.{method}", "divisors", divisors)
    if a.shape != (n,) or a.dtype.kind == "c" or not (a > 0).all():
        raise ArgumentError(
            f"Attention.{method}: divisors must be {n} positive numbers, one for every position that is attended to, "
            f"got {a.dtype} of shape {a.shape}, the smallest {a.real.min():.3g}; norm_divisors gives them."
        )
    return a
