"""Groups of weights, a block or those outside, and their calibration statistics: moments, and what errors cost.

Workers of an executor factorise groups of weights by them: nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from tnlib._typing import Array
from tnlib_adapters.checkpoints.checkpoint import Checkpoint
from tnlib_adapters.compression.methods.components import Components
from tnlib_adapters.compression.methods.decompositions import has_rotary_or_norms
from tnlib_adapters.compression.methods.factorisation import Factorised, ModuleWeights, WeightOptions
from tnlib_adapters.factors.model_weights import OUTSIDE, ModelWeight
from tnlib_adapters.factors.projections import Projections, Sizes


@dataclass(frozen=True)
class Statistics:
    """Calibration statistics of a text, by weight keys, in memory or read from files at every access."""

    # by input key: sums over tokens of x x^T, for rounding weighted by the gradient; of an embedding table token counts
    reads: Mapping[str, Array] = field(default_factory=dict)
    # sums of p p^T with the gradient p of a probe at the output; for an unembedding at the input, because the output is
    # as wide as the vocabulary
    slopes: Mapping[str, Array] = field(default_factory=dict)
    # Loss of the output per unit of `rounding_loss`, (1,). Of tables: the sum of |p|^2, and the numbers of tokens and
    # of texts.
    scales: Mapping[str, Array] = field(default_factory=dict)
    # Losses of the output without each component of a weight inside a block, in place of its scale, in the order of its
    # decomposition by the moments. `components` are sorted by these losses; they are not saved, because the moments
    # give them again.
    losses: Mapping[str, Array] = field(default_factory=dict)
    components: Mapping[str, Components] = field(default_factory=dict)

    def __reduce__(self) -> tuple[Any, ...]:
        """Send the arrays, and not where they are stored, to another process."""
        return Statistics, tuple(map(dict, self._parts))

    def of_keys(self, keys: Collection[str]) -> Statistics:
        """Return the statistics of these keys."""
        return Statistics(*({key: of[key] for key in of if key in keys} for of in self._parts))

    @property
    def _parts(self) -> tuple[Mapping[str, Any], ...]:
        return self.reads, self.slopes, self.scales, self.losses, self.components

    def reads_of(self, weight: ModelWeight, rows: int) -> Array:
        """Return the input moments of a weight with so many rows: a bias is the last, of input 1."""
        moments = self.reads[weight.reads]
        return moments if len(moments) == rows else moments[:rows, :rows]  # one object is stored once


class ReadWeight(NamedTuple):
    """A weight of a model as it is read, with biases folded."""

    weight: ModelWeight
    values: Array  # (in, out)
    bias: Array | None  # of a projection; None where there is none, or where it stays in its own tensor


class WeightGroup(NamedTuple):
    """Weights of one block, or one outside the blocks, and calibration statistics of these at least."""

    weights: list[ReadWeight]
    statistics: Statistics

    def by_module(self, options: Iterable[WeightOptions]) -> dict[str, Factorised]:
        """Return the options of all weights in their modules."""
        modules = dict[str, dict[str, WeightOptions]]()
        for (weight, *_), of_weight in zip(self.weights, options, strict=True):
            modules.setdefault(weight.module, {})[weight.of] = of_weight
        fixed = {
            own.weight.module: own.weight.bias.size for own in self.weights if own.weight.bias and not own.weight.of
        }
        return {module: ModuleWeights(weights, fixed.get(module, 0)) for module, weights in modules.items()}


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


Decompositions = Callable[[WeightGroup], Iterable[Callable[[], Components]]]


class GroupFactorisation(NamedTuple):
    """Factorisation of the weights of a group: by statistics for rounding, or by components with measured losses."""

    parts_of: Callable[[WeightGroup], Mapping[str, Factorised]]  # group -> its factorised modules
    decompositions: Decompositions | None = None  # block -> the decomposition of each of its weights by its moments
