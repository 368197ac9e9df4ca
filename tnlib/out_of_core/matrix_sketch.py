r"""Two-sided sketch of a matrix in one pass, and an independent sketch that estimates the error.

For independent Gaussian matrices, the sums over all tiles

    Y = A W^H,   (m, k)        Z = P A,   (l, n)        S = T A,   (q, n)

determine A ~ Q B with Q = orth(Y) and the least-squares solution B of (P Q) B = Z. With k = 2 r + 1 and l = 2 k + 1 its
expected squared error is at most 4 times that of the best rank r. The third sketch estimates the error of any
approximation X that is computed from the first two:

    estimate^2 = norm(S - T X)^2 / q,    mean norm(A - X)^2,
    Prob(norm(A - X) > c estimate)  <=  (exp(1 - 1/c^2) / c^2)^(q/2)

J. A. Tropp, A. Yurtsever, M. Udell, V. Cevher, "Practical sketching algorithms for low-rank matrix approximation", SIAM
J. Matrix Anal. Appl. 38 (2017), Algorithm 7 and Theorem 4.3; "Streaming low-rank matrix approximation with an
application to scientific simulation", SIAM J. Sci. Comput. 41 (2019), section 6, for the error.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tnlib._errors import ArgumentError
from tnlib._typing import Array, MaxRank
from tnlib.linalg.multilinear import matrix_onto, solve_tall
from tnlib.linalg.orthogonal import qr_positive
from tnlib.linalg.randomized import standard_normal
from tnlib.linalg.scaling import largest, norm, shift
from tnlib.linalg.threads import parallel_matmul
from tnlib.linalg.truncation import TruncationBudget
from tnlib.out_of_core.array_source import Tile
from tnlib.out_of_core.one_read import OneRead
from tnlib.out_of_core.tiles import block_index

ERROR_ROWS = 32  # q
FACTOR, CONFIDENCE = 1.6, 99  # c, and the probability in percent that the formula above then gives
_SEEDS = {"W": 1, "P": 2, "T": 3}  # independent streams of random numbers
_DRIFT = 200  # powers of two by which a tile may exceed the first one before all sums are scaled


class SketchedMatrix:
    """The approximation C V of a matrix from one read, its norm, and the sketch that estimates errors.

    Parameters
    ----------
    read
        The array.
    row_legs
        The legs that form the rows.
    rank
        The rank that the sketches are made for.
    """

    def __init__(self, read: OneRead, row_legs: Sequence[int], rank: int) -> None:
        layout = MatrixLayout(read, row_legs)
        k = min(2 * rank + 1, layout.m, layout.n)
        l = min(2 * k + 1, layout.m)
        read.refuse_large(2 * k * (layout.m + layout.n), 2 * (l + ERROR_ROWS) * (layout.m + layout.n))
        columns, rows = ColumnSketch(layout, k), RowSketch(layout, "P", l)
        self._error = RowSketch(layout, "T", ERROR_ROWS)
        sums = LinearSums([columns.sum, rows.sum, self._error.sum])
        for tile, a in read.tiles():
            if (scaled := sums.scaled(a)) is not None:
                matrix = np.ascontiguousarray(matrix_onto(scaled, layout.rows))
                for sketch in (columns, rows, self._error):
                    sketch.add(tile, matrix)
        sums.normalize()
        self.norm, self.exponent = math.sqrt(sums.square), sums.exponent or 0
        self.left, self.right = low_rank_factors(columns, rows)  # m k, k n

    def relative_error(self, left: Array, right: Array) -> float:
        """Return the estimated error of left (m, r) right (r, n), relative to the norm."""
        if self.norm == 0:
            return 0.0
        test, product = self._error.matrices()
        return estimated_error(product - parallel_matmul(parallel_matmul(test, left), right)) / self.norm

    def budget(
        self, rtol: float | None, sides: Sequence[int], dtype: np.dtype[np.generic], max_rank: MaxRank
    ) -> TruncationBudget:
        """Return what truncations may discard beside the error of the sketch, so that both are within `rtol`."""
        if rtol is not None:
            rtol = math.sqrt(max(0.0, rtol**2 - self.relative_error(self.left, self.right) ** 2))
        return TruncationBudget(self.norm, rtol, sides, dtype, max_rank)


class MatrixLayout:
    """An array as a matrix: the legs that form the rows, and the others, which form the columns."""

    def __init__(self, read: OneRead, row_legs: Sequence[int]) -> None:
        self.dtype, self.rows = np.result_type(read.dtype, np.float64), tuple(row_legs)
        self.columns = tuple(k for k in range(len(read.shape)) if k not in self.rows)
        self.row_sizes, self.column_sizes = (tuple(read.shape[k] for k in legs) for legs in (self.rows, self.columns))
        self.m, self.n = math.prod(self.row_sizes), math.prod(self.column_sizes)


class RowSketch:
    """The product T A of a Gaussian matrix T (count, m) with A, summed over tiles."""

    def __init__(self, layout: MatrixLayout, name: str, count: int) -> None:
        self._layout = layout
        generator = np.random.default_rng([0, _SEEDS[name]])
        self.test_matrix = standard_normal((count, *layout.row_sizes), layout.dtype, generator)  # count (row legs)
        self.sum = np.zeros((count, *layout.column_sizes), layout.dtype)

    def add(self, tile: Tile, matrix: Array) -> None:
        """Add the part of a tile, given as a matrix."""
        count = len(self.sum)
        left = self.test_matrix[(slice(None), *block_index(tile, self._layout.rows))].reshape(count, -1)
        part = (slice(None), *block_index(tile, self._layout.columns))
        self.sum[part] += parallel_matmul(left, matrix).reshape(self.sum[part].shape)  # count [rows] columns

    def matrices(self) -> tuple[Array, Array]:
        """Return T (count, m) and T A (count, n)."""
        count = len(self.sum)
        return self.test_matrix.reshape(count, -1), self.sum.reshape(count, -1)


class ColumnSketch:
    """The product A W^H with a Gaussian matrix W (count, n), summed over tiles."""

    def __init__(self, layout: MatrixLayout, count: int) -> None:
        self._layout = layout
        generator = np.random.default_rng([0, _SEEDS["W"]])
        self._adjoint = standard_normal((*layout.column_sizes, count), layout.dtype, generator)
        self.sum = np.zeros((*layout.row_sizes, count), layout.dtype)

    def add(self, tile: Tile, matrix: Array) -> None:
        """Add the part of a tile, given as a matrix."""
        count, part = self.sum.shape[-1], block_index(tile, self._layout.rows)
        right = self._adjoint[block_index(tile, self._layout.columns)].reshape(-1, count)
        self.sum[part] += parallel_matmul(matrix, right).reshape(self.sum[part].shape)  # rows [columns] count


def low_rank_factors(columns: ColumnSketch, rows: RowSketch) -> tuple[Array, Array]:
    """Return C (m, k) and V (k, n), orthonormal rows, with A ~ C V."""
    y = columns.sum.reshape(-1, columns.sum.shape[-1])
    test, product = rows.matrices()
    q, _ = qr_positive(y)  # m k
    b = solve_tall(parallel_matmul(test, q), product)  # k n
    v, lower = qr_positive(b.conj().T)  # b = lower^H v^H
    return parallel_matmul(q, lower.conj().T), v.conj().T


def estimated_error(residual: Array) -> float:
    """Return the estimate of norm(A - X) from S - T X."""
    return norm(residual) / math.sqrt(len(residual))


class LinearSums:
    """Sums that are linear in the array, at a common power of two that follows the largest entry.

    Parameters
    ----------
    sums
        The arrays to which the caller adds the parts of every tile.
    """

    def __init__(self, sums: Sequence[Array]) -> None:
        self._sums = sums
        self.exponent: int | None = None  # of the sums, None before the first entry that is not zero
        self.square = 0.0  # sum of squares of the array at that scale

    def scaled(self, a: Array) -> Array | None:
        """Return a tile in double precision, multiplied by 2**-exponent; None where it is zero."""
        top = largest(a)
        if top == 0.0:
            return None
        e = int(np.frexp(top)[1])
        if self.exponent is None or e > self.exponent + _DRIFT:
            self._set_exponent(e)
        wide = a.astype(np.result_type(a.dtype, np.float64), copy=False)
        scaled = shift(wide, -(self.exponent or 0))
        self.square += float(np.vdot(scaled, scaled).real)
        return scaled

    def normalize(self) -> None:
        """Scale all sums so that the norm of the array lies in [1/2, 1): results fit in single precision."""
        if self.exponent is not None:
            self._set_exponent(self.exponent + math.frexp(math.sqrt(self.square))[1])

    def _set_exponent(self, e: int) -> None:
        if self.exponent is not None:
            for total in self._sums:
                total[...] = shift(total, self.exponent - e)
            self.square = math.ldexp(self.square, 2 * (self.exponent - e))
        self.exponent = e


class SketchedError(NamedTuple):
    """The error of a decomposition from one read, an estimate, in the place of a `TruncationBudget`."""

    error: float
    estimate: str = (
        f"the error is an estimate from a sketch; with a probability of {CONFIDENCE} % the true one is below {FACTOR} "
        "times it"
    )

    def notes(self, *_: object, **__: object) -> tuple[str, ...]:
        """Return no notes on truncations."""
        return ()


def require_rank(function: str, max_rank: int | None) -> int:
    """Return the rank cap, or raise where there is none."""
    if max_rank is None:
        raise ArgumentError(
            f"{function}: max_rank must be given for an array that is read once, got None; it determines the sizes of "
            "the sketches."
        )
    return max_rank
