"""Passes of a running model over a text that collect the statistics of its weights, by which these are factorised."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from itertools import chain, starmap

import torch

from tnlib_adapters.compression.calibration.group_moments import ComponentMoments, GroupMoments, RoundingMoments
from tnlib_adapters.compression.calibration.resumed_run import CalibrationFolder, origin_of
from tnlib_adapters.compression.calibration.statistics import (
    Decompositions,
    GroupFactorisation,
    Statistics,
    fold_biases,
    read_group,
)
from tnlib_adapters.compression.compressed_part import compressed_weights
from tnlib_adapters.compression.methods.components import Components
from tnlib_adapters.compression.methods.decompositions import has_rotary_or_norms
from tnlib_adapters.compression.methods.out_of_core import LazyPart, Workspace
from tnlib_adapters.compression.progress import Progress, Stage
from tnlib_adapters.compression.request import Request
from tnlib_adapters.compression.text import first_batches
from tnlib_adapters.factors.model_weights import OUTSIDE, ModelWeight
from tnlib_adapters.factors.projections import put_together, take_apart
from tnlib_adapters.files.process_memory import release_free_memory
from tnlib_adapters.instrument.block_passes import Call, OuterLayers, Streams, forward
from tnlib_adapters.instrument.running_model import Batch, RunningModel
from tnlib_adapters.instrument.stored_weights import Change, Group
from tnlib_adapters.instrument.weight_inputs import (
    WeightUses,
    find_uses,
    observe_block,
    observe_input,
    observe_output,
    of_group,
)

MomentsOf = Callable[[WeightUses], GroupMoments]  # uses of a group of weights -> its sums over the batches


class StatisticsPasses:
    """A forward pass, and a backward pass of one probe, that collect the statistics of every group of weights.

    The weights of one block are in memory at a time if all do not fit. Streams that are stored are used again.
    Gradients at the inputs of the blocks are stored beside them: "gradient-3" at block 3.
    """

    def __init__(
        self,
        model: RunningModel,
        uses: WeightUses,
        batches: Sequence[Batch],
        streams: Streams,
        moments_of: MomentsOf,
        progress: Progress,
    ) -> None:
        self._model, self._uses, self._batches, self._progress = model, uses, batches, progress
        self._outer, self._streams, self._n = OuterLayers(model), streams, len(model.layers)
        self._moments_of = moments_of

    def run(self, done: Collection[int] = ()) -> Iterator[tuple[int, Statistics]]:
        """Yield every group of weights that is not `done`, blocks from the last to the first, and its statistics."""
        calls = self.run_forward([k for k in range(self._n) if self._streams.keeps_inputs or k not in done])
        outside = {} if OUTSIDE in done else of_group(self._uses, OUTSIDE)
        sums = self._moments_of(outside)
        has_gradients = any(self._streams.has(f"gradient-{k}") for k in range(self._n + 1))
        if not has_gradients or any(use.predicts for use in outside.values()):
            self._at_output(sums, outside, store=not has_gradients)
        for k in reversed(range(self._n)):
            if k not in done:
                yield k, self._of_block(k, calls)
            self._streams.remove(f"gradient-{k + 1}")
            if not self._streams.keeps_inputs:
                self._streams.remove(f"stream-{k}")
            release_free_memory()
        if outside:
            self._at_input(sums, outside)
            self._model.drop()  # decompositions read the tables themselves
            yield OUTSIDE, sums.finish()
        self._streams.remove("gradient-0")
        self._show_backward(OUTSIDE - 1, 0)

    def run_forward(self, inputs: Sequence[int] | None = None) -> list[list[Call]]:
        """Store the streams at the inputs of these blocks, None for those of the fit, and at the output of the last.

        Returns the calls of the blocks, by batch.
        """
        n_batches = len(self._streams.batches)
        if inputs is None:
            inputs = range(self._n) if self._streams.keeps_inputs else ()

        def show(k: int, b: int) -> None:
            stage = Stage("running the model", f"block {k + 1} of {self._n}")
            self._progress(stage, k * n_batches + b + 1, self._n * n_batches)

        return forward(self._outer, self._streams, show, inputs=inputs)

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
        sums = self._moments_of(uses)
        for b, batch in enumerate(self._batches):
            self._show_backward(k, b)
            x, gradient = self._streams.read(f"stream-{k}", b), self._streams.read(f"gradient-{k + 1}", b)
            reads, slopes, at_stream = observe_block(self._model, k, x, calls[b][k], batch, uses, gradient)
            self._streams.write(f"gradient-{k}", b, at_stream)
            sums.add(batch, reads, slopes)
            del x, gradient, reads, slopes, at_stream  # those of the last batch, while sums are finished
        self._streams.finish(f"gradient-{k}")
        self._model.drop()  # decompositions read the weights of the block themselves, and take the memory
        return sums.finish()

    def _at_input(self, sums: GroupMoments, uses: WeightUses) -> None:
        """Add inputs and gradients of tables of embeddings."""
        for b, batch in enumerate(self._batches):
            self._show_backward(OUTSIDE, b)
            reads, slopes, _ = observe_input(self._outer, batch, uses, self._streams.read("gradient-0", b))
            sums.add(batch, reads, slopes)


def collect_calibration(
    model: RunningModel,
    streams: Streams,
    factorise: GroupFactorisation,
    request: Request,
    workspace: Workspace,
    folder: CalibrationFolder | None = None,
) -> dict[str, LazyPart]:
    """Return the weights that a request selects, by module, factorised by statistics of a text.

    The statistics are collected block by block, and saved if there is a `folder`. `streams` are those of the batches of
    the fit, the first of which are those of the statistics. `workspace` has the memory and files of the factorised
    weights and of inputs and gradients, and the executor.
    """
    checkpoint = model.weights.source.checkpoint
    weights = compressed_weights(checkpoint, request.what, with_text=True)
    sample = first_batches(streams.batches, request.tokens // 2)
    if any(own.of for own in weights):  # moments must be those of the inputs of the folded weights
        model = model.changed(fold_biases_of(model, keys=not has_rotary_or_norms(checkpoint)))
    uses = find_uses(model, weights)
    if folder is not None:
        folder.claim(origin_of(model, uses, sample, streams.batches, request.method))

    def decompose(
        of_group: Decompositions, keys: Collection[str], moments: Statistics
    ) -> Iterator[tuple[str, Components]]:
        of_block = [own for own in weights if own.key in keys]
        results = workspace.workers.map(chain.from_iterable(map(of_group, read_group(checkpoint, of_block, moments))))
        for own in of_block:
            yield own.key, next(results)  # without a name, which would keep it in memory while the next is computed

    moments_of: MomentsOf = partial(RoundingMoments, model, sample, workspace)
    if factorise.decompositions is not None:
        of_weights = partial(decompose, factorise.decompositions)
        moments_of = partial(ComponentMoments, of_weights, model, sample, workspace)
    passes = StatisticsPasses(model, uses, sample, streams, moments_of, request.run.progress)
    fits, parts = request.effort != "low", dict[str, LazyPart]()
    collected = collect(passes, folder, weights, fits=fits)
    # without a name for the weights of a part, which would stay in memory while the next are read
    read = chain.from_iterable(starmap(partial(read_group, checkpoint), collected))
    for by_module in workspace.workers.map(map(partial(partial, factorise.parts_of), read)):
        parts |= {module: LazyPart(part, workspace) for module, part in by_module.items()}
        del by_module  # before the next group is read
    return {own.module: parts[own.module] for own in weights}


def collect(
    passes: StatisticsPasses, folder: CalibrationFolder | None, weights: Sequence[ModelWeight], *, fits: bool
) -> Iterator[tuple[list[ModelWeight], Statistics]]:
    """Yield the weights of every group with their statistics, from the folder or collected and saved there.

    If all are in the folder, only the streams of a model that is fitted are made.
    """
    of_group = defaultdict[int, list[ModelWeight]](list)
    for own in weights:
        of_group[own.group].append(own)
    done = [] if folder is None else folder.groups()
    if of_group.keys() - set(done):
        for group, statistics in passes.run(done):
            if folder is not None:
                folder.save(group, statistics)
            if statistics.components:  # the moments of decomposed weights are not needed, nor sent to workers
                statistics = Statistics(components=statistics.components)
            yield of_group[group], statistics
            del statistics  # before those of the next group
    elif fits:  # reads the streams of this model, which differ from those of others in rounding
        passes.run_forward()
    if folder is not None:
        for group in done:  # collected before
            yield of_group[group], folder.statistics(group, {key for own in of_group[group] for key in own.keys})


def fold_biases_of(model: RunningModel, *, keys: bool) -> Change:
    """Return the change of the weights of a model by `fold_biases`, which no output notices."""
    layers = model.wiring.layers

    def change(group: int, values: Group) -> Group:
        if not 0 <= group < len(layers) or layers[group].attention.latent is not None:
            return values
        attention = layers[group].attention
        projections = take_apart(attention, lambda name: values[name].numpy() if name in values else None)
        folded = put_together(attention, fold_biases(projections, model.sizes, keys=keys))
        return values | {name: torch.from_numpy(array) for name, array in folded.items() if array.ndim == 1}

    return change
