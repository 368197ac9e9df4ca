"""Layers of a language model each of whose readers, heads included, receives a stream of its own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tnlib._typing import Array
from tnlib_adapters.attention.attention import Attention
from tnlib_adapters.attention.softmax import like, namespace_of
from tnlib_adapters.circuits.discovery.target_loss import differentiated
from tnlib_adapters.reference.layers import Norm, normed
from tnlib_adapters.reference.weights import Branch, Weights, named_blocks

SIDES = ("Q", "K", "V")


@dataclass(frozen=True, eq=False)
class GatedHeads:
    """An attention layer with its norms, in which every query head has its own keys and values."""

    layer: Attention
    before: Norm | None
    behind: Norm | None

    @classmethod
    def of(cls, branch: Branch) -> GatedHeads | None:
        """Return the heads of an attention layer, None for another layer."""
        layer = branch.layer
        if not isinstance(layer, Attention):
            return None
        return cls(layer.of_heads(range(layer.n_heads)), branch.before, branch.behind)

    @property
    def n_heads(self) -> int:
        """Number of query heads."""
        return self.layer.n_heads

    @functools.cached_property
    def single(self) -> tuple[GatedHeads, ...]:
        """Every head as a layer."""
        return tuple(GatedHeads(self.layer.of_heads([h]), self.before, self.behind) for h in range(self.n_heads))

    @property
    def has_bias(self) -> bool:
        """True if the layer writes a constant beside its heads."""
        return self.layer.b_O is not None or (self.behind is not None and self.behind.bias is not None)

    def outputs(self, reads: Array) -> Array:
        """Return what the heads write before a norm behind them, (h, b, n, d_model).

        `reads` (3, h, b, n, d_model), or (3, 1, b, n, d_model), are the streams that queries, keys and values read,
        before any norm.
        """
        layer, positions = self.layer, np.arange(reads.shape[-2])
        for_q, for_k, for_v = normed(self.before, reads)  # unpacked: torch would add three gradients of the whole
        q, k, v = layer.queries(for_q, positions), layer.keys(for_k, positions), layer.values(for_v)
        return layer.head_outputs(layer.patterns_of(layer.scores_of(q, k, positions[:, None] - positions)), v)

    def written(self, outputs: Array) -> Array:
        """Return the outputs of all heads behind the norm, then that of the biases, (writers, b, n, d_model)."""
        if not self.has_bias and self.behind is None:
            return outputs
        bias = namespace_of(outputs).zeros_like(outputs[:1])
        if self.layer.b_O is not None:
            bias = bias + like(self.layer.b_O, outputs)
        writers: Array = namespace_of(outputs).concat([outputs, bias])
        if self.behind is None:
            return writers
        norm = self.behind
        centred = norm.centre(writers)
        y = centred / norm.divisors(centred.sum(0)) * like(norm.weight, outputs)
        if norm.bias is not None:
            y[-1] += like(norm.bias, outputs)
        return y if self.has_bias else y[:-1]


@dataclass(frozen=True)
class Reader:
    """Rows of the gates (readers, writers) that read the stream at one place."""

    rows: slice  # rows of the gates
    n_before: int  # number of writers before this place
    segment: int  # index of the segment of the stream at this place

    def single(self, row: int) -> Reader:
        """Return one of these rows."""
        return Reader(slice(row, row + 1), self.n_before, self.segment)

    def of(self, gates: Array) -> Reader:
        """Return a single row if the gates (readers, writers) of all rows are equal, so that it is read once."""
        rows = gates[self.rows, : self.n_before]
        return self.single(self.rows.start) if (rows == rows[:1]).all() else self


@dataclass(frozen=True, eq=False)
class Segment:
    """Writers between two norms on the stream, and the norm at the end, None for the last segment."""

    writers: slice
    norm: Norm | None

    def before(self, n: int) -> slice:
        """Return those of the first n writers that belong to the segment."""
        return slice(min(self.writers.start, n), min(self.writers.stop, n))

    def normed(self, stream: Array) -> Array:
        """Return the stream behind the norm at the end."""
        return normed(self.norm, stream)


class LayerValues(NamedTuple):
    """Input of the readers of a layer, its output before and behind a norm, and its vector-Jacobian product, or None.

    The last one takes the gradient of a loss by `written` to that by `reads`.
    """

    reads: Array  # reader b n d
    outputs: Array  # writer b n d
    written: Array
    pull_back: Callable[[Array], Array] | None = None


@dataclass(frozen=True, eq=False)
class GatedLayer:
    """An attention or feed-forward layer with its norms, the rows of its readers and the numbers of its writers."""

    name: str
    branch: Branch
    heads: GatedHeads | None
    reader: Reader
    writers: slice

    @property
    def components(self) -> list[str]:
        """Heads, or the feed-forward layer."""
        return [self.name] if self.heads is None else [f"{self.name}.{h}" for h in range(self.heads.n_heads)]

    @property
    def readers(self) -> list[tuple[str, str]]:
        """Names of the readers and their components, in the order of the rows: by side, then by head."""
        if self.heads is None:
            return [(self.name, self.name)]
        return [(f"{name} {side}", name) for side in SIDES for name in self.components]

    @property
    def writer_names(self) -> list[str]:
        """Names of the writers: the heads, then the output bias; or the feed-forward layer."""
        has_bias = self.heads is not None and self.heads.has_bias
        return self.components + [f"{self.name}.bias"] * has_bias

    @property
    def rows_by_head(self) -> Array:
        """Rows of the readers, by head, then by side."""
        rows = np.arange(self.reader.rows.start, self.reader.rows.stop)
        return rows if self.heads is None else rows.reshape(len(SIDES), -1).T.ravel()

    def run(self, reads: Array) -> LayerValues:
        """Return what the layer writes if its readers receive `reads` (reader, b, n, d), or all (1, b, n, d)."""
        if self.heads is not None:
            outputs = self.heads.outputs(self._by_side(reads))
            return LayerValues(reads, outputs, self.heads.written(outputs))
        outputs = self.branch.layer(normed(self.branch.before, reads))  # type: ignore[operator]
        return LayerValues(reads, outputs, normed(self.branch.behind, outputs))

    def differentiate(self, reads: Array) -> LayerValues:
        """Return what `run` returns, with gradients."""
        written, pull_back = differentiated(lambda tensor: self.run(tensor).written, reads)
        return LayerValues(reads, written, written, pull_back)

    def run_head(self, values: LayerValues, row: int, read: Array) -> Array:
        """Return what the layer writes if the reader in one row receives `read` (1, b, n, d) instead."""
        if self.heads is None:
            return self.run(read).written
        side, h = divmod(row - self.reader.rows.start, self.heads.n_heads)
        by_side = self._by_side(values.reads)
        reads = by_side[:, [0 if by_side.shape[1] == 1 else h]]  # a copy
        reads[side] = read
        outputs = values.outputs.copy()
        outputs[h : h + 1] = self.heads.single[h].outputs(reads)
        return self.heads.written(outputs)

    def _by_side(self, reads: Array) -> Array:
        if len(reads) == 1:
            return namespace_of(reads).broadcast_to(reads, (len(SIDES), *reads.shape))  # type: ignore[no-any-return]
        return reads.reshape(len(SIDES), -1, *reads.shape[1:])  # side h b n d


def gated_layers(weights: Weights, n_embedded: int) -> tuple[list[GatedLayer], list[Segment], Reader]:
    """Return the layers, the segments of the stream, and the place of the logits, after `n_embedded` writers."""
    layers: list[GatedLayer] = []
    segments: list[Segment] = []
    n_writers, row, start = n_embedded, 0, 0
    for block, names in named_blocks(weights.blocks):
        n_before = n_writers
        for name, branch in zip(names, block.branches, strict=True):
            heads = GatedHeads.of(branch)
            rows = 1 if heads is None else len(SIDES) * heads.n_heads
            n_written = 1 if heads is None else heads.n_heads + heads.has_bias
            reader = Reader(slice(row, row + rows), n_before, len(segments))
            layers.append(GatedLayer(name, branch, heads, reader, slice(n_writers, n_writers + n_written)))
            row, n_writers = row + rows, n_writers + n_written
        if block.after is not None:
            segments.append(Segment(slice(start, n_writers), block.after))
            start = n_writers
    segments.append(Segment(slice(start, n_writers), None))
    return layers, segments, Reader(slice(row, row + 1), n_writers, len(segments) - 1)
