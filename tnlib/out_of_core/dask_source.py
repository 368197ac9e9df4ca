"""Dask arrays as sources: tiles are groups of whole chunks, because Dask computes a chunk again wherever it is read."""

from __future__ import annotations

import bisect
import functools
import itertools
import math
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from tnlib._errors import ArgumentError
from tnlib._typing import Array
from tnlib.out_of_core.array_source import ArraySource, Tile, flat_ranges, pair_legs
from tnlib.out_of_core.mapped_file import open_source

_HELD_HERE = ("_x", "_client", "_chunks")  # what workers do not need


def is_dask_array(x: Any) -> bool:
    """Test if `x` is a Dask array, without importing Dask."""
    return type(x).__module__.partition(".")[0] == "dask" and hasattr(x, "__dask_graph__") and hasattr(x, "chunks")


def source_of(function: str, parameter: str, x: Any, client: Any = None) -> ArraySource:
    """Return the source of anything with `shape`, `dtype` and slicing; a Dask array is computed by `client`."""
    return DaskSource(function, parameter, x, client) if is_dask_array(x) else open_source(function, parameter, x)


class DaskSource(ArraySource):
    """A Dask array, or a Dask matrix as a tensor with paired row and column legs.

    Parameters
    ----------
    function, parameter
        Names for messages.
    x
        Dask array.
    client
        Client whose workers compute it; None for the scheduler of `x.compute()`.
    legs
        Legs (rows, columns) that a matrix is split into; the tensor is (rows[0], columns[0], rows[1], ...).
    """

    def __init__(
        self,
        function: str,
        parameter: str,
        x: Any,
        client: Any = None,
        legs: tuple[Sequence[int], Sequence[int]] | None = None,
    ) -> None:
        if any(math.isnan(n) for n in x.shape):
            raise ArgumentError(
                f"{function}: {parameter} must have chunks of known sizes, got shape {x.shape}; call "
                f"{parameter}.compute_chunk_sizes() first."
            )
        super().__init__(function, parameter, x)
        self._client, self._legs = client, legs
        self._order: tuple[int, ...] | None = None  # of the axes
        self.on_workers = client is not None
        self._chunk_edges = [tuple(itertools.accumulate(sizes, initial=0)) for sizes in x.chunks]
        self.edges = tuple(self._chunk_edges)
        if legs is not None:
            self.shape = tuple(n for pair in zip(*legs, strict=True) for n in pair)
            sides = [_edges_of_legs(sizes, edges) for sizes, edges in zip(legs, self._chunk_edges, strict=True)]
            self.edges = tuple(edges for pair in zip(*sides, strict=True) for edges in pair)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in _HELD_HERE}

    def paired(self, rows: Sequence[int], columns: Sequence[int]) -> DaskSource:
        """Return a matrix as the source of the tensor (rows[0], columns[0], rows[1], columns[1], ...)."""
        return DaskSource(self.function, self.parameter, self._x, self._client, (rows, columns))

    def permuted(self, order: Sequence[int]) -> DaskSource:
        """Return the source of the transposed array, whose axis k is the axis order[k] of this one."""
        out = DaskSource(self.function, self.parameter, self._x, self._client, self._legs)
        out._order = tuple(order)
        out.shape = tuple(self.shape[a] for a in order)
        out.edges = None if self.edges is None else tuple(self.edges[a] for a in order)
        return out

    def rechunk_advice(self, whole: Collection[int]) -> str:
        """Return the call that makes chunks with the axes `whole` undivided."""
        axes = whole if self._order is None else [self._order[a] for a in whole]
        if self._legs is None:
            return super().rechunk_advice(axes)
        after = len(axes) // 2 + 1  # chunks that divide the first pair of legs that is not whole
        sizes = tuple(math.prod(side[after:]) for side in self._legs)
        return f"{self.parameter}.rechunk({sizes})"

    def identity(self) -> dict[str, Any]:
        """Return the name of the array too, which Dask derives from its graph."""
        return super().identity() | {"name": str(self._x.name)}

    def as_passed(self, tile: Tile, a: Array) -> tuple[Tile, Array]:
        """Return a tile with its axes in the order before `permuted`."""
        return self._in_first_order(tile), a if self._order is None else a.transpose(np.argsort(self._order))

    @functools.cached_property
    def _chunks(self) -> Any:
        return self._x.to_delayed()

    def chunks_of(self, tile: Tile) -> Any:
        """Return the nested lists of the delayed chunks of a tile."""
        numbers = [
            [
                k
                for start, stop in ranges
                for k in range(bisect.bisect(edges, start) - 1, bisect.bisect_left(edges, stop))
            ]
            for ranges, edges in zip(self._ranges(tile), self._chunk_edges, strict=True)
        ]
        return self._chunks[np.ix_(*numbers)].tolist()

    def assemble(self, tile: Tile, chunks: Any) -> Array:
        """Return the entries of a tile from the nested lists of its chunks."""
        return self._converted(self._arranged(tile, chunks), tile)

    def _fetch(self, index: tuple[slice, ...]) -> Array:
        import dask

        tile = tuple((part.start, part.stop) for part in index)
        (chunks,) = dask.compute(self.chunks_of(tile), scheduler=self._client)
        return self._arranged(tile, chunks)

    def _ranges(self, tile: Tile) -> list[list[tuple[int, int]]]:
        """Return the ranges of a tile along every axis of the Dask array."""
        tile = self._in_first_order(tile)
        if self._legs is None:
            return [[bounds] for bounds in tile]
        slices = [slice(*bounds) for bounds in tile]
        return [flat_ranges(sizes, slices[side::2]) for side, sizes in enumerate(self._legs)]

    def _arranged(self, tile: Tile, chunks: Any) -> Array:
        """Return the array of a tile from the nested lists of its parts."""
        a = _joined(chunks, 2 if self._legs is not None else len(tile))
        if self._legs is not None:
            widths = [stop - start for start, stop in self._in_first_order(tile)]
            a = pair_legs(a, widths[::2], widths[1::2])
        return a if self._order is None else a.transpose(self._order)

    def _in_first_order(self, tile: Tile) -> Tile:
        """Return a tile with its axes in the order before `permuted`."""
        return tile if self._order is None else tuple(tile[k] for k in np.argsort(self._order))


def _edges_of_legs(sizes: Sequence[int], edges: Sequence[int]) -> list[tuple[int, ...]]:
    """Return, for each leg that an axis with these chunk edges is split into, edges between which chunks are whole.

    One leg is divided by chunks, as far as they align with it; those before it into single indices, and those after it
    not at all.
    """
    aligned = set(edges)
    inner = 1  # entries of an index of leg k
    for k in reversed(range(len(sizes))):
        period = inner * sizes[k]
        if k == 0 or aligned.issuperset(range(0, edges[-1], period)):
            break
        inner = period
    starts = range(0, edges[-1], period)
    divided = [i for i in range(sizes[k] + 1) if all(start + i * inner in aligned for start in starts)]
    return [*(tuple(range(n + 1)) for n in sizes[:k]), tuple(divided), *((0, n) for n in sizes[k + 1 :])]


def _joined(parts: Any, ndim: int) -> Array:
    """Return the array of nested lists of parts; a single one is not copied."""
    first, count = parts, 1
    for _ in range(ndim):
        count *= len(first)
        first = first[0]
    return np.asarray(first) if count == 1 else np.block(parts)
