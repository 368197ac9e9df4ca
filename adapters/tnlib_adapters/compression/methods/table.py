"""The ways to factorise one layer's attention, each a row of a table.

A method factorises a layer once; every budget is then a choice among sizes of what was found, so that a whole
curve of error against size costs one factorisation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from tnlib_adapters.compression.allocate import Curve
from tnlib_adapters.compression.methods.head_products import Heads, ValueHeads
from tnlib_adapters.compression.methods.matrices import Matrices, TTMatrices, refuse_unsplittable
from tnlib_adapters.compression.methods.tensor_stacks import CPStack, TuckerStack
from tnlib_adapters.factors.attention_factors import Piece
from tnlib_adapters.factors.projections import Projections, Sizes


class Factorised(Protocol):
    """One layer's attention, factorised."""

    @property
    def curves(self) -> Sequence[Curve]:
        """What each block costs and errs at each of its sizes."""

    @property
    def fixed(self) -> int:
        """Numbers that stay as they are at every size: biases that the factors do not hold."""

    def pieces(self, choice: Sequence[int]) -> list[Piece]:
        """Return the factors at one size per block."""


Method = Callable[[Projections, Sizes], Factorised]

METHODS: Mapping[str, Method] = {  # where queries and keys meet as they are
    "heads": Heads,
    "matrix": Matrices,
    "ttm": TTMatrices,
    "tucker": TuckerStack,
    "cp": CPStack,
}

TURNED: Mapping[str, Method] = {**METHODS, "heads": ValueHeads}  # where they are turned or normed before they meet

# method -> the reason why a model of these sizes cannot run it, or None
REFUSE: Mapping[str, Callable[[Sizes], str | None]] = {"ttm": refuse_unsplittable}

# methods whose error is not known before they have fitted
UNPREDICTED = ("cp",)
