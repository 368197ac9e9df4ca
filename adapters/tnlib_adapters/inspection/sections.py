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
    pattern_panels,
    rank_maps,
    schmidt_values,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Draw: TypeAlias = "Callable[[Figure], str]"

STRONGEST = 5  # pairs of heads in a table
_MOST_BLOCKS = 3  # largest number of kinds of blocks to draw
MOST_PANELS = 64  # largest number of heads of a model of which all layers are drawn with tokens
_MOST_COMPONENTS = 12  # in the table of contributions


def composition(inspection: Inspection, draw: Draw) -> list[str]:
    """Return the composition scores: heat maps of all pairs, and a table and diagrams of the strongest pairs."""
    if not inspection.compositions:
        return ["<p>The model has one layer, so there are no pairs of heads.</p>"]
    rows = [
        [name, *map(head_name, (writer, reader)), f"{s.score:.3f}", f"{s.chance:.3f}", f"{s.multiple:.2f}"]
        for name, compositions in inspection.compositions.items()
        for writer, reader, s in compositions.largest(STRONGEST)
        if s.multiple >= 1.0
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
        table(["kind", "writing head", "reading head", "score", "chance", "multiple"], rows)
        if rows
        else "<p>No pair has a score above chance.</p>",
    ]


def diagrams(inspection: Inspection, draw: Draw) -> list[str]:
    """Draw the strongest pair of heads of every kind of composition, the blocks, and a layer with frozen patterns."""
    pairs = list(_strongest(inspection)) if inspection.compositions else []
    return [
        "<p>Shapes are tensors, lines are their indices, and a line between two shapes is summed over. The width of a "
        "line is the logarithm of its size. The contents of a bubble are contracted first, then its function is "
        "applied.</p>",
        *(f"<h3>{heads}</h3>{draw(tnlib.draw(diagram).figure)}" for heads, diagram in pairs),
        *(_terms(inspection, draw) if pairs else []),
        *_blocks(inspection, draw),
        "<h3>Layer 0 with frozen patterns</h3>",
        "<p>If the attention patterns A of a text are held fixed (frozen), a layer is a linear operator: A acts on "
        "positions, W<sub>O</sub> W<sub>V</sub> on the stream, one Kronecker product per head.</p>",
        draw(tnlib.draw(frozen_diagram(inspection.checkpoint.attention(0))).figure),
    ]


def _strongest(inspection: Inspection) -> Iterator[tuple[str, Diagram]]:
    """Yield caption and diagram of the strongest pair of every kind of composition, if it is above chance."""
    for kind in get_args(Kind):
        pairs = [
            (score.multiple, name, writer, reader)
            for name, scores in inspection.compositions.items()
            if scores.kind == kind
            for writer, reader, score in scores.largest(1)
            if score.multiple > 1
        ]
        for multiple, name, writer, reader in sorted(pairs, reverse=True)[:1]:
            earlier, later = (
                (inspection.checkpoint.attention(layer).numerator(), head) for layer, head in (writer, reader)
            )
            heads = f"head {head_name(reader)} reads head {head_name(writer)}"
            yield (
                f"{READS[kind].capitalize()}{name[1:]}: {heads}, {multiple:.2f} times chance",
                composition_diagram(kind, later, earlier, layers=(reader[0], writer[0])),
            )


def _terms(inspection: Inspection, draw: Draw) -> list[str]:
    """Draw the ten terms of a two-layer attention-only model for the strongest pair by K-composition."""
    checkpoint = inspection.checkpoint
    if not checkpoint.wiring.is_attention_only or checkpoint.n_layers != 2:
        return []
    ((writer, reader, _),) = inspection.compositions["K"].largest(1)
    earlier, later = ((checkpoint.attention(layer), head) for layer, head in (writer, reader))
    picture = draw(tnlib.draw([term_diagram(name, later, earlier, layers=(1, 0)) for name in NAMES]).figure)
    pair = f"{head_name(writer)} and {head_name(reader)}"
    return [f"<details><summary>All ten terms of heads {pair}</summary>{picture}</details>"]


def _blocks(inspection: Inspection, draw: Draw) -> list[str]:
    """Draw every kind of block, at most 3."""
    kinds: dict[Diagram, list[int]] = {}
    for layer in range(inspection.checkpoint.n_layers):
        diagram = block_diagram(inspection.checkpoint, layer)
        kinds.setdefault(Diagram(diagram.nodes, diagram.legs, "", diagram.bubbles), []).append(layer)
    parts = []
    for diagram, layers in list(kinds.items())[:_MOST_BLOCKS]:
        parts += [f"<h3>Block of {_named(layers)}</h3>", draw(tnlib.draw(diagram).figure)]
    if len(kinds) > _MOST_BLOCKS:
        parts.append(f"<p>{len(kinds) - _MOST_BLOCKS} more kinds of blocks are not drawn.</p>")
    return parts


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
            "moduli. It is 1 if a head raises the logits of the tokens that it attends to. A head reads the embedding "
            "of a token, or what the first layer makes of it; heads of deep models copy by one of the two.</p>",
            draw(head_score_maps(readings)),
        ]
    if readings.induction is not None:
        parts += [
            "<p>The table describes the induction circuit by scores from patterns and from weights. The last column is "
            "the fraction of the gap between loss and chance that is lost if the keys of later layers do not read the "
            "head. Its scores are means over segments of random length at random offsets, as in training; those above "
            "are of one segment of up to 50 tokens.</p>",
            f"<pre>{html.escape(repr(readings.induction))}</pre>",
        ]
    if readings.overlaps:
        parts += [
            "<h3>Subspaces that heads write and read</h3>",
            "<p>The overlap of the output subspace of a head with the query, key or value subspace of a later head is "
            "the mean squared cosine of their principal angles. Sigma is its distance from the overlap of random "
            "subspaces (chance) in standard deviations.</p>",
            table(
                OVERLAP_HEADINGS,
                overlap_cells(overlap_rows(readings.overlaps)),
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
            *(f"{report.n_parameters:,}", f"{report.n_free:,}", f"{report.n_free / report.n_parameters:.1%}"),
            *(_span(report.queries_to_keys), _span(report.values_to_outputs)),
        ]
        for layer, report in enumerate(inspection.gauges)
    ]
    head = ["layer", "parameters", "free", "share", "queries : keys", "values : outputs"]
    return [
        "<p>The model depends on products of weights only: W<sub>Q</sub> G with W<sub>K</sub> G<sup>-T</sup>, and "
        "W<sub>V</sub> H with H<sup>-1</sup> W<sub>O</sub>, compute the same, and some biases cancel in softmax or "
        "merge with the output bias. The column <em>free</em> counts these gauge degrees of freedom. The columns "
        "<em>queries : keys</em> and <em>values : outputs</em> are quotients of norms, which are 1 in the balanced "
        "gauge of <code>fix_gauge</code>.</p>",
        table(head, rows),
    ]


def predictions(inspection: Inspection, draw: Draw) -> list[str]:
    """Return the predictions on the text, and the components that decide the last one."""
    predicted, tokens = inspection.predictions, inspection.tokens
    if tokens is None:
        return [f"<p>{_why_no_text(inspection)}</p>"]
    if predicted is None:
        return ["<p>Predictions are shown for models of up to 0.3 billion parameters that predict the next token.</p>"]
    rows = [
        [str(k), name, *(f"{word} {p:.2f}" for word, p in zip(words, of_words, strict=True))]
        for k, (name, words, of_words) in enumerate(
            zip(tokens.names, predicted.names, predicted.probabilities, strict=True)
        )
    ]
    first, second, *_ = predicted.names[-1]
    contributions = [[name, f"{value:+.3f}"] for name, value in predicted.components[:_MOST_COMPONENTS]]
    return [
        "<p>The most probable next tokens after every position, with their probabilities:</p>",
        table(["position", "token", "first", "second", "third"], rows),
        f"<h3>Why {html.escape(first)} and not {html.escape(second)}</h3>",
        "<p>The difference of the two logits after the last position is a sum of direct contributions: what every head "
        "and every feed-forward layer writes, by the final norm and the unembedding. These are the largest of the "
        f"{len(predicted.components)}, for a difference of {predicted.difference:.3f}:</p>",
        table(["component", "contribution"], contributions),
    ]


def patterns(inspection: Inspection, draw: Draw) -> list[str]:
    """Return the attention patterns of all heads on the text, if there is one."""
    if inspection.tokens is None or inspection.patterns is None:
        return [f"<p>{_why_no_text(inspection)}</p>"]
    names, shown = inspection.tokens.names, inspection.readings.heads[:1]
    first = (shown[0].layer, shown[0].head) if shown else (0, 0)  # the head that is shown in tokens
    spans = " ".join(f"<span><b>{html.escape(name)}</b> <small>{k}</small></span>" for k, name in enumerate(names))
    parts = []
    if inspection.tokens.cut:
        parts.append(f"<p>Only the first {len(names)} tokens of the text are shown.</p>")
    parts += [
        "<p>Rows are query positions, columns are key positions; white is 0, the darkest blue 1.</p>",
        explore_patterns(inspection.patterns, names, head=first).html,
        f'<h3>Tokens</h3><p>{len(names)} tokens, with their positions:</p><p class="tokens">{spans}</p>',
        "<h3>With tokens</h3>",
    ]
    n_heads = sum(map(len, inspection.patterns))
    for layer in range(len(inspection.patterns)) if n_heads <= MOST_PANELS else first[:1]:
        picture = draw(pattern_panels(inspection.patterns[layer], names))
        title = _layer_title(layer, len(inspection.patterns[layer]))
        parts.append(f"<details{' open' * (layer == first[0])}><summary>{title}</summary>{picture}</details>")
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


OVERLAP_HEADINGS = ("writing head", "reading head", "by", "overlap", "sigma")


def overlap_cells(rows: Sequence[tuple[float, str, str, str, float]]) -> list[list[str]]:
    """Return rows of `overlap_rows` as cells under `OVERLAP_HEADINGS`."""
    return [[writer, reader, side, f"{overlap:.3f}", f"{sigma:+.1f}"] for sigma, writer, reader, side, overlap in rows]


def overlap_rows(overlaps_by_side: Mapping[Kind, Overlaps]) -> list[tuple[float, str, str, str, float]]:
    """Return (sigma, writing head, reading head, side, overlap) of pairs in ascending layers, furthest above chance."""
    rows: list[tuple[float, str, str, str, float]] = []
    for side, overlaps in overlaps_by_side.items():
        layers = np.arange(len(overlaps.overlaps))
        later = (layers[:, None] < layers)[:, None, :, None]
        order = np.argsort(np.where(later, -overlaps.sigmas, np.inf), axis=None, kind="stable")[:STRONGEST]
        for at in (np.unravel_index(k, overlaps.overlaps.shape) for k in order):
            if at[0] < at[2]:
                sigma, overlap = float(overlaps.sigmas[at]), float(overlaps.overlaps[at])
                rows.append((sigma, head_name(at[:2]), head_name(at[2:]), READS[side], overlap))
    return rows


def _span(pair: tuple[float, float]) -> str:
    low, high = (f"{x:.3g}" for x in pair)
    return low if low == high else f"{low} to {high}"
