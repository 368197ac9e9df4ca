"""Weights in integers of few bits, whole or as two factors, with the expected loss of every form.

The factors of rank r are the first r components of a weight W in the metric of its inputs (moments A) and of its output
gradients (moments P), with P-orthonormal rows of R. A product does not change under L Q, Q^T R with an orthogonal Q
(r, r), but its rounding does. With compensation an entry costs its step squared times the geometric mean of the
moments. With the components apart, steps follow their singular values s, and both factors cost about the mean of s^2.
After a discrete cosine transform Q all columns of L, and all rows of R, are of one size: R costs the geometric mean of
s^2. Both factors are rounded with a scale per column of L and row of R: L in the metric of A and R P R^T, and R,
refitted to the rounded L,

    R = (L^T A L)^-1 L^T A W,

in the metric of L^T A L and P. Below two bits per parameter, factors of 2 or 3 bits lose less than whole weights can.

"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from tnlib._typing import Array
from tnlib_adapters.compression.allocate import Curve
from tnlib_adapters.compression.methods.compensated_rounding import round_compensated
from tnlib_adapters.compression.methods.components import Components, components, multiply_rows, rounding_loss
from tnlib_adapters.factors.expansion import weight_of_parts
from tnlib_adapters.factors.factored_matrix import FactoredMatrix, whole_part
from tnlib_adapters.factors.gguf_blocks import block_formats
from tnlib_adapters.factors.integers import BITS, IntegerFormat, Integers

GROUPS = (0, 128)  # numbers that share a scale: a whole column, or 128 of its entries
# Losses by bits, relative to the measured one at 3 bits, in whole columns and in groups: those of
# normally distributed numbers, met to 3 % by the weights of SmolLM2.
_MEASURED = 3
_OF_COLUMNS = {2: 3.8, 3: 1.0, 4: 0.286, 5: 0.082, 6: 0.022, 8: 0.0014}
_OF_GROUPS = {2: 3.85, 3: 1.0, 4: 0.27, 5: 0.069, 6: 0.017, 8: 0.0014}
_WITH_MINIMUM = {2: 0.97, 4: 0.82, 5: 0.8}  # of the loss without one
_FACTOR_BITS = (2, 3)
_MORE_FACTOR_BITS = (4, 5, 6, 8)  # where numbers are bounded
_FRACTIONS = (0.2, 0.6)  # numbers of factors per number of the weight, at which losses are measured
_LARGEST_FRACTION = 0.95  # one more where numbers are bounded
_N_RANKS = 24  # options between them, with interpolated losses
_RIDGE = 1e-6  # of the refitted factor, relative to the mean moment


@dataclass(frozen=True)
class Option:
    """A stored form of a weight."""

    form: IntegerFormat  # of the whole weight, or of the first of two factors
    rank: int | None  # of two factors; None for the whole weight
    cost: int  # stored bits
    numbers: int  # stored numbers
    loss: float  # expected loss of the output


@dataclass(frozen=True)
class Forms:
    """Forms in which weights may be stored."""

    factors: bool = True  # True for products of two factors too
    fewer_numbers: bool = False  # True for forms that others undercut in bits and in loss, but not in numbers
    widths: tuple[int, ...] = BITS  # bits of whole weights
    groups: tuple[int, ...] = GROUPS  # numbers that share a scale, 0 for a whole column
    # True for the grid of engines, whose groups divide the columns: the largest that does is an option
    has_zero: bool = False
    in_blocks: bool = False  # True for the block types of GGUF
    fused: bool = False  # True if weights of one input share one form

    def whole(self, length: int, axis: int) -> Iterator[tuple[IntegerFormat, list[IntegerFormat]]]:
        """Yield formats of whole weights with columns of this length, after the one in which their loss is measured."""
        if self.in_blocks:
            blocks = [replace(form, axis=axis) for form in block_formats(length, self.widths)]
            for group in {form.group: None for form in blocks}:
                yield IntegerFormat(_MEASURED, axis, group, True), [form for form in blocks if form.group == group]
            return
        for group in self.groups_of(length):
            forms = [
                IntegerFormat(bits, axis, group if bits < 8 or self.has_zero else 0, self.has_zero)
                for bits in self.widths
            ]
            yield IntegerFormat(_MEASURED, axis, group, self.has_zero), forms

    def groups_of(self, length: int) -> list[int]:
        """Return the groups of a column of this length."""
        column = [0] if 0 in self.groups else []
        if self.has_zero:
            largest = next((group for group in self.groups if group and length % group == 0), None)
            return column + ([] if largest is None else [largest])
        return column + [group for group in self.groups if 0 < group < length]

    def fewest_bits(self, shape: tuple[int, ...], *, by_row: bool) -> int:
        """Return the bits of the smallest form of a weight of this shape."""
        axis = int(by_row)
        fewest = min(form.n_bits(shape) for _, forms in self.whole(shape[axis], axis) for form in forms)
        ranks = [] if by_row or not self.factors else self.ranks(shape)
        return min([fewest, *(bits_of_factors(shape, rank, min(_FACTOR_BITS)) for rank in ranks[:1])])

    def ranks(self, shape: tuple[int, ...]) -> list[int]:
        """Return the ranks, at most a few, at which losses of factors of a weight of this shape are measured."""
        fractions = (*_FRACTIONS, _LARGEST_FRACTION) if self.fewer_numbers else _FRACTIONS
        return sorted({int(fraction * math.prod(shape) / sum(shape)) for fraction in fractions} - {0})


def values_of(rounded: Sequence[Integers], dtype: np.dtype[Any]) -> Array:
    """Return a weight of rounded parts, multiplied out in a dtype."""
    weight: Array = weight_of_parts([integers.values(dtype) for integers in rounded])
    return weight


def bits_of_factors(shape: tuple[int, ...], rank: int, bits: int) -> int:
    """Return the bits of rounded factors of a matrix (m, n), with their scales."""
    m, n = shape
    return IntegerFormat(bits, 0).n_bits((m, rank)) + IntegerFormat(bits, 1).n_bits((rank, n))


class Metric(NamedTuple):
    """Second moments of the inputs and of the gradients at the output, see `round_compensated`."""

    reads: Array | None
    slopes: Array | None
    scale: float = 1.0  # loss of the output per unit of `rounding_loss`

    def loss(self, error: Array) -> float:
        """Return the expected loss of the output for an error of the weight."""
        return self.scale * rounding_loss(error, self.reads, self.slopes)


@dataclass(frozen=True)
class StoredBias:
    """The bias beside a weight, which is not rounded."""

    n_bits: int = 0
    values: Array | None = None  # None: it stays in its own tensor
    mean: Array | None = None  # input, by which rounding changes the mean output: that is subtracted. None to leave it

    def beside(self, weight: Array, rounded: Sequence[Integers]) -> Array | None:
        """Return the values for a weight and its rounded parts."""
        if self.values is None or self.mean is None:
            return self.values
        shifted: Array = self.values + self.mean @ (weight - values_of(rounded, weight.dtype))
        return shifted.astype(self.values.dtype)


class QuantizedWeight:
    """A weight (m, n), acting on rows, and its stored forms, whose losses are measured when it is made.

    `metric` is that of its errors, `of` the projection, "" for the weight of a module, and `forms` are options. With
    `by_row`, for a table, rows have scales of their own, so that one is looked up without the others; it stays whole.
    """

    def __init__(
        self,
        weight: Array,
        metric: Metric,
        *,
        of: str = "",
        bias: StoredBias = StoredBias(),
        by_row: bool = False,
        forms: Forms = Forms(),
    ) -> None:
        self.weight, self._metric, self._of, self._bias = weight, metric, of, bias
        self._by_row, self._forms = by_row, forms
        self._fused = ""
        factored = forms.factors and not by_row and weight.any()  # zeros have no components
        self._candidates = self._whole() + (self._factored() if factored else [])
        # all forms that no other undercuts in bits and in loss, by ascending bits
        self.options = [option for (option,) in self._undercut_by_none(zip(self._candidates))]

    def fuse(self, others: Sequence[QuantizedWeight], name: str) -> None:
        """Give this weight and others, a fused layer, the same options: one form for all of them."""
        weights = (self, *others)
        kept = self._undercut_by_none(zip(*(weight._candidates for weight in weights), strict=True))
        for weight, options in zip(weights, zip(*kept, strict=True), strict=True):
            weight.options, weight._fused = list(options), name

    def _undercut_by_none(self, candidates: Iterable[tuple[Option, ...]]) -> list[tuple[Option, ...]]:
        """Return the forms of a layer, an option for each weight, that no other undercuts; see `options`."""
        layers = [
            (sum(o.cost for o in layer), math.fsum(o.loss for o in layer), sum(o.numbers for o in layer), layer)
            for layer in candidates
        ]
        kept = list[tuple[int, float, int, tuple[Option, ...]]]()
        for layer in sorted(layers, key=itemgetter(0, 1, 2)):
            undercut = (other for other in kept if other[1] <= layer[1])
            if not any(other[2] <= layer[2] or not self._forms.fewer_numbers for other in undercut):
                kept.append(layer)
        return [options for *_, options in kept]

    @property
    def curve(self) -> Curve:
        """Stored bits, losses and numbers of the options, with those of the bias."""
        costs, losses, numbers = (
            np.array([getattr(o, of) for o in self.options]) for of in ("cost", "loss", "numbers")
        )
        bias = self._bias
        numbers += 0 if bias.values is None else bias.values.size
        return Curve(costs + bias.n_bits, losses, numbers, self._fused)

    def at(self, option: int) -> FactoredMatrix:
        """Return the rounded weight in the form of an option."""
        integers = self.rounded(option)
        kind, names = ("dense", (whole_part(self._of),)) if len(integers) == 1 else ("low_rank", ("left", "right"))
        parts, bias = dict(zip(names, integers, strict=True)), self._bias.beside(self.weight, integers)
        arrays = {part: own.values() for part, own in parts.items()} | ({} if bias is None else {"bias": bias})
        return FactoredMatrix(kind, self._of, arrays, integers=parts)

    def rounded(self, option: int) -> tuple[Integers, ...]:
        """Return the rounded parts of the weight in the form of an option, see `weight_of_parts`."""
        chosen = self.options[option]
        if chosen.rank is None:
            return (round_compensated(self.weight, chosen.form, self._metric.reads, self._metric.slopes),)
        return self._product(self._components(), chosen.rank, chosen.form.bits)

    def _whole(self) -> list[Option]:
        """Return the whole weight in all widths and groups, with losses relative to the measured one at 3 bits."""
        axis, options = int(self._by_row), list[Option]()
        for reference, forms in self._forms.whole(self.weight.shape[axis], axis):
            rounded = round_compensated(self.weight, reference, self._metric.reads, self._metric.slopes, descend=False)
            measured = self._loss([rounded])
            for form in forms:
                expected = measured * (_OF_GROUPS if reference.group else _OF_COLUMNS)[form.bits]
                expected *= _WITH_MINIMUM[form.bits] if form.has_minimum else 1
                options.append(Option(form, None, form.n_bits(self.weight.shape), self.weight.size, expected))
        return options

    def _factored(self) -> list[Option]:
        """Return factors of different widths and ranks, with losses of rounding interpolated between some ranks."""
        shape = self.weight.shape
        ranks = self._forms.ranks(shape)
        if not ranks:
            return []
        chosen = np.unique(np.linspace(ranks[0], ranks[-1], _N_RANKS).astype(int))
        factors = self._components()
        truncated = self._metric.loss(self.weight) * factors.lost
        losses = [self._loss(self._product(factors, rank, _MEASURED, descend=False)) for rank in ranks]
        rounding = np.maximum(np.array(losses) - truncated[ranks], np.finfo(np.float64).tiny)
        measured = np.exp(np.interp(chosen, ranks, np.log(rounding)))
        options = list[Option]()
        for bits in (*_FACTOR_BITS, *(_MORE_FACTOR_BITS if self._forms.fewer_numbers else ())):
            expected = truncated[chosen] + measured * _OF_COLUMNS[bits]
            for rank, loss in zip(chosen.tolist(), expected.tolist(), strict=True):
                cost = bits_of_factors(shape, rank, bits)
                options.append(Option(IntegerFormat(bits, 0), rank, cost, rank * sum(shape), loss))
        return options

    def _components(self) -> Components:
        """Return the components; they are not kept, as they are larger than the weight."""
        return components(self.weight, self._metric.reads, self._metric.slopes)

    def _product(self, factors: Components, rank: int, bits: int, *, descend: bool = True) -> tuple[Integers, ...]:
        mixing = _cosine_transform(rank).astype(self.weight.dtype)
        left, right = factors.left[:, :rank] @ mixing, mixing.T @ factors.right[:rank]
        forms = IntegerFormat(bits, 0), IntegerFormat(bits, 1)
        inner = right @ right.T if self._metric.slopes is None else right @ self._metric.slopes @ right.T
        first = round_compensated(left, forms[0], self._metric.reads, inner, descend=descend)
        rounded = first.values(np.float64)
        weighted = rounded if self._metric.reads is None else multiply_rows(self._metric.reads, rounded)
        moments = rounded.T @ weighted
        damped = moments + _RIDGE * (np.trace(moments) / rank or 1.0) * np.eye(rank)
        refitted = np.linalg.solve(damped, weighted.T).astype(self.weight.dtype) @ self.weight
        second = round_compensated(refitted, forms[1], moments, self._metric.slopes, descend=descend)
        return first, second

    def _loss(self, rounded: Sequence[Integers]) -> float:
        """Return the expected loss with these parts."""
        values = values_of(rounded, self.weight.dtype)
        return self._metric.loss(np.subtract(self.weight, values, out=values))  # in place: those of a table are large


def _cosine_transform(n: int) -> Array:
    """Return the orthogonal matrix (n, n) of the discrete cosine transform; no entry exceeds (2 / n)^1/2."""
    k = np.arange(n)
    matrix: Array = np.sqrt(2 / n) * np.cos(np.pi * (k[:, None] + 0.5) * k / n)
    matrix[:, 0] = 1 / np.sqrt(n)
    return matrix
