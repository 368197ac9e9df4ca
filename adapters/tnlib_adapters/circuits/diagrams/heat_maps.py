"""Heat maps of composition scores, drawn with matplotlib."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tnlib import ArgumentError, ArgumentTypeError
from tnlib._deprecation import renamed_arguments
from tnlib_adapters.circuits.composition.head_pairs import Compositions

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MOST_VALUES = 400  # largest number of pairs with printed values
_MOST_NAMES = 40  # largest number of heads named on an axis
_MOST_LEVEL = 12  # largest number of names written horizontally


@renamed_arguments(found="compositions")
def heat_map(compositions: Compositions) -> Figure:
    """Draw composition scores as multiples of chance: writers as rows, readers as columns, white for absent pairs.

    Raises
    ------
    ArgumentError
        If the model has a single layer, and so no pairs.

    Examples
    --------
    ::

        heat_map(compositions(model, "K")).savefig("k.svg")
    """
    if not isinstance(compositions, Compositions):
        raise ArgumentTypeError(
            f"heat_map: compositions must be Compositions, got {type(compositions).__name__}; "
            "pass compositions(model, 'K')."
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
    image = ax.imshow(multiples, cmap="RdBu_r", norm=TwoSlopeNorm(1.0, 0.0, top))
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


def _name_heads(axis: Any, layers: range, n_heads: int) -> None:
    """Label the axis by layer.head, or by layer if there are many heads."""
    count = len(layers) * n_heads
    if count <= _MOST_NAMES:
        turn = 90 if axis.axis_name == "x" and count > _MOST_LEVEL else 0
        names = [f"{layer}.{head}" for layer in layers for head in range(n_heads)]
        axis.set_ticks(range(count), names, rotation=turn)
    else:
        axis.set_ticks([(k + 0.5) * n_heads - 0.5 for k in range(len(layers))], [f"layer {layer}" for layer in layers])


def _write_values(ax: Axes, values: Any, top: float) -> None:
    for (row, column), value in np.ndenumerate(values):
        if np.isfinite(value):
            dark = value > 1 + 0.6 * (top - 1) or value < 0.3
            ax.text(
                column, row, f"{value:.1f}", ha="center", va="center", color="white" if dark else "black", fontsize=8
            )
