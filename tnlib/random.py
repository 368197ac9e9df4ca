"""Random values of every format: independent normal entries in all stored arrays.

Their variance is 1, in core k of a train 1 / r[k], so that the entries of the train have variance 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tnlib._errors import ArgumentError
from tnlib._stored_arrays import refuse_unallocatable
from tnlib._typing import Array
from tnlib._validate import as_count, as_dtype, as_rng, as_sizes, as_sizes_of_each
from tnlib.formats.cp.format import CP
from tnlib.formats.matrix.kronecker_terms import KroneckerTerms
from tnlib.formats.matrix.low_rank import LowRank
from tnlib.formats.train.cores import attainable_ranks
from tnlib.formats.train.format import TensorTrain
from tnlib.formats.train.tt_matrix import TTMatrix, as_leg_pairs
from tnlib.formats.tucker.format import Tucker
from tnlib.linalg.randomized import standard_normal

__all__ = ["cp", "kronecker_terms", "low_rank", "tensor_train", "tt_matrix", "tucker"]

Rng = np.random.Generator | int | None


def tensor_train(
    shape: Sequence[int], rank: int | Sequence[int], *, dtype: npt.DTypeLike = np.float64, rng: Rng = None
) -> TensorTrain:
    """Return a train with independent normal entries in its cores, such that the entries of the tensor have variance 1.

    Parameters
    ----------
    shape
        (n[0], ..., n[d-1]), the sizes of the legs.
    rank
        Size of every bond, or one size for each of the d - 1 bonds. A bond is no larger than the legs on either side
        of it allow.
    dtype
        float32, float64, complex64 or complex128; complex entries have variance 1 too.
    rng
        A numpy random generator, or a seed; None stands for a fixed seed.

    Returns
    -------
    TensorTrain
        Without a centre. Entries of core k have mean 0 and variance 1 / r[k], r[k] its left bond.

    Examples
    --------
    >>> import tnlib
    >>> tnlib.random.tensor_train((4, 5, 6), 3, rng=0)
    TensorTrain(shape 4 x 5 x 6, ranks (1, 3, 3, 1), 75 parameters, float64)
    """
    sizes = as_sizes("tensor_train", "shape", shape)
    return TensorTrain(_cores([(n,) for n in sizes], rank, _Normal("tensor_train", dtype, rng)))


def tt_matrix(
    row_shape: Sequence[int],
    col_shape: Sequence[int],
    rank: int | Sequence[int],
    *,
    dtype: npt.DTypeLike = np.float64,
    rng: Rng = None,
) -> TTMatrix:
    """Return a TT-matrix (row legs, column legs) with independent normal entries in its cores.

    Their variance is that of `tensor_train`, so that entries of the matrix have variance 1.

    Parameters
    ----------
    row_shape, col_shape
        Sizes of the row legs and of the column legs, as many of each.
    rank, dtype, rng
        As for `tensor_train`.

    Examples
    --------
    >>> import tnlib
    >>> tnlib.random.tt_matrix((2, 3), (4, 5), 2, rng=0).shape
    (6, 20)
    """
    legs = list(zip(*as_leg_pairs("tt_matrix", row_shape, col_shape), strict=True))
    return TTMatrix(_cores(legs, rank, _Normal("tt_matrix", dtype, rng)))


def tucker(
    shape: Sequence[int], ranks: int | Sequence[int], *, dtype: npt.DTypeLike = np.float64, rng: Rng = None
) -> Tucker:
    """Return a Tucker tensor with independent standard normal entries in its core and factors.

    Parameters
    ----------
    shape
        (n[0], ..., n[d-1]), the sizes of the legs.
    ranks
        One rank for all legs, or one for each.
    dtype, rng
        As for `tensor_train`.

    Examples
    --------
    >>> import tnlib
    >>> tnlib.random.tucker((4, 5, 6), 2, rng=0).ranks
    (2, 2, 2)
    """
    sizes, normal = as_sizes("tucker", "shape", shape), _Normal("tucker", dtype, rng)
    inner = as_sizes_of_each("tucker", "ranks", ranks, len(sizes))
    return Tucker(normal(*inner), [normal(n, r) for n, r in zip(sizes, inner, strict=True)])


def cp(shape: Sequence[int], rank: int, *, dtype: npt.DTypeLike = np.float64, rng: Rng = None) -> CP:
    """Return a CP tensor with weights 1 and independent standard normal entries in its factors.

    Parameters
    ----------
    shape
        (n[0], ..., n[d-1]), the sizes of the legs.
    rank
        Number of components.
    dtype, rng
        As for `tensor_train`.

    Examples
    --------
    >>> import tnlib
    >>> tnlib.random.cp((4, 5, 6), 2, rng=0).ranks
    (2,)
    """
    sizes, components, normal = as_sizes("cp", "shape", shape), as_count("cp", "rank", rank), _Normal("cp", dtype, rng)
    return CP(np.ones(components, normal.dtype), [normal(n, components) for n in sizes])


def low_rank(shape: Sequence[int], rank: int, *, dtype: npt.DTypeLike = np.float64, rng: Rng = None) -> LowRank:
    """Return a product of two matrices (m, rank) and (rank, n) with independent standard normal entries.

    Parameters
    ----------
    shape
        (m, n).
    rank
        Size of the contracted axis.
    dtype, rng
        As for `tensor_train`.

    Examples
    --------
    >>> import tnlib
    >>> tnlib.random.low_rank((40, 50), 2, rng=0).n_parameters
    180
    """
    sizes, inner = as_sizes("low_rank", "shape", shape), as_count("low_rank", "rank", rank)
    if len(sizes) != 2:
        raise ArgumentError(f"low_rank: shape must be a pair (m, n), got {sizes}; for more legs use tensor_train.")
    normal = _Normal("low_rank", dtype, rng)
    return LowRank(normal(sizes[0], inner), normal(inner, sizes[1]))


def kronecker_terms(
    row_shape: Sequence[int], col_shape: Sequence[int], rank: int, *, dtype: npt.DTypeLike = np.float64, rng: Rng = None
) -> KroneckerTerms:
    """Return a sum of Kronecker products of matrices (p, p') and (q, q') of independent standard normal entries.

    Parameters
    ----------
    row_shape, col_shape
        (p, q) and (p', q'), sizes of positions and features.
    rank
        Number of terms.
    dtype, rng
        As for `tensor_train`.

    Examples
    --------
    >>> import tnlib
    >>> tnlib.random.kronecker_terms((2, 3), (4, 5), 2, rng=0).shape
    (6, 20)
    """
    rows, columns = as_leg_pairs("kronecker_terms", row_shape, col_shape)
    if len(rows) != 2:
        raise ArgumentError(
            f"kronecker_terms: row_shape and col_shape must be pairs of positions and features, got {rows} and "
            f"{columns}; for more legs use tt_matrix."
        )
    terms, normal = as_count("kronecker_terms", "rank", rank), _Normal("kronecker_terms", dtype, rng)
    return KroneckerTerms(normal(terms, rows[0], columns[0]), list(normal(terms, rows[1], columns[1])))


class _Normal:
    """Draws arrays of independent standard normal entries for the public function of this name."""

    def __init__(self, function: str, dtype: npt.DTypeLike, rng: Rng) -> None:
        self.function, self.dtype, self._rng = function, as_dtype(function, dtype), as_rng(function, rng)

    def __call__(self, *shape: int) -> Array:
        refuse_unallocatable(self.function, shape, self.dtype)
        return standard_normal(shape, self.dtype, self._rng)


def _cores(legs: Sequence[tuple[int, ...]], rank: int | Sequence[int], normal: _Normal) -> list[Array]:
    ranks = [1, *as_sizes_of_each(normal.function, "rank", rank, len(legs) - 1), 1]
    bonds = attainable_ranks(ranks, [*map(math.prod, legs)])  # a larger bond would be deficient
    return [normal(left, *n, right) / math.sqrt(left) for left, n, right in zip(bonds, legs, bonds[1:], strict=False)]
