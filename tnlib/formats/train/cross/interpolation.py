r"""Cross interpolation of a tensor by a train through chosen rows and columns of its unfoldings.

At bond k, the rows I[k] are indices of the first k legs and the columns J[k] of the other d - k, as many as the rank.
Of the tensor A, the cross stores the tables

    T[k] = A[I[k-1] x n[k], J[k]],        I[k] a subset of I[k-1] x n[k],

and the train interpolates through the rows, M[k] = T[k] (T[k] on I[k])^-1:

    A(i) ~ M[1](i1) M[2](i2) ... T[d](id),        exact in the rows.

The rows are nested, the columns need not be. So any index i may be added: with its right parts i[k+1:] among the
columns J[k], from the left to the right, the train becomes exact at i, because

    A(i) - train(i)  =  sum over k of  M[1](i1) ... M[k-1](i[k-1]) (column i[k+1:] of bond k - its interpolation),

and a bond needs the column only where its term matters. The best new row is that of the largest residual. An entry is
evaluated only if it is part of a table or decides whether a column is needed. In exact arithmetic the ranks cannot
exceed those of A.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from tnlib._typing import Array
from tnlib.linalg.maxvol import maxvol, pivots

_MAXVOL_BOUND = 10.0  # entries of an interpolation above which rows are swapped: a swap costs a new slice of a table


class CrossInterpolation:
    """Rows, columns and tables; every public method leaves a train that may be contracted.

    `f` takes indices (m, d) to entries (m,); at `point` (d,), the first row and column of every bond, it is not zero.
    No bond gets more than `max_rank` rows.
    """

    def __init__(
        self, f: Callable[[Array], Array], shape: Sequence[int], point: Array, max_rank: float = math.inf
    ) -> None:
        d, self._max_rank = len(shape), max_rank
        self.shape, self._f = tuple(shape), f
        self.rows = [point[None, :k] for k in range(d)]  # I[k], of bond k: (r[k], k)
        self.columns = [point[None, k + 1 :] for k in range(d)]  # J[k+1], of core k: (r[k+1], d - k - 1)
        self._pivots = [np.array([point[k]], np.intp) for k in range(d - 1)]  # I[k+1] among the rows of table k
        self._tables: list[Array | None] = [None] * d
        self._table_rows = [rows[:0] for rows in self.rows]  # the rows that a table was made for
        self._cores = [self._interpolate(k, 0.0) for k in range(d - 1)] + [self._table(d - 1)]

    @property
    def ranks(self) -> tuple[int, ...]:
        """All d + 1 bond sizes."""
        return (1, *(len(columns) for columns in self.columns))

    def cores(self) -> list[Array]:
        """Return cores (l, n, r) of the train."""
        return [core.reshape(-1, n, core.shape[1]) for core, n in zip(self._cores, self.shape, strict=True)]

    def grow(self, points: Array, tolerances: Array, roundoff: float) -> int:
        """Add pivots in one sweep until the train is right at `points` (m, d) to about `tolerances` (m,).

        Return the number of new pivots. Residuals below `roundoff` times the values beside them are no pivots.
        """
        added, tails = 0, _number_tails(points)
        for k in range(len(self.shape) - 1):
            interpolation = self._interpolate(k, roundoff)
            most = int(min(len(interpolation), self._max_rank)) - len(self._pivots[k])
            if most > 0:
                added += self._extend(k, interpolation, points, tails[k], tolerances, roundoff, most)
            self.rows[k + 1] = self.indices(k, self._pivots[k])
        self._cores = [self._interpolate(k, roundoff) for k in range(len(self.shape) - 1)] + [self._table(-1)]
        return added

    def _extend(
        self,
        k: int,
        interpolation: Array,
        points: Array,
        column_of: Array,
        tolerances: Array,
        roundoff: float,
        most: int,
    ) -> int:
        """Add the right parts of `points` that core k does not interpolate within `tolerances` to its columns.

        Right parts with one number in `column_of` (m,) are equal.
        """
        columns = points[np.unique(column_of, return_index=True)[1], k + 1 :]
        at_pivots = self._entries(self.indices(k, self._pivots[k]), columns)  # r m
        # The term of a point's error shows in the rows that end on its own index of leg k.
        pairs = np.divmod(np.unique(column_of * self.shape[k] + points[:, k]), self.shape[k])  # column and index
        count = len(self.rows[k])
        rows = (np.arange(count) * self.shape[k] + pairs[1][:, None]).reshape(-1)  # (m l)
        repeated = np.repeat(pairs[0], count)
        values = self._f(np.concatenate([self.indices(k, rows), columns[repeated]], axis=1))
        missing = np.abs(values - (interpolation[rows] * at_pivots.T[repeated]).sum(axis=1))  # (m l) [r]
        sizes, allowed = np.abs(at_pivots).max(axis=0), np.full(len(columns), np.inf)  # m
        np.maximum.at(sizes, repeated, np.abs(values))
        np.minimum.at(allowed, column_of, tolerances)
        allowed = np.maximum(allowed, roundoff * sizes)
        needed = np.unique(repeated[missing > allowed[repeated]])
        if len(needed) == 0:
            return 0
        columns = columns[needed]
        table = self._entries(self.indices(k, np.arange(len(interpolation))), columns)  # (l n) m
        residual = table - interpolation @ table[self._pivots[k]]  # (l n) m
        rows, kept = pivots(residual / allowed[needed], least=1.0, most=most)
        self._pivots[k] = np.concatenate([self._pivots[k], rows])
        self.columns[k] = np.concatenate([self.columns[k], columns[kept]])
        return len(rows)

    def _interpolate(self, k: int, roundoff: float) -> Array:
        """Return the interpolation (l n, r) of core k through its pivot rows, which may be swapped, or become fewer."""
        table = self._table(k)
        valid = self._pivots[k].max() < len(table)
        result = maxvol(table, self._pivots[k], bound=_MAXVOL_BOUND) if valid else None
        if result is None:  # rows swapped or dropped at an earlier bond changed these
            least = roundoff * float(np.abs(table).max())
            rows, kept = pivots(table, least=least, most=len(self._pivots[k]))
            if len(rows) == 0:
                rows = kept = np.zeros(1, np.intp)
            self.columns[k], self._tables[k] = self.columns[k][kept], table[:, kept]
            result = maxvol(table[:, kept], rows, bound=_MAXVOL_BOUND)
            if result is None:
                result = rows, np.zeros((len(table), len(rows)), table.dtype)
        self._pivots[k], interpolation = result
        if k + 1 < len(self.rows):
            self.rows[k + 1] = self.indices(k, self._pivots[k])
        return interpolation

    def _table(self, k: int) -> Array:
        """Return table k (l n, r), evaluated where it is new."""
        k %= len(self.shape)
        rows, columns, table = self.rows[k], self.columns[k], self._tables[k]
        numbers = np.arange(len(rows) * self.shape[k])
        if table is None or not np.array_equal(rows[: len(self._table_rows[k])], self._table_rows[k]):
            table = self._entries(self.indices(k, numbers), columns)
        else:
            height, width = table.shape
            right = self._entries(self.indices(k, numbers[:height]), columns[width:])
            table = np.concatenate([table, right], axis=1)
            below = self._entries(self.indices(k, numbers[height:]), columns)
            table = np.concatenate([table, below], axis=0)
        self._tables[k], self._table_rows[k] = table, rows
        return table

    def indices(self, k: int, numbers: Array) -> Array:
        """Return rows of table k, (m, k + 1), by their numbers in I[k] x n[k]."""
        n = self.shape[k]
        return np.concatenate([self.rows[k][numbers // n], (numbers % n)[:, None]], axis=1)

    def _entries(self, rows: Array, columns: Array) -> Array:
        """Return the entries (m, r) at `rows` (m, k) and `columns` (r, d - k)."""
        n_rows, n_columns = len(rows), len(columns)
        pairs = np.concatenate([np.repeat(rows, n_columns, axis=0), np.tile(columns, (n_rows, 1))], axis=1)
        return self._f(pairs).reshape(n_rows, n_columns)


def _number_tails(points: Array) -> list[Array]:
    """Return for each leg the position (m,) of what follows it in `points` (m, d) among all such parts, sorted."""
    numbers = [np.zeros(len(points), np.intp)]
    for leg in points.T[:0:-1]:
        numbers.append(np.unique(leg * len(points) + numbers[-1], return_inverse=True)[1])
    return numbers[::-1]
