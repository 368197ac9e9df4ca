"""The selected weights in groups, a block or those outside, factorised by calibration statistics of a text."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING

import numpy as np

from tnlib._typing import Array
from tnlib_adapters.checkpoints.checkpoint import Checkpoint
from tnlib_adapters.compression.calibration.resumed_run import CalibrationFolder, origin_of
from tnlib_adapters.compression.calibration.statistics import Statistics, StatisticsPasses
from tnlib_adapters.compression.compressed_part import names_of, read_weight, widest_component
from tnlib_adapters.compression.methods.factorisation import Factorised
from tnlib_adapters.compression.methods.head_products import has_rotary_or_norms
from tnlib_adapters.compression.methods.out_of_core import LazyPart, Workspace
from tnlib_adapters.compression.request import Request
from tnlib_adapters.compression.text import check_tokens, sample_batches
from tnlib_adapters.factors.projections import Projections, Sizes, put_together, take_apart

if TYPE_CHECKING:
    from tnlib_adapters.instrument.block_passes import Streams
    from tnlib_adapters.instrument.running_model import Batch, RunningModel
    from tnlib_adapters.instrument.stored_weights import Change, Group
    from tnlib_adapters.instrument.weight_inputs import WeightUses


@dataclass(frozen=True)
class WeightGroup:
    """Weights of one block, or outside the blocks, and their calibration statistics."""

    index: int  # index of the block, and path of its attention if that is compressed
    module: str
    statistics: Statistics  # of these weights at least
    # projections of the attention with biases folded; None where they are not compressed
    projections: Projections | None
    weights: Mapping[str, tuple[Array, int]]  # weight (in, out) and size of the bias of the other modules


@dataclass(frozen=True)
class SelectedWeights:
    """The weights of a checkpoint that `what` ("all", "linear", "attention" or "mlp") selects.

    There are no layers for "mlp" and for attention on latent vectors.
    """

    checkpoint: Checkpoint
    what: str

    @cached_property
    def names(self) -> list[str]:
        """Modules outside the projections of the attention."""
        return names_of(self.checkpoint, self.what, with_text=True)

    @cached_property
    def layers(self) -> Sequence[int]:
        """Layers whose projections are selected."""
        return self.checkpoint.wiring.projection_layers(self.what)

    @property
    def modules(self) -> list[str]:
        """All modules, attention first."""
        return [*(self.checkpoint.wiring.attention_modules[k] for k in self.layers), *self.names]

    def folded(self, model: RunningModel) -> RunningModel:
        """Return the model with folded biases: moments must be those of the inputs of the folded weights."""
        return model.changed(fold_biases_of(model, keys=self._drops_keys)) if self.layers else model

    def uses(self, model: RunningModel) -> WeightUses:
        """Return the uses of the weights in a running model."""
        from tnlib_adapters.instrument.weight_inputs import find_uses

        return find_uses(model, self.names, attention=bool(self.layers))

    def read_group(self, group: int, uses: WeightUses, statistics: Statistics) -> Iterator[WeightGroup]:
        """Read the weights of a group; tables, which are large, one after the other."""
        from tnlib_adapters.instrument.stored_weights import OUTSIDE

        checkpoint, projections, module = self.checkpoint, None, ""
        names = [name for name in self.names if uses[name].group == group]
        if group == OUTSIDE:
            for name in names:
                of_table = statistics.of_keys({name, uses[name].reads, checkpoint.wiring.tied_key})
                yield WeightGroup(group, module, of_table, None, {name: read_weight(checkpoint, name)})
            return
        if group in self.layers:
            projections = fold_biases(checkpoint.projections(group), checkpoint.sizes, keys=self._drops_keys)
            module = checkpoint.wiring.attention_modules[group]
        yield WeightGroup(
            group, module, statistics, projections, {name: read_weight(checkpoint, name) for name in names}
        )

    @property
    def _drops_keys(self) -> bool:
        return not has_rotary_or_norms(self.checkpoint)


def with_bias_row(folded: Projections, name: str) -> Array:
    """Return a weight, with its bias as the last row if that is not 0; the output bias is not included."""
    weight, bias = folded.weights[name], folded.biases.get(name)
    if name == "o" or bias is None or not np.any(bias):
        return weight
    return np.concatenate([weight, bias[None]])


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
    import torch

    layers = model.wiring.layers

    def change(group: int, values: Group) -> Group:
        if not 0 <= group < len(layers) or layers[group].attention.latent is not None:
            return values
        attention = layers[group].attention
        projections = take_apart(attention, lambda name: values[name].numpy() if name in values else None)
        folded = put_together(attention, fold_biases(projections, model.sizes, keys=keys))
        return values | {name: torch.from_numpy(array) for name, array in folded.items() if array.ndim == 1}

    return change


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
    check_tokens(model.function, batches, widest_component(checkpoint, what))
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
        for part in weights.read_group(group, uses, statistics):
            pending.append(workers.submit(partial(parts_of, checkpoint, part)))
            del part  # and its weights
            gather(workers.n_pending - 1)

    def collected(group: int, statistics: Statistics) -> None:
        folder.save(group, statistics)
        factorise(group, statistics)

    if set(done) < set(groups):
        keeps = folder.keeps_streams
        passes = StatisticsPasses(model, uses, sample, streams, request.run.progress, keeps_streams=keeps)
        passes.run(collected, done)
    elif request.effort != "low":  # the fit reads the streams of this model, which differ from others' in rounding
        from tnlib_adapters.instrument.block_passes import OuterLayers, forward

        forward(OuterLayers(model), streams, inputs=None if folder.keeps_streams else ())
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
