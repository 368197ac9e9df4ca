"""Verbs of the CP format: inner, kron, outer, entries, contract; unit columns and the canonical form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tnlib._errors import ArgumentError
from tnlib._typing import Array
from tnlib.formats.cp.format import CP
from tnlib.linalg.canonical_basis import CanonicalForm, equal_groups, leading_phases, unit_phases
from tnlib.linalg.scaling import Scaled, column_exponents, normalize, normalize_rows, rescale_each, shift

_BATCH = 1 << 20  # numbers in the rows of products


def inner_cp(a: CP, b: CP) -> Scaled:
    """Return the inner product: the sum of the entrywise product of the matrices A_k^H B_k, weights included."""
    overlaps = Scaled(np.ones((len(a.weights), len(b.weights))))  # R S
    for left, right in zip((a.weights[None], *a.factors), (b.weights[None], *b.factors), strict=True):
        (x, e), (y, f) = normalize(left), normalize(right)
        product = overlaps.array * (x.conj().T @ y)  # R [n] S
        overlaps = Scaled(overlaps.array, overlaps.exponent + e + f).update(product)
    return Scaled(np.atleast_1d(overlaps.array.sum()), overlaps.exponent)


def kron_cp(a: CP, b: CP) -> CP:
    """Return the Kronecker product, R S components: the Kronecker products of all pairs of columns."""
    ((x, *left), e), ((y, *right), f) = rescale_each(a.arrays()), rescale_each(b.arrays())
    return CP(shift(np.kron(x, y), e + f), tuple(map(np.kron, left, right)))


def outer_cp(a: CP, b: CP) -> CP:
    """Return the outer product, R S components, the legs of `b` behind those of `a`."""
    ((x, *left), e), ((y, *right), f) = rescale_each(a.arrays()), rescale_each(b.arrays())
    repeated = (np.repeat(factor, len(y), axis=1) for factor in left)  # n (R S)
    tiled = (np.tile(factor, len(x)) for factor in right)
    return CP(shift(np.kron(x, y), e + f), (*repeated, *tiled))


def cp_entries(t: CP, points: Array) -> tuple[Array, Array]:
    """Return x and e: entry i of `t` is x[i] * 2**e[i] at points[i], (N, d)."""
    weights, *factors = t.promoted_arrays()
    scaled = [normalize(a) for a in (weights[None], *factors)]
    step = max(1, _BATCH // len(t.weights))
    parts = [_multiply_rows(scaled, points[i : i + step]) for i in range(0, len(points), step)]
    return np.concatenate([x for x, _ in parts]), np.concatenate([e for _, e in parts])


def _multiply_rows(factors: list[Scaled], points: Array) -> tuple[Array, Array]:
    """Return the sums (N,) of products of the weights and of one row of every factor, and their powers of two (N,)."""
    weights, *others = factors
    rows = np.repeat(weights.array, len(points), axis=0)
    exponents = np.full(len(points), sum(factor.exponent for factor in factors), np.int64)
    for factor, index in zip(others, points.T, strict=True):
        rows, e = normalize_rows(rows * factor.array[index])  # N R
        exponents += e
    return rows.sum(axis=1), exponents


def contract_vectors(t: CP, vectors: Mapping[int, Array]) -> CP | Scaled:
    """Return `t` with legs summed against vectors (n[k],): a CP, or a `Scaled` number where no leg is left."""
    weights = normalize(t.weights)
    for k, vector in vectors.items():
        (v, e), (factor, f) = normalize(vector), normalize(t.factors[k])
        product = weights.array * (v @ factor)  # [n] R
        weights = Scaled(weights.array, weights.exponent + e + f).update(product)
    kept = tuple(factor for k, factor in enumerate(t.factors) if k not in vectors)
    if not kept:
        return Scaled(np.atleast_1d(weights.array.sum()), weights.exponent)
    return CP(shift(*weights), kept)


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

    >>> factors = [np.array([[2.0]]), np.array([[3.0]])]
    >>> weights, factors = normalize_components(np.array([-1.0]), factors)
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
