"""Streams of batches in chunks: one folder for every chunk of batches, which workers pass independently."""

from __future__ import annotations

import itertools
import secrets
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tnlib_adapters.instrument.block_passes import Streams
from tnlib_adapters.instrument.running_model import Batch

_CHUNKS = 8  # the same for any number of workers: sums over chunks do not depend on it


class ChunkedStreams(Streams):
    """Streams of all batches, read and written as those of `Streams`.

    Parameters
    ----------
    folder, batches, width, dtype
        As in `Streams`; the chunks are in folders of `folder`.
    n_first
        Batches that form chunks of their own, the first ones; at most 8 chunks, and 8 of the other batches.

    Attributes
    ----------
    chunks
        Ranges of the batches of every chunk, and the streams of these alone.
    """

    def __init__(
        self,
        folder: Path,
        batches: Sequence[Batch],
        width: int,
        n_first: int,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(folder, batches, width, dtype)
        ranges = [*_split(0, n_first), *_split(n_first, len(batches))]
        self.chunks = [
            (own, ChunkStreams(folder / f"chunk-{c}", batches[own.start : own.stop], width, dtype))
            for c, own in enumerate(ranges)
        ]
        self._starts_of_chunks = [own.start for own in ranges]

    def has(self, name: str, n: int | None = None) -> bool:
        """Test if streams are stored of the first n batches, None for all."""
        return all(streams.has(name) for own, streams in self.chunks if n is None or own.start < n)

    def write(self, name: str, k: int, stream: Tensor) -> None:
        """Store the stream of the k-th batch, to be read after `finish`."""
        batches, streams = self._chunk(k)
        streams.write(name, k - batches.start, stream)

    def read(self, name: str, k: int, texts: range | None = None) -> Tensor:
        """Return the stream of the k-th batch, or of some of its texts, (texts, tokens, width)."""
        batches, streams = self._chunk(k)
        return streams.read(name, k - batches.start, texts)

    def finish(self, name: str) -> None:
        """Declare the streams of all batches stored that were written to."""
        for _, streams in self.chunks:
            streams.finish(name)

    def remove(self, name: str) -> None:
        """Delete the streams of all batches."""
        for _, streams in self.chunks:
            streams.remove(name)

    def _chunk(self, k: int) -> tuple[range, Streams]:
        return self.chunks[bisect_right(self._starts_of_chunks, k) - 1]


class ChunkStreams(Streams):
    """Streams of one chunk, in a folder of its own; two processes may write the same ones at the same time."""

    def __init__(self, folder: Path, batches: Sequence[Batch], width: int, dtype: torch.dtype) -> None:
        super().__init__(folder, batches, width, dtype)
        self._own = secrets.token_hex(8)

    def write(self, name: str, k: int, stream: Tensor) -> None:
        """Store the stream of the k-th batch, to be read after `finish`."""
        self.folder.mkdir(exist_ok=True)
        super().write(f"{name}.{self._own}", k, stream)

    def finish(self, name: str) -> None:
        """Declare the streams of all batches stored; without effect if none was written."""
        partial = self.folder / f"{name}.{self._own}.partial"
        if partial.exists():
            partial.replace(self.folder / name)


def _split(start: int, stop: int) -> list[range]:
    """Return at most 8 ranges of nearly the same length."""
    n = min(_CHUNKS, stop - start)
    ends = np.linspace(start, stop, n + 1).round().astype(int).tolist()
    return [range(first, last) for first, last in itertools.pairwise(ends) if last > first]
