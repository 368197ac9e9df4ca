"""Networks of attention and feed-forward layers in the diagram of a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from tnlib.drawing import Leg, Node
from tnlib.drawing.diagram import Point
from tnlib_adapters.architectures.wiring import FeedForwardWiring
from tnlib_adapters.attention.attention import Attention
from tnlib_adapters.circuits.diagrams.attention_diagrams import softmax_label

Port: TypeAlias = tuple[int, int | None]  # number of a node and axis of its array
Stream: TypeAlias = tuple[Port, Port]  # position and stream
Line: TypeAlias = tuple[Port, list[Point]]  # start of a leg, and points on its way

STEP = 1.5
_NEAR, _FAR = 0.45, 0.9  # distances of the lines of heads and of positions from a row of weights
_LETTER = 0.085  # width of a letter of a function


@dataclass
class DiagramBuilder:
    """Nodes and legs in the order in which they are added, functions after what they read.

    `n` is the sequence length, None if open, `d` the width of the stream.
    """

    n: int | None
    d: int
    nodes: list[Node] = field(default_factory=list)
    legs: list[Leg] = field(default_factory=list)

    def add(self, kind: str, label: str, x: float, y: float) -> int:
        """Add a node at (x, y) and return its number."""
        self.nodes.append(Node(kind, label, (x, y)))
        return len(self.nodes) - 1

    def join(self, a: Port, b: Port, name: str = "", size: int | None = None, via: Sequence[Point] = ()) -> None:
        """Add a leg between two axes; into a function it ends at b, out of it it starts at a."""
        self.legs.append(Leg(a[0], b[0], name, size, via=tuple(via), axes=(a[1], b[1])))

    def pair(self, x: Stream, node: int, size: int, via: Sequence[Point] = ()) -> None:
        """Join position and stream to a function, the position beside the stream: above, or on the left."""
        gap = 0.17
        points = [self.nodes[x[0][0]].position, *via, self.nodes[node].position]
        is_level = [points[k][1] == points[k + 1][1] for k in range(len(points) - 1)]
        beside = [
            (u - gap * (not all(is_level[max(0, k - 1) : k + 1])), v + gap * any(is_level[max(0, k - 1) : k + 1]))
            for k, (u, v) in enumerate(points)
        ]
        self.join(x[0], (node, 0), via=beside)
        self.join(x[1], (node, 1), size=size, via=via)

    def on_stream(self, label: str, x: Stream, y: float, column: float = 0.0) -> Stream:
        """Return the stream behind a function of it."""
        node = self.add("function", label, column, y)
        self.pair(x, node, self.d)
        return (node, 0), (node, 1)

    def copies(self, x: Stream, at: Point, size: int) -> list[Stream]:
        """Return copies of an array; not all need be read."""
        node = self.add("function", "", *at)
        self.pair(x, node, size)
        return [((node, 2 * k), (node, 2 * k + 1)) for k in range(7)]

    def leave(self, node: int, position: Line | None, target: int) -> None:
        """Join what a sublayer writes to a function on its left: the stream of `node`, and the positions.

        `position` is None if positions leave from `node` as well.
        """
        x, y = self.nodes[target].position
        if position is None:
            self.pair(((node, 0), (node, 1)), target, self.d)
            return
        self.join(position[0], (target, 0), via=[*position[1], (x + 0.3, y - 0.4)])
        self.join((node, 2), (target, 1), "", self.d)

    def homogeneous(self, x: Stream, biased: bool, at: Point) -> tuple[Stream, int, float]:
        """Return the stream with the constant coordinate if a bias reads it, its size, and the next column."""
        column, y = at
        if not biased:
            return x, self.d, column
        return self.on_stream("[x, 1]", x, y, column), self.d + 1, column + 1.2


def draw_feed_forward(
    network: DiagramBuilder, k: int, wiring: FeedForwardWiring, d_ff: int, x: Stream, at: Point
) -> tuple[int, Line]:
    """Draw a feed-forward layer, what the activation reads on top; return the output matrix and the positions."""
    column, top = at
    biased = any(linear.bias for linear in wiring.inputs)
    x, size, column = network.homogeneous(x, biased, (column, top))
    mark = f"$^{{{k}}}"
    name = str(wiring.activation or wiring.activation_key)
    up = f"W{mark}_↑$" + (f"\nb{mark}_↑$" if biased else "")
    act_x = column + 1.6 + _LETTER * len(name) + (STEP - 0.5) * (wiring.gate is not None)
    end_x = act_x + 0.8 + _LETTER / 2 * len(name)
    if wiring.gate is None:
        weight = network.add("matrix", up, column + 0.5, top)
        act = network.add("function", name, act_x, top)
        down = network.add("matrix", f"W{mark}_↓$", column + 0.5, top - 1.6)
        start = network.nodes[x[0][0]].position[0]
        network.join(x[0], (act, 0), via=[(start, top + _NEAR), (act_x, top + _NEAR)])
        network.join(x[1], (weight, 0), "", size)
        network.join((weight, 1), (act, 1), "d_ff", d_ff)
        network.join((act, 1), (down, 0), "", d_ff, [(act_x, top - 1.6)])
        return down, ((act, 0), [(end_x, top), (end_x, top - 2.0)])
    copies = network.copies(x, (column, top), size)
    gate = network.add("matrix", f"gate{mark}$", column + STEP, top)
    act = network.add("function", name, act_x, top)
    weight = network.add("matrix", up, column + STEP, top - 1.2)
    product = network.add("delta", "", act_x, top - 1.2)
    positions = network.add("delta", "", end_x, top)
    down = network.add("matrix", f"W{mark}_↓$", column + STEP, top - 2.6)
    network.join(copies[0][0], (act, 0), via=[(column, top + _NEAR), (act_x, top + _NEAR)])
    network.join(copies[0][1], (gate, 0), "", size)
    network.join((gate, 1), (act, 1), "d_ff", d_ff)
    network.join((act, 0), (positions, None))
    network.join((act, 1), (product, None), "", d_ff)
    network.join(copies[1][0], (positions, None), via=[(column, top + _FAR), (end_x, top + _FAR)])
    network.join(copies[1][1], (weight, 0), "", size, [(column, top - 1.2)])
    network.join((weight, 1), (product, None), "", d_ff)
    network.join((product, None), (down, 0), "", d_ff, [(act_x, top - 2.6)])
    return down, ((positions, None), [(end_x, top - 3.0)])


class AttentionNetwork:
    """Network of an attention layer: queries above, keys below, their products between; then values and output.

    R (d_head, d_head, query position, key position) holds rotations by the distance, G (heads, key heads) assigns a key
    head to every query head. Norms of latent vectors multiply queries, keys and values by functions 1/rms of the
    stream.
    """

    def __init__(self, network: DiagramBuilder, k: int, layer: Attention, x: Stream, at: Point) -> None:
        self.network, self.layer, self.mark = network, layer, f"$^{{{k}}}"
        self.biased = any(bias is not None for bias in (layer.b_Q, layer.b_K, layer.b_V))
        x, self.size, self.left = network.homogeneous(x, self.biased, at)
        self.copies = network.copies(x, (self.left, at[1]), self.size)
        has_latent, has_norm = layer.latent_norm is not None, layer.head_norm is not None
        self.rows = {"Q": at[1], "K": at[1] - 2.0 - 2 * _FAR}
        self.rows["V"] = self.rows["K"] - (4.6 if has_latent else 2.2)
        self.middle = (self.rows["Q"] + self.rows["K"]) / 2
        self.weight_x = self.left + STEP
        self.cross_x = self.weight_x + 1.2 + 1.2 * has_latent + 1.3 * has_norm  # where queries and keys meet
        self.joint_x, self.hub_x = self.cross_x + 0.75, self.cross_x + 1.4
        self.hub = network.add("delta", "", self.hub_x, self.middle)
        kind, label = ("text", "") if layer.rotary is None else ("matrix", f"R{self.mark}$")
        self.meeting = network.add(kind, label, self.cross_x, self.middle)

    def draw(self) -> tuple[int, Line]:
        """Draw the layer; return the output matrix and the line of the positions."""
        network, layer = self.network, self.layer
        queries, keys = self._draw_side("Q"), self._draw_side("K")
        label = softmax_label(layer).replace("softmax(", f"softmax{self.mark}$\n(").replace(") over", ")\nover")
        half = 0.15 + _LETTER / 2 * max(map(len, label.split("\n")))
        x = self.hub_x + 0.8 + half
        pattern = network.add("function", label, x, self.middle)
        network.join((self.hub, None), (pattern, 0))
        for axis, (letter, (port, line)) in enumerate((("Q", queries), ("K", keys)), 1):
            far = self._lines(letter)[1]
            network.join(port, (pattern, axis), via=[*line, (x - 0.2, far), (x - 0.2, self.middle)])
        output = self._draw_values(pattern, x)
        floor = network.nodes[output].position[1]
        end_x = x + half + 0.2
        return output, ((pattern, 1), [(end_x, self.middle), (end_x, floor - 0.4)])

    def _lines(self, letter: str) -> tuple[float, float]:
        """Return the heights of the lines of heads and of positions of queries (above) or keys (below)."""
        side = 1 if letter == "Q" else -1
        return self.rows[letter] + side * _NEAR, self.rows[letter] + side * _FAR

    def _draw_side(self, letter: str) -> Line:
        """Draw queries or keys as far as the products and the copy tensor of heads; return the line of positions."""
        network, layer, row, (near, far) = self.network, self.layer, self.rows[letter], self._lines(letter)
        axis, top, x = "QK".index(letter), self.rows["Q"], self.weight_x
        heads_size = len(getattr(layer, f"W_{letter}"))
        weight = self._add_weight(letter)
        network.join(self.copies[axis][1], (weight, 1), "", self.size, [(self.left, row)] if axis else [])
        position = self.copies[axis][0]
        line = [(self.left - 0.2, top), (self.left - 0.2, far)] if axis else [(self.left, far)]
        heads: Port = (weight, 0)
        columns: Port = (weight, 2)
        heads_line = [(x, near)]
        if layer.head_norm is not None:
            x += 1.3
            norm = network.add("function", f"norm{self.mark}_{letter}$", x, row)
            network.join(position, (norm, 0), via=[*line, (x - 0.12, far), (x - 0.12, row)])
            network.join(heads, (norm, 1), "", heads_size, [*heads_line, (x - 0.12, near), (x - 0.12, row)])
            network.join(columns, (norm, 2), "", layer.d_head)
            position, line = (norm, 0), [(x + 0.12, row), (x + 0.12, far)]
            heads, heads_line, columns = (norm, 1), [(x + 0.12, row), (x + 0.12, near)], (norm, 2)
        if layer.rotary is not None or layer.latent_norm is not None:
            joint = network.add("delta", "", self.joint_x, far)
            network.join(position, (joint, None), via=line)
            position, line = (joint, None), []
            if layer.rotary is not None:
                network.join((self.meeting, 2 + axis), (joint, None), via=[(self.joint_x, self.middle)])
            if layer.latent_norm is not None and (axis or layer.latent_norm.query is not None):
                x += 1.2
                scaled = network.add("delta", "", x, row)
                network.join(columns, (scaled, None), "", layer.d_head)
                self._divide(letter, self.copies[3 + axis], (x, 2 * far - row), joint, scaled)
                columns = (scaled, None)
        network.join(columns, (self.meeting, axis), "d_head", layer.d_head, [(self.cross_x, row)])
        heads, heads_line = self._shared(letter, heads, heads_line, (self.hub_x, near))
        network.join(heads, (self.hub, None), "", layer.n_heads, heads_line)
        return position, line

    def _draw_values(self, pattern: int, pattern_x: float) -> int:
        """Draw values and output, contracted with the attention weights; return the output matrix."""
        network, layer, row, x = self.network, self.layer, self.rows["V"], self.weight_x
        lane, source_y = self.left - 0.2, row + 0.7
        weight = self._add_weight("V")
        output = network.add("matrix", f"W{self.mark}_O$", x, row - 1.6)
        hub = network.add("delta", "", x + STEP, row - 0.8)
        network.join(self.copies[2][1], (weight, 1), "", self.size, [(self.left, row)])
        source = network.add("text" if layer.latent_norm is None else "delta", "", self.cross_x, source_y)
        network.join(self.copies[2][0], (source, None), via=[(lane, self.rows["Q"]), (lane, source_y)])
        network.join(
            (pattern, 0), (hub, None), "heads", layer.n_heads, [(pattern_x, self.middle), (pattern_x, row - 0.8)]
        )
        lane = pattern_x + 0.55
        network.join((pattern, 2), (source, None), "from", None, [(lane, self.middle), (lane, source_y)])
        columns: Port = (weight, 2)
        if layer.latent_norm is not None:
            scaled = network.add("delta", "", x, row - 0.8)
            network.join(columns, (scaled, None), "", layer.d_value)
            self._divide("V", self.copies[5], (x + STEP / 2, row + 1.6), source, scaled)
            columns = (scaled, None)
        network.join(columns, (output, 1), "", layer.d_value)
        heads, line = self._shared("V", (weight, 0), [], (x + STEP, row))
        network.join(heads, (hub, None), "", layer.n_heads, line)
        network.join((hub, None), (output, 0), "", layer.n_heads, [(x + STEP, row - 1.6)])
        return output

    def _add_weight(self, letter: str) -> int:
        """Add a projection, with its bias as one more row of the stream."""
        bias = getattr(self.layer, f"b_{letter}")
        label = f"W{self.mark}_{letter}$" + ("" if bias is None else f"\nb{self.mark}_{letter}$")
        return self.network.add("matrix", label, self.weight_x, self.rows[letter])

    def _shared(self, letter: str, heads: Port, line: list[Point], at: Point) -> Line:
        """Return the line of query heads; that of fewer key heads leads through G."""
        layer = self.layer
        count = layer.group_size
        if count == 1 or letter == "Q":
            return heads, [*line, at]
        group = self.network.add("matrix", f"G{self.mark}$", *at)
        self.network.join(heads, (group, 1), f"shared by {count}" if letter == "K" else "", layer.kv_heads, line)
        return (group, 0), []

    def _divide(self, letter: str, x: Stream, at: Point, positions: int, columns: int) -> None:
        """Draw the function of the stream that multiplies queries, keys or values entry by entry."""
        network, layer = self.network, self.layer
        node = network.add("function", f"1/rms{self.mark}_{letter}$", *at)
        network.pair(x, node, self.size, [(self.left, at[1])])
        (end_x, _), (column_x, column_y) = (network.nodes[k].position for k in (positions, columns))
        network.join((node, 0), (positions, None), via=[(end_x, at[1])])
        size = layer.d_value if letter == "V" else layer.d_head
        network.join((node, 1), (columns, None), "", size, [(at[0], column_y)] if column_x != at[0] else [])
