"""Linear layers of projections with a rank per head.

A head of rank r uses the first r of its d_head inner dimensions; the others are zero.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tnlib_adapters.factors.expansion import places
from tnlib_adapters.transformers_plugin.factored_linear import Borrowed, FactoredLinear, Multiplications, shapes


class _HeadLinear(FactoredLinear):
    """Base class: indices of the used inner dimensions, and padding with zeros."""

    filled: Tensor | None

    def __init__(
        self,
        factors: Borrowed,
        features: tuple[int, int],
        ranks: Sequence[int],
        d_head: int,
    ) -> None:
        super().__init__(factors, features)
        self.ranks, self.d_head = tuple(ranks), d_head
        self.rank, self.width = sum(ranks), len(ranks) * d_head
        if max(ranks) > d_head:
            raise ValueError(f"ranks {self.ranks} for heads of {d_head}")

    def settle(self) -> None:
        """Create the indices, which are not in the state dict, on the device of the factors."""
        device = self.like().device
        indices = (
            None
            if self.rank == self.width
            else torch.tensor(places(self.ranks, self.d_head), dtype=torch.long, device=device)
        )
        self.register_buffer("filled", indices, persistent=False)

    def spread(self, y: Tensor) -> Tensor:
        """Pad the columns of all heads, (..., rank), with zeros to (..., width)."""
        if self.filled is None:
            return y
        return y.new_zeros(*y.shape[:-1], self.width).index_copy(-1, self.filled, y)

    def cost(self) -> Multiplications:
        """Return the size of the factor, and 0: multiplying out only adds zeros."""
        return Multiplications(self.rank * (self.in_features + self.out_features - self.width), 0)


class IntoHeads(_HeadLinear):
    """x (..., d_model) to heads: a factor (d_model, r), or its transpose; one more row holds the bias."""

    def __init__(
        self,
        factors: Borrowed,
        ranks: Sequence[int],
        d_head: int,
        d_model: int,
        *,
        transposed: bool = False,
    ) -> None:
        super().__init__(factors, (d_model, len(ranks) * d_head), ranks, d_head)
        self.transposed = transposed
        shape = shapes(factors, "factor")[0]
        if tuple(shape[:: -1 if transposed else 1]) not in (
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


class OutOfHeads(_HeadLinear):
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
