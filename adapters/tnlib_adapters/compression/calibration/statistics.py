"""Calibration statistics of a running model over text, collected block by block, last to first."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tnlib._typing import Array
from tnlib_adapters.compression.calibration.weighted_moments import WeightedMoments
from tnlib_adapters.compression.methods.out_of_core import Workspace
from tnlib_adapters.compression.progress import Progress, Stage
from tnlib_adapters.files.process_memory import release_free_memory

if TYPE_CHECKING:
    from tnlib_adapters.compression.calibration.weighted_moments import Observed
    from tnlib_adapters.instrument.block_passes import Call, Streams
    from tnlib_adapters.instrument.running_model import Batch, RunningModel
    from tnlib_adapters.instrument.weight_inputs import WeightUses


@dataclass(frozen=True)
class Statistics:
    """Calibration statistics of a text, by weight keys, in memory or read from files at every access.

    See `weighted_moments` for what they mean.

    Parameters
    ----------
    reads
        By input key: sums over tokens of x x^T, weighted by the gradient; for an embedding table the token counts.
    slopes
        Sums of p p^T with the gradient p of a probe at the output; for an unembedding at the input, because the output
        is as wide as the vocabulary.
    scales
        Loss of the output per unit of `rounding_loss`, (1,). Of tables: the sum of |p|^2, and the numbers of tokens and
        of texts.
    """

    reads: Mapping[str, Array] = field(default_factory=dict)
    slopes: Mapping[str, Array] = field(default_factory=dict)
    scales: Mapping[str, Array] = field(default_factory=dict)

    def __reduce__(self) -> tuple[Any, ...]:
        """Send the arrays, and not where they are stored, to another process."""
        return Statistics, (dict(self.reads), dict(self.slopes), dict(self.scales))

    def reads_of_projection(self, k: int, name: str, rows: int) -> Array:
        """Return the input moments of a projection of layer k with so many rows: a bias is the last, of input 1."""
        moments = self.reads[f"{k}.y" if name == "o" else f"{k}.x"]
        return moments[:rows, :rows]


def collect_groups(
    model: RunningModel,
    uses: WeightUses,
    batches: Sequence[Batch],
    progress: Progress,
    *,
    streams: Streams,
    save: Callable[[int, Statistics], None],
    done: Collection[int] = (),
) -> None:
    """Collect the statistics of the batches block by block, last to first, and `save` every group as it is complete.

    The weights of one block are in memory at a time if all do not fit. Streams that are stored are used again, and
    groups that are `done` are left out.
    """
    _Collection(model, uses, batches, streams, progress).run(save, done)


class _Collection:
    """A forward pass, and a backward pass of one probe, that collect the statistics of every group of weights.

    Gradients at the inputs of the blocks are stored beside the streams: "gradient-3" at block 3.
    """

    def __init__(
        self, model: RunningModel, uses: WeightUses, batches: Sequence[Batch], streams: Streams, progress: Progress
    ) -> None:
        from tnlib_adapters.instrument.block_passes import OuterLayers

        self._model, self._uses, self._batches, self._progress = model, uses, batches, progress
        self._outer, self._streams, self._n = OuterLayers(model), streams, len(model.layers)
        self._workspace = None if model.fits_in_memory else Workspace(0, lambda: streams.folder)
        self._passes = (*(f"block {k + 1} of {self._n}" for k in reversed(range(self._n))), "embeddings")

    def run(self, save: Callable[[int, Statistics], None], done: Collection[int]) -> None:
        """Collect the statistics of all groups that are not done."""
        from tnlib_adapters.instrument.block_passes import forward
        from tnlib_adapters.instrument.stored_weights import OUTSIDE

        calls = forward(self._outer, self._streams, self._show_forward)
        if not any(self._streams.has(f"gradient-{k}") for k in range(self._n + 1)):
            self._store_output()
        for k in reversed(range(self._n)):
            if k not in done:
                save(k, self._statistics(k, self._of_block(k, calls)))
            self._streams.remove(f"gradient-{k + 1}")
            release_free_memory()
        if OUTSIDE not in done and any(use.group == OUTSIDE for use in self._uses.values()):
            save(OUTSIDE, self._statistics(OUTSIDE, self._outside()))
        self._streams.remove("gradient-0")
        self._show_backward(OUTSIDE - 1, 0)

    def _show_forward(self, k: int, b: int) -> None:
        """Show that a batch enters a block in the forward pass."""
        batches = self._streams.batches
        stage = Stage("running the model", f"block {k + 1} of {self._n}", mean_tokens(batches))
        self._progress(stage, k * len(batches) + b + 1, self._n * len(batches))

    def _show_backward(self, group: int, b: int) -> None:
        """Show that a batch enters the backward pass: of a block, last to first, or of the embeddings."""
        n_batches, position = len(self._batches), self._n - 1 - group
        detail = self._passes[position] if position < len(self._passes) else ""
        stage = Stage("collecting statistics", detail, mean_tokens(self._batches))
        self._progress(stage, position * n_batches + b, len(self._passes) * n_batches)

    def _statistics(self, group: int, observed: Iterable[Observed]) -> Statistics:
        from tnlib_adapters.instrument.weight_inputs import of_group

        sums = WeightedMoments(self._model, of_group(self._uses, group), self._workspace)
        for batch, of_batch in zip(self._batches, observed, strict=True):
            sums.add(batch, of_batch)
        return Statistics(*sums.finish())

    def _store_output(self) -> None:
        """Store the gradients of the probe at the output of the last block."""
        from tnlib_adapters.instrument.weight_inputs import observe_output

        for b, batch in enumerate(self._batches):
            x = self._streams.read(f"stream-{self._n}", b)
            self._streams.write(
                f"gradient-{self._n}", b, observe_output(self._outer, x, batch, {}, self._generator(b))[2]
            )
        self._streams.finish(f"gradient-{self._n}")

    def _of_block(self, k: int, calls: Sequence[Sequence[Call]]) -> Iterator[Observed]:
        """Yield inputs and gradients in a block, by batch, and store the gradients at its input."""
        from tnlib_adapters.instrument.weight_inputs import observe_block, of_group

        uses = of_group(self._uses, k)
        for b, batch in enumerate(self._batches):
            self._show_backward(k, b)
            x, gradient = self._streams.read(f"stream-{k}", b), self._streams.read(f"gradient-{k + 1}", b)
            reads, slopes, at_stream = observe_block(self._model, k, x, calls[b][k], batch, uses, gradient)
            self._streams.write(f"gradient-{k}", b, at_stream)
            yield reads, slopes
        self._streams.finish(f"gradient-{k}")

    def _outside(self) -> Iterator[Observed]:
        """Yield inputs and gradients of embeddings and unembeddings, by batch."""
        from tnlib_adapters.instrument.stored_weights import OUTSIDE
        from tnlib_adapters.instrument.weight_inputs import observe_input, observe_output, of_group

        uses = of_group(self._uses, OUTSIDE)
        heads = any(use.predicts for use in uses.values())
        for b, batch in enumerate(self._batches):
            self._show_backward(OUTSIDE, b)
            reads, slopes = observe_input(self._outer, batch, uses, self._streams.read("gradient-0", b))
            if heads:
                x = self._streams.read(f"stream-{self._n}", b)
                of_heads = observe_output(self._outer, x, batch, uses, self._generator(b))
                reads, slopes = {**reads, **of_heads[0]}, {**slopes, **of_heads[1]}
            yield reads, slopes

    def _generator(self, b: int) -> Any:
        """Return the generator for the probe of one batch, seeded per batch so that resuming is reproducible."""
        import torch

        return torch.Generator().manual_seed(2 * b)


def mean_tokens(batches: Sequence[Batch]) -> int:
    """Return the mean number of tokens of a batch."""
    return sum(batch.n_tokens for batch in batches) // max(1, len(batches))
