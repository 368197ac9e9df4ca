"""Layers with narrower heads and fewer neurons: as zeros in the weights of the original sizes, and without the zeros.

The zero-padded weights compute the same as the narrow ones, in the original model: they are chosen, fitted and measured
there. The values of every head are 0 from some column on, and queries and keys outside some rotary planes; the others
become those of the narrow layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tnlib._typing import Array
from tnlib_adapters.checkpoints.checkpoint import Checkpoint
from tnlib_adapters.compression.calibration.collect_calibration import streams_of_fit
from tnlib_adapters.compression.calibration.fit_by_block import steps_of_model
from tnlib_adapters.compression.calibration.resumed_run import CalibrationFolder
from tnlib_adapters.compression.calibration.statistics import Statistics, collect_groups
from tnlib_adapters.compression.layouts.structured_pruning import (
    RotaryPlanes,
    choose_neurons,
    choose_planes,
    truncate_values,
)
from tnlib_adapters.compression.methods.calibrated import with_bias_row
from tnlib_adapters.compression.methods.other_matrices import read_weight
from tnlib_adapters.compression.methods.out_of_core import StoredArrays, Workspace
from tnlib_adapters.compression.progress import Progress
from tnlib_adapters.compression.request import Request
from tnlib_adapters.compression.source_model import SourceModel
from tnlib_adapters.compression.text import TokenSequences, check_tokens, sample_batches
from tnlib_adapters.factors.projections import NAMES, Products, Projections


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
    """Zero-padded weights of the layers of a model, chosen layer by layer from its statistics, and fitted.

    Parameters
    ----------
    checkpoint
        The original.
    widths
        Of the narrow layers.
    workspace
        Memory and temporary files of the weights.
    request
        Effort, and tokens of the text.

    Attributes
    ----------
    planes
        Rotary planes of all layers and heads; None for all columns of queries and keys.
    """

    def __init__(self, checkpoint: Checkpoint, widths: Widths, workspace: Workspace, request: Request) -> None:
        self._checkpoint, self._widths, self._before = checkpoint, widths, widths_of(checkpoint)
        self._heads_narrow, self._fewer = widths.head < self._before.head, widths.neurons != self._before.neurons
        self._arrays, self._request = StoredArrays(workspace), request
        self._plane_losses = np.zeros(checkpoint.sizes.d_head // 2)  # without a rotary plane of all layers and heads
        self.planes: RotaryPlanes | None = None

    def fitted(self, source: SourceModel, text: TokenSequences, progress: Progress) -> Iterator[Products]:
        """Choose what the layers keep from the statistics of a text, and yield their weights, fitted on it."""
        from tnlib_adapters.instrument.narrowed_fit import fit_narrowed
        from tnlib_adapters.instrument.weight_inputs import find_places

        model, wired, request = source.original, self._checkpoint.wiring.layers, self._request
        batches, folder = model.batches(text), CalibrationFolder()  # the folder of the streams, until the end
        widest = max(self._before.neurons or 0 if self._fewer else 0, self._checkpoint.sizes.d_value)
        check_tokens("compress", batches, widest)  # second moments of so many inputs are inverted
        streams, sample = streams_of_fit(model, batches, folder, request), sample_batches(batches, request.tokens // 2)
        down = [layer.feed_forward.down.name for layer in wired if layer.feed_forward and self._fewer]
        used = {*down, *(f"{k}.{name}" for k in range(len(wired)) for name in ("oq" if self._heads_narrow else "o"))}
        places = {key: place for key, place in find_places(model, down).items() if key in used}
        collect_groups(model, places, sample, progress, streams=streams, save=self._choose)
        if self._heads_narrow:
            self.planes = choose_planes(self._plane_losses, self._widths.head // 2)
        n_steps = steps_of_model(model, streams, request.effort)
        yield from fit_narrowed(model, streams, self._start, n_steps=n_steps, progress=progress)

    def _choose(self, k: int, statistics: Statistics) -> None:
        """Choose values and neurons of a layer, and add the losses of its rotary planes."""
        sizes, projections = self._checkpoint.sizes, self._checkpoint.projections(k)
        if self._widths.value < self._before.value:
            moments = statistics.reads[f"{k}.y"], statistics.slopes[f"{k}.o"]
            projections = truncate_values(projections, sizes, self._widths.value, *moments)
        arrays = {f"{k}.{name}": projections.weights[name] for name in "vo"}
        arrays |= {f"{k}.b_v": projections.biases["v"]} if "v" in projections.biases else {}
        if self._heads_narrow:
            weight = with_bias_row(projections, "q")
            reads, slopes = statistics.reads_of_projection(k, "q", len(weight)), statistics.slopes[f"{k}.q"]
            of_columns = (weight * (reads @ weight)).sum(0) * np.diag(slopes) * statistics.scales[f"{k}.q"]
            self._plane_losses += of_columns.reshape(sizes.n_heads, 2, -1).sum((0, 1))  # h (half plane)
        feed_forward = self._checkpoint.wiring.layers[k].feed_forward
        if self._fewer and feed_forward and self._widths.neurons is not None:
            name = feed_forward.down.name
            down, _ = read_weight(self._checkpoint, name)
            kept, rows = choose_neurons(down, statistics.reads[name], statistics.slopes[name], self._widths.neurons)
            arrays |= {f"{k}.neurons": kept, f"{k}.down": rows.astype(down.dtype)}
        self._arrays.add(arrays)

    def _start(self, k: int) -> Products:
        """Return the zero-padded weights of a layer, as chosen."""
        projections = self._checkpoint.projections(k)
        biases = {"v": self._arrays[f"{k}.b_v"]} if f"{k}.b_v" in self._arrays else {}
        chosen = Projections({name: self._arrays[f"{k}.{name}"] for name in "vo"}, biases)
        projections = projections.updated(chosen)
        factors = {name: (with_bias_row(projections, name),) for name in NAMES}
        if self.planes is not None:
            unused = np.setdiff1d(np.arange(self._before.head), self.planes.columns)
            for name in "qk":
                factors[name] = (_without(factors[name][0], self._of_all_heads(name, unused)),)
        products = Products(factors, frozenset(projections.biases), projections.biases.get("o"))
        return products.beside(self._feed_forward(k))

    def _feed_forward(self, k: int) -> dict[str, tuple[Array, ...]]:
        """Return the zero-padded matrices of the feed-forward layer; none with experts."""
        feed_forward = self._checkpoint.wiring.layers[k].feed_forward
        if feed_forward is None:
            return {}
        down, _ = read_weight(self._checkpoint, feed_forward.down.name)
        unused = np.setdiff1d(np.arange(len(down)), self._neurons(k))
        if self._fewer:
            down = np.zeros_like(down)
            down[self._neurons(k)] = self._arrays[f"{k}.down"]
        matrices: dict[str, tuple[Array, ...]] = {feed_forward.down.name: (down,)}
        for linear in feed_forward.inputs:
            weight, _ = read_weight(self._checkpoint, linear.name)
            matrices[linear.name] = (_without(weight, _of_all_parts(unused, len(down), weight.shape[1])),)
        return matrices

    def _neurons(self, k: int) -> Array:
        """Return the indices of the neurons of a layer that are kept."""
        if not self._fewer:
            return np.arange(self._before.neurons or 0)
        kept: Array = self._arrays[f"{k}.neurons"].astype(int)
        return kept

    def _of_all_heads(self, name: str, columns: Array) -> Array:
        """Return the indices of these columns of every head of a projection."""
        sizes = self._checkpoint.sizes
        return _of_all_parts(columns, sizes.of_head(name), sizes.widths[name])

    # ------------------------------------------------------------------------------------- without the zeros

    def narrow_projections(self, products: Products, query_scale: float) -> Projections:
        """Return the projections without zeros; the scale of the scores changes with the width: `query_scale`."""
        wide, widths = products.expand(self._checkpoint.sizes), self._widths
        columns = np.arange(widths.head) if self.planes is None else self.planes.columns
        weights, biases = dict[str, Array](), dict[str, Array]()
        for name, weight in wide.weights.items():
            inner = self._of_all_heads(name, columns if name in "qk" else np.arange(widths.value))
            scale = query_scale if name == "q" else 1.0
            weights[name] = weight[inner] if name == "o" else scale * weight[:, inner]
            if name in wide.biases:
                biases[name] = wide.biases[name] if name == "o" else scale * wide.biases[name][inner]
        return Projections(weights, biases)

    def narrow_feed_forward(self, k: int, products: Products) -> dict[str, Array]:
        """Return the tensors of the feed-forward layer without zeros, by their names."""
        layer, matrices, tensors = self._checkpoint.wiring.layers[k], products.modules(), dict[str, Array]()
        kept, n = self._neurons(k), self._before.neurons or 0
        for linear in layer.feed_forward_matrices:
            weight = matrices[linear.name]
            bias = self._checkpoint.read(linear.bias) if linear.bias else None
            if layer.feed_forward is not None and linear == layer.feed_forward.down:
                weight = weight[kept]
            else:
                columns = _of_all_parts(kept, n, weight.shape[1])
                weight, bias = weight[:, columns], None if bias is None else bias[columns]
            tensors[linear.weight] = np.ascontiguousarray(linear.on_rows(weight))
            tensors |= {linear.bias: bias} if linear.bias and bias is not None else {}
        return tensors


def _of_all_parts(kept: Array, width: int, total: int) -> Array:
    """Return the indices of these columns of every part of a width: heads, or the gate and `up` in one matrix."""
    indices: Array = (np.arange(total // width)[:, None] * width + kept).ravel()
    return indices


def _without(weight: Array, columns: Array) -> Array:
    """Return a weight with some columns 0."""
    new = weight.copy()
    new[:, columns] = 0
    return new
