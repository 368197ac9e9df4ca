"""Fragments of HTML that notebooks show: a table of facts with a small picture, without scripts or other files."""

from __future__ import annotations

import base64
import html
import io
import re
from collections.abc import Mapping, Sequence

import numpy as np

from tnlib._typing import Array

_NUMBER = re.compile(r"[-+]?[.\d]|$")  # beginning of a number with or without a unit, or an empty cell
_BAR, _HEIGHT, _MOST_BARS = 8, 40, 64
_BLUE, _ORANGE = (8, 48, 107), (166, 54, 3)  # of the largest and, where signed, the smallest value
_LIGHT_BLUE = (107, 174, 214)


def facts(title: str, rows: Mapping[str, str], picture: str = "") -> str:
    """Return a table of names and values under a title, all of them plain text, beside a picture in HTML."""
    lines = "".join(
        f'<tr><th style="text-align:left">{html.escape(name)}</th>'
        f'<td style="text-align:left">{html.escape(value)}</td></tr>'
        for name, value in rows.items()
    )
    return (
        '<div style="display:flex;gap:1.5em;align-items:flex-start;flex-wrap:wrap">'
        f"<div><b>{html.escape(title)}</b><table>{lines}</table></div><div>{picture}</div></div>"
    )


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table of plain text; cells of columns that do not hold numbers are of class "text"."""
    columns = [[row[k] for row in rows] for k in range(len(head))]
    kinds = ["" if all(map(_NUMBER.match, column)) else ' class="text"' for column in columns]

    def cells(tag: str, row: Sequence[str]) -> str:
        """Return the elements of one row."""
        return "".join(f"<{tag}{kind}>{html.escape(cell)}</{tag}>" for kind, cell in zip(kinds, row, strict=True))

    top, lines = cells("th", head), "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f"<table><thead><tr>{top}</tr></thead><tbody>{lines}</tbody></table>"


def bars(values: Sequence[int], label: str) -> str:
    """Return a bar chart of positive numbers as SVG, from the first to the last; of a long list every few."""
    step = max(1, -(-len(values) // _MOST_BARS))
    shown = [max(values[k : k + step]) for k in range(0, len(values), step)]
    top = max(shown, default=1)
    drawn = "".join(
        f'<rect x="{k * _BAR}" y="{_HEIGHT * (1 - value / top):.1f}" width="{_BAR - 1}" '
        f'height="{max(1.0, _HEIGHT * value / top):.1f}" fill="rgb{_BLUE}"/>'
        for k, value in enumerate(shown)
    )
    return _svg(_BAR * len(shown), _HEIGHT, f"{label}, largest {top:,}", drawn)


def squares(shades: Sequence[Sequence[int]], label: str) -> str:
    """Return a grid of squares, dark where `shades` is 0 and light where it is 1, as SVG."""
    paths = "".join(  # one path of a shade, because thousands of elements slow a notebook down
        f'<path fill="rgb{colour}" d="'
        + "".join(
            f"M{_BAR * column} {_BAR * row}h{_BAR - 1}v{_BAR - 1}h{1 - _BAR}z"
            for row, of_row in enumerate(shades)
            for column, of_square in enumerate(of_row)
            if of_square == shade
        )
        + '"/>'
        for shade, colour in enumerate((_BLUE, _LIGHT_BLUE))
    )
    return _svg(_BAR * len(shades[0]), _BAR * len(shades), label, paths)


def _svg(width: int, height: int, label: str, drawn: str) -> str:
    size, title = f'width="{width}" height="{height}"', f"<title>{html.escape(label)}</title>"
    return f'<svg xmlns="http://www.w3.org/2000/svg" role="img" {size}>{title}{drawn}</svg>'


def heat_image(values: Array, label: str, *, width: int, top: float | None = None) -> str:
    """Return a matrix as an image of `width` CSS pixels: blue is `top`, orange its negative, white 0.

    `top` is the largest modulus by default. Entries that are not finite are white.
    """
    from PIL import Image

    known = np.where(np.isfinite(values), values, 0.0)
    top = top or float(np.abs(known).max(initial=0.0)) or 1.0
    levels = np.rint(127 + 127 * (known / top)).astype(np.uint8)  # 127 is 0
    steps = np.arange(256)[:, None] / 127 - 1
    colours = 255 + np.abs(steps).clip(max=1) * (np.where(steps < 0, _ORANGE, _BLUE) - np.array(255))
    image = Image.fromarray(levels)
    image.putpalette(np.rint(colours).astype(np.uint8).tobytes())
    out = io.BytesIO()
    image.save(out, "PNG")
    data = base64.b64encode(out.getvalue()).decode("ascii")
    style = f"width:{width}px;min-height:12px;max-height:480px;image-rendering:pixelated;border:1px solid #ccc"
    text = html.escape(label)
    return f'<img style="{style}" alt="{text}" title="{text}" src="data:image/png;base64,{data}">'
