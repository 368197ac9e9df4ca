"""Factors of one weight by truncated SVD or as a TT-matrix, and their options beside the dense weight."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import cast

import numpy as np

import tnlib
from tnlib._typing import Array
from tnlib.linalg.truncation import tail_norms
from tnlib_adapters.compression.allocate import Curve
from tnlib_adapters.compression.methods.components import components
from tnlib_adapters.compression.methods.factorisation import Factorised, ModuleWeights, WeightOptions
from tnlib_adapters.compression.methods.method_table import Method, resolve
from tnlib_adapters.factors.factored_matrix import FactoredMatrix, whole_part
from tnlib_adapters.factors.projections import NAMES, Projections, Sizes

_LONG = 8  # ratio of the legs from which the Gram matrix is used: a table of embeddings costs an eighth of its SVD


class FactorisedWeight:
    """Options of a factorised weight: its factors while smaller than the weight, then the dense weight."""

    def __init__(self, weight: Array, factorised: WeightOptions, of: str = "", bias: Array | None = None) -> None:
        self._weight, self._factorised, self._of, self._bias = weight, factorised, of, bias
        curve = factorised.curve
        self._smaller = np.flatnonzero(curve.costs < weight.size)
        costs = np.append(curve.costs[self._smaller], weight.size) + (0 if bias is None else bias.size)
        self.curve = Curve(costs, np.append(curve.errors[self._smaller], 0.0))

    def at(self, option: int) -> FactoredMatrix:
        """Return the factors of one option."""
        if option == len(self._smaller):
            factorised = FactoredMatrix("dense", self._of, {whole_part(self._of): self._weight})
        else:
            factorised = replace(self._factorised.at(int(self._smaller[option])), of=self._of)
        bias = {} if self._bias is None else {"bias": self._bias}
        return replace(factorised, arrays={**factorised.arrays, **bias})


def factorise_projections(
    projections: Projections, factorise: Callable[[Array], WeightOptions], of: Sequence[str] = NAMES
) -> ModuleWeights:
    """Factorise projections of an attention layer one by one; biases unchanged.

    If they are not all four, their biases are stored among the factors, because one tensor may hold biases of several
    projections.
    """
    biases = {name: bias for name, bias in projections.biases.items() if name in of}
    stored = biases if set(of) != set(NAMES) else {}
    weights = {
        name: FactorisedWeight(weight, factorise(weight), name, stored.get(name))
        for name, weight in projections.weights.items()
        if name in of
    }
    return ModuleWeights(weights, 0 if stored else sum(bias.size for bias in biases.values()))


def factorise_layer(method: Method, projections: Projections, sizes: Sizes, *, rotary: bool = False) -> Factorised:
    """Factorise the attention of a layer by a row of unit "matrix" or "layer".

    `rotary` is True if rotary embeddings or norms act between queries and keys.
    """
    if method.unit == "matrix":
        return factorise_projections(projections, resolve(method.factorise))
    return cast(Factorised, resolve((method.rotary if rotary else None) or method.factorise)(projections, sizes))


class TruncatedSVD:
    """The truncated singular value decomposition of a weight."""

    def __init__(self, weight: Array) -> None:
        if max(weight.shape) > _LONG * min(weight.shape):
            gram = components(weight)
            self._left, self._right, lost = gram.left, gram.right, gram.lost
        else:
            u, s, vh = tnlib.svd(weight).value
            root = np.sqrt(s)
            self._left, self._right = u * root, root[:, None] * vh
            lost = _lost(s)
        self.curve = Curve(np.arange(1, len(lost)) * sum(weight.shape), lost[1:])

    def at(self, option: int) -> FactoredMatrix:
        """Return the factors of rank option + 1."""
        rank = option + 1
        return FactoredMatrix("low_rank", "", {"left": self._left[:, :rank], "right": self._right[:rank]})


class TruncatedTTMatrix:
    """A weight as a TT-matrix of two cores, rows and columns each split as evenly as possible.

    With W[(i1 i2), (j1 j2)] this is the singular value decomposition over the pairs (i1 j1) | (i2 j2): a sum of
    Kronecker products, the best one of that many terms (Van Loan and Pitsianis, 1993).
    """

    def __init__(self, weight: Array) -> None:
        rows, columns = (split_evenly(n) for n in weight.shape)
        self._first, self._last = tnlib.ttm_svd(weight, rows, columns).value.cores
        # the first core is isometric and the rows of the last are orthogonal, so their lengths are the spectrum
        s = np.linalg.norm(self._last.reshape(len(self._last), -1).astype(np.float64), axis=1)  # squares leave float32
        self.curve = Curve(np.arange(1, len(s) + 1) * (self._first[..., 0].size + self._last[0].size), _lost(s)[1:])

    def at(self, option: int) -> FactoredMatrix:
        """Return the cores of rank option + 1."""
        rank = option + 1
        return FactoredMatrix("ttm", "", {"core0": self._first[..., :rank], "core1": self._last[:rank]})


def _lost(s: Array) -> Array:
    """Return the squared relative errors with the first 0, 1, ... singular values kept."""
    squares = tail_norms(s) ** 2
    return squares / (squares[0] if squares[0] > 0 else 1.0)


def split_evenly(n: int) -> tuple[int, int]:
    """Return the two closest factors of `n`, the smaller one first.

    >>> split_evenly(384)
    (16, 24)
    """
    small = next(k for k in range(math.isqrt(n), 0, -1) if n % k == 0)
    return small, n // small


def refuse_unsplittable(sizes: Sizes) -> str | None:
    """Return why a model of prime width has no TT-matrix, or None."""
    if split_evenly(sizes.d_model)[0] > 1:
        return None
    return f"its width {sizes.d_model} is prime and does not split into two legs"
