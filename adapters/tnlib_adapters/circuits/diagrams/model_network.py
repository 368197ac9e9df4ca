"""Diagram of a whole model as one network, and the values with which it evaluates to the logits.

The residual stream runs down on the left, as two legs: position and stream. Pink nodes are functions of the array that
runs into them: dots copy it, plus signs add, a norm divides. Everything grey is a tensor, contracted over its legs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tnlib import ArgumentError, ArgumentTypeError
from tnlib._typing import Array
from tnlib._validate import as_count
from tnlib.drawing import Diagram, Leg
from tnlib.drawing.diagram import Point
from tnlib_adapters.architectures.wiring import ExpertsWiring, FeedForwardWiring
from tnlib_adapters.attention.validation import as_index
from tnlib_adapters.checkpoints.checkpoint import Checkpoint, accepts_models, as_one_stream
from tnlib_adapters.circuits.diagrams.sublayer_networks import (
    STEP,
    AttentionNetwork,
    Line,
    Network,
    Stream,
    draw_feed_forward,
)
from tnlib_adapters.reference.embedding import PatchEmbedding, TokenEmbedding
from tnlib_adapters.reference.model import run
from tnlib_adapters.reference.weights import Branch, ResidualBlock, Weights, read_weights


@accepts_models
def model_diagram(checkpoint: Checkpoint, n_positions: int | None = None, *, blocks: Iterable[int] = (0,)) -> Diagram:
    r"""Return the diagram of a model as one network, from tokens to logits, with the residual stream as backbone.

    Bubbles and pink nodes are functions: norms, softmax, activations, sums and copies of an array. `evaluate` with
    `model_values` gives the logits, or the hidden states of a model without unembedding.

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
    return _ModelNetwork("model_diagram", checkpoint, n, blocks).diagram()


@accepts_models
def model_values(checkpoint: Checkpoint, tokens: Array, *, blocks: Iterable[int] = (0,)) -> dict[str, Any]:
    """Return the arrays and functions of `model_diagram` by label, in float64, for one sequence.

    Parameters
    ----------
    checkpoint
        A checkpoint or transformers model.
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
    weights = read_weights(as_one_stream("model_values", checkpoint))
    inputs = weights.embedding.check("model_values", tokens, weights.context)
    if len(inputs) != 1:
        raise ArgumentError(f"model_values: tokens must be one sequence, got {len(inputs)}; pass them one by one.")
    n = weights.embedding(inputs).shape[1]
    network = _ModelNetwork("model_values", checkpoint, n, blocks, weights, inputs)
    network.diagram()
    return network.values


class _GivenStream:
    """Embedding of a stream (batch, n, d_model) that is given."""

    context = None

    def check(self, function: str, x: Array, context: int | None) -> Array:
        return x

    def __call__(self, x: Array) -> Array:
        return x


class _ModelNetwork(Network):
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
        super().__init__(n, checkpoint.sizes.d_model, is_loaded=weights is not None)
        self.checkpoint, self.weights, self.inputs = checkpoint, weights, inputs
        if not isinstance(blocks, Iterable):
            raise ArgumentTypeError(
                f"{function}: blocks must be the numbers of blocks, got {type(blocks).__name__}; pass for example (0,)."
            )
        self.drawn = {as_index(function, "blocks", block, checkpoint.n_layers) for block in blocks}

    def diagram(self) -> Diagram:
        """Return the network."""
        equation, x, y = self._embedding()
        for layers in self._groups():
            if layers[0] in self.drawn:
                x, y = self._block(layers[0], x, y)
            else:
                name = f"block {layers[0]}" if len(layers) == 1 else f"blocks {layers[0]} to {layers[-1]}"
                x, y = self.on_stream(name, x, y - 1.2, self._collapsed(layers)), y - 1.2
        logits = self._unembedding(x, y)
        title = f"{self.checkpoint.wiring.model_type}, {self.checkpoint.n_layers} blocks: x = {equation}, {logits}"
        return Diagram((*self.nodes,), (*self.legs,), title)

    # ------------------------------------------------------------------------------------- embedding and unembedding

    def _embedding(self) -> tuple[str, Stream, float]:
        """Return equation, stream and height: rows of a table or projected patches, plus positions and segments."""
        wiring, d, values = self.checkpoint.wiring, self.d, self._embedding_values()
        embedding, images = wiring.embedding, wiring.reads == "images"
        shape = self.checkpoint.folder.tensors[embedding.table.weight].shape
        rows, width = (math.prod(shape[1:]), d) if images else shape
        maps = [("W$_E$", "pixels" if images else "vocab", rows)]
        maps += [("W$_{in}$", "narrow", width)] if width != d else []
        name, x = "patch" if images else "t", -STEP * (1 + len(maps))
        first = node = self.add("matrix", name, x, 0.0, values.get(name))
        for label, leg, size in maps:
            x += STEP
            weight = self.add("matrix", label, x, 0.0, values.get(label))
            self.join((node, 1), (weight, 0), leg, size)
            node = weight
        equation = " ".join(["patches" if images else "tokens", *(label for label, *_ in maps)])
        equation = f"$\\sqrt{{{d}}}$ {equation}" if embedding.scale != 1 else equation
        added = [label for label, tensor in (("P", embedding.positions), ("s", embedding.segments)) if tensor]
        total = self.add("function", "+" if added else "", 0.0, 0.0)
        self.join((first, 0), (total, 0), "position", self.n, [(self.nodes[first].position[0], 0.6), (0.0, 0.6)])
        self.join((node, 1), (total, 1), "stream", d)
        for label in added:
            node = self.add(
                "matrix" if label == "P" else "tensor", label, STEP, -0.9 * (label == "s"), values.get(label)
            )
            if label == "P":
                self.join((node, 0), (total, 0), "", self.n, [(STEP, 0.4), (0.2, 0.4)])
            self.join((node, 1), (total, 1), "", d)
        equation, stream = " + ".join([equation, *added]), ((total, 0), (total, 1))
        if embedding.norm is None:
            return equation, stream, 0.0
        norm = (
            self.weights.embedding.norm if self.weights and isinstance(self.weights.embedding, TokenEmbedding) else None
        )
        return f"norm({equation})", self.on_stream("norm$_E$", stream, -1.1, norm), -1.1

    def _embedding_values(self) -> dict[str, Array | None]:
        """Return the arrays of the embedding by label, {} if no weights are loaded."""
        if self.weights is None or self.inputs is None:
            return {}
        embedding, wiring = self.weights.embedding, self.checkpoint.wiring.embedding
        if isinstance(embedding, PatchEmbedding):
            return dict(zip(("patch", "W$_E$", "P"), _patches(embedding, self.inputs[0]), strict=True))
        units = np.zeros((len(self.inputs[0]), len(embedding.tokens)))
        units[np.arange(len(units)), self.inputs[0]] = 1
        values = {"t": units, "W$_E$": embedding.tokens, "s": embedding.segment}
        if wiring.widen is not None and self.checkpoint.folder.tensors[wiring.table.weight].shape[1] != self.d:
            values["W$_E$"] = wiring.scale * self._read(wiring.table.weight)
            values["W$_{in}$"] = self._read(wiring.widen.weight).T
        return values if embedding.positions is None else {**values, "P": embedding.positions[: self.n]}

    def _unembedding(self, x: Stream, y: float) -> str:
        """Draw the final norm, the logits and the open legs; return the equation of the logits."""
        wiring, weights = self.checkpoint.wiring, self.weights
        name, unembedding = "x", wiring.unembedding
        if wiring.final_norm:
            x, y, name = self.on_stream("norm", x, y - 1.1, weights and weights.final_norm), y - 1.1, "norm(x)"
        if unembedding is None:
            if not wiring.final_norm:
                x, y = self.on_stream("", x, y - 1.1), y - 1.1
            self._open(x, "stream", self.d, y)
            return f"hidden states = {name}"
        vocab, width = self.checkpoint.folder.tensors[unembedding.linear.weight].shape
        last: Any = weights and weights.unembed
        (start, axis), (node, stream_axis), size = *x, self.d
        line = [(-0.7, self.nodes[start].position[1])]
        maps: list[tuple[str, Any, int]] = [("W$_U$", last and last.affine.weight, vocab)]
        if unembedding.narrow is not None and width != self.d:
            narrow, wide = (self._read(linear.weight).T for linear in (unembedding.narrow, unembedding.linear))
            maps = [("W$_{out}$", narrow, width), ("W$_U$", wide, vocab)]
        for label, matrix, columns in maps:
            y -= 1.1
            weight = self.add("matrix", label, 0.0, y, matrix)
            self.join((node, stream_axis), (weight, 0), "", size)
            node, stream_axis, size, name = weight, 1, columns, f"{name} {label}"
        functions: list[tuple[str, Any]] = [("+", None)] if unembedding.linear.bias else []
        if unembedding.logit_cap:
            functions.append(("cap", last and (lambda logits: last.cap * np.tanh(logits / last.cap))))
        for label, function in functions:
            y -= 1.1
            target = self.add("function", label, 0.0, y, function)
            self.join((start, axis), (target, 0), via=[*line, (-0.7, y)])
            self.join((node, stream_axis), (target, 1), "", vocab)
            if label == "+":
                vector = self.add("tensor", "b$_U$", STEP, y, last and last.affine.bias)
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

    def _read(self, name: str) -> Array:
        """Return a tensor in double precision; without values, zeros of its shape that take no memory."""
        if not self.is_loaded:
            return np.broadcast_to(np.float64(0), self.checkpoint.folder.tensors[name].shape)
        return self.checkpoint.read(name).astype(np.float64)

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

    def _blocks_of(self, k: int) -> list[ResidualBlock]:
        """Return the blocks of weights of a layer: attention, then what follows it, or both as one."""
        counts = [1 + (layer.second is not None and not layer.parallel) for layer in self.checkpoint.wiring.layers]
        return [] if self.weights is None else list(self.weights.blocks[sum(counts[:k]) : sum(counts[: k + 1])])

    def _collapsed(self, layers: Sequence[int]) -> Callable[[Array], Array] | None:
        """Return the function of some layers from the stream (n, d_model) to the stream."""
        if self.weights is None:
            return None
        blocks = tuple(block for k in layers for block in self._blocks_of(k))
        embedding: Any = _GivenStream()
        part = replace(self.weights, embedding=embedding, blocks=blocks, final_norm=None, unembed=None)
        return lambda x: run(part, x[None]).hidden[0]

    def _block(self, k: int, x: Stream, y: float) -> tuple[Stream, float]:
        """Return the stream behind a layer, and the height where it ends."""
        layer, weights = self.checkpoint.wiring.layers[k], iter(self._blocks_of(k))
        branches: list[Any] = [layer.attention, *([layer.second] if layer.second else [])]
        names = (f"norm$^{{{k}}}_{number}$" for number in range(1, 9))
        for group in [branches] if layer.parallel else [[branch] for branch in branches]:
            block, top = next(weights, None), y - 2.2
            copies = self.copies(x, (0.0, top), self.d)
            x, y = copies[len(group)], top
            for number, wiring in enumerate(group):
                read = copies[number]
                if number:  # a branch beside another one reads the stream from above it
                    top = y - 1.9
                    dot = self.add("function", "", 0.75, top)
                    self.pair(read, dot, self.d, [(0.75, self.nodes[read[0][0]].position[1])])
                    read = (dot, 0), (dot, 1)
                node, position = self._branch(k, wiring, block.branches[number] if block else None, read, top, names)
                y = self.nodes[node].position[1]
                total = self.add("function", "+", 0.0, y)
                self.pair(x, total, self.d)
                self.leave(node, position, total)
                x = (total, 0), (total, 1)
            if group[0].norm is not None and group[0].norm.place == "post":
                x, y = self.on_stream(next(names), x, y - 1.1, block and block.after), y - 1.1
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
        column = STEP
        if wiring.norm is not None and wiring.norm.place == "pre":
            x = self.on_stream(next(names), x, top, branch and branch.before, column)
            column += STEP
        layer: Any = branch.layer if branch else None
        bias = None
        if isinstance(wiring, ExpertsWiring):
            shared = " and a shared one" if wiring.shared else ""
            name = f"{len(wiring.experts)} experts, {wiring.n_chosen} at a time{shared}$^{{{k}}}$"
            node, position = self.add("function", name, column + 0.8, top - 1.2, layer), None
            self.pair(x, node, self.d, [(column + 0.8, top)])
        elif isinstance(wiring, FeedForwardWiring):
            d_ff = self.checkpoint.folder.tensors[wiring.down.weight].shape[wiring.down.input_axis]
            node, position = draw_feed_forward(self, k, wiring, d_ff, layer, x, (column, top))
            bias = ("↓", layer and layer.down.bias) if wiring.down.bias else None
        else:
            layer = layer or self.checkpoint.attention(k)
            node, position = AttentionNetwork(self, k, layer, x, (column, top)).draw()
            bias = ("O", layer.b_O) if layer.b_O is not None else None
        if bias is not None:
            x0, y0 = self.nodes[node].position
            total = self.add("function", "+", x0 - STEP, y0)
            vector = self.add("tensor", f"b$^{{{k}}}_{bias[0]}$", x0 - STEP, y0 + 0.9, bias[1])
            self.leave(node, position, total)
            self.join((vector, 0), (total, 1), "", self.d)
            node, position = total, None
        if wiring.output_norm is not None:
            x0, y0 = self.nodes[node].position
            norm = self.add("function", next(names), x0 - STEP, y0, branch and branch.behind)
            self.leave(node, position, norm)
            node, position = norm, None
        return node, position


def _patches(embedding: PatchEmbedding, image: Array) -> tuple[Array, Array, Array]:
    """Return patches (n, pixels), none for the first position, their map, and what is added: positions and biases."""
    p, (channels, height, width) = embedding.kernel.shape[-1], image.shape
    patches = (
        image.reshape(channels, height // p, p, width // p, p).transpose(1, 3, 0, 2, 4).reshape(-1, channels * p * p)
    )
    units = np.concatenate([np.zeros_like(patches[:1]), patches])
    added = embedding.positions + np.concatenate([embedding.first[None], np.tile(embedding.bias, (len(patches), 1))])
    return units, embedding.kernel.reshape(len(embedding.kernel), -1).T, added
