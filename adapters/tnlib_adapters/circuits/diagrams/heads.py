"""Tensor network diagrams of attention heads and layers, from their operators.

The output is on the left and the input on the right, as in products of matrices. Streams are homogeneous, x~ = [x, 1],
where biases read them. Node shapes follow the weights: a matrix that a gauge made isometric is a triangle.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tnlib import ArgumentError
from tnlib._typing import Array
from tnlib._validate import as_count
from tnlib.drawing import Bubble, Diagram, Leg, Node, join
from tnlib.drawing.diagram import text
from tnlib.drawing.node_kinds import array_node
from tnlib_adapters.attention.attention import Attention
from tnlib_adapters.circuits.arguments import as_head

STEP = 1.6  # distance between neighbours in a row
ROW = 2.1  # distance between the wire of positions and that of the stream
REACH = 0.9  # length of open legs

Piece = tuple[str, Array | None, int, str]  # label, array to classify, its leg at the tip, name of the next bond


def to_key_value(layer: Attention, hub: int, node: int) -> Leg:
    """Return the leg from the head index to key or value weights, which several query heads may share."""
    group = layer.n_heads // layer.kv_heads
    return Leg(hub, node, "" if group == 1 else f"shared by {group}", layer.kv_heads)


def refuse_norm(function: str, layer: Attention) -> None:
    """Raise `ArgumentError` if queries and keys are normalised: the scores are then not a bilinear form."""
    if not layer.is_bilinear:
        raise ArgumentError(
            f"{function}: layer must have scores that are a bilinear form, got one whose queries and keys, or "
            "latent vectors, are normalised; draw it with layer_diagram."
        )


def query_key(layer: Attention, head: int | None) -> list[Piece]:
    """Return the matrices of a score from query to key, for one head or, for None, for all."""
    group = layer.n_heads // layer.kv_heads
    q = None if head is None else _with_bias(layer.W_Q[head], None if layer.b_Q is None else layer.b_Q[head])
    k = None if head is None else layer.W_K[head // group]
    if k is not None and layer.b_K is not None and head is not None:
        k = _with_bias(k, layer.b_K[head // group])
    name = "d_head" if head is None else f"head {head}"
    # at one distance for all: a rotation unless scaled by a factor, which is measured
    turn = [] if layer.rotary is None else [("R", layer.rotary.rotate(np.eye(layer.d_head), 1), 1, "")]
    return [(_named("Q", layer.b_Q), q, 1, name), *turn, (_named("K", layer.b_K), k, 1, "")]


def output_value(layer: Attention, head: int | None) -> list[Piece]:
    """Return the matrices of a head from output to input, for one head or, for None, for all."""
    group = layer.n_heads // layer.kv_heads
    o = None if head is None else layer.W_O[head]
    v = None
    if head is not None:
        kv = head // group
        v = _with_bias(layer.W_V[kv], None if layer.b_V is None else layer.b_V[kv])
    return [("W$_O$", o, 0, "d_head" if head is None else f"head {head}"), (_named("V", layer.b_V), v, 1, "")]


def turned(pieces: Sequence[Piece]) -> list[Piece]:
    """Return the matrices in reverse order; the name stays with the first bond."""
    name = pieces[0][3]
    return [(label, a, tip, "" if k else name) for k, (label, a, tip, _) in enumerate(reversed(pieces))]


def _with_bias(weight: Array, bias: Array | None) -> Array:
    return weight if bias is None else np.concatenate([weight, bias[None]])


def _named(letter: str, bias: Array | None) -> str:
    return f"W$_{letter}$" + ("" if bias is None else f"\nb$_{letter}$")


def read_stream(layer: Attention, letter: str) -> tuple[str, int]:
    """Return the label and the size of the stream at this projection: homogeneous, one larger, if it has a bias."""
    bias = getattr(layer, f"b_{letter}")
    return ("x", layer.d_model) if bias is None else ("$\\tilde{x}$", layer.d_model + 1)


def weight_node(label: str, a: Array | None, at: tuple[float, float], *, tip: int, way: float) -> Node:
    """Return the node of a matrix, with a shape by its structure if the array is known."""
    return Node("matrix", label, at) if a is None else array_node(label, a, tip, at, (way, 0.0))


def chain(pieces: Sequence[Piece], size: int, x: float, y: float, *, first: int = 0) -> tuple[list[Node], list[Leg]]:
    """Return nodes of matrices in a row from (x, y) to the right, and the legs between them, d_head where tips meet."""
    nodes = [
        weight_node(label, a, (x + k * STEP, y), tip=tip, way=1.0 if k == 0 else -1.0)
        for k, (label, a, tip, _) in enumerate(pieces)
    ]
    legs = [Leg(first + k, first + k + 1, pieces[k][3], size) for k in range(len(pieces) - 1)]
    return nodes, legs


def position_ends(node: int, at: tuple[float, float], n: int | None, half: float) -> list[Leg]:
    """Return the open legs of a pattern: output position, input position."""
    x, y = at
    return [
        Leg(node, None, "to", n, (x - half - REACH, y)),
        Leg(node, None, "from", n, (x + half + REACH, y)),
    ]


def stream_ends(layer: Attention, output: int, value: int, nodes: Sequence[Node]) -> list[Leg]:
    """Return the open legs of the weights: output stream, input stream."""
    (x0, y), (x1, _) = nodes[0].position, nodes[-1].position
    return [
        Leg(output, None, "written", layer.d_model, (x0 - REACH, y)),
        Leg(value, None, "read", read_stream(layer, "V")[1], (x1 + REACH, y)),
    ]


def softmax_label(layer: Attention) -> str:
    """Return the label of the function from scores to patterns."""
    causal = "causal " if layer.causal else ""
    window = "" if layer.window is None else f" over {layer.window} positions"
    score = f"{layer.scale:.4g} ..." + ("" if layer.alibi is None else " - slope distance")
    score += "" if layer.relative_bias is None else " + bias(distance)"
    if layer.softcap is not None:
        score = f"{layer.softcap:g} tanh({score} / {layer.softcap:g})"
    return f"{causal}softmax({score}){window}"


_OUTSIDE = 1.3  # length of an open leg that leaves two bubbles
_MOST_HEADS = 2  # largest number of heads drawn as separate terms of a sum
_NEXT_ROW = ROW + 1.6  # distance from a layer to the sum over its heads


def qk_diagram(layer: Attention, head: int) -> Diagram:
    """Return the diagram of the query-key operator of a head: two factors with bond d_head, a rotation R between.

    Parameters
    ----------
    layer
        The attention layer.
    head
        Index, from 0.

    Returns
    -------
    Diagram
        For `tnlib.draw`: the query on the left, the key on the right.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        If `layer` is not an Attention, has no such head, or normalises queries and keys.

    Examples
    --------
    >>> import tnlib, tnlib_adapters
    >>> layer = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path()).attention(0)
    >>> tnlib.draw(qk_diagram(layer, 0)).diagram.bonds
    (('head 0', 16),)
    """
    head = as_head("qk_diagram", layer, head)
    refuse_norm("qk_diagram", layer)
    nodes, legs = chain(query_key(layer, head), layer.d_head, 0.0, 0.0)
    last = len(nodes) - 1
    x = nodes[-1].position[0]
    size = read_stream(layer, "Q")[1], read_stream(layer, "K")[1]
    ends = [
        Leg(0, None, "query", size[0], (-REACH, 0.0)),
        Leg(last, None, "key", size[1], (x + REACH, 0.0)),
    ]
    return Diagram((*nodes,), (*legs, *ends), f"QK of head {head}, times {layer.scale:.4g}")


def ov_diagram(layer: Attention, head: int) -> Diagram:
    """Return the diagram of the output-value operator of a head: input on the right, output on the left.

    Parameters and errors as in `qk_diagram`.

    Examples
    --------
    >>> import tnlib_adapters
    >>> layer = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path()).attention(0)
    >>> ov_diagram(layer, 0).open_legs
    (('written', 64), ('read', 65))
    """
    head = as_head("ov_diagram", layer, head)
    nodes, legs = chain(output_value(layer, head), layer.d_head, 0.0, 0.0)
    return Diagram((*nodes,), (*legs, *stream_ends(layer, 0, 1, nodes)), f"OV of head {head}")


def frozen_diagram(layer: Attention, n_positions: int | None = None) -> Diagram:
    """Return the diagram of a layer with frozen patterns: A (x) W_O W_V with a head index, and as a sum over heads.

    Parameters
    ----------
    layer
        The attention layer.
    n_positions
        Sequence length; an open size by default.

    Returns
    -------
    Diagram
        The pattern above, on the wire of positions; the weights below, on the wire of the stream. The second row, after
        the equals sign, is the sum over heads.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        If `layer` is not an Attention or `n_positions` is not a positive integer.

    Examples
    --------
    >>> import tnlib_adapters
    >>> layer = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path()).attention(0)
    >>> [node.label for node in frozen_diagram(layer, 10).nodes[:2]], frozen_diagram(layer).open_legs[0]
    (['A', ''], ('to', None))
    """
    as_head("frozen_diagram", layer, 0)
    n = None if n_positions is None else as_count("frozen_diagram", "n_positions", n_positions)
    heads = layer.n_heads
    nodes = [Node("matrix", "A", (STEP / 2, 0.0)), Node("delta", "", (STEP / 2, -0.9))]
    legs = [*position_ends(0, (STEP / 2, 0.0), n, STEP / 2), Leg(0, 1, "heads", heads)]
    weights, inner = chain(output_value(layer, None), layer.d_head, 0.0, -ROW, first=2)
    legs += [Leg(1, 2, "", heads), to_key_value(layer, 1, 3)]
    layer_part = Diagram((*nodes, *weights), (*legs, *inner, *stream_ends(layer, 2, 3, weights)))
    parts, x = [], 0.0  # x of the next sign
    drawn_heads = list(range(heads)) if heads <= _MOST_HEADS else [0, None, heads - 1]
    for k, head in enumerate(drawn_heads):
        parts.append(text("=" if k == 0 else "+", (x, -ROW / 2)))
        if head is None:
            parts.append(text("· · ·", (x + 0.6, -ROW / 2)))
            x += 1.2
        else:
            parts.append(_head_term(layer, head, n).moved(x + 0.8 + REACH, 0.0))
            x += STEP + 2 * (REACH + 0.8)
    middle = (x - 0.8 - REACH) / 2  # of the row below
    parts = [layer_part, *(part.moved(STEP / 2 - middle, -_NEXT_ROW) for part in parts)]
    return join(tuple(parts), f"attention with fixed patterns, sum over {heads} heads")


def layer_diagram(layer: Attention, n_positions: int | None = None) -> Diagram:
    """Return the diagram of an attention layer's output; a bubble is contracted first, then its function applied.

    Parameters and errors as in `frozen_diagram`. The stream x is drawn wherever it is read.

    Examples
    --------
    >>> import tnlib_adapters
    >>> layer = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path()).attention(0)
    >>> layer_diagram(layer).bubbles[0].label, layer_diagram(layer, 10).open_legs
    ('causal softmax(0.25 ...)', (('position', 10), ('stream', 64)))
    """
    as_head("layer_diagram", layer, 0)
    n = None if n_positions is None else as_count("layer_diagram", "n_positions", n_positions)
    x_q, d_q = read_stream(layer, "Q")
    x_v, d_v = read_stream(layer, "V")
    middle, inner_legs = chain(query_key(layer, None), layer.d_head, STEP, 0.0, first=1)
    right = middle[-1].position[0] + STEP
    key = len(middle) + 1  # the node x on the side of the keys
    center = (middle[0].position[0] + middle[-1].position[0]) / 2
    nodes = [Node("tensor", x_q, (0.0, 0.0)), *middle, Node("tensor", read_stream(layer, "K")[0], (right, 0.0))]
    nodes.append(Node("delta", "", (center, -1.0)))
    inside = tuple(range(len(nodes)))
    hub, out = len(nodes) - 1, len(nodes)
    floor = -1.0 - ROW - 0.4
    nodes.append(Node("delta", "", (center, floor + 0.95)))
    weights, value_legs = chain(output_value(layer, None), layer.d_head, center - STEP / 2, floor, first=out + 1)
    nodes += [*weights, Node("tensor", x_v, (right, floor))]
    value = len(nodes) - 1
    legs = [
        Leg(0, None, "position", n, (-_OUTSIDE, 0.0)),
        Leg(0, 1, "stream", d_q),
        *inner_legs,
        Leg(key - 1, key, "", read_stream(layer, "K")[1]),
        Leg(1, hub, "", layer.n_heads),
        to_key_value(layer, hub, key - 1),
        Leg(hub, out, "heads", layer.n_heads),
        Leg(out, out + 1, "", layer.n_heads),
        to_key_value(layer, out, out + 2),
        *value_legs,
        Leg(out + 2, value, "", d_v),
        Leg(key, value, "source position", n),
        Leg(out + 1, None, "stream", layer.d_model, (-_OUTSIDE, floor)),
    ]
    title = f"attention output, {layer.n_heads} heads" + (", plus b$_O$" if layer.b_O is not None else "")
    title += "" if layer.latent_norm is None else ", without the norms of latent vectors"
    bubbles = [Bubble(inside, softmax_label(layer))]
    if layer.head_norm is not None:
        bubbles += [Bubble((0, 1), "norm"), Bubble((key - 1, key), "norm")]
    return Diagram((*nodes,), (*legs,), title, (*bubbles,))


def _head_term(layer: Attention, head: int, n: int | None) -> Diagram:
    """Return the diagram of A^h (x) W_O^h W_V^h."""
    at = (STEP / 2, 0.0)
    weights, inner = chain(output_value(layer, head), layer.d_head, 0.0, -ROW, first=1)
    legs = [*position_ends(0, at, n, STEP / 2), *inner, *stream_ends(layer, 1, 2, weights)]
    return Diagram((Node("matrix", f"A$^{{{head}}}$", at), *weights), (*legs,))
