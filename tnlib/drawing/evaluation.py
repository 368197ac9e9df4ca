"""Values of diagrams: contraction over the legs, and functions of what bubbles enclose or of what runs into nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any, TypeAlias

import numpy as np

from tnlib._errors import ArgumentError, ArgumentTypeError
from tnlib._typing import Array
from tnlib._validate import as_array

Piece: TypeAlias = tuple[list[int], Array | None]  # legs of a tensor, and its array; None for a copy tensor


def evaluate(nodes: Sequence[Any], legs: Sequence[Any], bubbles: Sequence[Any], values: Mapping[Any, Any]) -> Array:
    """Return the value of nodes, legs and bubbles, see `Diagram.evaluate`."""
    if not isinstance(values, Mapping):
        raise ArgumentTypeError(f"Diagram.evaluate: values must be a dict from labels, got {type(values).__name__}.")
    ends = [(axis or 0, n, k) for n, leg in enumerate(legs) for k, axis in zip((leg.a, leg.b), leg.axes, strict=True)]
    legs_of: dict[int | None, list[int]] = {k: [] for k in range(len(nodes))}
    for _, n, k in sorted(ends, key=lambda end: end[0]):
        legs_of.setdefault(k, []).append(n)
    if signs := [k for k, node in enumerate(nodes) if node.kind == "ellipsis" or (node.kind == "text" and node.label)]:
        sign = nodes[signs[0]].label
        raise _invalid(f"the diagram must be one network, got the sign {sign!r}; evaluate the diagrams beside it")
    pieces: dict[int, Piece] = {}
    for k, node in enumerate(nodes):
        if node.kind in ("delta", "text"):  # text on a leg is an identity, drawn as a line
            pieces[k] = legs_of[k], None
        elif node.kind != "function":
            pieces[k] = legs_of[k], _array(values, k, node, [legs[n].size for n in legs_of[k]])
    for bubble in sorted(bubbles, key=lambda bubble: len(bubble.nodes)):
        inside = [pieces.pop(k) for k in bubble.nodes if k in pieces]
        free = _free_legs(inside)
        pieces[bubble.nodes[0]] = free, _apply(values, bubble.label, bubble.label, _contract(legs, inside, free))
    rest = list(pieces.values())
    for k, node in enumerate(nodes):
        if node.kind != "function":
            continue
        inputs, terms = [n for n in legs_of[k] if legs[n].b == k], list[Array]()
        while inputs or not terms:  # a sum has several terms
            joined, rest = _connected(rest, inputs[:1] if node.label == "+" else inputs)
            input_legs, free = [n for n in inputs if any(n in piece[0] for piece in joined)], _free_legs(joined)
            if not input_legs or set(input_legs) != set(free):
                raise _invalid(f"what runs into {node.label or k} must come from nodes before it, and run nowhere else")
            terms.append(_contract(legs, joined, input_legs))
            inputs = [n for n in inputs if n not in input_legs]
        value = reduce(np.add, terms)
        value = value if node.label in ("", "+") else _apply(values, k, node.label, value)
        outputs, step = [n for n in legs_of[k] if legs[n].a == k], max(1, value.ndim)
        if len(outputs) % step:
            raise _invalid(f"{node.label or k} must return an axis per leg, got {value.ndim} for {len(outputs)} legs")
        rest += [(outputs[n : n + step], value) for n in range(0, len(outputs), step)]  # every copy has all its legs
    return _contract(legs, rest, [n for n, leg in enumerate(legs) if leg.b is None])


def _contract(legs: Sequence[Any], pieces: Sequence[Piece], free: Sequence[int]) -> Array:
    """Contract pieces over all legs but `free`, which are the axes of the result, in this order."""
    import cotengra

    index = {n: n for axes, _ in pieces for n in axes}
    for axes, array in pieces:
        if array is None or array.ndim < len(axes):  # a copy tensor, or a vector on the diagonal
            joined = {index[n] for n in axes}
            index = {n: axes[0] if i in joined else i for n, i in index.items()}
    tensors = [(array, [index[n] for n in axes[: array.ndim]]) for axes, array in pieces if array is not None]
    sizes: dict[int, int] = {}
    claims = [(n, legs[n].size) for n in index if legs[n].size is not None]
    claims += [claim for axes, a in pieces if a is not None for claim in zip(axes, a.shape, strict=a.ndim > 1)]
    for n, size in claims:
        if sizes.setdefault(index[n], size) != size:
            raise _invalid(f"leg {legs[n].name!r} must have one size, got {sizes[index[n]]} and {size}; check arrays")
    contracted = {i for _, indices in tensors for i in indices}
    tensors += [(np.ones(sizes[i]), [i]) for i in dict.fromkeys(index.values()) if i not in contracted]
    result: list[int] = []
    for n in free:  # an index of several free legs gets a new index and a unit matrix for each
        i = index[n] if index[n] not in result else len(legs) + n
        tensors += [(np.eye(sizes[index[n]]), [index[n], i])] if i != index[n] else []
        result.append(i)
    arrays, inputs = [array for array, _ in tensors], [indices for _, indices in tensors]
    return np.asarray(cotengra.array_contract(arrays, inputs, result, optimize="greedy") if arrays else 1.0)


def _free_legs(pieces: Sequence[Piece]) -> list[int]:
    """Return the legs with one end at the pieces, in order."""
    return sorted(n for n, count in Counter(n for axes, _ in pieces for n in axes).items() if count == 1)


def _connected(pieces: Sequence[Piece], seeds: Sequence[int]) -> tuple[list[Piece], list[Piece]]:
    """Return the pieces connected with the legs `seeds`, and the others."""
    reached, joined, others = set(seeds), list[Piece](), list(pieces)
    while more := [piece for piece in others if reached.intersection(piece[0])]:
        others = [piece for piece in others if not reached.intersection(piece[0])]
        reached.update(n for axes, _ in more for n in axes)
        joined += more
    return joined, others


def _value(values: Mapping[Any, Any], key: int | str, label: str) -> Any:
    """Return the array or function of a node, by its number or its label."""
    if key not in values and label not in values:
        raise _invalid(f"values must hold every label, got none for {label or key!r}; add it")
    return values.get(key, values.get(label))


def _apply(values: Mapping[Any, Any], key: int | str, label: str, x: Array) -> Array:
    function = _value(values, key, label)
    if not callable(function):
        raise _invalid(f"{label} must be a function of an array, got {type(function).__name__}; pass a callable")
    return np.asarray(function(x))


def _array(values: Mapping[Any, Any], k: int, node: Any, sizes: Sequence[int | None]) -> Array:
    """Return the array of a node with an axis per leg, without others of size 1; a vector of weights is a diagonal."""
    name = node.label or node.kind
    array = as_array("Diagram.evaluate", name, np.atleast_1d(_value(values, k, node.label)))
    if array.ndim > len(sizes) and [n for n in array.shape if n > 1] == [n for n in sizes if n != 1]:
        return array.reshape([n or 1 for n in sizes])
    if array.ndim != len(sizes) and (node.kind, array.ndim) != ("weights", 1):
        raise _invalid(f"{name} must have an axis per leg, sizes {sizes}, got shape {array.shape}; reshape it")
    return array


def _invalid(problem: str) -> ArgumentError:
    return ArgumentError(f"Diagram.evaluate: {problem}.")
