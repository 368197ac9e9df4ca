"""Random values of every format: independent standard normal entries in all stored arrays.

Parameters and errors of all functions:

shape
    (n[0], ..., n[d-1]), the sizes of the legs.
dtype
    float32, float64, complex64 or complex128; complex entries have variance 1 too.
rng
    A numpy random generator or a seed for it; None always draws the same numbers.

ArgumentError or ArgumentTypeError is raised if a size or rank is no positive integer, or there are too many or too few.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tnlib._errors import ArgumentError
from tnlib._typing import Array
from tnlib._validate import as_count, as_dtype, as_rng, as_sizes, as_sizes_of_each
from tnlib.formats.cp.format import CP
from tnlib.formats.matrix.low_rank import LowRank
from tnlib.formats.train.arguments import as_leg_pairs
from tnlib.formats.train.format import TensorTrain
from tnlib.formats.train.tt_matrix import TTMatrix
from tnlib.formats.tucker.format import Tucker

Rng = np.random.Generator | int | None


def tensor_train(
    shape: Sequence[int], rank: int | Sequence[int], *, dtype: npt.DTypeLike = np.float64, rng: Rng = None
) -> TensorTrain:
    """Return a train with independent standard normal entries in its cores.

    Parameters
    ----------
    shape, dtype, rng
        As in `tnlib.random`.
    rank
        Size of every bond, or one size for each of the d - 1 bonds. A bond is no larger than the legs on either side
        of it allow.

    Returns
    -------
    TensorTrain
        Without a centre. The cores are divided by the root of their left bond, so that entries have variance 1.

    Examples
    --------
    >>> import tnlib
    >>> tnlib.random.tensor_train((4, 5, 6), 3, rng=0)
    TensorTrain(shape 4 x 5 x 6, ranks (1, 3, 3, 1), 75 numbers, float64)
    """
    sizes = as_sizes("tensor_train", "shape", shape)
    return TensorTrain(_cores("tensor_train", [(n,) for n in sizes], rank, dtype, rng))


def tt_matrix(
    row_shape: Sequence[int],
    col_shape: Sequence[int],
    rank: int | Sequence[int],
    *,
    dtype: npt.DTypeLike = np.float64,
    rng: Rng = None,
) -> TTMatrix:
    """Return a TT-matrix with row legs `row_shape` and column legs `col_shape`; the others as for `tensor_train`.

    Examples
    --------
    >>> import tnlib
    >>> tnlib.random.tt_matrix((2, 3), (4, 5), 2, rng=0).shape
    (6, 20)
    """
    legs = list(zip(*as_leg_pairs("tt_matrix", row_shape, col_shape), strict=True))
    return TTMatrix(_cores("tt_matrix", legs, rank, dtype, rng))


def tucker(
    shape: Sequence[int], ranks: int | Sequence[int], *, dtype: npt.DTypeLike = np.float64, rng: Rng = None
) -> Tucker:
    """Return a Tucker tensor with multilinear `ranks`, one number for all legs or one for each.

    Examples
    --------
    >>> import tnlib
    >>> tnlib.random.tucker((4, 5, 6), 2, rng=0).ranks
    (2, 2, 2)
    """
    sizes, generator, kind = as_sizes("tucker", "shape", shape), as_rng("tucker", rng), as_dtype("tucker", dtype)
    inner = as_sizes_of_each("tucker", "ranks", ranks, len(sizes))
    core = _normal(inner, kind, generator)
    return Tucker(core, [_normal((n, r), kind, generator) for n, r in zip(sizes, inner, strict=True)])


def cp(shape: Sequence[int], rank: int, *, dtype: npt.DTypeLike = np.float64, rng: Rng = None) -> CP:
    """Return a CP tensor of `rank` components, with weights 1.

    Examples
    --------
    >>> import tnlib
    >>> tnlib.random.cp((4, 5, 6), 2, rng=0).ranks
    (2,)
    """
    sizes, generator, kind = as_sizes("cp", "shape", shape), as_rng("cp", rng), as_dtype("cp", dtype)
    components = as_count("cp", "rank", rank)
    return CP(np.ones(components, kind), [_normal((n, components), kind, generator) for n in sizes])


def low_rank(shape: Sequence[int], rank: int, *, dtype: npt.DTypeLike = np.float64, rng: Rng = None) -> LowRank:
    """Return a product of two matrices, (m, rank) and (rank, n), for `shape` (m, n).

    Examples
    --------
    >>> import tnlib
    >>> tnlib.random.low_rank((40, 50), 2, rng=0).n_parameters
    180
    """
    sizes, generator, kind = as_sizes("low_rank", "shape", shape), as_rng("low_rank", rng), as_dtype("low_rank", dtype)
    if len(sizes) != 2:
        raise ArgumentError(f"low_rank: shape must be a pair (m, n), got {sizes}; for more legs use tensor_train.")
    inner = as_count("low_rank", "rank", rank)
    return LowRank(_normal((sizes[0], inner), kind, generator), _normal((inner, sizes[1]), kind, generator))


def _cores(
    function: str, legs: Sequence[tuple[int, ...]], rank: int | Sequence[int], dtype: npt.DTypeLike, rng: Rng
) -> list[Array]:
    generator, kind = as_rng(function, rng), as_dtype(function, dtype)
    bonds = [1, *as_sizes_of_each(function, "rank", rank, len(legs) - 1), 1]
    for k in range(1, len(legs)):  # a bond larger than the legs on one side of it allow is deficient
        bonds[k] = min(bonds[k], bonds[k - 1] * int(np.prod(legs[k - 1])))
    for k in range(len(legs) - 1, 0, -1):
        bonds[k] = min(bonds[k], bonds[k + 1] * int(np.prod(legs[k])))
    shapes = [(bonds[k], *sizes, bonds[k + 1]) for k, sizes in enumerate(legs)]
    return [(_normal(shape, kind, generator) / np.sqrt(shape[0])).astype(kind, copy=False) for shape in shapes]


def _normal(shape: Sequence[int], dtype: np.dtype[np.generic], rng: np.random.Generator) -> Array:
    draw = rng.standard_normal(shape)
    if dtype.kind == "c":
        return np.asarray((draw + 1j * rng.standard_normal(shape)) / np.sqrt(2), dtype)
    return draw.astype(dtype, copy=False)
