"""Layers with multi-head latent attention, chosen from the statistics of a text and fitted on it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from tnlib._typing import Array
from tnlib_adapters.checkpoints.checkpoint import Checkpoint
from tnlib_adapters.compression.activation_statistics.statistics import Statistics
from tnlib_adapters.compression.layouts.latent_factors import (
    KeyMoments,
    LatentFactors,
    frequency_groups,
    latent_factors,
)
from tnlib_adapters.compression.layouts.smaller_model import rope_of
from tnlib_adapters.compression.methods.other_matrices import read_weight
from tnlib_adapters.compression.methods.out_of_core import StoredArrays, Workspace
from tnlib_adapters.compression.request import Progress
from tnlib_adapters.factors.projections import Products

if TYPE_CHECKING:
    from tnlib_adapters.instrument.block_passes import Streams
    from tnlib_adapters.instrument.latent_attention import LatentShape
    from tnlib_adapters.instrument.running_model import RunningModel
    from tnlib_adapters.instrument.weight_inputs import Places

_CANDIDATES = 9  # bases of the rotary frequencies


class LatentLayers:
    """Multi-head latent attention and feed-forward layers of a model.

    Parameters
    ----------
    checkpoint
        The original.
    rank, n_rotated
        Width of the latent vector, and number of rotated columns.
    workspace
        Memory and temporary files of the statistics.

    Attributes
    ----------
    base
        Of the rotary frequencies, base^(-2j / n_rotated); chosen by `fit`.
    """

    gated = None

    def __init__(self, checkpoint: Checkpoint, rank: int, n_rotated: int, workspace: Workspace) -> None:
        self._checkpoint, self._rank, self._n_rotated = checkpoint, rank, n_rotated
        self._moments = StoredArrays(workspace)
        turning = checkpoint.wiring.layers[0].attention.frequencies(None, "compress")
        self._radians = np.array([] if turning is None else turning.radians)
        self.base = float((rope_of(checkpoint.wiring.layers[0].attention) or (1e4, 1.0))[0])

    @property
    def widest_input(self) -> int:
        """Number of keys and values, whose second moments are inverted."""
        return self._checkpoint.sizes.widths["k"] + self._checkpoint.sizes.widths["v"]

    def places(self, model: RunningModel) -> Places:
        """Return the projections to keys and values."""
        from tnlib_adapters.instrument.weight_inputs import find_places

        return {key: place for key, place in find_places(model).items() if key.endswith((".k", ".v"))}

    def choose(self, k: int, statistics: Statistics) -> None:
        """Store the moments of a layer: its factors depend on the rotary frequencies, the same of all layers."""
        arrays = {"x": statistics.reads[f"{k}.x"], **{name: statistics.slopes[f"{k}.{name}"] for name in "kv"}}
        self._moments.add({f"{k}.{name}": moments.astype(np.float64) for name, moments in arrays.items()})

    def start(self, k: int) -> Products:
        """Return the factors of a layer, and the matrices of its feed-forward layer."""
        return self._start(k, self.base)

    def fit(self, model: RunningModel, streams: Streams, n_steps: int, progress: Progress) -> Iterator[Products]:
        """Choose the base of the rotary frequencies by the divergence before any fit, and yield the fitted layers."""
        from tnlib_adapters.instrument.latent_fit import fit_latent, truncated_divergence

        bases, divergences = self._bases(), list[float]()
        for done, base in enumerate(bases if len(bases) > 1 else ()):
            progress("choosing rotary frequencies", done, len(bases))
            start = partial(self._start, base=base)
            divergences.append(truncated_divergence(model, streams, self.shape(base), start))
        self.base = bases[int(np.argmin(divergences))] if divergences else bases[0]
        return fit_latent(model, streams, self.shape(self.base), self.start, n_steps=n_steps, progress=progress)

    def shape(self, base: float) -> LatentShape:
        """Return the sizes of the attention with the frequencies of a base."""
        from tnlib_adapters.instrument.latent_attention import LatentShape

        sizes = self._checkpoint.sizes
        scale = float((sizes.d_head + self._n_rotated) ** -0.5)
        frequencies = tuple(self._frequencies(base).tolist())
        return LatentShape(sizes.n_heads, self._rank, sizes.d_head, sizes.d_value, frequencies, scale)

    def _bases(self) -> list[float]:
        """Return bases from that of the fastest planes of the original to that of planes over all of its range."""
        n, n_planes = self._n_rotated // 2, len(self._radians)
        if n == 1:
            return [self.base]
        per_plane = self.base ** (1 / n_planes)  # ratio of neighbouring frequencies
        widest = (n_planes - 1) / (n - 1)
        steps = np.linspace(1.0, widest, _CANDIDATES) if widest > 1 else np.ones(1)
        return [float(f"{per_plane ** (step * n):.12g}") for step in steps]

    def _frequencies(self, base: float) -> Array:
        n = self._n_rotated // 2
        frequencies: Array = base ** (-np.arange(n) / n)
        return frequencies

    def _start(self, k: int, base: float) -> Products:
        from tnlib_adapters.instrument.latent_attention import DOWN, QUERY, UP

        checkpoint, sizes = self._checkpoint, self._checkpoint.sizes
        factors, output = self._factors(k, base), checkpoint.projections(k).weights["o"]
        layer = checkpoint.wiring.layers[k]
        scale = layer.attention.scale * (sizes.d_head + self._n_rotated) ** 0.5  # that of the wider queries
        matrices = {
            QUERY: scale * factors.query.reshape(sizes.d_model, -1),
            DOWN: factors.down,
            UP: factors.up.reshape(len(factors.up), -1),
            "o": output,
            **{linear.name: read_weight(checkpoint, linear.name)[0] for linear in layer.feed_forward_matrices},
        }
        return Products({name: (matrix.astype(output.dtype),) for name, matrix in matrices.items()})

    def _factors(self, k: int, base: float) -> LatentFactors:
        groups = frequency_groups(self._radians, self._frequencies(base))
        return latent_factors(
            self._checkpoint.projections(k), self._checkpoint.sizes, self._layer_moments(k), groups, self._rank
        )

    def _layer_moments(self, k: int) -> KeyMoments:
        d_model = self._checkpoint.sizes.d_model
        inputs, keys, values = (self._moments[f"{k}.{name}"] for name in "xkv")
        return KeyMoments(inputs[:d_model, :d_model], keys, values)
