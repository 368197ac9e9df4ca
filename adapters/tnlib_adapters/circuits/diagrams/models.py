"""Tensor network diagrams of whole transformers: embedding, blocks, unembedding."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from tnlib._validate import as_count
from tnlib.drawing import Bubble, Diagram, Leg, Node, join
from tnlib.drawing.diagram import text
from tnlib_adapters.architectures.architecture import by_config
from tnlib_adapters.checkpoints.arguments import as_checkpoint
from tnlib_adapters.checkpoints.checkpoint import Checkpoint
from tnlib_adapters.checkpoints.residual_stream import full_name, unembedding
from tnlib_adapters.circuits.diagrams.blocks import block_diagram
from tnlib_adapters.circuits.diagrams.elements import REACH, STEP

_ROOM = 2.8  # from the lowest shape of a part to the first of the next, heading included
_ABOVE = 1.25  # distance of a heading from its part

_Named = tuple[str, int | None]  # label or index, and size


def model_diagram(checkpoint: Checkpoint, n_positions: int | None = None) -> Diagram:
    r"""Return the diagram of a model: embedding, first block, unembedding, each under its equation.

    Parameters
    ----------
    checkpoint
        Checkpoint returned by `open_checkpoint`.
    n_positions
        Sequence length; an open size by default.

    Returns
    -------
    Diagram
        Parts from top to bottom, with norms and learned positions as the architecture defines.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        If `checkpoint` is not a Checkpoint, or `n_positions` is not a positive integer.

    Examples
    --------
    >>> import tnlib_adapters
    >>> model = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path("llama"))
    >>> headings = [node.label.split("\n")[0] for node in model_diagram(model).nodes if node.kind == "text"]
    >>> headings[0], headings[-2:]
    ('x = tokens W$_E$', ['and so on, up to block 3', 'logits = norm(x) W$_U$'])
    """
    as_checkpoint("model_diagram", checkpoint)
    n = None if n_positions is None else as_count("model_diagram", "n_positions", n_positions)
    parts = [_embedding(checkpoint, n), ("", block_diagram(checkpoint, 0, n))]
    if checkpoint.n_layers > 1:
        parts.append((f"and so on, up to block {checkpoint.n_layers - 1}", Diagram((), ())))
    parts.append(_unembedding(checkpoint, n))
    placed: list[Diagram] = []
    floor = 0.0
    for heading, part in parts:
        if heading:
            placed.append(text(heading, (0.0, floor + _ABOVE)))
        if part.nodes:
            tops = [node.position[1] for node in part.nodes if heading or node.kind == "text"]
            x0, x1, y0, _ = part.bounds
            top = max(tops) - (0.0 if heading else _ABOVE)  # a block has its own headings
            placed.append(part.moved(-(x0 + x1) / 2, floor - top))
            floor += y0 - top
        floor -= _ROOM if part.nodes else _ABOVE
    return join(tuple(placed), f"{checkpoint.architecture.model_type}, {checkpoint.n_layers} blocks")


def _embedding(checkpoint: Checkpoint, n: int | None) -> tuple[str, Diagram]:
    """Return equation and diagram of the embedding: rows of a table or projected patches, plus learned positions."""
    row, d = checkpoint.architecture, checkpoint.sizes.d_model
    images = row.reads == "images"
    shape = checkpoint.folder.tensors[str(full_name(checkpoint, f"{row.embeddings[0]}.weight"))].shape
    rows, written = (math.prod(shape[1:]), d) if images else (shape[0], shape[1])
    maps: list[_Named] = [("patch" if images else "t", n), ("W$_E$", rows)]
    if not images and written != d:
        maps.append(("W$_{in}$", written))
    terms = [_row(maps, "position", ["pixels" if images else "vocab", "narrow"], ("stream", d))]
    equation = ("patches" if images else "tokens") + " W$_E$" + (" W$_{in}$" if len(maps) > 2 else "")
    equation = f"$\\sqrt{{{d}}}$ " + equation if row.embedding_scale else equation
    if images or len(row.embeddings) > 1:
        terms.append(_row([("P", n)], "position", [], ("stream", d)))
        equation += " + P"
    equation = f"norm({equation})" if row.embedding_norm else equation
    return f"x = {equation}", _sum(terms)


def _unembedding(checkpoint: Checkpoint, n: int | None) -> tuple[str, Diagram]:
    row, d = checkpoint.architecture, checkpoint.sizes.d_model
    final = by_config(row.final_norm, checkpoint.config)
    x = "norm(x)" if final else "x"
    name = unembedding(checkpoint)
    bubbles = (Bubble((0,), "norm"),) if final else ()
    if name is None:
        return f"hidden states = {x}", replace(_row([("x", n)], "position", [], ("stream", d)), bubbles=bubbles)
    weight = str(full_name(checkpoint, f"{name}.weight"))
    vocab, width = checkpoint.folder.tensors[weight].shape
    maps: list[_Named] = [("x", n), ("W$_{out}$", d), ("W$_U$", width)] if width != d else [("x", n), ("W$_U$", d)]
    product = " ".join([x, *(label for label, _ in maps[1:])])
    product += " + b$_U$" if full_name(checkpoint, f"{name}.bias") else ""
    capped = f"cap({product})" if row.logit_cap else product
    return f"logits = {capped}", replace(
        _row(maps, "position", ["stream", "narrow"], ("vocab", vocab)), bubbles=bubbles
    )


def _row(maps: list[_Named], left: str, between: list[str], right: _Named) -> Diagram:
    """Return the diagram of matrices in a row, each with its label and the size of its left leg."""
    nodes = [Node("matrix", label, (k * STEP, 0.0)) for k, (label, _) in enumerate(maps)]
    last = len(maps) - 1
    ends: list[Any] = [
        Leg(0, None, left, maps[0][1], (-REACH, 0.0)),
        Leg(last, None, right[0], right[1], (last * STEP + REACH, 0.0)),
    ]
    legs = [Leg(k, k + 1, between[k], maps[k + 1][1]) for k in range(last)]
    return Diagram((*nodes,), (*legs, *ends))


def _sum(terms: list[Diagram]) -> Diagram:
    placed, x = [terms[0]], terms[0].bounds[1] + 1.2
    for term in terms[1:]:
        placed += [text("+", (x, 0.0)), term.moved(x + 1.2 - term.bounds[0], 0.0)]
        x += 2.4 + term.bounds[1] - term.bounds[0]
    return join(tuple(placed))
