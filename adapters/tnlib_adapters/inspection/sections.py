"""The sections of a page on a checkpoint: each a list of pieces of HTML, its pictures drawn by `draw`."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, TypeAlias, get_args

import numpy as np

import tnlib
from tnlib.drawing import Diagram
from tnlib_adapters.circuits import Overlaps, block_diagram, composition_diagram, frozen_diagram, heat_map
from tnlib_adapters.compression.markup import table
from tnlib_adapters.inspection.measure import Inspection
from tnlib_adapters.inspection.pictures import doing_maps, pattern_overview, pattern_panels, rank_maps, schmidt_values
from tnlib_adapters.inspection.reading import Doing, Reader

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Draw: TypeAlias = "Callable[[Figure], str]"

_READERS: Mapping[Reader, str] = {"Q": "queries", "K": "keys", "V": "values"}
_MOST_BLOCKS = 3  # kinds of blocks that are drawn
_MOST_PANELS = 200  # heads whose patterns are drawn large
_STRONGEST = 5  # pairs of heads in a table


def block(found: Inspection, draw: Draw) -> list[str]:
    """Draw every kind of block that there is."""
    parts = [
        "<p>What is in a bubble is contracted first, and the function of the bubble applied to it. Lines are indices, "
        "as thick as the logarithm of their size.</p>"
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
    """Draw a layer whose patterns are fixed."""
    return [
        "<p>Once the patterns A of a text are fixed, a layer is a linear operator: A acts on positions, "
        "W<sub>O</sub> W<sub>V</sub> on the stream, one Kronecker product for every head.</p>",
        draw(tnlib.draw(frozen_diagram(found.checkpoint.attention(0))).figure),
    ]


def composition(found: Inspection, draw: Draw) -> list[str]:
    """Show how strongly heads read each other: all pairs as heat maps, the strongest as numbers and diagrams."""
    if not found.compositions:
        return ["<p>One layer: there is no head that another one reads.</p>"]
    rows = [
        [name, *map(_head, (writer, reader)), f"{s.score:.3f}", f"{s.chance:.3f}", f"{s.multiple:.2f}"]
        for name, one in found.compositions.items()
        for writer, reader, s in one.largest(_STRONGEST)
    ]
    return [
        "<p>How much of what a head writes the queries (Q), keys (K) or values (V) of a later head read, "
        "||L R|| / (||L|| ||R||), as a multiple of what a random rotation between the two would give. Heads are "
        "layer.head.</p>",
        '<div class="row">' + "".join(_titled(name, draw(heat_map(one))) for name, one in found.compositions.items()),
        "</div>",
        "<h3>The strongest pairs</h3>",
        table(["kind", "writes", "reads", "score", "chance", "multiple"], rows),
        "<h3>As diagrams</h3>",
        *(f"<p>{heads}:</p>{draw(tnlib.draw(diagram).figure)}" for heads, diagram in _strongest(found)),
    ]


def spectra(found: Inspection, draw: Draw) -> list[str]:
    """Show effective ranks and Schmidt values of all heads."""
    return [
        "<p>An operator of a head is a sum of products of one direction that is read and one that is written; the "
        "Schmidt values s are their weights. The effective rank, (sum s<sup>2</sup>)<sup>2</sup> / sum s<sup>4</sup>, "
        f"says how many of them share the operator, at most {found.spectra.ov.shape[2]}. Biases are part of it.</p>",
        draw(rank_maps(found.spectra)),
        "<p>Schmidt values of every head, each line divided by its largest. A line that falls early needs few "
        "numbers.</p>",
        draw(schmidt_values(found.spectra)),
    ]


def heads(found: Inspection, draw: Draw) -> list[str]:
    """Show what heads attend to and copy, where they write and read, and some of them in tokens."""
    readings = found.readings
    maps = {} if readings.scores is None else {name: getattr(readings.scores, name) for name in get_args(Doing)}
    parts = []
    if maps or readings.copying is not None:
        parts += [
            "<p>On random tokens that come twice: how much attention falls on the previous token, on the same token "
            "before (duplicate), and on what followed it (induction). Copying is the sum of the eigenvalues of the "
            "circuit from tokens to logits over the sum of their sizes: 1 where a head raises the logit of what it "
            "attends to.</p>",
            draw(doing_maps(maps, readings.copying)),
        ]
    if readings.induction is not None:
        parts += [
            "<p>The induction circuit, by patterns, by weights, and by the share of the gap between the loss and chance "
            "that is lost when later keys do without a head:</p>",
            f"<pre>{html.escape(repr(readings.induction))}</pre>",
        ]
    if readings.overlaps:
        parts += [
            "<h3>Where heads write and read</h3>",
            "<p>Overlap of the directions that one head writes with those that the queries, keys or values of a later "
            "one read: the mean squared cosine of their principal angles, and how far that is above two subspaces at "
            "random, in standard deviations.</p>",
            table(["writes", "reads", "by", "overlap", "chance", "sigma"], _overlaps(readings.overlaps)),
        ]
    if readings.heads:
        parts.append("<h3>In tokens</h3>")
        parts += [
            f"<details{' open' * (k == 0)}><summary>Head {one.layer}.{one.head}</summary>"
            f"<pre>{html.escape(repr(one))}</pre></details>"
            for k, one in enumerate(readings.heads)
        ]
    return parts or ["<p>This is a model of images of one layer: there are no tokens and no pairs of heads.</p>"]


def gauge(found: Inspection, draw: Draw) -> list[str]:
    """Say what in the weights says nothing."""
    rows = [
        [
            str(layer),
            *(f"{one.n_numbers:,}", f"{one.n_free:,}", f"{one.n_free / one.n_numbers:.1%}"),
            *(_span(one.queries_to_keys), _span(one.values_to_outputs)),
            " ".join(map(str, one.order)),
        ]
        for layer, one in enumerate(found.gauges)
    ]
    head = ["layer", "numbers", "free", "share", "queries : keys", "values : outputs", "heads by strength"]
    return [
        "<p>Only products of weights are seen: W<sub>Q</sub> G with W<sub>K</sub> G<sup>-T</sup>, and W<sub>V</sub> H "
        "with H<sup>-1</sup> W<sub>O</sub>, compute the same, and so do biases that softmax or the output bias takes "
        "up. <em>Free</em> counts the numbers that can be chosen at will. Quotients of norms would be 1 in the "
        "balanced gauge, which <code>fix_gauge</code> gives, with heads in the order shown.</p>",
        table(head, rows),
    ]


def patterns(found: Inspection, draw: Draw) -> list[str]:
    """Show what all heads attend to on the text, where there is one."""
    if found.tokens is None or found.patterns is None:
        return [f"<p>{_why_no_text(found)}</p>"]
    names, large = found.tokens.names, max(1, _MOST_PANELS // found.checkpoint.sizes.n_heads)
    spans = " ".join(f"<span><b>{html.escape(name)}</b> <small>{k}</small></span>" for k, name in enumerate(names))
    parts = [f'<p>{len(names)} tokens, with their positions:</p><p class="tokens">{spans}</p>']
    if found.tokens.cut:
        parts.append(f"<p>Only the first {len(names)} tokens of the text are shown.</p>")
    parts += [
        "<h3>All heads</h3>",
        "<p>Rows are the positions that attend, columns those that are attended to; white is 0, the darkest blue "
        "1.</p>",
        draw(pattern_overview(found.patterns)),
        "<h3>Layer by layer</h3>",
    ]
    for layer, of_layer in enumerate(found.patterns[:large]):
        picture = draw(pattern_panels(of_layer, names))
        parts.append(f"<details{' open' * (layer == 0)}><summary>Layer {layer}</summary>{picture}</details>")
    if large < len(found.patterns):
        parts.append(f"<p>Layers from {large} on are in the overview alone.</p>")
    return parts


def _why_no_text(found: Inspection) -> str:
    if found.checkpoint.architecture.reads == "images":
        return "This is a model of images: there is no text to show."
    return "No text was given: <code>--text</code> or <code>--text-file</code> shows what its heads attend to."


def _strongest(found: Inspection) -> Iterator[tuple[str, Diagram]]:
    """Describe the strongest pair of every kind."""
    for kind in ("Q", "K", "V"):
        pairs = [
            (score.multiple, name, writer, reader)
            for name, one in found.compositions.items()
            if one.kind == kind
            for writer, reader, score in one.largest(1)
        ]
        for multiple, name, writer, reader in sorted(pairs, reverse=True)[:1]:
            one, two = ((found.checkpoint.attention(layer).numerator(), head) for layer, head in (writer, reader))
            heads = f"{_head(reader)} reads {_head(writer)}"
            yield f"{name}: {heads}, {multiple:.2f} times chance", composition_diagram(kind, two, one)


def _overlaps(found: Mapping[Reader, Overlaps]) -> list[list[str]]:
    """Return the pairs that lie furthest above chance, of a head and one of a later layer."""
    rows = []
    for by, one in found.items():
        layers = np.arange(len(one.overlaps))
        later = (layers[:, None] < layers)[:, None, :, None]
        order = np.argsort(np.where(later, -one.sigmas, np.inf), axis=None, kind="stable")[:_STRONGEST]
        for at in (np.unravel_index(k, one.overlaps.shape) for k in order):
            if at[0] < at[2]:
                numbers = f"{one.overlaps[at]:.3f}", f"{one.chance[at]:.3f}", f"{one.sigmas[at]:+.1f}"
                rows.append([f"{at[0]}.{at[1]}", f"{at[2]}.{at[3]}", _READERS[by], *numbers])
    return rows


def _titled(title: str, picture: str) -> str:
    return f"<figure><figcaption>{html.escape(title)}</figcaption>{picture}</figure>"


def _head(head: tuple[int, int]) -> str:
    return "{}.{}".format(*head)


def _named(layers: Sequence[int]) -> str:
    """Name layers in ranges.

    >>> _named([0, 1, 2, 5])
    'Layers 0 to 2, 5'
    """
    runs = [[layer for _, layer in run] for _, run in groupby(enumerate(layers), key=lambda pair: pair[1] - pair[0])]
    names = [f"{run[0]}" if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs]
    return f"Layer{'s' if len(layers) > 1 else ''} {', '.join(names)}"


def _span(pair: tuple[float, float]) -> str:
    low, high = (f"{x:.3g}" for x in pair)
    return low if low == high else f"{low} to {high}"
