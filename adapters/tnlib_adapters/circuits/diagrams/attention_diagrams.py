"""Tensor network diagrams of attention heads and layers, from their operators.

The output is on the left and the input on the right, as in products of matrices. Streams are homogeneous, x~ = [x, 1],
where biases read them. Node shapes follow the weights: a matrix that a gauge made isometric is a triangle.

`Diagram.evaluate` takes the arrays as `Attention` has them, (stream, d_head) for one head and with a first axis of
heads for all, biases as one more row of the stream; A is (heads, to, from). R is (d_head, d_head), or for all positions
(d_head, d_head, query position, key position). G (heads, key heads) is 1 where a query head reads a key head.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tnlib import ArgumentError
from tnlib._typing import Array
from tnlib._validate import as_count
from tnlib.drawing import Bubble, Diagram, Leg, Node, join
from tnlib.drawing.diagram import text
from tnlib.drawing.layout import array_node
from tnlib_adapters.attention.attention import Attention
from tnlib_adapters.circuits.arguments import as_head

STEP = 1.45  # distance between neighbours in a row
ROW = 2.1  # distance between the wire of positions and that of the stream
REACH = 0.9  # length of open legs

Piece = tuple[str, Array | None, int, str]  # label, array to classify, its leg at the tip, name of the next bond
_OUTSIDE = 1.3  # length of an open leg that leaves two bubbles
_MOST_HEADS = 2  # largest number of heads drawn as separate terms of a sum
_NEXT_ROW = ROW + 1.6  # distance from a layer to the sum over its heads
_SIGN_GAP = 0.6  # between a sign and the open legs beside it, whose labels are above and below the sign
_DOTS_GAP = 0.4  # between the dots and the signs beside them


def to_key_value(
    layer: Attention, hub: int, node: int, selection: int, at: tuple[float, float]
) -> tuple[list[Node], list[Leg]]:
    """Return what joins the head index to key or value weights: a leg, or the node G, with the number `selection`."""
    group = layer.group_size
    if group == 1:
        return [], [Leg(hub, node, "", layer.n_heads, axes=(None, 0))]
    shared = Leg(selection, node, f"shared by {group}", layer.kv_heads, axes=(1, 0))
    return [Node("matrix", "G", at)], [Leg(hub, selection, "", layer.n_heads, axes=(None, 0)), shared]


def refuse_norm(function: str, layer: Attention) -> None:
    """Raise `ArgumentError` if queries and keys are normalised: the scores are then not a bilinear form."""
    if not layer.is_bilinear:
        raise ArgumentError(
            f"{function}: layer must have scores that are a bilinear form, got one whose queries and keys, or "
            "latent vectors, are normalised; draw it with layer_diagram."
        )


def query_key(layer: Attention, head: int | None, linear: str = "") -> list[Piece]:
    """Return the matrices of a score from query to key, for one head or, for None, for all.

    `linear` names the sides without bias. R is drawn for one head at one distance, where it is a matrix.
    """
    q, k = (_projection(layer, letter, head, letter in linear) for letter in "QK")
    name = "d_head" if head is None else f"head {head}"
    # at one distance for all: a rotation unless scaled by a factor, which is measured
    turn = [] if layer.rotary is None else [("R", layer.rotary.rotate(np.eye(layer.d_head), 1), 1, "")]
    return [(q[0], q[1], 1, name), *turn, (k[0], k[1], 1, "")]


def output_value(layer: Attention, head: int | None, linear: str = "") -> list[Piece]:
    """Return the matrices of a head from output to input, for one head or, for None, for all; `linear`: no bias."""
    v = _projection(layer, "V", head, "V" in linear)
    o = None if head is None else layer.W_O[head]
    return [("W$_O$", o, 0, "d_head" if head is None else f"head {head}"), (v[0], v[1], 1, "")]


def turned(pieces: Sequence[Piece]) -> list[Piece]:
    """Return the matrices in reverse order; the name stays with the first bond."""
    name = pieces[0][3]
    return [(label, a, tip, "" if k else name) for k, (label, a, tip, _) in enumerate(reversed(pieces))]


def _projection(layer: Attention, letter: str, head: int | None, linear: bool) -> tuple[str, Array | None]:
    """Return the label and, for one head, the matrix of a projection, with its bias unless `linear`."""
    weight, bias = getattr(layer, f"W_{letter}"), None if linear else getattr(layer, f"b_{letter}")
    label = f"W$_{letter}$" + ("" if bias is None else f"\nb$_{letter}$")
    if head is None:
        return label, None
    h = head * len(weight) // layer.n_heads
    return label, weight[h] if bias is None else np.concatenate([weight[h], bias[h][None]])


def read_stream(layer: Attention, letter: str, linear: str = "") -> tuple[str, int]:
    """Return the label and the size of the stream at this projection: homogeneous, one larger, if it has a bias."""
    bias = None if letter in linear else getattr(layer, f"b_{letter}")
    x = "m" if layer.cross and letter in "KV" else "x"  # m: memory
    return (x, layer.d_model) if bias is None else (f"$\\tilde{{{x}}}$", layer.d_model + 1)


def weight_node(label: str, a: Array | None, at: tuple[float, float], *, tip: int, way: float) -> Node:
    """Return the node of a matrix, with a shape by its structure if the array is known."""
    return Node("matrix", label, at) if a is None else array_node(label, a, tip, at, (way, 0.0))


def chain(pieces: Sequence[Piece], size: int, x: float, y: float, *, first: int = 0) -> tuple[list[Node], list[Leg]]:
    """Return nodes of matrices in a row from (x, y) to the right, and the legs between them, d_head where tips meet."""
    nodes = [
        weight_node(label, a, (x + k * STEP, y), tip=tip, way=1.0 if k == 0 else -1.0)
        for k, (label, a, tip, _) in enumerate(pieces)
    ]
    tips = [(tip + 1, tip + 1) for _, _, tip, _ in pieces]  # a first axis of heads, or none
    for k, (label, *_) in enumerate(pieces):
        if label == "R":  # its axes on the left and on the right; those of the queries come first
            tips[k] = (0, 1) if pieces[0][0].startswith("W$_Q") else (1, 0)
    legs = [
        Leg(first + k, first + k + 1, pieces[k][3], size, axes=(tips[k][1], tips[k + 1][0]))
        for k in range(len(pieces) - 1)
    ]
    return nodes, legs


def rotation_legs(nodes: Sequence[Node], query: int, key: int, n: int | None = None) -> list[Leg]:
    """Return the legs from the node R to the copy tensors of the query and key positions, over or under the row."""
    rotation = next(k for k, node in enumerate(nodes) if node.label == "R")
    x, y = nodes[rotation].position
    points = [((x + dx, y), (x + dx, nodes[k].position[1])) for dx, k in ((-0.12, query), (0.12, key))]
    if nodes[query].position[0] > nodes[key].position[0]:
        points.reverse()
    return [
        Leg(rotation, k, "", n, via=via, axes=(axis, None))
        for k, via, axis in zip((query, key), points, (2, 3), strict=True)
    ]


def position_ends(layer: Attention, node: int, at: tuple[float, float], n: int | None, half: float) -> list[Leg]:
    """Return the open legs of a pattern: output position, input position."""
    x, y = at
    return [
        Leg(node, None, "to", n, (x - half - REACH, y), axes=(1, None)),
        Leg(node, None, "from", source_size(layer, n), (x + half + REACH, y), axes=(2, None)),
    ]


def source_size(layer: Attention, n: int | None) -> int | None:
    """Return the number of positions that `n` queries read: `n`, or an open size in cross-attention."""
    return None if layer.cross else n


def stream_ends(layer: Attention, output: int, value: int, nodes: Sequence[Node]) -> list[Leg]:
    """Return the open legs of the weights: output stream, input stream."""
    (x0, y), (x1, _) = nodes[0].position, nodes[-1].position
    return [
        Leg(output, None, "written", layer.d_model, (x0 - REACH, y), axes=(2, None)),
        Leg(value, None, "read", read_stream(layer, "V")[1], (x1 + REACH, y), axes=(1, None)),
    ]


def softmax_label(layer: Attention) -> str:
    """Return the label of the function from scores, a contraction "...", to patterns."""
    causal = "causal " if layer.causal else ""
    window = "" if layer.window is None else f" over {layer.window} positions"
    scores = f"{layer.scale:.4g} ...{offsets_label(layer)}"
    if layer.softcap is not None:
        scores = f"{layer.softcap:g} tanh({scores} / {layer.softcap:g})"
    return f"{causal}softmax({scores}){window}"


def offsets_label(layer: Attention) -> str:
    """Return the terms of the scores that depend on the distance alone, empty if there are none."""
    return ("" if layer.alibi is None else " - slope distance") + (
        "" if layer.relative_bias is None else " + bias(distance)"
    )


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
        Leg(0, None, "query", size[0], (-REACH, 0.0), axes=(1, None)),
        Leg(last, None, "key", size[1], (x + REACH, 0.0), axes=(1, None)),
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
    nodes, legs = chain(output_value(layer, head), layer.d_value, 0.0, 0.0)
    return Diagram((*nodes,), (*legs, *stream_ends(layer, 0, 1, nodes)), f"OV of head {head}")


def frozen_diagram(layer: Attention, n_positions: int | None = None) -> Diagram:
    r"""Return the diagram of a layer with frozen patterns, with a head index and as a sum over heads.

    A head is :math:`A \otimes W_O W_V`.

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
    >>> frozen_diagram(layer, 10).open_legs[:4]  # of the first of five terms
    (('to', 10), ('from', 10), ('written', 64), ('read', 65))
    """
    as_head("frozen_diagram", layer, 0)
    n = None if n_positions is None else as_count("frozen_diagram", "n_positions", n_positions)
    heads = layer.n_heads
    nodes = [Node("matrix", "A", (STEP / 2, 0.0)), Node("delta", "", (STEP / 2, -0.9))]
    legs = [*position_ends(layer, 0, (STEP / 2, 0.0), n, STEP / 2), Leg(0, 1, "heads", heads, axes=(0, None))]
    weights, inner = chain(output_value(layer, None), layer.d_value, 0.0, -ROW, first=2)
    selection, shared = to_key_value(layer, 1, 3, 4, (STEP, -0.9))
    legs += [Leg(1, 2, "", heads, axes=(None, 0)), *shared, *inner, *stream_ends(layer, 2, 3, weights)]
    layer_part = Diagram((*nodes, *weights, *selection), (*legs,))
    parts, x = [], 0.0  # x of the next sign
    drawn_heads = list(range(heads)) if heads <= _MOST_HEADS else [0, None, heads - 1]
    for k, head in enumerate(drawn_heads):
        parts.append(text("=" if k == 0 else "+", (x, -ROW / 2)))
        if head is None:
            parts.append(text("· · ·", (x + _DOTS_GAP, -ROW / 2)))
            x += 2 * _DOTS_GAP
        else:
            parts.append(_head_term(layer, head, n).moved(x + _SIGN_GAP + REACH, 0.0))
            x += STEP + 2 * (REACH + _SIGN_GAP)
    middle = (x - _SIGN_GAP) / 2  # of the row below
    parts = [layer_part, *(part.moved(STEP / 2 - middle, -_NEXT_ROW) for part in parts)]
    return join(tuple(parts), f"attention with fixed patterns, sum over {heads} heads")


def layer_diagram(layer: Attention, n_positions: int | None = None) -> Diagram:
    """Return the diagram of an attention layer's output; a bubble is contracted first, then its function applied.

    Parameters and errors as in `frozen_diagram`. The stream x is drawn wherever it is read, and m, the memory
    of cross-attention.

    Examples
    --------
    >>> import tnlib_adapters
    >>> layer = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path()).attention(0)
    >>> layer_diagram(layer).bubbles[0].label, layer_diagram(layer, 10).open_legs
    ('causal softmax(0.25 ...)', (('position', 10), ('stream', 64)))
    """
    as_head("layer_diagram", layer, 0)
    n = None if n_positions is None else as_count("layer_diagram", "n_positions", n_positions)
    nodes, legs, (query_at, key_at), hub = _score_network(layer, n)
    key_x, center = nodes[key_at].position[0], nodes[hub].position[0]
    inside = tuple(range(len(nodes)))
    floor = -1.0 - ROW - 0.4
    out = len(nodes)  # the copy tensor of heads between the pattern and the values
    nodes.append(Node("delta", "", (center, floor + 0.95)))
    weights, value_legs = chain(output_value(layer, None), layer.d_value, center - STEP / 2, floor, first=out + 1)
    x_v, d_v = read_stream(layer, "V")
    nodes += [*weights, Node("tensor", x_v, (key_x, floor))]
    value = len(nodes) - 1
    selection, value_heads = to_key_value(layer, out, out + 2, len(nodes), (center + STEP / 2, floor + 0.95))
    nodes += selection
    # functions act on the last leg that leaves their bubble: source positions, and columns of a head
    detour = () if layer.rotary is None else ((key_x + 0.8, 1.0), (key_x + 0.8, floor))
    legs = [
        Leg(hub, out, "heads", layer.n_heads),
        *_outputs(layer, n, nodes, query_at, out + 1, floor),
        Leg(key_at, value, "source position", source_size(layer, n), via=detour, axes=(0, 0)),
        *legs,
        Leg(out, out + 1, "", layer.n_heads, axes=(None, 0)),
        *value_heads,
        *value_legs,
        Leg(out + 2, value, "", d_v, axes=(1, 1)),
    ]
    title = f"attention output, {layer.n_heads} heads"
    title += "" if layer.latent_norm is None else ", without the norms of latent vectors"
    bubbles = [Bubble(inside, softmax_label(layer))]
    if layer.head_norm is not None:
        key = len(query_key(layer, None)) + 1
        bubbles += [Bubble((0, 1), "norm"), Bubble((key - 1, key), "norm")]
    return Diagram((*nodes,), (*legs,), title, (*bubbles,))


def _score_network(layer: Attention, n: int | None) -> tuple[list[Node], list[Leg], tuple[int, int], int]:
    """Return nodes and legs of the scores of all heads, the nodes of query and key positions, and that of heads."""
    (x_q, d_q), (x_k, d_k) = (read_stream(layer, letter) for letter in "QK")
    middle, inner = chain(query_key(layer, None), layer.d_head, STEP, 0.0, first=1)
    right = middle[-1].position[0] + STEP
    key, hub = len(middle) + 1, len(middle) + 2  # the node x on the side of the keys, and the copy tensor of heads
    center = (middle[0].position[0] + middle[-1].position[0]) / 2
    nodes = [Node("tensor", x_q, (0.0, 0.0)), *middle, Node("tensor", x_k, (right, 0.0))]
    nodes.append(Node("delta", "", (center, -1.0)))
    query_at, key_at, rotary = 0, key, []
    if layer.rotary is not None:
        query_at, key_at = hub + 1, hub + 2
        nodes += [Node("delta", "", (x, 1.0)) for x in (0.0, right)]
        rotary = [Leg(end, at, "", n, axes=(0, None)) for end, at in ((0, query_at), (key, key_at))]
    selection, key_heads = to_key_value(layer, hub, key - 1, len(nodes), (middle[-1].position[0], -1.0))
    nodes += selection
    legs = [
        *rotary,
        Leg(1, hub, "", layer.n_heads, axes=(0, None)),
        *key_heads,
        *inner,
        Leg(0, 1, "stream", d_q, axes=(1, 1)),
        Leg(key - 1, key, "", d_k, axes=(1, 1)),
        *(rotation_legs(nodes, query_at, key_at, n) if rotary else []),
    ]
    return nodes, legs, (query_at, key_at), hub


def _outputs(layer: Attention, n: int | None, nodes: list[Node], query: int, output: int, floor: float) -> list[Leg]:
    """Return the open legs of a layer, behind the sum with b_O, which is added to `nodes`, if there is one."""
    y = nodes[query].position[1]
    if layer.b_O is None:
        return [
            Leg(query, None, "position", n, (-_OUTSIDE, y), axes=(0, None)),
            Leg(output, None, "stream", layer.d_model, (-_OUTSIDE, floor), axes=(2, None)),
        ]
    total, x = len(nodes), -_OUTSIDE - 0.2
    nodes += [Node("function", "+", (x, floor)), Node("tensor", "b$_O$", (x, floor - 1.0))]
    return [
        Leg(query, total, "position", n, via=((x, y),), axes=(0, None)),
        Leg(output, total, "", layer.d_model, axes=(2, None)),
        Leg(total + 1, total, "", layer.d_model),
        *stream_copy(total, (x, floor), n, layer.d_model),
    ]


def stream_copy(node: int, at: tuple[float, float], n: int | None, d_model: int) -> list[Leg]:
    """Return the open legs of an array (position, stream), to the left."""
    x, y = at
    return [
        Leg(node, None, "position", n, (x - REACH, y + 0.25), ((x, y + 0.25),)),
        Leg(node, None, "stream", d_model, (x - REACH, y - 0.25), ((x, y - 0.25),)),
    ]


def _head_term(layer: Attention, head: int, n: int | None) -> Diagram:
    """Return the diagram of A^h (x) W_O^h W_V^h."""
    at = (STEP / 2, 0.0)
    weights, inner = chain(output_value(layer, head), layer.d_value, 0.0, -ROW, first=1)
    legs = [*position_ends(layer, 0, at, n, STEP / 2), *inner, *stream_ends(layer, 1, 2, weights)]
    return Diagram((Node("matrix", f"A$^{{{head}}}$", at), *weights), (*legs,))
