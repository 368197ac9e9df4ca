"""Each of the four weight matrices on its own: truncated as a matrix, or as a TT-matrix."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

import tnlib
from tnlib._typing import Array
from tnlib.linalg.truncation import tail_norms
from tnlib_adapters.compression.allocate import Curve
from tnlib_adapters.factors.attention_factors import Piece
from tnlib_adapters.factors.projections import NAMES, Projections, Sizes


class _PerMatrix(ABC):
    """Ranks 1, 2, ... of every weight as long as factors are smaller than the weight, then the weight itself.

    `of` names the projections that are meant. Where they are not all four, their biases go with their pieces: a tensor
    that holds the biases of others too is no place for them.
    """

    def __init__(self, projections: Projections, sizes: Sizes, of: Sequence[str] = NAMES) -> None:
        self._weights = {name: projections.weights[name] for name in of}
        self._biases = {name: b for name, b in projections.biases.items() if name in of and set(of) != set(NAMES)}
        self._found = {name: self._factorise(weight) for name, weight in self._weights.items()}
        self.curves = [self._curve(name) for name in of]
        self.fixed = 0 if self._biases else sum(bias.size for name, bias in projections.biases.items() if name in of)

    def pieces(self, choice: Sequence[int]) -> list[Piece]:
        """Return the factors with rank choice[k] + 1 for weight k; its last option is the weight as it is."""
        pieces = []
        for (name, weight), option, curve in zip(self._weights.items(), choice, self.curves, strict=True):
            whole = option == len(curve.costs) - 1
            piece = Piece("dense", name, {"weight": weight}) if whole else self._piece(name, option + 1)
            bias = {"bias": self._biases[name]} if name in self._biases else {}
            pieces.append(replace(piece, arrays={**piece.arrays, **bias}))
        return pieces

    def _curve(self, name: str) -> Curve:
        s, unit = self._spectrum(name)
        size = self._weights[name].size
        smaller = np.arange(1, min(len(s), (size - 1) // unit) + 1)
        squares = tail_norms(s) ** 2
        whole = squares[0] if squares[0] > 0 else 1.0
        bias = self._biases[name].size if name in self._biases else 0
        return Curve(np.append(smaller * unit, size) + bias, np.append(squares[smaller] / whole, 0.0))

    @abstractmethod
    def _factorise(self, weight: Array) -> Any:
        """Decompose one weight, untruncated."""

    @abstractmethod
    def _spectrum(self, name: str) -> tuple[Array, int]:
        """Return the singular values, and what one of them costs."""

    @abstractmethod
    def _piece(self, name: str, rank: int) -> Piece:
        """Return the factors of one weight at one rank."""


class Matrices(_PerMatrix):
    """The truncated SVD of every weight matrix, the biases as they are."""

    def _factorise(self, weight: Array) -> tnlib.SVD:
        return tnlib.svd(weight).value

    def _spectrum(self, name: str) -> tuple[Array, int]:
        found: tnlib.SVD = self._found[name]
        return found.s, sum(found.shape)

    def _piece(self, name: str, rank: int) -> Piece:
        u, s, vh = self._found[name]
        root = np.sqrt(s[:rank])
        return Piece("low_rank", name, {"left": u[:, :rank] * root, "right": root[:, None] * vh[:rank]})


class TTMatrices(_PerMatrix):
    """Every weight matrix as a TT-matrix of two cores, rows and columns each split as evenly as they go.

    With W[(i1 i2), (j1 j2)] this is the singular value decomposition over the pairs (i1 j1) | (i2 j2): a sum of
    Kronecker products, the best one of that many terms (Van Loan and Pitsianis, 1993).
    """

    def _factorise(self, weight: Array) -> tnlib.TTMatrix:
        rows, columns = (split_evenly(n) for n in weight.shape)
        return tnlib.ttm_svd(weight, rows, columns).value

    def _spectrum(self, name: str) -> tuple[Array, int]:
        first, last = self._found[name].cores
        # the first core is isometric and the rows of the last are orthogonal, so their lengths are the spectrum
        s = np.linalg.norm(last.reshape(len(last), -1).astype(np.float64), axis=1)  # squares leave float32
        return s, first[..., 0].size + last[0].size

    def _piece(self, name: str, rank: int) -> Piece:
        first, last = self._found[name].cores
        return Piece("ttm", name, {"core0": first[..., :rank], "core1": last[:rank]})


def split_evenly(n: int) -> tuple[int, int]:
    """Return two factors of `n`, as close to each other as they come, the smaller one first.

    >>> split_evenly(384)
    (16, 24)
    """
    small = next(k for k in range(math.isqrt(n), 0, -1) if n % k == 0)
    return small, n // small


def refuse_unsplittable(sizes: Sizes) -> str | None:
    """Say why a model whose width is prime has no TT-matrix."""
    if split_evenly(sizes.d_model)[0] > 1:
        return None
    return f"its width {sizes.d_model} is prime and does not split into two legs"
