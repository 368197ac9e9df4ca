"""The diagram of an einsum: what is written as letters, drawn as lines."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tnlib._errors import ArgumentError, ArgumentTypeError
from tnlib._validate import as_array, as_sizes, so_many
from tnlib.drawing.graph import Diagram, Leg, Node, Point
from tnlib.drawing.networks import measured

_STEP = (1.4, 1.2)  # from a column to the next, from a row to the next
_REACH = 0.75  # of open legs
_OVER = 0.8  # how far a bond goes round what stands between its ends


def einsum_diagram(equation: str, tensors: Mapping[str, Any], layout: str | None = None) -> Diagram:
    r"""Describe an einsum: a shape per tensor, a line per index, summed over where it joins two shapes.

    An index of three tensors, or of two and the result, runs through a copy tensor; one that is summed over alone ends
    in one, which is a vector of ones. What tensors are is measured: an identity is a line and nothing else.

    Parameters
    ----------
    equation
        As for `numpy.einsum`, "ij,j->i", with its result; or with words, "query d, key d -> query key", where any
        term has a space inside.
    tensors
        From the label of each tensor, in the order of the terms, to its array, or to its shape where there is none.
        Spaces around a label are not shown: they tell two of one name apart.
    layout
        Where they stand: lines of labels and of names of indices, with spaces between, "." for an empty place. An
        open index stands where its leg ends, another one where its copy tensor stands. One row by default.

    Returns
    -------
    Diagram
        For `tnlib.draw`; its open legs are the indices of the result.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        If terms and tensors do not fit together, or a tensor is missing from the layout.

    Examples
    --------
    >>> import numpy as np
    >>> product = einsum_diagram("ij,j->i", {"A": np.ones((3, 4)), "v": np.ones(4)})
    >>> product.bonds, product.open_legs
    ((('j', 4),), (('i', 3),))
    """
    terms, result = _parsed(equation)
    if not isinstance(tensors, Mapping) or len(tensors) != len(terms):
        got = len(tensors) if isinstance(tensors, Mapping) else type(tensors).__name__
        raise ArgumentError(
            f"einsum_diagram: tensors must be a dict with a label for each of the {len(terms)} terms, got {got}; "
            "name them in the order of the equation."
        )
    parts = [_operand(label, value, term) for (label, value), term in zip(tensors.items(), terms, strict=True)]
    sizes = _sizes(parts, result)
    return _Picture(parts, sizes, result, _cells(layout, parts)).diagram()


@dataclass(frozen=True)
class _Operand:
    label: str
    term: tuple[str, ...]
    shape: tuple[int, ...]
    array: Any  # None where only the shape is known


def _parsed(equation: Any) -> tuple[list[tuple[str, ...]], tuple[str, ...]]:
    if not isinstance(equation, str) or equation.count("->") != 1:
        raise ArgumentError(
            f"einsum_diagram: equation must be text with one '->', got {equation!r}; write it like 'ij,j->i'."
        )
    left, right = equation.split("->")
    texts = [text.strip() for text in (*left.split(","), right)]
    words = any(" " in text for text in texts)
    *terms, result = [tuple(text.split()) if words else tuple(text) for text in texts]
    if missing := set(result) - {i for term in terms for i in term}:
        raise ArgumentError(
            f"einsum_diagram: indices of the result must be those of tensors, got {min(missing)!r}; correct equation."
        )
    if len(set(result)) < len(result):
        raise ArgumentError(f"einsum_diagram: the result must have every index once, got {equation!r}; correct it.")
    return terms, result


def _operand(label: str, value: Any, term: tuple[str, ...]) -> _Operand:
    if isinstance(value, tuple):
        array, shape = None, as_sizes("einsum_diagram", label, value) if value else ()
    elif np.ndim(value) == 0:
        array, shape = None, ()
    else:
        array = as_array("einsum_diagram", label, value)
        shape = array.shape
    if len(shape) != len(term):
        raise ArgumentError(
            f"einsum_diagram: {label} must have {so_many(len(term), 'leg')}, got shape {shape}; "
            f"its term is {' '.join(term)!r}."
        )
    return _Operand(label, term, shape, array)


def _sizes(parts: Sequence[_Operand], result: Sequence[str]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for part in parts:
        for index, n in zip(part.term, part.shape, strict=True):
            if sizes.setdefault(index, n) != n:
                raise ArgumentError(
                    f"einsum_diagram: index {index} must have one size, got {sizes[index]} and {n}; check shapes."
                )
    return sizes


def _cells(layout: str | None, parts: Sequence[_Operand]) -> dict[str, Point]:
    """Return the place of every tensor and every index that the layout names; tensors of one name come in order."""
    if layout is not None and not isinstance(layout, str):
        raise ArgumentTypeError(f"einsum_diagram: layout must be text, got {type(layout).__name__}; write lines.")
    names = [part.label.strip() for part in parts]
    rows = [names] if layout is None else [line.split() for line in layout.splitlines() if line.strip()]
    places: dict[str, list[Point]] = {}
    for y, row in enumerate(rows):
        for x, name in enumerate(row):
            places.setdefault(name, []).append((_STEP[0] * x, -_STEP[1] * y))
    cells = {name: at[0] for name, at in places.items() if name not in (*names, ".")}
    for part, name in zip(parts, names, strict=True):
        if not places.get(name):
            raise ArgumentError(
                f"einsum_diagram: layout must have a place for every tensor, got none for {name}; add its label."
            )
        cells[part.label] = places[name].pop(0)
    return cells


class _Picture:
    """An einsum and the places of what is in it, on the way to a diagram."""

    def __init__(
        self, parts: Sequence[_Operand], sizes: Mapping[str, int], result: Sequence[str], cells: Mapping[str, Point]
    ) -> None:
        self.parts, self.sizes, self.result, self.cells = parts, sizes, result, cells
        self.places = [cells[part.label] for part in parts]
        self.holders: dict[str, list[int]] = {}
        for k, part in enumerate(parts):
            for index in part.term:
                self.holders.setdefault(index, []).append(k)
        joined = [i for i, at in self.holders.items() if len(at) + (i in result) != 2]
        self.hubs = {index: len(parts) + n for n, index in enumerate(joined)}
        self.places += [cells.get(index) or self._between(index) for index in joined]
        self.ends = self._ends()

    def _between(self, index: str) -> Point:
        """Return the place of a copy tensor that the layout does not name: below the tensors it joins."""
        xs, ys = zip(*(self.places[k] for k in self.holders[index]), strict=True)
        return sum(xs) / len(xs), min(ys) - _STEP[1]

    def _root(self, index: str) -> int:
        return self.hubs.get(index, self.holders[index][0])

    def _ends(self) -> dict[str, Point]:
        """Return where the open legs end: towards their place in the layout, or away from everything else."""
        out: dict[str, Point] = {}
        for root in {self._root(i): None for i in self.result}:
            own = [i for i in self.result if self._root(i) == root]
            free = [i for i in own if i not in self.cells or i in self.hubs]
            angles = dict(zip(free, self._angles(root, len(free)), strict=True))
            x, y = self.places[root]
            for i in own:
                if i in free:
                    out[i] = (x + _REACH * math.cos(angles[i]), y + _REACH * math.sin(angles[i]))
                else:
                    out[i] = _reach((x, y), self.cells[i])
        return out

    def _angles(self, root: int, count: int) -> list[float]:
        """Return the directions of so many open legs, side by side around the way out."""
        if len(self.places) == 1 and count != 1:
            return [math.pi - 2 * math.pi * k / count for k in range(count)]
        xs, ys = zip(*self.places, strict=True)
        x, y = self.places[root]
        if x == min(xs):
            way = math.pi
        elif x == max(xs):
            way = 0.0
        else:
            way = math.pi / 2 if y == max(ys) > min(ys) else -math.pi / 2
        side = -1 if way in (0.0, math.pi / 2) else 1  # read from above, and from the left
        spread = min(math.pi / 4, math.pi / max(1, count))
        return [way + side * spread * (k - (count - 1) / 2) for k in range(count)]

    def diagram(self) -> Diagram:
        """Return the diagram."""
        nodes = [self._node(k, part) for k, part in enumerate(self.parts)]
        nodes += [Node("delta", "", self.places[k]) for k in self.hubs.values()]
        legs: list[Leg] = []
        for index, at in self.holders.items():
            if index in self.hubs:
                legs += [self._bond(k, self.hubs[index], index if n == 0 else "", index) for n, k in enumerate(at)]
            elif len(at) == 2:
                legs.append(self._bond(at[0], at[1], index, index))
        legs += [Leg(self._root(i), None, i, self.sizes[i], self.ends[i]) for i in self.result]
        return Diagram((*nodes,), (*legs,))

    def _node(self, k: int, part: _Operand) -> Node:
        at, a, label = self.places[k], part.array, part.label.strip()
        if a is None:
            return Node("matrix" if len(part.shape) == 2 else "tensor", label, at)
        if a.ndim == 1 and part.term[0] in self.hubs and len(self.holders[part.term[0]]) > 1:
            return Node("weights", label, at)
        if a.ndim == 2 and a.shape[0] == a.shape[1] and not (a - np.diag(np.diag(a))).any():
            return Node("text", "", at) if (np.diag(a) == 1).all() else Node("weights", label, at)
        kind, direction = measured(a, [self._far(i, k) for i in part.term], at)
        return Node(kind, "" if kind == "delta" else label, at, direction)

    def _far(self, index: str, k: int) -> Point:
        if index in self.hubs:
            return self.places[self.hubs[index]]
        others = [other for other in self.holders[index] if other != k]
        return self.places[others[0]] if others else self.ends.get(index, self.places[k])

    def _bond(self, a: int, b: int, name: str, index: str) -> Leg:
        return Leg(a, b, name, self.sizes[index], via=self._way(a, b))

    def _way(self, a: int, b: int) -> tuple[Point, ...]:
        """Return the points that a bond passes: of a trace round its tensor, and round what stands between its ends."""
        (x, y), (u, v) = self.places[a], self.places[b]
        if a == b:
            half = 0.55 * _STEP[0]
            return (x + half, y), (x + half, y + _OVER), (x - half, y + _OVER), (x - half, y)
        between = [p for k, p in enumerate(self.places) if k not in (a, b)]
        if y == v and any(q == y and min(x, u) < p < max(x, u) for p, q in between):
            return (x, y + _OVER), (u, v + _OVER)
        if x == u and any(p == x and min(y, v) < q < max(y, v) for p, q in between):
            return (x - _OVER, y), (u - _OVER, v)
        return ()


def _reach(root: Point, towards: Point) -> Point:
    x, y = towards[0] - root[0], towards[1] - root[1]
    length = math.hypot(x, y)
    return root[0] + _REACH * x / length, root[1] + _REACH * y / length
