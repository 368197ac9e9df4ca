"""Linear layers of interpolative decompositions: unit rows of the left factor are not stored.

The unit rows cost no multiplications either: x L = x[others] left + x[units]. Two copies avoid or replace them, and the
cheaper one is made: x with its columns in the order of `left` and of the unit rows, or L with its unit rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional

from tnlib_adapters.factors.integers import IntegerFormat
from tnlib_adapters.transformers_plugin.factored_linear import (
    Borrowed,
    FactoredLinear,
    Factors,
    Multiplications,
    must_agree,
    shapes,
)

# Copied numbers in units of multiplications, on one thread with AVX-512: 0.5 to 1.1 ns for a column of x that moves,
# 0.5 ns for a number of L, 0.024 ns for a multiplication.
_PER_COLUMN, _PER_ENTRY = 30, 20
_VECTOR = 8  # ranks that are no multiples of it cost a product of many rows up to 40 % more


class InterpolativeLinear(FactoredLinear):
    """W = L R; L (m, r) is the unit matrix in some rows and `left` (m - r, r) in the others.

    If m = in_features + 1, the last row is the bias.
    """

    columns: Tensor
    inverse: Tensor

    def __init__(self, factors: Factors | Borrowed, rows: Sequence[int], in_features: int) -> None:
        left, right = shapes(factors, "left", "right")
        must_agree(left[1], right[0])
        must_agree(len(rows), right[0])
        super().__init__(factors, (in_features, right[1]))
        self.unit_rows, self.n_rows = tuple(rows), left[0] + len(rows)
        if self.n_rows not in (in_features, in_features + 1) or len({*range(self.n_rows), *rows}) > self.n_rows:
            raise ValueError(f"{self.n_rows} rows for {in_features} inputs")
        self.has_bias_row = self.n_rows > in_features

    def settle(self) -> None:
        """Create the row indices, which are not in the state dict, on the device of the factors."""
        chosen = set(self.unit_rows)
        order = torch.tensor([*(row for row in range(self.n_rows) if row not in chosen), *self.unit_rows])
        # the column of the bias row is overwritten or left out; any column stands for it
        columns = order[order < self.in_features] if self._bias_unit is None else order % max(self.in_features, 1)
        for name, rows in (("columns", columns), ("inverse", order.argsort())):
            self.register_buffer(name, rows.to(self.like().device, torch.int32), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return x W + b."""
        self.check(x)
        y = self._through(x, add_bias=True)
        bias = super().added()
        return y if bias is None else y + bias.to(y.dtype)

    def product(self, x: Tensor) -> Tensor:
        """Return x W."""
        return self._through(x, add_bias=False)

    def multiplied_integers(self) -> dict[str, tuple[tuple[int, ...], IntegerFormat]]:
        """Return the rows of L without units, and R, as far as they are in integers."""
        return {name: (self._shapes[name], form) for name, form in self._formats.items()}

    def matrix(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return W."""
        return (self.left_factor(dtype) @ self.part("right", dtype))[: self.in_features]  # m [r], [r] n

    def added(self, dtype: torch.dtype | None = None) -> Tensor | None:
        """Return the bias, from its row if there is one."""
        if self.has_bias_row:
            row: Tensor = self.left_factor(dtype)[-1] @ self.part("right", dtype)
            return row
        return super().added(dtype)

    def cost(self) -> Multiplications:
        """Return r (m - r + out), and r (m - r) out."""
        r = len(self.unit_rows)
        others = self.n_rows - r
        return Multiplications(r * (others + self.out_features), r * others * self.out_features)

    def left_factor(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return L with its unit rows, and with the bias row if there is one."""
        left = self.part("left", dtype)
        unit = torch.eye(len(self.unit_rows), dtype=left.dtype, device=left.device)
        return torch.cat([left, unit]).index_select(0, self.inverse)

    def _through(self, x: Tensor, *, add_bias: bool) -> Tensor:
        rows = x.reshape(-1, self.in_features)
        with_bias = add_bias and self.has_bias_row
        if self._gathers(len(rows)):
            y = self.times(self._gathered(rows, add_bias=with_bias), "right")  # b [r], [r] n
        else:
            extra = -len(self.unit_rows) % _VECTOR
            left = functional.pad(self.left_factor(), (0, extra))
            inner = rows @ left[: self.in_features]  # b [m], [m] r
            inner = inner + left[-1] if with_bias else inner
            y = inner @ functional.pad(self.part("right"), (0, 0, 0, extra))  # b [r], [r] n
        return y.reshape(*x.shape[:-1], self.out_features)

    def _gathers(self, n_rows: int) -> bool:
        """Test if a copy of the columns of x costs less than the unit rows of L, copied and multiplied."""
        r = len(self.unit_rows)
        return n_rows * (_PER_COLUMN * self.in_features - r * r) < _PER_ENTRY * self.n_rows * r

    def _gathered(self, rows: Tensor, *, add_bias: bool) -> Tensor:
        """Return x L, with the bias row if `add_bias`."""
        r = len(self.unit_rows)
        n_left = self.n_rows - r
        n_others = n_left if self._bias_unit is not None or not self.has_bias_row else n_left - 1
        gathered = rows.index_select(1, self.columns)  # on two axes it is 4 to 10 times faster than on three
        units = gathered[:, n_others : n_others + r]
        if self._bias_unit is not None:
            ones = units.new_full((len(rows),), float(add_bias))
            units = units.select_scatter(ones, 1, self._bias_unit)
        kernel = self.kernel("left", rows)
        if kernel is not None:  # a row of `left` that is the bias meets a column of ones
            others = functional.pad(gathered[:, :n_others], (0, n_left - n_others), value=float(add_bias))
            return units + cast(Tensor, kernel(others))
        left = self.part("left")
        if add_bias and n_others < n_left:
            units = units + left[-1]
        return torch.addmm(units, gathered[:, :n_others], left[:n_others])  # b r, b [m - r], [m - r] r

    @property
    def _bias_unit(self) -> int | None:
        """The column of L whose unit row is the bias."""
        return self.unit_rows.index(self.in_features) if self.in_features in self.unit_rows else None
