"""Low-rank approximation of an array, split into rows and columns, from one read."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from tnlib._errors import ArgumentError
from tnlib._fit import Fit, report
from tnlib._typing import Array, FormatProtocol
from tnlib.linalg.threads import parallel_matmul
from tnlib.linalg.truncation import TruncationBudget
from tnlib.out_of_core.matrix_sketch import (
    ERROR_ROWS,
    ColumnSketch,
    MatrixLayout,
    RowSketch,
    confidence_note,
    estimated_error,
    low_rank_factors,
    sketch_sizes,
)
from tnlib.out_of_core.one_read import LinearSums, OneRead
from tnlib.out_of_core.session import Resources

F = TypeVar("F", bound=FormatProtocol)


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
        k, l = sketch_sizes(layout, rank)
        read.refuse_large(2 * k * (layout.m + layout.n), 2 * (l + ERROR_ROWS) * (layout.m + layout.n))
        columns, rows = ColumnSketch(layout, k), RowSketch(layout, "P", l)
        self._error = RowSketch(layout, "T", ERROR_ROWS)
        sums = LinearSums([columns.sum, rows.sum, self._error.sum])
        for tile, a in read.tiles():
            if (scaled := sums.scaled(a)) is not None:
                matrix = np.ascontiguousarray(layout.matrix(scaled))
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

    def budget(self, rtol: float | None, sides: Sequence[int], dtype: np.dtype[np.generic]) -> TruncationBudget:
        """Return what truncations may discard beside the error of the sketch, so that both are within `rtol`."""
        if rtol is not None:
            rtol = math.sqrt(max(0.0, rtol**2 - self.relative_error(self.left, self.right) ** 2))
        return TruncationBudget(self.norm, rtol, sides, dtype)


def report_estimate(function: str, value: F, error: float, rtol: float | None) -> Fit[F]:
    """Return the `Fit` of a decomposition from one read, with the confidence of its error."""
    fit = report(function, value, error=error, rtol=rtol, certified=False)
    return dataclasses.replace(fit, notes=(confidence_note(),))


def require_rank(function: str, max_rank: int | None, resources: Resources) -> int:
    """Return the rank cap, or raise where the arguments beside `one_pass` do not fit to it."""
    if max_rank is None:
        raise ArgumentError(
            f"{function}: max_rank must be given with one_pass, got None; it determines the sizes of the sketches."
        )
    if resources.spill is not None:
        raise ArgumentError(
            f"{function}: spill must be left out with one_pass, got {resources.spill!r}; an array that is read once is "
            "not stored."
        )
    if resources.client is not None:
        raise ArgumentError(
            f"{function}: client must be left out with one_pass, got a {type(resources.client).__name__}; an array is "
            "read once by this process."
        )
    return max_rank
