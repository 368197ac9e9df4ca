"""Building blocks of attention diagrams: rows of matrices, open legs, function labels."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tnlib import ArgumentError
from tnlib._typing import Array
from tnlib.drawing import Leg, Node
from tnlib.drawing.node_kinds import array_node
from tnlib_adapters.attention.attention import Attention

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
    if layer.head_norm is not None:
        raise ArgumentError(
            f"{function}: layer must have scores that are a bilinear form, got one whose queries and keys are "
            "normalised; draw it with layer_diagram."
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
    if layer.softcap is not None:
        score = f"{layer.softcap:g} tanh({score} / {layer.softcap:g})"
    return f"{causal}softmax({score}){window}"
