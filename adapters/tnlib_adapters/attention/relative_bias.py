"""Additive bias of the scores by binned distance."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from tnlib import ArgumentError
from tnlib._typing import Array
from tnlib._validate import as_array, as_count, as_flag, to_numpy


@dataclass(frozen=True, eq=False, repr=False)
class RelativeBias:
    """Bias of a score by the distance of query and key, learned per head and bin.

    Half of the bins are for keys at or before the query, half for those behind it. Of each half, the first half are
    single distances; the others grow geometrically up to `max_distance`, beyond which all share the last.

    Parameters
    ----------
    table
        (heads, bins), the biases; the number of bins is a multiple of 4.
    max_distance
        Distance from which on the last bin is used.
    one_sided
        If True, all bins are for keys at or before the query, as in a decoder, and keys behind it share the first.

    Raises
    ------
    ArgumentError
        If the number of bins is no multiple of 4, or `max_distance` does not exceed the single distances.

    References
    ----------
    Raffel et al., "Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer" (2020), sec. 2.1.

    Examples
    --------
    >>> RelativeBias(np.arange(8.0)[None], max_distance=16).at([0, 1, 3, 40, -1])
    array([[0., 1., 2., 3., 5.]])
    """

    table: Array
    max_distance: int
    one_sided: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "table", as_array("RelativeBias", "table", self.table, ndim=2))
        object.__setattr__(self, "one_sided", as_flag("RelativeBias", "one_sided", self.one_sided))
        bins, furthest = self.table.shape[1], as_count("RelativeBias", "max_distance", self.max_distance)
        single = bins // (2 if self.one_sided else 4)
        if bins % 4 or furthest <= single:
            raise ArgumentError(
                f"RelativeBias: table must have a multiple of 4 bins, and max_distance exceed a "
                f"{'half' if self.one_sided else 'quarter'} of them, got {bins} and {furthest}; pass (heads, bins)."
            )

    def __repr__(self) -> str:
        side = ", one-sided" if self.one_sided else ""
        return f"RelativeBias({self.table.shape[1]} bins up to distance {self.max_distance}{side})"

    def of_heads(self, heads: Sequence[int] | Array) -> RelativeBias:
        """Return the bias of some heads."""
        return replace(self, table=self.table[np.asarray(heads)])

    def at(self, distances: Array) -> Array:
        """Return the biases at integer distances, query position minus key position; heads first, then their shape."""
        distance = to_numpy("RelativeBias.at", "distances", distances).astype(np.int64)
        side = self.table.shape[1] // (1 if self.one_sided else 2)  # bins of one side
        single, far = side // 2, np.maximum(distance, 0) if self.one_sided else np.abs(distance)
        # in single precision, as models are trained: a distance on the edge of two bins depends on the rounding
        turns = np.log(np.maximum(far, 1).astype(np.float32) / np.float32(single))
        step = np.float32(1 / math.log(self.max_distance / single))
        binned = single + (turns * step * np.float32(side - single)).astype(np.int64)
        place = np.where(far < single, far, np.minimum(binned, side - 1))
        place = place if self.one_sided else place + side * (distance < 0)
        biases: Array = self.table[:, place]
        return biases
