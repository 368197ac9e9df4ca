"""Diagram of a whole model as one network, from tokens to logits.

The residual stream runs down on the left, as two legs: position and stream. Pink nodes are functions of the array that
runs into them: dots copy it, plus signs add, a norm divides. Everything grey is a tensor, contracted over its legs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from tnlib import ArgumentTypeError
from tnlib._validate import as_count
from tnlib.drawing import Diagram, Leg
from tnlib.drawing.diagram import Point
from tnlib_adapters.architectures.wiring import ExpertsWiring, FeedForwardWiring
from tnlib_adapters.attention.validation import as_index
from tnlib_adapters.checkpoints.checkpoint import Checkpoint, accepts_models, as_one_stream
from tnlib_adapters.circuits.diagrams.sublayer_networks import (
    STEP,
    AttentionNetwork,
    DiagramBuilder,
    Line,
    Stream,
    draw_feed_forward,
)


@accepts_models
def model_diagram(checkpoint: Checkpoint, n_positions: int | None = None, *, blocks: Iterable[int] = (0,)) -> Diagram:
    r"""Return the diagram of a model as one network, from tokens to logits, with the residual stream as backbone.

    Bubbles and pink nodes are functions: norms, softmax, activations, sums and copies of an array.

    Parameters
    ----------
    checkpoint
        A checkpoint or transformers model.
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
    as_one_stream("model_diagram", checkpoint)
    n = None if n_positions is None else as_count("model_diagram", "n_positions", n_positions)
    return _ModelNetwork(checkpoint, n, blocks).diagram()


class _ModelNetwork(DiagramBuilder):
    """Nodes and legs of a model from top to bottom."""

    def __init__(self, checkpoint: Checkpoint, n: int | None, blocks: Iterable[int]) -> None:
        super().__init__(n, checkpoint.sizes.d_model)
        self.checkpoint = checkpoint
        if not isinstance(blocks, Iterable):
            raise ArgumentTypeError(
                f"model_diagram: blocks must be the numbers of blocks, got {type(blocks).__name__}; pass for example "
                "(0,)."
            )
        self.drawn = {as_index("model_diagram", "blocks", block, checkpoint.n_layers) for block in blocks}

    def diagram(self) -> Diagram:
        """Return the network."""
        equation, x, y = self._embedding()
        for layers in self._groups():
            if layers[0] in self.drawn:
                x, y = self._block(layers[0], x, y)
            else:
                name = f"block {layers[0]}" if len(layers) == 1 else f"blocks {layers[0]} to {layers[-1]}"
                x, y = self.on_stream(name, x, y - 1.2), y - 1.2
        logits = self._unembedding(x, y)
        title = f"{self.checkpoint.wiring.model_type}, {self.checkpoint.n_layers} blocks: x = {equation}, {logits}"
        return Diagram((*self.nodes,), (*self.legs,), title)

    # ------------------------------------------------------------------------------------- embedding and unembedding

    def _embedding(self) -> tuple[str, Stream, float]:
        """Return equation, stream and height: rows of a table or projected patches, plus positions and segments."""
        wiring, d = self.checkpoint.wiring, self.d
        embedding, images = wiring.embedding, wiring.reads == "images"
        shape = self.checkpoint.folder.tensors[embedding.table.weight].shape
        rows, width = (math.prod(shape[1:]), d) if images else shape
        maps = [("W$_E$", "pixels" if images else "vocab", rows)]
        maps += [("W$_{in}$", "narrow", width)] if width != d else []
        name, x = "patch" if images else "t", -STEP * (1 + len(maps))
        first = node = self.add("matrix", name, x, 0.0)
        for label, leg, size in maps:
            x += STEP
            weight = self.add("matrix", label, x, 0.0)
            self.join((node, 1), (weight, 0), leg, size)
            node = weight
        equation = " ".join(["patches" if images else "tokens", *(label for label, *_ in maps)])
        equation = f"$\\sqrt{{{d}}}$ {equation}" if embedding.scale != 1 else equation
        added = [label for label, tensor in (("P", embedding.positions), ("s", embedding.segments)) if tensor]
        total = self.add("function", "+" if added else "", 0.0, 0.0)
        self.join((first, 0), (total, 0), "position", self.n, [(self.nodes[first].position[0], 0.6), (0.0, 0.6)])
        self.join((node, 1), (total, 1), "stream", d)
        for label in added:
            node = self.add("matrix" if label == "P" else "tensor", label, STEP, -0.9 * (label == "s"))
            if label == "P":
                self.join((node, 0), (total, 0), "", self.n, [(STEP, 0.4), (0.2, 0.4)])
            self.join((node, 1), (total, 1), "", d)
        equation, stream = " + ".join([equation, *added]), ((total, 0), (total, 1))
        if embedding.norm is None:
            return equation, stream, 0.0
        return f"norm({equation})", self.on_stream("norm$_E$", stream, -1.1), -1.1

    def _unembedding(self, x: Stream, y: float) -> str:
        """Draw the final norm, the logits and the open legs; return the equation of the logits."""
        wiring, tensors = self.checkpoint.wiring, self.checkpoint.folder.tensors
        name, unembedding = "x", wiring.unembedding
        if wiring.final_norm:
            x, y, name = self.on_stream("norm", x, y - 1.1), y - 1.1, "norm(x)"
        if unembedding is None:
            if not wiring.final_norm:
                x, y = self.on_stream("", x, y - 1.1), y - 1.1
            self._open(x, "stream", self.d, y)
            return f"hidden states = {name}"
        vocab, width = tensors[unembedding.linear.weight].shape
        (start, axis), (node, stream_axis), size = *x, self.d
        line = [(-0.7, self.nodes[start].position[1])]
        is_narrow = unembedding.narrow is not None and width != self.d
        for label, columns in [("W$_{out}$", width)] * is_narrow + [("W$_U$", vocab)]:
            y -= 1.1
            weight = self.add("matrix", label, 0.0, y)
            self.join((node, stream_axis), (weight, 0), "", size)
            node, stream_axis, size, name = weight, 1, columns, f"{name} {label}"
        for label in ["+"] * bool(unembedding.linear.bias) + ["cap"] * bool(unembedding.logit_cap):
            y -= 1.1
            target = self.add("function", label, 0.0, y)
            self.join((start, axis), (target, 0), via=[*line, (-0.7, y)])
            self.join((node, stream_axis), (target, 1), "", vocab)
            if label == "+":
                vector = self.add("tensor", "b$_U$", STEP, y)
                self.join((vector, 0), (target, 1), "", vocab)
            (start, axis), (node, stream_axis), line = (target, 0), (target, 1), [(-0.7, y)]
            name = f"{name} + b$_U$" if label == "+" else f"cap({name})"
        self._open(((start, axis), (node, stream_axis)), "vocab", vocab, y, line)
        return f"logits = {name}"

    def _open(self, x: Stream, name: str, size: int, y: float, line: Sequence[Point] | None = None) -> None:
        """Draw the open legs, downwards from y; the positions start with `line`."""
        via = ((-0.7, y),) if line is None else tuple(line)
        self.legs.append(Leg(x[0][0], None, "position", self.n, (-0.7, y - 1.0), via, axes=(x[0][1], None)))
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

    def _block(self, k: int, x: Stream, y: float) -> tuple[Stream, float]:
        """Return the stream behind a layer, and the height where it ends."""
        layer = self.checkpoint.wiring.layers[k]
        branches: list[Any] = [layer.attention, *([layer.second] if layer.second else [])]
        names = (f"norm$^{{{k}}}_{number}$" for number in range(1, 9))
        for group in [branches] if layer.parallel else [[branch] for branch in branches]:
            top = y - 2.2
            copies = self.copies(x, (0.0, top), self.d)
            x, y = copies[len(group)], top
            for number, wiring in enumerate(group):
                read = copies[number]
                if number:  # a branch beside another one reads the stream from above it
                    top = y - 1.9
                    dot = self.add("function", "", 0.75, top)
                    self.pair(read, dot, self.d, [(0.75, self.nodes[read[0][0]].position[1])])
                    read = (dot, 0), (dot, 1)
                node, position = self._branch(k, wiring, read, top, names)
                y = self.nodes[node].position[1]
                total = self.add("function", "+", 0.0, y)
                self.pair(x, total, self.d)
                self.leave(node, position, total)
                x = (total, 0), (total, 1)
            if group[0].norm is not None and group[0].norm.place == "post":
                x, y = self.on_stream(next(names), x, y - 1.1), y - 1.1
        return x, y

    def _branch(self, k: int, wiring: Any, x: Stream, top: float, names: Iterator[str]) -> tuple[int, Line | None]:
        """Draw a sublayer to the right of the stream; return the node that writes, and the line of its positions.

        The line is None if the node is a function, from which positions leave as well.
        """
        column = STEP
        if wiring.norm is not None and wiring.norm.place == "pre":
            x = self.on_stream(next(names), x, top, column)
            column += STEP
        bias = ""
        if isinstance(wiring, ExpertsWiring):
            shared = " and a shared one" if wiring.shared else ""
            name = f"{len(wiring.experts)} experts, {wiring.n_chosen} at a time{shared}$^{{{k}}}$"
            node, position = self.add("function", name, column + 0.8, top - 1.2), None
            self.pair(x, node, self.d, [(column + 0.8, top)])
        elif isinstance(wiring, FeedForwardWiring):
            d_ff = self.checkpoint.folder.tensors[wiring.down.weight].shape[wiring.down.input_axis]
            node, position = draw_feed_forward(self, k, wiring, d_ff, x, (column, top))
            bias = "↓" * bool(wiring.down.bias)
        else:
            layer = self.checkpoint.attention(k)
            node, position = AttentionNetwork(self, k, layer, x, (column, top)).draw()
            bias = "O" * (layer.b_O is not None)
        if bias:
            x0, y0 = self.nodes[node].position
            total = self.add("function", "+", x0 - STEP, y0)
            vector = self.add("tensor", f"b$^{{{k}}}_{bias}$", x0 - STEP, y0 + 0.9)
            self.leave(node, position, total)
            self.join((vector, 0), (total, 1), "", self.d)
            node, position = total, None
        if wiring.output_norm is not None:
            x0, y0 = self.nodes[node].position
            norm = self.add("function", next(names), x0 - STEP, y0)
            self.leave(node, position, norm)
            node, position = norm, None
        return node, position
