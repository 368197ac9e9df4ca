"""Sections of the inspection page on heads: spectra, head scores, gauge freedom, patterns; each returns HTML."""

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
_MOST_PANELS = 200  # largest number of heads with a panel of their own


def spectra(found: Inspection, draw: Draw) -> list[str]:
    """Return effective ranks and singular values (Schmidt values) of all heads."""
    return [
        "<p>An operator of a head is a sum of products of an input direction and an output direction; the singular "
        "values (Schmidt values) s are the weights. The effective rank, (sum s<sup>2</sup>)<sup>2</sup> / "
        f"sum s<sup>4</sup>, is at most {found.spectra.ov.shape[2]}. Biases are included.</p>",
        draw(rank_maps(found.spectra)),
        "<p>Singular values of every head, each line divided by its largest. A line that falls early has a low "
        "effective rank.</p>",
        draw(schmidt_values(found.spectra)),
    ]


def heads(found: Inspection, draw: Draw) -> list[str]:
    """Return head scores, subspace overlaps, and some heads in tokens."""
    readings = found.readings
    maps = {} if readings.scores is None else {name: getattr(readings.scores, name) for name in get_args(Doing)}
    parts = []
    if maps or readings.copying is not None:
        parts += [
            "<p>On repeated random tokens: attention to the previous token, to earlier occurrences of the same token "
            "(duplicate), and to the tokens that followed them (induction). The copying score is the sum of the "
            "eigenvalues of the circuit from tokens to logits over the sum of their moduli: 1 if a head raises the "
            "logits of the tokens it attends to.</p>",
            draw(doing_maps(maps, readings.copying)),
        ]
    if readings.induction is not None:
        parts += [
            "<p>The induction circuit: patterns, weights, and the fraction of the gap between loss and chance that is "
            "lost when the keys of later layers do not read a head:</p>",
            f"<pre>{html.escape(repr(readings.induction))}</pre>",
        ]
    if readings.overlaps:
        parts += [
            "<h3>Subspaces that heads write and read</h3>",
            "<p>Overlap of the output subspace of a head with the query, key or value subspace of a later head: the "
            "mean squared cosine of the principal angles, and its distance from that of random subspaces in standard "
            "deviations.</p>",
            table(["writes", "reads", "by", "overlap", "chance", "sigma"], _overlaps(readings.overlaps)),
        ]
    if readings.heads:
        parts.append("<h3>In tokens</h3>")
        parts += [
            f"<details{' open' * (k == 0)}><summary>Head {reading.layer}.{reading.head}</summary>"
            f"<pre>{html.escape(repr(reading))}</pre></details>"
            for k, reading in enumerate(readings.heads)
        ]
    return parts or ["<p>The model has no tokens and no pairs of heads.</p>"]


def gauge(found: Inspection, draw: Draw) -> list[str]:
    """Report the gauge degrees of freedom of every layer."""
    rows = [
        [
            str(layer),
            *(f"{report.n_numbers:,}", f"{report.n_free:,}", f"{report.n_free / report.n_numbers:.1%}"),
            *(_span(report.queries_to_keys), _span(report.values_to_outputs)),
            " ".join(map(str, report.order)),
        ]
        for layer, report in enumerate(found.gauges)
    ]
    head = ["layer", "numbers", "free", "share", "queries : keys", "values : outputs", "heads by strength"]
    return [
        "<p>The model depends on products of weights only: W<sub>Q</sub> G with W<sub>K</sub> G<sup>-T</sup>, and "
        "W<sub>V</sub> H with H<sup>-1</sup> W<sub>O</sub>, compute the same, and some biases cancel in softmax or "
        "merge with the output bias. <em>Free</em> counts these gauge degrees of freedom. Quotients of norms are 1 in "
        "the balanced gauge of <code>fix_gauge</code>, which also sorts heads in the order shown.</p>",
        table(head, rows),
    ]


def patterns(found: Inspection, draw: Draw) -> list[str]:
    """Return the attention patterns of all heads on the text, if there is one."""
    if found.tokens is None or found.patterns is None:
        return [f"<p>{_why_no_text(found)}</p>"]
    names, large = found.tokens.names, max(1, _MOST_PANELS // found.checkpoint.sizes.n_heads)
    spans = " ".join(f"<span><b>{html.escape(name)}</b> <small>{k}</small></span>" for k, name in enumerate(names))
    parts = [f'<p>{len(names)} tokens, with their positions:</p><p class="tokens">{spans}</p>']
    if found.tokens.cut:
        parts.append(f"<p>Only the first {len(names)} tokens of the text are shown.</p>")
    parts += [
        "<h3>All heads</h3>",
        "<p>Rows are query positions, columns are key positions; white is 0, the darkest blue 1.</p>",
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
        return "The model reads images: there is no text."
    return "No text was given: <code>--text</code> or <code>--text-file</code> adds attention patterns on a text."


def _overlaps(found: Mapping[Reader, Overlaps]) -> list[list[str]]:
    """Return the pairs of a head and a head of a later layer with overlaps furthest above chance."""
    rows = []
    for side, overlaps in found.items():
        layers = np.arange(len(overlaps.overlaps))
        later = (layers[:, None] < layers)[:, None, :, None]
        order = np.argsort(np.where(later, -overlaps.sigmas, np.inf), axis=None, kind="stable")[:STRONGEST]
        for at in (np.unravel_index(k, overlaps.overlaps.shape) for k in order):
            if at[0] < at[2]:
                numbers = f"{overlaps.overlaps[at]:.3f}", f"{overlaps.chance[at]:.3f}", f"{overlaps.sigmas[at]:+.1f}"
                rows.append([f"{at[0]}.{at[1]}", f"{at[2]}.{at[3]}", _READERS[side], *numbers])
    return rows


def _span(pair: tuple[float, float]) -> str:
    low, high = (f"{x:.3g}" for x in pair)
    return low if low == high else f"{low} to {high}"
