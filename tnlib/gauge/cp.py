"""The CP gauge: unit columns, positive weights in descending order, fixed signs; and two CPs side by side.

A component keeps its value when its columns are multiplied with numbers whose product is 1, and a sum does not know the
order of its terms. Every column but the last one of a component is fixed alone, by its own leading entry, and the last
takes what is left: a sign is never found from a product or a sum of several numbers, which could cancel.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tnlib._typing import Array
from tnlib.linalg.scale import column_exponents, shift
from tnlib.linalg.signs import leading_phases

_EQUAL = 16.0  # weights that differ by less than this many eps of themselves count as equal


def fix_components(weights: Array, factors: Sequence[Array], *, signs: bool = True) -> tuple[Array, list[Array]]:
    """Return the same CP tensor with unit columns, real weights >= 0 in descending order, and fixed signs.

    In every factor but the last the leading entry of each column (see `leading_phases`) is positive; the last
    factor takes the sign, or the phase, that is left. A component of weight zero keeps unit columns. Without `signs`
    they stay as they are. Components of equal weight come in the order of their entries, the largest first.

    >>> weights, factors = fix_components(np.array([-1.0]), [np.array([[2.0]]), np.array([[3.0]])])
    >>> weights, factors[0], factors[1]
    (array([6.]), array([[1.]]), array([[-1.]]))
    """
    size, fixed = unit_components(weights, factors, signs=signs)
    order = _descending(size, fixed)
    return np.sort(size)[::-1], [f[:, order] for f in fixed]


def unit_components(weights: Array, factors: Sequence[Array], *, signs: bool = True) -> tuple[Array, list[Array]]:
    """Return what `fix_components` does, components in the order that they have."""
    fixed: list[Array] = []
    twos = column_exponents(weights[None])
    carried = shift(weights, -twos)  # R, complex until its phase is moved into the last factor
    for factor in factors:
        unit, lengths, e = _unit_columns(factor)
        phases = leading_phases(unit) if signs else np.ones(unit.shape[1], unit.dtype)
        fixed.append(unit * phases.conj())
        carried, twos = carried * (phases * lengths), twos + e
    size = np.abs(carried)
    fixed[-1] = fixed[-1] * np.where(size > 0, carried / np.where(size > 0, size, 1), 1)
    dtype = factors[0].dtype
    return shift(size, np.where(size > 0, twos, 0)), [f.astype(dtype, copy=False) for f in fixed]


def congruences(a: Sequence[Array], b: Sequence[Array]) -> list[Array]:
    """Return for every factor the inner products of unit columns, conj(a[:, i]) b[:, j], as (R, R')."""
    return [x.conj().T @ y for x, y in zip(a, b, strict=True)]


def aligning_phases(inner: Array) -> Array:
    """Return phases (d, R) of product 1 that turn columns so that `inner` (d, R), theirs with a model's, is positive.

    Where the phases of `inner` do not multiply to 1, what is left over goes to the factor that resembles the least.
    """
    size = np.abs(inner)
    phases = np.where(size > 0, inner, 1) / np.where(size > 0, size, 1)
    columns, least = np.arange(inner.shape[1]), np.argmin(size, axis=0)
    phases[least, columns] = 1
    phases[least, columns] = phases.prod(axis=0).conj()
    return np.asarray(phases)


def _unit_columns(factor: Array) -> tuple[Array, Array, Array]:
    """Return unit columns, and lengths and exponents that they are 2**-e / length of; zero columns become e0."""
    e = column_exponents(factor)
    scaled = shift(factor, -e)
    lengths = np.linalg.norm(scaled, axis=0)
    first = np.zeros_like(factor)
    first[0] = 1
    return np.where(lengths > 0, scaled / np.where(lengths > 0, lengths, 1), first), lengths, e


def _descending(weights: Array, factors: Sequence[Array]) -> Array:
    """Return the order of components: by weight, and where weights are equal by entries, whatever rounding did."""
    order = np.argsort(-weights, kind="stable")
    falling = weights[order]
    eps = float(np.finfo(weights.dtype).eps)
    start = 0
    for k in range(1, len(order) + 1):
        if k == len(order) or falling[start] - falling[k] > _EQUAL * eps * falling[start]:
            if k - start > 1:
                members = order[start:k]
                columns = np.concatenate([f[:, members] for f in factors])
                order[start:k] = members[_by_entries(columns)]
            start = k
    return order


def _by_entries(columns: Array) -> Array:
    """Return the order of unit `columns` (n, g): by their first entries that differ by more than sqrt(eps)."""
    parts = np.concatenate([columns.real, columns.imag]) if np.iscomplexobj(columns) else columns
    tolerance = float(np.sqrt(np.finfo(columns.dtype).eps))
    order: list[int] = []
    left = np.arange(columns.shape[1])
    while len(left):
        tied = left
        while len(tied) > 1:
            values = parts[:, tied]
            apart = values.max(axis=1) - values.min(axis=1) > tolerance
            if not apart.any():
                break
            row = values[int(np.argmax(apart))]
            tied = tied[row >= row.max() - tolerance]
        order += tied.tolist()
        left = np.setdiff1d(left, tied)
    return np.array(order)
