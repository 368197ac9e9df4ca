"""Values of diagrams: contraction over the legs, and functions of what bubbles enclose or of what runs into nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import reduce
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from tnlib._errors import ArgumentError
from tnlib._typing import Array
from tnlib._validate import as_array

if TYPE_CHECKING:
    from tnlib.drawing.diagram import Diagram, Leg, Node

Piece: TypeAlias = "tuple[tuple[int, ...], Array | None]"  # numbers of legs, and the array; None for a copy tensor


def evaluate(diagram: Diagram, values: Mapping[Any, Any]) -> Array:
    """Return the value of a diagram, see `Diagram.evaluate`."""
    legs = diagram.legs
    ends = [(k, axis or 0, n) for n, leg in enumerate(legs) for k, axis in zip((leg.a, leg.b), leg.axes, strict=True)]
    touching = [
        [n for k, _, n in sorted(ends, key=lambda end: end[1]) if k == own] for own in range(len(diagram.nodes))
    ]
    if signs := [node for node in diagram.nodes if node.kind == "ellipsis" or (node.kind == "text" and node.label)]:
        raise _invalid(
            f"the diagram must be one network, got the sign {signs[0].label!r}; evaluate the diagrams beside it"
        )
    pieces: dict[int, Piece] = {}
    for k, node in enumerate(diagram.nodes):
        if node.kind in ("delta", "text"):  # text without a label is a plain line
            pieces[k] = tuple(touching[k]), None
        elif node.kind != "function":
            array = _with_axes(_find(values, k, node.label), [legs[n] for n in touching[k]], node)
            pieces[k] = tuple(touching[k]), array
    for bubble in sorted(diagram.bubbles, key=lambda bubble: len(bubble.nodes)):
        inside = [pieces.pop(k) for k in bubble.nodes if k in pieces]
        crossing = _free_legs(inside)
        pieces[bubble.nodes[0]] = crossing, _find(values, bubble.label, bubble.label)(_contract(legs, inside, crossing))
    rest = list(pieces.values())
    for k, node in enumerate(diagram.nodes):
        if node.kind == "function":
            inputs = [n for n in touching[k] if legs[n].b == k]
            terms = []
            while inputs:  # the terms of a sum are contracted one by one
                joined, rest = _connected(rest, inputs[:1] if node.label == "+" else inputs)
                own = [n for n in inputs if n in _free_legs(joined)]
                if not own or len(own) < len(_free_legs(joined)):
                    raise _invalid(f"inputs of {node.label or k} must come from nodes before it and lead to it alone")
                terms.append(_contract(legs, joined, own))
                inputs = [n for n in inputs if n not in own]
            value = reduce(np.add, terms)
            value = value if node.label in ("", "+") else np.asarray(_find(values, k, node.label)(value))
            outputs = [n for n in touching[k] if legs[n].a == k]
            for start in range(0, len(outputs), max(1, value.ndim)):  # every copy has the legs of the value
                rest.append((tuple(outputs[start : start + value.ndim]), value))
    return _contract(legs, rest, [n for n, leg in enumerate(legs) if leg.b is None])


def _contract(legs: Sequence[Leg], pieces: Sequence[Piece], free: Sequence[int]) -> Array:
    """Contract pieces over all legs but `free`, which are the axes of the result, in this order."""
    import cotengra

    index = {n: n for own, _ in pieces for n in own}
    for own, array in pieces:
        if array is None or array.ndim < len(own):  # a copy tensor, or a vector on the diagonal
            joined = {index[n] for n in own}
            index = {n: own[0] if i in joined else i for n, i in index.items()}
    arrays = [(array, [index[n] for n in own[: array.ndim]]) for own, array in pieces if array is not None]
    claims = [(n, legs[n].size) for n in index]
    claims += [claim for own, a in pieces if a is not None for claim in zip(own, a.shape, strict=a.ndim != 1)]
    sizes: dict[int, int] = {}
    for n, size in claims:
        if size is not None and sizes.setdefault(index[n], size) != size:
            raise _invalid(f"leg {legs[n].name!r} must have one size, got {sizes[index[n]]} and {size}; check arrays")
    held = {i for _, indices in arrays for i in indices}
    arrays += [(np.ones(sizes[i]), [i]) for i in dict.fromkeys(index.values()) if i not in held]
    result: list[int] = []
    for n in free:  # an index of several free legs gets one more index and a unit matrix for each
        i = index[n] if index[n] not in result else len(legs) + n
        arrays += [(np.eye(sizes[index[n]]), [index[n], i])] if i != index[n] else []
        result.append(i)
    operands, inputs = zip(*arrays, strict=True) if arrays else ((), ())
    return np.asarray(cotengra.array_contract(operands, inputs, result, optimize="greedy") if arrays else 1.0)


def _free_legs(pieces: Sequence[Piece]) -> tuple[int, ...]:
    """Return the legs with one end at the pieces, in order."""
    return tuple(n for n, ends in sorted(Counter(n for own, _ in pieces for n in own).items()) if ends == 1)


def _connected(pieces: Sequence[Piece], seeds: Sequence[int]) -> tuple[list[Piece], list[Piece]]:
    """Return the pieces connected with the legs `seeds`, and the others."""
    reached, joined, others = set(seeds), [], list(pieces)
    while more := [piece for piece in others if reached.intersection(piece[0])]:
        others = [piece for piece in others if not reached.intersection(piece[0])]
        reached.update(n for own, _ in more for n in own)
        joined += more
    return joined, others


def _find(values: Mapping[Any, Any], key: int | str, label: str) -> Any:
    """Return the array or function of a node, by its number or its label."""
    if key not in values and label not in values:
        raise _invalid(f"values must hold every label, got none for {label or key!r}; add it")
    return values[key] if key in values else values[label]


def _with_axes(value: Any, legs: Sequence[Leg], node: Node) -> Array:
    """Return an array with an axis for every leg, without other axes of size 1; a vector of weights is a diagonal."""
    array = as_array("Diagram.evaluate", node.label or node.kind, np.atleast_1d(value))
    sizes = [leg.size or 0 for leg in legs]
    if array.ndim > len(legs) and [n for n in array.shape if n > 1] == [n for n in sizes if n > 1]:
        return array.reshape(sizes)
    if array.ndim != len(legs) and (node.kind, array.ndim) != ("weights", 1):
        raise _invalid(f"{node.label or node.kind} must have an axis per leg, {sizes}, got shape {array.shape}")
    return array


def _invalid(problem: str) -> ArgumentError:
    return ArgumentError(f"Diagram.evaluate: {problem}.")
