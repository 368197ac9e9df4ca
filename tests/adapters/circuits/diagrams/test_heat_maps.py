"""Heat maps of composition scores."""

from __future__ import annotations

import numpy as np
from oracles import assert_close, normal
from tnlib_adapters import Attention, Checkpoint
from tnlib_adapters.circuits import compositions, heat_map


def random_layer(seed: int) -> Attention:
    """A layer of four heads."""
    w = [normal((4, 7, 3), seed=4 * seed + k) for k in range(3)]
    return Attention(*w, normal((4, 3, 7), seed=4 * seed + 3), 0.5)


def test_the_picture_names_every_head(model: Checkpoint) -> None:
    figure = heat_map(compositions(model, "K"))
    ax = figure.axes[0]
    assert [t.get_text() for t in ax.get_yticklabels()] == ["0.0", "0.1", "0.2", "0.3"]
    assert [t.get_text() for t in ax.get_xticklabels()] == ["1.0", "1.1", "1.2", "1.3"]
    image = np.asarray(ax.images[0].get_array())
    assert_close(image, compositions(model, "K").multiples[0, :, 1])
    wide = heat_map(compositions([random_layer(k) for k in range(12)], "Q"))
    assert wide.axes[0].get_xticklabels()[0].get_text() == "layer 1"
