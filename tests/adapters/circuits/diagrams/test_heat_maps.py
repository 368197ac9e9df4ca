"""Heat maps of composition scores."""

from __future__ import annotations

from typing import Any

import numpy as np
from oracles import assert_close, normal
from tnlib_adapters import Attention, Checkpoint
from tnlib_adapters.circuits import compositions, heat_map


def layers(n_layers: int = 3, *, heads: int = 4, kv_heads: int = 2, d: int = 7, dh: int = 3, **facts: Any) -> list:
    """Layers with every bias, on shared keys and values."""
    found = []
    for layer in range(n_layers):
        w = [
            normal(s, seed=10 * layer + i) for i, s in enumerate([(heads, d, dh), (kv_heads, d, dh), (kv_heads, d, dh)])
        ]
        o, *b = (
            normal(s, seed=10 * layer + 5 + i)
            for i, s in enumerate([(heads, dh, d), (heads, dh), (kv_heads, dh), (kv_heads, dh)])
        )
        found.append(Attention(*w, o, 0.5, *b, **facts))
    return found


def test_the_picture_names_every_head(model: Checkpoint) -> None:
    figure = heat_map(compositions(model, "K"))
    ax = figure.axes[0]
    assert [t.get_text() for t in ax.get_yticklabels()] == ["0.0", "0.1", "0.2", "0.3"]
    assert [t.get_text() for t in ax.get_xticklabels()] == ["1.0", "1.1", "1.2", "1.3"]
    image = np.asarray(ax.images[0].get_array())
    assert_close(image, compositions(model, "K").multiples[0, :, 1])
    wide = heat_map(compositions(layers(12), "Q"))
    assert wide.axes[0].get_xticklabels()[0].get_text() == "layer 1"
