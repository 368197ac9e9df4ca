"""Inspection page of a checkpoint as self-contained HTML."""

from __future__ import annotations

import html
from itertools import count
from typing import TYPE_CHECKING

from tnlib_adapters.attention.attention import Attention
from tnlib_adapters.checkpoints.checkpoint import Checkpoint
from tnlib_adapters.compression.progress import Progress
from tnlib_adapters.compression.report.html import page, svg
from tnlib_adapters.inspection.diagram_sections import block, composition, frozen
from tnlib_adapters.inspection.head_sections import gauge, heads, patterns, spectra
from tnlib_adapters.inspection.measure import Inspection

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SECTIONS = (
    ("block", "The block", block),
    ("frozen", "With its patterns fixed", frozen),
    ("composition", "What heads read from each other", composition),
    ("spectra", "How many directions a head has", spectra),
    ("heads", "What heads do", heads),
    ("gauge", "What is convention", gauge),
    ("patterns", "Attention on a text", patterns),
)
_STYLE = """
body { max-width: 78rem } nav { margin: 1.2rem 0 } nav a { margin-right: 1rem }
h3 { font-size: 1rem; margin: 1.4rem 0 .3rem } details { margin: .4rem 0 } summary { cursor: pointer }
.facts td { text-align: left; vertical-align: top } .row { display: flex; flex-wrap: wrap; gap: 1rem }
figure { flex: 1 1 22rem; max-width: 38rem; margin: 0 }
figcaption { font-weight: 600 } .tokens { max-width: none; line-height: 2 }
pre { font-size: 12px; line-height: 1.35; overflow-x: auto; background: #f6f6f6; padding: .5rem }
.tokens span { white-space: nowrap; display: inline-block; margin-right: .4rem } .tokens small { color: #888 }
.tokens b { border: 1px solid #ccc; border-radius: 3px; padding: 0 .25rem; font-weight: normal; white-space: pre }
"""


def page_of(found: Inspection, progress: Progress) -> str:
    """Return the page: diagrams, composition, spectra, gauge freedom, and patterns if there is a text."""
    numbers = count()

    def draw(figure: Figure) -> str:
        return svg(figure, f"p{next(numbers)}")

    name = found.checkpoint.folder.path.resolve().name
    body = [
        f"<h1>{html.escape(name)}, inside</h1>",
        _summary(found.checkpoint),
        *(f"<p>{html.escape(note)}</p>" for note in found.notes),
        "<nav>" + "".join(f'<a href="#{key}">{title}</a>' for key, title, _ in _SECTIONS) + "</nav>",
    ]
    for done, (key, title, section) in enumerate(_SECTIONS):
        progress("drawing", done, len(_SECTIONS))
        body += [f'<h2 id="{key}">{title}</h2>', *section(found, draw)]
    progress("drawing", len(_SECTIONS), len(_SECTIONS))
    return page(f"{name}, inside", body, _STYLE)


def _summary(checkpoint: Checkpoint) -> str:
    row, sizes, layer = checkpoint.architecture, checkpoint.sizes, checkpoint.attention(0)
    d, r = sizes.d_model, sizes.d_head
    shared = "" if sizes.kv_heads == sizes.n_heads else f", on {sizes.kv_heads} key and value heads"
    facts = {
        "architecture": row.model_type,
        "folder": str(checkpoint.folder.path),
        "layers": f"{sizes.n_layers}",
        "heads of a layer": f"{sizes.n_heads} of {r}{shared}",
        "width of the stream": f"{d:,}",
        "numbers": f"{sum(info.size for info in checkpoint.folder.tensors.values()):,}",
        "positions": _positions(checkpoint, layer),
        "QK of one head": f"2 x {d:,} x {r:,} = {2 * d * r:,} numbers for {d:,} x {d:,} = {d * d:,}",
    }
    lines = "".join(f"<tr><td>{label}</td><td>{html.escape(value)}</td></tr>" for label, value in facts.items())
    return f'<table class="facts"><tbody>{lines}</tbody></table>'


def _positions(checkpoint: Checkpoint, layer: Attention) -> str:
    if layer.rotary is not None:
        return f"rotary, {layer.rotary.n_columns} of {layer.d_head} columns of a head turn"
    if layer.alibi is not None:
        return "ALiBi, scores fall with the distance"
    learned = checkpoint.architecture.reads == "images" or len(checkpoint.architecture.embeddings) > 1
    return "learned" if learned else "not known to the layers"
