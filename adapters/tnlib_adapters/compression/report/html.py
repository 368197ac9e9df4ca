"""Self-contained HTML pages: style sheet, tables, inline SVG figures."""

from __future__ import annotations

import html
import io
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2rem }
table { border-collapse: collapse } th, td { padding: .2rem .9rem .2rem 0; text-align: right }
th:first-child, td:first-child { text-align: left } thead th { border-bottom: 1px solid #999 }
svg { max-width: 100%; height: auto } p { max-width: 46rem }
"""


def page(title: str, body: Sequence[str], style: str = "") -> str:
    """Return an HTML page; `title` is escaped here, `body` must be escaped by the caller."""
    head = f'<meta charset="utf-8"><title>{html.escape(title)}</title><style>{_STYLE}{style}</style>'
    return f'<!doctype html><html lang="en"><head>{head}</head><body>\n' + "\n".join(body) + "\n</body></html>\n"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table of plain text."""
    top = "".join(f"<th>{html.escape(cell)}</th>" for cell in head)
    lines = ["".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in rows]
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"


def svg(figure: Figure, name: str) -> str:
    """Return a figure as an svg element whose ids start with `name`, which must be unique on the page."""
    import matplotlib as mpl

    out = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with mpl.rc_context({"svg.hashsalt": "tnlib"}):  # reproducible ids
        figure.savefig(out, format="svg", metadata=nothing)
    text = out.getvalue()
    text = text[text.index("<svg") :]
    referenced = set(re.findall(r'(?:href="|url\()#([^")]+)', text))  # equal images share an id that nothing needs
    text = re.sub(r' id="([^"]*)"', lambda match: f' id="{name}-{match[1]}"' if match[1] in referenced else "", text)
    return re.sub(r'(href="|url\()#', rf"\g<1>#{name}-", text)
