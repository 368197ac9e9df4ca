r"""CP decomposition of an array that exceeds memory, by that of its Tucker core.

The array is projected onto the leading singular vectors U_k of every leg, a few more than R, and the iteration runs on
the core. The projection is orthogonal, so the error of the whole is known exactly:

    norm(x - y)^2  =  norm(discarded part of x)^2 + norm(core - CP of the core)^2,      factor k of y  =  U_k (factor k)

"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from tnlib._typing import Array
from tnlib.formats.cp.als import cp_residual
from tnlib.formats.tucker.tucker_out_of_core import st_hosvd_in_passes
from tnlib.out_of_core.passes import Passes


class TuckerCore(NamedTuple):
    """A core in double precision times 2**exponent, its bases, the norm of the array, and that outside of the bases."""

    core: Array
    exponent: int
    bases: list[Array]
    norm: float
    discarded: float

    def expand(self, factors: Sequence[Array]) -> list[Array]:
        """Return factors (n[k], R) of the whole array from those of the core."""
        return [basis @ factor for basis, factor in zip(self.bases, factors, strict=True)]  # n [r] R

    def residual(self, weights: Array, factors: Sequence[Array]) -> float:
        """Return the Frobenius norm of the array minus the CP with these weights and factors (n[k], R)."""
        inside = [basis.conj().T @ factor for basis, factor in zip(self.bases, factors, strict=True)]  # r [n] R
        return math.hypot(self.discarded, cp_residual(self.core, [inside[0] * weights, *inside[1:]]))


def core_of_stored(opened: Passes, rank: int) -> TuckerCore:
    """Return the Tucker core on which a CP of `rank` components is fitted."""
    caps = [min(n, rank + rank // 4 + 2) for n in opened.shape]
    with opened as passes:
        core, bases, budget = st_hosvd_in_passes(passes, None, caps)
        return TuckerCore(core, passes.source.exponent, bases, budget.norm, budget.discarded)
