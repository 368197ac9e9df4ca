"""Diagram of a whole model as one network, and the values with which it evaluates to the logits.

The residual stream runs down on the left, as two legs: position and stream. Pink nodes are functions of the array that
runs into them: dots copy it, plus signs add, a norm divides. Everything grey is a tensor, contracted over its legs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np

from tnlib import ArgumentError, ArgumentTypeError
from tnlib._typing import Array
from tnlib._validate import as_count
from tnlib.drawing import Diagram, Leg, Node
from tnlib.drawing.diagram import Point
from tnlib_adapters.architectures.wiring import ExpertsWiring, FeedForwardWiring
from tnlib_adapters.attention.attention import Attention
from tnlib_adapters.attention.indices import as_index
from tnlib_adapters.checkpoints.checkpoint import Checkpoint, as_checkpoint
from tnlib_adapters.circuits.diagrams.heads import softmax_label
from tnlib_adapters.reference.embedding import PatchEmbedding
from tnlib_adapters.reference.layers import FeedForward, softmax
from tnlib_adapters.reference.model import run_block
from tnlib_adapters.reference.weights import Block, Branch, Weights, read_weights

Port: TypeAlias = tuple[int, int | None]  # number of a node and axis of its array
Stream: TypeAlias = tuple[Port, Port]  # position and stream
Line: TypeAlias = tuple[Port, list[Point]]  # start of a leg, and points on its way

_STEP = 1.5
_NEAR, _FAR = 0.45, 0.9  # distances of the lines of heads and of positions from a row of weights


def model_diagram(checkpoint: Checkpoint, n_positions: int | None = None, *, blocks: Iterable[int] = (0,)) -> Diagram:
    r"""Return the diagram of a model as one network, from tokens to logits, with the residual stream as backbone.

    Bubbles and pink nodes are functions: norms, softmax, activations, sums and copies of an array. `evaluate` with
    `model_values` gives the logits, or the hidden states of a model without unembedding.

    Parameters
    ----------
    checkpoint
        Checkpoint returned by `open_checkpoint`.
    n_positions
        Sequence length; an open size by default.
    blocks
        Numbers of the blocks that are drawn in full; the blocks between them are one function each. A mixture of
        experts is one function.

    Returns
    -------
    Diagram
        With open legs "position" and "vocab", or "stream" without unembedding. Labels of weights carry the number of
        their block: W$^0_Q$.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        If `checkpoint` is not a Checkpoint, there is no such block, or `n_positions` is not a positive integer.

    Examples
    --------
    >>> import tnlib_adapters
    >>> model = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path("llama"))
    >>> diagram = model_diagram(model, 5)
    >>> [node.label for node in diagram.nodes if "block" in node.label], diagram.open_legs
    (['blocks 1 to 3'], (('position', 5), ('vocab', 1024)))
    """
    as_checkpoint("model_diagram", checkpoint)
    n = None if n_positions is None else as_count("model_diagram", "n_positions", n_positions)
    return _ModelNetwork("model_diagram", checkpoint, n, blocks).diagram()


def model_values(checkpoint: Checkpoint, tokens: Array, *, blocks: Iterable[int] = (0,)) -> dict[str, Any]:
    """Return the arrays and functions of `model_diagram` by label, in float64, for one sequence.

    Parameters
    ----------
    checkpoint
        Checkpoint returned by `open_checkpoint`.
    tokens
        (n,), integers; an image (channels, height, width) for models that read images.
    blocks
        As for `model_diagram`.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        As `model_diagram` and `tnlib_adapters.reference.model.run`; or if there are several sequences.

    Examples
    --------
    >>> import tnlib_adapters
    >>> from tnlib_adapters.reference.model import run
    >>> model = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path())
    >>> logits = model_diagram(model).evaluate(model_values(model, [5, 6, 7, 5]))
    >>> logits.shape, bool(np.allclose(logits, run(model, [5, 6, 7, 5]).logits[0], rtol=1e-12))
    ((4, 128), True)
    """
    weights = read_weights(as_checkpoint("model_values", checkpoint))
    inputs = weights.embedding.check("model_values", tokens, weights.context)
    if len(inputs) != 1:
        raise ArgumentError(f"model_values: tokens must be one sequence, got {len(inputs)}; pass them one by one.")
    n = weights.embedding(inputs).shape[1]
    network = _ModelNetwork("model_values", checkpoint, n, blocks, weights, inputs)
    network.diagram()
    return network.values


class _ModelNetwork:
    """Nodes and legs of a model from top to bottom and, if weights are given, the values of the nodes by label."""

    def __init__(
        self,
        function: str,
        checkpoint: Checkpoint,
        n: int | None,
        blocks: Iterable[int],
        weights: Weights | None = None,
        inputs: Array | None = None,
    ) -> None:
        self.checkpoint, self.n, self.weights, self.inputs = checkpoint, n, weights, inputs
        self.d = checkpoint.sizes.d_model
        if not isinstance(blocks, Iterable):
            raise ArgumentTypeError(
                f"{function}: blocks must be the numbers of blocks, got {type(blocks).__name__}; pass for example (0,)."
            )
        self.drawn = {as_index(function, "blocks", block, checkpoint.n_layers) for block in blocks}
        self.nodes: list[Node] = []
        self.legs: list[Leg] = []
        self.values: dict[str, Any] = {}

    def diagram(self) -> Diagram:
        """Return the network."""
        equation, x, y = self._embedding()
        for layers in self._groups():
            if layers[0] in self.drawn:
                x, y = self._block(layers[0], x, y)
            else:
                name = f"block {layers[0]}" if len(layers) == 1 else f"blocks {layers[0]} to {layers[-1]}"
                run_all = None if self.weights is None else self._collapsed(layers)
                x, y = self._on_stream(name, x, y - 1.2, run_all), y - 1.2
        logits = self._unembedding(x, y)
        title = f"{self.checkpoint.wiring.model_type}, {self.checkpoint.n_layers} blocks: x = {equation}, {logits}"
        return Diagram((*self.nodes,), (*self.legs,), title)

    # ------------------------------------------------------------------------------------------------ nodes and legs

    def _add(self, kind: str, label: str, x: float, y: float, value: Any = None) -> int:
        self.nodes.append(Node(kind, label, (x, y)))
        if value is not None:
            self.values[label] = value
        return len(self.nodes) - 1

    def _join(self, a: Port, b: Port, name: str = "", size: int | None = None, via: Sequence[Point] = ()) -> None:
        self.legs.append(Leg(a[0], b[0], name, size, via=tuple(via), axes=(a[1], b[1])))

    def _pair(
        self, x: Stream, node: int, size: int | None = None, via: Sequence[Point] = (), gap: float = 0.17
    ) -> None:
        """Join position and stream to a function, the position beside the stream: above, or on the left."""
        points = [self.nodes[x[0][0]].position, *via, self.nodes[node].position]
        is_level = [points[k][1] == points[k + 1][1] for k in range(len(points) - 1)]
        beside = [
            (u - gap * (not all(is_level[max(0, k - 1) : k + 1])), v + gap * any(is_level[max(0, k - 1) : k + 1]))
            for k, (u, v) in enumerate(points)
        ]
        self._join(x[0], (node, 0), via=beside)
        self._join(x[1], (node, 1), size=size, via=via)

    def _on_stream(self, label: str, x: Stream, y: float, value: Any = None, column: float = 0.0) -> Stream:
        """Return the stream behind a function of it."""
        node = self._add("function", label, column, y, value)
        self._pair(x, node, self.d)
        return (node, 0), (node, 1)

    def _copies(self, x: Stream, at: Point, size: int | None = None) -> list[Stream]:
        """Return some copies of an array; not all need be read."""
        node = self._add("function", "", *at)
        self._pair(x, node, size or self.d)
        return [((node, 2 * k), (node, 2 * k + 1)) for k in range(7)]

    # ------------------------------------------------------------------------------------- embedding and unembedding

    def _embedding(self) -> tuple[str, Stream, float]:
        """Return equation, stream and height: rows of a table or projected patches, plus positions and segments."""
        wiring, weights, d = self.checkpoint.wiring, self.weights, self.d
        embedding, images = wiring.embedding, wiring.reads == "images"
        shape = self.checkpoint.folder.tensors[embedding.table.weight].shape
        rows, width = (math.prod(shape[1:]), d) if images else shape
        table = widen = units = added = None
        if weights is not None and self.inputs is not None:
            if isinstance(weights.embedding, PatchEmbedding):
                units, table, added = _patches(weights.embedding, self.inputs[0])
            else:
                units = np.eye(rows)[self.inputs[0]]
                table = weights.embedding.tokens
                if width != d:
                    table = self.checkpoint.read(embedding.table.weight).astype(np.float64) * embedding.scale
                    widen = self.checkpoint.read(embedding.widen.weight).astype(np.float64).T  # type: ignore[union-attr]
                if embedding.positions:
                    added = weights.embedding.positions[: self.n]  # type: ignore[index]
        first = self._add("matrix", "patch" if images else "t", -2 * _STEP * (1 + (width != d)), 0.0, units)
        last = self._add("matrix", "W$_E$", -_STEP * (1 + (width != d)), 0.0, table)
        self._join((first, 1), (last, 0), "pixels" if images else "vocab", rows)
        equation = ("patches" if images else "tokens") + " W$_E$"
        if width != d:
            wide = self._add("matrix", "W$_{in}$", -_STEP, 0.0, widen)
            self._join((last, 1), (wide, 0), "narrow", width)
            last, equation = wide, equation + " W$_{in}$"
        equation = f"$\\sqrt{{{d}}}$ " + equation if embedding.scale != 1 else equation
        total = self._add("function", "+" if embedding.positions or embedding.segments else "", 0.0, 0.0)
        self._join((first, 0), (total, 0), "position", self.n, [(self.nodes[first].position[0], 0.6), (0.0, 0.6)])
        self._join((last, 1), (total, 1), "stream", d)
        if embedding.positions:
            learned, equation = self._add("matrix", "P", _STEP, 0.0, added), equation + " + P"
            self._join((learned, 0), (total, 0), "", self.n, [(_STEP, 0.4), (0.2, 0.4)])
            self._join((learned, 1), (total, 1), "", d)
        if embedding.segments:
            segment = None if weights is None else weights.embedding.segment  # type: ignore[union-attr]
            node, equation = self._add("tensor", "s", _STEP, -0.9, segment), equation + " + s"
            self._join((node, 0), (total, 1), "", d)
        x: Stream = (total, 0), (total, 1)
        y = 0.0
        if embedding.norm:
            norm = None if weights is None else weights.embedding.norm  # type: ignore[union-attr]
            x, y, equation = self._on_stream("norm$_E$", x, -1.1, norm), -1.1, f"norm({equation})"
        return equation, x, y

    def _unembedding(self, x: Stream, y: float) -> str:
        """Draw the final norm and the logits; return their equation."""
        wiring, weights, d = self.checkpoint.wiring, self.weights, self.d
        name = "x"
        if wiring.final_norm:
            x, y, name = self._on_stream("norm", x, y - 1.1, weights and weights.final_norm), y - 1.1, "norm(x)"
        if wiring.unembedding is None:
            node = self._add("function", "", 0.0, y - 1.0)
            self._pair(x, node, d)
            self._ends(((node, 0), (node, 1)), "stream", d)
            return f"hidden states = {name}"
        unembedding = wiring.unembedding
        vocab, width = self.checkpoint.folder.tensors[unembedding.linear.weight].shape
        matrix = narrow = bias = None
        if weights is not None and weights.unembed is not None:
            matrix, bias = weights.unembed.affine.weight, weights.unembed.affine.bias
            if width != d:
                matrix = self.checkpoint.read(unembedding.linear.weight).astype(np.float64).T
                narrow = self.checkpoint.read(unembedding.narrow.weight).astype(np.float64).T  # type: ignore[union-attr]
        node, product, size = x[1], name, d
        column, y = 0.0, y - 1.1
        if width != d:
            out = self._add("matrix", "W$_{out}$", column, y, narrow)
            self._join(node, (out, 0), "", d)
            node, product, size, y = (out, 1), f"{product} W$_{{out}}$", width, y - 1.1
        out = self._add("matrix", "W$_U$", column, y, matrix)
        self._join(node, (out, 0), "" if size == d else "narrow", size)
        product += " W$_U$"
        position, ends = x[0], (out, 1)
        start = self.nodes[x[0][0]].position
        via: list[Point] = [(-0.7, start[1])]
        if unembedding.linear.bias:
            total = self._add("function", "+", column, y - 1.1)
            vector = self._add("tensor", "b$_U$", _STEP, y - 1.1, bias)
            self._join(position, (total, 0), via=[*via, (-0.7, y - 1.1)])
            self._join(ends, (total, 1), "", vocab)
            self._join((vector, 0), (total, 1), "", vocab)
            position, ends, y, via, product = (total, 0), (total, 1), y - 1.1, [], f"{product} + b$_U$"
        if unembedding.logit_cap:
            cap = weights.unembed.cap if weights is not None and weights.unembed is not None else None
            function = None if cap is None else lambda logits: cap * np.tanh(logits / cap)
            node_of_cap = self._add("function", "cap", column, y - 1.1, function)
            self._join(
                position, (node_of_cap, 0), via=[*via, (-0.7, y - 1.1)] if via else [(-0.12, y), (-0.12, y - 1.1)]
            )
            self._join(ends, (node_of_cap, 1), "", vocab)
            position, ends, y, via, product = (node_of_cap, 0), (node_of_cap, 1), y - 1.1, [], f"cap({product})"
        self._ends((position, ends), "vocab", vocab, [*via, (-0.7, y)], y)
        return f"logits = {product}"

    def _ends(
        self, x: Stream, name: str, size: int, via: Sequence[Point] | None = None, y: float | None = None
    ) -> None:
        """Draw the open legs, downwards."""
        y = self.nodes[x[0][0]].position[1] if y is None else y
        column = -0.7
        points = tuple(via) if via is not None else ((column, y),)
        self.legs.append(Leg(x[0][0], None, "position", self.n, (column, y - 1.0), points, axes=(x[0][1], None)))
        self.legs.append(Leg(x[1][0], None, name, size, (0.0, y - 1.0), axes=(x[1][1], None)))

    # -------------------------------------------------------------------------------------------------------- blocks

    def _groups(self) -> list[list[int]]:
        """Return the layers from first to last: alone if drawn in full, else with their neighbours."""
        groups: list[list[int]] = []
        for k in range(self.checkpoint.n_layers):
            if groups and not {k, groups[-1][-1]} & self.drawn:
                groups[-1].append(k)
            else:
                groups.append([k])
        return groups

    def _blocks_of(self, k: int) -> list[Block]:
        """Return the blocks of weights of a layer: attention, then what follows it, or both as one."""
        counts = [1 + (layer.second is not None and not layer.parallel) for layer in self.checkpoint.wiring.layers]
        return [] if self.weights is None else list(self.weights.blocks[sum(counts[:k]) : sum(counts[: k + 1])])

    def _collapsed(self, layers: Sequence[int]) -> Callable[[Array], Array]:
        blocks = [block for k in layers for block in self._blocks_of(k)]

        def run_all(x: Array) -> Array:
            for block in blocks:
                x = run_block(block, x[None])[0][0]
            return x

        return run_all

    def _block(self, k: int, x: Stream, y: float) -> tuple[Stream, float]:
        """Return the stream behind a layer, and the height where it ends."""
        layer, weights = self.checkpoint.wiring.layers[k], iter(self._blocks_of(k))
        branches: list[Any] = [layer.attention, *([layer.second] if layer.second else [])]
        names = (f"norm$^{{{k}}}_{number}$" for number in range(1, 9))
        for group in [branches] if layer.parallel else [[branch] for branch in branches]:
            block, top = next(weights, None), y - 2.2
            copies = self._copies(x, (0.0, top))
            x, y = copies[len(group)], top
            for number, wiring in enumerate(group):
                read = copies[number]
                if number:  # a branch beside another one reads the stream from above it
                    top = y - 1.9
                    dot = self._add("function", "", 0.75, top)
                    self._pair(read, dot, self.d, [(0.75, self.nodes[read[0][0]].position[1])])
                    read = (dot, 0), (dot, 1)
                node, position = self._branch(k, wiring, block and block.branches[number], read, top, names)
                y = self.nodes[node].position[1]
                total = self._add("function", "+", 0.0, y)
                self._pair(x, total, self.d)
                self._leave(node, position, total)
                x = (total, 0), (total, 1)
            if group[0].norm is not None and group[0].norm.place == "post":
                x, y = self._on_stream(next(names), x, y - 1.1, block and block.after), y - 1.1
        return x, y

    def _branch(
        self,
        k: int,
        wiring: Any,
        branch: Branch | None,
        x: Stream,
        top: float,
        names: Iterator[str],
    ) -> tuple[int, Line | None]:
        """Draw a sublayer to the right of the stream; return the node that writes, and the line of its positions.

        The line is None if the node is a function, from which positions leave as well.
        """
        column = _STEP
        if wiring.norm is not None and wiring.norm.place == "pre":
            x = self._on_stream(next(names), x, top, branch and branch.before, column)
            column += _STEP
        layer = branch and branch.layer
        if isinstance(wiring, ExpertsWiring):
            name = f"{len(wiring.experts)} experts, {wiring.n_chosen} at a time$^{{{k}}}$"
            node, position, bias = self._add("function", name, column + 0.8, top - 1.2, layer), None, None
            self._pair(x, node, self.d, [(column + 0.8, top)])
        elif isinstance(wiring, FeedForwardWiring):
            node, position = self._feed_forward(k, wiring, layer, x, (column, top))
            bias = ("↓", wiring.down.bias is not None, layer and layer.down.bias)
        else:
            attention = layer or self.checkpoint.attention(k)
            node, position = self._attention(k, attention, x, (column, top))
            bias = ("O", attention.b_O is not None, attention.b_O if layer else None)
        if bias is not None and bias[1]:
            x0, y0 = self.nodes[node].position
            total = self._add("function", "+", x0 - _STEP, y0)
            vector = self._add("tensor", f"b$^{{{k}}}_{bias[0]}$", x0 - _STEP, y0 + 0.9, bias[2])
            self._leave(node, position, total)
            self._join((vector, 0), (total, 1), "", self.d)
            node, position = total, None
        if wiring.output_norm is not None:
            x0, y0 = self.nodes[node].position
            norm = self._add("function", next(names), x0 - _STEP, y0, branch and branch.behind)
            self._leave(node, position, norm)
            node, position = norm, None
        return node, position

    def _leave(self, node: int, position: Line | None, target: int) -> None:
        """Join what a sublayer writes to a function on its left: the stream of `node`, and the positions."""
        x, y = self.nodes[target].position
        if position is None:
            self._pair(((node, 0), (node, 1)), target, self.d)
            return
        self._join(position[0], (target, 0), via=[*position[1], (x + 0.3, y - 0.4)])
        self._join((node, 2), (target, 1), "", self.d)

    def _feed_forward(
        self, k: int, wiring: FeedForwardWiring, layer: FeedForward | None, x: Stream, at: Point
    ) -> tuple[int, Line]:
        """Draw a feed-forward layer: activations and what multiplies them on top, the output matrix below."""
        column, top = at
        shape = self.checkpoint.folder.tensors[wiring.down.weight].shape
        d_ff = shape[wiring.down.input_axis]
        biased = any(linear.bias for linear in wiring.inputs)
        x, size, column = self._homogeneous(x, biased, column, top)
        mark = f"$^{{{k}}}"
        name = str(wiring.activation or wiring.activation_key)
        function = layer and layer.activation
        up = (f"W{mark}_↑$" + (f"\nb{mark}_↑$" if biased else ""), layer and _with_bias(layer.up, biased))
        if wiring.gate is None:
            weight = self._add("matrix", up[0], column + 0.5, top, up[1])
            act_x = column + 1.6 + 0.085 * len(name)
            act = self._add("function", name, act_x, top, function)
            self._join(x[0], (act, 0), via=[(self._column(x), top + _NEAR), (act_x, top + _NEAR)])
            self._join(x[1], (weight, 0), "", size)
            self._join((weight, 1), (act, 1), "d_ff", d_ff)
            down = self._add("matrix", f"W{mark}_↓$", column + 0.5, top - 1.6, layer and layer.down.weight)
            self._join((act, 1), (down, 0), "", d_ff, [(act_x, top - 1.6)])
            lane = act_x + 0.5 + 0.0425 * len(name)
            return down, ((act, 0), [(lane, top), (lane, top - 2.0)])
        copies = self._copies(x, (column, top), size)
        gate = (f"gate{mark}$", layer and _with_bias(layer.gate, biased))
        act_x = column + _STEP + 1.1 + 0.085 * len(name)
        end_x = act_x + 0.8 + 0.0425 * len(name)
        first = self._add("matrix", gate[0], column + _STEP, top, gate[1])
        act = self._add("function", name, act_x, top, function)
        second = self._add("matrix", up[0], column + _STEP, top - 1.2, up[1])
        product = self._add("delta", "", act_x, top - 1.2)
        positions = self._add("delta", "", end_x, top)
        down = self._add("matrix", f"W{mark}_↓$", column + _STEP, top - 2.6, layer and layer.down.weight)
        self._join(copies[0][0], (act, 0), via=[(column, top + _NEAR), (act_x, top + _NEAR)])
        self._join(copies[0][1], (first, 0), "", size)
        self._join((first, 1), (act, 1), "d_ff", d_ff)
        self._join((act, 0), (positions, None))
        self._join((act, 1), (product, None), "", d_ff)
        self._join(copies[1][0], (positions, None), via=[(column, top + _FAR), (end_x, top + _FAR)])
        self._join(copies[1][1], (second, 0), "", size, [(column, top - 1.2)])
        self._join((second, 1), (product, None), "", d_ff)
        self._join((product, None), (down, 0), "", d_ff, [(act_x, top - 2.6)])
        return down, ((positions, None), [(end_x, top - 3.0)])

    def _column(self, x: Stream) -> float:
        return self.nodes[x[0][0]].position[0]

    def _homogeneous(self, x: Stream, biased: bool, column: float, y: float) -> tuple[Stream, int, float]:
        """Return the stream with the constant coordinate if a bias reads it, its size, and the next column."""
        if not biased:
            return x, self.d, column
        return self._on_stream("[x, 1]", x, y, _with_one, column), self.d + 1, column + 1.2

    def _attention(self, k: int, layer: Attention, x: Stream, at: Point) -> tuple[int, Line]:
        """Draw an attention layer: queries, keys and scores on top, values and output below."""
        (column, top), mark = at, f"$^{{{k}}}"
        biased = any(bias is not None for bias in (layer.b_Q, layer.b_K, layer.b_V))
        x, size, column = self._homogeneous(x, biased, column, top)
        copies = self._copies(x, (column, top), size)
        latent, normed, rotary = layer.latent_norm, layer.head_norm, layer.rotary
        loaded = self.weights is not None
        rows = {"Q": top, "K": top - 2.0 - 2 * _FAR}
        rows["V"] = rows["K"] - (2.2 if latent is None else 4.6)
        floor, middle = rows["V"] - 1.6, (rows["Q"] + rows["K"]) / 2
        weight_x = column + _STEP
        cross = weight_x + 1.2 + (1.2 if latent else 0.0) + (1.3 if normed else 0.0)  # where queries meet keys
        hub_x = cross + 1.4
        label = softmax_label(layer).replace("softmax(", f"softmax{mark}$\n(").replace(") over", ")\nover")
        half = 0.15 + 0.0425 * max(map(len, label.split("\n")))  # of the width of the function
        pattern_x = hub_x + 0.8 + half
        hub = self._add("delta", "", hub_x, middle)
        meeting = (
            self._add("matrix", f"R{mark}$", cross, middle, _rotations(layer, self.n) if loaded else None)
            if rotary
            else self._add("text", "", cross, middle)
        )
        shared = layer.n_heads // layer.kv_heads
        group = np.repeat(np.eye(layer.kv_heads), shared, axis=0)
        ends: dict[str, tuple[Port, list[Point]]] = {}
        for number, (letter, side) in enumerate((("Q", 1.0), ("K", -1.0))):
            row = rows[letter]
            far, near = row + side * _FAR, row + side * _NEAR
            bus = [] if letter == "Q" else [(column, row)]
            lane = column if letter == "Q" else column - 0.2
            weight, weight_label = self._weight(letter, layer, mark, biased, (weight_x, row))
            self._join(copies[number][1], (weight, 1), "", size, bus)
            position, line = copies[number][0], [*([] if letter == "Q" else [(lane, top)]), (lane, far)]
            heads, heads_line = (weight, 0), [(weight_x, near)]
            columns, x_now = (weight, 2), weight_x
            d_heads = layer.n_heads if letter == "Q" else layer.kv_heads
            if normed is not None:
                x_now += 1.3
                function = (normed.queries if letter == "Q" else normed.keys) if loaded else None
                pill = self._add("function", f"norm{mark}_{letter}$", x_now, row, function)
                self._join(position, (pill, 0), via=[*line, (x_now - 0.12, far), (x_now - 0.12, row)])
                self._join(heads, (pill, 1), "", d_heads, [*heads_line, (x_now - 0.12, near), (x_now - 0.12, row)])
                self._join(columns, (pill, 2), "", layer.d_head)
                position, line = (pill, 0), [(x_now + 0.12, row), (x_now + 0.12, far)]
                heads, heads_line = (pill, 1), [(x_now + 0.12, row), (x_now + 0.12, near)]
                columns = (pill, 2)
            end_x = cross + 0.75
            if rotary is not None or latent is not None:
                joint = self._add("delta", "", end_x, far)
                self._join(position, (joint, None), via=line)
                position, line = (joint, None), []
                if rotary is not None:
                    self._join((meeting, 2 + number), (joint, None), via=[(end_x, middle)])
            if latent is not None and (letter == "K" or latent.query is not None):
                x_now += 1.2
                scaled = self._add("delta", "", x_now, row)
                self._join(columns, (scaled, None), "", layer.d_head)
                self._divisors(
                    layer, mark, letter, copies[3 + number], (column, top), (x_now, row + side * 1.8), joint, scaled
                )
                columns = (scaled, None)
            self._join(columns, (meeting, number), "d_head", layer.d_head, [(cross, row)])
            if letter == "K" and shared > 1:
                selection = self._add("matrix", f"G{mark}$", hub_x, near, group if loaded else None)
                self._join(heads, (selection, 1), f"shared by {shared}", layer.kv_heads, heads_line)
                heads, heads_line = (selection, 0), []
            else:
                heads_line = [*heads_line, (hub_x, near)]
            self._join(heads, (hub, None), "", layer.n_heads, heads_line)
            ends[letter] = position, [*line, (pattern_x - 0.2, far), (pattern_x - 0.2, middle)]
        pattern = self._add("function", label, pattern_x, middle, _pattern(layer) if loaded else None)
        self._join((hub, None), (pattern, 0))
        for axis, letter in ((1, "Q"), (2, "K")):
            self._join(ends[letter][0], (pattern, axis), via=ends[letter][1])
        # values
        row, sum_x = rows["V"], weight_x + _STEP
        weight, _ = self._weight("V", layer, mark, biased, (weight_x, row))
        output = self._add("matrix", f"W{mark}_O$", weight_x, floor, layer.W_O if loaded else None)
        heads_at = self._add("delta", "", sum_x, row - 0.8)
        self._join(copies[2][1], (weight, 1), "", size, [(column, row)])
        source = self._add("delta" if latent else "text", "", cross, row + 0.7)
        self._join(copies[2][0], (source, None), via=[(column - 0.2, top), (column - 0.2, row + 0.7)])
        lanes = [pattern_x, pattern_x + 0.55, pattern_x + half + 0.2]
        self._join((pattern, 0), (heads_at, None), "heads", layer.n_heads, [(lanes[0], middle), (lanes[0], row - 0.8)])
        self._join((pattern, 2), (source, None), "from", None, [(lanes[1], middle), (lanes[1], row + 0.7)])
        columns = (weight, 2)
        if latent is not None:
            scaled = self._add("delta", "", weight_x, row - 0.8)
            self._join(columns, (scaled, None), "", layer.d_value)
            self._divisors(layer, mark, "V", copies[5], (column, top), (weight_x + 0.75, row + 1.6), source, scaled)
            columns = (scaled, None)
        self._join(columns, (output, 1), "", layer.d_value)
        if shared > 1:
            selection = self._add("matrix", f"G{mark}$", sum_x, row, group if loaded else None)
            self._join((weight, 0), (selection, 1), "", layer.kv_heads)
            self._join((selection, 0), (heads_at, None), "", layer.n_heads)
        else:
            self._join((weight, 0), (heads_at, None), "", layer.n_heads, [(sum_x, row)])
        self._join((heads_at, None), (output, 0), "", layer.n_heads, [(sum_x, floor)])
        return output, ((pattern, 1), [(lanes[2], middle), (lanes[2], floor - 0.4)])

    def _weight(self, letter: str, layer: Attention, mark: str, biased: bool, at: Point) -> tuple[int, str]:
        """Draw a projection, with its bias as one more row of the stream."""
        weight, bias = getattr(layer, f"W_{letter}"), getattr(layer, f"b_{letter}")
        label = f"W{mark}_{letter}$" + (f"\nb{mark}_{letter}$" if bias is not None else "")
        if biased:
            last = np.zeros_like(weight[:, :1]) if bias is None else bias[:, None]
            weight = np.concatenate([weight, last], axis=1)
        return self._add("matrix", label, *at, weight if self.weights is not None else None), label

    def _divisors(
        self, layer: Attention, mark: str, letter: str, x: Stream, start: Point, at: Point, positions: int, columns: int
    ) -> None:
        """Draw the function of the stream by which queries, keys or values are divided, entry by entry."""
        function = _reciprocals(layer, letter) if self.weights is not None else None
        node = self._add("function", f"1/rms{mark}_{letter}$", *at, function)
        self._pair(x, node, self.d, [(start[0], at[1])])
        (px, py), (cx, cy) = (self.nodes[k].position for k in (positions, columns))
        self._join((node, 0), (positions, None), via=[(px, at[1])])
        size = layer.d_value if letter == "V" else layer.d_head
        self._join((node, 1), (columns, None), "", size, [(at[0], cy)] if cx != at[0] else [])


def _with_one(x: Array) -> Array:
    return np.concatenate([x, np.ones_like(x[..., :1])], axis=-1)


def _with_bias(affine: Any, biased: bool) -> Array:
    """Return the weight, with the bias as last row if any matrix beside it has one."""
    if not biased:
        return np.asarray(affine.weight)
    last = np.zeros_like(affine.weight[:1]) if affine.bias is None else affine.bias[None]
    return np.concatenate([affine.weight, last])


def _rotations(layer: Attention, n: int | None) -> Array:
    """Return R (d_head, d_head, query position, key position)."""
    at = np.stack([layer.rotary.rotate(np.eye(layer.d_head), p) for p in range(n or 1)])  # type: ignore[union-attr]
    return np.einsum("iac,jbc->abij", at, at, optimize=True)


def _pattern(layer: Attention) -> Callable[[Array], Array]:
    """Return the function from products of queries and keys (heads, n, n) to the attention weights."""

    def pattern(products: Array) -> Array:
        positions = np.arange(products.shape[-1])
        offsets = layer.offsets(positions[:, None] - positions)
        scores = layer.scale * products + (0.0 if offsets is None else offsets)
        scores = scores if layer.softcap is None else layer.softcap * np.tanh(scores / layer.softcap)
        return softmax(np.where(layer.mask(len(positions)), scores, -np.inf))

    return pattern


def _reciprocals(layer: Attention, letter: str) -> Callable[[Array], Array]:
    """Return the function from the stream to the factors (n, d_head) that norms of latent vectors leave."""

    def reciprocals(x: Array) -> Array:
        norm = layer.latent_norm
        ones = np.ones((1, len(x), layer.d_value if letter == "V" else layer.d_head))
        if letter == "V":
            return np.asarray(ones[0] / norm.value_divisors(x)[:, None])  # type: ignore[union-attr]
        return np.asarray((norm.queries if letter == "Q" else norm.keys)(ones, x)[0])  # type: ignore[union-attr]

    return reciprocals


def _patches(embedding: PatchEmbedding, image: Array) -> tuple[Array, Array, Array]:
    """Return patches (n, pixels), none for the first position, their map, and what is added: positions and biases."""
    p, (channels, height, width) = embedding.kernel.shape[-1], image.shape
    patches = (
        image.reshape(channels, height // p, p, width // p, p).transpose(1, 3, 0, 2, 4).reshape(-1, channels * p * p)
    )
    units = np.concatenate([np.zeros_like(patches[:1]), patches])
    added = embedding.positions + np.concatenate([embedding.first[None], np.tile(embedding.bias, (len(patches), 1))])
    return units, embedding.kernel.reshape(len(embedding.kernel), -1).T, added
