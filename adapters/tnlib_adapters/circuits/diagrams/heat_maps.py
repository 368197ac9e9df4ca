"""Heat maps of composition scores and of score attributions, drawn with matplotlib."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tnlib import ArgumentError, ArgumentTypeError
from tnlib_adapters.circuits.attribution.query_key_attributions import PairAttribution
from tnlib_adapters.circuits.composition.composition_scores import Compositions

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MOST_VALUES = 400  # largest number of pairs with printed values
_MOST_NAMES = 40  # largest number of heads named on an axis
_MOST_LAYERS = 10  # largest number of layers named on an axis
_MOST_WRITERS = 14  # largest number of writers named on an axis
_MOST_LEVEL = 12  # largest number of names written horizontally


def heat_map(compositions: Compositions | PairAttribution) -> Figure:
    """Draw composition scores or attributions of scores.

    Parameters
    ----------
    compositions
        `Compositions`: multiples of chance, writers as rows, readers as columns, white for absent pairs. Or the result
        of `QKAttributions.head` or `.score`: writers of the query as rows, of the key as columns, those of small
        contributions summed as "others".

    Raises
    ------
    ArgumentError
        If the model has a single layer, and so no pairs.

    Examples
    --------
    >>> import tnlib_adapters
    >>> model = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path())
    >>> # picture.savefig("k.svg") writes it
    >>> picture = heat_map(tnlib_adapters.circuits.compositions(model, "K"))
    >>> picture.axes[0].images[0].get_array().shape  # heads that write, heads that read
    (4, 4)
    """
    if isinstance(compositions, PairAttribution):
        return _pair_map(compositions)
    if not isinstance(compositions, Compositions):
        raise ArgumentTypeError(
            f"heat_map: compositions must be Compositions or a PairAttribution, got {type(compositions).__name__}; "
            "pass compositions(model, 'K') or qk_attributions(model, tokens).head(layer, head)."
        )
    from matplotlib.colors import TwoSlopeNorm
    from matplotlib.figure import Figure

    n_layers, n_heads = compositions.scores.shape[:2]
    if n_layers < 2:
        raise ArgumentError(
            "heat_map: compositions must have pairs of heads, got one layer; pass a model of at least two."
        )
    multiples = compositions.multiples[:-1, :, 1:].reshape((n_layers - 1) * n_heads, -1)  # writers readers
    side = max(3.5, 0.4 * len(multiples)) if len(multiples) <= _MOST_NAMES // 2 else 6.0
    figure = Figure(figsize=(side + 1.6, side + 0.6), layout="constrained")
    ax = figure.subplots()
    top = max(2.0, float(np.nanmax(multiples, initial=0.0)))
    interpolation = None if n_layers * n_heads <= _MOST_NAMES else "none"  # one pixel per pair, in a small file
    image = ax.imshow(multiples, cmap="RdBu_r", norm=TwoSlopeNorm(1.0, 0.0, top), interpolation=interpolation)
    _name_heads(ax.xaxis, range(1, n_layers), n_heads)
    _name_heads(ax.yaxis, range(n_layers - 1), n_heads)
    for layer in range(1, n_layers - 1):
        ax.axhline(layer * n_heads - 0.5, color="0.6", lw=0.5)
        ax.axvline(layer * n_heads - 0.5, color="0.6", lw=0.5)
    if multiples.size <= _MOST_VALUES:
        _write_values(ax, multiples, top)
    ax.set(title=f"{compositions.kind}-composition", xlabel="head that reads", ylabel="head that writes")
    figure.colorbar(image, ax=ax, label="multiple of chance", shrink=0.9)
    return figure


def _pair_map(attribution: PairAttribution) -> Figure:
    from matplotlib.colors import TwoSlopeNorm
    from matplotlib.figure import Figure

    pairs = attribution.pairs
    rows, columns = (_largest(np.abs(pairs).max(axis=axis)) for axis in (1, 0))
    values = _with_others(_with_others(pairs, rows).T, columns).T
    others = ["others"] if len(rows) < len(pairs) else []
    names = [[*(attribution.names[k] for k in shown), *others] for shown in (rows, columns)]
    figure = Figure(figsize=(2.6 + 0.42 * len(names[1]), 1.8 + 0.42 * len(names[0])), layout="constrained")
    ax = figure.subplots()
    top = max(float(np.abs(values).max()), float(np.finfo(np.float32).tiny))
    image = ax.imshow(values, cmap="RdBu_r", norm=TwoSlopeNorm(0.0, -top, top))
    ax.set_yticks(range(len(names[0])), names[0])
    ax.set_xticks(range(len(names[1])), names[1], rotation=90)
    ax.set(
        title=f"{attribution.title}: {attribution.total:.2f}", xlabel="writer of the key", ylabel="writer of the query"
    )
    figure.colorbar(image, ax=ax, label="contribution to the score", shrink=0.9)
    return figure


def _largest(sizes: Any) -> Any:
    """Return the indices of the writers that are named, in order of the model."""
    return np.sort(np.argsort(-sizes, kind="stable")[:_MOST_WRITERS])


def _with_others(values: Any, shown: Any) -> Any:
    """Return some rows, then the sum of the others if there are any."""
    others = np.delete(values, shown, axis=0)
    return np.vstack([values[shown], others.sum(axis=0)]) if len(others) else values


def _name_heads(axis: Any, layers: range, n_heads: int) -> None:
    """Label the axis by layer.head, or by layer if there are many heads."""
    count = len(layers) * n_heads
    if count <= _MOST_NAMES:
        turn = 90 if axis.axis_name == "x" and count > _MOST_LEVEL else 0
        names = [f"{layer}.{head}" for layer in layers for head in range(n_heads)]
        axis.set_ticks(range(count), names, rotation=turn)
    else:
        step = -(-len(layers) // _MOST_LAYERS)
        ticks = [(k + 0.5) * n_heads - 0.5 for k in range(0, len(layers), step)]
        axis.set_ticks(
            ticks, [f"layer {layer}" for layer in layers[::step]], rotation=30 if axis.axis_name == "x" else 0
        )


def _write_values(ax: Axes, values: Any, top: float) -> None:
    for (row, column), value in np.ndenumerate(values):
        if np.isfinite(value):
            dark = value > 1 + 0.6 * (top - 1) or value < 0.3
            ax.text(
                column, row, f"{value:.1f}", ha="center", va="center", color="white" if dark else "black", fontsize=8
            )
