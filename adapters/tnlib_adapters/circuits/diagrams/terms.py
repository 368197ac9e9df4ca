"""The ten terms of two attention layers in graphical notation, each from the scores to what is written."""

from __future__ import annotations

from dataclasses import replace

from tnlib import ArgumentError
from tnlib._validate import is_one_of
from tnlib.drawing import Bubble, Diagram, Leg, Node
from tnlib_adapters.attention.attention import Attention
from tnlib_adapters.circuits.arguments import AttentionHead, as_two_heads
from tnlib_adapters.circuits.diagrams.elements import (
    REACH,
    STEP,
    Piece,
    chain,
    output_value,
    query_key,
    read_stream,
    refuse_norm,
    softmax_label,
    turned,
)
from tnlib_adapters.circuits.paths.two_layer_terms import NAMES

_DROP = 1.4  # from the stream down to the pattern that moves it
_OUTSIDE = 1.4  # of an open leg that leaves the bubble


def term_diagram(name: str, later: AttentionHead, earlier: AttentionHead) -> Diagram:
    """Describe one of the ten terms of two layers, for a pair of heads: what reads which head on which side.

    Parameters
    ----------
    name
        As in `ten_terms`: "direct", "first", "second"; "Q", "K", "V", "QK", "QV", "KV", "QKV" name the sides of the
        later head that read the earlier one, the others read the stream. "K" is the virtual induction head where the
        earlier head attends to the previous token.
    later, earlier
        (layer, head).

    Raises
    ------
    ArgumentError, ArgumentTypeError
        If the name is not known, a layer is no Attention or has no such head, their streams differ in width, or the
        scores are no bilinear form.

    Examples
    --------
    >>> import tnlib_adapters
    >>> model = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path())
    >>> heads = (model.attention(1), 0), (model.attention(0), 3)
    >>> [sum(node.label == "A$^1$" for node in term_diagram(name, *heads).nodes) for name in ("second", "K", "QKV")]
    [0, 1, 3]
    """
    if not is_one_of(name, NAMES):
        raise ArgumentError(f"term_diagram: name must be one of {', '.join(NAMES)}, got {name!r}; choose one.")
    (two, h), (one, g) = as_two_heads("term_diagram", later, earlier)
    if name == "direct":
        return _direct(one)
    if name == "first":
        return replace(_earlier_alone((one, g)), title=f"first: head {g} of the first layer alone")
    refuse_norm("term_diagram", two)
    sides = "" if name == "second" else name
    told = " and ".join(", ".join(what for letter, what in _SIDES.items() if letter in sides).rsplit(", ", 1))
    title = f"{name}: the {told} of head {h} read head {g}" if sides else f"second: head {h} of the second layer alone"
    return replace(_later((two, h), (one, g), sides), title=title)


_SIDES = {"Q": "queries", "K": "keys", "V": "values"}


def _direct(layer: Attention) -> Diagram:
    legs = (
        Leg(0, None, "position", None, (-_OUTSIDE, 0.25), ((0.0, 0.25),)),
        Leg(0, None, "stream", layer.d_model, (-_OUTSIDE, -0.25), ((0.0, -0.25),)),
    )
    return Diagram((Node("tensor", "x", (0.0, 0.0)),), legs, "direct: the stream as it came")


def _earlier_alone(earlier: AttentionHead) -> Diagram:
    one = earlier[0]
    nodes, legs = _written(earlier, 0.0, 0.0, first=0)
    x, far = len(nodes), 2 * STEP
    nodes += [Node("tensor", read_stream(one, "V")[0], (far, 0.0)), Node("matrix", "A$^1$", (far, _DROP))]
    legs += [
        Leg(0, None, "stream", one.d_model, (-REACH, 0.0)),
        Leg(1, x, "stream", read_stream(one, "V")[1]),
        Leg(x, x + 1, "source"),
        Leg(x + 1, None, "position", None, (-REACH, _DROP)),
    ]
    return Diagram((*nodes,), (*legs,))


def _later(later: AttentionHead, earlier: AttentionHead, sides: str) -> Diagram:
    """Put the scores in a row from the query to the key, and below them the values."""
    two = later[0]
    nodes, legs, query, key = _scores(later, earlier, sides)
    far = max(node.position[0] for node in nodes)
    floor = min(node.position[1] for node in nodes) - (2.8 if "V" in sides else 1.6)
    bubble = Bubble(tuple(range(len(nodes))), softmax_label(two))
    first = len(nodes)
    values, inner = _values(later, earlier, (far, floor), first, composed="V" in sides)
    left = min(-_OUTSIDE, values[0].position[0] - REACH)
    legs += [
        *inner,
        Leg(key, first + len(values) - 1, "key"),
        Leg(query, None, "position", None, (left, nodes[query].position[1])),
        Leg(first, None, "stream", two.d_model, (left, floor)),
    ]
    return Diagram((*nodes, *values), (*legs,), "", (bubble,))


def _scores(later: AttentionHead, earlier: AttentionHead, sides: str) -> tuple[list[Node], list[Leg], int, int]:
    """Return the row from the x of the query to that of the key, and which nodes know the two positions."""
    (two, h), one = later, earlier[0]
    query, inner_q = _written(earlier, STEP, 0.0, first=1, mirrored=True) if "Q" in sides else ([], [])
    first = 1 + len(query)
    own, inner = chain(_numbered(query_key(two, h), 2), two.d_head, first * STEP, 0.0, first=first)
    behind = first + len(own)
    key, inner_k = _written(earlier, behind * STEP, 0.0, first=behind) if "K" in sides else ([], [])
    last = behind + len(key)
    (x_q, d_q), (x_k, d_k) = (read_stream(*((one, "V") if letter in sides else (two, letter))) for letter in "QK")
    nodes = [Node("tensor", x_q, (0.0, 0.0)), *query, *own, *key, Node("tensor", x_k, (last * STEP, 0.0))]
    legs = [*inner_q, *inner, *inner_k, Leg(0, 1, "stream", d_q), Leg(last - 1, last, "stream", d_k)]
    ends = {"Q": 0, "K": last}
    for side, (before, end) in {"Q": (first - 1, 0), "K": (behind - 1, last)}.items():
        if side in sides:
            legs.append(Leg(before, before + 1, "stream", read_stream(two, side)[1]))
            legs.append(Leg(end, len(nodes), "source"))
            ends[side] = len(nodes)
            nodes.append(Node("matrix", "A$^1$", (nodes[end].position[0], -_DROP)))
    return nodes, legs, ends["Q"], ends["K"]


def _values(
    later: AttentionHead, earlier: AttentionHead, end: tuple[float, float], first: int, *, composed: bool
) -> tuple[list[Node], list[Leg]]:
    """Return what is written, from left to right, ending in the node that knows the position attended to."""
    (two, h), one, (far, floor) = later, earlier[0], end
    width = 4 if composed else 2
    nodes, legs = chain(_numbered(output_value(two, h), 2), two.d_head, far - width * STEP, floor, first=first)
    legs.append(Leg(first + 1, first + 2, "stream", read_stream(two, "V")[1]))
    if not composed:
        return [*nodes, Node("tensor", read_stream(two, "V")[0], (far, floor))], legs
    more, inner = _written(earlier, far - 2 * STEP, floor, first=first + 2)
    nodes = [*nodes, *more, Node("tensor", read_stream(one, "V")[0], (far, floor))]
    nodes.append(Node("matrix", "A$^1$", (far, floor + _DROP)))
    legs += [
        *inner,
        Leg(first + 3, first + 4, "stream", read_stream(one, "V")[1]),
        Leg(first + 4, first + 5, "source"),
    ]
    return nodes, legs


def _written(
    earlier: AttentionHead, x: float, y: float, *, first: int, mirrored: bool = False
) -> tuple[list[Node], list[Leg]]:
    """Return W_O W_V of the earlier head, in a row; mirrored W_V comes first."""
    one, g = earlier
    pieces = _numbered(output_value(one, g), 1)
    return chain(turned(pieces) if mirrored else pieces, one.d_head, x, y, first=first)


def _numbered(pieces: list[Piece], layer: int) -> list[Piece]:
    """Write the number of the layer on its weights."""
    return [(label.replace("$_", f"$^{layer}_"), a, tip, name) for label, a, tip, name in pieces]
