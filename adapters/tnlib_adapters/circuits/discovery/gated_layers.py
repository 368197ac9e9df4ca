"""Layers of a language model whose readers receive streams of their own, with the places of readers and writers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tnlib._typing import Array
from tnlib_adapters.circuits.discovery.gated_heads import SIDES, GatedHeads, HeadValues
from tnlib_adapters.reference.adjoints import feed_forward_adjoint, norm_adjoint
from tnlib_adapters.reference.layers import Norm
from tnlib_adapters.reference.weights import Branch, Weights, named_blocks


@dataclass(frozen=True)
class Reader:
    """Rows of the gates (readers, writers) that read the stream at one place.

    Parameters
    ----------
    rows
        Rows of the gates.
    n_before
        Number of writers before this place.
    segment
        Index of the segment of the stream at this place.
    """

    rows: slice
    n_before: int
    segment: int

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
        return stream if self.norm is None else self.norm(stream)

    def adjoint(self, stream: Array, grad: Array) -> Array:
        """Return the gradient of the stream before the norm at the end."""
        return grad if self.norm is None else norm_adjoint(self.norm, stream, grad)


class LayerValues(NamedTuple):
    """Input of the readers of a layer, its values, and its output before and behind a norm."""

    reads: Array  # reader b n d
    heads: HeadValues | None
    outputs: Array  # writer b n d
    written: Array


@dataclass(frozen=True, eq=False)
class GatedLayer:
    """An attention or feed-forward layer with its norms, the rows of its readers and the places of its writers."""

    name: str
    branch: Branch
    heads: GatedHeads | None
    reader: Reader
    writers: slice

    @property
    def reader_names(self) -> list[str]:
        """Names of the readers, in the order of the rows: by side, then by head."""
        if self.heads is None:
            return [self.name]
        return [f"{self.name}.{h} {side}" for side in SIDES for h in range(self.heads.n_heads)]

    @property
    def writer_names(self) -> list[str]:
        """Names of the writers: the heads, then the output bias; or the feed-forward layer."""
        if self.heads is None:
            return [self.name]
        return [f"{self.name}.{h}" for h in range(self.heads.n_heads)] + [f"{self.name}.bias"] * self.heads.has_bias

    @property
    def rows_by_head(self) -> Array:
        """Rows of the readers, by head, then by side."""
        rows = np.arange(self.reader.rows.start, self.reader.rows.stop)
        return rows if self.heads is None else rows.reshape(len(SIDES), -1).T.ravel()

    def run(self, reads: Array) -> LayerValues:
        """Return what the layer writes if its readers receive `reads` (reader, b, n, d), or all (1, b, n, d)."""
        if self.heads is not None:
            values = self.heads.values(self._by_side(reads))
            outputs = self.heads.outputs(values)
            return LayerValues(reads, values, outputs, self.heads.written(outputs))
        x = reads if self.branch.before is None else self.branch.before(reads)
        outputs = self.branch.layer(x)  # type: ignore[operator]
        return LayerValues(reads, None, outputs, outputs if self.branch.behind is None else self.branch.behind(outputs))

    def run_head(self, values: LayerValues, row: int, read: Array) -> Array:
        """Return what the layer writes if the reader in one row receives `read` (1, b, n, d) instead."""
        if self.heads is None:
            return self.run(read).written
        side, h = divmod(row - self.reader.rows.start, self.heads.n_heads)
        single = slice(h, h + 1)
        reads = self._by_side(values.reads)[:, single].copy()
        reads[side] = read
        outputs = values.outputs.copy()
        outputs[single] = self.heads.outputs(self.heads.values(reads, single), single)
        return self.heads.written(outputs)

    def adjoint(self, values: LayerValues, grad: Array) -> Array:
        """Return the gradients of what the readers receive from those of what the layer writes."""
        if self.heads is not None and values.heads is not None:
            of_outputs = self.heads.written_adjoint(values.outputs, grad)
            of_sides = self.heads.adjoint(values.heads, of_outputs)
            return of_sides.reshape(values.reads.shape)
        before, behind = self.branch.before, self.branch.behind
        grad = grad if behind is None else norm_adjoint(behind, values.outputs, grad)
        x = values.reads if before is None else before(values.reads)
        grad = feed_forward_adjoint(self.branch.layer, x, grad)  # type: ignore[arg-type]
        return grad if before is None else norm_adjoint(before, values.reads, grad)

    def _by_side(self, reads: Array) -> Array:
        if len(reads) == 1:
            return np.broadcast_to(reads, (len(SIDES), *reads.shape))  # side 1 b n d
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
