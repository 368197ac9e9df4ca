r"""TT-SVD: a dense array to the cores of a train.

From the left, each step leaves

    |>--|>--|>--(rest)          |>  left-isometric core
    |   |   |   | | |

so the last core is the centre and carries the norm (`leg_splitting.py`).
"""

from __future__ import annotations

import math
import os
from typing import Any

import numpy.typing as npt

from tnlib._fit import Fit, report
from tnlib._keywords import refuse_foreign_keywords
from tnlib._typing import Array, SlicedArray
from tnlib._validate import as_flag, as_max_rank, as_rtol
from tnlib.formats.other_arrays import with_arrays_of
from tnlib.formats.train.format import TensorTrain
from tnlib.formats.train.leg_splitting import split_legs
from tnlib.formats.train.tt_svd_one_pass import tt_svd_one_pass
from tnlib.formats.train.tt_svd_out_of_core import decompose_source
from tnlib.linalg.scaling import Prepared, prepare
from tnlib.linalg.threads import single_threaded_blas
from tnlib.linalg.truncation import TruncationBudget
from tnlib.out_of_core.session import Resources, open_session
from tnlib.out_of_core.sketched_matrix import report_estimate, require_rank
from tnlib.out_of_core.slab_stream import SlabStream


@single_threaded_blas
@refuse_foreign_keywords
def tt_svd(
    x: npt.ArrayLike | SlicedArray | SlabStream,
    *,
    rtol: float | None = None,
    max_rank: int | None = None,
    memory: float | None = None,
    spill: str | os.PathLike[str] | None = None,
    client: Any = None,
    one_pass: bool = False,
) -> Fit[TensorTrain]:
    """Decompose `x` into a train so that norm(x - fit.value.full()) <= rtol * norm(x).

    Parameters
    ----------
    x
        (n[0], ..., n[d-1]), d >= 1, real or complex, 32 or 64 bits a component; a numpy.memmap, a zarr array, an h5py
        dataset, a dask.array or anything with `shape`, `dtype` and slicing may exceed memory.
    rtol, max_rank
        Relative Frobenius error of the whole tensor, and maximal rank of every bond; the smaller rank is used. If both
        are None, the numerical ranks.
    memory
        Memory limit, in bytes, for an array that is read by slices; a quarter of the free memory if None.
    spill
        Folder for intermediate files, from which the same call resumes after an interruption; a temporary one if None.
    client
        distributed.Client whose workers read `x` and compute on its chunks. If None, a dask.array is computed by the
        client that `x.compute()` would use, or by this process if there is none. With a client, `memory` is the limit
        of every process, at most 4 GiB if None.
    one_pass
        Read `x` once, for slow storage and for a `SlabStream`, in double precision. Needs `max_rank`, which determines
        the sketches. The error is estimated; `rtol` applies to the estimate.

    Returns
    -------
    Fit[TensorTrain]
        Left-canonical: the centre is the last core; every other core is an isometry from its right bond to its left
        bond and leg, with positive leading entries. The error is at most sqrt(d - 1) times the smallest possible one at
        the same ranks.

    Notes
    -----
    With `one_pass`, `certified` is False. The error is norm(T (x - y)) / (sqrt(32) norm(x)) with y the result and T a
    Gaussian matrix of 32 rows on about half of the legs, independent of the sketches from which y is computed. The
    expectation of its square is the squared error. The true error exceeds c times the estimate with a probability of at
    most (exp(1 - 1/c^2) / c^2)^16: below 1 % for c = 1.6, for any x that does not depend on T.

    References
    ----------
    I. V. Oseledets, "Tensor-train decomposition", SIAM J. Sci. Comput. 33 (2011), Algorithm 1. With `one_pass`:
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
    rtol, max_rank = as_rtol("tt_svd", rtol), as_max_rank("tt_svd", max_rank)
    resources = Resources(memory, spill, client)
    if as_flag("tt_svd", "one_pass", one_pass):
        value, error = tt_svd_one_pass(x, rtol, require_rank("tt_svd", max_rank, resources), memory)
        return with_arrays_of(x, report_estimate("tt_svd", value, error, rtol))
    options = {"rtol": rtol, "max_rank": max_rank}
    session, dense = open_session("tt_svd", "x", x, resources, options)
    if session is None:
        value, budget = decompose_prepared(prepare("tt_svd", "x", dense), rtol, max_rank)
    else:
        with session as (passes, source):
            value, budget = decompose_source(passes, source, [(k,) for k in range(len(source.shape))], rtol, max_rank)
    return with_arrays_of(
        x, report("tt_svd", value, error=budget.error, rtol=rtol, notes=budget.notes("bond", first=1))
    )


def decompose_prepared(x: Prepared, rtol: float | None, max_rank: int | None) -> tuple[TensorTrain, TruncationBudget]:
    """Return the left-canonical train of a validated array and its truncations."""
    shape = x.array.shape
    sides = [min(math.prod(shape[:k]), math.prod(shape[k:])) for k in range(1, len(shape))]
    budget = TruncationBudget(x.norm, rtol, sides, x.array.dtype)
    cores = split_array(x.array, budget, max_rank)
    return TensorTrain.from_sweep(cores, len(cores) - 1, x.exponent), budget


def split_array(x: Array, budget: TruncationBudget, max_rank: int | None) -> list[Array]:
    """Split `x` (n[0], ..., n[d-1]) into cores by d - 1 truncations from the left.

    `x` is the whole tensor of `budget`, or the part of it that earlier truncations kept.
    """
    *legs, last = x.shape
    norm = None if budget.records else budget.norm
    cores, rest = split_legs(x.reshape(1, -1), tuple(legs), budget, max_rank, norm)
    if not legs:
        rest = rest.copy()  # of one leg it is x itself
    return [core.astype(x.dtype, copy=False) for core in [*cores, rest.reshape(-1, last, 1)]]
