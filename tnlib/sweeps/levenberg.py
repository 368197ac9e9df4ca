"""Damped Gauss-Newton steps for the CP format, on raw factors (n[k], R): the finish where ALS crawls."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from tnlib._typing import Array
from tnlib.linalg.modes import khatri_rao, sum_columns
from tnlib.linalg.project import residual_norm
from tnlib.linalg.scale import norm
from tnlib.linalg.solve import solve_damped
from tnlib.sweeps.als import Iterate, grams, product_but, unit_columns

_FIRST_DAMPING = 1e-3  # of the mean diagonal
_LEAST_DAMPING = 1e-14
_TRIALS = 12  # of ever stronger damping, before a point counts as stationary
# Where a tensor has no best approximation of its rank, components grow without bound and cancel each other, for ever
# less error. More than this times its norm is not followed: every digit lost by cancelling is one that storage needs.
_CANCELLATION = 3
_CALM = 10  # steps in a row that lower the error by little: in a curved valley a few do


def levenberg(x: Array, factors: Sequence[Array], *, n_iter: int, target: float, slow: float) -> Iterate:
    r"""Minimise norm(x - y) over all factors at once.

    With J the derivative of y and r = x - y, a step solves (J^H J + mu) d = J^H r. The blocks of J^H J are small
    products: with G_k = A_k^H A_k and G_{-kl} the entrywise product of all of them but two,

        (J^H J)[k i r, l j s]  =  delta_ij G_{-k}[r, s]                               k = l
                                  G_{-kl}[r, s] A_k[i, s] conj(A_l[j, r])             k != l

    (Tomasi and Bro, "A comparison of algorithms for fitting the PARAFAC model", Comput. Stat. Data Anal. 50 (2006)).
    Swamps, in which alternating steps shrink the error by a little a sweep, and factors with more columns than the
    tensor needs, whose J^H J is singular, take a few steps: mu falls where a step did what it promised, and grows
    where it did not, by the rule of Nielsen ("Damping parameter in Marquardt's method", 1999).
    """
    factors = _balanced(factors)
    residual = _residual(x, factors)
    heaviest = max(_CANCELLATION * norm(x), _weight(factors))
    damping, growth, calm = _FIRST_DAMPING, 2.0, 0
    for step in range(1, n_iter + 1):
        if residual <= target:
            return Iterate(factors, residual, step - 1, True)
        normal, slope = _normal_equations(x, factors)
        unit = float(np.trace(normal).real) / len(normal)
        for _ in range(_TRIALS):
            delta = solve_damped(normal, damping * unit, slope)
            trial = _moved(factors, delta)
            found = _residual(x, trial)
            if found < residual and _weight(trial) <= heaviest:
                break
            damping, growth = damping * growth, 2 * growth
        else:
            return Iterate(factors, residual, step, True)
        promised = float(np.vdot(delta, damping * unit * delta + slope).real)
        kept = (residual**2 - found**2) / promised
        damping, growth = max(damping * max(0.1, 1 - (2 * kept - 1) ** 3), _LEAST_DAMPING), 2.0
        calm = calm + 1 if residual - found <= slow * residual else 0
        residual, factors = found, _balanced(trial)
        if calm == _CALM:
            return Iterate(factors, residual, step, True)
    return Iterate(factors, residual, n_iter, residual <= target)


def _weight(factors: Sequence[Array]) -> float:
    """Return the Euclidean norm of the norms of all components."""
    return float(np.linalg.norm(np.prod([np.linalg.norm(factor, axis=0) for factor in factors], axis=0)))


def _moved(factors: list[Array], delta: Array) -> list[Array]:
    ends = np.cumsum([factor.size for factor in factors])[:-1]
    return [f + part.reshape(f.shape) for f, part in zip(factors, np.split(delta, ends), strict=True)]


def _normal_equations(x: Array, factors: list[Array]) -> tuple[Array, Array]:
    """Return J^H J and J^H (x - y), unknowns in the order k, i, r."""
    gram = [matrix.T for matrix in grams(factors)]  # A_k^H A_k
    starts = np.concatenate([[0], np.cumsum([factor.size for factor in factors])])
    normal = np.empty((starts[-1], starts[-1]), x.dtype)
    slope = np.empty(starts[-1], x.dtype)
    columns = np.broadcast_to(x[..., None], (*x.shape, factors[0].shape[1]))
    conjugates = [factor.conj() for factor in factors]
    for k, a in enumerate(factors):
        rows = slice(starts[k], starts[k + 1])
        others = product_but(gram, k)
        slope[rows] = (sum_columns(columns, conjugates, k) - a @ others.T).reshape(-1)  # nk R
        normal[rows, rows] = np.kron(np.eye(len(a)), others)
        for l, b in enumerate(factors[:k]):
            both = product_but(gram, k, l)
            block = np.einsum("rs,is,jr->irjs", both, a, b.conj()).reshape(a.size, b.size)
            normal[rows, starts[l] : starts[l + 1]] = block
            normal[starts[l] : starts[l + 1], rows] = block.conj().T
    return normal, slope


def _residual(x: Array, factors: list[Array]) -> float:
    half = x.ndim // 2
    flat = x.reshape(math.prod(x.shape[:half]), -1)
    return residual_norm(flat, khatri_rao(factors[:half]), khatri_rao(factors[half:]).T)


def _balanced(factors: Sequence[Array]) -> list[Array]:
    """Give all columns of one component the same length."""
    lengths = np.prod([np.linalg.norm(factor, axis=0) for factor in factors], axis=0) ** (1 / len(factors))
    return [unit_columns(factor) * lengths for factor in factors]
