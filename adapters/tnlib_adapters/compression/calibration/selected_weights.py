"""The weights that a request selects, in groups: those of a block, and those outside the blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from tnlib._typing import Array
from tnlib_adapters.checkpoints.checkpoint import Checkpoint
from tnlib_adapters.compression.calibration.statistics import Statistics
from tnlib_adapters.compression.methods.calibrated import fold_biases
from tnlib_adapters.compression.methods.head_products import has_rotary_or_norms
from tnlib_adapters.compression.methods.other_matrices import names_of, read_weight
from tnlib_adapters.factors.projections import Projections, put_together, take_apart

if TYPE_CHECKING:
    from tnlib_adapters.instrument.running_model import RunningModel
    from tnlib_adapters.instrument.stored_weights import Change, Group
    from tnlib_adapters.instrument.weight_inputs import WeightUses


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

    def read_group(self, group: int, uses: WeightUses, statistics: Statistics) -> WeightGroup:
        """Read the weights of a group."""
        checkpoint, projections, module = self.checkpoint, None, ""
        if group in self.layers:
            projections = fold_biases(checkpoint.projections(group), checkpoint.sizes, keys=self._drops_keys)
            module = checkpoint.wiring.attention_modules[group]
        weights = {name: read_weight(checkpoint, name) for name in self.names if uses[name].group == group}
        return WeightGroup(group, module, statistics, projections, weights)

    @property
    def _drops_keys(self) -> bool:
        return not has_rotary_or_norms(self.checkpoint)


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
