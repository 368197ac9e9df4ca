"""Verbs of the CP format: inner, kron, outer, entries, contract."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tnlib._typing import Array
from tnlib.formats.cp.format import CP
from tnlib.linalg.scaling import Scaled, normalize, normalize_rows, rescale_each, shift

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
