"""Collection of calibration statistics by workers: the graph of its tasks.

A chunk passes the blocks independently of the other chunks: forward, and backward with the gradients of both probes.
The moments of a group are summed over chunks before its components are made, and these are made before the second
probe passes the block. The first probe is ahead of the second meanwhile, so that all workers are busy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from tnlib_adapters.compression.activation_statistics.statistics import mean_tokens
from tnlib_adapters.compression.cluster.chunk_statistics import (
    StatisticsJob,
    factorise_group,
    finish_group,
    make_components,
    run_chunk,
    store_gates,
    store_gradients,
    store_moments,
)
from tnlib_adapters.compression.cluster.connection import Cluster, Task
from tnlib_adapters.compression.request import Progress, Stage

if TYPE_CHECKING:
    from tnlib_adapters.instrument.chunked_streams import ChunkedStreams

_BLOCKS_AHEAD = 4  # of the first probe: the moments of every chunk of a block are on disk until they are summed


@dataclass(frozen=True)
class Collection:
    """Tasks that collect the statistics of groups, and factorise their weights.

    Parameters
    ----------
    job
        What all tasks share.
    streams
        Streams of all batches.
    groups
        Groups of weights: all blocks of the model, and -1 if weights outside are compressed.
    done
        Groups whose statistics are saved.
    """

    job: StatisticsJob
    streams: ChunkedStreams
    groups: Sequence[int]
    done: Sequence[int]

    def run(self, cluster: Cluster, progress: Progress) -> dict[str, Any]:
        """Return the factorised weights by module, see `store_part`."""
        self.job.write_batches(self.streams.batches)
        results = cluster.run([*self._tasks()], progress)
        return {module: part for name, own in results.items() if _is_last(name) for module, part in own.items()}

    def _tasks(self) -> Iterator[Task]:
        """Yield all tasks, the most urgent ones first."""
        yield from self._forward(self._observed)
        if self._n_blocks - 1 not in self.done:
            for c in self._observed:
                call = partial(store_gradients, self.job, c, self._n_blocks)
                yield Task(f"gradients {c}", call, (f"forward {self._n_blocks - 1} {c}",), self._stage("output"))
        for group in self._missing:
            yield from self._of_group(group)
        yield from self._forward(range(len(self._observed), len(self.streams.chunks)))  # of the fit alone
        for group in self.done:
            yield Task(f"saved {group}", partial(factorise_group, self.job, group), stage=Stage("factorising"))

    @property
    def _n_blocks(self) -> int:
        return max(self.groups) + 1

    @property
    def _observed(self) -> range:
        """Chunks that statistics are collected of."""
        return range(sum(own.start < self.job.n_observed for own, _ in self.streams.chunks))

    @property
    def _missing(self) -> list[int]:
        """Groups that are not done, in the order of the backward pass."""
        return [group for group in sorted(self.groups, reverse=True) if group not in self.done]

    def _forward(self, chunks: Sequence[int]) -> Iterator[Task]:
        tokens = mean_tokens(self.streams.batches)
        for k in range(self._n_blocks):
            stage = Stage("running the model", f"block {k + 1} of {self._n_blocks}", tokens)
            for c in chunks:
                after = (f"forward {k - 1} {c}",) if k else ()
                yield Task(f"forward {k} {c}", partial(run_chunk, self.job, c, k), after, stage)

    def _of_group(self, group: int) -> Iterator[Task]:
        """Yield the tasks of a block, or of the group outside."""
        job, chunks = self.job, self._observed
        above = group + 1  # the block at whose input the gradients are read
        stage = self._stage(f"block {above} of {self._n_blocks}" if above else "embeddings")
        read = {c: [f"forward {self._n_blocks - 1} {c}"] for c in chunks}
        if above == self._n_blocks:
            read = {c: [f"gradients {c}"] for c in chunks}
        ahead = [f"components {own}" for own in self._missing if own == group + _BLOCKS_AHEAD]
        for c in chunks:
            after = [*read[c], *ahead, *([f"moments {above} {c}"] if above in self._missing else [])]
            yield Task(f"moments {group} {c}", partial(store_moments, job, c, group), tuple(after), stage)
        moments = tuple(f"moments {group} {c}" for c in chunks)
        yield Task(f"components {group}", partial(make_components, job, group, len(chunks)), moments, stage)
        for c in chunks:
            before = [*read[c], *([f"gates {above} {c}"] if above in self._missing else [])]
            call = partial(store_gates, job, c, group)
            yield Task(f"gates {group} {c}", call, tuple(before), stage, (f"components {group}",))
        gates = tuple(f"gates {group} {c}" for c in chunks)
        finish = partial(finish_group, job, group, len(chunks))
        yield Task(f"parts {group}", finish, gates, stage, (f"components {group}",))

    def _stage(self, detail: str) -> Stage:
        tokens = sum(batch.n_tokens for batch in self.streams.batches[: self.job.n_observed])
        return Stage("collecting statistics", detail, tokens // max(1, len(self._observed)))


def _is_last(name: str) -> bool:
    return name.startswith(("parts ", "saved "))
