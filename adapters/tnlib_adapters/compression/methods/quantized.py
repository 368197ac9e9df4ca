"""Weights rounded to integers of few bits, each with the expected loss of the model output at every width."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np

from tnlib._typing import Array
from tnlib_adapters.compression.allocate import Curve
from tnlib_adapters.compression.methods.compensated_rounding import round_compensated, rounding_loss
from tnlib_adapters.factors.factored_matrix import FactoredMatrix, whole_part
from tnlib_adapters.factors.integers import BITS, IntegerFormat, Integers
from tnlib_adapters.factors.projections import Projections

GROUPS = (0, 128)  # numbers that share a scale: a whole column, or 128 of its entries
_MEASURED = (2, 3, 4)  # bits; the loss at more is extrapolated
_PER_BIT = 3.9  # ratio of the losses of neighbouring widths above them: 3.8 to 3.95 on MiniLM and the built-in Llama


class QuantizedWeight:
    """A weight (m, n) and its integer formats, ordered by stored bits.

    Parameters
    ----------
    weight
        Acting on rows, x @ weight.
    reads, slopes
        Second moments of the inputs and of the gradients at the output, see `round_compensated`.
    loss_scale
        Loss of the output per unit of `rounding_loss`.
    by_row
        True for a table, whose rows have scales of their own, so that one is looked up without the others.
    """

    def __init__(
        self, weight: Array, reads: Array | None, slopes: Array | None, loss_scale: float, *, by_row: bool = False
    ) -> None:
        self.weight, self._reads, self._slopes = weight, reads, slopes
        self._loss_scale, self._axis = loss_scale, int(by_row)

    @cached_property
    def options(self) -> list[tuple[IntegerFormat, int, float]]:
        """Format, stored bits and expected loss of every option, in descending order of the loss."""
        candidates = []
        length = self.weight.shape[self._axis]
        for group in (group for group in GROUPS if group < length):
            losses = dict[int, float]()
            for bits in BITS:
                form = IntegerFormat(bits, self._axis, group if bits < 8 else 0)
                if bits in _MEASURED:
                    rounded = round_compensated(self.weight, form, self._reads, self._slopes, descend=False)
                    error = self.weight - rounded.values(np.float64)
                    losses[bits] = self._loss_scale * rounding_loss(error, self._reads, self._slopes)
                else:
                    losses[bits] = losses[_MEASURED[-1]] * _PER_BIT ** (_MEASURED[-1] - bits)
                candidates.append((form, form.n_bits(self.weight.shape), losses[bits]))
        options = list[tuple[IntegerFormat, int, float]]()
        for option in sorted(candidates, key=lambda option: (option[1], option[2])):
            if not options or (option[1] > options[-1][1] and option[2] < options[-1][2]):
                options.append(option)
        return options

    def curve(self, n_added: int = 0) -> Curve:
        """Return stored bits and losses of the options; `n_added` bits are stored with each."""
        costs = np.array([cost for _, cost, _ in self.options])
        return Curve(costs + n_added, np.array([loss for *_, loss in self.options]))

    def format_of(self, bits: int) -> int:
        """Return the option of this many bits, with the fewest scales."""
        return next(k for k, (form, *_) in enumerate(self.options) if form.bits == bits)

    def rounded(self, option: int) -> Integers:
        """Return the weight in the format of an option."""
        return round_compensated(self.weight, self.options[option][0], self._reads, self._slopes)


class QuantizedLayer:
    """The projections of an attention layer, rounded one by one; biases are stored as floats.

    Parameters
    ----------
    weights
        "q", "k", "v" and "o".
    biases
        Biases of the projections that have one.
    means
        Mean input by projection: the mean of what rounding changes at the output is subtracted from its bias.
    float_bits
        Bits of a stored float.
    """

    fixed = 0

    def __init__(
        self,
        weights: Mapping[str, QuantizedWeight],
        biases: Mapping[str, Array],
        means: Mapping[str, Array],
        float_bits: int,
    ) -> None:
        self.weights, self._biases, self._means, self._float_bits = weights, biases, means, float_bits

    @property
    def curves(self) -> list[Curve]:
        """Stored bits and loss of every projection at its options."""
        added = {name: self._float_bits * bias.size for name, bias in self._biases.items()}
        return [weight.curve(added.get(name, 0)) for name, weight in self.weights.items()]

    def options_of(self, bits: int) -> list[int]:
        """Return the option of every projection with this many bits."""
        return [weight.format_of(bits) for weight in self.weights.values()]

    def rounded(self, choice: Sequence[int]) -> dict[str, Integers]:
        """Return the weights at one option each."""
        return {name: w.rounded(option) for (name, w), option in zip(self.weights.items(), choice, strict=True)}

    def biases(self, rounded: Mapping[str, Integers]) -> dict[str, Array]:
        """Return the biases for rounded weights."""
        biases = dict(self._biases)
        for name, mean in self._means.items():
            shift = mean @ (self.weights[name].weight - rounded[name].values(np.float64))
            biases[name] = (biases[name] + shift).astype(biases[name].dtype)
        return biases

    def matrices(self, choice: Sequence[int]) -> list[FactoredMatrix]:
        """Return the rounded weights at one option each."""
        rounded = self.rounded(choice)
        values = {name: integers.values() for name, integers in rounded.items()}
        return self.packed(rounded, Projections(values, self.biases(rounded)))

    def packed(self, rounded: Mapping[str, Integers], projections: Projections) -> list[FactoredMatrix]:
        """Return the stored form of rounded weights, with these biases."""
        matrices = []
        for name, integers in rounded.items():
            bias = projections.biases.get(name)
            arrays = {"weight": integers.values()} | ({} if bias is None else {"bias": bias})
            matrices.append(FactoredMatrix("dense", name, arrays).with_integers({"weight": integers}))
        return matrices


class QuantizedMatrix:
    """A weight outside the attention; its bias stays as it is."""

    def __init__(self, name: str, weight: QuantizedWeight, n_bias: int) -> None:
        self.name, self.weight, self.fixed = name, weight, n_bias

    @property
    def curves(self) -> list[Curve]:
        """Stored bits and loss at the options."""
        return [self.weight.curve()]

    def options_of(self, bits: int) -> list[int]:
        """Return the option with this many bits."""
        return [self.weight.format_of(bits)]

    def matrices(self, choice: Sequence[int]) -> list[FactoredMatrix]:
        """Return the rounded weight at one option."""
        return self.packed(self.weight.rounded(choice[0]))

    def packed(self, integers: Integers) -> list[FactoredMatrix]:
        """Return the stored form of the rounded weight."""
        part = whole_part("")
        return [FactoredMatrix("dense", "", {part: integers.values()}).with_integers({part: integers})]
