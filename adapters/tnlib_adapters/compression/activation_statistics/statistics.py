"""Calibration statistics of a running model over text, collected block by block.

They are input moments, moments of output gradients, and gate derivatives of the components of a weight.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from tnlib._typing import Array
from tnlib_adapters.compression.activation_statistics.moment_sums import (
    MomentSums,
    add_to,
    on_host,
    second_moments_on_device,
)
from tnlib_adapters.compression.activation_statistics.weighted_moments import WeightedMoments
from tnlib_adapters.compression.methods.components import Components
from tnlib_adapters.compression.methods.out_of_core import StoredArrays, Workspace
from tnlib_adapters.compression.progress import Progress, Stage, quiet
from tnlib_adapters.files.process_memory import release_free_memory

if TYPE_CHECKING:
    import torch

    from tnlib_adapters.compression.activation_statistics.weighted_moments import Observed
    from tnlib_adapters.instrument.block_passes import Frame, Streams
    from tnlib_adapters.instrument.running_model import Batch, RunningModel
    from tnlib_adapters.instrument.weight_inputs import Place, Places


@dataclass(frozen=True)
class Statistics:
    """Calibration statistics of a text, by weight keys, in memory or read from files at every access.

    Parameters
    ----------
    reads
        By input key: sums over tokens of x x^T; for an embedding table the token counts.
    slopes
        Sums of p p^T with the gradient p of a probe at the output; for an unembedding at the input, because the output
        is as wide as the vocabulary.
    gates
        Means of squares of the derivative with respect to a gate on each component, over texts and probes, or over
        tokens for language models. Half of it is, to lowest order, the loss of cosine similarity of the embeddings, or
        the increase of the divergence of the predictions, when the component is removed. For rounding, what
        `WeightedMoments.finish` returns.
    """

    reads: Mapping[str, Array] = field(default_factory=dict)
    slopes: Mapping[str, Array] = field(default_factory=dict)
    gates: Mapping[str, Array] = field(default_factory=dict)

    def __reduce__(self) -> tuple[Any, ...]:
        """Send the arrays, and not where they are stored, to another process."""
        return Statistics, (dict(self.reads), dict(self.slopes), dict(self.gates))

    def reads_of_projection(self, k: int, name: str, rows: int) -> Array:
        """Return the input moments of a projection of layer k with so many rows: a bias is the last, of input 1."""
        moments = self.reads[f"{k}.y" if name == "o" else f"{k}.x"]
        return moments[:rows, :rows]


# group index and its moments -> components of its weights, by key
ComponentsOf = Callable[[int, Statistics], Mapping[str, Components]]


def collect_reads(
    model: RunningModel,
    places: Places,
    batches: Sequence[Batch],
    progress: Progress = quiet,
    workspace: Workspace | None = None,
) -> Mapping[str, Array]:
    """Return by key the input moments over the batches: sums over tokens, for an embedding table the counts.

    Those of one block are in memory at a time, and the others as far as `workspace` admits them.
    """
    from tnlib_adapters.instrument.weight_inputs import read

    moments = StoredArrays(workspace or Workspace())
    total = len({*range(len(model.layers)), *(place.group for place in places.values())}) * len(batches)
    stage, done = Stage("reading inputs", tokens=mean_tokens(batches)), itertools.count(1)
    progress(stage, 0, total)
    place_of = {place.reads: place for place in places.values()}
    for _, of_group in itertools.groupby(read(model, batches, places), key=lambda observed: observed[0]):
        sums: dict[str, Array] = {}
        for _, _, reads in of_group:
            for key, x in reads.items():
                add_to(sums, key, _moments(x, place_of[key]).astype(np.float64))
            progress(stage, next(done), total)
        moments.add(sums)
    return moments


def collect(
    model: RunningModel,
    places: Places,
    batches: Sequence[Batch],
    progress: Progress = quiet,
    *,
    components: ComponentsOf | None = None,
    streams: Streams | None = None,
    save: Callable[[int, Statistics], None] | None = None,
    done: Collection[int] = (),
    rounding: bool = False,
) -> Statistics:
    """Return the statistics of the batches, collected block by block, last to first.

    Parameters
    ----------
    model
        The model; the weights of one block are in memory at a time if all do not fit.
    places
        Weights, see `find_places`.
    batches
        Batches of the text.
    progress
        Called as progress(stage, done, total).
    components
        Components on which gates are measured; None for moments alone.
    streams
        For streams between blocks; those that are stored are used again. None for a temporary folder.
    save
        Called with every group as it is done, in the place of a result; None to return all groups.
    done
        Groups that are saved already.
    rounding
        If True, collect `WeightedMoments` instead of moments and gates.
    """
    from tnlib_adapters.instrument.block_passes import Streams

    streams = streams or Streams.temporary(batches, model.sizes.d_model)
    collection = _Collection(model, places, batches, streams, components, progress, rounding=rounding)
    kept = Statistics({}, {}, {})

    def keep(_: int, statistics: Statistics) -> None:
        for part in ("reads", "slopes", "gates"):
            getattr(kept, part).update(getattr(statistics, part))

    collection.run(save or keep, done)
    return kept


class _Collection:
    """Passes over the batches that collect the statistics of every group of weights."""

    def __init__(
        self,
        model: RunningModel,
        places: Places,
        batches: Sequence[Batch],
        streams: Streams,
        components: ComponentsOf | None,
        progress: Progress,
        *,
        rounding: bool,
    ) -> None:
        from tnlib_adapters.instrument.block_passes import Frame

        self._model, self._places, self._batches = model, places, batches
        self._components, self._progress, self._rounding = components, progress, rounding
        self._frame, self._streams = Frame(model), streams
        self._n = len(model.layers)
        self._probes = (0,) if components is None else (0, 1)
        self._workspace = Workspace(0, lambda: streams.folder)
        self._passes = (*(f"block {k + 1} of {self._n}" for k in reversed(range(self._n))), "embeddings")
        self._observations = Observations(self._frame, places, batches, streams, self._show_backward)

    def run(self, save: Callable[[int, Statistics], None], done: Collection[int]) -> None:
        """Collect the statistics of all groups that are not done."""
        from tnlib_adapters.instrument.block_passes import forward
        from tnlib_adapters.instrument.stored_weights import OUTSIDE

        calls = forward(self._frame, self._streams, self._show_forward)
        stored = (f"gradient-{self._probes[-1]}-{k}" for k in range(self._n + 1))
        if not any(self._streams.has(name) for name in stored):
            for probe in self._probes:
                self._observations.store_output(probe)
        for k in reversed(range(self._n)):
            if k not in done:
                save(k, self._statistics(k, partial(self._observations.of_block, k, calls=calls)))
            for probe in self._probes:
                self._streams.remove(f"gradient-{probe}-{k + 1}")
            release_free_memory()
        if OUTSIDE not in done and any(place.group == OUTSIDE for place in self._places.values()):
            save(OUTSIDE, self._statistics(OUTSIDE, self._observations.outside))
        for probe in self._probes:
            self._streams.remove(f"gradient-{probe}-0")
        self._show_backward(OUTSIDE - 1, 0, 0)

    def _show_forward(self, k: int, b: int) -> None:
        """Show that a batch enters a block in the forward pass."""
        batches = self._streams.batches
        stage = Stage("running the model", f"block {k + 1} of {self._n}", mean_tokens(batches))
        self._progress(stage, k * len(batches) + b + 1, self._n * len(batches))

    def _show_backward(self, group: int, probe: int, b: int) -> None:
        """Show that a batch enters a backward pass: of a block, last to first, or of the embeddings."""
        per_block, position = len(self._probes) * len(self._batches), self._n - 1 - group
        detail = self._passes[position] if position < len(self._passes) else ""
        stage = Stage("collecting statistics", detail, mean_tokens(self._batches))
        self._progress(stage, position * per_block + probe * len(self._batches) + b, len(self._passes) * per_block)

    def _statistics(self, group: int, observed: Callable[[int], Iterable[Observed]]) -> Statistics:
        from tnlib_adapters.instrument.weight_inputs import of_group

        workspace = None if self._model.fits_in_memory else self._workspace
        if self._rounding:
            sums = WeightedMoments(self._model, of_group(self._places, group), workspace)
            for batch, of_batch in zip(self._batches, observed(0), strict=True):
                sums.add(batch, of_batch)
            return Statistics(*sums.finish())
        moments = sum_moments(self._model, self._places, observed(0), workspace)
        if self._components is None:
            return moments
        self._model.drop()  # tables are decomposed in three times their size
        components = self._components(group, moments)
        gates = sum_gates(self._model, self._places, components, observed(1))
        self._model.drop()  # components are sorted by gates in twice their size
        return replace(moments, gates=mean_gates(self._model, self._batches, gates))


class Observations:
    """Inputs of weights, and gradients of a probe at their outputs, batch by batch, from streams.

    Parameters
    ----------
    frame, places
        The running model, and its weights.
    batches
        Batches that are observed, the first of those of `streams`.
    streams
        Inputs of all blocks. Gradients at these are stored beside them: "gradient-1-3" of probe 1 at block 3.
    step
        Called with the indices of group, probe and batch before each.
    """

    def __init__(
        self,
        frame: Frame,
        places: Places,
        batches: Sequence[Batch],
        streams: Streams,
        step: Callable[[int, int, int], None],
    ) -> None:
        self._frame, self._places, self._batches, self._streams = frame, places, batches, streams
        self._n, self._step = len(frame.model.layers), step

    def store_output(self, probe: int) -> None:
        """Store the gradients of a probe at the output of the last block."""
        from tnlib_adapters.instrument.weight_inputs import observe_output

        for b, batch in enumerate(self._batches):
            x = self._streams.read(f"stream-{self._n}", b)
            gradient = observe_output(self._frame, x, batch, {}, self._generator(b, probe))[2]
            self._streams.write(f"gradient-{probe}-{self._n}", b, gradient)
        self._streams.finish(f"gradient-{probe}-{self._n}")

    def of_block(self, k: int, probe: int, calls: Sequence[Sequence[Any]]) -> Iterator[Observed]:
        """Yield inputs and gradients in a block, by batch, and store the gradients at its input."""
        from tnlib_adapters.instrument.weight_inputs import observe_block, of_group

        model, places = self._frame.model, of_group(self._places, k)
        for b, batch in enumerate(self._batches):
            self._step(k, probe, b)
            x, gradient = self._streams.read(f"stream-{k}", b), self._streams.read(f"gradient-{probe}-{k + 1}", b)
            reads, slopes, at_stream = observe_block(model, k, x, calls[b][k], batch, places, gradient)
            self._streams.write(f"gradient-{probe}-{k}", b, at_stream)
            yield reads, slopes
        self._streams.finish(f"gradient-{probe}-{k}")

    def outside(self, probe: int) -> Iterator[Observed]:
        """Yield inputs and gradients of embeddings and unembeddings, by batch."""
        from tnlib_adapters.instrument.stored_weights import OUTSIDE
        from tnlib_adapters.instrument.weight_inputs import observe_input, observe_output, of_group

        places = of_group(self._places, OUTSIDE)
        heads = any(place.predicts for place in places.values())
        for b, batch in enumerate(self._batches):
            self._step(OUTSIDE, probe, b)
            reads, slopes = observe_input(self._frame, batch, places, self._streams.read(f"gradient-{probe}-0", b))
            if heads:
                x = self._streams.read(f"stream-{self._n}", b)
                of_heads = observe_output(self._frame, x, batch, places, self._generator(b, probe))
                reads, slopes = {**reads, **of_heads[0]}, {**slopes, **of_heads[1]}
            yield reads, slopes

    def _generator(self, b: int, probe: int) -> torch.Generator:
        """Return the generator for a probe of one batch, seeded per batch so that resuming is reproducible."""
        import torch

        return torch.Generator().manual_seed(2 * b + probe)


def sum_moments(
    model: RunningModel, places: Places, observed: Iterable[Observed], workspace: Workspace | None
) -> Statistics:
    """Return the moments of inputs and gradients, summed over batches.

    With a workspace, for a model that does not fit in memory, inputs and gradients are kept in its files, so that one
    sum is in memory at a time; sums are read from files at every access.
    """
    place_of = {place.reads: place for place in places.values()}
    counts, read_sums, slope_sums = dict[str, Array](), MomentSums(workspace), MomentSums(workspace)
    for batch_reads, batch_slopes in observed:
        for key, x in batch_reads.items():
            if place_of[key].is_table:
                add_to(counts, key, _moments(x, place_of[key]))
            else:
                read_sums.add(key, x)
        for key, slope in batch_slopes.items():
            if places[key].predicts:
                model.load(places[key].group)
                slope = slope @ places[key].module.get_parameter("weight").float()
            slope_sums.add(key, slope)
    if workspace is not None:
        model.drop()
    reads = read_sums.finish()
    reads.add(counts)
    return Statistics(reads, slope_sums.finish())


def sum_gates(
    model: RunningModel, places: Places, components: Mapping[str, Components], observed: Iterable[Observed]
) -> dict[str, Array]:
    """Return by weight the squares of the derivatives with respect to gates, summed over batches."""
    sides, gates = {key: _sides(own, model.device) for key, own in components.items()}, dict[str, Array]()
    for batch_reads, batch_slopes in observed:
        for key, own in _gates(model, places, sides, batch_reads, batch_slopes).items():
            add_to(gates, key, own)
    return gates


def mean_gates(model: RunningModel, batches: Sequence[Batch], sums: Mapping[str, Array]) -> dict[str, Array]:
    """Return sums over these batches as means over texts, or over tokens for language models."""
    count = sum(batch.n_tokens if model.predicts else len(batch.ids) for batch in batches)
    return {key: total / count for key, total in sums.items()}


def mean_tokens(batches: Sequence[Batch]) -> int:
    """Return the mean number of tokens of a batch."""
    return sum(batch.n_tokens for batch in batches) // max(1, len(batches))


def _gates(
    model: RunningModel,
    places: Places,
    sides: Mapping[str, tuple[torch.Tensor, torch.Tensor]],
    reads: Mapping[str, torch.Tensor],
    slopes: Mapping[str, torch.Tensor],
) -> dict[str, Array]:
    """Return the sum over texts of squared derivatives with respect to a gate on each component, of one batch."""
    tied, gates = model.wiring.tied_key, {}
    for key, (left, right) in sides.items():
        x = reads[places[key].reads]
        # a table lookup has row -1 at padding, where slopes are 0
        on_left = left[x] if places[key].is_table else x[..., : len(left)] @ left  # b t [m] c
        derivatives = (on_left * (slopes[key] @ right.T)).sum(1)  # b [t] c
        if tied is not None and model.wiring.is_embedding(key):  # the same gate acts on both uses of the table
            derivatives += ((reads[tied] @ right.T) * (slopes[tied] @ left)).sum(1)  # b [t] c
        gates[key] = derivatives.cpu().double().square().sum(0).numpy()
    return gates


def _moments(x: torch.Tensor, place: Place) -> Array:
    """Return the sum of x x^T over tokens; for token ids, how often each row of the table occurs."""
    if not place.is_table:
        return on_host(second_moments_on_device(x))
    ids = x[x >= 0].cpu().numpy()
    return np.bincount(ids, minlength=len(place.module.get_parameter("weight"))).astype(np.float32)


def _sides(components: Components, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    import torch

    left, right = (torch.from_numpy(side).float().to(device) for side in (components.left, components.right))
    return left, right
