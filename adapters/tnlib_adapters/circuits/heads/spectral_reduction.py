r"""The L_{2,d} spectral radius reduction of a tensor.

A tensor t of n legs is a homogeneous polynomial in non-commuting variables, one variable per index:

    p(x)  =  sum over i1 ... in of  t[i1, ..., in] x_i1 ... x_in

The reduction substitutes d x d matrices X_i for the variables. They locally maximise the fitness

    rho(p(X))^(1/n) / rho(sum_i X_i (x) conj(X_i))^(1/2)                  rho: spectral radius

which is invariant under X -> c X and X -> S X S^-1. The second radius is that of the completely positive map
Y -> sum_i X_i Y X_i^H. Both radii are differentiable where the leading eigenvalue is simple. L-BFGS maximises the
logarithm of the fitness from random matrices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from string import ascii_lowercase
from typing import Literal, get_args

import numpy as np

from tnlib import ArgumentError
from tnlib._typing import Array
from tnlib._validate import as_array, as_count, as_position, as_rng, as_rtol, check_choice
from tnlib.linalg.canonical_basis import unit_phases
from tnlib.linalg.scaling import largest
from tnlib.linalg.threads import single_threaded_blas

Field = Literal["complex", "real"]
_MAX_ITERATIONS = 2000  # of L-BFGS
_PHASE_ITERATIONS = 10  # of the alternating maximisation over phases


@dataclass(frozen=True, eq=False, repr=False)
class SpectralReduction:
    """Result of `spectral_reduction`: one d x d matrix per index of a tensor, for each random start.

    `variables` has one letter per leg. `matrices` are (n, d, d) per start and letter, in the order in which letters
    first occur, scaled so that sum_i X_i (x) conj(X_i) has spectral radius 1. `fitness` (starts,) are the local maxima.
    `real` is True for a real tensor, for which conj(X) has the same fitness as X.
    """

    variables: str
    matrices: tuple[tuple[Array, ...], ...]
    fitness: Array
    real: bool = True

    @property
    def best(self) -> int:
        """Number of the start with the largest fitness."""
        return int(self.fitness.argmax())

    def reached_best(self, rtol: float = 1e-6) -> int:
        """Return how many starts reached the largest fitness up to a relative difference of `rtol`."""
        tolerance = as_rtol("SpectralReduction.reached_best", rtol) or 0.0
        return int((self.fitness >= (1 - tolerance) * self.fitness[self.best]).sum())

    def similarity(self, a: int, b: int) -> float:
        """Return rho(sum X (x) conj(Y)) / sqrt(rho(sum X (x) conj(X)) rho(sum Y (x) conj(Y))) of two starts.

        It lies in [0, 1] and is 1 for Y = c S X S^-1. Transformations that leave the fitness unchanged do not lower it:
        a phase of each letter and, for a real tensor, complex conjugation.
        """
        count = len(self.matrices)
        x = self.matrices[as_position("SpectralReduction.similarity", "a", a, count, "starts")]
        y = self.matrices[as_position("SpectralReduction.similarity", "b", b, count, "starts")]
        radii = []
        for z in [y, tuple(m.conj() for m in y)] if self.real else [y]:
            maps = np.stack([_transfer_matrix(*pair) for pair in zip(x, z, strict=True)])
            starts = product((1, 1j, -1, -1j), repeat=len(maps) - 1)  # a phase common to all does not change the radius
            radii += [_largest_radius(maps, np.array((1, *phases))) for phases in starts]
        return max(radii)

    def __repr__(self) -> str:
        d = self.matrices[0][0].shape[-1]
        return (
            f"SpectralReduction({self.variables}, d = {d}, fitness {self.fitness[self.best]:.6f}, reached by "
            f"{self.reached_best()} of {len(self.fitness)} starts)"
        )


@single_threaded_blas
def spectral_reduction(
    t: Array,
    d: int,
    *,
    variables: str | None = None,
    field: Field = "complex",
    n_starts: int = 10,
    rng: int | np.random.Generator | None = None,
) -> SpectralReduction:
    """Compute the spectral radius reduction of a tensor from several random starts (experimental).

    The method is proposed for tensors with three or more legs, where all starts are said to reach the same local
    maximum; the result reports how many do. For a matrix with two letters it is the singular value decomposition:
    fitness^4 is the sum of the d - 1 largest squared singular values for d = 2 and 3. The matrices of every start are
    determined up to c S X S^-1 and a phase for each letter.

    Parameters
    ----------
    t
        A tensor with at least two legs.
    d, field
        Size of the matrices, "complex" or "real".
    variables
        One letter per leg; legs with the same letter share their matrices: "aaa" for a tensor in V (x) V (x) V, "abb"
        for a stack of operators on one space. By default all letters differ.
    n_starts, rng
        Number of random starts, and their generator or seed; None is seed 0.

    References
    ----------
    J. Van Name, a comment on J. Taylor, "Graphical tensor notation for interpretability" (2023).

    Examples
    --------
    >>> import numpy as np
    >>> t = np.random.default_rng(0).standard_normal((3, 3, 3))
    >>> reduction = spectral_reduction(t, 2, variables="aaa", n_starts=4)
    >>> reduction.reached_best(), round(reduction.similarity(0, 3), 6)
    (4, 1.0)
    """
    t = as_array("spectral_reduction", "t", t)
    d, n_starts = as_count("spectral_reduction", "d", d), as_count("spectral_reduction", "n_starts", n_starts)
    generator = as_rng("spectral_reduction", rng)
    names = _as_variables(t, variables, field)
    letters = list(dict.fromkeys(names))
    scale = largest(t)
    double = t.astype(np.result_type(t, np.float64))
    legs = [letters.index(letter) for letter in names]
    sizes = [t.shape[names.index(letter)] for letter in letters]
    problem = FitnessProblem(double / scale if scale else double, legs, sizes, d, field)
    matrices, logs = zip(*(problem.maximise(generator) for _ in range(n_starts)), strict=True)
    return SpectralReduction(names, matrices, scale ** (1 / t.ndim) * np.exp(logs), bool(np.isrealobj(t)))


def _as_variables(t: Array, variables: str | None, field: str) -> str:
    """Return one letter per leg."""
    check_choice("spectral_reduction", "field", field, get_args(Field))
    if t.ndim < 2:
        raise ArgumentError(f"spectral_reduction: t must have at least two legs, got {t.ndim}; pass a tensor.")
    names = ascii_lowercase[: t.ndim] if variables is None else str(variables)
    if len(names) != t.ndim:
        raise ArgumentError(
            f"spectral_reduction: variables must be one letter for each of the {t.ndim} legs, got {variables!r}; "
            f"pass for example {ascii_lowercase[: t.ndim]!r}."
        )
    sizes: dict[str, int] = {}
    for letter, n in zip(names, t.shape, strict=True):
        if sizes.setdefault(letter, n) != n:
            raise ArgumentError(
                f"spectral_reduction: variables must give one letter to legs of one size, got {letter!r} for sizes "
                f"{[sizes[letter], n]}; give them letters of their own."
            )
    return names


@dataclass(frozen=True, eq=False)
class FitnessProblem:
    """The logarithm of the fitness as a function of the entries of all matrices."""

    tensor: Array
    legs: Sequence[int]  # the number of each leg's letter
    sizes: Sequence[int]  # number of matrices of each letter
    d: int
    field: Field

    def maximise(self, rng: np.random.Generator) -> tuple[tuple[Array, ...], float]:
        """Return the matrices of every letter at a local maximum, and the logarithm of their fitness."""
        from scipy.optimize import minimize

        n = sum(self.sizes) * self.d**2
        flat = rng.standard_normal(n if self.field == "real" else 2 * n) / np.sqrt(n)
        log_fitness = -self.negative_log_fitness(flat)[0]
        if np.isfinite(log_fitness):  # -inf for a zero tensor
            options = {"maxiter": _MAX_ITERATIONS, "maxfun": 2 * _MAX_ITERATIONS, "ftol": 0, "gtol": 1e-8, "maxcor": 20}
            result = minimize(self.negative_log_fitness, flat, jac=True, method="L-BFGS-B", options=options)
            flat, log_fitness = result.x, -float(result.fun)
        x = self._matrices(flat)
        x = x * np.exp(-_log_norm_radius(x)[0] / 2)
        return tuple(np.split(x, np.cumsum(self.sizes)[:-1])), log_fitness

    def negative_log_fitness(self, flat: Array) -> tuple[float, Array]:
        """Return -log(fitness) and its gradient in the real and imaginary parts of all entries."""
        x = self._matrices(flat)
        numerator, numerator_gradient = self._log_polynomial_radius(x)
        denominator, denominator_gradient = _log_norm_radius(x)
        if not np.isfinite(numerator):
            return np.inf, np.zeros_like(flat)
        gradient = (denominator_gradient / 2 - numerator_gradient).ravel()  # d(-log fitness) = Re sum gradient * dX
        parts = [gradient.real] if self.field == "real" else [gradient.real, -gradient.imag]
        return denominator / 2 - numerator, np.concatenate(parts)

    def _matrices(self, flat: Array) -> Array:
        """Return the matrices of all letters, (i, d, d)."""
        x = flat if self.field == "real" else flat.reshape(2, -1)[0] + 1j * flat.reshape(2, -1)[1]
        return np.asarray(x.reshape(-1, self.d, self.d))

    def _log_polynomial_radius(self, x: Array) -> tuple[float, Array]:
        """Return log rho(p(X)) / n and its gradient (i, d, d), by reverse-mode differentiation over the legs."""
        groups = np.split(x, np.cumsum(self.sizes)[:-1])
        per_leg = [groups[letter] for letter in self.legs]
        n, d = len(per_leg), self.d
        suffixes = [_contract_last_leg(self.tensor, per_leg[-1])]  # products of the legs behind one, last leg first
        for m in per_leg[-2::-1]:
            suffixes.append(np.einsum("iab,...ibc->...ac", m, suffixes[-1], optimize=True))  # ... [i] a [b] c
        log_rho, g = log_radius(suffixes[-1])
        gradients = [np.zeros(m.shape, np.complex128) for m in groups]
        for k, (m, letter) in enumerate(zip(per_leg, self.legs, strict=True)):
            flat = g.reshape(-1, d, d)  # (i1 ... ik) a b
            if k == n - 1:
                gradients[letter] += _contract_last_leg(self.tensor.reshape(len(flat), -1).T, flat)
                break
            suffix = suffixes[n - 2 - k].reshape(len(flat), -1, d, d)  # (i1 ... ik) i c b
            gradients[letter] += np.einsum("pab,picb->iac", flat, suffix, optimize=True)  # i a c [p b]
            g = np.einsum("iac,pab->picb", m, flat, optimize=True)  # p i c b [a]
        return log_rho / n, np.concatenate(gradients) / n


def _largest_radius(maps: Array, phases: Array) -> float:
    """Return a local maximum of rho(sum_k phases[k] maps[k]) over the phases.

    To first order term k contributes Re(phases[k] <g, maps[k]>), g the gradient of log rho; each step aligns all terms.
    """
    for _ in range(_PHASE_ITERATIONS):
        log_rho, g = log_radius(np.tensordot(phases, maps, 1))  # [k] a b
        phases = unit_phases(np.einsum("ab,kab->k", g, maps).conj())  # k [a b]
    return float(np.exp(log_rho))


def _contract_last_leg(t: Array, x: Array) -> Array:
    """Return t (..., i) times x (i, a, b); a real `t` stays real, which halves the work."""
    if np.isrealobj(t) and np.iscomplexobj(x):
        flat = np.ascontiguousarray(x).reshape(len(x), -1).view(np.float64)
        result = np.tensordot(t, flat, 1)  # ... [i] (a b re/im)
        return np.asarray(result.view(np.complex128).reshape(*t.shape[:-1], *x.shape[1:]))
    return np.asarray(np.tensordot(t, x, 1))  # ... [i] a b


def _transfer_matrix(x: Array, y: Array) -> Array:
    """Return sum_i X_i (x) conj(Y_i), (d^2, d^2)."""
    d = x.shape[-1]
    return np.asarray(np.einsum("iab,icd->acbd", x, y.conj()).reshape(d * d, d * d))  # (a c) (b d) [i]


def _log_norm_radius(x: Array) -> tuple[float, Array]:
    """Return log rho(sum_i X_i (x) conj(X_i)) and its gradient (i, d, d)."""
    d = x.shape[-1]
    log_rho, g = log_radius(_transfer_matrix(x, x), perron=True)
    g = g.reshape(d, d, d, d)  # a c b d
    first = np.einsum("acbd,icd->iab", g, x.conj())  # i a b [c d]
    return log_rho, first + np.einsum("acbd,iab->icd", g, x).conj()  # i c d [a b]


def log_radius(a: Array, *, perron: bool = False) -> tuple[float, Array]:
    """Return log rho(a) and g, (n, n), with d log rho = Re sum g * da; for radius 0, -inf and g = 0.

    `perron` takes the eigenvalue with the largest real part. For a map that preserves a cone this is the spectral
    radius, and it is simple where other eigenvalues have the same modulus.
    """
    values, right = np.linalg.eig(a)
    k = int(values.real.argmax() if perron else np.abs(values).argmax())
    value, v = values[k], right[:, k]
    if value == 0:
        return -np.inf, np.zeros(a.shape, np.result_type(a.dtype, np.complex128))
    adjoint_values, left = np.linalg.eig(a.conj().T)
    u = left[:, int(np.abs(adjoint_values - value.conj()).argmin())]
    return float(np.log(np.abs(value))), np.outer(u.conj(), v) / (value * (u.conj() @ v))  # d value = u^H da v / u^H v
