"""Inspect a checkpoint: measure its heads and write the page."""

from __future__ import annotations

import html
import os
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from tnlib import ArgumentError, ArgumentTypeError
from tnlib._html import table
from tnlib._validate import as_path
from tnlib_adapters.attention.attention import Attention
from tnlib_adapters.checkpoints.checkpoint import Checkpoint, as_one_stream, open_checkpoint
from tnlib_adapters.compression.progress import Progress, quiet
from tnlib_adapters.compression.text import read_text
from tnlib_adapters.files.atomic_folder import check_target, whole_folder
from tnlib_adapters.files.folder import path_text
from tnlib_adapters.html_page import page as html_page
from tnlib_adapters.html_page import svg
from tnlib_adapters.inspection import PAGE
from tnlib_adapters.inspection.findings import findings
from tnlib_adapters.inspection.measure import Inspection, measure, own_tokens, read_tokens
from tnlib_adapters.inspection.sections import (
    composition,
    diagrams,
    gauge,
    heads,
    patterns,
    predictions,
    spectra,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SECTIONS = (
    ("predictions", "Predictions on a text", predictions),
    ("heads", "Head scores and heads in tokens", heads),
    ("patterns", "Attention patterns on a text", patterns),
    ("composition", "Composition of heads", composition),
    ("spectra", "Spectra of heads", spectra),
    ("gauge", "Gauge freedom", gauge),
    ("diagrams", "Diagrams", diagrams),
)
_STYLE = """
body { max-width: 78rem } .findings li { max-width: 52rem; margin: .3rem 0 } .findings a { white-space: nowrap }
nav { margin: 1.2rem 0 } nav a { margin-right: 1rem }
h3 { font-size: 1rem; margin: 1.4rem 0 .3rem } details { margin: .4rem 0 } summary { cursor: pointer }
.facts td { vertical-align: top; overflow-wrap: anywhere }
.row { display: flex; flex-wrap: wrap; gap: 1rem }
figure { flex: 1 1 22rem; min-width: 0; max-width: 38rem; margin: 0 }
figcaption { font-weight: 600 } .tokens { max-width: none; line-height: 2 }
pre { font-size: 12px; line-height: 1.35; overflow-x: auto; background: #f6f6f6; padding: .5rem }
.tokens span { white-space: nowrap; display: inline-block; margin-right: .4rem } .tokens small { color: #888 }
.tokens b { border: 1px solid #ccc; border-radius: 3px; padding: 0 .25rem; font-weight: normal; white-space: pre }
@media (max-width: 30rem) { figure { flex-basis: 100% } }
@media (prefers-color-scheme: dark) { pre { background: #24272c } .tokens b { border-color: #555 } }
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
    """Return the findings as a list, each with its numbers below and a link to the section with the evidence."""
    titles = {key: title for key, title, _ in _SECTIONS}
    items = ""
    for text, section, (headings, rows) in findings(inspection):
        numbers = f"<details><summary>Values</summary>{table(headings, rows)}</details>" if rows else ""
        items += f'<li>{html.escape(text)} <a href="#{section}">{titles[section]}</a>{numbers}</li>'
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
        "QK of one head": f"2 x {d:,} x {r:,} = {2 * d * r:,} parameters for {d:,} x {d:,} = {d * d:,}",
    }
    lines = "".join(
        f'<tr><td class="text">{label}</td><td class="text">{html.escape(value)}</td></tr>'
        for label, value in facts.items()
    )
    return f'<table class="facts"><tbody>{lines}</tbody></table>'


def _positions(checkpoint: Checkpoint, layer: Attention) -> str:
    if layer.rotary is not None:
        return f"rotary, {layer.rotary.n_columns} of {layer.d_head} columns of a head turn"
    if layer.relative_bias is not None:
        return f"relative bias of the scores, by {layer.relative_bias.table.shape[1]} bins of distances"
    if layer.alibi is not None:
        return "ALiBi, scores fall with the distance"
    return "learned" if checkpoint.wiring.embedding.positions else "not known to the layers"
