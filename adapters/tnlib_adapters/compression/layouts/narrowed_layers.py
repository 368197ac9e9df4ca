"""Layers with narrower heads and fewer neurons: as zeros in the weights of the original sizes, and without the zeros.

The zero-padded weights compute the same as the narrow ones, in the original model: they are chosen, fitted and measured
there. The values of every head are 0 from some column on, and queries and keys outside some rotary planes; the others
become those of the narrow layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tnlib._typing import Array
from tnlib_adapters.checkpoints.checkpoint import Checkpoint
from tnlib_adapters.compression.activation_statistics.statistics import ComponentsOf, Statistics
from tnlib_adapters.compression.layouts.neurons import choose_neurons
from tnlib_adapters.compression.layouts.rotary_planes import RotaryPlanes, choose_planes
from tnlib_adapters.compression.layouts.value_basis import truncate_values
from tnlib_adapters.compression.methods.calibrated import with_bias_row
from tnlib_adapters.compression.methods.components import Components
from tnlib_adapters.compression.methods.other_matrices import read_weight
from tnlib_adapters.compression.methods.out_of_core import StoredArrays, Workspace
from tnlib_adapters.compression.request import Progress
from tnlib_adapters.factors.projections import NAMES, Products, Projections

if TYPE_CHECKING:
    from tnlib_adapters.instrument.block_passes import Streams
    from tnlib_adapters.instrument.running_model import RunningModel
    from tnlib_adapters.instrument.weight_inputs import Places


@dataclass(frozen=True)
class Widths:
    """Columns of the queries and keys of a head, of its values, and neurons of a layer; None for no such layer."""

    head: int
    value: int
    neurons: int | None


def widths_of(checkpoint: Checkpoint) -> Widths:
    """Return the widths of a model, of whose layers the first has a feed-forward layer or none has."""
    sizes, feed_forward = checkpoint.sizes, checkpoint.wiring.layers[0].feed_forward
    neurons = (
        None if feed_forward is None else checkpoint.folder.tensors[feed_forward.down.weight].size // sizes.d_model
    )
    return Widths(sizes.d_head, sizes.d_value, neurons)


class NarrowedLayers:
    """Zero-padded weights of the layers of a model, chosen layer by layer from its statistics.

    Parameters
    ----------
    checkpoint
        The original.
    widths
        Of the narrow layers.
    workspace
        Memory and temporary files of the weights.
    """

    def __init__(self, checkpoint: Checkpoint, widths: Widths, workspace: Workspace) -> None:
        self._checkpoint, self._widths, self._before = checkpoint, widths, widths_of(checkpoint)
        self._arrays = StoredArrays(workspace)
        self._plane_losses = np.zeros(checkpoint.sizes.d_head // 2)  # without a rotary plane of all layers and heads
        self.planes: RotaryPlanes | None = None  # None: all columns of queries and keys

    @property
    def narrows_heads(self) -> bool:
        """True if queries and keys become narrower."""
        return self._widths.head < self._before.head

    @property
    def narrows_neurons(self) -> bool:
        """True if there will be fewer neurons."""
        return self._widths.neurons != self._before.neurons

    @property
    def widest_input(self) -> int:
        """Largest number of inputs whose second moments are inverted."""
        return max(self._before.neurons or 0 if self.narrows_neurons else 0, self._checkpoint.sizes.d_value)

    def places(self, model: RunningModel) -> Places:
        """Return the weights whose inputs and output gradients `choose` reads."""
        from tnlib_adapters.instrument.weight_inputs import find_places

        layers = self._checkpoint.wiring.layers
        down = [layer.feed_forward.down.name for layer in layers if layer.feed_forward and self.narrows_neurons]
        kinds = ("o", "q") if self.narrows_heads else ("o",)
        used = {*down, *(f"{k}.{kind}" for k in range(len(layers)) for kind in kinds)}
        return {key: place for key, place in find_places(model, down).items() if key in used}

    @property
    def gated(self) -> ComponentsOf | None:
        """Function that returns W_Q of a layer as components, one for every column, to measure gates on."""
        return self._query_columns if self.narrows_heads else None

    def _query_columns(self, k: int, _moments: Statistics) -> dict[str, Components]:
        if not 0 <= k < self._checkpoint.n_layers:
            return {}
        weight = with_bias_row(self._checkpoint.projections(k), "q")
        identity = np.eye(weight.shape[1], dtype=weight.dtype)
        return {f"{k}.q": Components(weight, identity, np.zeros(weight.shape[1]))}

    def choose(self, k: int, statistics: Statistics) -> None:
        """Choose values and neurons of a layer, and add the losses of its rotary planes."""
        sizes, projections = self._checkpoint.sizes, self._checkpoint.projections(k)
        truncated = projections
        if self._widths.value < self._before.value:
            moments = statistics.reads[f"{k}.y"], statistics.slopes[f"{k}.o"]
            truncated = truncate_values(projections, sizes, self._widths.value, *moments)
        arrays = {f"{k}.{name}": truncated.weights[name] for name in "vo"}
        arrays |= {f"{k}.b_v": truncated.biases["v"]} if "v" in truncated.biases else {}
        if self.narrows_heads:
            gates = statistics.gates[f"{k}.q"].reshape(sizes.n_heads, 2, -1)  # h (half plane)
            self._plane_losses += gates.sum((0, 1))
        feed_forward = self._checkpoint.wiring.layers[k].feed_forward
        if self.narrows_neurons and feed_forward and self._widths.neurons is not None:
            down, _ = read_weight(self._checkpoint, feed_forward.down.name)
            moments_of_down = statistics.reads[feed_forward.down.name], statistics.slopes[feed_forward.down.name]
            kept, rows = choose_neurons(down, *moments_of_down, self._widths.neurons)
            arrays |= {f"{k}.neurons": kept, f"{k}.down": rows.astype(down.dtype)}
        self._arrays.add(arrays)

    def fit(self, model: RunningModel, streams: Streams, n_steps: int, progress: Progress) -> Iterator[Products]:
        """Choose the rotary planes, the same of all layers, and yield the fitted zero-padded weights."""
        from tnlib_adapters.instrument.narrowed_fit import fit_narrowed

        if self.narrows_heads:
            self.planes = choose_planes(self._plane_losses, self._widths.head // 2)
        return fit_narrowed(model, streams, self.start, n_steps=n_steps, progress=progress)

    def start(self, k: int) -> Products:
        """Return the zero-padded weights of a layer."""
        projections = self._checkpoint.projections(k)
        biases = {"v": self._arrays[f"{k}.b_v"]} if f"{k}.b_v" in self._arrays else {}
        chosen = Projections({name: self._arrays[f"{k}.{name}"] for name in "vo"}, biases)
        projections = projections.updated(chosen)
        factors = {name: (with_bias_row(projections, name),) for name in NAMES}
        if self.planes is not None:
            unused = np.ones(self._before.head, bool)
            unused[self.planes.columns] = False
            for name in "qk":
                factors[name] = (_without(factors[name][0], np.flatnonzero(np.tile(unused, self._heads(name)))),)
        products = Products(factors, frozenset(projections.biases), projections.biases.get("o"))
        return products.beside(self._feed_forward(k))

    def _feed_forward(self, k: int) -> dict[str, tuple[Array, ...]]:
        """Return the zero-padded matrices of the feed-forward layer; none with experts."""
        feed_forward = self._checkpoint.wiring.layers[k].feed_forward
        if feed_forward is None:
            return {}
        down, _ = read_weight(self._checkpoint, feed_forward.down.name)
        unused = np.setdiff1d(np.arange(len(down)), self.neurons(k))
        if self.narrows_neurons:
            down = np.zeros_like(down)
            down[self.neurons(k)] = self._arrays[f"{k}.down"]
        matrices: dict[str, tuple[Array, ...]] = {feed_forward.down.name: (down,)}
        for linear in feed_forward.inputs:
            weight, _ = read_weight(self._checkpoint, linear.name)
            n_parts = weight.shape[1] // len(down)  # 2 where one matrix holds the gate and `up`
            columns = (np.arange(n_parts)[:, None] * len(down) + unused).ravel()
            matrices[linear.name] = (_without(weight, columns),)
        return matrices

    def neurons(self, k: int) -> Array:
        """Return the indices of the neurons of a layer that are kept."""
        if not self.narrows_neurons:
            return np.arange(self._before.neurons or 0)
        kept: Array = self._arrays[f"{k}.neurons"].astype(int)
        return kept

    def _heads(self, name: str) -> int:
        sizes = self._checkpoint.sizes
        return sizes.n_heads if name in "qo" else sizes.kv_heads

    # ------------------------------------------------------------------------------------- without the zeros

    def narrow_projections(self, products: Products, *, query_scale: float = 1.0) -> Projections:
        """Return the projections without zeros; the scale of the scores changes with the width: `query_scale`."""
        wide, widths = products.expand(self._checkpoint.sizes), self._widths
        columns = np.arange(widths.head) if self.planes is None else self.planes.columns
        kept = {"q": columns, "k": columns, "v": np.arange(widths.value), "o": np.arange(widths.value)}
        scales = {"q": query_scale}
        weights, biases = dict[str, Array](), dict[str, Array]()
        for name, weight in wide.weights.items():
            inner = _of_all_heads(kept[name], self._checkpoint.sizes.of_head(name), self._heads(name))
            weights[name] = weight[inner] if name == "o" else scales.get(name, 1.0) * weight[:, inner]
            if name != "o" and name in wide.biases:
                biases[name] = scales.get(name, 1.0) * wide.biases[name][inner]
        return Projections(weights, biases | {name: bias for name, bias in wide.biases.items() if name == "o"})

    def narrow_feed_forward(self, k: int, products: Products) -> tuple[dict[str, Array], dict[str, Array]]:
        """Return the matrices (in, out) and the biases of the feed-forward layer without zeros, by their modules."""
        feed_forward = self._checkpoint.wiring.layers[k].feed_forward
        if feed_forward is None:
            return {}, {}
        matrices, kept, n = products.modules(), self.neurons(k), self._before.neurons or 0
        down = feed_forward.down
        narrow, biases = {down.name: matrices[down.name][kept]}, dict[str, Array]()
        if down.bias:
            biases[down.name] = self._checkpoint.read(down.bias)
        for linear in feed_forward.inputs:
            weight = matrices[linear.name]
            columns = (np.arange(weight.shape[1] // n)[:, None] * n + kept).ravel()
            narrow[linear.name] = weight[:, columns]
            if linear.bias:
                biases[linear.name] = self._checkpoint.read(linear.bias)[columns]
        return narrow, biases


def _of_all_heads(kept: Array, width: int, n_heads: int) -> Array:
    """Return the indices of these columns of every head of a width."""
    indices: Array = (np.arange(n_heads)[:, None] * width + kept).ravel()
    return indices


def _without(weight: Array, columns: Array) -> Array:
    """Return a weight with some columns 0."""
    new = weight.copy()
    new[:, columns] = 0
    return new
