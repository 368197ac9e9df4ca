r"""Tucker decomposition of an array that exceeds memory, in passes or in one read.

Sequentially truncated higher-order SVD: two passes project one leg onto its leading left singular vectors
(`out_of_core/leg_truncation.py`), and are repeated with the projected array and the next leg until it fits in memory,
where all legs are truncated once more:

    norm(x - y)^2  =  sum of the discarded weights of all truncations

One read: for independent Gaussian matrices W_j (s, n_j), P_j (t, n_j) on the legs, the identity where s or t is n_j,
the sums over all tiles

    Y_k = x times W_j^* along every leg j but k,        Z = x times P_j along every leg

give factors Q_k, the leading left singular vectors of the unfoldings of Y_k, and the core, the least-squares solution
of  core times (P_k Q_k) along every leg  =  Z. The truncated HOSVD of the core then lowers the ranks.

Y. Sun, Y. Guo, C. Luo, J. Tropp, M. Udell, "Low-rank Tucker approximation of a tensor from streaming data", SIAM J.
Math. Data Sci. 2 (2020), Algorithm 4.3; their factor sketches are Khatri-Rao products, these are Kronecker products.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from tnlib._errors import ArgumentError
from tnlib._typing import Array
from tnlib.formats.tucker.st_hosvd import st_hosvd
from tnlib.linalg.gram_svd import left_svd
from tnlib.linalg.multilinear import matrix_onto, mode_product, solve_tall, unfold
from tnlib.linalg.randomized import standard_normal
from tnlib.linalg.scaling import norm
from tnlib.linalg.threads import parallel_matmul
from tnlib.linalg.truncation import Truncation, TruncationBudget
from tnlib.out_of_core.array_source import ArraySource, Tile
from tnlib.out_of_core.leg_truncation import truncate_legs
from tnlib.out_of_core.matrix_sketch import (
    ERROR_ROWS,
    LinearSums,
    MatrixLayout,
    RowSketch,
    SketchedError,
    estimated_error,
    require_rank,
)
from tnlib.out_of_core.one_read import OneRead
from tnlib.out_of_core.passes import Passes
from tnlib.out_of_core.tiles import joined_size

_SEED = 4  # of the test matrices, other than those of `matrix_sketch.py`
_COLUMN_COST = 8  # as for `tt_svd`


def decompose_stored(
    opened: Passes | OneRead, rtol: float | None, max_ranks: tuple[int | None, ...]
) -> tuple[Array, list[Array], int, TruncationBudget | SketchedError]:
    """Return the core, the orthonormal factors (n[k], r[k]), the power of two of the core, and the error."""
    if isinstance(opened, OneRead):
        require_rank(opened.function, max_ranks[0])
        return _tucker_in_one_read(opened, rtol, tuple(cap or 1 for cap in max_ranks))
    with opened as passes:
        core, factors, budget = st_hosvd_in_passes(passes, rtol, max_ranks)
        return core, factors, passes.source.exponent, budget


def st_hosvd_in_passes(
    passes: Passes, rtol: float | None, max_ranks: tuple[int | None, ...]
) -> tuple[Array, list[Array], TruncationBudget]:
    """Return the core, the orthonormal factors (n[k], r[k]) and the truncations, as `st_hosvd` of the whole array."""
    source = passes.source
    budget = TruncationBudget(1.0, rtol, [1] * len(source.shape), source.dtype)
    array, bases, truncations = _reduce(passes, budget, max_ranks)
    left = rtol
    if rtol is not None and budget.norm > 0:
        spent = sum(record.charged for record in budget.records)
        left = math.sqrt(max(0.0, (rtol * budget.norm) ** 2 - spent)) / budget.norm
    core, factors, rest = st_hosvd(array, budget.norm, left, max_ranks, bases, dtype=source.dtype, shape=source.shape)
    for k, first in truncations.items():
        second = rest.records[k]
        rest.records[k] = second._replace(
            discarded=math.hypot(first.discarded, second.discarded),
            splits_group=first.splits_group or second.splits_group,
        )
    return core, factors, rest


def _reduce(
    passes: Passes, budget: TruncationBudget, max_ranks: Sequence[int | None]
) -> tuple[Array, list[Array | None], dict[int, Truncation]]:
    """Project legs, those that save most first, until the array fits in memory.

    Return the array in the coordinates of the bases, the bases, and the truncations that led to it, by their legs.
    """
    source = passes.source
    bases: list[Array | None] = [None] * len(source.shape)
    truncations: dict[int, Truncation] = {}
    sides = [min(n, source.size // n) for n in source.shape]
    current = source
    legs = list(range(len(source.shape)))  # of the axes of `current`
    while current.on_workers or not passes.limit.holds(8 * current.size):
        remaining = [k for k in legs if bases[k] is None]
        joined = [k for k in remaining if joined_size(current, [legs.index(k)]) <= passes.limit.largest_tile]
        leg = _leg_to_reduce(passes, current, joined or remaining, source.shape, max_ranks)
        if leg is None:
            break
        budget.sides = [*budget.sides[: len(budget.records)], *[sides[leg]] * (len(legs) - len(budget.records))]
        axis = legs.index(leg)
        budget.max_rank = max_ranks[leg]
        basis, projected = truncate_legs(passes, current, [axis], budget)
        bases[leg], truncations[leg] = basis, budget.records[-1]
        legs = [leg, *(k for k in legs if k != leg)]
        current = passes.as_source(projected)
    core = np.array(current.read_all())
    if not truncations:
        budget.norm = norm(core)
    return np.ascontiguousarray(core.transpose(np.argsort(legs))), bases, truncations


def _leg_to_reduce(
    passes: Passes, current: ArraySource, legs: Sequence[int], shape: Sequence[int], max_ranks: Sequence[int | None]
) -> int | None:
    """Return the leg with the largest ratio of size and cap among those whose Gram matrix fits.

    None where there is none and the array fits.
    """
    largest = passes.limit.largest_gram(current.dtype)
    fitting = [k for k in legs if 1 < shape[k] <= largest]
    if not fitting and passes.limit.holds(8 * current.size):
        return None
    if not fitting:
        raise ArgumentError(
            f"{current.function}: storage.memory must hold the core, or a Gram matrix of another leg; the legs of "
            f"sizes {tuple(shape[k] for k in legs)} remain of {tuple(shape)}, got {passes.limit.total:,} bytes; "
            "raise it or rtol, or cap the ranks."
        )
    return max(fitting, key=lambda k: (shape[k] / min(max_ranks[k] or shape[k], shape[k]), shape[k], k))


def _tucker_in_one_read(
    read: OneRead, rtol: float | None, caps: tuple[int, ...]
) -> tuple[Array, list[Array], int, SketchedError]:
    read.require_legs(2)
    sketch = _TuckerSketch(read, caps)
    for tile, a in read.tiles():
        if (scaled := sketch.sums.scaled(a)) is not None:
            sketch.add(tile, scaled)
    sketch.sums.normalize()
    core, bases = sketch.decompose()
    if rtol is not None:
        rtol = math.sqrt(max(0.0, rtol**2 - sketch.relative_error(core, bases) ** 2))
    core, factors, _ = st_hosvd(core, sketch.norm, rtol, caps, bases, dtype=read.dtype, shape=read.shape)
    return core, factors, sketch.sums.exponent or 0, SketchedError(sketch.relative_error(core, factors))


class _TuckerSketch:
    """The sums Y_k and Z, and the sketch that estimates errors."""

    def __init__(self, read: OneRead, caps: Sequence[int]) -> None:
        self.shape, d = read.shape, len(read.shape)
        half = min(range(1, d), key=lambda k: math.prod(self.shape[:k]) + _COLUMN_COST * math.prod(self.shape[k:]))
        self._layout = MatrixLayout(read, range(half))
        dtype = self._layout.dtype
        self.ranks = [min(n, r + max(4, r // 2)) for n, r in zip(self.shape, caps, strict=True)]
        width = math.ceil((2 * max(self.ranks) + 1) ** (1 / (d - 1))) + 4  # width^(d-1) columns determine a factor
        widths = [min(n, width) for n in self.shape]
        core_shape = [min(n, 2 * p + 1) for n, p in zip(self.shape, self.ranks, strict=True)]
        shapes = [[*widths[:k], n, *widths[k + 1 :]] for k, n in enumerate(self.shape)]
        sizes = (*map(math.prod, shapes), math.prod(core_shape))
        read.refuse_large(*sizes, *sizes, 2 * ERROR_ROWS * (self._layout.m + self._layout.n))
        generator = np.random.default_rng([0, _SEED])
        self._for_factors, self._for_core = (
            [_test_matrix(rows, n, dtype, generator) for rows, n in zip(sizes_to, self.shape, strict=True)]
            for sizes_to in (widths, core_shape)
        )
        self._factor_sums = [np.zeros(shape, dtype) for shape in shapes]
        self._core_sum = np.zeros(core_shape, dtype)
        self._error = RowSketch(self._layout, "T", ERROR_ROWS)
        self.sums = LinearSums([*self._factor_sums, self._core_sum, self._error.sum])

    @property
    def norm(self) -> float:
        """Frobenius norm of the array, at the scale of the sums."""
        return math.sqrt(self.sums.square)

    def add(self, tile: Tile, a: Array) -> None:
        """Add a tile, scaled by `sums`, to all sums."""
        last = a.ndim - 1
        parts = [slice(*bounds) for bounds in tile]
        inner = [w[:, part] for w, part in zip(self._for_factors, parts, strict=True)]
        outer = [w[:, part] for w, part in zip(self._for_core, parts, strict=True)]
        flat = np.ascontiguousarray(a).reshape(-1, a.shape[last])
        stacked = np.concatenate([inner[last], outer[last]])
        product = parallel_matmul(flat, stacked.T).reshape(*a.shape[:last], -1)  # w0 ... [w(d-1)] (s t)
        for_factors, for_core = np.split(product, [len(inner[last])], axis=last)
        for k in range(last):
            self._factor_sums[k][_at(k, parts)] += _multiply(for_factors, inner, [j for j in range(last) if j != k])
        self._factor_sums[last][_at(last, parts)] += _multiply(a, inner, range(last))
        self._core_sum += _multiply(for_core, outer, range(last))
        self._error.add(tile, np.ascontiguousarray(matrix_onto(a, self._layout.rows)))

    def decompose(self) -> tuple[Array, list[Array]]:
        """Return the core and the orthonormal factors."""
        core, bases = self._core_sum, []
        for k, (total, rank) in enumerate(zip(self._factor_sums, self.ranks, strict=True)):
            basis = left_svd(np.ascontiguousarray(unfold(total, k))[None], exact=True).u[:, :rank]
            inverse = solve_tall(self._for_core[k] @ basis, np.eye(len(self._for_core[k])))  # p t
            core = mode_product(core, inverse, k)
            bases.append(basis)
        return np.ascontiguousarray(core), bases

    def relative_error(self, core: Array, factors: Sequence[Array]) -> float:
        """Return the estimated error of a Tucker tensor, relative to the norm."""
        if self.norm == 0:
            return 0.0
        half, image = len(self._layout.rows), self._error.test_matrix  # q n0 ... n(h-1)
        for k in range(half):
            image = mode_product(image, factors[k].T, k + 1)  # q r0 ... [nk] ...
        image = np.tensordot(image, core, half)  # q [r0 ... r(h-1)] rh ...
        for k in range(half, len(factors)):
            image = mode_product(image, factors[k], k - half + 1)  # q nh ... [rk] ...
        return estimated_error(self._error.sum - image) / self.norm


def _test_matrix(rows: int, n: int, dtype: Any, generator: np.random.Generator) -> Array:
    """Return a Gaussian matrix (rows, n); the identity for a leg that is not reduced, which need not be inverted."""
    return np.eye(n, dtype=dtype) if rows == n else standard_normal((rows, n), dtype, generator)


def _at(k: int, parts: Sequence[slice]) -> tuple[slice, ...]:
    """Return the index of a part along leg `k`, of all along the others."""
    return tuple(part if j == k else slice(None) for j, part in enumerate(parts))


def _multiply(a: Array, matrices: Sequence[Array], legs: Sequence[int]) -> Array:
    """Return `a` multiplied along some of its legs by their matrices, those that lower its size first."""
    for j in sorted(legs, key=lambda j: matrices[j].shape[0] / matrices[j].shape[1]):
        a = mode_product(a, matrices[j], j)  # ... sj [nj] ...
    return a
