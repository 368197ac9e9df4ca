"""Linear layers of projections whose heads have ranks of their own.

A head fills some of its d_head inner dimensions, the first ones unless it is told, and the others are zero.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from tnlib_adapters.checkpoints.factored import places
from tnlib_adapters.torch.modules import Borrowed, Cost, FactoredLinear, shapes


class _Heads(FactoredLinear):
    """What reads or writes the filled inner dimensions."""

    filled: Tensor | None

    def __init__(
        self,
        factors: Borrowed,
        features: tuple[int, int],
        ranks: Sequence[int],
        d_head: int,
        columns: Sequence[Sequence[int]] | None = None,
    ) -> None:
        super().__init__(factors, features)
        self.ranks, self.d_head = tuple(ranks), d_head
        self.columns = [range(r) for r in ranks] if columns is None else columns
        self.rank, self.width = sum(ranks), len(ranks) * d_head
        if max(ranks) > d_head:
            raise ValueError(f"ranks {self.ranks} for heads of {d_head}")

    def settle(self) -> None:
        """Make the indices, which are no part of a state dict, on the device where the factors have arrived."""
        device = self.like().device
        indices = (
            None
            if self.rank == self.width
            else torch.tensor(places(self.columns, self.d_head), dtype=torch.long, device=device)
        )
        self.register_buffer("filled", indices, persistent=False)

    def spread(self, y: Tensor) -> Tensor:
        """Put the columns of all heads, (..., rank), into their places, (..., width)."""
        if self.filled is None:
            return y
        return y.new_zeros(*y.shape[:-1], self.width).index_copy(-1, self.filled, y)

    def cost(self) -> Cost:
        """Return the entries of the factor; multiplying out only adds zeros to it."""
        return Cost(self.rank * (self.in_features + self.out_features - self.width), 0)


class IntoHeads(_Heads):
    """x (..., d_model) to heads: a factor (d_model, r), or its transpose; one more row holds the bias."""

    def __init__(
        self,
        factors: Borrowed,
        ranks: Sequence[int],
        d_head: int,
        d_model: int,
        *,
        transposed: bool = False,
        columns: Sequence[Sequence[int]] | None = None,
    ) -> None:
        super().__init__(factors, (d_model, len(ranks) * d_head), ranks, d_head, columns)
        self.transposed = transposed
        shape = shapes(factors, "factor")[0]
        if len(shape) == 2 and tuple(shape[:: -1 if transposed else 1]) not in (
            (d_model, self.rank),
            (d_model + 1, self.rank),
        ):
            raise ValueError(f"a factor of shape {tuple(shape)} for ranks {self.ranks}")

    def rows(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the factor with its bias, (d_model or d_model + 1, r)."""
        factor = self.part("factor", dtype)
        return factor.T if self.transposed else factor

    def forward(self, x: Tensor) -> Tensor:
        """Return x W + b."""
        self.check(x)
        rows = self.rows()
        y = x @ rows[: self.in_features]
        if len(rows) > self.in_features:
            y = y + rows[-1].to(y.dtype)
        y = self.spread(y)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def product(self, x: Tensor) -> Tensor:
        """Return x W."""
        return self.spread(x @ self.rows()[: self.in_features])

    def matrix(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return W."""
        return self.spread(self.rows(dtype)[: self.in_features])

    def added(self, dtype: torch.dtype | None = None) -> Tensor | None:
        """Return the bias, from its row if there is one."""
        rows = self.rows(dtype)
        return self.spread(rows[-1]) if len(rows) > self.in_features else super().added(dtype)


class PivotedIntoHeads(IntoHeads):
    """The same where some rows of each head's factor are a unit matrix and only the others are stored, flat."""

    order: Tensor
    others: Tensor
    units: Tensor

    def __init__(
        self,
        factors: Borrowed,
        units: Sequence[Sequence[int]],
        d_head: int,
        d_model: int,
        *,
        with_bias: bool,
    ) -> None:
        super().__init__(factors, [len(one) for one in units], d_head, d_model)
        self.n_rows, self.unit_rows = d_model + with_bias, tuple(tuple(one) for one in units)
        self.stored = [(self.n_rows - r) * r for r in self.ranks]
        (shape,) = shapes(factors, "factor")
        if shape != (sum(self.stored),) or any(row >= self.n_rows for one in units for row in one):
            raise ValueError(f"a factor of shape {tuple(shape)} for ranks {self.ranks}")

    def settle(self) -> None:
        """Make the indices of all rows, unit or not."""
        super().settle()
        device = self.like().device
        order, others = [], []
        for units in self.unit_rows:
            rest = sorted(set(range(self.n_rows)) - set(units))
            place = {row: k for k, row in enumerate([*rest, *units])}
            order.append([place[row] for row in range(self.n_rows)])
            others.extend(rest)
        flat = [row for units in self.unit_rows for row in units]
        for name, rows in (("order", order), ("others", others), ("units", flat)):
            self.register_buffer(name, torch.tensor(rows, dtype=torch.int32, device=device), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return x W + b; for a few rows without putting the unit rows between the others."""
        self.check(x)
        if x[..., 0].numel() * len(self.ranks) > 4 * self.d_head:
            return super().forward(x)
        wide = functional.pad(x, (0, 1), value=1.0) if self.n_rows > self.in_features else x
        sizes = [self.n_rows - r for r in self.ranks]
        read = torch.split(wide.index_select(-1, self.others), sizes, -1)
        y = torch.cat([part @ block for part, block in zip(read, self._blocks(), strict=True)], -1)
        y = self.spread(y + wide.index_select(-1, self.units).to(y.dtype))
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def rows(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the factor with its unit rows."""
        blocks = self._blocks(dtype)
        unit = torch.eye(max(self.ranks), dtype=blocks[0].dtype, device=blocks[0].device)
        whole = [torch.cat([block, unit[:r, :r]]) for block, r in zip(blocks, self.ranks, strict=True)]
        return torch.cat([a.index_select(0, order) for a, order in zip(whole, self.order, strict=True)], 1)

    def _blocks(self, dtype: torch.dtype | None = None) -> list[Tensor]:
        flat, scale = self.held("factor")
        blocks = [a.view(self.n_rows - r, r) for a, r in zip(torch.split(flat, self.stored), self.ranks, strict=True)]
        if scale is None:
            return blocks if dtype is None else [a.to(dtype) for a in blocks]
        scales = torch.split(scale if dtype is None else scale.to(dtype), list(self.ranks))
        return [a.to(own.dtype) * own for a, own in zip(blocks, scales, strict=True)]


class OutOfHeads(_Heads):
    """Heads to x (..., d_model): a factor (r, d_model)."""

    def __init__(self, factors: Borrowed, ranks: Sequence[int], d_head: int) -> None:
        (shape,) = shapes(factors, "factor")
        super().__init__(factors, (len(ranks) * d_head, shape[1]), ranks, d_head)
        if shape[0] != self.rank:
            raise ValueError(f"a factor of shape {tuple(shape)} for ranks {self.ranks}")

    def product(self, x: Tensor) -> Tensor:
        """Return x W."""
        filled = x if self.filled is None else x.index_select(-1, self.filled)
        return filled @ self.part("factor")  # ... [r], [r] d

    def matrix(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return W."""
        return self.spread(self.part("factor", dtype).T).T
