"""Tensor network diagrams of composed heads and of dense networks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tnlib import ArgumentError, ArgumentTypeError
from tnlib._validate import as_array, is_list
from tnlib.drawing import Bubble, Diagram, Leg, Node
from tnlib_adapters.attention.attention import Attention
from tnlib_adapters.circuits.arguments import AttentionHead, Kind, as_kind, as_two_heads
from tnlib_adapters.circuits.diagrams.elements import (
    REACH,
    STEP,
    chain,
    output_value,
    query_key,
    read_stream,
    refuse_norm,
    softmax_label,
    turned,
    weight_node,
)


def composition_diagram(kind: Kind, later: AttentionHead, earlier: AttentionHead) -> Diagram:
    """Return the diagram of one composition term: a head that reads, as query, key or value, an earlier head's output.

    Parameters
    ----------
    kind
        "Q" and "K" are terms of the later head's scores, with the pattern of the earlier head on that side. "K" is the
        virtual induction head if the earlier head attends to the previous token. "V" is the virtual head, A^2 A^1 (x)
        the product of the weights.
    later, earlier
        (layer, head).

    Raises
    ------
    ArgumentError, ArgumentTypeError
        If the kind is unknown, a layer is not an Attention or has no such head, d_model differs, or the scores are not
        a bilinear form.

    Examples
    --------
    >>> import tnlib_adapters
    >>> model = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path())
    >>> term = composition_diagram("K", (model.attention(1), 0), (model.attention(0), 2))
    >>> [node.label.split()[0] for node in term.nodes if node.kind == "matrix"][-1]
    'A$^1$'
    """
    as_kind("composition_diagram", kind)
    (last, h), (first, g) = as_two_heads("composition_diagram", later, earlier)
    if kind == "V":
        return _virtual_head(last, h, first, g)
    refuse_norm("composition_diagram", last)
    return _composed_scores(kind, last, h, first, g)


def dense_diagram(weights: Sequence[Any], activation: str = "relu") -> Diagram:
    """Return the diagram of a dense network; a bubble is contracted first, then its function is applied.

    Parameters
    ----------
    weights
        Matrices (in, out), applied as x @ weight in this order.
    activation
        Name of the function between them.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        If these are not matrices of matching shapes.

    Examples
    --------
    >>> import numpy as np
    >>> net = dense_diagram([np.ones((4, 16)), np.ones((16, 16)), np.ones((16, 3))])
    >>> len(net.bubbles), net.open_legs
    (2, (('out', 3),))
    """
    if not is_list(weights) or len(weights) == 0:
        raise ArgumentTypeError(
            f"dense_diagram: weights must be a non-empty list of matrices, got {type(weights).__name__}; pass a list."
        )
    arrays = [as_array("dense_diagram", f"weights[{k}]", w, ndim=2) for k, w in enumerate(weights)]
    for k in range(1, len(arrays)):
        if arrays[k - 1].shape[1] != len(arrays[k]):
            raise ArgumentError(
                f"dense_diagram: weights[{k}] must have {arrays[k - 1].shape[1]} rows, got shape {arrays[k].shape}; "
                "weights are (in, out)."
            )
    count = len(arrays)
    nodes = [Node("tensor", "x", (count * STEP, 0.0))]
    nodes += [
        weight_node(f"W$_{k + 1}$", w, ((count - 1 - k) * STEP, 0.0), tip=1, way=-1.0) for k, w in enumerate(arrays)
    ]
    legs = [Leg(k, k + 1, "in" if k == 0 else f"layer {k}", len(w)) for k, w in enumerate(arrays)]
    legs.append(Leg(count, None, "out", arrays[-1].shape[1], (-REACH, 0.0)))
    bubbles = tuple(Bubble(tuple(range(k + 1)), activation) for k in range(1, count))
    return Diagram((*nodes,), (*legs,), f"dense network, {count} layers", bubbles)


def _virtual_head(last: Attention, h: int, first_layer: Attention, g: int) -> Diagram:
    """Return the diagram of A^2 A^1 (x) W_O^2 W_V^2 W_O^1 W_V^1, with bonds d_head."""
    later, inner_2 = chain(output_value(last, h), last.d_head, 0.0, -1.4, first=2)
    earlier, inner_1 = chain(output_value(first_layer, g), first_layer.d_head, 2 * STEP, -1.4, first=4)
    nodes = [Node("matrix", "A$^2$", (STEP / 2, 0.0)), Node("matrix", "A$^1$", (2.5 * STEP, 0.0)), *later, *earlier]
    end = 3 * STEP + REACH
    legs = [
        Leg(0, 1, "position"),
        Leg(0, None, "to", None, (-REACH, 0.0)),
        Leg(1, None, "from", None, (end, 0.0)),
        *inner_2,
        Leg(3, 4, "stream", read_stream(last, "V")[1]),
        *inner_1,
        Leg(2, None, "written", last.d_model, (-REACH, -1.4)),
        Leg(5, None, "read", read_stream(first_layer, "V")[1], (end, -1.4)),
    ]
    return Diagram((*nodes,), (*legs,), f"V-composition: head {h} after head {g}, a virtual head")


def _composed_scores(kind: str, later: Attention, h: int, earlier: Attention, g: int) -> Diagram:
    """Return the diagram of the scores of a head that reads another head on one side and the stream on the other."""
    scores = query_key(later, h)
    if kind == "Q":  # drawn with the composed side on the right, and mirrored at the end
        scores = turned(scores)
    nodes, legs = chain(scores, later.d_head, STEP, 0.0, first=1)
    plain, other = ("Q", "K") if kind == "K" else ("K", "Q")
    nodes.insert(0, Node("tensor", read_stream(later, plain)[0], (0.0, 0.0)))
    legs.insert(0, Leg(0, 1, "stream", read_stream(later, plain)[1]))
    first = len(nodes)
    weights, inner = chain(output_value(earlier, g), earlier.d_head, first * STEP, 0.0, first=first)
    end = (first + 2) * STEP
    nodes += [*weights, Node("tensor", read_stream(earlier, "V")[0], (end, 0.0)), Node("matrix", "A$^1$", (end, -1.5))]
    legs += [
        Leg(first - 1, first, "stream", read_stream(later, other)[1]),
        *inner,
        Leg(first + 1, first + 2, "stream", read_stream(earlier, "V")[1]),
        Leg(first + 2, first + 3, "source"),
        Leg(0, None, "key" if kind == "Q" else "query", None, (0.0, -1.5 - REACH)),
        Leg(first + 3, None, "query" if kind == "Q" else "key", None, (end, -1.5 - REACH)),
    ]
    title = f"{kind}-composition: the {'queries' if kind == 'Q' else 'keys'} of head {h} read head {g}"
    bubble = Bubble(tuple(range(len(nodes))), softmax_label(later))
    diagram = Diagram((*nodes,), (*legs,), title, (bubble,))
    return diagram if kind == "K" else _mirrored(diagram)


def _mirrored(diagram: Diagram) -> Diagram:
    """Return the diagram mirrored left to right."""
    nodes = tuple(
        replace(
            node,
            position=(-node.position[0], node.position[1]),
            direction=None if node.direction is None else (-node.direction[0], node.direction[1]),
        )
        for node in diagram.nodes
    )
    legs = tuple(
        replace(leg, end=None if leg.end is None else (-leg.end[0], leg.end[1]), via=tuple((-x, y) for x, y in leg.via))
        for leg in diagram.legs
    )
    return replace(diagram, nodes=nodes, legs=legs)
