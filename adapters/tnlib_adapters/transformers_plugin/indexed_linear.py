"""Linear layers whose factors omit zeros or unit rows, which are restored by indices.

Interpolative decompositions do not store the unit rows of the left factor. They cost no multiplications either: x L =
x[others] left + x[units]. Two copies avoid or replace them, and the cheaper one is made: x with its columns in the
order of `left` and of the unit rows, or L with its unit rows.

Projections with a rank per head use the first r of the d_head inner dimensions of a head; the others are zero.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from tnlib_adapters.factors.expansion import places
from tnlib_adapters.transformers_plugin.factored_linear import FactoredLinear, Factors, Multiplications

# Copied numbers in units of multiplications, on one thread with AVX-512: 0.5 to 1.1 ns for a column of x that moves,
# 0.5 ns for a number of L, 0.024 ns for a multiplication.
_PER_COLUMN, _PER_ENTRY = 30, 20
_VECTOR = 8  # ranks that are no multiples of it cost a product of many rows up to 40 % more


class InterpolativeLinear(FactoredLinear):
    """The layer of :math:`W = L R`; L (m, r) is the unit matrix in some rows and `left` (m - r, r) in the others.

    If m = in_features + 1, the last row is the bias.

    References
    ----------
    H. Cheng, Z. Gimbutas, P. G. Martinsson, V. Rokhlin, "On the compression of low rank matrices", SIAM J. Sci. Comput.
    26 (2005).

    Examples
    --------
    Rows 0 and 2 of the matrix are stored, row 1 is their sum:

    >>> import numpy as np
    >>> from tnlib_adapters.transformers_plugin.factored_linear import Factors
    >>> left, right = np.ones((1, 2), np.float32), np.float32([[1, 2, 3], [4, 5, 6]])
    >>> factors = Factors.of_arrays({"left": left, "right": right})
    >>> layer = InterpolativeLinear(factors, [0, 2], in_features=3)
    >>> layer.settle()
    >>> layer.matrix().tolist(), layer.cost().per_row
    ([[1.0, 2.0, 3.0], [5.0, 7.0, 9.0], [4.0, 5.0, 6.0]], 8)
    """

    columns: Tensor
    inverse: Tensor
    bias_column: int | None  # among `columns`

    def __init__(self, factors: Factors, rows: Sequence[int], in_features: int) -> None:
        left, right = factors.shapes["left"], factors.shapes["right"]
        super().__init__(factors, (in_features, right[1]))
        self.unit_rows, self.n_rows = tuple(rows), left[0] + len(rows)
        self.has_bias_row = self.n_rows > in_features

    def settle(self) -> None:
        """Create the row indices, which are not in the state dict, on the device of the factors."""
        chosen = set(self.unit_rows)
        order = torch.tensor([*(row for row in range(self.n_rows) if row not in chosen), *self.unit_rows])
        self.bias_column = order.tolist().index(self.in_features) if self.has_bias_row else None
        # the column of the bias row is overwritten; any column stands for it
        for name, rows in (("columns", order % self.in_features), ("inverse", order.argsort())):
            self.register_buffer(name, rows.to(self.like().device, torch.int32), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return :math:`x W + b`."""
        self.check(x)
        y = self._through(x, add_bias=True)
        bias = super().added()
        return y if bias is None else y + bias.to(y.dtype)

    def product(self, x: Tensor) -> Tensor:
        """Return x W."""
        return self._through(x, add_bias=False)

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
        """Return :math:`r (m - r + n)`, and :math:`r (m - r) n`, with n = out_features."""
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
        gathered = rows.index_select(1, self.columns)  # on two axes it is 4 to 10 times faster than on three
        if self.bias_column is not None:
            gathered[:, self.bias_column] = float(add_bias)
        n_others = self.n_rows - len(self.unit_rows)
        return gathered[:, n_others:] + self.times(gathered[:, :n_others], "left")  # b r, b [m - r], [m - r] r


class HeadLinear(FactoredLinear):
    """A projection with a rank per head: a factor (in, r) into heads, or, if it `reads_heads`, (r, out) out of them.

    A factor into heads is stored as (r, in) if it is `transposed`, and may have the bias as an additional last row.
    """

    filled: Tensor | None

    def __init__(
        self,
        factors: Factors,
        ranks: Sequence[int],
        d_head: int,
        d_model: int,
        *,
        reads_heads: bool = False,
        transposed: bool = False,
    ) -> None:
        rank, width = sum(ranks), len(ranks) * d_head
        super().__init__(factors, (width, d_model) if reads_heads else (d_model, width))
        (self.name,) = factors.shapes
        self.ranks, self.d_head, self.rank, self.width = tuple(ranks), d_head, rank, width
        self.reads_heads, self.transposed = reads_heads, transposed

    def settle(self) -> None:
        """Create the indices, which are not in the state dict, on the device of the factors."""
        used = None if self.rank == self.width else torch.tensor(places(self.ranks, self.d_head), dtype=torch.long)
        self.register_buffer("filled", None if used is None else used.to(self.like().device), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return x W + b; a factor with a bias row is dequantized once."""
        if self.reads_heads:
            return super().forward(x)
        self.check(x)
        rows = self._rows()
        y = x @ rows[: self.in_features]
        y = self._spread(y + rows[-1].to(y.dtype) if len(rows) > self.in_features else y)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def product(self, x: Tensor) -> Tensor:
        """Return x W."""
        if not self.reads_heads:
            return self._spread(x @ self._rows()[: self.in_features])
        filled = x if self.filled is None else x.index_select(-1, self.filled)
        return filled @ self.part(self.name)  # ... [r], [r] d

    def matrix(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return W."""
        if self.reads_heads:
            return self._spread(self.part(self.name, dtype).T).T
        return self._spread(self._rows(dtype)[: self.in_features])

    def added(self, dtype: torch.dtype | None = None) -> Tensor | None:
        """Return the bias, from its row if there is one."""
        if not self.reads_heads and len(rows := self._rows(dtype)) > self.in_features:
            return self._spread(rows[-1])
        return super().added(dtype)

    def cost(self) -> Multiplications:
        """Return the size of the factor, and 0: multiplying out only adds zeros."""
        return Multiplications(self.rank * (self.in_features + self.out_features - self.width), 0)

    def _rows(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return a factor into heads with its bias, (in or in + 1, r)."""
        factor = self.part(self.name, dtype)
        return factor.T if self.transposed else factor

    def _spread(self, y: Tensor) -> Tensor:
        """Pad the columns of all heads, (..., rank), with zeros to (..., width)."""
        if self.filled is None:
            return y
        return y.new_zeros(*y.shape[:-1], self.width).index_copy(-1, self.filled, y)
