"""Tucker decomposition of a dense array: truncated higher-order SVD, then orthogonal iteration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from numpy.typing import ArrayLike

from tnlib._errors import ArgumentError, ArgumentTypeError
from tnlib._fit import Fit, after_sweeps, refuse_other_arrays, report, wrong_type
from tnlib._format import with_arrays_of
from tnlib._typing import SlicedArray
from tnlib._validate import as_count, as_rtol, as_sizes_of_each, refuse_foreign_keywords
from tnlib.formats.tucker.fit_known_entries import fit_known_entries
from tnlib.formats.tucker.format import Tucker
from tnlib.formats.tucker.st_hosvd import orthogonal_iteration, orthonormal_factors, st_hosvd
from tnlib.linalg.missing_entries import describe_known, fill_missing
from tnlib.linalg.scaling import distance, prepare, restore
from tnlib.linalg.threads import single_threaded_blas
from tnlib.linalg.truncation import TruncationBudget
from tnlib.out_of_core import open_large

if TYPE_CHECKING:
    from tnlib.out_of_core.matrix_sketch import SketchedError
    from tnlib.out_of_core.one_read import SlabStream
    from tnlib.out_of_core.storage import Storage


@single_threaded_blas
@refuse_foreign_keywords
def tucker(
    x: ArrayLike | SlicedArray | SlabStream,
    *,
    rtol: float | None = None,
    ranks: int | Sequence[int] | None = None,
    n_iter: int = 0,
    max_rank: int | Sequence[int] | None = None,
    storage: Storage | None = None,
    init: Tucker | None = None,
) -> Fit[Tucker]:
    r"""Decompose `x` into a core and one factor per leg so that norm(x - fit.value.full()) <= rtol * norm(x).

    Parameters
    ----------
    x
        (n[0], ..., n[d-1]), d >= 1, real or complex, 32 or 64 bits a component, in memory or not, as for `tt_svd`.
        Missing entries are those of a numpy masked array, which needs `max_rank` and `n_iter`.
    rtol
        Relative Frobenius error of the whole tensor. If it and `max_rank` are None, the numerical multilinear ranks.
        If entries are missing, the error at which sweeps end; it does not lower the ranks.
    ranks
        Another name of `max_rank`.
    n_iter
        Sweeps of higher-order orthogonal iteration after the first decomposition, at fixed ranks. They reduce the
        error, usually slightly. Not for arrays that exceed memory or are read by workers. If entries are missing, the
        maximal number of sweeps.
    max_rank
        Maximal rank of every leg, one number for all legs or one per leg; with `rtol`, the smaller rank is used.
    storage
        How an array that exceeds memory is read, see `Storage`.
    init
        A Tucker of the shape of `x` with which the iteration starts, at its ranks, in place of the decomposition of
        `x`; it needs `n_iter`, and no `max_rank`. If entries are missing, its entries replace them at first: more
        sweeps of an earlier fit, or another start.

    Returns
    -------
    Fit[Tucker]
        Factors (n[k], r[k]) with orthonormal columns and positive leading entries; the core is `x` multiplied by their
        adjoints. Before iteration the error is at most :math:`\sqrt d` times the smallest possible one. If entries are
        missing, `error` is that of the known entries relative to their norm, and `certified` False.

    References
    ----------
    N. Vannieuwenhoven, R. Vandebril, K. Meerbergen, "A new truncation strategy for the higher-order singular value
    decomposition", SIAM J. Sci. Comput. 34 (2012), Algorithm 1; for the iteration L. De Lathauwer, B. De Moor,
    J. Vandewalle, "On the best rank-1 and rank-(R1, ..., RN) approximation of higher-order tensors", SIAM J. Matrix
    Anal. Appl. 21 (2000), Algorithm 4.2.

    Examples
    --------
    >>> import numpy as np, tnlib
    >>> i = np.arange(10.0)
    >>> fit = tnlib.tucker(i[:, None, None] + i[:, None] + i)
    >>> fit.value.ranks, fit.value.n_parameters
    ((2, 2, 2), 68)
    """
    rtol, n_iter = as_rtol("tucker", rtol), as_count("tucker", "n_iter", n_iter, least=0)
    call = {"rtol": rtol, "max_rank": repr(max_rank), "ranks": repr(ranks)}
    opened, dense = open_large("tucker", "x", x, storage, call)
    budget: TruncationBudget | SketchedError
    dense, known = fill_missing("tucker", "x", dense)
    if known is not None:
        _, caps = _as_caps(max_rank, ranks, dense, init, n_iter)
        value, error, n_iter, stationary = fit_known_entries(dense, known, rtol, caps, n_iter, init)
        fit = report("tucker", value, error=error, rtol=rtol, n_iter=n_iter, estimate=describe_known(known))
        return after_sweeps("tucker", fit, rtol=rtol, stationary=stationary)
    if opened is None:
        scaled, exponent, norm = prepare("tucker", "x", dense)
        dtype = scaled.dtype
        keyword, caps = _as_caps(max_rank, ranks, scaled, init, n_iter)
        if init is None or norm == 0:
            core, factors, budget = st_hosvd(scaled, norm, rtol, caps)
        else:
            core, factors, budget = init.core, orthonormal_factors(init), TruncationBudget(norm, rtol, (), dtype)
    else:
        from tnlib.formats.tucker.tucker_out_of_core import decompose_stored

        if n_iter:
            raise ArgumentError(
                f"tucker: n_iter must be 0 for an array that exceeds memory or that workers read, got {n_iter}; "
                "every sweep would read it once per leg, lower rtol instead."
            )
        keyword, caps = _as_caps(max_rank, ranks, opened, init, n_iter)
        dtype = opened.dtype
        core, factors, exponent, budget = decompose_stored(opened, rtol, caps)
    core, *factors = (a.astype(dtype, copy=False) for a in (core, *factors))
    error = budget.error
    if n_iter and norm > 0:
        core, factors = orthogonal_iteration(scaled, factors, n_iter)
        # sqrt(norm(x)^2 - norm(core)^2) would lose half of the digits; the residual itself keeps them.
        error = distance(scaled, Tucker(core, tuple(factors)).full()) / norm
    value = Tucker(restore("tucker", "x", core, exponent), tuple(factors))
    notes = budget.notes("leg", cap=keyword)
    fit = report("tucker", value, error=error, rtol=rtol, n_iter=n_iter, estimate=budget.estimate, notes=notes)
    return with_arrays_of(x, fit)


def _refuse_other_start(init: Any, x: Any, n_iter: int, caps: tuple[int | None, ...]) -> None:
    """Raise unless the iteration on `x` can start with `init`."""
    if not isinstance(init, Tucker):
        raise wrong_type("tucker", "init", "a Tucker", init, "start from the value of an earlier fit")
    refuse_other_arrays("tucker", "init", init)
    if init.shape != x.shape:
        raise ArgumentError(f"tucker: init must have the shape of x, {x.shape}, got {init.shape}; leave it out.")
    if init.dtype.kind == "c" and x.dtype.kind != "c":
        raise ArgumentTypeError("tucker: init must be real for real data, got a complex Tucker; leave it out.")
    if n_iter == 0 or any(cap is not None for cap in caps):
        raise ArgumentError(
            f"tucker: init must be given with n_iter and without max_rank or ranks, got n_iter={n_iter} and {caps}; "
            f"its own ranks {init.ranks} stay."
        )


def _as_caps(
    max_rank: int | Sequence[int] | None, ranks: int | Sequence[int] | None, x: Any, init: Tucker | None, n_iter: int
) -> tuple[str, tuple[int | None, ...]]:
    """Return the keyword that the caller used, and the cap of every leg of `x`: the ranks of `init` if it is given."""
    if max_rank is not None and ranks is not None:
        raise ArgumentError(
            f"tucker: max_rank and ranks must not both be given, got {max_rank!r} and {ranks!r}; "
            "they are two names of one argument, pass max_rank."
        )
    (keyword, cap), ndim = ("max_rank", max_rank) if ranks is None else ("ranks", ranks), len(x.shape)
    caps = (None,) * ndim if cap is None else as_sizes_of_each("tucker", keyword, cap, ndim)
    if init is None:
        return keyword, caps
    _refuse_other_start(init, x, n_iter, caps)
    return keyword, init.ranks
