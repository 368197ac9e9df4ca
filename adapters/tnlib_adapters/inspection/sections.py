"""Sections of the inspection page: each function returns pieces of HTML with pictures drawn by `draw`."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, TypeAlias, get_args

import numpy as np

import tnlib
from tnlib._html import table
from tnlib.drawing import Diagram
from tnlib_adapters.circuits import (
    Overlaps,
    block_diagram,
    composition_diagram,
    explore_patterns,
    frozen_diagram,
    heat_map,
    term_diagram,
)
from tnlib_adapters.circuits.arguments import READS, Kind, head_name
from tnlib_adapters.circuits.paths.attention_terms import NAMES
from tnlib_adapters.inspection.measure import Inspection
from tnlib_adapters.inspection.pictures import (
    head_score_maps,
    pattern_overview,
    pattern_panels,
    rank_maps,
    schmidt_values,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Draw: TypeAlias = "Callable[[Figure], str]"

STRONGEST = 5  # pairs of heads in a table
_MOST_BLOCKS = 3  # largest number of kinds of blocks to draw
MOST_PANELS = 64  # largest number of heads with a panel of their own
_MOST_CELLS = 1_000_000  # attention weights to explore, a byte each


def block(inspection: Inspection, draw: Draw) -> list[str]:
    """Draw every kind of block, at most 3."""
    parts = [
        "<p>Shapes are tensors, lines are their indices, and a line between two shapes is summed over. The width of a "
        "line is the logarithm of its size. The contents of a bubble are contracted first, then its function is "
        "applied.</p>",
    ]
    kinds: dict[Diagram, list[int]] = {}
    for layer in range(inspection.checkpoint.n_layers):
        diagram = block_diagram(inspection.checkpoint, layer)
        kinds.setdefault(Diagram(diagram.nodes, diagram.legs, "", diagram.bubbles), []).append(layer)
    for diagram, layers in list(kinds.items())[:_MOST_BLOCKS]:
        parts += [f"<h3>Block of {_named(layers)}</h3>", draw(tnlib.draw(diagram).figure)]
    if len(kinds) > _MOST_BLOCKS:
        parts.append(f"<p>{len(kinds) - _MOST_BLOCKS} more kinds of blocks are not drawn.</p>")
    return parts


def frozen(inspection: Inspection, draw: Draw) -> list[str]:
    """Draw a layer with frozen patterns."""
    return [
        "<p>If the attention patterns A of a text are held fixed (frozen), a layer is a linear operator: A acts on "
        "positions, W<sub>O</sub> W<sub>V</sub> on the stream, one Kronecker product per head.</p>",
        draw(tnlib.draw(frozen_diagram(inspection.checkpoint.attention(0))).figure),
    ]


def composition(inspection: Inspection, draw: Draw) -> list[str]:
    """Return the composition scores: heat maps of all pairs, and a table and diagrams of the strongest pairs."""
    if not inspection.compositions:
        return ["<p>The model has one layer, so there are no pairs of heads.</p>"]
    rows = [
        [name, *map(head_name, (writer, reader)), f"{s.score:.3f}", f"{s.chance:.3f}", f"{s.multiple:.2f}"]
        for name, compositions in inspection.compositions.items()
        for writer, reader, s in compositions.largest(STRONGEST)
    ]
    return [
        "<p>The composition score ||L R|| / (||L|| ||R||) measures how much of the output of a head is read by the "
        "queries (Q), keys (K) or values (V) of a later head. The maps show multiples of its chance value, the score "
        "for a random rotation between the two heads.</p>",
        '<div class="row">'
        + "".join(
            _titled(name, draw(heat_map(compositions))) for name, compositions in inspection.compositions.items()
        ),
        "</div>",
        "<h3>The strongest pairs</h3>",
        table(["kind", "writing head", "reading head", "score", "chance", "multiple"], rows),
        "<h3>As diagrams</h3>",
        *(f"<p>{heads}:</p>{draw(tnlib.draw(diagram).figure)}" for heads, diagram in _strongest(inspection)),
        *_terms(inspection, draw),
    ]


def _strongest(inspection: Inspection) -> Iterator[tuple[str, Diagram]]:
    """Yield caption and diagram of the strongest pair of every kind of composition."""
    for kind in get_args(Kind):
        pairs = [
            (score.multiple, name, writer, reader)
            for name, scores in inspection.compositions.items()
            if scores.kind == kind
            for writer, reader, score in scores.largest(1)
        ]
        for multiple, name, writer, reader in sorted(pairs, reverse=True)[:1]:
            earlier, later = (
                (inspection.checkpoint.attention(layer).numerator(), head) for layer, head in (writer, reader)
            )
            heads = f"head {head_name(reader)} reads head {head_name(writer)}"
            yield (
                f"{READS[kind].capitalize()}{name[1:]}: {heads}, {multiple:.2f} times chance",
                composition_diagram(kind, later, earlier),
            )


def _terms(inspection: Inspection, draw: Draw) -> list[str]:
    """Draw the ten terms of a two-layer attention-only model for the strongest pair by K-composition."""
    checkpoint = inspection.checkpoint
    if not checkpoint.wiring.is_attention_only or checkpoint.n_layers != 2:
        return []
    ((writer, reader, _),) = inspection.compositions["K"].largest(1)
    earlier, later = ((checkpoint.attention(layer), head) for layer, head in (writer, reader))
    picture = draw(tnlib.draw([term_diagram(name, later, earlier) for name in NAMES]).figure)
    pair = f"{head_name(writer)} and {head_name(reader)}"
    return [f"<details><summary>All ten terms of heads {pair}</summary>{picture}</details>"]


def _named(layers: Sequence[int]) -> str:
    """Return layer numbers as text with ranges.

    >>> _named([0, 1, 2, 5])
    'layers 0 to 2, 5'
    """
    runs = [[layer for _, layer in run] for _, run in groupby(enumerate(layers), key=lambda pair: pair[1] - pair[0])]
    names = [f"{run[0]}" if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs]
    return f"layer{'s' if len(layers) > 1 else ''} {', '.join(names)}"


def _titled(title: str, picture: str) -> str:
    return f"<figure><figcaption>{html.escape(title)}</figcaption>{picture}</figure>"


def spectra(inspection: Inspection, draw: Draw) -> list[str]:
    """Return effective ranks and singular values (Schmidt values) of all heads."""
    return [
        "<p>An operator of a head is a sum of products of an input direction and an output direction; the singular "
        "values (Schmidt values) s are the weights. The effective rank, (sum s<sup>2</sup>)<sup>2</sup> / "
        f"sum s<sup>4</sup>, is at most {inspection.spectra.ov.shape[2]}. Biases are included.</p>",
        draw(rank_maps(inspection.spectra)),
        "<p>Singular values of every head, divided by the largest of them. A head whose values fall early has a low "
        "effective rank.</p>",
        draw(schmidt_values(inspection.spectra)),
    ]


def heads(inspection: Inspection, draw: Draw) -> list[str]:
    """Return head scores, subspace overlaps, and some heads in tokens."""
    readings = inspection.readings
    parts = []
    if readings.has_scores:
        parts += [
            "<p>Three scores are the mean attention on repeated random tokens: to the previous token, to earlier "
            "occurrences of the same token (duplicate), and to the tokens that followed them (induction). The copying "
            "score is the sum of the eigenvalues of the circuit from tokens to logits, divided by the sum of their "
            "moduli. It is 1 if a head raises the logits of the tokens that it attends to.</p>",
            draw(head_score_maps(readings)),
        ]
    if readings.induction is not None:
        parts += [
            "<p>The table describes the induction circuit by scores from patterns and from weights. The last column is "
            "the fraction of the gap between loss and chance that is lost if the keys of later layers do not read the "
            "head.</p>",
            f"<pre>{html.escape(repr(readings.induction))}</pre>",
        ]
    if readings.overlaps:
        parts += [
            "<h3>Subspaces that heads write and read</h3>",
            "<p>The overlap of the output subspace of a head with the query, key or value subspace of a later head is "
            "the mean squared cosine of their principal angles. Sigma is its distance from the overlap of random "
            "subspaces (chance) in standard deviations.</p>",
            table(
                ["writing head", "reading head", "by", "overlap", "sigma"],
                [
                    [writer, reader, side, f"{overlap:.3f}", f"{sigma:+.1f}"]
                    for rows in overlap_rows(readings.overlaps).values()
                    for sigma, writer, reader, side, overlap in rows
                ],
            ),
        ]
    if readings.heads:
        parts.append("<h3>In tokens</h3>")
        parts += [
            f"<details{' open' * (k == 0)}><summary>Head {reading.layer}.{reading.head}</summary>"
            f"<pre>{html.escape(repr(reading))}</pre></details>"
            for k, reading in enumerate(readings.heads)
        ]
    return parts or ["<p>The model has no tokens and no pairs of heads.</p>"]


def gauge(inspection: Inspection, draw: Draw) -> list[str]:
    """Report the gauge degrees of freedom of every layer."""
    rows = [
        [
            str(layer),
            *(f"{report.n_numbers:,}", f"{report.n_free:,}", f"{report.n_free / report.n_numbers:.1%}"),
            *(_span(report.queries_to_keys), _span(report.values_to_outputs)),
            " ".join(map(str, report.order)),
        ]
        for layer, report in enumerate(inspection.gauges)
    ]
    head = ["layer", "parameters", "free", "share", "queries : keys", "values : outputs", "heads by strength"]
    return [
        "<p>The model depends on products of weights only: W<sub>Q</sub> G with W<sub>K</sub> G<sup>-T</sup>, and "
        "W<sub>V</sub> H with H<sup>-1</sup> W<sub>O</sub>, compute the same, and some biases cancel in softmax or "
        "merge with the output bias. The column <em>free</em> counts these gauge degrees of freedom. The columns "
        "<em>queries : keys</em> and <em>values : outputs</em> are quotients of norms, which are 1 in the balanced "
        "gauge of <code>fix_gauge</code>. It also sorts the heads in the order of the last column.</p>",
        table(head, rows),
    ]


def patterns(inspection: Inspection, draw: Draw) -> list[str]:
    """Return the attention patterns of all heads on the text, if there is one."""
    if inspection.tokens is None or inspection.patterns is None:
        return [f"<p>{_why_no_text(inspection)}</p>"]
    names, n_heads = inspection.tokens.names, inspection.checkpoint.sizes.n_heads
    n_layers, explored = len(inspection.patterns), max(1, _MOST_CELLS // (n_heads * len(names) ** 2))
    large = n_layers if n_layers * n_heads <= MOST_PANELS else 1
    spans = " ".join(f"<span><b>{html.escape(name)}</b> <small>{k}</small></span>" for k, name in enumerate(names))
    parts = []
    if inspection.tokens.cut:
        parts.append(f"<p>Only the first {len(names)} tokens of the text are shown.</p>")
    parts += [
        "<h3>Explore</h3>",
        explore_patterns(inspection.patterns[:explored], names).html,
        f'<h3>Tokens</h3><p>{len(names)} tokens, with their positions:</p><p class="tokens">{spans}</p>',
        "<h3>All heads</h3>",
        "<p>Rows are query positions, columns are key positions; white is 0, the darkest blue 1.</p>",
        draw(pattern_overview(inspection.patterns)),
        "<h3>Layer by layer, with tokens</h3>",
    ]
    for layer, of_layer in enumerate(inspection.patterns[:large]):
        picture = draw(pattern_panels(of_layer, names))
        title = _layer_title(layer, len(of_layer))
        parts.append(f"<details{' open' * (layer == 0)}><summary>{title}</summary>{picture}</details>")
    if large < len(inspection.patterns):
        parts.append(f"<p>Layers from {large} on are in the explorer and in the overview above.</p>")
    return parts


def _why_no_text(inspection: Inspection) -> str:
    if inspection.checkpoint.wiring.reads == "images":
        return "The model reads images: there is no text."
    return "No text was given: <code>--text</code> or <code>--text-file</code> adds attention patterns on a text."


def _layer_title(layer: int, n_heads: int) -> str:
    """Return the number of a layer and the names of its heads.

    >>> _layer_title(1, 4)
    'Layer 1, heads 1.0 to 1.3'
    """
    return f"Layer {layer}, {'head' if n_heads == 1 else 'heads'} {layer}.0" + (
        f" to {layer}.{n_heads - 1}" if n_heads > 1 else ""
    )


def overlap_rows(overlaps_by_side: Mapping[Kind, Overlaps]) -> dict[Kind, list[tuple[float, str, str, str, float]]]:
    """Return (sigma, writing head, reading head, side, overlap) of pairs in ascending layers, furthest above chance."""
    rows: dict[Kind, list[tuple[float, str, str, str, float]]] = {}
    for side, overlaps in overlaps_by_side.items():
        layers = np.arange(len(overlaps.overlaps))
        later = (layers[:, None] < layers)[:, None, :, None]
        order = np.argsort(np.where(later, -overlaps.sigmas, np.inf), axis=None, kind="stable")[:STRONGEST]
        pairs = [np.unravel_index(k, overlaps.overlaps.shape) for k in order]
        rows[side] = [
            (
                float(overlaps.sigmas[at]),
                head_name(at[:2]),
                head_name(at[2:]),
                READS[side],
                float(overlaps.overlaps[at]),
            )
            for at in pairs
            if at[0] < at[2]
        ]
    return rows


def _span(pair: tuple[float, float]) -> str:
    low, high = (f"{x:.3g}" for x in pair)
    return low if low == high else f"{low} to {high}"
