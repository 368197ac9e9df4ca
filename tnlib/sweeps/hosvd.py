"""The sequentially truncated higher-order singular value decomposition of a dense array."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tnlib._typing import Array
from tnlib.linalg.left import left_svd
from tnlib.linalg.project import adjoint_times
from tnlib.linalg.signs import leading_phases
from tnlib.sweeps.budget import Budget


def st_hosvd(x: Array, budget: Budget, caps: Sequence[int | None]) -> tuple[Array, list[Array]]:
    """Return the core (r[0], ...) and orthonormal factors (n[k], r[k]) of `x`, in double precision.

    One leg is truncated after the other; each step works on the core that the steps before it left.
    """
    core, factors = x, []
    for k, cap in enumerate(caps):
        slabs = core.reshape(math.prod(core.shape[:k]), core.shape[k], -1)  # (r0 ...) nk (n(k+1) ...)
        factor = _leading_vectors(slabs, budget, cap)
        factors.append(factor)  # nk rk
        core = adjoint_times(factor, slabs).reshape(*core.shape[:k], -1, *core.shape[k + 1 :])  # r0 ... rk n(k+1) ...
    return core, factors


def _leading_vectors(slabs: Array, budget: Budget, cap: int | None) -> Array:
    """Return the left singular vectors (n, r) of the middle leg of (l, n, m) that the budget keeps."""
    step = budget.step
    limit = budget.noise if budget.share is None else budget.share
    found = left_svd(slabs, exact=False)
    rank = budget.choose(found.s, max_rank=cap, blur=found.blur)
    if (found.blur > limit and cap is None) or not budget.clear(step, found.blur):
        budget.rewind(step)
        found = left_svd(slabs, exact=True)
        rank = budget.choose(found.s, max_rank=cap)
    u = found.u[:, :rank]
    return u * leading_phases(u, budget.dtype).conj()
