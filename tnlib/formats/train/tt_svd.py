r"""TT-SVD: a dense array to the cores of a train.

From the left, each step leaves

    |>--|>--|>--(rest)          |>  left-isometric core
    |   |   |   | | |

so the last core is the centre and carries the norm (`leg_splitting.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from tnlib._fit import Fit, report
from tnlib._format import Format, with_arrays_of
from tnlib._registry import implementation
from tnlib._typing import Array, MaxRank, SlicedArray
from tnlib._validate import as_max_ranks, as_rtol, check_bonds, refuse_foreign_keywords
from tnlib.formats.train.cores import pair_legs
from tnlib.formats.train.format import TensorTrain
from tnlib.formats.train.leg_splitting import split_legs
from tnlib.formats.train.tt_matrix import TTMatrix, as_leg_pairs
from tnlib.linalg.scaling import Prepared, prepare
from tnlib.linalg.threads import single_threaded_blas, single_threaded_blas_of_large
from tnlib.linalg.truncation import TruncationBudget
from tnlib.out_of_core import open_large

if TYPE_CHECKING:
    from tnlib.out_of_core.matrix_sketch import SketchedError
    from tnlib.out_of_core.one_read import SlabStream
    from tnlib.out_of_core.storage import Storage


@single_threaded_blas_of_large
@refuse_foreign_keywords
def tt_svd(
    x: npt.ArrayLike | SlicedArray | SlabStream,
    *,
    rtol: float | None = None,
    max_rank: int | Sequence[int] | None = None,
    storage: Storage | None = None,
) -> Fit[TensorTrain]:
    r"""Decompose `x` into a train so that norm(x - fit.value.full()) <= rtol * norm(x).

    Parameters
    ----------
    x
        (n[0], ..., n[d-1]), d >= 1, real or complex, 32 or 64 bits a component; a numpy.memmap, a zarr array, an h5py
        dataset, a dask.array or anything with `shape`, `dtype` and slicing may exceed memory. A `SlabStream` is read
        once.
    rtol, max_rank
        Relative Frobenius error of the whole tensor, and maximal rank: one for all bonds, or a sequence of one for each
        of the d - 1 bonds. The smaller rank is used; if both are None, the numerical ranks.
    storage
        How an array that exceeds memory is read: memory limit, folder of a resumable run, workers, one pass; the
        default limit is a quarter of the free memory. See `Storage`.

    Returns
    -------
    Fit[TensorTrain]
        Left-canonical: the centre is the last core; every other core is an isometry from its right bond to its left
        bond and leg, with positive leading entries. The error is at most :math:`\sqrt{d - 1}` times the smallest
        possible one at the same ranks.

    Notes
    -----
    For an array that is read once, `certified` is False. The error is
    :math:`\lVert T (x - y) \rVert / (\sqrt{32} \lVert x \rVert)` with y the result and T a Gaussian matrix of 32 rows
    on about half of the legs, independent of the sketches from which y is computed. The expectation of its square is
    the squared error. The true error exceeds c times the estimate with a probability of at most
    :math:`(e^{1 - 1/c^2} / c^2)^{16}`: below 1 % for c = 1.6, for any x that does not depend on T.

    References
    ----------
    I. V. Oseledets, "Tensor-train decomposition", SIAM J. Sci. Comput. 33 (2011), Algorithm 1. For one read:
    J. A. Tropp, A. Yurtsever, M. Udell, V. Cevher, "Practical sketching algorithms for low-rank matrix approximation",
    SIAM J. Matrix Anal. Appl. 38 (2017), and "Streaming low-rank matrix approximation with an application to scientific
    simulation", SIAM J. Sci. Comput. 41 (2019), section 6.

    Examples
    --------
    The sum of four indices has rank 2 on every bond.

    >>> import numpy as np, tnlib
    >>> i = np.arange(10.0)
    >>> x = i[:, None, None, None] + i[:, None, None] + i[:, None] + i
    >>> tnlib.tt_svd(x, rtol=1e-10).value.ranks
    (1, 2, 2, 2, 1)
    """
    rtol, max_rank = as_rtol("tt_svd", rtol), as_max_ranks("tt_svd", max_rank)
    opened, dense = open_large("tt_svd", "x", x, storage, {"rtol": rtol, "max_rank": max_rank})
    budget: TruncationBudget | SketchedError
    if opened is None:
        prepared = prepare("tt_svd", "x", dense)
        check_bonds("tt_svd", max_rank, prepared.array.ndim - 1)
        value, budget = decompose_prepared(prepared, rtol, max_rank)
    else:
        from tnlib.formats.train.tt_svd_out_of_core import decompose_stored

        check_bonds("tt_svd", max_rank, len(opened.shape) - 1)
        value, budget = decompose_stored(opened, rtol, max_rank)
    notes = budget.notes("bond", first=1)
    fit = report("tt_svd", value, error=budget.error, rtol=rtol, estimate=budget.estimate, notes=notes)
    return with_arrays_of(x, fit)


def decompose_prepared(x: Prepared, rtol: float | None, max_rank: MaxRank) -> tuple[TensorTrain, TruncationBudget]:
    """Return the left-canonical train of a validated array and its truncations."""
    array, exponent, norm = x
    sides, rows = [], 1
    for n in array.shape[:-1]:
        rows *= n
        sides.append(min(rows, array.size // rows))
    budget = TruncationBudget(norm, rtol, sides, array.dtype, max_rank)
    cores = split_array(array, budget)
    return TensorTrain.from_sweep(cores, len(cores) - 1, exponent), budget


def split_array(x: Array, budget: TruncationBudget) -> list[Array]:
    """Split `x` (n[0], ..., n[d-1]) into cores by d - 1 truncations from the left.

    `x` is the whole tensor of `budget`, or the part of it that earlier truncations kept.
    """
    *legs, last = x.shape
    norm = None if budget.records else budget.norm
    cores, rest = split_legs(x.reshape(1, -1), tuple(legs), budget, norm)
    if not legs:
        rest = rest.copy()  # of one leg it is x itself
    cores.append(rest.reshape(-1, last, 1))
    return [core if core.dtype == x.dtype else core.astype(x.dtype) for core in cores]


@single_threaded_blas
@refuse_foreign_keywords
def ttm_svd(
    a: npt.ArrayLike | Format | SlicedArray,
    row_shape: Sequence[int],
    col_shape: Sequence[int],
    *,
    rtol: float | None = None,
    max_rank: int | Sequence[int] | None = None,
    storage: Storage | None = None,
) -> Fit[TTMatrix]:
    """Decompose the matrix `a` into a TT-matrix so that norm(a - fit.value.full()) <= rtol * norm(a).

    Parameters
    ----------
    a
        (prod m, prod n), real or complex, 32 or 64 bits a component; or KroneckerTerms, of which the first legs must
        split the positions and the other legs the features; the dense matrix is never formed. It may exceed memory, as
        in `tt_svd`.
    row_shape, col_shape
        (m[0], ..., m[d-1]) and (n[0], ..., n[d-1]): the legs that rows and columns split into, slowest first.
    rtol, max_rank
        Relative Frobenius error of the whole tensor, and maximal rank: one for all bonds, or a sequence of one for each
        of the d - 1 bonds. The smaller rank is used; if both are None, the numerical ranks.
    storage
        How a matrix that exceeds memory is read, see `Storage`; without `one_pass`.

    Returns
    -------
    Fit[TTMatrix]
        Left-canonical over the paired legs (m[k], n[k]); the centre is the last core.

    References
    ----------
    I. V. Oseledets, "Approximation of 2^d x 2^d matrices using tensor decomposition", SIAM J. Matrix Anal.
    Appl. 31 (2010).

    Examples
    --------
    >>> import numpy as np, tnlib
    >>> a = np.kron(np.eye(4), np.ones((8, 2)))
    >>> tnlib.ttm_svd(a, (4, 8), (4, 2)).value.ranks
    (1, 1, 1)
    """
    rtol, max_rank = as_rtol("ttm_svd", rtol), as_max_ranks("ttm_svd", max_rank)
    of_format = implementation("ttm_svd", type(a))
    if of_format is not None and isinstance(a, Format):
        rows, columns = as_leg_pairs("ttm_svd", row_shape, col_shape, a.shape)
        check_bonds("ttm_svd", max_rank, len(rows) - 1)
        value, budget = of_format(a, rows, columns, rtol, max_rank)
    else:
        call = {"rtol": rtol, "max_rank": max_rank, "legs": repr((row_shape, col_shape))}
        passes, dense = open_large("ttm_svd", "a", a, storage, call, one_read=False)
        if passes is None:
            matrix, exponent, norm = prepare("ttm_svd", "a", dense, ndim=2)
            rows, columns = as_leg_pairs("ttm_svd", row_shape, col_shape, matrix.shape)
            check_bonds("ttm_svd", max_rank, len(rows) - 1)
            paired = Prepared(np.ascontiguousarray(pair_legs(matrix, rows, columns)), exponent, norm)
            train, budget = decompose_prepared(paired, rtol, max_rank)
        else:
            from tnlib.formats.train.tt_svd_out_of_core import decompose_stored_matrix

            rows, columns = as_leg_pairs("ttm_svd", row_shape, col_shape, passes.source.matrix_shape())
            check_bonds("ttm_svd", max_rank, len(rows) - 1)
            train, budget = decompose_stored_matrix(passes, rows, columns, rtol, max_rank)
        pairs = zip(train.cores, rows, columns, strict=True)
        cores = [core.reshape(len(core), m, n, -1) for core, m, n in pairs]  # l m n r
        value = TTMatrix.from_sweep(cores, train.center, train.exponent)
    return with_arrays_of(
        a, report("ttm_svd", value, error=budget.error, rtol=rtol, notes=budget.notes("bond", first=1))
    )
