"""Tensor network diagrams of whole models: transformers, their blocks, and dense networks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tnlib import ArgumentError, ArgumentTypeError
from tnlib._validate import as_array, is_list
from tnlib.drawing import Bubble, Diagram, Leg, Node, join
from tnlib.drawing.diagram import text
from tnlib_adapters.architectures.wiring import LayerWiring, NormWiring
from tnlib_adapters.attention.validation import as_index
from tnlib_adapters.checkpoints.checkpoint import Checkpoint, accepts_models, as_one_stream
from tnlib_adapters.checkpoints.weight_stacks import mlp
from tnlib_adapters.circuits.diagrams.attention_diagrams import REACH, STEP, layer_diagram, weight_node

_SIDE = 0.9  # distance of the gate and of the gated matrix from the middle
_BUBBLE_STEP = 2.0  # distance between neighbours if the rim of a bubble and a label are between them


@accepts_models
def block_diagram(checkpoint: Checkpoint, layer: int, n_positions: int | None = None) -> Diagram:
    r"""Return the diagram of one block: attention and, if present, the feed-forward layer.

    Parameters
    ----------
    checkpoint
        A checkpoint or transformers model.
    layer
        Index, from 0.
    n_positions
        Sequence length; an open size by default.

    Returns
    -------
    Diagram
        One part below the other, each under its equation, with norms and streams placed as the architecture defines.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        If `checkpoint` is not a Checkpoint, there is no such layer, or `n_positions` is not a positive integer.

    Examples
    --------
    >>> import tnlib_adapters
    >>> model = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path("llama"))
    >>> for node in block_diagram(model, 0).nodes:
    ...     if node.kind == "text":
    ...         print(node.label.split("\n")[0])
    x$_1$ = x + attention(norm x)
    x$_2$ = x$_1$ + feed-forward(norm x$_1$), at every position
    """
    layer = _as_layer("block_diagram", checkpoint, layer)
    parts = [layer_diagram(checkpoint.attention(layer), n_positions)]
    if checkpoint.wiring.layers[layer].second is not None:
        parts.append(feed_forward_diagram(checkpoint, layer))
    placed: list[Diagram] = []
    floor = 0.0
    for equation, part in zip(_equations(checkpoint.wiring.layers[layer]), parts, strict=True):
        x0, x1, y0, y1 = part.bounds
        heading = text(f"{equation}\n{part.title}", (0.0, floor + 1.25))
        placed += [heading, part.moved(-(x0 + x1) / 2, floor - y1)]
        floor += y0 - y1 - 2.8
    return join(tuple(placed), f"block {layer} of a {checkpoint.wiring.model_type}")


@accepts_models
def feed_forward_diagram(checkpoint: Checkpoint, layer: int) -> Diagram:
    """Return the diagram of the feed-forward layer of a block at one position; functions are drawn as bubbles.

    A bubble is contracted first, then its function is applied. Of a mixture of experts, one is drawn. Parameters and
    errors as in `block_diagram`; ArgumentError also if the architecture has no feed-forward layer.

    Examples
    --------
    >>> import tnlib_adapters
    >>> model = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path("llama"))
    >>> diagram = feed_forward_diagram(model, 0)
    >>> [bubble.label for bubble in diagram.bubbles], diagram.open_legs
    (['silu'], (('stream', 128),))
    """
    layer = _as_layer("feed_forward_diagram", checkpoint, layer)
    wirings = checkpoint.wiring.layers[layer].feed_forward_layers
    if not wirings:
        mlp(checkpoint, layer)  # raises
    wiring = wirings[0]
    shape = checkpoint.folder.tensors[wiring.down.weight].shape
    d_ff, d_model = shape[wiring.down.input_axis], shape[wiring.down.output_axis]
    name = str(wiring.activation or wiring.activation_key)
    biased = any(linear.bias for linear in wiring.inputs)
    x, size = ("$\\tilde{x}$", d_model + 1) if biased else ("x", d_model)
    up = "W$_↑$\nb$_↑$" if biased else "W$_↑$"
    nodes = [Node("matrix", "W$_↓$", (0.0, 0.0))]
    legs = []
    title = f"feed-forward{' with a gate' if wiring.gate else ''}, {d_model} to {d_ff}"
    experts = checkpoint.wiring.layers[layer].experts
    if experts is not None:
        title += f", one of {len(experts.experts)} experts"
        title += ", beside a shared one" if experts.shared else ""
    if wiring.gate is None:
        bubble = Bubble((1, 2), name)
        nodes += [Node("matrix", up, (STEP, 0.0)), Node("tensor", x, (2 * STEP, 0.0))]
        legs += [Leg(0, 1, "d_ff", d_ff, axes=(0, 1)), Leg(1, 2, "stream", size, axes=(0, 0))]
    else:
        bubble = Bubble((2, 3), name)
        nodes.append(Node("delta", "", (0.8 * STEP, 0.0)))
        legs.append(Leg(0, 1, "d_ff", d_ff, axes=(0, None)))
        for label, y in (("gate", _SIDE), (up, -_SIDE)):
            index = len(nodes)
            nodes += [Node("matrix", label, (1.8 * STEP, y)), Node("tensor", x, (2.8 * STEP, y))]
            legs += [Leg(1, index, "", d_ff, axes=(None, 1)), Leg(index, index + 1, "stream", size, axes=(0, 0))]
    if wiring.down.bias is None:
        legs.append(Leg(0, None, "stream", d_model, (-REACH, 0.0), axes=(1, None)))
    else:
        total = len(nodes)
        nodes += [Node("function", "+", (-STEP, 0.0)), Node("tensor", "b$_↓$", (-STEP, -1.1))]
        legs += [Leg(0, total, "", d_model, axes=(1, None)), Leg(total + 1, total, "", d_model)]
        legs.append(Leg(total, None, "stream", d_model, (-STEP - REACH, 0.0)))
    return Diagram((*nodes,), (*legs,), title, (bubble,))


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
    nodes = [Node("tensor", "x", (count * _BUBBLE_STEP, 0.0))]
    nodes += [
        weight_node(f"W$_{k + 1}$", w, ((count - 1 - k) * _BUBBLE_STEP, 0.0), tip=1, way=-1.0)
        for k, w in enumerate(arrays)
    ]
    legs = [Leg(k, k + 1, "in" if k == 0 else f"layer {k}", len(w)) for k, w in enumerate(arrays)]
    legs.append(Leg(count, None, "out", arrays[-1].shape[1], (-REACH, 0.0)))
    bubbles = tuple(Bubble(tuple(range(k + 1)), activation) for k in range(1, count))
    return Diagram((*nodes,), (*legs,), f"dense network, {count} layers", bubbles)


def _as_layer(function: str, checkpoint: Any, layer: Any) -> int:
    return as_index(function, "layer", layer, as_one_stream(function, checkpoint).n_layers)


def _equations(layer: LayerWiring) -> tuple[str, ...]:
    """Return the equation of each part of a block."""
    norm = layer.attention.norm
    place = None if norm is None else norm.place

    def added(function: str, x: str, output_norm: NormWiring | None) -> str:
        equation = f"{function}(norm {x})" if place == "pre" else f"{function}({x})"
        return f"norm({equation})" if output_norm else equation

    def written(output: str, x: str, term: str) -> str:
        return f"{output} = norm({x} + {term})" if place == "post" else f"{output} = {x} + {term}"

    attention = added("attention", "x", layer.attention.output_norm)
    if layer.second is None:
        return (written("x$_1$", "x", attention),)
    name = "experts" if layer.experts else "feed-forward"
    forward = added(name, "x" if layer.parallel else "x$_1$", layer.second.output_norm)
    if layer.parallel:
        return f"x$_1$ = x + {attention} + ...", f"... + {forward}, at every position"
    return written("x$_1$", "x", attention), f"{written('x$_2$', 'x$_1$', forward)}, at every position"
