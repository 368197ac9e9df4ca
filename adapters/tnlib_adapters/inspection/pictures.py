"""Matplotlib pictures of head spectra, head scores and attention patterns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias, get_args

import numpy as np

from tnlib._typing import Array
from tnlib_adapters.circuits.heads.pattern_scores import HeadKind
from tnlib_adapters.circuits.heads.singular_vectors import effective_rank
from tnlib_adapters.html_page import write_values
from tnlib_adapters.inspection.head_measurements import Readings, Spectra

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MOST_NAMES = 40  # largest number of legible token names on an axis
_MOST_VALUES = 250  # largest number of heads with printed values
_LEAST = 1e-4  # relative singular value of the darkest colour
Style: TypeAlias = tuple[str, float, float, str]  # colour map, lower and upper limit, label


def rank_maps(spectra: Spectra) -> Figure:
    """Draw the effective ranks of all heads, layers as rows and heads as columns."""
    ranks = {f"QK operators{_at(distance)}": effective_rank(values) for distance, values in spectra.qk.items()}
    ranks["OV operators"] = effective_rank(spectra.ov)
    top = max(rank.max() for rank in ranks.values())
    return _maps(ranks, [("viridis", 0.0, float(top), "effective rank")] * len(ranks))


def head_score_maps(readings: Readings) -> Figure:
    """Draw attention shares and copying scores, as far as measured, layers as rows and heads as columns."""
    maps = {} if readings.scores is None else {kind: getattr(readings.scores, kind) for kind in get_args(HeadKind)}
    styles = [("Blues", 0.0, 1.0, "share of attention")] * len(maps)
    for inputs, scores in ({} if readings.copying is None else readings.copying.by_inputs).items():
        maps[f"copying of {inputs}"] = scores
        styles.append(("PRGn", -1.0, 1.0, "score"))  # no blue, which is attention in the other maps
    return _maps(maps, styles)


def _maps(maps: Mapping[str, Array], styles: Sequence[Style]) -> Figure:
    from matplotlib.figure import Figure

    n_layers, n_heads = next(iter(maps.values())).shape
    columns = min(len(maps), 2 if len(maps) <= 4 else 3)
    rows = -(-len(maps) // columns)
    width = min(14.0, columns * max(4.2, 1.6 + 0.42 * n_heads))
    figure = Figure(figsize=(width, rows * (1.1 + 0.36 * n_layers)), layout="constrained")
    axes = np.atleast_1d(figure.subplots(rows, columns, sharey=True)).ravel()
    for ax, (name, values), (colours, low, high, label) in zip(axes, maps.items(), styles, strict=False):
        image = ax.imshow(values, vmin=low, vmax=high, aspect="auto", cmap=colours)
        ax.set(title=name, xlabel="head", xticks=_ticks(n_heads), yticks=_ticks(n_layers))
        figure.colorbar(image, ax=ax, label=label)
        if n_layers * n_heads <= _MOST_VALUES:
            write_values(image, values)
    for ax in axes[::columns]:
        ax.set_ylabel("layer")
    for ax in axes[len(maps) :]:
        ax.set_visible(False)
    return figure


def schmidt_values(spectra: Spectra) -> Figure:
    """Draw the singular values of every head as a row, divided by the largest of them; layer by layer."""
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    n_layers, first = len(spectra.ov), next(iter(spectra.qk))
    figure = Figure(figsize=(10.0, max(2.6, 1.0 + 0.22 * n_layers)), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    for ax, name, values in ((axes[0], f"QK{_at(first)}", spectra.qk[first]), (axes[1], "OV", spectra.ov)):
        rows = values.reshape(-1, values.shape[-1])
        relative = np.maximum(rows / np.where(rows[:, :1] > 0, rows[:, :1], 1.0), _LEAST)
        extent = (0.5, rows.shape[1] + 0.5, n_layers - 0.5, -0.5)
        image = ax.imshow(relative, norm=LogNorm(_LEAST, 1.0), aspect="auto", extent=extent, interpolation="none")
        ax.set(title=name, xlabel="Schmidt value", yticks=_ticks(n_layers))
        ax.xaxis.get_major_locator().set_params(integer=True)
    axes[0].set_ylabel("layer, one row per head")
    figure.colorbar(image, ax=axes, label="relative size", extend="min")
    return figure


def pattern_panels(of_layer: Array, names: Sequence[str]) -> Figure:
    """Draw the patterns of one layer, (heads, n, n), with token names: queries as rows, keys as columns."""
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    n_heads, n, _ = of_layer.shape
    columns = min(n_heads, 4 if n <= 0.8 * _MOST_NAMES else 3)
    rows = -(-n_heads // columns)
    gap = max(2, n // 9)
    cell = 12.0 / max(columns, 3) / (n + gap)  # inches
    figure = Figure(figsize=(cell * columns * (n + gap) + 0.9, cell * rows * (n + gap) + 0.9), layout="constrained")
    ax, step = figure.subplots(), n + gap
    image = np.full((rows * step - gap, columns * step - gap), np.nan)
    for head, pattern in enumerate(of_layer):
        row, column = divmod(head, columns)
        image[row * step : row * step + n, column * step : column * step + n] = pattern
        corner = column * step - 0.5, row * step - 0.5
        ax.add_patch(Rectangle(corner, n, n, fill=False, ec="#bbbbbb", lw=0.8, clip_on=False))
        ax.text(corner[0] + n / 2, corner[1] - 0.12 * gap, f"head {head}", ha="center", va="bottom", fontsize=9)
    colours = mpl.colormaps["Blues"].with_extremes(bad="white")
    ax.imshow(image, vmin=0, vmax=1, cmap=colours, interpolation="none")
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    if n <= _MOST_NAMES:
        _name_tokens(ax, names, (rows, columns), step, min(8.0, 0.8 * 72 * cell))
    else:
        ax.set(xticks=[], yticks=[])
    ax.set(ylim=((rows - 1) * step + n - 0.5, -0.5 - gap))
    ax.set_ylabel("attends")
    ax.set_xlabel("to")
    return figure


def _name_tokens(ax: Axes, names: Sequence[str], tiles: tuple[int, int], step: int, size: float) -> None:
    """Label every position with its token name, or with its number if the font lacks a letter."""
    from matplotlib.font_manager import findfont, get_font

    charmap = get_font(findfont("sans")).get_charmap()
    labels = [
        name[:12] if all(ord(letter) in charmap for letter in name[:12]) else str(k) for k, name in enumerate(names)
    ]
    for axis, count, turn in ((ax.yaxis, tiles[0], 0), (ax.xaxis, tiles[1], 90)):
        ticks = [tile * step + k for tile in range(count) for k in range(len(labels))]
        axis.set_ticks(ticks, labels * count, fontsize=size, rotation=turn)
        for label in axis.get_ticklabels():
            label.set_parse_math(False)  # "$" does not start a formula


def _at(distance: int | None) -> str:
    return "" if distance is None else f" at distance {distance}"


def _ticks(count: int) -> range:
    return range(0, count, 1 if count <= 16 else 2 if count <= 32 else 4)
