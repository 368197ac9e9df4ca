r"""A TT-matrix applied to a train, truncated on the way: the product of the ranks is never stored.

Rounding A x needs the part on the right of a bond only up to an isometry: a factor T with as many rows as the bonds of
A and x have pairs, and no legs,

    (A)--(A)--            (T)--
     |    |       =   T Q,     Q right-isometric, and not stored
    (x)--(x)--

A sweep from the right computes these factors by one orthogonalization per core. The sweep back decomposes, bond by
bond,

    Q^H A x  on the left of the bond, (m, pairs),   times   T  on its right, (pairs, k),

whose singular values are those of the whole, as all cores on the left are isometric already. Every sqrt(d)-th factor T
is stored, the others are recomputed when the sweep back reaches them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from tnlib._errors import ArgumentTypeError
from tnlib._fit import Fit, report
from tnlib._format import refuse_mixed_libraries
from tnlib._typing import Array, MaxRank
from tnlib._validate import as_degeneracy_tol, as_max_ranks, as_rtol, check_bonds, refuse_foreign_keywords
from tnlib.formats.train.format import TensorTrain
from tnlib.formats.train.tt_matrix import T, TTMatrix, as_column, as_train, refuse_unequal_legs
from tnlib.formats.train.tt_rounding import round_train
from tnlib.linalg.canonical_basis import canonical_basis_change
from tnlib.linalg.gram_svd import left_svd
from tnlib.linalg.orthogonal import left_factor
from tnlib.linalg.scaling import Scaled, norm, normalize, shift
from tnlib.linalg.threads import single_threaded_blas
from tnlib.linalg.truncation import TruncationBudget

_STORED = 1 << 18  # numbers in the factors T that may be stored all at once


@single_threaded_blas
@refuse_foreign_keywords
def apply(
    operator: TTMatrix,
    x: T,
    *,
    rtol: float | None = None,
    max_rank: int | Sequence[int] | None = None,
    degeneracy_tol: float = 0.0,
) -> Fit[T]:
    """Return operator @ x rounded: norm(operator @ x - fit.value) <= rtol * norm(operator @ x).

    The result is that of `round(operator @ x)`, without the cores of the product.

    Parameters
    ----------
    operator
        A TTMatrix of bonds R.
    x
        A TensorTrain whose legs are the column legs of `operator`, or a TTMatrix whose row legs are, of bonds r.
    rtol, max_rank
        Relative Frobenius error of the whole tensor, and maximal rank: one for all bonds, or a sequence of one for each
        of the d - 1 bonds. The smaller rank is used; if both are None, the numerical ranks.
    degeneracy_tol
        As in `round`: groups of nearly equal singular values are kept or discarded as a whole.

    Returns
    -------
    Fit
        Of the type of `x`, left-canonical as `round` leaves it. The cost per core is that of orthogonalizing a matrix
        with R r rows.

    References
    ----------
    E. M. Stoudenmire, S. R. White, "Minimally entangled typical thermal state algorithms", New J. Phys. 12 (2010).

    Examples
    --------
    >>> import numpy as np, tnlib
    >>> flip = tnlib.TTMatrix([np.array([[0.0, 1.0], [1.0, 0.0]]).reshape(1, 2, 2, 1)] * 50)
    >>> up = tnlib.TensorTrain([np.array([1.0, 0.0]).reshape(1, 2, 1)] * 50)
    >>> fit = tnlib.apply(flip + flip, up)
    >>> max(fit.value.ranks), f"{fit.value.norm():.3f}", float(tnlib.inner(up, fit.value))
    (1, '2.000', 0.0)
    """
    if isinstance(operator, TensorTrain) and isinstance(x, TTMatrix):
        raise ArgumentTypeError(
            "apply: operator must be a TTMatrix, got a TensorTrain and the operator as x; exchange them."
        )
    as_train("apply", "operator", operator, TTMatrix, any_library=True)
    as_train("apply", "x", x, any_library=True)
    rtol, max_rank = as_rtol("apply", rtol), as_max_ranks("apply", max_rank)
    degeneracy_tol = as_degeneracy_tol("apply", degeneracy_tol)
    matrix = as_column(x) if isinstance(x, TensorTrain) else x
    check_bonds("apply", max_rank, len(matrix.cores) - 1)
    refuse_unequal_legs("apply", operator, matrix)
    refuse_mixed_libraries("apply", operator=operator, x=x)
    if operator.library == "numpy":
        product, budget = truncated_product(operator, matrix, rtol, max_rank, degeneracy_tol)
    else:  # torch differentiates through the product and its rounding
        product, budget = round_train(operator @ matrix, rtol, max_rank, degeneracy_tol)
    value = product.fused() if isinstance(x, TensorTrain) else product
    return report("apply", value, error=budget.error, rtol=rtol, notes=budget.notes("bond", first=1))


def truncated_product(
    a: TTMatrix, b: TTMatrix, rtol: float | None, max_rank: MaxRank, degeneracy_tol: float = 0.0
) -> tuple[TTMatrix, TruncationBudget]:
    """Return the product, left-canonical, and its truncations."""
    dtype = np.result_type(a.dtype, b.dtype)
    a, b = a.astype(dtype), b.astype(dtype)
    factors = RightFactors(a, b)
    total = factors.at(0)
    sides = [max(size, len(a.cores)) for size in factors.sizes[1:-1]]
    budget = TruncationBudget(norm(total.array), rtol, sides, dtype, max_rank, degeneracy_tol)
    out: list[Array] = []
    carry = Scaled(np.ones((1, 1, 1), dtype))  # l la lb
    for k, (x, y) in enumerate(zip(a.cores, b.cores, strict=True)):
        shape = len(carry.array), x.shape[1], y.shape[2]  # l m p
        theta = _attach_left(carry.array, x, y).reshape(math.prod(shape), -1)  # (l m p) (ra rb)
        if k == len(a.cores) - 1:
            out.append(theta.reshape(*shape, 1))
            break
        factor = factors.at(k + 1)
        svd = left_svd((theta @ factor.array.reshape(theta.shape[1], -1))[None], exact=True)
        s = shift(svd.s, carry.exponent + factor.exponent - total.exponent)
        rank = budget.truncate(s)
        u = svd.u[:, :rank]
        u = canonical_basis_change(u, s[:rank], dtype).columns(u).astype(dtype, copy=False)
        out.append(u.reshape(*shape, rank))
        projected = (u.conj().T @ theta).reshape(rank, x.shape[3], y.shape[3])  # r [(l m p)] ra rb
        carry = normalize(projected, carry.exponent)
    product = TTMatrix.from_sweep(out, len(out) - 1, carry.exponent + a.exponent + b.exponent)
    return product.folded(), budget


class RightFactors:
    """The factors T (la, lb, k) on the right of every bond of `a` `b`; all are stored where they are small."""

    def __init__(self, a: TTMatrix, b: TTMatrix) -> None:
        self._a, self._b, d = a.cores, b.cores, len(a.cores)
        self._stored = {d: Scaled(np.ones((1, 1, 1), a.dtype))}
        self.sizes = [1] * (d + 1)
        self._sweep(d, 0, 1 if self._bound() <= _STORED else math.isqrt(d))

    def at(self, bond: int) -> Scaled:
        """Return T at a bond; to be called for bonds from the left to the right."""
        for passed in [k for k in self._stored if k < bond]:
            del self._stored[passed]
        if bond not in self._stored:
            self._sweep(min(self._stored), bond, 1)
        return self._stored[bond]

    def _sweep(self, start: int, stop: int, step: int) -> None:
        carry = self._stored[start]
        for k in range(start - 1, stop - 1, -1):
            bonds = self._a[k].shape[0], self._b[k].shape[0]
            grown = normalize(_attach_right(self._a[k], self._b[k], carry.array), carry.exponent)
            carry = Scaled(left_factor(grown.array).reshape(*bonds, -1), grown.exponent)
            self.sizes[k] = carry.array.shape[2]
            if k % step == 0:
                self._stored[k] = carry

    def _bound(self) -> int:
        """Return an upper bound of the numbers in all factors together."""
        total, size = 0, 1
        for x, y in zip(reversed(self._a), reversed(self._b), strict=True):
            pairs = x.shape[0] * y.shape[0]
            size = min(pairs, x.shape[1] * y.shape[2] * size)
            total += pairs * size
        return total


def _attach_right(x: Array, y: Array, carry: Array) -> Array:
    """Return a core of each on the left of a factor (ra, rb, k), as a matrix (la lb, m p k)."""
    half = np.tensordot(y, carry, axes=([3], [1]))  # lb n p [rb] ra k
    both = np.tensordot(x, half, axes=([2, 3], [1, 3]))  # la m [n ra] lb p k
    return both.transpose(0, 2, 1, 3, 4).reshape(x.shape[0] * y.shape[0], -1)


def _attach_left(carry: Array, x: Array, y: Array) -> Array:
    """Return a core of each on the right of (l, la, lb), as (l, m, p, ra, rb)."""
    half = np.tensordot(carry, y, axes=([2], [0]))  # l la [lb] n p rb
    both = np.tensordot(half, x, axes=([1, 2], [0, 2]))  # l [la n] p rb m ra
    return both.transpose(0, 3, 1, 4, 2)
