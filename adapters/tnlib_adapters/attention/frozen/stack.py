r"""Attention-only layers with frozen patterns on a residual stream: one affine operator, and its paths.

    x_L = (1 + K_L) ... (1 + K_1) x_0 + constant,      K_l = sum_h A^h (x) (W_V^h W_O^h)^T

N. Elhage et al., "A Mathematical Framework for Transformer Circuits" (2021).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tnlib import ArgumentTypeError, KroneckerTerms
from tnlib._typing import Array
from tnlib._validate import as_count, to_numpy
from tnlib.drawing.diagram import Diagram
from tnlib_adapters.attention.frozen.diagrams import of_paths, of_product
from tnlib_adapters.attention.frozen.layer import FrozenAttention
from tnlib_adapters.attention.frozen.residual_product import Head, ResidualProduct, expand


@dataclass(frozen=True, eq=False, repr=False)
class FrozenStack:
    """Layers with frozen patterns on a residual stream: the affine map x -> operator x + constant.

    Unpacks to operator and constant. `second @ first` composes two stacks.

    Parameters
    ----------
    layers
        First layer first; all with equal numbers of positions and features.

    Examples
    --------
    >>> import numpy as np, tnlib_adapters
    >>> model = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path())
    >>> uniform = np.tril(np.ones((4, 10, 10))) / np.arange(1, 11)[:, None]
    >>> stack = tnlib_adapters.freeze(model, [uniform, uniform])
    >>> stack
    FrozenStack(layers of 4, 4 heads on 10 positions x 64 features)
    >>> len(stack.expand().paths)  # (1 + 4)^2 - 1, the direct path not counted
    24
    """

    layers: Sequence[FrozenAttention]

    __array_ufunc__ = None  # numpy must defer to __rmatmul__

    def __post_init__(self) -> None:
        if not isinstance(self.layers, Sequence) or not all(
            isinstance(layer, FrozenAttention) for layer in self.layers
        ):
            raise ArgumentTypeError(
                f"FrozenStack: layers must be a list of FrozenAttention, got {self.layers!r:.80}; "
                "Attention.frozen makes one, freeze a whole stack."
            )
        object.__setattr__(self, "layers", tuple(self.layers))
        ResidualProduct([layer.terms for layer in self.layers])  # raises if shapes differ

    def __repr__(self) -> str:
        n, d = self.layers[0].constant.shape
        heads = ", ".join(str(layer.terms.ranks[0]) for layer in self.layers)
        return f"FrozenStack(layers of {heads} heads on {n} positions x {d} features)"

    def __iter__(self) -> Iterator[Any]:
        return iter((self.operator, self.constant))

    @property
    def operator(self) -> ResidualProduct:
        """The linear part."""
        return ResidualProduct([layer.terms for layer in self.layers])

    @property
    def constant(self) -> Array:
        """Contribution of all biases to the final stream, (positions, d_model)."""
        return self.apply(np.zeros_like(self.layers[0].constant))

    def apply(self, x: Array) -> Array:
        """Return the final stream for the initial stream x (positions, d_model)."""
        for layer in self.layers:
            x = x + layer.apply(x)
        return x

    def diagram(self) -> Diagram:
        """Return the diagram for `tnlib.draw`."""
        return of_product([layer.terms for layer in self.layers], constant=True)

    def __matmul__(self, other: Any) -> FrozenStack:
        return FrozenStack([*other.layers, *self.layers]) if isinstance(other, FrozenStack) else NotImplemented

    def expand(self, *, max_order: int | None = None) -> FrozenPaths:
        """Return all paths through at least one head, one term each; `tnlib.round(paths.terms, ...)` reduces them.

        Parameters
        ----------
        max_order
            Largest number of heads on a path.

        Raises
        ------
        ArgumentError
            If the paths have more than 2**28 entries: their number is (1 + heads)^layers - 1.
        """
        order = None if max_order is None else as_count("FrozenStack.expand", "max_order", max_order)
        paths, terms = expand([layer.terms for layer in self.layers], order)
        return FrozenPaths(paths, terms, self.constant)


@dataclass(frozen=True, eq=False, repr=False)
class FrozenPaths:
    """A stack expanded into paths: x -> x + terms x + constant.

    Parameters
    ----------
    paths
        The heads (layer, head) of every term, first layer first.
    terms
        A^h2 A^h1 (x) (W_V^h1 W_O^h1 W_V^h2 W_O^h2)^T and so on, without the direct path, which has no heads.
    constant
        (positions, d_model): contribution of all biases, along all paths.
    """

    paths: Sequence[tuple[Head, ...]]
    terms: KroneckerTerms
    constant: Array

    def __repr__(self) -> str:
        n, d = self.constant.shape
        longest = max(map(len, self.paths))
        return f"FrozenPaths({len(self.paths)} paths of at most {longest} heads on {n} positions x {d} features)"

    def apply(self, x: Array) -> Array:
        """Return the final stream for the initial stream x (positions, d_model)."""
        return to_numpy("FrozenPaths.apply", "x", x) + self.terms.apply(x) + self.constant

    def diagram(self) -> Diagram:
        """Return the diagram for `tnlib.draw`."""
        return of_paths(self.terms)
