"""TT-SVD of a matrix with paired row and column legs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from tnlib._fit import Fit, report
from tnlib._format import Format, with_arrays_of
from tnlib._keywords import refuse_foreign_keywords
from tnlib._registry import implementation
from tnlib._typing import SlicedArray
from tnlib._validate import as_max_rank, as_rtol, is_stored
from tnlib.formats.train.arguments import as_leg_pairs
from tnlib.formats.train.cores import pair_legs
from tnlib.formats.train.tt_matrix import TTMatrix
from tnlib.formats.train.tt_svd import decompose_prepared
from tnlib.linalg.scaling import Prepared, prepare
from tnlib.linalg.threads import single_threaded_blas

if TYPE_CHECKING:
    from tnlib.out_of_core.storage import Storage


@single_threaded_blas
@refuse_foreign_keywords
def ttm_svd(
    a: npt.ArrayLike | Format | SlicedArray,
    row_shape: Sequence[int],
    col_shape: Sequence[int],
    *,
    rtol: float | None = None,
    max_rank: int | None = None,
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
        Relative Frobenius error of the whole tensor, and maximal rank of every bond; the smaller rank is used. If both
        are None, the numerical ranks.
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
    rtol, max_rank = as_rtol("ttm_svd", rtol), as_max_rank("ttm_svd", max_rank)
    of_format = implementation("ttm_svd", type(a))
    if of_format is not None and isinstance(a, Format):
        rows, columns = as_leg_pairs("ttm_svd", row_shape, col_shape, a.shape)
        value, budget = of_format(a, rows, columns, rtol, max_rank)
    else:
        passes, dense = None, a
        if storage is not None or is_stored(a):
            from tnlib.out_of_core.open_array import open_passes

            call = {"rtol": rtol, "max_rank": max_rank, "legs": repr((row_shape, col_shape))}
            passes, dense = open_passes("ttm_svd", "a", a, storage, call)
        if passes is None:
            matrix, exponent, norm = prepare("ttm_svd", "a", dense, ndim=2)
            rows, columns = as_leg_pairs("ttm_svd", row_shape, col_shape, matrix.shape)
            paired = Prepared(np.ascontiguousarray(pair_legs(matrix, rows, columns)), exponent, norm)
            train, budget = decompose_prepared(paired, rtol, max_rank)
        else:
            from tnlib.formats.train.tt_svd_out_of_core import decompose_stored_matrix

            rows, columns = as_leg_pairs("ttm_svd", row_shape, col_shape, passes.source.matrix_shape())
            train, budget = decompose_stored_matrix(passes, rows, columns, rtol, max_rank)
        pairs = zip(train.cores, rows, columns, strict=True)
        cores = [core.reshape(len(core), m, n, -1) for core, m, n in pairs]  # l m n r
        value = TTMatrix.from_sweep(cores, train.center, train.exponent)
    return with_arrays_of(
        a, report("ttm_svd", value, error=budget.error, rtol=rtol, notes=budget.notes("bond", first=1))
    )
