"""Diagrams of einsum expressions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tnlib._errors import ArgumentError, ArgumentTypeError
from tnlib._typing import Array
from tnlib._validate import as_array, as_sizes, plural
from tnlib.drawing.diagram import Diagram, Leg, Node, Point
from tnlib.drawing.layout import is_diagonal, node_kind, plain_kind, point_towards

_COLUMN, _ROW = 1.3, 1.2  # width and height of a cell of the layout
_REACH = 0.75  # length of an open leg
_DETOUR = 0.8  # distance of a bond from the nodes around which it runs


def einsum_diagram(equation: str, tensors: Mapping[str, Any], layout: str | None = None) -> Diagram:
    r"""Return the diagram of an einsum: a shape per tensor, a line per index; shared indices are summed over.

    An index of three tensors, or of two and the result, runs through a copy tensor. An index of one tensor that is not
    in the result ends in a copy tensor of one leg: a vector of ones. The kinds of tensors are measured; an identity
    matrix is drawn as a plain line. The open legs are the indices of the result.

    Parameters
    ----------
    equation
        As for `numpy.einsum`, with the result: "ij,j->i". If a term contains a space, indices are words:
        "query d, key d -> query key".
    tensors
        From the label of each tensor, in the order of the terms, to its array, or to its shape if there is no array.
        Spaces around a label are not shown: they distinguish two tensors of the same label.
    layout
        Lines of labels and names of indices, separated by spaces, with "." for an empty cell. An open leg points to the
        cell of its index; a copy tensor stands in the cell of its index. By default all tensors stand in one row.

    Examples
    --------
    >>> import numpy as np
    >>> product = einsum_diagram("ij,j->i", {"A": np.ones((3, 4)), "v": np.ones(4)})
    >>> product.bonds, product.open_legs
    ((('j', 4),), (('i', 3),))
    """
    terms, result = _parse(equation)
    if not isinstance(tensors, Mapping) or len(tensors) != len(terms):
        size = len(tensors) if isinstance(tensors, Mapping) else type(tensors).__name__
        raise ArgumentError(
            f"einsum_diagram: tensors must be a dict with a label for each of the {len(terms)} terms, got {size}; "
            "name them in the order of the equation."
        )
    operands = [_as_operand(label, value, term) for (label, value), term in zip(tensors.items(), terms, strict=True)]
    return _EinsumLayout(operands, result, layout).diagram()


@dataclass(frozen=True)
class _Operand:
    label: str
    term: tuple[str, ...]
    shape: tuple[int, ...]
    array: Array | None  # None if only the shape is known


def _parse(equation: Any) -> tuple[list[tuple[str, ...]], tuple[str, ...]]:
    """Return the indices of every term, and those of the result."""
    if not isinstance(equation, str) or equation.count("->") != 1:
        raise ArgumentError(
            f"einsum_diagram: equation must be text with one '->', got {equation!r}; write it like 'ij,j->i'."
        )
    left, right = equation.split("->")
    texts = [text.strip() for text in (*left.split(","), right)]
    has_words = any(" " in text for text in texts)
    *terms, result = [tuple(text.split()) if has_words else tuple(text) for text in texts]
    if missing := set(result) - {i for term in terms for i in term}:
        raise ArgumentError(
            f"einsum_diagram: indices of the result must be those of tensors, got {min(missing)!r}; correct equation."
        )
    if len(set(result)) < len(result):
        raise ArgumentError(f"einsum_diagram: the result must have every index once, got {equation!r}; correct it.")
    return terms, result


def _as_operand(label: str, value: Any, term: tuple[str, ...]) -> _Operand:
    array = None
    if isinstance(value, tuple):
        shape = as_sizes("einsum_diagram", label, value) if value else ()
    elif np.ndim(value) == 0:
        shape = ()
    else:
        array = as_array("einsum_diagram", label, value)
        shape = array.shape
    if len(shape) != len(term):
        raise ArgumentError(
            f"einsum_diagram: {label} must have {plural(len(term), 'leg')}, got shape {shape}; "
            f"its term is {' '.join(term)!r}."
        )
    return _Operand(label, term, shape, array)


def _index_sizes(operands: Sequence[_Operand]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for operand in operands:
        for index, n in zip(operand.term, operand.shape, strict=True):
            if sizes.setdefault(index, n) != n:
                raise ArgumentError(
                    f"einsum_diagram: index {index} must have one size, got {sizes[index]} and {n}; check shapes."
                )
    return sizes


def _parse_layout(layout: str | None, operands: Sequence[_Operand]) -> tuple[list[Point], dict[str, Point]]:
    """Return the position of every operand, and of every index named in the layout; equal labels count in order."""
    if layout is not None and not isinstance(layout, str):
        raise ArgumentTypeError(f"einsum_diagram: layout must be text, got {type(layout).__name__}; write lines.")
    labels = [operand.label.strip() for operand in operands]
    rows = [labels] if layout is None else [line.split() for line in layout.splitlines() if line.strip()]
    cells: dict[str, list[Point]] = {}
    for y, row in enumerate(rows):
        for x, name in enumerate(row):
            cells.setdefault(name, []).append((_COLUMN * x, -_ROW * y))
    indices = {name: points[0] for name, points in cells.items() if name not in (*labels, ".")}
    positions = []
    for label in labels:
        if not cells.get(label):
            raise ArgumentError(
                f"einsum_diagram: layout must have a place for every tensor, got none for {label}; add its label."
            )
        positions.append(cells[label].pop(0))
    return positions, indices


class _EinsumLayout:
    """Positions of the operands, copy tensors and open legs of an einsum."""

    def __init__(self, operands: Sequence[_Operand], result: Sequence[str], layout: str | None) -> None:
        self.operands, self.result = operands, result
        self.sizes = _index_sizes(operands)
        self.positions, self.index_cells = _parse_layout(layout, operands)
        self.index_ends = IndexEnds([operand.term for operand in operands], result)
        self.positions += [self.index_cells.get(i) or self._below_holders(i) for i in self.index_ends.copy_tensors]
        self.ends = self._open_ends()

    def _below_holders(self, index: str) -> Point:
        xs, ys = zip(*(self.positions[k] for k in self.index_ends.holders[index]), strict=True)
        return sum(xs) / len(xs), min(ys) - _ROW

    def _open_ends(self) -> dict[str, Point]:
        """Return the ends of open legs: towards their cell of the layout, or away from the other nodes."""
        ends: dict[str, Point] = {}
        for root in dict.fromkeys(map(self.index_ends.root, self.result)):
            of_root = [i for i in self.result if self.index_ends.root(i) == root]
            free = [i for i in of_root if i not in self.index_cells or i in self.index_ends.copy_tensors]
            x, y = self.positions[root]
            for i, angle in zip(free, self._outward_angles(root, len(free)), strict=True):
                ends[i] = (x + _REACH * math.cos(angle), y + _REACH * math.sin(angle))
            ends |= {i: point_towards((x, y), self.index_cells[i], _REACH) for i in of_root if i not in free}
        return ends

    def _outward_angles(self, root: int, count: int) -> list[float]:
        """Return the angles of `count` open legs, side by side in the direction away from the other nodes."""
        if len(self.positions) == 1 and count != 1:
            return [math.pi - 2 * math.pi * k / count for k in range(count)]
        xs, ys = zip(*self.positions, strict=True)
        x, y = self.positions[root]
        if x == min(xs):
            outward = math.pi
        elif x == max(xs):
            outward = 0.0
        else:
            outward = math.pi / 2 if y == max(ys) > min(ys) else -math.pi / 2
        side = -1 if outward in (0.0, math.pi / 2) else 1  # in reading order: from above, and from the left
        spread = min(math.pi / 4, math.pi / max(1, count))
        return [outward + side * spread * (k - (count - 1) / 2) for k in range(count)]

    def diagram(self) -> Diagram:
        """Return nodes and legs."""
        nodes = [self._node(k, operand) for k, operand in enumerate(self.operands)]
        nodes += [Node("delta", "", self.positions[k]) for k in self.index_ends.copy_tensors.values()]
        index_ends = self.index_ends
        legs = [
            Leg(a, b, name, self.sizes[i], via=self._detour(a, b), axes=axes)
            for i, a, b, name, axes in index_ends.bonds()
        ]
        legs += [
            Leg(index_ends.root(i), None, i, self.sizes[i], self.ends[i], axes=index_ends.open_axes(i))
            for i in self.result
        ]
        return Diagram((*nodes,), (*legs,))

    def _node(self, k: int, operand: _Operand) -> Node:
        position, a, label = self.positions[k], operand.array, operand.label.strip()
        if a is None:
            return Node(plain_kind(len(operand.shape)), label, position)
        index = operand.term[0] if a.ndim == 1 else None
        if index in self.index_ends.copy_tensors and len(self.index_ends.holders[index]) > 1:
            return Node("weights", label, position)
        if is_diagonal(a):
            is_identity = bool((np.diag(a) == 1).all())
            return Node("text", "", position) if is_identity else Node("weights", label, position)
        leg_ends = [self.index_ends.far_end(i, k, self.positions, self.ends) for i in operand.term]
        kind, direction = node_kind(a, leg_ends, position)
        return Node(kind, "" if kind == "delta" else label, position, direction)

    def _detour(self, a: int, b: int) -> tuple[Point, ...]:
        """Return the points through which a bond runs around its own node (a trace) or nodes between its ends."""
        (x, y), (u, v) = self.positions[a], self.positions[b]
        if a == b:
            half = 0.55 * _COLUMN
            return (x + half, y), (x + half, y + _DETOUR), (x - half, y + _DETOUR), (x - half, y)
        others = [point for k, point in enumerate(self.positions) if k not in (a, b)]
        if y == v and any(q == y and min(x, u) < p < max(x, u) for p, q in others):
            return (x, y + _DETOUR), (u, v + _DETOUR)
        if x == u and any(p == x and min(y, v) < q < max(y, v) for p, q in others):
            return (x - _DETOUR, y), (u - _DETOUR, v)
        return ()


class IndexEnds:
    """The nodes that every index joins: tensors 0, 1, ... with the indices `terms`, and copy tensors behind them.

    Ends of an index are tensors and, for an index of `result`, the open leg.
    """

    def __init__(self, terms: Sequence[Sequence[str]], result: Sequence[str]) -> None:
        self.holders: dict[str, list[int]] = {}  # tensors that have the index
        self.axes: dict[str, list[int]] = {}  # axes of these tensors
        for k, term in enumerate(terms):
            for axis, index in enumerate(term):
                self.holders.setdefault(index, []).append(k)
                self.axes.setdefault(index, []).append(axis)
        joined = [index for index, holders in self.holders.items() if len(holders) + (index in result) != 2]
        self.copy_tensors = {index: len(terms) + n for n, index in enumerate(joined)}

    def bonds(self) -> Iterator[tuple[str, int, int, str, tuple[int, int | None]]]:
        """Return index, nodes, name and axes of every bond; of the bonds of a copy tensor one has a name."""
        for index, holders in self.holders.items():
            if index in self.copy_tensors:
                for n, k in enumerate(holders):
                    yield index, k, self.copy_tensors[index], "" if n else index, (self.axes[index][n], None)
            elif len(holders) == 2:
                yield index, holders[0], holders[1], index, (self.axes[index][0], self.axes[index][1])

    def root(self, index: str) -> int:
        """Return the node from which the open leg of an index starts."""
        return self.copy_tensors.get(index, self.holders[index][0])

    def open_axes(self, index: str) -> tuple[int | None, None]:
        """Return the axes of the open leg of an index."""
        return None if index in self.copy_tensors else self.axes[index][0], None

    def far_end(self, index: str, k: int, positions: Sequence[Point], ends: Mapping[str, Point]) -> Point:
        """Return the other end of the leg `index` of tensor k; `ends` are those of open legs."""
        if index in self.copy_tensors:
            return positions[self.copy_tensors[index]]
        others = [other for other in self.holders[index] if other != k]
        return positions[others[0]] if others else ends.get(index, positions[k])
