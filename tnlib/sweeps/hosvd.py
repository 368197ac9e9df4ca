"""The sequentially truncated higher-order singular value decomposition of a dense array."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tnlib._typing import Array
from tnlib.linalg.groups import fixing_turn
from tnlib.linalg.left import Left, left_svd
from tnlib.linalg.project import adjoint_times
from tnlib.sweeps.budget import Budget


def st_hosvd(
    x: Array, budget: Budget, caps: Sequence[int | None], bases: Sequence[Array] | None = None
) -> tuple[Array, list[Array]]:
    """Return the core (r[0], ...) and orthonormal factors (n[k], r[k]) of `x`, in double precision.

    One leg is truncated after the other; each step works on the core that the steps before it left. Where the legs of
    `x` count orthonormal `bases` (N[k], n[k]), factors are (N[k], r[k]) in what the bases count.
    """
    core, factors = x, []
    for k, cap in enumerate(caps):
        slabs = core.reshape(math.prod(core.shape[:k]), core.shape[k], -1)  # (r0 ...) nk (n(k+1) ...)
        found, rank = _leading_vectors(slabs, budget, cap)
        u, s = found.u[:, :rank], found.s[:rank]
        seen = u if bases is None else bases[k] @ u
        turn = fixing_turn(seen, s, budget.dtype, squared=found.blur > 0.0)
        factors.append(turn.columns(seen))  # nk rk
        core = adjoint_times(turn.columns(u), slabs)  # (r0 ...) rk (n(k+1) ...)
        core = core.reshape(*(f.shape[1] for f in factors), *x.shape[k + 1 :])
    return core, factors


def _leading_vectors(slabs: Array, budget: Budget, cap: int | None) -> tuple[Left, int]:
    """Return left singular vectors of the middle leg of (l, n, m), and how many of them the budget keeps."""
    step = budget.step
    found = left_svd(slabs, exact=False)
    if budget.admits(found.blur, cap):
        rank = budget.choose(found.s, max_rank=cap, blur=found.blur)
        if budget.clear(step, found.blur):
            return found, rank
        budget.rewind(step)
    found = left_svd(slabs, exact=True)
    return found, budget.choose(found.s, max_rank=cap)
