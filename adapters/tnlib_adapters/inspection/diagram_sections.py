"""Diagram sections of the inspection page; each function returns pieces of HTML with pictures drawn by `draw`."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, TypeAlias

import tnlib
from tnlib.drawing import Diagram
from tnlib_adapters.architectures.table import ATTENTION_ONLY
from tnlib_adapters.circuits import block_diagram, composition_diagram, frozen_diagram, heat_map, term_diagram
from tnlib_adapters.circuits.paths.two_layer_terms import NAMES
from tnlib_adapters.compression.report.html import table
from tnlib_adapters.inspection.measure import Inspection

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Draw: TypeAlias = "Callable[[Figure], str]"

STRONGEST = 5  # pairs of heads in a table
_MOST_BLOCKS = 3  # largest number of kinds of blocks to draw


def block(found: Inspection, draw: Draw) -> list[str]:
    """Draw every kind of block of the model, at most 3."""
    parts = [
        "<p>A bubble is contracted first, then its function is applied. Lines are indices; their width is the "
        "logarithm of their size.</p>"
    ]
    kinds: dict[Diagram, list[int]] = {}
    for layer in range(found.checkpoint.n_layers):
        diagram = block_diagram(found.checkpoint, layer)
        kinds.setdefault(Diagram(diagram.nodes, diagram.legs, "", diagram.bubbles), []).append(layer)
    for diagram, layers in list(kinds.items())[:_MOST_BLOCKS]:
        parts += [f"<h3>{_named(layers)}</h3>", draw(tnlib.draw(diagram).figure)]
    if len(kinds) > _MOST_BLOCKS:
        parts.append(f"<p>{len(kinds) - _MOST_BLOCKS} more kinds of blocks are not drawn.</p>")
    return parts


def frozen(found: Inspection, draw: Draw) -> list[str]:
    """Draw a layer with frozen patterns."""
    return [
        "<p>With the patterns A of a text frozen, a layer is a linear operator: A acts on positions, "
        "W<sub>O</sub> W<sub>V</sub> on the stream, one Kronecker product per head.</p>",
        draw(tnlib.draw(frozen_diagram(found.checkpoint.attention(0))).figure),
    ]


def composition(found: Inspection, draw: Draw) -> list[str]:
    """Return the composition scores: heat maps of all pairs, and a table and diagrams of the strongest pairs."""
    if not found.compositions:
        return ["<p>One layer: no pairs of heads to compose.</p>"]
    rows = [
        [name, *map(_head, (writer, reader)), f"{s.score:.3f}", f"{s.chance:.3f}", f"{s.multiple:.2f}"]
        for name, compositions in found.compositions.items()
        for writer, reader, s in compositions.largest(STRONGEST)
    ]
    return [
        "<p>Composition score ||L R|| / (||L|| ||R||) of the output of a head with the queries (Q), keys (K) or "
        "values (V) of a later head, as a multiple of its value for a random rotation between the two. Heads are "
        "named layer.head.</p>",
        '<div class="row">'
        + "".join(_titled(name, draw(heat_map(compositions))) for name, compositions in found.compositions.items()),
        "</div>",
        "<h3>The strongest pairs</h3>",
        table(["kind", "writes", "reads", "score", "chance", "multiple"], rows),
        "<h3>As diagrams</h3>",
        *(f"<p>{heads}:</p>{draw(tnlib.draw(diagram).figure)}" for heads, diagram in _strongest(found)),
        *_terms(found, draw),
    ]


def _strongest(found: Inspection) -> Iterator[tuple[str, Diagram]]:
    """Yield caption and diagram of the strongest pair of every kind of composition."""
    for kind in ("Q", "K", "V"):
        pairs = [
            (score.multiple, name, writer, reader)
            for name, scores in found.compositions.items()
            if scores.kind == kind
            for writer, reader, score in scores.largest(1)
        ]
        for multiple, name, writer, reader in sorted(pairs, reverse=True)[:1]:
            earlier, later = ((found.checkpoint.attention(layer).numerator(), head) for layer, head in (writer, reader))
            heads = f"{_head(reader)} reads {_head(writer)}"
            yield f"{name}: {heads}, {multiple:.2f} times chance", composition_diagram(kind, later, earlier)


def _terms(found: Inspection, draw: Draw) -> list[str]:
    """Draw the ten terms of a two-layer attention-only model for the strongest pair by K-composition."""
    checkpoint = found.checkpoint
    if checkpoint.architecture is not ATTENTION_ONLY or checkpoint.n_layers != 2:
        return []
    ((writer, reader, _),) = found.compositions["K"].largest(1)
    earlier, later = ((checkpoint.attention(layer), head) for layer, head in (writer, reader))
    picture = draw(tnlib.draw([term_diagram(name, later, earlier) for name in NAMES]).figure)
    return [f"<details><summary>All ten terms of {_head(writer)} and {_head(reader)}</summary>{picture}</details>"]


def _named(layers: Sequence[int]) -> str:
    """Return layer numbers as text with ranges.

    >>> _named([0, 1, 2, 5])
    'Layers 0 to 2, 5'
    """
    runs = [[layer for _, layer in run] for _, run in groupby(enumerate(layers), key=lambda pair: pair[1] - pair[0])]
    names = [f"{run[0]}" if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs]
    return f"Layer{'s' if len(layers) > 1 else ''} {', '.join(names)}"


def _titled(title: str, picture: str) -> str:
    return f"<figure><figcaption>{html.escape(title)}</figcaption>{picture}</figure>"


def _head(head: tuple[int, int]) -> str:
    return "{}.{}".format(*head)
