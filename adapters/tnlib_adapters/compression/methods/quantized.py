"""Weights in integers of few bits, whole or as two factors, each with the expected loss of the output at every size.

The factors of rank r are the first r components of a weight W in the metric of its inputs (moments A) and of its output
gradients (moments P). Both are rounded with compensation, each component with scales of its own: the left factor L in
the metric of A and R P R^T, and the right factor, refitted to the rounded L,

    R = (L^T A L)^-1 L^T A W,

in the metric of L^T A L and P. Below two bits per number, factors of 3 bits lose less than whole weights can.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from tnlib._typing import Array
from tnlib_adapters.compression.allocate import Curve
from tnlib_adapters.compression.methods.compensated_rounding import round_compensated, rounding_loss
from tnlib_adapters.compression.methods.components import components, multiply_rows
from tnlib_adapters.factors.factored_matrix import FactoredMatrix, whole_part
from tnlib_adapters.factors.integers import BITS, IntegerFormat, Integers

GROUPS = (0, 128)  # numbers that share a scale: a whole column, or 128 of its entries
_MEASURED = 4  # bits up to which losses are measured; those at more are extrapolated
_PER_BIT = 3.9  # ratio of the losses of neighbouring widths above them: 3.8 to 3.95 on MiniLM and the built-in Llama
_FACTOR_BITS = 3
_FACTOR_COSTS = (0.6, 1.1, 1.7)  # bits per number of the weight at which the loss of factors is measured
_N_RANKS = 24  # options between them, with interpolated losses
_RIDGE = 1e-6  # of the refitted factor, relative to the mean moment


@dataclass(frozen=True)
class Option:
    """A stored form of a weight.

    Parameters
    ----------
    bits, group
        Bits of a number, and numbers per scale, 0 for all of a column or component.
    rank
        Of the factors; None for the whole weight.
    cost
        Stored bits.
    loss
        Expected loss of the output.
    """

    bits: int
    group: int
    rank: int | None
    cost: int
    loss: float


@dataclass(frozen=True)
class RoundedProduct:
    """A weight as rounded, whole or as two factors, and the same matrices before they were rounded."""

    integers: tuple[Integers, ...]
    originals: tuple[Array, ...]

    def values(self) -> Array:
        """Return the weight multiplied out, in float64."""
        first, *rest = (integers.values(np.float64) for integers in self.integers)
        product: Array = first @ rest[0] if rest else first
        return product


class QuantizedWeight:
    """A weight (m, n) and its stored forms, ordered by bits.

    Parameters
    ----------
    weight
        Acting on rows, x @ weight.
    reads, slopes
        Second moments of the inputs and of the gradients at the output, see `round_compensated`.
    loss_scale
        Loss of the output per unit of `rounding_loss`.
    by_row
        True for a table, whose rows have scales of their own, so that one is looked up without the others; it stays
        whole.
    bits
        Bits of the only option, a whole weight with the fewest scales; None for all options.
    """

    def __init__(
        self,
        weight: Array,
        reads: Array | None,
        slopes: Array | None,
        loss_scale: float,
        *,
        by_row: bool = False,
        bits: int | None = None,
    ) -> None:
        self.weight, self._reads, self._slopes = weight, reads, slopes
        self._loss_scale, self._by_row, self._bits = loss_scale, by_row, bits

    @cached_property
    def options(self) -> list[Option]:
        """All forms that no other undercuts in bits and in loss, by ascending bits."""
        if self._bits is not None:
            return self._whole((self._bits,), GROUPS[:1])
        is_factored = not self._by_row and self.weight.any()  # zeros have no components
        candidates = [*self._whole(BITS, GROUPS), *(self._factored() if is_factored else [])]
        options = list[Option]()
        for option in sorted(candidates, key=lambda option: (option.cost, option.loss)):
            if not options or (option.cost > options[-1].cost and option.loss < options[-1].loss):
                options.append(option)
        return options

    def curve(self, n_added: int = 0) -> Curve:
        """Return stored bits and losses of the options; `n_added` bits are stored with each."""
        costs = np.array([option.cost for option in self.options])
        return Curve(costs + n_added, np.array([option.loss for option in self.options]))

    def rounded(self, option: int) -> RoundedProduct:
        """Return the weight in the form of an option."""
        chosen = self.options[option]
        if chosen.rank is not None:
            return self._product(chosen.rank)
        form = IntegerFormat(chosen.bits, int(self._by_row), chosen.group)
        return RoundedProduct((round_compensated(self.weight, form, self._reads, self._slopes),), (self.weight,))

    def _whole(self, widths: Sequence[int], groups: Sequence[int]) -> list[Option]:
        """Return the whole weight in these widths, ascending, and groups; losses beyond 4 bits are extrapolated."""
        axis, options = int(self._by_row), list[Option]()
        for group in (group for group in groups if group < self.weight.shape[axis]):
            losses = dict[int, float]()
            for bits in widths:
                measured = min(bits, _MEASURED)
                if measured not in losses:
                    form = IntegerFormat(measured, axis, group)
                    rounded = round_compensated(self.weight, form, self._reads, self._slopes, descend=False)
                    losses[measured] = self._loss(rounded.values(np.float64))
                form = IntegerFormat(bits, axis, group if bits < 8 else 0)
                expected = losses[measured] * _PER_BIT ** (measured - bits)
                options.append(Option(bits, form.group, None, form.n_bits(self.weight.shape), expected))
        return options

    def _factored(self) -> list[Option]:
        """Return factors of different ranks, whose losses are interpolated between three."""
        cost_of_one = self._factor_cost(1)
        ranks = sorted({int(cost * self.weight.size / cost_of_one) for cost in _FACTOR_COSTS} - {0})
        ranks = [rank for rank in ranks if rank <= min(self.weight.shape)]
        if not ranks:
            return []
        losses = [self._loss(self._product(rank, descend=False).values()) for rank in ranks]
        chosen = np.unique(np.linspace(ranks[0], ranks[-1], _N_RANKS).astype(int))
        tiny = np.finfo(np.float64).tiny
        between = np.exp(np.interp(chosen, ranks, np.log(np.maximum(losses, tiny))))
        pairs = zip(chosen.tolist(), between.tolist(), strict=True)
        return [Option(_FACTOR_BITS, 0, rank, self._factor_cost(rank), loss) for rank, loss in pairs]

    @cached_property
    def _components(self) -> tuple[Array, Array]:
        own = components(self.weight.astype(np.float64), self._reads, self._slopes)
        return own.left, own.right

    def _product(self, rank: int, *, descend: bool = True) -> RoundedProduct:
        """Return the rounded factors of this rank."""
        left, right = self._components[0][:, :rank], self._components[1][:rank]
        forms = IntegerFormat(_FACTOR_BITS, 0), IntegerFormat(_FACTOR_BITS, 1)
        inner = right @ right.T if self._slopes is None else right @ self._slopes @ right.T
        first = round_compensated(left, forms[0], self._reads, inner, descend=descend)
        held = first.values(np.float64)
        weighted = held if self._reads is None else multiply_rows(self._reads, held)
        moments = held.T @ weighted
        damped = moments + _RIDGE * (np.trace(moments) / rank or 1.0) * np.eye(rank)
        refitted = np.linalg.solve(damped, weighted.T @ self.weight)
        second = round_compensated(refitted, forms[1], moments, self._slopes, descend=descend)
        return RoundedProduct((first, second), (left, refitted))

    def _factor_cost(self, rank: int) -> int:
        m, n = self.weight.shape
        return IntegerFormat(_FACTOR_BITS, 0).n_bits((m, rank)) + IntegerFormat(_FACTOR_BITS, 1).n_bits((rank, n))

    def _loss(self, values: Array) -> float:
        return self._loss_scale * rounding_loss(self.weight - values, self._reads, self._slopes)


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

    def rounded(self, choice: Sequence[int]) -> dict[str, RoundedProduct]:
        """Return the weights at one option each."""
        return {name: w.rounded(option) for (name, w), option in zip(self.weights.items(), choice, strict=True)}

    def biases(self, rounded: Mapping[str, RoundedProduct]) -> dict[str, Array]:
        """Return the biases for rounded weights."""
        biases = dict(self._biases)
        for name, mean in self._means.items():
            shift = mean @ (self.weights[name].weight - rounded[name].values())
            biases[name] = (biases[name] + shift).astype(biases[name].dtype)
        return biases

    def matrices(self, choice: Sequence[int]) -> list[FactoredMatrix]:
        """Return the rounded weights at one option each."""
        rounded = self.rounded(choice)
        integers = {name: product.integers for name, product in rounded.items()}
        return self.packed(integers, self.biases(rounded))

    def packed(self, integers: Mapping[str, tuple[Integers, ...]], biases: Mapping[str, Array]) -> list[FactoredMatrix]:
        """Return the factored matrices of rounded weights or factors by projection, with these biases."""
        return [_packed(held, name, biases.get(name)) for name, held in integers.items()]


class QuantizedMatrix:
    """A weight outside the attention; its bias of `n_bias` numbers stays as it is, in `bias_bits` bits."""

    def __init__(self, name: str, weight: QuantizedWeight, n_bias: int, bias_bits: int) -> None:
        self.name, self.weight, self.fixed, self._bias_bits = name, weight, n_bias, bias_bits

    @property
    def curves(self) -> list[Curve]:
        """Stored bits and loss at the options."""
        return [self.weight.curve(self._bias_bits)]

    def matrices(self, choice: Sequence[int]) -> list[FactoredMatrix]:
        """Return the rounded weight at one option."""
        return self.packed(self.weight.rounded(choice[0]).integers)

    def packed(self, integers: tuple[Integers, ...]) -> list[FactoredMatrix]:
        """Return the factored matrix of the rounded weight, or of its two rounded factors."""
        return [_packed(integers)]


def _packed(integers: tuple[Integers, ...], of: str = "", bias: Array | None = None) -> FactoredMatrix:
    """Return the factored matrix of a rounded weight, or of its two factors."""
    kind, names = ("dense", (whole_part(of),)) if len(integers) == 1 else ("low_rank", ("left", "right"))
    parts = dict(zip(names, integers, strict=True))
    arrays = {part: held.values() for part, held in parts.items()} | ({} if bias is None else {"bias": bias})
    return FactoredMatrix(kind, of, arrays).with_integers(parts)
