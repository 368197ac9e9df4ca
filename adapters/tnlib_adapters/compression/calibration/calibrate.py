"""Calibrated factorisation of all layers: statistics of a text, rank selection, block-wise reconstruction."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tnlib._typing import Array
from tnlib_adapters.architectures.wiring import Wiring
from tnlib_adapters.checkpoints.checkpoint import Checkpoint
from tnlib_adapters.compression.calibration.component_files import ComponentFile
from tnlib_adapters.compression.calibration.fitted_files import Fitted, FittedFiles
from tnlib_adapters.compression.calibration.statistics import Statistics, collect
from tnlib_adapters.compression.calibration.statistics_files import Spill, StatisticsFiles, digest_of_tokens, origin_of
from tnlib_adapters.compression.calibration.text import check_tokens, sample_batches
from tnlib_adapters.compression.methods.calibrated import CalibratedLayer, fold_biases
from tnlib_adapters.compression.methods.components import Components
from tnlib_adapters.compression.methods.factorisation import Factorisation, Factorised, measure_of_text
from tnlib_adapters.compression.methods.head_products import has_rotary_or_norms
from tnlib_adapters.compression.methods.other_matrices import Matrix, names_of, read_matrix, widest_component
from tnlib_adapters.compression.methods.out_of_core import LazyPart, StoredArrays, Workspace
from tnlib_adapters.compression.request import Progress, quiet
from tnlib_adapters.compression.sizes import count_attention, count_matrix
from tnlib_adapters.compression.source_model import SourceModel
from tnlib_adapters.factors.factored_matrix import FactoredMatrix
from tnlib_adapters.factors.projections import Products, Projections, put_together, take_apart

if TYPE_CHECKING:
    import torch

    from tnlib_adapters.instrument.block_passes import Streams
    from tnlib_adapters.instrument.running_model import Batch, RunningModel
    from tnlib_adapters.instrument.stored_weights import Change, Group
    from tnlib_adapters.instrument.weight_inputs import Places

# Moments and gates converge with few tokens; the fit has as many unknowns as a layer.
_TOKENS_OF_STATISTICS = 32_768
_TOKENS_OF_FIT = 65_536
_STEPS = 400  # optimizer steps per layer
# Losses of unembeddings count twice: the fit of a layer halves its loss (built-in Llama: 0.38 to 0.19 and 0.053 to
# 0.026 nats a token), and unembeddings are not fitted
_NOT_FITTED = 2


@dataclass(frozen=True)
class GroupCalibration:
    """Calibration statistics of the weights of one block, or outside the blocks, and their components.

    Parameters
    ----------
    index, module
        Index of the block, and path of its attention if that is compressed.
    statistics
        Moments of inputs and of output gradients, and losses of the components ("gates"), of these weights at least.
    projections, layer
        Projections of the attention with biases folded, and their components by squared singular values; None where
        they are not compressed.
    matrices
        Components of the other matrices.
    """

    index: int
    module: str
    statistics: Statistics
    projections: Projections | None
    layer: CalibratedLayer | None
    matrices: Mapping[str, Matrix]


@dataclass(frozen=True)
class Calibration:
    """Factorised layers and other weights of a model, by module, and the statistics of all."""

    parts: dict[str, LazyPart]
    statistics: Statistics


PartsOf = Callable[[GroupCalibration], Mapping[str, Factorised]]


def collect_calibration(
    checkpoint: Checkpoint,
    model: RunningModel,
    batches: Sequence[Batch],
    parts_of: PartsOf,
    progress: Progress = quiet,
    *,
    what: str = "attention",
    file: Path | None = None,
    spill: Spill | None = None,
    workspace: Workspace | None = None,
) -> Calibration:
    """Collect calibration statistics block by block, and factorise the weights that `what` selects by them.

    Parameters
    ----------
    checkpoint, model
        The model on disk, and running.
    batches
        Batches of the calibration text.
    parts_of
        Function that factorises the weights of a group.
    progress
        Called as progress(stage, done, total).
    what
        Compressed part; there are no layers for "mlp" and for attention on latent vectors.
    file
        Statistics file, or None.
    spill
        Folder for what is between blocks, from which an interrupted collection is resumed; None for a temporary one.
    workspace
        Memory and temporary files of the factorised weights.
    """
    from tnlib_adapters.instrument.weight_inputs import find_places

    check_tokens(model.function, batches, widest_component(checkpoint, what), "components")
    names, sample = names_of(checkpoint, what, with_text=True), sample_batches(batches, _TOKENS_OF_STATISTICS)
    layers, keys = checkpoint.wiring.projection_layers(what), not has_rotary_or_norms(checkpoint)
    # moments must be those of the inputs of the folded weights
    model = model.changed(fold_biases_of(model, keys=keys)) if layers else model
    places = find_places(model, names, attention=bool(layers))
    spill = spill or Spill()
    groups = _Groups(checkpoint, places, model.device, keys, layers, names, parts_of, workspace or Workspace(), spill)
    streams, origin = streams_of_fit(model, batches, spill), origin_of(checkpoint, sample, places, model.longest)
    files = StatisticsFiles(spill, origin, file)
    is_complete = files.is_complete()
    spill.claim(origin | {"streams": digest_of_tokens(streams.batches)})

    def save(group: int, statistics: Statistics) -> None:
        files.save(group, statistics)
        groups.factorise(group, statistics)

    if not is_complete:
        done, components = files.done(), groups.components
        collect(model, places, sample, progress, components=components, streams=streams, save=save, done=done)
        files.join()
    statistics = files.statistics()
    for group in sorted({place.group for place in places.values()} - groups.factorised):  # collected before
        groups.components(group, statistics)
        groups.factorise(group, statistics)
    in_order = [*(checkpoint.wiring.attention_modules[k] for k in layers), *names]
    return Calibration({module: groups.parts[module] for module in in_order}, statistics)


class _Groups:
    """Factorised weights, block by block: components of the weights of a block, then all forms of these by their gates.

    Parameters
    ----------
    checkpoint, places
        The model and its weights.
    device
        Where large weights are decomposed.
    keys
        True if the biases of keys are dropped.
    layers, names
        Attention layers and other weights that are compressed.
    parts_of, workspace, spill
        As in `collect_calibration`.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        places: Places,
        device: torch.device,
        keys: bool,
        layers: Sequence[int],
        names: Sequence[str],
        parts_of: PartsOf,
        workspace: Workspace,
        spill: Spill,
    ) -> None:
        self._checkpoint, self._places, self._device = checkpoint, places, device
        self._keys, self._layers, self._spill = keys, layers, spill
        self._names, self._parts_of, self._workspace = names, parts_of, workspace
        self._current: GroupCalibration | None = None
        self.parts: dict[str, LazyPart] = {}
        self.factorised: set[int] = set()

    def components(self, group: int, moments: Statistics) -> dict[str, Components]:
        """Return the components of the weights of a group."""
        from tnlib_adapters.compression.methods.device_components import components_on

        checkpoint, projections, layer, module = self._checkpoint, None, None, ""
        file = ComponentFile(self._spill.saved(f"components{group}"))
        how = partial(components_on, self._device), file.get
        if group in self._layers:
            projections = fold_biases(checkpoint.projections(group), checkpoint.sizes, keys=self._keys)
            layer, module = CalibratedLayer(projections, moments.of_layer(group), *how), self._module(group)
        own = [name for name in self._names if self._places[name].group == group]
        matrices = {name: read_matrix(checkpoint, name, moments.reads, moments.slopes, *how) for name in own}
        file.save()
        self._current = GroupCalibration(group, module, moments, projections, layer, matrices)
        return components_of({} if layer is None else {group: layer}, list(matrices.values()))

    def factorise(self, group: int, statistics: Statistics) -> None:
        """Factorise the weights of the group whose components were made last, by its statistics."""
        if self._current is None or self._current.index != group:
            raise RuntimeError(f"collect_calibration: components of group {group} must be made before.")
        for module, part in self._parts_of(replace(self._current, statistics=statistics)).items():
            self.parts[module] = LazyPart(partial(_same, part), self._workspace)
        self._current = None
        self.factorised.add(group)

    def _module(self, k: int) -> str:
        return self._checkpoint.wiring.attention_modules[k]


def _same(part: Factorised) -> Factorised:
    return part


def streams_of_fit(model: RunningModel, batches: Sequence[Batch], spill: Spill) -> Streams:
    """Return the streams of the batches of the fit, of which those of the statistics are the first."""
    from tnlib_adapters.instrument.block_passes import Streams

    return Streams(spill.folder, sample_batches(batches, _TOKENS_OF_FIT), model.sizes.d_model)


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


def calibrated_parts(
    checkpoint: Checkpoint,
    model: RunningModel,
    batches: Sequence[Batch],
    progress: Progress = quiet,
    *,
    what: str = "attention",
) -> tuple[list[CalibratedLayer], list[Matrix]]:
    """Return the attention layers and other matrices with components ordered by their effect on the model output.

    Parameters are those of `collect_calibration`.
    """
    parts = [
        part.load()
        for part in collect_calibration(checkpoint, model, batches, weighed_parts, progress, what=what).parts.values()
    ]
    layers = [part for part in parts if isinstance(part, CalibratedLayer)]
    return layers, [part for part in parts if isinstance(part, Matrix)]


def weighed_parts(group: GroupCalibration) -> dict[str, Factorised]:
    """Replace the squared singular values of all components of a group by their losses; return layer and matrices."""
    gates, parts = group.statistics.gates, dict[str, Factorised]()
    if group.layer is not None:
        group.layer.weigh({name: gates[f"{group.index}.{name}"] for name in group.layer.components})
        parts[group.module] = group.layer
    for name, matrix in group.matrices.items():
        matrix.weigh(gates[name])
        parts[name] = matrix
    return parts


def components_of(layers: Mapping[int, CalibratedLayer], matrices: Sequence[Matrix] = ()) -> dict[str, Components]:
    """Return the components of all weights by their keys in a running model; layers by their index."""
    components = {
        f"{k}.{name}": weight_components
        for k, layer in layers.items()
        for name, weight_components in layer.components.items()
    }
    return components | {weight_components.name: weight_components.components for weight_components in matrices}


def factorise_calibrated(
    checkpoint: Checkpoint,
    text: str,
    progress: Progress = quiet,
    *,
    what: str = "attention",
    file: Path | None = None,
    folder: Path | None = None,
    source: SourceModel | None = None,
    workspace: Workspace | None = None,
) -> Factorisation:
    """Factorise `what` of every layer by the statistics of a text; the chosen factors are fitted on it.

    Parameters
    ----------
    checkpoint
        Not compressed.
    text
        Calibration text.
    progress
        Called as progress(stage, done, total).
    what
        "attention", "mlp" or "all".
    file
        Statistics file, or None.
    folder
        Folder for what is between blocks, from which an interrupted run is resumed; None for a temporary one.
    source
        The running model of `checkpoint`; None loads it.
    workspace
        Memory and temporary files of the factors.

    Raises
    ------
    ArgumentError
        If the text is too short, or the statistics file belongs to another model, text or choice of weights.
    """
    model, wiring = (source or SourceModel(checkpoint)).original, checkpoint.wiring
    batches, spill = model.batches(text), Spill(folder)
    calibration = collect_calibration(
        checkpoint, model, batches, weighed_parts, progress, what=what, file=file, spill=spill, workspace=workspace
    )

    def fit(options: Mapping[str, Sequence[int]]) -> Iterator[tuple[str, list[FactoredMatrix]]]:
        streams = streams_of_fit(model, batches, spill)
        return fit_factors(model, calibration.parts, options, streams, progress=progress)

    names = names_of(checkpoint, what, with_text=True)
    predict = [name for name in names if wiring.is_unembedding(name) or wiring.is_tied(name)]
    return Factorisation(
        "calibrated",
        calibration.parts,
        n_before(checkpoint, what),
        measure_of_text(checkpoint),
        fit=fit,
        weights=dict.fromkeys(predict, _NOT_FITTED),
        moments=calibration.statistics.reads,
    )


def n_before(checkpoint: Checkpoint, what: str) -> int:
    """Return the numbers in the weights and biases of the compressed part."""
    n_attention = sum(count_attention(checkpoint)) if checkpoint.wiring.projection_layers(what) else 0
    return n_attention + sum(count_matrix(checkpoint, name) for name in names_of(checkpoint, what, with_text=True))


def fit_factors(
    model: RunningModel,
    parts: Mapping[str, LazyPart],
    options: Mapping[str, Sequence[int]],
    streams: Streams,
    n_steps: int | None = None,
    *,
    progress: Progress = quiet,
) -> Iterator[tuple[str, list[FactoredMatrix]]]:
    """Yield the factors of every layer and matrix after the block-wise reconstruction.

    Parameters
    ----------
    model
        The original.
    parts
        Calibrated layers and matrices by module.
    options
        Their chosen sizes.
    streams
        As in `fit_layers`. The factors of blocks that are done are in their folder, and are not fitted again.
    n_steps
        Optimizer steps per layer; None for 400, see `fit_steps`.
    progress
        Called as progress(stage, done, total).
    """
    from tnlib_adapters.instrument.layer_fit import fit_layers

    steps = steps_of_model(model, streams, _STEPS) if n_steps is None else n_steps
    inside, outside = by_block(model.wiring, parts)
    tables = StoredArrays(Workspace(0, lambda: streams.folder))
    for name in outside:
        factors = parts[name].load().factors(options[name])
        if factors and model.wiring.is_embedding(name):
            table = np.linalg.multi_dot([a.astype(np.float64) for a in factors])
            tables.add({name: table.astype(np.float32)})
            del table
        yield name, parts[name].load().packed(factors)

    def start(k: int) -> Products:
        products, factors = Products({}), dict[str, tuple[Array, ...]]()
        for name in inside[k]:
            part = parts[name].load()
            if isinstance(part, CalibratedLayer):
                products = part.products(options[name])
            elif own := part.factors(options[name]):
                factors[name] = own
        return products.beside(factors)

    def fitted(first: int) -> Iterator[Fitted]:
        fit = fit_layers(model, streams, start, tables=tables, n_steps=steps, first=first, progress=progress)
        for k, products in enumerate(fit, first):
            loaded = ((name, parts[name].load()) for name in inside[k])
            yield [
                (name, part.packed(products if isinstance(part, CalibratedLayer) else products.factors.get(name, ())))
                for name, part in loaded
            ]

    files = FittedFiles(streams.folder, model.wiring.attention_modules, "calibrated", options, steps)
    yield from saved(files, fitted)


def fit_steps(most: int, n_batches: int, *, fit_in_memory: bool) -> int:
    """Return the optimizer steps of a layer: of a model that does not fit in memory at most one pass over the text."""
    return most if fit_in_memory else min(most, n_batches)


def steps_of_model(model: RunningModel, streams: Streams, most: int) -> int:
    """Return `fit_steps` of a running model."""
    return fit_steps(most, len(streams.batches), fit_in_memory=model.fits_in_memory)


def saved(files: FittedFiles, fit: Callable[[int], Iterator[Fitted]]) -> Iterator[tuple[str, list[FactoredMatrix]]]:
    """Yield the fitted weights of all blocks: those that are saved, then those of `fit` from the next block on."""
    n_done = files.resume()
    for k in range(n_done):
        yield from files.read(k)
    for k, fitted in enumerate(fit(n_done), n_done):
        files.save(k, fitted)
        yield from fitted


def by_block(wiring: Wiring, parts: Iterable[str]) -> tuple[list[list[str]], list[str]]:
    """Return the parts in every block, its attention first, and those outside the blocks."""
    known = list(parts)
    of_blocks = [
        [module, *(matrix.name for matrix in (*layer.latent_matrices, *layer.feed_forward_matrices))]
        for module, layer in zip(wiring.attention_modules, wiring.layers, strict=True)
    ]
    inside = [[name for name in own if name in known] for own in of_blocks]
    return inside, [name for name in known if not any(name in own for own in inside)]
