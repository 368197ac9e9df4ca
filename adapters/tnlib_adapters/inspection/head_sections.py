"""Sections of a page on a checkpoint that say what its heads are and do: each a list of pieces of HTML."""

from __future__ import annotations

import html
from collections.abc import Mapping
from typing import get_args

import numpy as np

from tnlib_adapters.circuits import Overlaps
from tnlib_adapters.compression.report.html import table
from tnlib_adapters.inspection.diagram_sections import STRONGEST, Draw
from tnlib_adapters.inspection.measure import Inspection
from tnlib_adapters.inspection.pictures import doing_maps, pattern_overview, pattern_panels, rank_maps, schmidt_values
from tnlib_adapters.inspection.reading import Doing, Reader

_READERS: Mapping[Reader, str] = {"Q": "queries", "K": "keys", "V": "values"}
_MOST_PANELS = 200  # heads whose patterns are drawn large


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
            "<p>The induction circuit, by patterns, by weights, and by how much of the gap between the loss and chance "
            "is lost when later keys do without a head:</p>",
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
    return parts or ["<p>There are no tokens and no pairs of heads.</p>"]


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


def _overlaps(found: Mapping[Reader, Overlaps]) -> list[list[str]]:
    """Return the pairs that lie furthest above chance, of a head and one of a later layer."""
    rows = []
    for by, one in found.items():
        layers = np.arange(len(one.overlaps))
        later = (layers[:, None] < layers)[:, None, :, None]
        order = np.argsort(np.where(later, -one.sigmas, np.inf), axis=None, kind="stable")[:STRONGEST]
        for at in (np.unravel_index(k, one.overlaps.shape) for k in order):
            if at[0] < at[2]:
                numbers = f"{one.overlaps[at]:.3f}", f"{one.chance[at]:.3f}", f"{one.sigmas[at]:+.1f}"
                rows.append([f"{at[0]}.{at[1]}", f"{at[2]}.{at[3]}", _READERS[by], *numbers])
    return rows


def _span(pair: tuple[float, float]) -> str:
    low, high = (f"{x:.3g}" for x in pair)
    return low if low == high else f"{low} to {high}"
