"""Elements of HTML pages: the page, figures of matplotlib as svg, and values written on heat maps."""

from __future__ import annotations

import html
import io
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tnlib._typing import Array

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2rem } p, li, h1 { overflow-wrap: anywhere }
table { border-collapse: collapse; display: block; max-width: 100%; overflow-x: auto }
th, td { padding: .2rem .9rem .2rem 0; text-align: right } th.text, td.text { text-align: left }
thead th { border-bottom: 1px solid #999 } svg { max-width: 100%; height: auto } p { max-width: 46rem }
.picture { overflow-x: auto }
@media (max-width: 30rem) {
body { padding: 0 .6rem } th, td { padding-right: .5rem } .picture svg { max-width: max(100%, 40rem) } }
@media (prefers-color-scheme: dark) {
:root { color-scheme: dark } body { background: #16181b; color: #ddd } a { color: #8ab4f8 }
svg { filter: invert(.9) hue-rotate(180deg) } }
"""


def page(title: str, body: Sequence[str], style: str = "") -> str:
    """Return an HTML page; `title` is escaped here, `body` must be escaped by the caller."""
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    head += f"<title>{html.escape(title)}</title><style>{_STYLE}{style}</style>"
    return f'<!doctype html><html lang="en"><head>{head}</head><body>\n' + "\n".join(body) + "\n</body></html>\n"


def svg(figure: Figure, name: str) -> str:
    """Return a figure as an svg element whose ids start with `name`, which must be unique on the page.

    It is in a div that scrolls on a phone, so that its labels stay readable.
    """
    import matplotlib as mpl

    out = io.StringIO()
    no_metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with mpl.rc_context({"svg.hashsalt": "tnlib"}):  # reproducible ids
        figure.savefig(out, format="svg", metadata=no_metadata)
    text = out.getvalue()
    text = text[text.index("<svg") :]
    referenced = set(re.findall(r'(?:href="|url\()#([^")]+)', text))  # equal images share an unused id
    text = re.sub(r' id="([^"]*)"', lambda match: f' id="{name}-{match[1]}"' if match[1] in referenced else "", text)
    text = re.sub(r'(href="|url\()#', rf"\g<1>#{name}-", text)
    return f'<div class="picture">{text}</div>'


def write_values(image: Any, values: Array) -> None:
    """Write every value on an image of `imshow`, in white on dark cells."""
    for (row, column), value in np.ndenumerate(values):
        if np.isfinite(value):
            red, green, blue, _ = image.cmap(image.norm(value))
            dark = 0.3 * red + 0.59 * green + 0.11 * blue < 0.5
            label = f"{value:.0f}" if value >= 9.95 else f"{value:.1f}" if value > 1 else f"{value:.2f}"
            colour = "white" if dark else "black"
            text = label.replace("0.", ".")
            image.axes.text(column, row, text, ha="center", va="center", color=colour, fontsize=9)
