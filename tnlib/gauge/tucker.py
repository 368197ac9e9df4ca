r"""The gauge of the higher-order SVD: orthonormal factors, a core whose slices along every leg are orthogonal.

    sum over all legs but k of conj(core[.. i ..]) core[.. j ..]  =  0 for i != j,  s[k][i]^2 for i = j

with s[k] descending: the singular values of the unfolding along leg k (De Lathauwer, De Moor, Vandewalle, "A
multilinear singular value decomposition", SIAM J. Matrix Anal. Appl. 21 (2000)). Where it drops nothing but roundoff,
the sequentially truncated HOSVD is that one: a unitary on one leg leaves the singular values and vectors of the others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from tnlib._typing import Array
from tnlib.linalg.groups import fix_basis
from tnlib.linalg.modes import mode_product, unfold
from tnlib.linalg.orthogonal import qr_positive
from tnlib.linalg.scale import largest, norm, shift
from tnlib.sweeps.budget import Budget
from tnlib.sweeps.hosvd import st_hosvd


def orthonormal_factors(core: Array, factors: Sequence[Array]) -> tuple[Array, list[Array], int]:
    """Return a core and orthonormal factors of the same tensor, all of one dtype and in range, and e: 2**e smaller."""
    dtype = np.result_type(core, *factors)
    twos = math.frexp(largest(core))[1]
    core, bases = shift(core.astype(dtype, copy=False), -twos), []
    for k, factor in enumerate(factors):
        e = math.frexp(largest(factor))[1]
        q, r = qr_positive(shift(factor.astype(dtype, copy=False), -e))
        core = mode_product(core, r, k)  # r0 ... [rk] rk' ...
        bases.append(q)
        twos += e
    return np.ascontiguousarray(core), bases, twos


def all_orthogonal(core: Array, bases: Sequence[Array], dtype: np.dtype[Any]) -> tuple[Array, list[Array]]:
    """Return the HOSVD gauge of a core (r[0], ...) in orthonormal `bases` (n[k], r[k]), at its numerical ranks."""
    sides = [min(n, max(1, core.size // n)) for n in core.shape]
    core, factors = st_hosvd(core, Budget(norm(core), None, sides, dtype), [None] * core.ndim, bases)
    return core.astype(dtype, copy=False), [factor.astype(dtype, copy=False) for factor in factors]


def mode_spectra(core: Array) -> list[Array]:
    """Return the lengths of the slices of `core` along every leg: singular values, if it is all-orthogonal."""
    return [np.linalg.norm(unfold(core, k), axis=1) for k in range(core.ndim)]


def turn_modes(core: Array, factors: Sequence[Array], groups: Sequence[Sequence[slice]]) -> tuple[Array, list[Array]]:
    """Return the same tensor with a fixed basis in the `groups` of every leg; see `fix_basis`."""
    out = []
    for k, (factor, of_leg) in enumerate(zip(factors, groups, strict=True)):
        turn = fix_basis(factor, of_leg)
        out.append(turn.columns(factor))
        flat = turn.rows(unfold(core, k))  # rk (others)
        others = core.shape[:k] + core.shape[k + 1 :]
        core = np.moveaxis(flat.reshape(-1, *others), 0, k)
    return np.ascontiguousarray(core), out
