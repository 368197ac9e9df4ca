"""Attention-only layers with frozen patterns on a residual stream: one affine operator, and its paths.

    x_L = (1 + K_L) ... (1 + K_1) x_0 + constant,      K_l = sum_h A^h (x) (W_V^h W_O^h)^T

A product of L sums expands into a sum over paths. A path is a list of heads, at most one per layer; its operator is one
Kronecker product, the product of the operators of its heads.

N. Elhage et al., "A Mathematical Framework for Transformer Circuits" (2021).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tnlib import ArgumentError, ArgumentTypeError, KroneckerTerms
from tnlib._format import Operator
from tnlib._typing import Array
from tnlib._validate import as_count, to_numpy
from tnlib.drawing.diagram import Diagram
from tnlib_adapters.attention.frozen_attention import FrozenAttention, of_affine, of_product

Head = tuple[int, int]  # layer and head

_MOST_NUMBERS = 1 << 28  # entries of all paths; 2 GiB in double precision


@dataclass(frozen=True, eq=False, repr=False)
class ResidualProduct(Operator):
    r"""The operator :math:`(1 + K_L) \cdots (1 + K_1)` on arrays (positions, features), in factored form.

    Parameters
    ----------
    factors
        :math:`K_1, \ldots, K_L`, square operators of equal shape; :math:`K_1` acts first.

    Raises
    ------
    ArgumentError
        If there is no factor, or shapes differ.

    Examples
    --------
    >>> import numpy as np, tnlib
    >>> shift = tnlib.KroneckerTerms(np.eye(4, k=-1)[None], [np.eye(3)])
    >>> twice = ResidualProduct([shift, shift])  # 1 + 2 shift + shift^2
    >>> twice.apply(np.eye(4, 3))[:, 0]
    array([1., 2., 1., 0.])
    """

    factors: Sequence[KroneckerTerms]

    def __post_init__(self) -> None:
        factors = tuple(self.factors) if isinstance(self.factors, Sequence) else (self.factors,)
        if not factors or not all(isinstance(k, KroneckerTerms) for k in factors):
            kinds = [type(k).__name__ for k in factors]
            raise ArgumentTypeError(
                f"ResidualProduct: factors must be KroneckerTerms, at least one, got {kinds}; pass one per layer."
            )
        expected = _sizes(factors[0])[0]
        for layer, k in enumerate(factors):
            if _sizes(k) != (expected, expected):
                raise ArgumentError(
                    f"ResidualProduct: factor {layer} must take (positions, features) = {expected} to the same, got "
                    f"{_sizes(k)[1]} to {_sizes(k)[0]}; a residual stream keeps its size."
                )
        object.__setattr__(self, "factors", factors)

    def named_arrays(self) -> dict[str, Array]:
        """Return the arrays of all factors, first layer first."""
        return {f"factors.{k}.{name}": a for k, f in enumerate(self.factors) for name, a in f.named_arrays().items()}

    def attributes(self) -> dict[str, Any]:
        """Return the number of factors."""
        return {"factors": len(self.factors)}

    @classmethod
    def from_named_arrays(cls, arrays: Mapping[str, Array], attributes: Mapping[str, Any]) -> ResidualProduct:
        """Return the product of the factors with these arrays."""
        starts = [f"factors.{k}." for k in range(attributes["factors"])]
        by_factor = [{name.removeprefix(s): a for name, a in arrays.items() if name.startswith(s)} for s in starts]
        return cls([KroneckerTerms.from_named_arrays(factor_arrays, {}) for factor_arrays in by_factor])

    @property
    def shape(self) -> tuple[int, int]:
        """Shape (n d, n d) as a matrix on flattened arrays."""
        return self.factors[0].shape

    @property
    def ranks(self) -> tuple[int, ...]:
        """Number of terms of every factor."""
        return tuple(k.ranks[0] for k in self.factors)

    def diagram(self) -> Diagram:
        """Return the diagram for `tnlib.draw`."""
        return of_product(self.factors)

    @property
    def H(self) -> ResidualProduct:
        """The adjoint, its factors the adjoint ones in reverse order."""
        return ResidualProduct([k.H for k in reversed(self.factors)])

    def apply(self, x: Array) -> Array:
        """Return the product applied to x (positions, features), factor by factor."""
        for k in self.factors:
            x = x + k.apply(x)
        return x

    def full(self) -> Array:
        """Multiply out to the matrix (n d, n d)."""
        return self._matmat(np.eye(self.shape[1], dtype=self.dtype))

    def terms(self) -> KroneckerTerms:
        """Multiply out to one sum of Kronecker products: the identity, then all paths."""
        n, d = _sizes(self.factors[0])[0]
        identity = KroneckerTerms(np.eye(n, dtype=self.dtype)[None], [np.eye(d, dtype=self.dtype)])
        return identity + expand(self.factors, None)[1]

    def norm(self) -> float:
        """Frobenius norm, through all paths."""
        return self.terms().norm()

    def __matmul__(self, x: Any) -> Any:
        """Multiply by another product, which gives a product, or by a dense array."""
        return ResidualProduct([*x.factors, *self.factors]) if isinstance(x, ResidualProduct) else super().__matmul__(x)

    def _matmat(self, x: Array) -> Array:
        for k in self.factors:
            x = x + k._matmat(x)
        return x

    def _rmatmat(self, x: Array) -> Array:
        return self.H._matmat(x)


def expand(factors: Sequence[KroneckerTerms], max_order: int | None) -> tuple[list[tuple[Head, ...]], KroneckerTerms]:
    """Return all paths through the factors, and the Kronecker terms of each."""
    _refuse_too_many(factors, max_order)
    total = factors[0]
    paths: list[tuple[Head, ...]] = [((0, head),) for head in range(total.ranks[0])]
    for layer, k in enumerate(factors[1:], 1):
        heads: list[tuple[Head, ...]] = [((layer, head),) for head in range(k.ranks[0])]
        begun = [i for i, path in enumerate(paths) if max_order is None or len(path) < max_order]
        longer = [(*paths[i], *head) for head in heads for i in begun]
        start = KroneckerTerms(total.left[begun], [total.right[i] for i in begun]) if begun else None
        total = total + k if start is None else total + k + k @ start
        paths += heads + longer
    return paths, total


def _refuse_too_many(factors: Sequence[KroneckerTerms], max_order: int | None) -> None:
    counts = [1]  # number of paths by order
    for k in factors:
        more = [0, *(k.ranks[0] * count for count in counts)]
        counts = [a + b for a, b in zip([*counts, 0], more, strict=True)][: (max_order or len(factors)) + 1]
    each = max(k.n_parameters // k.ranks[0] for k in factors)
    if (sum(counts) - 1) * each > _MOST_NUMBERS:
        raise ArgumentError(
            f"FrozenStack.expand: all paths must hold at most {_MOST_NUMBERS:,} numbers, got {sum(counts) - 1:,} paths "
            f"of {each:,}; pass max_order, or apply the stack as it is."
        )


def _sizes(k: KroneckerTerms) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return (positions, features) of the output and of the input of an operator."""
    (_, p, p_in), (q, q_in) = k.left.shape, k.right[0].shape
    return (p, q), (p_in, q_in)


@dataclass(frozen=True, eq=False, repr=False)
class FrozenStack:
    """Layers with frozen patterns on a residual stream: the affine map ``x -> operator x + constant``.

    Unpacks to operator and constant. `second @ first` composes two stacks.

    Parameters
    ----------
    layers
        First layer first; all with equal numbers of positions and features.

    References
    ----------
    N. Elhage et al., "A Mathematical Framework for Transformer Circuits" (2021).

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
            If the paths have more than 2**28 entries: their number is :math:`(1 + H)^L - 1` for L layers of H heads.
        """
        order = None if max_order is None else as_count("FrozenStack.expand", "max_order", max_order)
        paths, terms = expand([layer.terms for layer in self.layers], order)
        return FrozenPaths(paths, terms, self.constant)


@dataclass(frozen=True, eq=False, repr=False)
class FrozenPaths:
    r"""A stack expanded into paths: ``x -> x + terms x + constant``.

    Parameters
    ----------
    paths
        The heads (layer, head) of every term, first layer first.
    terms
        :math:`A^{h_2} A^{h_1} \otimes (W_V^{h_1} W_O^{h_1} W_V^{h_2} W_O^{h_2})^T` and so on, without the direct path,
        which has no heads.
    constant
        (positions, d_model): contribution of all biases, along all paths.

    References
    ----------
    N. Elhage et al., "A Mathematical Framework for Transformer Circuits" (2021).

    Examples
    --------
    >>> import numpy as np, tnlib_adapters
    >>> model = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path())
    >>> uniform = np.tril(np.ones((4, 10, 10))) / np.arange(1, 11)[:, None]
    >>> found = tnlib_adapters.freeze(model, [uniform, uniform]).expand()
    >>> found.paths[0], found.paths[-1], found.terms.ranks  # one term for each of 24 paths
    (((0, 0),), ((0, 3), (1, 3)), (24,))
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
        return of_affine(self.terms, f"{len(self.paths)} paths and the direct one", is_residual=True)
