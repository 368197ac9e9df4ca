r"""A train through chosen rows and columns of a tensor that is known by its entries alone.

At bond k, rows I[k] are indices of the first k legs and columns J[k] of the other d - k, as many as the rank. Of the
tensor A, the cross holds the tables

    T[k] = A[I[k-1] x n[k], J[k]],        I[k] out of I[k-1] x n[k],

and the train interpolates through the rows, M[k] = T[k] (T[k] on I[k])^-1:

    A(i) ~ M[1](i1) M[2](i2) ... T[d](id),        exact in the rows.

Oseledets and Tyrtyshnikov, "TT-cross approximation for multidimensional arrays", Linear Algebra Appl. 432 (2010). The
rows are nested, the columns need not be. So any index i may be added: with its right parts i[k+1:] among the columns
J[k], from the left to the right, the train is exact at i too, because

    A(i) - train(i)  =  sum over k of  M[1](i1) ... M[k-1](i[k-1]) (column i[k+1:] of bond k - what interpolates it),

and a bond needs the column only where its term matters. The best new row is that of the largest residual. Nothing is
ever asked for that neither is in a table nor decides whether a column should be. In exact arithmetic the ranks cannot
exceed those of A.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from tnlib._typing import Array
from tnlib.linalg.maxvol import maxvol, pivots

Ask = Callable[[Array], Array]  # indices (m, d) -> entries (m,)

_GROWTH = 10.0  # entries of an interpolation above which rows are swapped: each swap asks for a new slice of a table


class Cross:
    """Rows, columns and tables; what is public leaves a train that may be contracted.

    Parameters
    ----------
    ask
        The tensor: indices (m, d) to entries (m,).
    shape
        (n[0], ..., n[d-1]).
    point
        An index (d,) of an entry that is not zero, the first row and column of every bond.
    """

    def __init__(self, ask: Ask, shape: Sequence[int], point: Array) -> None:
        d = len(shape)
        self.shape, self._ask = tuple(shape), ask
        self.rows = [point[None, :k] for k in range(d)]  # I[k], of bond k: (r[k], k)
        self.columns = [point[None, k + 1 :] for k in range(d)]  # J[k+1], of core k: (r[k+1], d - k - 1)
        self._chosen = [np.array([point[k]], np.intp) for k in range(d - 1)]  # I[k+1] among the rows of table k
        self._tables: list[Array | None] = [None] * d
        self._known = [rows[:0] for rows in self.rows]  # the rows that a table was made for
        self._cores = [self._interpolate(k, 0.0) for k in range(d - 1)] + [self._table(d - 1)]

    @property
    def ranks(self) -> tuple[int, ...]:
        """All d + 1 bond sizes."""
        return (1, *(len(columns) for columns in self.columns))

    def cores(self) -> list[Array]:
        """Return cores (l, n, r) of the train."""
        return [
            core.reshape(-1, n, core.shape[1])  # l n r
            for core, n in zip(self._cores, self.shape, strict=True)
        ]

    def grow(self, points: Array, least: Array, roundoff: float) -> int:
        """Let the train be right at `points` (m, d) to about `least` (m,) in one sweep; return how many pivots it took.

        Pivots below `roundoff` times the values beside them are none.
        """
        added = 0
        for k in range(len(self.shape) - 1):
            interpolation = self._interpolate(k, roundoff)
            most = len(interpolation) - len(self._chosen[k])
            if most > 0:
                added += self._extend(k, interpolation, points, least, roundoff, most)
            self.rows[k + 1] = self._indices(k, self._chosen[k])
        self._cores = [self._interpolate(k, roundoff) for k in range(len(self.shape) - 1)] + [self._table(-1)]
        return added

    def _extend(self, k: int, interpolation: Array, points: Array, least: Array, roundoff: float, most: int) -> int:
        """Add the right parts of `points` that core k does not interpolate within `least` to its columns."""
        columns, which = np.unique(points[:, k + 1 :], axis=0, return_inverse=True)
        which = which.reshape(-1)
        here = self._entries(self._indices(k, self._chosen[k]), columns)  # r m
        # A term of a point's error is seen in the rows that end on its own index of leg k.
        pairs = np.unique(np.stack([which, points[:, k]], axis=1), axis=0)  # of column and index
        count = len(self.rows[k])
        rows = (np.arange(count) * self.shape[k] + pairs[:, 1:]).reshape(-1)  # (m l)
        many = np.repeat(pairs[:, 0], count)
        seen = self._ask(np.concatenate([self._indices(k, rows), columns[many]], axis=1))
        missing = np.abs(seen - (interpolation[rows] * here.T[many]).sum(axis=1))  # (m l) [r]
        sizes, allowed = np.abs(here).max(axis=0), np.full(len(columns), np.inf)  # m
        np.maximum.at(sizes, many, np.abs(seen))
        np.minimum.at(allowed, which, least)
        allowed = np.maximum(allowed, roundoff * sizes)
        needed = np.unique(many[missing > allowed[many]])
        if len(needed) == 0:
            return 0
        columns = columns[needed]
        table = self._entries(self._indices(k, np.arange(len(interpolation))), columns)  # (l n) m
        residual = table - interpolation @ table[self._chosen[k]]  # (l n) m
        rows, kept = pivots(residual / allowed[needed], least=1.0, most=most)
        self._chosen[k] = np.concatenate([self._chosen[k], rows])
        self.columns[k] = np.concatenate([self.columns[k], columns[kept]])
        return len(rows)

    def _interpolate(self, k: int, roundoff: float) -> Array:
        """Return the interpolation (l n, r) of core k through its chosen rows, which may be swapped, or be fewer."""
        table = self._table(k)
        there = self._chosen[k].max() < len(table)
        found = maxvol(table, self._chosen[k], bound=_GROWTH) if there else None
        if found is None:  # rows that were swapped or left out at an earlier bond changed these
            least = roundoff * float(np.abs(table).max())
            rows, kept = pivots(table, least=least, most=len(self._chosen[k]))
            if len(rows) == 0:
                rows, kept = np.zeros(1, np.intp), np.zeros(1, np.intp)
            self.columns[k], self._tables[k] = self.columns[k][kept], table[:, kept]
            found = maxvol(table[:, kept], rows, bound=_GROWTH)
            if found is None:
                found = rows, np.zeros((len(table), len(rows)), table.dtype)
        self._chosen[k], interpolation = found
        if k + 1 < len(self.rows):
            self.rows[k + 1] = self._indices(k, self._chosen[k])
        return interpolation

    def _table(self, k: int) -> Array:
        """Return table k (l n, r), asked for where it is new."""
        k %= len(self.shape)
        rows, columns, held = self.rows[k], self.columns[k], self._tables[k]
        everything = np.arange(len(rows) * self.shape[k])
        if held is None or not np.array_equal(rows[: len(self._known[k])], self._known[k]):
            held = self._entries(self._indices(k, everything), columns)
        else:
            old, width = held.shape
            right = self._entries(self._indices(k, everything[:old]), columns[width:])
            held = np.concatenate([held, right], axis=1)
            below = self._entries(self._indices(k, everything[old:]), columns)
            held = np.concatenate([held, below], axis=0)
        self._tables[k], self._known[k] = held, rows
        return held

    def _indices(self, k: int, numbers: Array) -> Array:
        """Return rows of table k, (m, k + 1), by their numbers in I[k] x n[k]."""
        n = self.shape[k]
        return np.concatenate([self.rows[k][numbers // n], (numbers % n)[:, None]], axis=1)

    def _entries(self, rows: Array, columns: Array) -> Array:
        """Return the entries (m, r) at `rows` (m, k) and `columns` (r, d - k)."""
        left, right = len(rows), len(columns)
        pairs = np.concatenate([np.repeat(rows, right, axis=0), np.tile(columns, (left, 1))], axis=1)
        return self._ask(pairs).reshape(left, right)
