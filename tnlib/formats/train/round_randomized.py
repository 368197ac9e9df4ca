r"""Randomized rounding of a train, or of a sum of trains that is never formed.

A sweep from the right contracts each term of the sum A with a random train of l columns, the sketch W[k] = (part on the
right of bond k) Omega; a sweep from the left takes

    Q[k] R = Y[k] = (Q[k-1]^H A)[k] W[k],

an orthonormal basis of the range of that bond, and A is projected on all of them. The parts lost at different bonds are
orthogonal to each other, so a second, independent sketch W', whose columns preserve norms on average, estimates

    norm(A - Q Q^H A)^2  =  mean over j of  sum over k of  norm((1 - Q[k] Q[k]^H) (Q[k-1]^H A)[k] W'[k][:, j])^2.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from tnlib._errors import ArgumentError
from tnlib._fit import Fit, report
from tnlib._typing import Array
from tnlib._validate import as_max_rank, as_rng, as_rtol, refuse_foreign_keywords
from tnlib.formats.train.cores import add_cores, attainable_ranks, with_common_exponent
from tnlib.formats.train.format import TensorTrain
from tnlib.formats.train.tt_matrix import T, as_train
from tnlib.formats.train.tt_rounding import right_canonicalize, round_train, train_budget, truncate_bonds
from tnlib.linalg.orthogonal import qr_positive
from tnlib.linalg.randomized import standard_normal
from tnlib.linalg.scaling import Scaled, largest, norm, shift
from tnlib.linalg.threads import single_threaded_blas

_FIRST_WIDTH = 16  # columns of the first sketch under a tolerance
_OVERSAMPLING = 10  # columns more than `max_rank` at least, and half of it
_GROWTH = 4  # of a sketch that missed the tolerance
LEAST_SAVING = 2  # ranks per column of a sketch; with fewer, rounding was faster for 1 to 10 terms of ranks 10 to 200
_SKETCH_SHARE = 0.7  # of rtol that a sketch may leave out
_STANDARD_ERRORS = 2.0  # added to the estimate

Cores = Sequence[Array]


@single_threaded_blas
@refuse_foreign_keywords
def round_randomized(
    t: T | Sequence[T],
    *,
    rtol: float | None = None,
    max_rank: int | None = None,
    rng: np.random.Generator | int | None = None,
) -> Fit[T]:
    """Round a train, or a sum of trains that is never formed, by random sketches.

    The cost per core is :math:`O(r^2 l)`, with l the new rank and r the given one (for a sum, of every term), and
    :math:`O(r^3)` in `round`, with r the sum of the ranks of all terms. Where l is not below half of that sum, the sum
    is formed and rounded.

    Parameters
    ----------
    t
        A TensorTrain or a TTMatrix, or a list of them of the same shape, whose sum is rounded.
    rtol, max_rank
        Relative Frobenius error of the whole tensor, for which sketches are enlarged until it is met, and maximal value
        of every rank; the smaller rank is used. At least one of the two is required.
    rng
        A numpy random generator, or a seed; None stands for a fixed seed.

    Returns
    -------
    Fit
        A train in the gauge of `round`. `error` is an estimate from an independent sketch plus two standard errors, and
        `certified` is False, unless the sum was rounded. With `max_rank` alone the error is a few percent above that of
        `round` if the singular values decay, and more if they do not.

    References
    ----------
    H. Al Daas et al., "Randomized algorithms for rounding in the tensor-train format", SIAM J. Sci. Comput. 45 (2023),
    Algorithm 3.2.

    Examples
    --------
    Fifty states of four parallel spins lie in the space of symmetric states: their sum has rank 3 in the middle.

    >>> import numpy as np, tnlib
    >>> angles = np.linspace(0, np.pi / 2, 50)
    >>> spins = [np.array([np.cos(a), np.sin(a)]).reshape(1, 2, 1) for a in angles]
    >>> terms = [tnlib.TensorTrain([spin] * 4) for spin in spins]
    >>> fit = tnlib.round_randomized(terms, rtol=1e-10)
    >>> exact = sum(np.cos(angles) ** 4)
    >>> fit.value.ranks, f"{fit.value.full()[0, 0, 0, 0]:.4f}, exactly {exact:.4f}"
    ((1, 2, 3, 2, 1), '18.8750, exactly 18.8750')
    """
    name = "round_randomized"
    rtol, max_rank = as_rtol(name, rtol), as_max_rank(name, max_rank)
    terms: list[T] = _as_terms(t)
    if rtol is None and max_rank is None:
        raise ArgumentError(f"{name}: rtol or max_rank must be given, got neither; for numerical ranks use round.")
    rng, dtype = as_rng(name, rng), np.result_type(*(term.dtype for term in terms))
    scaled, exponent = with_common_exponent([(term.fused().cores, term.exponent) for term in terms])
    cores = [[core.astype(dtype, copy=False) for core in term] for term in scaled]

    sketched = _project_within(cores, rtol, max_rank, rng)
    if sketched is None:
        formed = TensorTrain.from_sweep(add_cores(cores), None, exponent)
        rounded, budget = round_train(formed, rtol, max_rank)
        notes = budget.notes("bond", first=1)
        return report(name, terms[0].unfused(rounded), error=budget.error, rtol=rtol, notes=notes)
    projection, lost = sketched
    kept = norm(projection.cores[-1])
    total = math.hypot(kept, lost)
    rest = rtol if rtol is None or total == 0 else math.sqrt(max(0.0, rtol**2 - (lost / total) ** 2))
    gathered = right_canonicalize(projection)
    budget = train_budget(gathered, rest, max_rank)
    rounded, _ = truncate_bonds(gathered, budget)
    value = terms[0].unfused(TensorTrain.from_sweep(rounded.cores, rounded.center, rounded.exponent + exponent))
    error = math.hypot(lost, budget.error * kept) / total if total > 0 else 0.0
    return report(name, value, error=error, rtol=rtol, estimate="")


def _project_within(
    terms: Sequence[Cores], rtol: float | None, max_rank: int | None, rng: np.random.Generator
) -> tuple[TensorTrain, float] | None:
    """Widen the sketch until the estimate of the part it leaves out fits the tolerance, or the cap is reached.

    Return None where rounding the sum is faster than the next sketch.
    """
    ranks = max(sum(map(len, cores)) for cores in zip(*terms, strict=True))
    cap = max(bond_bounds(terms))
    if max_rank is not None:
        cap = min(cap, max_rank + max(_OVERSAMPLING, max_rank // 2))
    width = cap if rtol is None else min(cap, _FIRST_WIDTH)
    while LEAST_SAVING * width <= ranks:
        projection, lost = project_on_sketch(terms, width, rng)
        total = math.hypot(norm(projection.cores[-1]), lost)
        if rtol is None or width == cap or lost <= _SKETCH_SHARE * rtol * total:
            return projection, lost
        width = min(cap, _GROWTH * width)
    return None


def bond_bounds(terms: Sequence[Cores]) -> list[int]:
    """Return an upper bound of the rank of each of the d + 1 bonds of the sum."""
    _, *ranks = (sum(map(len, cores)) for cores in zip(*terms, strict=True))
    return attainable_ranks([1, *ranks, 1], [core.shape[1] for core in terms[0]])


def project_on_sketch(terms: Sequence[Cores], width: int, rng: np.random.Generator) -> tuple[TensorTrain, float]:
    """Return a left-canonical projection of the sum of `terms`, of ranks up to `width`, and the norm of its error.

    This is an estimate, two standard errors included, in units of 2**exponent of the projection.
    """
    dtype = np.result_type(*(core for term in terms for core in term))
    sizes = [min(width, bound) for bound in bond_bounds(terms)]
    sketch, check = (_sketch(terms, sizes, dtype, rng) for _ in range(2))
    rests, exponent = [np.ones((1, 1), dtype) for _ in terms], 0  # q l, of every term
    out: list[Array] = []
    squares: list[Scaled] = []
    for k in range(len(sizes) - 2):
        n = terms[0][k].shape[1]
        grown = [np.tensordot(rest, term[k], 1) for rest, term in zip(rests, terms, strict=True)]  # q n [l] r
        grown, exponent = _rescale_all([a.reshape(len(a) * n, -1) for a in grown], exponent)
        q, _ = qr_positive(_sum_of_products(grown, sketch[k + 1][0]))
        columns, e = check[k + 1]
        sample = _sum_of_products(grown, columns)
        missing = np.square(np.abs(sample - q @ (q.conj().T @ sample))).sum(axis=0, dtype=np.float64)
        estimate = missing.mean() + _STANDARD_ERRORS * missing.std() / math.sqrt(len(missing))
        squares.append(Scaled(np.asarray(estimate), 2 * (exponent + e)))
        rests = [q.conj().T @ a for a in grown]  # q' [(q n)] r
        out.append(q.reshape(-1, n, q.shape[1]))
    last = _sum_of_products(rests, [term[-1].reshape(len(term[-1]), -1) for term in terms])  # q n
    with np.errstate(over="ignore"):
        lost = math.sqrt(sum(float(shift(square, e - 2 * exponent)) for square, e in squares))
    return TensorTrain.from_sweep([*out, last.reshape(*last.shape, 1)], len(out), exponent), lost


def _sketch(
    terms: Sequence[Cores], sizes: Sequence[int], dtype: np.dtype[Any], rng: np.random.Generator
) -> list[tuple[list[Array], int]]:
    """Return, for every bond, the part of each term on its right times one random train, (r, l), and the exponent."""
    parts, exponent = [np.ones((1, 1), dtype) for _ in terms], 0
    out = [(parts, exponent)]
    for k in range(len(sizes) - 2, 0, -1):
        n, columns = terms[0][k].shape[1], sizes[k + 1]
        omega = standard_normal((n * columns, sizes[k]), dtype, rng) / math.sqrt(columns)  # keeps norms on average
        grown = [np.tensordot(term[k], part, 1) for term, part in zip(terms, parts, strict=True)]  # l n [r] j
        parts, exponent = _rescale_all([a.reshape(len(a), -1) @ omega for a in grown], exponent)  # l [n] [j] j'
        out.append((parts, exponent))
    return [out[0], *reversed(out)]  # bond 0 has no sketch


def _sum_of_products(lefts: Sequence[Array], rights: Sequence[Array]) -> Array:
    products = (left @ right for left, right in zip(lefts, rights, strict=True))
    return functools.reduce(operator.iadd, products)


def _rescale_all(arrays: list[Array], exponent: int) -> tuple[list[Array], int]:
    """Return `arrays` with one power of two removed, the largest part of all in [1/2, 1), and the new exponent."""
    e = math.frexp(max(largest(a) for a in arrays))[1]
    return [shift(a, -e) for a in arrays], exponent + e


def _as_terms(t: Any) -> list[Any]:
    """Return trains of one kind and shape."""
    terms = list(t) if isinstance(t, list | tuple) else [t]
    if not terms:
        raise ArgumentError("round_randomized: t must hold at least one train, got an empty list; pass a train.")
    for k, term in enumerate(terms):
        as_train("round_randomized", "t" if terms == [t] else f"term {k} of t", term)
    for k, term in enumerate(terms):
        if type(term) is not type(terms[0]) or term._legs != terms[0]._legs:
            raise ArgumentError(
                f"round_randomized: all terms of t must be of one kind and shape, got term 0 {terms[0]!r} and "
                f"term {k} {term!r}; convert them first."
            )
    return terms
