"""The weights of a checkpoint read in groups, a block or those outside, and factorised by statistics of a text."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from itertools import chain, starmap

import numpy as np
import torch

from tnlib_adapters.checkpoints.checkpoint import Checkpoint
from tnlib_adapters.compression.calibration.group_moments import ComponentMoments, RoundingMoments
from tnlib_adapters.compression.calibration.resumed_run import CalibrationFolder, origin_of
from tnlib_adapters.compression.calibration.statistics import (
    Decompositions,
    GroupFactorisation,
    ReadWeight,
    Statistics,
    WeightGroup,
)
from tnlib_adapters.compression.calibration.statistics_passes import MomentsOf, StatisticsPasses
from tnlib_adapters.compression.compressed_part import compressed_weights, widest_component
from tnlib_adapters.compression.methods.components import Components
from tnlib_adapters.compression.methods.decompositions import has_rotary_or_norms
from tnlib_adapters.compression.methods.out_of_core import LazyPart, Workspace
from tnlib_adapters.compression.request import Request
from tnlib_adapters.compression.text import check_tokens, sample_batches
from tnlib_adapters.factors.model_weights import OUTSIDE, ModelWeight
from tnlib_adapters.factors.projections import Projections, Sizes, put_together, take_apart
from tnlib_adapters.instrument.block_passes import Streams
from tnlib_adapters.instrument.running_model import Batch, RunningModel
from tnlib_adapters.instrument.stored_weights import Change, Group
from tnlib_adapters.instrument.weight_inputs import find_uses


def read_group(checkpoint: Checkpoint, weights: Sequence[ModelWeight], statistics: Statistics) -> Iterator[WeightGroup]:
    """Read the weights of a group; tables, which are large, one after the other."""
    if any(own.group == OUTSIDE for own in weights):
        for own in weights:
            yield WeightGroup([ReadWeight(own, own.read(), None)], statistics.of_keys(own.keys))
        return
    projections = Projections({}, {})
    if any(own.of for own in weights):
        read, keys = checkpoint.projections(weights[0].group), not has_rotary_or_norms(checkpoint)
        projections = fold_biases(read, checkpoint.sizes, keys=keys)
    values = ((own, projections.weights[own.of] if own.of else own.read()) for own in weights)
    yield WeightGroup([ReadWeight(own, array, projections.biases.get(own.of)) for own, array in values], statistics)


def fold_biases(projections: Projections, sizes: Sizes, *, keys: bool) -> Projections:
    """Return projections with b_K = 0 if `keys`, and with b_V moved into the output bias if there is one.

    b_K adds a constant to all scores of a query, which softmax removes, and the rows of a pattern sum to 1.
    """
    biases = dict(projections.biases)
    if keys and "k" in biases:
        biases["k"] = np.zeros_like(biases["k"])
    if "v" in biases and "o" in biases:
        by_head = sizes.repeated(biases["v"].reshape(sizes.kv_heads, -1))
        added = by_head.ravel().astype(np.float64) @ projections.weights["o"]
        biases["o"] = (biases["o"] + added).astype(biases["o"].dtype)
        biases["v"] = np.zeros_like(biases["v"])
    return Projections(projections.weights, biases)


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


def collect_calibration(
    checkpoint: Checkpoint,
    model: RunningModel,
    batches: Sequence[Batch],
    factorise: GroupFactorisation,
    request: Request,
    *,
    folder: CalibrationFolder | None = None,
    workspace: Workspace | None = None,
) -> dict[str, LazyPart]:
    """Return the weights that a request selects, by module, factorised by statistics of a text.

    The statistics are collected block by block. Without a `folder`, what is between blocks is in memory as far as the
    `workspace` allows, otherwise in a temporary folder. The workspace also has the memory and files of the factorised
    weights and of inputs and gradients, and the executor.
    """
    folder, workspace = folder or CalibrationFolder(), workspace or Workspace()
    weights = compressed_weights(checkpoint, request.what, with_text=True)
    check_tokens(model.function, batches, widest_component(weights))
    sample = sample_batches(batches, request.tokens // 2)
    if any(own.of for own in weights):  # moments must be those of the inputs of the folded weights
        model = model.changed(fold_biases_of(model, keys=not has_rotary_or_norms(checkpoint)))
    uses = find_uses(model, weights)
    streams = streams_of_fit(model, batches, folder, request, workspace)
    folder.claim(origin_of(checkpoint, model, uses, sample, streams.batches, request.method))

    def decompose(of_group: Decompositions, keys: Collection[str], moments: Statistics) -> dict[str, Components]:
        of_block = [own for own in weights if own.key in keys]
        calls = chain.from_iterable(map(of_group, read_group(checkpoint, of_block, moments)))
        return dict(zip((own.key for own in of_block), workspace.workers.map(calls), strict=True))

    moments_of: MomentsOf = RoundingMoments
    if factorise.decompositions is not None:
        moments_of = partial(ComponentMoments, partial(decompose, factorise.decompositions))
    passes = StatisticsPasses(model, uses, sample, streams, workspace, request.run.progress, moments_of)
    collected, parts = collect(passes, folder, weights, fits=request.effort != "low"), dict[str, LazyPart]()
    # without a name for the weights of a part, which would stay in memory while the next are read
    read = chain.from_iterable(starmap(partial(read_group, checkpoint), collected))
    for made in workspace.workers.map(map(partial(partial, factorise.parts_of), read)):
        parts |= {module: LazyPart(part, workspace) for module, part in made.items()}
        del made  # before the next group is read
    return {own.module: parts[own.module] for own in weights}


def collect(
    passes: StatisticsPasses, folder: CalibrationFolder, weights: Sequence[ModelWeight], *, fits: bool
) -> Iterator[tuple[list[ModelWeight], Statistics]]:
    """Yield the weights of every group with their statistics, from the folder or collected and saved there.

    If all are in the folder, only the streams of a model that is fitted are made.
    """
    of_group = defaultdict[int, list[ModelWeight]](list)
    for own in weights:
        of_group[own.group].append(own)
    done = folder.groups()
    if of_group.keys() - set(done):
        for group, statistics in passes.run(done, keeps_streams=folder.keeps_streams):
            folder.save(group, statistics)
            if statistics.components:  # the moments of decomposed weights are not needed, nor sent to workers
                statistics = Statistics(components=statistics.components)
            yield of_group[group], statistics
            del statistics  # before those of the next group
    elif fits:  # reads the streams of this model, which differ from those of others in rounding
        passes.run_forward(None if folder.keeps_streams else ())
    for group in done:  # collected before
        yield of_group[group], folder.statistics(group, {key for own in of_group[group] for key in own.keys})


def streams_of_fit(
    model: RunningModel, batches: Sequence[Batch], folder: CalibrationFolder, request: Request, workspace: Workspace
) -> Streams:
    """Return the streams of the batches of the fit, of which those of the statistics are the first."""
    fitted = sample_batches(batches, request.tokens)
    admits = workspace.admits if folder.is_temporary else None
    return Streams(folder.path, fitted, model.sizes.d_model, model.dtype, admits=admits, held=folder.held)
