"""Tensor network diagrams of one transformer block."""

from __future__ import annotations

from typing import Any

from tnlib.drawing import Bubble, Diagram, Leg, Node, join
from tnlib.drawing.diagram import text
from tnlib_adapters.architectures.architecture import by_config
from tnlib_adapters.attention.indices import as_index
from tnlib_adapters.checkpoints.arguments import as_checkpoint
from tnlib_adapters.checkpoints.checkpoint import Checkpoint
from tnlib_adapters.checkpoints.residual_stream import full_name
from tnlib_adapters.checkpoints.weight_stacks import View, mlp
from tnlib_adapters.circuits.diagrams.elements import REACH, STEP
from tnlib_adapters.circuits.diagrams.heads import layer_diagram

_SIDE = 0.9  # distance of the gate and of the gated matrix from the middle


def block_diagram(checkpoint: Checkpoint, layer: int, n_positions: int | None = None) -> Diagram:
    r"""Return the diagram of one block: attention and, if present, the feed-forward layer.

    Parameters
    ----------
    checkpoint
        Checkpoint returned by `open_checkpoint`.
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
    >>> [node.label.split("\n")[0] for node in block_diagram(model, 0).nodes if node.kind == "text"]
    ['x$_1$ = x + attention(norm x)', 'x$_2$ = x$_1$ + feed-forward(norm x$_1$), at every position']
    """
    layer = _checked("block_diagram", checkpoint, layer)
    parts = [layer_diagram(checkpoint.attention(layer), n_positions)]
    if checkpoint.architecture.mlp is not None:
        parts.append(feed_forward_diagram(checkpoint, layer))
    placed: list[Diagram] = []
    floor = 0.0
    for equation, part in zip(_equations(checkpoint), parts, strict=True):
        x0, x1, y0, y1 = part.bounds
        heading = text(f"{equation}\n{part.title}", (0.0, floor + 1.25))
        placed += [heading, part.moved(-(x0 + x1) / 2, floor - y1)]
        floor += y0 - y1 - 2.8
    return join(tuple(placed), f"block {layer} of a {checkpoint.architecture.model_type}")


def feed_forward_diagram(checkpoint: Checkpoint, layer: int) -> Diagram:
    """Return the diagram of the feed-forward layer of a block at one position; functions are drawn as bubbles.

    A bubble is contracted first, then its function is applied. Parameters and errors as in `block_diagram`;
    ArgumentError also if the architecture has no feed-forward layer.

    Examples
    --------
    >>> import tnlib_adapters
    >>> model = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path("llama"))
    >>> diagram = feed_forward_diagram(model, 0)
    >>> [bubble.label for bubble in diagram.bubbles], diagram.open_legs
    (['silu'], (('stream', 128),))
    """
    layer = _checked("feed_forward_diagram", checkpoint, layer)
    *into, down = mlp(checkpoint, layer)  # raises if there is no feed-forward layer
    row: Any = checkpoint.architecture.mlp
    name = str(checkpoint.architecture.get(checkpoint.config, row.activation) or row.activation)
    biased = any(_has_bias(checkpoint, view) for view in into)
    x, size = ("$\\tilde{x}$", down.shape[1] + 1) if biased else ("x", down.shape[1])
    up = "W$_↑$\nb$_↑$" if biased else "W$_↑$"
    d_ff, d_model = down.shape
    nodes = [Node("matrix", "W$_↓$", (0.0, 0.0))]
    legs = [Leg(0, None, "stream", d_model, (-REACH, 0.0))]
    title = f"feed-forward{' with a gate' if row.gate else ''}, {d_model} to {d_ff}"
    title += ", plus b$_↓$" if _has_bias(checkpoint, down) else ""
    if row.gate is None:
        nodes += [Node("matrix", up, (STEP, 0.0)), Node("tensor", x, (2 * STEP, 0.0))]
        legs += [Leg(0, 1, "d_ff", d_ff), Leg(1, 2, "stream", size)]
        return Diagram((*nodes,), (*legs,), title, (Bubble((1, 2), name),))
    nodes.append(Node("delta", "", (0.8 * STEP, 0.0)))
    legs.append(Leg(0, 1, "d_ff", d_ff))
    for label, y in (("gate", _SIDE), (up, -_SIDE)):
        index = len(nodes)
        nodes += [Node("matrix", label, (1.8 * STEP, y)), Node("tensor", x, (2.8 * STEP, y))]
        legs += [Leg(1, index, "", d_ff), Leg(index, index + 1, "stream", size)]
    return Diagram((*nodes,), (*legs,), title, (Bubble((2, 3), name),))


def _has_bias(checkpoint: Checkpoint, view: View) -> bool:
    return full_name(checkpoint, f"{view.name}.bias") is not None


def _checked(function: str, checkpoint: Any, layer: Any) -> int:
    return as_index(function, "layer", layer, as_checkpoint(function, checkpoint).n_layers)


def _equations(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Return the equation of each part of a block, by architecture."""
    row, config = checkpoint.architecture, checkpoint.config
    place = by_config(row.norm_place, config)
    parallel = by_config(row.parallel, config)
    after = row.attention_norm_after is not None, row.mlp is not None and row.mlp.norm_after is not None

    def added(function: str, x: str, normed: bool) -> str:
        equation = f"{function}(norm {x})" if place == "before" else f"{function}({x})"
        return f"norm({equation})" if normed else equation

    def written(output: str, x: str, term: str) -> str:
        return f"{output} = norm({x} + {term})" if place == "after" else f"{output} = {x} + {term}"

    attention = added("attention", "x", after[0])
    if row.mlp is None:
        return (written("x$_1$", "x", attention),)
    second = "x" if parallel else "x$_1$"
    forward = added("feed-forward", second, after[1])
    if parallel:
        return f"x$_1$ = x + {attention} + ...", f"... + {forward}, at every position"
    return written("x$_1$", "x", attention), f"{written('x$_2$', 'x$_1$', forward)}, at every position"
