"""Attention in graphical notation, from the operators of a layer: what is drawn is what the layer has.

The output is on the left and the input on the right, as in products of matrices. Streams are homogeneous, x~ = [x, 1],
where biases read them. Weights are measured: in a gauge that makes one of them isometric it is a triangle.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from tnlib import ArgumentError, ArgumentTypeError
from tnlib._typing import Array
from tnlib._validate import as_array, as_count
from tnlib.drawing import Bubble, Diagram, Leg, Node, join
from tnlib.drawing.stars import piece
from tnlib_adapters.attention.attention import Attention
from tnlib_adapters.attention.index import as_index

_STEP = 1.6
_ROW = 2.1  # between the wire of positions and that of the stream
_REACH = 0.9
_OUTSIDE = 1.3  # of an open leg that leaves two bubbles
_MOST_HEADS = 3  # of which all are drawn in a sum


def qk_diagram(layer: Attention, head: int) -> Diagram:
    """Describe the query-key operator of a head: two tall matrices that meet in d_head, R between them where it turns.

    Parameters
    ----------
    layer
        The attention layer.
    head
        Counted from 0.

    Returns
    -------
    Diagram
        For `tnlib.draw`: the query on the left, the key on the right.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        If `layer` is no Attention, has no such head, or normalises queries and keys.

    Examples
    --------
    >>> import tnlib, tnlib_adapters
    >>> layer = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path()).attention(0)
    >>> tnlib.draw(qk_diagram(layer, 0)).diagram.bonds
    (('head 0', 16),)
    """
    head = _checked("qk_diagram", layer, head)
    _refuse_norm("qk_diagram", layer)
    nodes, legs = _chain(_query_key(layer, head), layer.d_head, 0.0, 0.0)
    last = len(nodes) - 1
    x = nodes[-1].position[0]
    size = _read(layer, "Q")[1], _read(layer, "K")[1]
    ends = [
        Leg(0, None, "query", size[0], (-_REACH, 0.0)),
        Leg(last, None, "key", size[1], (x + _REACH, 0.0)),
    ]
    return Diagram((*nodes,), (*legs, *ends), f"QK of head {head}, times {layer.scale:.4g}")


def ov_diagram(layer: Attention, head: int) -> Diagram:
    """Describe the output-value operator of a head: what it reads on the right, what it writes on the left.

    Parameters, errors: as of `qk_diagram`.

    Examples
    --------
    >>> import tnlib_adapters
    >>> layer = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path()).attention(0)
    >>> ov_diagram(layer, 0).open_legs
    (('written', 64), ('read', 65))
    """
    head = _checked("ov_diagram", layer, head)
    nodes, legs = _chain(_output_value(layer, head), layer.d_head, 0.0, 0.0)
    return Diagram((*nodes,), (*legs, *_stream_ends(layer, 0, 1, nodes)), f"OV of head {head}")


def frozen_diagram(layer: Attention, n_positions: int | None = None) -> Diagram:
    """Describe a layer whose patterns are fixed: A (x) W_O W_V with one leg that counts the heads, and as a sum.

    Parameters
    ----------
    layer
        The attention layer.
    n_positions
        Length of the text; left open by default.

    Returns
    -------
    Diagram
        The pattern above, on the wire of positions; the weights below, on that of the stream. To the right of the sign
        of equality the same, head by head.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        If `layer` is no Attention or `n_positions` no positive integer.

    Examples
    --------
    >>> import tnlib_adapters
    >>> layer = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path()).attention(0)
    >>> [node.label for node in frozen_diagram(layer, 10).nodes[:2]], frozen_diagram(layer).open_legs[0]
    (['A', ''], ('to', None))
    """
    _checked("frozen_diagram", layer, 0)
    n = None if n_positions is None else as_count("frozen_diagram", "n_positions", n_positions)
    heads = layer.n_heads
    nodes = [Node("matrix", "A", (_STEP / 2, 0.0)), Node("delta", "", (_STEP / 2, -0.9))]
    legs = [*_position_ends(0, (_STEP / 2, 0.0), n, _STEP / 2), Leg(0, 1, "heads", heads)]
    weights, inner = _chain(_output_value(layer, None), layer.d_head, 0.0, -_ROW, first=2)
    legs += [Leg(1, 2, "", heads), _to_key_value(layer, 1, 3)]
    whole = Diagram((*nodes, *weights), (*legs, *inner, *_stream_ends(layer, 2, 3, weights)))
    parts, x = [whole], _STEP + _REACH + 0.8  # where the next sign stands
    shown = list(range(heads)) if heads <= _MOST_HEADS else [0, 1, None, heads - 1]
    for k, head in enumerate(shown):
        parts.append(_text("=" if k == 0 else "+", x))
        if head is None:
            parts.append(_text("· · ·", x + 0.5))
            x += 1.0
        else:
            parts.append(_term(layer, head, n).moved(x + 0.8 + _REACH, 0.0))
            x += _STEP + 2 * (_REACH + 0.8)
    return join(tuple(parts), f"attention with fixed patterns, sum over {heads} heads")


def layer_diagram(layer: Attention, n_positions: int | None = None) -> Diagram:
    """Describe what an attention layer adds to the stream: the bubble is contracted first, then its function applied.

    Parameters, errors: as of `frozen_diagram`. The stream x stands wherever it is read.

    Examples
    --------
    >>> import tnlib_adapters
    >>> layer = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path()).attention(0)
    >>> layer_diagram(layer).bubbles[0].label, layer_diagram(layer, 10).open_legs
    ('causal softmax(0.25 ...)', (('position', 10), ('stream', 64)))
    """
    _checked("layer_diagram", layer, 0)
    n = None if n_positions is None else as_count("layer_diagram", "n_positions", n_positions)
    x_q, d_q = _read(layer, "Q")
    x_v, d_v = _read(layer, "V")
    middle, inner_legs = _chain(_query_key(layer, None), layer.d_head, _STEP, 0.0, first=1)
    far = middle[-1].position[0] + _STEP
    key = len(middle) + 1  # the node x on the side of the keys
    center = (middle[0].position[0] + middle[-1].position[0]) / 2
    nodes = [Node("tensor", x_q, (0.0, 0.0)), *middle, Node("tensor", _read(layer, "K")[0], (far, 0.0))]
    nodes.append(Node("delta", "", (center, -1.0)))
    inside = tuple(range(len(nodes)))
    hub, out = len(nodes) - 1, len(nodes)
    floor = -1.0 - _ROW - 0.4
    nodes.append(Node("delta", "", (center, floor + 0.95)))
    weights, value_legs = _chain(_output_value(layer, None), layer.d_head, center - _STEP / 2, floor, first=out + 1)
    nodes += [*weights, Node("tensor", x_v, (far, floor))]
    value = len(nodes) - 1
    legs = [
        Leg(0, None, "position", n, (-_OUTSIDE, 0.0)),
        Leg(0, 1, "stream", d_q),
        *inner_legs,
        Leg(key - 1, key, "", _read(layer, "K")[1]),
        Leg(1, hub, "", layer.n_heads),
        _to_key_value(layer, hub, key - 1),
        Leg(hub, out, "heads", layer.n_heads),
        Leg(out, out + 1, "", layer.n_heads),
        _to_key_value(layer, out, out + 2),
        *value_legs,
        Leg(out + 2, value, "", d_v),
        Leg(key, value, "source position", n),
        Leg(out + 1, None, "stream", layer.d_model, (-_OUTSIDE, floor)),
    ]
    title = f"what attention adds to the stream, {layer.n_heads} heads" + (
        ", plus b$_O$" if layer.b_O is not None else ""
    )
    bubbles = [Bubble(inside, _softmax(layer))]
    if layer.head_norm is not None:
        bubbles += [Bubble((0, 1), "norm"), Bubble((key - 1, key), "norm")]
    return Diagram((*nodes,), (*legs,), title, (*bubbles,))


def composition_diagram(
    kind: Literal["Q", "K", "V"], later: tuple[Attention, int], earlier: tuple[Attention, int]
) -> Diagram:
    """Describe one term of the path expansion: a head that reads, as query, key or value, what an earlier head wrote.

    Parameters
    ----------
    kind
        "Q" and "K" are terms of the later head's scores; the pattern of the earlier head moves the position on that
        side. The term of "K" is the virtual induction head where the earlier head attends to the previous token.
        "V" is the virtual head, A^2 A^1 (x) the product of the weights.
    later, earlier
        (layer, head).

    Raises
    ------
    ArgumentError, ArgumentTypeError
        If the kind is not known, a layer is no Attention or has no such head, their streams differ in width, or the
        scores are no bilinear form.

    Examples
    --------
    >>> import tnlib_adapters
    >>> model = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path())
    >>> term = composition_diagram("K", (model.attention(1), 0), (model.attention(0), 2))
    >>> [node.label.split()[0] for node in term.nodes if node.kind == "matrix"][-1]
    'A$^1$'
    """
    if kind not in ("Q", "K", "V"):
        raise ArgumentError(f"composition_diagram: kind must be 'Q', 'K' or 'V', got {kind!r}; choose one.")
    (two, h), (one, g) = later, earlier
    h, g = _checked("composition_diagram", two, h), _checked("composition_diagram", one, g)
    if two.d_model != one.d_model:
        raise ArgumentError(
            f"composition_diagram: both layers must have one d_model, got {two.d_model} and {one.d_model}; "
            "take them from one model."
        )
    if kind == "V":
        return _virtual_head(two, h, one, g)
    _refuse_norm("composition_diagram", two)
    return _composed_scores(kind, two, h, one, g)


def dense_diagram(weights: Sequence[Any], activation: str = "relu") -> Diagram:
    """Describe a dense network: what is in a bubble must be contracted before the function of the bubble is applied.

    Parameters
    ----------
    weights
        Matrices (in, out), x @ weight, the first the first to act.
    activation
        The name of the function between them.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        If these are no matrices that follow one another.

    Examples
    --------
    >>> import numpy as np
    >>> net = dense_diagram([np.ones((4, 16)), np.ones((16, 16)), np.ones((16, 3))])
    >>> len(net.bubbles), net.open_legs
    (2, (('out', 3),))
    """
    if not isinstance(weights, Sequence | np.ndarray) or len(weights) == 0:
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
    nodes = [Node("tensor", "x", (count * _STEP, 0.0))]
    nodes += [_weight(f"W$_{k + 1}$", w, ((count - 1 - k) * _STEP, 0.0), tip=1, way=-1.0) for k, w in enumerate(arrays)]
    legs = [Leg(k, k + 1, "in" if k == 0 else f"layer {k}", len(w)) for k, w in enumerate(arrays)]
    legs.append(Leg(count, None, "out", arrays[-1].shape[1], (-_REACH, 0.0)))
    bubbles = tuple(Bubble(tuple(range(k + 1)), activation) for k in range(1, count))
    return Diagram((*nodes,), (*legs,), f"dense network, {count} layers", bubbles)


Piece = tuple[str, Array | None, int, str]  # label, array to be measured, its leg at the tip, name of the next bond


def _checked(function: str, layer: Any, head: Any) -> int:
    if not isinstance(layer, Attention):
        raise ArgumentTypeError(
            f"{function}: layer must be an Attention, got {type(layer).__name__}; take one from a checkpoint."
        )
    return as_index(function, "head", head, layer.n_heads)


def _to_key_value(layer: Attention, hub: int, node: int) -> Leg:
    """Return the leg of the heads to weights that several query heads may share."""
    group = layer.n_heads // layer.kv_heads
    return Leg(hub, node, "" if group == 1 else f"shared by {group}", layer.kv_heads)


def _refuse_norm(function: str, layer: Attention) -> None:
    if layer.head_norm is not None:
        raise ArgumentError(
            f"{function}: layer must have scores that are a bilinear form, got one whose queries and keys are "
            "normalised; draw it with layer_diagram."
        )


def _query_key(layer: Attention, head: int | None) -> list[Piece]:
    """Return the matrices of a score from the query on; of all heads where none is named."""
    group = layer.n_heads // layer.kv_heads
    q = None if head is None else _with_bias(layer.W_Q[head], None if layer.b_Q is None else layer.b_Q[head])
    k = None if head is None else layer.W_K[head // group]
    if k is not None and layer.b_K is not None and head is not None:
        k = _with_bias(k, layer.b_K[head // group])
    name = "d_head" if head is None else f"head {head}"
    turn = [("R", None, 0, "")] if layer.rotary is not None else []
    return [(_named("Q", layer.b_Q), q, 1, name), *turn, (_named("K", layer.b_K), k, 1, "")]


def _output_value(layer: Attention, head: int | None) -> list[Piece]:
    group = layer.n_heads // layer.kv_heads
    o = None if head is None else layer.W_O[head]
    v = None
    if head is not None:
        kv = head // group
        v = _with_bias(layer.W_V[kv], None if layer.b_V is None else layer.b_V[kv])
    return [("W$_O$", o, 0, "d_head" if head is None else f"head {head}"), (_named("V", layer.b_V), v, 1, "")]


def _with_bias(weight: Array, bias: Array | None) -> Array:
    return weight if bias is None else np.concatenate([weight, bias[None]])


def _named(letter: str, bias: Array | None) -> str:
    return f"W$_{letter}$" + ("" if bias is None else f"\nb$_{letter}$")


def _read(layer: Attention, letter: str) -> tuple[str, int]:
    """Return the stream as this projection reads it, and its size: with a bias, one coordinate more."""
    bias = getattr(layer, f"b_{letter}")
    return ("x", layer.d_model) if bias is None else ("$\\tilde{x}$", layer.d_model + 1)


def _weight(label: str, a: Array | None, at: tuple[float, float], *, tip: int, way: float) -> Node:
    return Node("matrix", label, at) if a is None else piece(label, a, tip, at, (way, 0.0))


def _chain(pieces: Sequence[Piece], size: int, x: float, y: float, *, first: int = 0) -> tuple[list[Node], list[Leg]]:
    """Put matrices in a row from (x, y) to the right, and the bond d_head between them; tips meet there."""
    nodes = [
        _weight(label, a, (x + k * _STEP, y), tip=tip, way=1.0 if k == 0 else -1.0)
        for k, (label, a, tip, _) in enumerate(pieces)
    ]
    legs = [Leg(first + k, first + k + 1, pieces[k][3], size) for k in range(len(pieces) - 1)]
    return nodes, legs


def _position_ends(node: int, at: tuple[float, float], n: int | None, half: float) -> list[Leg]:
    x, y = at
    return [
        Leg(node, None, "to", n, (x - half - _REACH, y)),
        Leg(node, None, "from", n, (x + half + _REACH, y)),
    ]


def _stream_ends(layer: Attention, output: int, value: int, nodes: Sequence[Node]) -> list[Leg]:
    (x0, y), (x1, _) = nodes[0].position, nodes[-1].position
    return [
        Leg(output, None, "written", layer.d_model, (x0 - _REACH, y)),
        Leg(value, None, "read", _read(layer, "V")[1], (x1 + _REACH, y)),
    ]


def _term(layer: Attention, head: int, n: int | None) -> Diagram:
    """Describe A^h (x) W_O^h W_V^h."""
    at = (_STEP / 2, 0.0)
    weights, inner = _chain(_output_value(layer, head), layer.d_head, 0.0, -_ROW, first=1)
    legs = [*_position_ends(0, at, n, _STEP / 2), *inner, *_stream_ends(layer, 1, 2, weights)]
    return Diagram((Node("matrix", f"A$^{{{head}}}$", at), *weights), (*legs,))


def _text(text: str, x: float) -> Diagram:
    return Diagram((Node("text", text, (x, -_ROW / 2)),), ())


def _softmax(layer: Attention) -> str:
    causal = "causal " if layer.causal else ""
    window = "" if layer.window is None else f" over {layer.window} positions"
    score = f"{layer.scale:.4g} ..." + ("" if layer.alibi is None else " - slope distance")
    if layer.softcap is not None:
        score = f"{layer.softcap:g} tanh({score} / {layer.softcap:g})"
    return f"{causal}softmax({score}){window}"


def _virtual_head(two: Attention, h: int, one: Attention, g: int) -> Diagram:
    """Describe A^2 A^1 (x) W_O^2 W_V^2 W_O^1 W_V^1: as narrow as one head."""
    later, inner_2 = _chain(_output_value(two, h), two.d_head, 0.0, -1.4, first=2)
    earlier, inner_1 = _chain(_output_value(one, g), one.d_head, 2 * _STEP, -1.4, first=4)
    nodes = [Node("matrix", "A$^2$", (_STEP / 2, 0.0)), Node("matrix", "A$^1$", (2.5 * _STEP, 0.0)), *later, *earlier]
    end = 3 * _STEP + _REACH
    legs = [
        Leg(0, 1, "position"),
        Leg(0, None, "to", None, (-_REACH, 0.0)),
        Leg(1, None, "from", None, (end, 0.0)),
        *inner_2,
        Leg(3, 4, "stream", _read(two, "V")[1]),
        *inner_1,
        Leg(2, None, "written", two.d_model, (-_REACH, -1.4)),
        Leg(5, None, "read", _read(one, "V")[1], (end, -1.4)),
    ]
    return Diagram((*nodes,), (*legs,), f"V-composition: head {h} after head {g}, a virtual head")


def _composed_scores(kind: str, two: Attention, h: int, one: Attention, g: int) -> Diagram:
    """Describe the scores of a head that reads another one on one side; the other side reads the stream."""
    scores = _query_key(two, h)
    if kind == "Q":  # the composed side is drawn on the right, and turned round at the end
        scores = [(label, a, tip, scores[0][3] if k == 0 else "") for k, (label, a, tip, _) in enumerate(scores[::-1])]
    nodes, legs = _chain(scores, two.d_head, _STEP, 0.0, first=1)
    plain, other = ("Q", "K") if kind == "K" else ("K", "Q")
    nodes.insert(0, Node("tensor", _read(two, plain)[0], (0.0, 0.0)))
    legs.insert(0, Leg(0, 1, "stream", _read(two, plain)[1]))
    first = len(nodes)
    weights, inner = _chain(_output_value(one, g), one.d_head, first * _STEP, 0.0, first=first)
    end = (first + 2) * _STEP
    nodes += [*weights, Node("tensor", _read(one, "V")[0], (end, 0.0)), Node("matrix", "A$^1$", (end, -1.5))]
    legs += [
        Leg(first - 1, first, "stream", _read(two, other)[1]),
        *inner,
        Leg(first + 1, first + 2, "stream", _read(one, "V")[1]),
        Leg(first + 2, first + 3, "source"),
        Leg(0, None, "key" if kind == "Q" else "query", None, (0.0, -1.5 - _REACH)),
        Leg(first + 3, None, "query" if kind == "Q" else "key", None, (end, -1.5 - _REACH)),
    ]
    title = f"{kind}-composition: the {'queries' if kind == 'Q' else 'keys'} of head {h} read head {g}"
    bubble = Bubble(tuple(range(len(nodes))), _softmax(two))
    diagram = Diagram((*nodes,), (*legs,), title, (bubble,))
    return diagram if kind == "K" else _mirrored(diagram)


def _mirrored(diagram: Diagram) -> Diagram:
    """Return the same diagram, left and right exchanged."""
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
