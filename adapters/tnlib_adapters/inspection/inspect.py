"""Inspect a checkpoint: measure its heads, write the page, and state the findings in sentences."""

from __future__ import annotations

import html
import os
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tnlib import ArgumentError, ArgumentTypeError
from tnlib._typing import Array
from tnlib._validate import as_path
from tnlib_adapters.attention.attention import Attention
from tnlib_adapters.checkpoints.checkpoint import Checkpoint, as_one_stream, open_checkpoint
from tnlib_adapters.circuits import PatternScores, pattern_scores
from tnlib_adapters.circuits.arguments import READS, head_name
from tnlib_adapters.circuits.heads.head_detectors import HeadKind
from tnlib_adapters.circuits.heads.singular_vectors import effective_rank
from tnlib_adapters.compression.progress import Progress, quiet
from tnlib_adapters.compression.report.html import page as html_page
from tnlib_adapters.compression.report.html import svg
from tnlib_adapters.compression.text import read_text
from tnlib_adapters.files.atomic_folder import check_target, whole_folder
from tnlib_adapters.files.folder import path_text
from tnlib_adapters.frozen.frozen_stack import Head
from tnlib_adapters.inspection import PAGE
from tnlib_adapters.inspection.measure import Inspection, measure, own_tokens, read_tokens
from tnlib_adapters.inspection.sections import (
    block,
    composition,
    frozen,
    gauge,
    heads,
    overlap_rows,
    patterns,
    spectra,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SECTIONS = (
    ("heads", "Head scores and heads in tokens", heads),
    ("patterns", "Attention patterns on a text", patterns),
    ("composition", "Composition of heads", composition),
    ("spectra", "Spectra of heads", spectra),
    ("gauge", "Gauge freedom", gauge),
    ("block", "Blocks", block),
    ("frozen", "Frozen attention patterns", frozen),
)
_STYLE = """
body { max-width: 78rem } .findings li { max-width: 52rem; margin: .3rem 0 } .findings a { white-space: nowrap }
nav { margin: 1.2rem 0 } nav a { margin-right: 1rem }
h3 { font-size: 1rem; margin: 1.4rem 0 .3rem } details { margin: .4rem 0 } summary { cursor: pointer }
.facts td { text-align: left; vertical-align: top; overflow-wrap: anywhere }
.row { display: flex; flex-wrap: wrap; gap: 1rem }
figure { flex: 1 1 22rem; max-width: 38rem; margin: 0 }
figcaption { font-weight: 600 } .tokens { max-width: none; line-height: 2 }
pre { font-size: 12px; line-height: 1.35; overflow-x: auto; background: #f6f6f6; padding: .5rem }
.tokens span { white-space: nowrap; display: inline-block; margin-right: .4rem } .tokens small { color: #888 }
.tokens b { border: 1px solid #ccc; border-radius: 3px; padding: 0 .25rem; font-weight: normal; white-space: pre }
table { display: block; max-width: 100%; overflow-x: auto } p, li, h1 { overflow-wrap: anywhere }
@media (max-width: 30rem) { body { padding: 0 .6rem } figure { flex-basis: 100% } th, td { padding-right: .5rem } }
@media (prefers-color-scheme: dark) {
:root { color-scheme: dark } body { background: #16181b; color: #ddd } a { color: #8ab4f8 }
svg { filter: invert(.9) hue-rotate(180deg) } pre { background: #24272c } .tokens b { border-color: #555 } }
"""


def inspect(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    text: str | None = None,
    text_file: str | os.PathLike[str] | None = None,
    force: bool = False,
    progress: Progress = quiet,
) -> Inspection:
    """Write the inspection page of a checkpoint: diagrams, composition, spectra, gauge freedom, attention patterns.

    Parameters
    ----------
    source
        Checkpoint folder with config.json and safetensors.
    out
        Output folder for `inspect.html`, created atomically. The page is self-contained.
    text
        Text for the attention patterns; token numbers if the folder has no tokenizer or transformers is not installed.
        None: no patterns, except for the built-in induction model, which gets a repeated segment.
    text_file
        File with that text, in UTF-8.
    force
        Replace `out` if it is not empty.
    progress
        Called as progress(stage, done, total).

    Returns
    -------
    Inspection
        The contents of the page, as data.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        If two texts are given, a text has fewer than two tokens or cannot be read or run, or `out` exists.
    FileFormatError, MissingFileError
        If `source` is not a supported checkpoint, or the text file does not exist.

    Examples
    --------
    >>> import os, tempfile, tnlib_adapters
    >>> out = os.path.join(tempfile.mkdtemp(), "inside")
    >>> found = tnlib_adapters.inspect(tnlib_adapters.builtin_path(), out)  # doctest: +SKIP
    >>> found.compositions["K"].largest(1)[0][0], found.page.name  # doctest: +SKIP
    ((0, 3), 'inspect.html')
    """
    target = as_path("inspect", "out", out)
    if text is not None and text_file is not None:
        raise ArgumentError("inspect: text must come from one place, got text and text_file; leave one of them out.")
    if text is not None and not isinstance(text, str):
        raise ArgumentTypeError(f"inspect: text must be a string, got {type(text).__name__}; pass the text itself.")
    source_text = text if text_file is None else read_text("inspect", "text_file", text_file)
    checkpoint = as_one_stream("inspect", open_checkpoint(source), "source")
    check_target("inspect", target, checkpoint.folder.path, force=force)
    tokens = own_tokens(checkpoint) if source_text is None else read_tokens(checkpoint, source_text)
    inspection = measure(checkpoint, tokens, target / PAGE, progress)
    page_html = page_of(inspection, progress)
    with whole_folder(target) as partial:
        (partial / PAGE).write_text(page_html, encoding="utf-8")
        check_target("inspect", target, checkpoint.folder.path, force=force)
    return inspection


def page_of(inspection: Inspection, progress: Progress) -> str:
    """Return the page: diagrams, composition, spectra, gauge freedom, and patterns if there is a text."""
    numbers = count()

    def draw(figure: Figure) -> str:
        return svg(figure, f"p{next(numbers)}")

    name = Path(path_text(inspection.checkpoint.folder.path.resolve())).name
    body = [
        f"<h1>Inside the model {html.escape(name)}</h1>",
        *_findings(inspection),
        _summary(inspection.checkpoint),
        *(f"<p>{html.escape(note)}</p>" for note in inspection.notes),
        "<nav>" + "".join(f'<a href="#{key}">{title}</a>' for key, title, _ in _SECTIONS) + "</nav>",
    ]
    for done, (key, title, section) in enumerate(_SECTIONS):
        progress("drawing", done, len(_SECTIONS))
        body += [f'<h2 id="{key}">{title}</h2>', *section(inspection, draw)]
    progress("drawing", len(_SECTIONS), len(_SECTIONS))
    return html_page(f"{name}, inside", body, _STYLE)


def _findings(inspection: Inspection) -> list[str]:
    """Return the findings as a list, each linked to the section with its evidence."""
    titles = {key: title for key, title, _ in _SECTIONS}
    items = "".join(
        f'<li>{html.escape(text)} <a href="#{section}">{titles[section]}</a></li>'
        for text, section in findings(inspection)
    )
    return [f'<ul class="findings">{items}</ul>', "<p>Heads are named layer.head, both counted from 0.</p>"]


def _summary(checkpoint: Checkpoint) -> str:
    sizes, layer = checkpoint.sizes, checkpoint.attention(0)
    d, r = sizes.d_model, sizes.d_head
    shared = "" if sizes.kv_heads == sizes.n_heads else f", on {sizes.kv_heads} key and value heads"
    facts = {
        "architecture": checkpoint.wiring.model_type,
        "folder": path_text(checkpoint.folder.path),
        "layers": f"{sizes.n_layers}",
        "heads of a layer": f"{sizes.n_heads} of {r}{shared}",
        "width of the stream": f"{d:,}",
        "parameters": f"{sum(info.size for info in checkpoint.folder.tensors.values()):,}",
        "positions": _positions(checkpoint, layer),
        "QK of one head": f"2 x {d:,} x {r:,} = {2 * d * r:,} numbers for {d:,} x {d:,} = {d * d:,}",
    }
    lines = "".join(f"<tr><td>{label}</td><td>{html.escape(value)}</td></tr>" for label, value in facts.items())
    return f'<table class="facts"><tbody>{lines}</tbody></table>'


def _positions(checkpoint: Checkpoint, layer: Attention) -> str:
    if layer.rotary is not None:
        return f"rotary, {layer.rotary.n_columns} of {layer.d_head} columns of a head turn"
    if layer.relative_bias is not None:
        return f"relative bias of the scores, by {layer.relative_bias.table.shape[1]} bins of distances"
    if layer.alibi is not None:
        return "ALiBi, scores fall with the distance"
    return "learned" if checkpoint.wiring.embedding.positions else "not known to the layers"


CLEAR = 0.4  # smallest score, a share of attention, that gives a head its name
_COPIES = 0.9  # smallest copying score of a head that copies
_SINK = 0.5  # share of attention on the first token that is pointed out
_MOST_HEADS = 6  # listed by name
_ATTENDS: dict[HeadKind, str] = {
    "previous": "to the previous token",
    "duplicate": "to earlier occurrences of the same token",
    "induction": "to the token after an earlier occurrence of the same token (induction)",
}


class Finding(NamedTuple):
    """One sentence or two, and the id of the section with the evidence."""

    text: str
    section: str


def findings(inspection: Inspection) -> list[Finding]:
    """Return what the measurements say about the heads of a model, the most specific findings first.

    Examples
    --------
    >>> import tnlib_adapters
    >>> from pathlib import Path
    >>> from tnlib_adapters.compression.progress import quiet
    >>> from tnlib_adapters.inspection.measure import measure
    >>> checkpoint = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path())
    >>> inspection = measure(checkpoint, tokens=None, page=Path("inspect.html"), progress=quiet)
    >>> findings(inspection)[0].text
    'Head 0.3 attends to the previous token: 0.87 of its attention on repeated random tokens, chance 0.04.'
    """
    parts = (_named_heads, _circuit, _first_token, _copying, _composition, _ranks, _gauge)
    return [finding for part in parts for finding in part(inspection)]


def _named_heads(inspection: Inspection) -> Iterator[Finding]:
    """Name the heads with clear scores on repeated random tokens."""
    scores = inspection.readings.scores
    if scores is None:
        return
    for kind, target in _ATTENDS.items():
        heads = _clear_heads(scores, kind)
        if not heads:
            continue
        is_single = len(heads) == 1
        share = f"{heads[0][1]:.2f}" if is_single else f"{heads[-1][1]:.2f} to {heads[0][1]:.2f}"
        yield Finding(
            f"{_heads([head for head, _ in heads])} {'attends' if is_single else 'attend'} {target}: {share} of "
            f"{'its' if is_single else 'their'} attention on repeated random tokens, chance {scores.chance[kind]:.2f}.",
            "heads",
        )
    if not _clear_heads(scores, "induction"):
        (head, score), *_ = scores.largest("induction", 1) or [((0, 0), 0.0)]
        yield Finding(
            f"No head is an induction head: the largest score is {score:.2f}, of head {head_name(head)}.", "heads"
        )


def _circuit(inspection: Inspection) -> Iterator[Finding]:
    """State the loss without the previous-token head in the keys, for an attention-only model."""
    induction = inspection.readings.induction
    if induction is None or not np.isfinite(induction.lost).any():
        return
    head = divmod(int(np.nanargmax(induction.lost)), induction.lost.shape[1])
    share = float(induction.lost[head])
    if share >= CLEAR:
        yield Finding(
            f"Induction depends on head {head_name(head)}: if the keys of later layers do not read it, "
            f"{100 * share:.0f} % of the gap between the loss of chance and the loss on repeated tokens is lost.",
            "heads",
        )


def _first_token(inspection: Inspection) -> Iterator[Finding]:
    """Point out heads that attend to the first token of the text, and induction heads that do so there."""
    if inspection.patterns is None or inspection.tokens is None:
        return
    sinks = {
        (layer, head): float(share)
        for layer, of_layer in enumerate(inspection.patterns)
        for head, share in enumerate(of_layer[:, 1:, 0].mean(axis=1))
        if share > _SINK
    }
    scores, short = inspection.readings.scores, inspection.readings.short_scores
    inductive = dict(_clear_heads(scores, "induction")) if scores is not None and short is not None else {}
    on_text = pattern_scores(inspection.patterns, inspection.tokens.ids).induction
    known = [head for head in inductive if head in sinks and on_text[head] < CLEAR]  # False for NaN
    if known:
        shares = [f"{100 * end(sinks[head] for head in known):.0f}" for end in (min, max)]
        names, is_single = _heads(known, capital=False), len(known) == 1
        text = (
            f"On the text shown, {names} {'gives' if is_single else 'give'} {' to '.join(dict.fromkeys(shares))} % of "
            "the attention to the first token, although on repeated random tokens "
            f"{'it is an' if is_single else 'they are'} "
            f"induction head{'' if is_single else 's'}."
        )
        late = {head: short.induction[head] for head in known if short is not None and short.induction[head] < CLEAR}
        if late:
            text += (
                f" {_heads([*late])} {'is' if len(late) == 1 else 'are'} so at later positions only: on a repeated "
                f"segment of at most 16 tokens the score is at most {max(late.values()):.2f}."
            )
        yield Finding(text, "patterns")
    if others := sorted(sinks.keys() - inductive.keys(), key=lambda head: -sinks[head]):
        verb = "gives" if len(others) == 1 else "give"
        yield Finding(
            f"On the text shown, {_heads(others, capital=False)} {verb} more than half of the attention to the first "
            "token.",
            "patterns",
        )


def _copying(inspection: Inspection) -> Iterator[Finding]:
    scores = inspection.readings.copying
    if scores is None:
        return
    heads = [_at(scores, int(k)) for k in np.argsort(-scores, axis=None, kind="stable")[: np.sum(scores >= _COPIES)]]
    if heads:
        verb, effect = ("copies", "it raises") if len(heads) == 1 else ("copy", "they raise")
        yield Finding(
            f"{_heads(heads)} {verb}: {effect} the logits of the attended tokens (copying score at least {_COPIES}).",
            "heads",
        )


def _composition(inspection: Inspection) -> Iterator[Finding]:
    """State the largest overlap of subspaces, and the strongest pair of heads over all kinds of composition."""
    overlaps = [row for rows in overlap_rows(inspection.readings.overlaps).values() for row in rows[:1]]
    if overlaps:
        sigma, earlier, later, side, overlap = max(overlaps)
        yield Finding(
            f"Head {later} reads by its {side} where head {earlier} writes: the overlap of the subspaces is "
            f"{overlap:.2f}, {sigma:.0f} standard deviations above chance.",
            "heads",
        )
    pairs = [
        (score.multiple, READS[scores.kind] + name[1:], writer, reader)  # with "at distance 1"
        for name, scores in inspection.compositions.items()
        for writer, reader, score in scores.largest(1)
    ]
    if pairs:
        multiple, read, writer, reader = max(pairs)
        yield Finding(
            f"Strongest composition: head {head_name(reader)} reads the output of head {head_name(writer)} by its "
            f"{read}, with a composition score of {multiple:.2f} times its chance value.",
            "composition",
        )


def _ranks(inspection: Inspection) -> Iterator[Finding]:
    """State the range of the effective ranks of the OV operators."""
    ranks = effective_rank(inspection.spectra.ov)
    low, high = (_at(ranks, int(k)) for k in (ranks.argmin(), ranks.argmax()))
    if ranks.size > 1:
        yield Finding(
            f"The effective rank of the OV operators lies between {ranks[low]:.1f} (head {head_name(low)}) and "
            f"{ranks[high]:.1f} (head {head_name(high)}); the largest possible value is "
            f"{inspection.spectra.ov.shape[2]}.",
            "spectra",
        )


def _gauge(inspection: Inspection) -> Iterator[Finding]:
    n_free, n_numbers = (sum(getattr(report, name) for report in inspection.gauges) for name in ("n_free", "n_numbers"))
    if n_free:
        yield Finding(
            f"{100 * n_free / n_numbers:.0f} % of the attention parameters are gauge freedom: they can change "
            "without a change of the output.",
            "gauge",
        )


def _clear_heads(scores: PatternScores, kind: HeadKind) -> list[tuple[Head, float]]:
    """Return the heads with a clear score, the highest first."""
    return [(head, score) for head, score in scores.largest(kind, scores.previous.size) if score >= CLEAR]


def _at(values: Array, k: int) -> Head:
    layer, head = divmod(int(k), values.shape[1])
    return layer, head


def _heads(heads: Sequence[Head], *, capital: bool = True) -> str:
    """Return the names of heads as an enumeration.

    >>> _heads([(0, 1), (0, 2), (1, 3)])
    'Heads 0.1, 0.2 and 1.3'
    """
    names = [head_name(head) for head in heads[:_MOST_HEADS]]
    if len(heads) > _MOST_HEADS:
        names[-1] = f"{len(heads) - _MOST_HEADS + 1} more"
    listed = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
    noun = "head" if len(names) == 1 else "heads"
    return f"{noun.capitalize() if capital else noun} {listed}"
