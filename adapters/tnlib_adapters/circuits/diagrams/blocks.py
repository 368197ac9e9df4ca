"""A whole block of a transformer in graphical notation, from the row of its architecture and its weights."""

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

_SIDE = 0.9  # of the gate and of what it multiplies from the middle


def block_diagram(checkpoint: Checkpoint, layer: int, n_positions: int | None = None) -> Diagram:
    r"""Describe one block: what attention and, where there is one, the feed-forward layer add to the stream.

    Parameters
    ----------
    checkpoint
        An opened checkpoint.
    layer
        Counted from 0.
    n_positions
        Length of the text; left open by default.

    Returns
    -------
    Diagram
        One part below the other, each under its equation: where norms stand and what reads which stream are as the row
        of the architecture says.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        If `checkpoint` is none, there is no such layer, or `n_positions` is no positive integer.

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
    """Describe the feed-forward layer of a block at one position: the bubble is contracted, then its function applied.

    Parameters, errors: as of `block_diagram`; ArgumentError also where the architecture has no feed-forward layer.

    Examples
    --------
    >>> import tnlib_adapters
    >>> model = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path("llama"))
    >>> diagram = feed_forward_diagram(model, 0)
    >>> [bubble.label for bubble in diagram.bubbles], diagram.open_legs
    (['silu'], (('stream', 128),))
    """
    layer = _checked("feed_forward_diagram", checkpoint, layer)
    *into, down = mlp(checkpoint, layer)  # refused there where there is none
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
        here = len(nodes)
        nodes += [Node("matrix", label, (1.8 * STEP, y)), Node("tensor", x, (2.8 * STEP, y))]
        legs += [Leg(1, here, "", d_ff), Leg(here, here + 1, "stream", size)]
    return Diagram((*nodes,), (*legs,), title, (Bubble((2, 3), name),))


def _has_bias(checkpoint: Checkpoint, view: View) -> bool:
    return full_name(checkpoint, f"{view.name}.bias") is not None


def _checked(function: str, checkpoint: Any, layer: Any) -> int:
    return as_index(function, "layer", layer, as_checkpoint(function, checkpoint).n_layers)


def _equations(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Return what each part adds to which stream, as the row of the architecture says."""
    row, config = checkpoint.architecture, checkpoint.config
    place = by_config(row.norm_place, config)
    parallel = by_config(row.parallel, config)
    after = row.attention_norm_after is not None, row.mlp is not None and row.mlp.norm_after is not None

    def added(what: str, x: str, normed: bool) -> str:
        read = f"{what}(norm {x})" if place == "before" else f"{what}({x})"
        return f"norm({read})" if normed else read

    def written(new: str, x: str, part: str) -> str:
        return f"{new} = norm({x} + {part})" if place == "after" else f"{new} = {x} + {part}"

    attention = added("attention", "x", after[0])
    if row.mlp is None:
        return (written("x$_1$", "x", attention),)
    second = "x" if parallel else "x$_1$"
    forward = added("feed-forward", second, after[1])
    if parallel:
        return f"x$_1$ = x + {attention} + ...", f"... + {forward}, at every position"
    return written("x$_1$", "x", attention), f"{written('x$_2$', 'x$_1$', forward)}, at every position"
