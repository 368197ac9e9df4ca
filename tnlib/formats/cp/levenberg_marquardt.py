r"""Levenberg-Marquardt for the CP format: damped Gauss-Newton steps on all factors (n[k], R) at once.

With J the Jacobian of the CP y in its factors and r = x - y, a step d solves (J^H J + mu) d = J^H r. The blocks of
J^H J are small products: with G_{-k} the entrywise product of all Gram matrices A_j^H A_j but the k-th, and G_{-kl} of
all but two,

    (J^H J)[k i r, l j s]  =  delta_ij G_{-k}[r, s]                               k = l
                              G_{-kl}[r, s] A_k[i, s] conj(A_l[j, r])             k != l

(Tomasi and Bro, "A comparison of algorithms for fitting the PARAFAC model", Comput. Stat. Data Anal. 50 (2006)). It
takes a few steps where alternating least squares takes thousands of sweeps: in swamps, and with more columns than the
tensor needs, where J^H J is singular.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tnlib._typing import Array
from tnlib.formats.cp.als import Iterate, cp_residual, grams, product_except, unit_columns
from tnlib.linalg.multilinear import contract_columns, solve_damped
from tnlib.linalg.scaling import norm

_FIRST_DAMPING = 1e-3  # of the mean diagonal of J^H J
_LEAST_DAMPING = 1e-14
_TRIALS = 12  # of growing damping, before a point counts as stationary
# Where a tensor has no best approximation of its rank, components grow without bound and cancel each other as the error
# falls. Steps to components of more than this times norm(x) are rejected: cancellation costs digits of the result.
_LARGEST_COMPONENTS = 3
_SHRINKING_STEPS = 20
_SHRINKING_SLOW = 1e-3  # part of the objective: a step that lowers it by less ends the shrinking
_SLOW_STEPS = 10  # in a row, before the iteration ends: in a curved valley a few steps are slow


class _Point(NamedTuple):
    factors: list[Array]  # the columns of a component have the same length
    residual: float  # norm(x - y)
    damping: float = _FIRST_DAMPING

    def objective(self, penalty: float) -> float:
        """Return norm(x - y)^2 + penalty * (norm(A_0)^2 + ... + norm(A_(d-1))^2)."""
        return self.residual**2 + (penalty * sum(norm(factor) ** 2 for factor in self.factors) if penalty else 0.0)


def levenberg_marquardt(x: Array, factors: Sequence[Array], *, n_iter: int, target: float, slow: float) -> Iterate:
    """Minimise norm(x - y) until it is at most `target`, or `_SLOW_STEPS` steps lower it by less than `slow` of it."""
    factors = _equal_lengths(factors)
    limit = _LARGEST_COMPONENTS * norm(x)
    point, used = _shrink(x, _Point(factors, cp_residual(x, factors)), limit, n_iter=n_iter, target=target)
    limit, slow_steps = max(limit, _component_norm(point.factors)), 0
    for step in range(used + 1, n_iter + 1):
        if point.residual <= target:
            return Iterate(point.factors, point.residual, step - 1, True)
        following = _step(x, point, limit=limit)
        if following is None:
            return Iterate(point.factors, point.residual, step, True)
        slow_steps = slow_steps + 1 if point.residual - following.residual <= slow * point.residual else 0
        point = following
        if slow_steps == _SLOW_STEPS:
            return Iterate(point.factors, point.residual, step, True)
    return Iterate(point.factors, point.residual, n_iter, point.residual <= target)


def _shrink(x: Array, point: _Point, limit: float, *, n_iter: int, target: float) -> tuple[_Point, int]:
    """Return the point after penalised steps that bring the components within `limit`, and the number of steps.

    The penalty makes both terms of the objective equal at the start. Of 800 over-ranked exact fits 33 begin beyond the
    limit; without these steps, which would stay there, 8 of them do not converge in 500, with them one.
    """
    penalty = (point.residual / norm(np.array([norm(factor) for factor in point.factors]))) ** 2
    used = 0
    while used < min(n_iter, _SHRINKING_STEPS) and point.residual > target and _component_norm(point.factors) > limit:
        used += 1
        following = _step(x, point, penalty=penalty)
        if following is None:
            break
        before, point = point.objective(penalty), following
        if before - point.objective(penalty) <= _SHRINKING_SLOW * before:
            break
    return point._replace(damping=_FIRST_DAMPING), used


def _step(x: Array, point: _Point, *, limit: float = np.inf, penalty: float = 0.0) -> _Point | None:
    """Return the point after a step that lowers the objective f, None where no damping leads to one.

    The damping mu falls by up to ten where f fell as the linear model predicts, and grows where it did not:

        gain  =  (f - f_new) / d^H (mu d + gradient),      mu  *=  max(1/10, 1 - (2 gain - 1)^3)

    (Nielsen, "Damping parameter in Marquardt's method", Report IMM-REP-1999-05, Technical University of Denmark).
    """
    normal, gradient = _normal_equations(x, point.factors)
    if penalty:
        gradient -= penalty * np.concatenate([factor.reshape(-1) for factor in point.factors])
    unit = float(np.trace(normal).real) / len(normal)
    damping, growth, before = point.damping, 2.0, point.objective(penalty)
    for _ in range(_TRIALS):
        delta = solve_damped(normal, damping * unit + penalty, gradient)
        parts = np.split(delta, np.cumsum([factor.size for factor in point.factors])[:-1])
        trial = [f + part.reshape(f.shape) for f, part in zip(point.factors, parts, strict=True)]
        following = _Point(trial, cp_residual(x, trial))
        after = following.objective(penalty)
        if after < before and _component_norm(trial) <= limit:
            gain = (before - after) / float(np.vdot(delta, damping * unit * delta + gradient).real)
            damping = max(damping * max(0.1, 1 - (2 * gain - 1) ** 3), _LEAST_DAMPING)
            return _Point(_equal_lengths(trial), following.residual, damping)
        damping, growth = damping * growth, 2 * growth
    return None


def _normal_equations(x: Array, factors: list[Array]) -> tuple[Array, Array]:
    """Return J^H J and J^H (x - y), unknowns in the order k, i, r."""
    gram = [matrix.T for matrix in grams(factors)]  # A_k^H A_k
    starts = np.concatenate([[0], np.cumsum([factor.size for factor in factors])])
    normal = np.empty((starts[-1], starts[-1]), x.dtype)
    gradient = np.empty(starts[-1], x.dtype)
    columns = np.broadcast_to(x[..., None], (*x.shape, factors[0].shape[1]))
    conjugates = [factor.conj() for factor in factors]
    for k, a in enumerate(factors):
        rows = slice(starts[k], starts[k + 1])
        others = product_except(gram, k)
        gradient[rows] = (contract_columns(columns, conjugates, k) - a @ others.T).reshape(-1)  # nk R
        normal[rows, rows] = np.kron(np.eye(len(a)), others)
        for l, b in enumerate(factors[:k]):
            both = product_except(gram, k, l)
            block = np.einsum("rs,is,jr->irjs", both, a, b.conj()).reshape(a.size, b.size)
            normal[rows, starts[l] : starts[l + 1]] = block
            normal[starts[l] : starts[l + 1], rows] = block.conj().T
    return normal, gradient


def _component_norm(factors: Sequence[Array]) -> float:
    """Return the Euclidean norm of the norms of all components."""
    return float(np.linalg.norm(_lengths(factors)))


def _equal_lengths(factors: Sequence[Array]) -> list[Array]:
    """Give all columns of one component the same length."""
    lengths = _lengths(factors) ** (1 / len(factors))
    return [unit_columns(factor) * lengths for factor in factors]


def _lengths(factors: Sequence[Array]) -> Array:
    """Return the norms (R,) of the components."""
    return np.asarray(np.prod([np.linalg.norm(factor, axis=0) for factor in factors], axis=0))
