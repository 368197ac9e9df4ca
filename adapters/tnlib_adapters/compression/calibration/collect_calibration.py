"""Calibration statistics of a text, and the weights that are factorised by them, block by block."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING

from tnlib_adapters.checkpoints.checkpoint import Checkpoint
from tnlib_adapters.compression.calibration.resumed_run import CalibrationFolder, origin_of
from tnlib_adapters.compression.calibration.selected_weights import SelectedWeights, WeightGroup
from tnlib_adapters.compression.calibration.statistics import Statistics, collect_groups
from tnlib_adapters.compression.methods.factorisation import Factorised
from tnlib_adapters.compression.methods.other_matrices import widest_component
from tnlib_adapters.compression.methods.out_of_core import LazyPart, Workspace
from tnlib_adapters.compression.request import Request
from tnlib_adapters.compression.text import check_tokens, sample_batches

if TYPE_CHECKING:
    from tnlib_adapters.instrument.block_passes import Streams
    from tnlib_adapters.instrument.running_model import Batch, RunningModel

# checkpoint and group -> its factorised modules; without its arrays the checkpoint tells what is stored how
PartsOf = Callable[[Checkpoint, WeightGroup], Mapping[str, Factorised]]


def collect_calibration(
    checkpoint: Checkpoint,
    model: RunningModel,
    batches: Sequence[Batch],
    parts_of: PartsOf,
    request: Request,
    *,
    folder: CalibrationFolder | None = None,
    workspace: Workspace | None = None,
) -> dict[str, LazyPart]:
    """Return the layers and other weights that a request selects, by module, factorised by statistics of a text.

    The statistics are collected block by block; `parts_of` factorises the weights of a group. Without a `folder`, what
    is between blocks is in a temporary one. `workspace` has the memory and files of the factorised weights, and the
    executor.
    """
    what, folder, workspace = request.what, folder or CalibrationFolder(), workspace or Workspace()
    check_tokens(model.function, batches, widest_component(checkpoint, what), "components")
    weights, sample = SelectedWeights(checkpoint, what), sample_batches(batches, request.tokens // 2)
    model = weights.folded(model)
    uses = weights.uses(model)
    streams = streams_of_fit(model, batches, folder, request)
    folder.claim(origin_of(checkpoint, model, uses, sample, streams.batches))
    groups, done = sorted({use.group for use in uses.values()}), folder.groups()
    workers, parts = workspace.workers, dict[str, LazyPart]()
    pending = deque[Future[Mapping[str, Factorised]]]()

    def gather(n_pending: int) -> None:
        while len(pending) > n_pending:
            made = workers.result(pending.popleft())
            parts.update({module: LazyPart(part, workspace) for module, part in made.items()})

    def factorise(group: int, statistics: Statistics) -> None:
        call = partial(parts_of, checkpoint, weights.read_group(group, uses, statistics))
        pending.append(workers.submit(call))
        gather(workers.n_pending - 1)

    def collected(group: int, statistics: Statistics) -> None:
        folder.save(group, statistics)
        factorise(group, statistics)

    if set(done) < set(groups):
        collect_groups(model, uses, sample, request.run.progress, streams=streams, save=collected, done=done)
    elif request.effort != "low":  # the fit reads the streams of this model, which differ from others' in rounding
        from tnlib_adapters.instrument.block_passes import OuterLayers, forward

        forward(OuterLayers(model), streams)
    for group in done:  # collected before
        keys = (key for name, use in uses.items() if use.group == group for key in (name, use.reads))
        factorise(group, folder.statistics(group, set(keys)))
    gather(0)
    return {module: parts[module] for module in weights.modules}


def streams_of_fit(
    model: RunningModel, batches: Sequence[Batch], folder: CalibrationFolder, request: Request
) -> Streams:
    """Return the streams of the batches of the fit, of which those of the statistics are the first."""
    from tnlib_adapters.instrument.block_passes import Streams

    return Streams(folder.path, sample_batches(batches, request.tokens), model.sizes.d_model, model.dtype)
