"""Linear layers of a weight that is stored whole: a matrix, or a part of a stack of matrices."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tnlib_adapters.factors.integers import IntegerFormat
from tnlib_adapters.transformers_plugin.factored_linear import (
    Borrowed,
    FactoredLinear,
    Factors,
    Multiplications,
    shapes,
)


class DenseLinear(FactoredLinear):
    """A dense weight: a matrix, or the entries `first` of a stack of matrices."""

    def __init__(
        self,
        factors: Factors | Borrowed,
        part: str,
        inputs: Sequence[int] = (0,),
        outputs: Sequence[int] = (1,),
        first: slice | None = None,
    ) -> None:
        sizes = list(shapes(factors, part)[0])
        if first is not None:
            sizes[0] = len(range(*first.indices(sizes[0])))
        n_in, n_written = (math.prod(sizes[leg] for leg in legs) for legs in (inputs, outputs))
        super().__init__(factors, (n_in, n_written))
        self._part, self._order, self._first = part, (*inputs, *outputs), first
        self._is_part_of_stack = self._order != (0, 1) or first is not None

    def product(self, x: Tensor) -> Tensor:
        """Return x W."""
        return x @ self.matrix() if self._is_part_of_stack else self.times(x, self._part)

    def multiplied_integers(self) -> dict[str, tuple[tuple[int, ...], IntegerFormat]]:
        """Return the weight, if it is in integers and no part of a stack."""
        form = self._formats.get(self._part)
        return {} if form is None or self._is_part_of_stack else {self._part: (self._shapes[self._part], form)}

    def look_up(self, ids: Tensor) -> Tensor:
        """Return rows of W."""
        return self.rows_of(self._part, ids)

    def matrix(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return W."""
        stack = self.part(self._part, dtype)
        chosen = stack if self._first is None else stack[self._first]
        return chosen.permute(self._order).reshape(self.in_features, self.out_features)

    def cost(self) -> Multiplications:
        """Return the size of W, and 0."""
        return Multiplications(self.in_features * self.out_features, 0)
