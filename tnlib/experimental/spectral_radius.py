r"""The L_{2,d} spectral radius reduction of a tensor, taken as a polynomial in variables that do not commute.

A tensor t of n legs is p(x) = sum t_(i1 ... in) x_i1 ... x_in, of degree n, with a variable for each index. Every
variable becomes a d x d matrix, and the matrices are those that locally maximise

    rho(p(X))^(1/n) / rho(sum_i X_i (x) conj(X_i))^(1/2)

with the spectral radius rho. Neither X -> c X nor X -> S X S^-1 changes it. The second radius is that of the map
Y -> sum_i X_i Y X_i^H, which keeps positive matrices positive. Both are differentiable where the leading eigenvalue is
simple, and log of the quotient is maximised by L-BFGS from random matrices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from string import ascii_lowercase
from typing import Literal, get_args

import numpy as np

from tnlib._errors import ArgumentError
from tnlib._typing import Array
from tnlib._validate import as_array, as_count, as_rng, as_rtol, is_one_of
from tnlib.linalg.radius import log_radius
from tnlib.linalg.scale import largest
from tnlib.linalg.threads import own_threads

Field = Literal["complex", "real"]
_STEPS = 2000
_TURNS = 10


@dataclass(frozen=True, eq=False, repr=False)
class SpectralReduction:
    """Small matrices in the place of the indices of a tensor, from many starts; made by `spectral_reduction`.

    Parameters
    ----------
    variables
        A letter for each leg; legs with the same letter share their matrices.
    matrices
        Per start and letter, in the order in which letters first occur: (n, d, d), sum_i X_i (x) conj(X_i) of radius 1.
    fitness
        (starts,), what each start reached.
    real
        Whether the tensor is; then conj(X) is worth as much as X.
    """

    variables: str
    matrices: tuple[tuple[Array, ...], ...]
    fitness: Array
    real: bool = True

    @property
    def best(self) -> int:
        """Which start reached most."""
        return int(self.fitness.argmax())

    def reached_best(self, rtol: float = 1e-6) -> int:
        """Return how many starts reached the largest fitness."""
        top = self.fitness[self.best]
        return int((self.fitness >= (1 - (as_rtol("SpectralReduction.reached_best", rtol) or 0.0)) * top).sum())

    def similarity(self, a: int, b: int) -> float:
        """Return rho(sum X (x) conj(Y)) / sqrt(rho(sum X (x) conj(X)) rho(sum Y (x) conj(Y))) of two starts.

        In [0, 1]; 1 where the one is c S X S^-1 of the other. What the fitness does not see is no difference: every
        letter has a phase of its own, and of a real tensor X and conj(X) are the same.
        """
        one, other = (self._of_start(name, start) for name, start in (("a", a), ("b", b)))
        found = [self._similarity(one, other)]
        if self.real:
            found.append(self._similarity(one, tuple(y.conj() for y in other)))
        return max(found)

    def _of_start(self, name: str, start: int) -> tuple[Array, ...]:
        count = len(self.matrices)
        if as_count("SpectralReduction.similarity", name, start, least=-count) >= count:
            raise ArgumentError(
                f"SpectralReduction.similarity: {name} must lie below {count}, got {start}; there are {count} starts."
            )
        return self.matrices[start]

    @staticmethod
    def _similarity(a: tuple[Array, ...], b: tuple[Array, ...]) -> float:
        pairs = np.stack([_pairs(x, y) for x, y in zip(a, b, strict=True)])
        others = product((1, 1j, -1, -1j), repeat=len(pairs) - 1)  # a phase of all of them is no matter
        return max(_closest(pairs, np.array((1, *turns))) for turns in others)

    def __repr__(self) -> str:
        d = self.matrices[0][0].shape[-1]
        return (
            f"SpectralReduction({self.variables}, d = {d}, fitness {self.fitness[self.best]:.6f}, reached by "
            f"{self.reached_best()} of {len(self.fitness)} starts)"
        )


@own_threads
def spectral_reduction(
    t: Array,
    d: int,
    *,
    variables: str | None = None,
    field: Field = "complex",
    n_starts: int = 10,
    rng: int | np.random.Generator | None = None,
) -> SpectralReduction:
    """Experimental: reduce a tensor to one d x d matrix per index, by spectral radii, from many random starts.

    Its author proposes it for tensors of three legs or more and observes that all starts reach one local maximum; the
    result says how many did. Of two legs with matrices of their own it is the singular value decomposition, and
    fitness^4 is the sum of the d - 1 largest squares, at d = 2 and 3.

    Parameters
    ----------
    t
        At least two legs; a polynomial of that degree.
    d
        Size of the matrices.
    variables
        A letter for each leg, legs of equal letters share their matrices: "aaa" for a tensor in V (x) V (x) V, "abb"
        for a stack of operators on one space. None: a letter of its own for each.
    field
        "complex" or "real" matrices.
    n_starts
        How many random starts.
    rng
        For the starts; None is 0.

    Returns
    -------
    SpectralReduction
        Of every start, in no gauge: matrices are known up to c S X S^-1 and a phase for each letter.

    Raises
    ------
    ArgumentError
        If `t` has fewer than two legs, or `variables` do not fit it.

    References
    ----------
    J. Van Name, a comment on J. Taylor, "Graphical tensor notation for interpretability" (2023).

    Examples
    --------
    >>> import numpy as np
    >>> t = np.random.default_rng(0).standard_normal((3, 3, 3))
    >>> found = spectral_reduction(t, 2, variables="aaa", n_starts=4)
    >>> found.reached_best(), round(found.similarity(0, 3), 6)
    (4, 1.0)
    """
    t = as_array("spectral_reduction", "t", t)
    d, n_starts = (as_count("spectral_reduction", *pair) for pair in (("d", d), ("n_starts", n_starts)))
    generator = as_rng("spectral_reduction", rng)
    names = _check(t, variables, field)
    letters = list(dict.fromkeys(names))
    scale = largest(t)
    wide = t.astype(np.complex128 if np.iscomplexobj(t) else np.float64)
    problem = _Problem(
        tensor=wide / scale if scale else wide,
        legs=[letters.index(letter) for letter in names],
        sizes=[t.shape[names.index(letter)] for letter in letters],
        d=d,
        field=field,
    )
    found = [problem.maximise(generator) for _ in range(n_starts)]
    fitness = scale ** (1 / t.ndim) * np.exp([log for _, log in found])
    return SpectralReduction(names, tuple(matrices for matrices, _ in found), fitness, bool(np.isrealobj(t)))


def _check(t: Array, variables: str | None, field: str) -> str:
    """Return a letter for each leg."""
    if not is_one_of(field, get_args(Field)):
        raise ArgumentError(f"spectral_reduction: field must be 'complex' or 'real', got {field!r}; choose one.")
    if t.ndim < 2:
        raise ArgumentError(f"spectral_reduction: t must have at least two legs, got {t.ndim}; pass a tensor.")
    names = ascii_lowercase[: t.ndim] if variables is None else str(variables)
    if len(names) != t.ndim:
        raise ArgumentError(
            f"spectral_reduction: variables must be one letter for each of the {t.ndim} legs, got {variables!r}; "
            f"pass for example {ascii_lowercase[: t.ndim]!r}."
        )
    for letter in names:
        sizes = {n for n, other in zip(t.shape, names, strict=True) if other == letter}
        if len(sizes) > 1:
            raise ArgumentError(
                f"spectral_reduction: variables must give one letter to legs of one size, got {letter!r} for sizes "
                f"{sorted(sizes)}; give them letters of their own."
            )
    return names


@dataclass(frozen=True, eq=False)
class _Problem:
    """A polynomial in matrices, and the fitness of those."""

    tensor: Array
    legs: Sequence[int]  # which letter each leg has
    sizes: Sequence[int]  # of each letter
    d: int
    field: Field

    def maximise(self, rng: np.random.Generator) -> tuple[tuple[Array, ...], float]:
        """Return matrices of every letter, and the logarithm of the fitness."""
        from scipy.optimize import minimize

        n = sum(self.sizes) * self.d**2
        flat = rng.standard_normal(n if self.field == "real" else 2 * n) / np.sqrt(n)
        best = -self._negative(flat)[0]
        if np.isfinite(best):
            options = {"maxiter": _STEPS, "maxfun": 2 * _STEPS, "ftol": 0, "gtol": 1e-8, "maxcor": 20}
            found = minimize(self._negative, flat, jac=True, method="L-BFGS-B", options=options)
            flat, best = found.x, -float(found.fun)
        x = self._matrices(flat)
        x = x * np.exp(-_log_size(x)[0] / 2)
        return tuple(np.split(x, np.cumsum(self.sizes)[:-1])), best

    def _matrices(self, flat: Array) -> Array:
        """Return all matrices one behind the other, (i, d, d)."""
        x = flat if self.field == "real" else flat.reshape(2, -1)[0] + 1j * flat.reshape(2, -1)[1]
        return np.asarray(x.reshape(-1, self.d, self.d))

    def _negative(self, flat: Array) -> tuple[float, Array]:
        x = self._matrices(flat)
        above, up = self._log_polynomial(x)
        below, down = _log_size(x)
        if not np.isfinite(above):
            return np.inf, np.zeros_like(flat)
        slope = (down / 2 - up).ravel()  # d(-log fitness) = Re sum slope * dX
        parts = [slope.real] if self.field == "real" else [slope.real, -slope.imag]
        return below / 2 - above, np.concatenate(parts)

    def _log_polynomial(self, x: Array) -> tuple[float, Array]:
        """Return log rho(p(X)) / n and its gradient (i, d, d)."""
        groups = np.split(x, np.cumsum(self.sizes)[:-1])
        per_leg = [groups[letter] for letter in self.legs]
        n, d = len(per_leg), self.d
        rests = [_times(self.tensor, per_leg[-1])]  # i1 ... d d: what stands right of a leg, last leg first
        for m in per_leg[-2::-1]:
            rests.append(np.einsum("iab,...ibc->...ac", m, rests[-1], optimize=True))
        log_rho, g = log_radius(rests[-1])
        found = [np.zeros(m.shape, np.complex128) for m in groups]
        for k, (m, letter) in enumerate(zip(per_leg, self.legs, strict=True)):
            flat = g.reshape(-1, d, d)  # prefix a b
            if k == n - 1:
                found[letter] += _times(self.tensor.reshape(len(flat), -1).T, flat)
                break
            rest = rests[n - 2 - k].reshape(len(flat), -1, d, d)  # prefix i c b
            found[letter] += np.einsum("pab,picb->iac", flat, rest, optimize=True)
            g = np.einsum("iac,pab->picb", m, flat, optimize=True)
        return log_rho / n, np.concatenate(found) / n


def _closest(pairs: Array, turns: Array) -> float:
    """Return the radius of sum_k turns_k pairs_k with every term turned into the phase of the eigenvalue in turn."""
    for _ in range(_TURNS):
        log_rho, g = log_radius(np.tensordot(turns, pairs, 1))
        parts = np.einsum("ab,kab->k", g, pairs)
        sizes = np.abs(parts)
        turns = np.where(sizes > 0, parts.conj() / np.where(sizes > 0, sizes, 1), turns)
    return float(np.exp(log_rho))


def _times(t: Array, x: Array) -> Array:
    """Return t (..., i) times x (i, a, b); a real t is not made complex for it."""
    if np.isrealobj(t) and np.iscomplexobj(x):
        flat = np.ascontiguousarray(x).reshape(len(x), -1).view(np.float64)
        return np.asarray(np.tensordot(t, flat, 1).view(np.complex128).reshape(*t.shape[:-1], *x.shape[1:]))
    return np.asarray(np.tensordot(t, x, 1))  # ... [i] a b


def _pairs(x: Array, y: Array) -> Array:
    """Return sum_i X_i (x) conj(Y_i), (d^2, d^2)."""
    d = x.shape[-1]
    return np.asarray(np.einsum("iab,icd->acbd", x, y.conj()).reshape(d * d, d * d))


def _log_size(x: Array) -> tuple[float, Array]:
    """Return log rho(sum_i X_i (x) conj(X_i)) and its gradient (i, d, d)."""
    d = x.shape[-1]
    log_rho, g = log_radius(_pairs(x, x), perron=True)
    g = g.reshape(d, d, d, d)  # a c b d
    return log_rho, np.einsum("acbd,icd->iab", g, x.conj()) + np.einsum("acbd,iab->icd", g, x).conj()
