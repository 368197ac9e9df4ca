"""Canonical form of a CP: unit columns, non-negative weights in descending order, fixed signs.

The columns of a component may be multiplied by numbers whose product is 1, and the components of a sum may be permuted.
Every column but the last one of a component is normalised by its own leading entry, and the last takes the remaining
sign: a sign is never determined from a product or a sum of several numbers, which could cancel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tnlib._errors import ArgumentError
from tnlib._typing import Array
from tnlib.formats.cp.format import CP
from tnlib.linalg.canonical_basis import CanonicalForm, equal_groups, leading_phases, unit_phases
from tnlib.linalg.scaling import column_exponents, shift

_EQUAL = 16.0  # weights closer than this many eps of themselves count as equal


def canonical_cp(t: CP, function: str, groups: Any) -> CanonicalForm:
    """Return `t` normalised; it has no singular subspaces and no groups."""
    if groups is not None:
        raise ArgumentError(
            f"{function}: groups must be left out for a CP, whose components are no basis of one space; "
            "pass the CP alone."
        )
    with np.errstate(over="ignore"):  # the format refuses weights outside the range of its dtype
        weights, factors = normalize_components(t.weights, t.promoted_arrays()[1:])
    return CanonicalForm(CP(weights, tuple(factors)), (), ())


def normalize_components(weights: Array, factors: Sequence[Array], *, signs: bool = True) -> tuple[Array, list[Array]]:
    """Return the same CP tensor with unit columns, real weights >= 0 in descending order, and fixed `signs`.

    A component of weight zero keeps unit columns; components of equal weight are ordered by their entries.

    >>> weights, factors = normalize_components(np.array([-1.0]), [np.array([[2.0]]), np.array([[3.0]])])
    >>> weights, factors[0], factors[1]
    (array([6.]), array([[1.]]), array([[-1.]]))
    """
    sizes, units = unit_components(weights, factors, signs=signs)
    order = _descending(sizes, units)
    return np.sort(sizes)[::-1], [unit[:, order] for unit in units]


def unit_components(weights: Array, factors: Sequence[Array], *, signs: bool = True) -> tuple[Array, list[Array]]:
    """Return the result of `normalize_components` with the components in their original order."""
    units: list[Array] = []
    exponents = column_exponents(weights[None])
    carried = shift(weights, -exponents)  # R, complex until its phase is moved into the last factor
    for factor in factors:
        unit, lengths, e = _unit_columns(factor)
        phases = leading_phases(unit) if signs else np.ones(unit.shape[1], unit.dtype)
        units.append(unit * phases.conj())
        carried, exponents = carried * (phases * lengths), exponents + e
    sizes = np.abs(carried)
    units[-1] = units[-1] * unit_phases(carried)
    dtype = factors[0].dtype
    return shift(sizes, np.where(sizes > 0, exponents, 0)), [unit.astype(dtype, copy=False) for unit in units]


def _unit_columns(factor: Array) -> tuple[Array, Array, Array]:
    """Return unit columns, lengths and exponents: column = unit * length * 2**e; zero columns become e0."""
    e = column_exponents(factor)
    scaled = shift(factor, -e)
    lengths = np.linalg.norm(scaled, axis=0)
    first = np.zeros_like(factor)
    first[0] = 1
    return np.where(lengths > 0, scaled / np.where(lengths > 0, lengths, 1), first), lengths, e


def _descending(weights: Array, factors: Sequence[Array]) -> Array:
    """Return the order of components: by weight, and by entries where weights are equal up to rounding."""
    order = np.argsort(-weights, kind="stable")
    falling = weights[order]
    for group in equal_groups(falling, _EQUAL * float(np.finfo(weights.dtype).eps) * falling):
        members = order[group]
        order[group] = members[_order_by_entries(np.concatenate([factor[:, members] for factor in factors]))]
    return order


def _order_by_entries(columns: Array) -> Array:
    """Return the order of unit `columns` (n, g): by their first entries that differ by more than sqrt(eps)."""
    parts = np.concatenate([columns.real, columns.imag]) if np.iscomplexobj(columns) else columns
    tolerance = float(np.sqrt(np.finfo(columns.dtype).eps))
    order: list[int] = []
    remaining = np.arange(columns.shape[1])
    while len(remaining):
        tied = remaining
        while len(tied) > 1:
            values = parts[:, tied]
            differ = values.max(axis=1) - values.min(axis=1) > tolerance
            if not differ.any():
                break
            row = values[int(np.argmax(differ))]
            tied = tied[row >= row.max() - tolerance]
        order += tied.tolist()
        remaining = np.setdiff1d(remaining, tied)
    return np.array(order)
