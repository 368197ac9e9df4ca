"""Passes of a running model over a text that collect the statistics of its weights, block by block."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

import torch

from tnlib_adapters.compression.calibration.group_moments import GroupMoments, RoundingMoments
from tnlib_adapters.compression.calibration.statistics import Statistics
from tnlib_adapters.compression.methods.out_of_core import Workspace
from tnlib_adapters.compression.progress import Progress, Stage
from tnlib_adapters.factors.model_weights import OUTSIDE
from tnlib_adapters.files.process_memory import release_free_memory
from tnlib_adapters.instrument.block_passes import Call, OuterLayers, Streams, forward
from tnlib_adapters.instrument.running_model import Batch, RunningModel
from tnlib_adapters.instrument.weight_inputs import (
    WeightUses,
    observe_block,
    observe_input,
    observe_output,
    of_group,
)

MomentsOf = Callable[[RunningModel, WeightUses, Sequence[Batch], Workspace], GroupMoments]


class StatisticsPasses:
    """A forward pass, and a backward pass of one probe, that collect the statistics of every group of weights.

    `moments_of` makes the sums of a group of weights. The weights of one block are in memory at a time if all do not
    fit; `workspace` has what the sums keep of a block. Streams that are stored are used again. Gradients at the inputs
    of the blocks are stored beside them: "gradient-3" at block 3.
    """

    def __init__(
        self,
        model: RunningModel,
        uses: WeightUses,
        batches: Sequence[Batch],
        streams: Streams,
        workspace: Workspace,
        progress: Progress,
        moments_of: MomentsOf = RoundingMoments,
    ) -> None:
        self._model, self._uses, self._batches, self._progress = model, uses, batches, progress
        self._outer, self._streams, self._n = OuterLayers(model), streams, len(model.layers)
        self._workspace, self._moments_of = workspace, moments_of

    def run(self, done: Collection[int] = (), *, keeps_streams: bool = True) -> Iterator[tuple[int, Statistics]]:
        """Yield every group of weights that is not `done`, blocks from the last to the first, and its statistics.

        With `keeps_streams` those at the inputs of blocks stay for the fit of layers.
        """
        calls = self.run_forward([k for k in range(self._n) if keeps_streams or k not in done])
        outside = {} if OUTSIDE in done else of_group(self._uses, OUTSIDE)
        sums = self._moments(outside)
        has_gradients = any(self._streams.has(f"gradient-{k}") for k in range(self._n + 1))
        if not has_gradients or any(use.predicts for use in outside.values()):
            self._at_output(sums, outside, store=not has_gradients)
        for k in reversed(range(self._n)):
            if k not in done:
                yield k, self._of_block(k, calls)
            self._streams.remove(f"gradient-{k + 1}")
            if not keeps_streams:
                self._streams.remove(f"stream-{k}")
            release_free_memory()
        if outside:
            self._at_input(sums, outside)
            yield OUTSIDE, sums.finish()
        self._streams.remove("gradient-0")
        self._show_backward(OUTSIDE - 1, 0)

    def run_forward(self, inputs: Sequence[int] | None = None) -> list[list[Call]]:
        """Store the streams at the inputs of these blocks, None for all, and at the output of the last.

        Returns the calls of the blocks, by batch.
        """
        return forward(self._outer, self._streams, self._show_forward, inputs=inputs)

    def _moments(self, uses: WeightUses) -> GroupMoments:
        return self._moments_of(self._model, uses, self._batches, self._workspace)

    def _show_forward(self, k: int, b: int) -> None:
        """Show that a batch enters a block in the forward pass."""
        batches = self._streams.batches
        stage = Stage("running the model", f"block {k + 1} of {self._n}")
        self._progress(stage, k * len(batches) + b + 1, self._n * len(batches))

    def _show_backward(self, group: int, b: int) -> None:
        """Show that a batch enters the backward pass: of a block, last to first, or of the embeddings."""
        total, done = (self._n + 1) * len(self._batches), (self._n - 1 - group) * len(self._batches) + b
        part = "embeddings" if group < 0 else f"block {group + 1} of {self._n}"
        self._progress(Stage("collecting statistics", part if done < total else ""), done, total)

    def _at_output(self, sums: GroupMoments, uses: WeightUses, *, store: bool) -> None:
        """Add inputs and gradients of unembeddings, and `store` the gradients at the output of the last block."""
        for b, batch in enumerate(self._batches):
            x = self._streams.read(f"stream-{self._n}", b)
            generator = torch.Generator().manual_seed(2 * b)  # by batch, so that resuming is reproducible
            reads, slopes, gradient = observe_output(self._outer, x, batch, uses, generator)
            sums.add(batch, reads, slopes)
            del slopes  # at all logits, which would stay in memory while the next batch runs
            if store:
                self._streams.write(f"gradient-{self._n}", b, gradient)
        if store:
            self._streams.finish(f"gradient-{self._n}")

    def _of_block(self, k: int, calls: Sequence[Sequence[Call]]) -> Statistics:
        """Return the statistics of a block, and store the gradients at its input."""
        uses = of_group(self._uses, k)
        sums = self._moments(uses)
        for b, batch in enumerate(self._batches):
            self._show_backward(k, b)
            x, gradient = self._streams.read(f"stream-{k}", b), self._streams.read(f"gradient-{k + 1}", b)
            reads, slopes, at_stream = observe_block(self._model, k, x, calls[b][k], batch, uses, gradient)
            self._streams.write(f"gradient-{k}", b, at_stream)
            sums.add(batch, reads, slopes)
            del x, gradient, reads, slopes, at_stream  # those of the last batch, while sums are finished
        self._streams.finish(f"gradient-{k}")
        return sums.finish()

    def _at_input(self, sums: GroupMoments, uses: WeightUses) -> None:
        """Add inputs and gradients of tables of embeddings."""
        for b, batch in enumerate(self._batches):
            self._show_backward(OUTSIDE, b)
            reads, slopes, _ = observe_input(self._outer, batch, uses, self._streams.read("gradient-0", b))
            sums.add(batch, reads, slopes)
