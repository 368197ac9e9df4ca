"""Linear layers of interpolative decompositions: unit rows of the left factor are not stored."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from tnlib_adapters.transformers_plugin.factored_linear import (
    Borrowed,
    Cost,
    FactoredLinear,
    Factors,
    must_agree,
    shapes,
)


class InterpolativeLinear(FactoredLinear):
    """W = L R; L (m, r) is the unit matrix in some rows and `left` (m - r, r) in the others.

    If m = in_features + 1, the last row is the bias.
    """

    units: Tensor
    others: Tensor

    def __init__(self, factors: Factors | Borrowed, rows: Sequence[int], in_features: int) -> None:
        left, right = shapes(factors, "left", "right")
        must_agree(left[1], right[0])
        must_agree(len(rows), right[0])
        super().__init__(factors, (in_features, right[1]))
        self.unit_rows, self.n_rows = tuple(rows), left[0] + len(rows)
        if self.n_rows not in (in_features, in_features + 1) or len({*range(self.n_rows), *rows}) > self.n_rows:
            raise ValueError(f"{self.n_rows} rows for {in_features} inputs")

    def settle(self) -> None:
        """Create the row indices, which are not in the state dict, on the device of the factors."""
        chosen = set(self.unit_rows)
        rest = [row for row in range(self.n_rows) if row not in chosen]
        for name, rows in (("units", self.unit_rows), ("others", rest)):
            index = torch.tensor(rows, dtype=torch.int32, device=self.like().device)
            self.register_buffer(name, index, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return x W + b."""
        self.check(x)
        cost, rows = self.cost(), x[..., 0].numel()
        if rows * cost.per_row > cost.forming + rows * self.in_features * self.out_features:
            return super().forward(x)
        wide = functional.pad(x, (0, 1), value=1.0) if self.n_rows > self.in_features else x
        y = self._through(wide)
        bias = super().added()
        return y if bias is None else y + bias.to(y.dtype)

    def product(self, x: Tensor) -> Tensor:
        """Return x W."""
        return self._through(functional.pad(x, (0, 1)) if self.n_rows > self.in_features else x)

    def matrix(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return W."""
        return (self._left(dtype) @ self.part("right", dtype))[: self.in_features]  # m [r], [r] n

    def added(self, dtype: torch.dtype | None = None) -> Tensor | None:
        """Return the bias, from its row if there is one."""
        if self.n_rows > self.in_features:
            row: Tensor = self._left(dtype)[-1] @ self.part("right", dtype)
            return row
        return super().added(dtype)

    def cost(self) -> Cost:
        """Return r (m - r + out), and r (m - r) out."""
        r = len(self.unit_rows)
        others = self.n_rows - r
        return Cost(r * (others + self.out_features), r * others * self.out_features)

    def _through(self, wide: Tensor) -> Tensor:
        mixed = wide.index_select(-1, self.others) @ self.part("left")  # ... [m - r], [m - r] r
        return (mixed + wide.index_select(-1, self.units).to(mixed.dtype)) @ self.part("right")  # ... [r], [r] n

    def _left(self, dtype: torch.dtype | None = None) -> Tensor:
        left = self.part("left", dtype)
        unit = torch.eye(len(self.unit_rows), dtype=left.dtype, device=left.device)
        order = torch.cat([self.others, self.units]).argsort()
        return torch.cat([left, unit]).index_select(0, order)
