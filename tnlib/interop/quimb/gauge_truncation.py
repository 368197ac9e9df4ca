"""Truncation of all bonds of a network in the gauge of belief propagation."""

from __future__ import annotations

import numpy as np

from tnlib._errors import ArgumentTypeError
from tnlib._fit import Fit, report
from tnlib._keywords import refuse_foreign_keywords
from tnlib._validate import as_max_rank, as_rtol
from tnlib.interop.quimb.belief_propagation import Gauged
from tnlib.interop.quimb.network_format import Network
from tnlib.linalg.truncation import TruncationBudget


@refuse_foreign_keywords
def truncate_gauged(gauged: Gauged, *, rtol: float | None = None, max_rank: int | None = None) -> Fit[Network]:
    """Return the network with the largest weights of every bond, and an error estimate from those left out.

    Parameters
    ----------
    gauged
        The result of `gauge_loops`. The weights estimate the Schmidt values of a bond, exactly on trees.
    rtol, max_rank
        Estimated relative Frobenius error of the whole network, distributed over the bonds, and maximal rank of every
        bond; the smaller rank is used. If both are None, weights above roundoff are kept.

    Returns
    -------
    Fit
        Of a `Network`. `error` is the root of the sum of all squared weights that were left out, at most 1; not
        certified: on a tree of which one bond was truncated it is exact, with loops an estimate.

    References
    ----------
    J. Tindall and M. Fishman, "Gauging tensor networks with belief propagation", SciPost Phys. 15 (2023).

    Examples
    --------
    >>> import numpy as np, tnlib
    >>> from tnlib.interop.quimb import gauge_loops, to_network, truncate_gauged
    >>> train = tnlib.tt_svd(np.diag([4.0, 3.0])).value
    >>> fit = truncate_gauged(gauge_loops(to_network(train)), max_rank=1)
    >>> fit.value.ranks, f"{fit.error:.3f}"
    ((1,), '0.600')
    """
    if not isinstance(gauged, Gauged):
        raise ArgumentTypeError(
            f"truncate_gauged: gauged must be the result of gauge_loops, got a {type(gauged).__name__}; gauge the "
            "network first."
        )
    rtol, max_rank = as_rtol("truncate_gauged", rtol), as_max_rank("truncate_gauged", max_rank)
    dtype = np.result_type(*(tensor.data for tensor in gauged.network))
    sizes = [len(weights) for weights in gauged.weights.values()]
    budget = TruncationBudget(1.0, rtol, sizes, dtype)
    ranks = {index: budget.truncate(weights, max_rank=max_rank) for index, weights in gauged.weights.items()}
    out = gauged.network.copy()
    for tensor in out:
        kept = tuple(slice(ranks.get(index)) for index in tensor.inds)
        tensor.modify(data=np.ascontiguousarray(tensor.data[kept]), left_inds=None)
    error = min(1.0, budget.error)
    return report("truncate_gauged", Network(out), error=error, rtol=rtol, certified=False, notes=budget.notes("bond"))
