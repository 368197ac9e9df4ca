"""The weights that a calibration compresses, by groups, and their components."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING

from tnlib._typing import Array
from tnlib_adapters.checkpoints.checkpoint import Checkpoint
from tnlib_adapters.compression.activation_statistics.component_files import ComponentFile
from tnlib_adapters.compression.activation_statistics.statistics import Statistics
from tnlib_adapters.compression.executor import Workers
from tnlib_adapters.compression.methods.calibrated import CalibratedLayer, fold_biases, with_bias_row
from tnlib_adapters.compression.methods.components import Components, WeightOnText
from tnlib_adapters.compression.methods.head_products import has_rotary_or_norms
from tnlib_adapters.compression.methods.other_matrices import (
    Matrix,
    matrix_of,
    names_of,
    read_weight,
    table_decomposition,
)
from tnlib_adapters.factors.projections import NAMES, Projections, put_together, take_apart

if TYPE_CHECKING:
    import torch

    from tnlib_adapters.instrument.running_model import RunningModel
    from tnlib_adapters.instrument.stored_weights import Change, Group
    from tnlib_adapters.instrument.weight_inputs import Places


@dataclass(frozen=True)
class WeightGroup:
    """Weights of one block, or outside the blocks, and their calibration statistics.

    Parameters
    ----------
    index, module
        Index of the block, and path of its attention if that is compressed.
    statistics
        Of these weights at least.
    projections
        Projections of the attention with biases folded; None where they are not compressed.
    weights
        Weight (in, out) and size of the bias of the other modules.
    """

    index: int
    module: str
    statistics: Statistics
    projections: Projections | None
    weights: Mapping[str, tuple[Array, int]]


@dataclass(frozen=True)
class GroupCalibration(WeightGroup):
    """Weights of a group with their components by squared singular values; the statistics have their losses ("gates").

    Parameters
    ----------
    layer
        Components of the projections of the attention; None where they are not compressed.
    matrices
        Components of the other matrices.
    """

    layer: CalibratedLayer | None
    matrices: Mapping[str, Matrix]

    @property
    def components(self) -> dict[str, Components]:
        """Components of all weights, by their keys in a running model."""
        layers = {} if self.layer is None else {self.index: self.layer}
        return components_of(layers, list(self.matrices.values()))


@dataclass(frozen=True)
class SelectedWeights:
    """The weights of a checkpoint that `what` ("attention", "mlp" or "all") selects.

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

    def places(self, model: RunningModel) -> Places:
        """Return the places of the weights in a running model."""
        from tnlib_adapters.instrument.weight_inputs import find_places

        return find_places(model, self.names, attention=bool(self.layers))

    def of_group(
        self,
        group: int,
        places: Places,
        moments: Statistics,
        device: torch.device,
        file: ComponentFile,
        workers: Workers,
    ) -> GroupCalibration:
        """Return the components of the weights of a group by these moments, from `file` or computed and saved there.

        Weights are decomposed by `workers`, large ones on `device`, tables that make predictions in this process.
        """
        wiring, own, layer = self.checkpoint.wiring, self.read_group(group, places, moments), None
        on_text, tables = dict[str, WeightOnText](), dict[str, Callable[[], Components]]()
        if own.projections is not None:
            on_text |= {name: _projection_on_text(own.projections, name, moments, group) for name in NAMES}
        for name, (weight, _) in own.weights.items():
            if table := table_decomposition(wiring, name, weight, moments.reads, moments.slopes):
                tables[name] = table
            else:
                on_text[name] = WeightOnText(
                    weight, partial(moments.reads.__getitem__, name), partial(moments.slopes.__getitem__, name)
                )

        def compute() -> Iterator[tuple[str, Components]]:
            yield from zip(on_text, workers.map(pair.call(device) for pair in on_text.values()), strict=True)
            yield from ((name, decompose()) for name, decompose in tables.items())

        by_key = file.get([*on_text, *tables], compute)
        if own.projections is not None:
            layer = CalibratedLayer(own.projections, {name: by_key[name] for name in NAMES})
        matrices = {name: matrix_of(wiring, name, *read, by_key[name]) for name, read in own.weights.items()}
        return GroupCalibration(group, own.module, moments, own.projections, own.weights, layer, matrices)

    def read_group(self, group: int, places: Places, statistics: Statistics) -> WeightGroup:
        """Read the weights of a group."""
        checkpoint, projections, module = self.checkpoint, None, ""
        if group in self.layers:
            projections = fold_biases(checkpoint.projections(group), checkpoint.sizes, keys=self._drops_keys)
            module = checkpoint.wiring.attention_modules[group]
        weights = {name: read_weight(checkpoint, name) for name in self.names if places[name].group == group}
        return WeightGroup(group, module, statistics, projections, weights)

    @property
    def _drops_keys(self) -> bool:
        return not has_rotary_or_norms(self.checkpoint)


def _projection_on_text(folded: Projections, name: str, moments: Statistics, k: int) -> WeightOnText:
    """Return a projection of the k-th layer with its bias row, and its moments."""
    weight = with_bias_row(folded, name)
    return WeightOnText(
        weight,
        lambda: moments.reads_of_projection(k, name, len(weight)),
        lambda: moments.slopes[f"{k}.{name}"],
    )


def components_of(layers: Mapping[int, CalibratedLayer], matrices: Sequence[Matrix] = ()) -> dict[str, Components]:
    """Return the components of all weights by their keys in a running model; layers by their index."""
    components = {
        f"{k}.{name}": weight_components
        for k, layer in layers.items()
        for name, weight_components in layer.components.items()
    }
    return components | {weight_components.name: weight_components.components for weight_components in matrices}


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
