"""Sums of trains, and trains of large ranks, rounded by random sketches."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np

from tnlib._errors import ArgumentError, ConvergenceWarning
from tnlib._fit import Fit, roundoff
from tnlib._validate import as_max_rank, as_rng, as_rtol
from tnlib.formats.train import TensorTrain, TTMatrix
from tnlib.linalg.scale import norm
from tnlib.linalg.threads import own_threads
from tnlib.ops.trains import as_train, put_together
from tnlib.sweeps.arithmetic import in_one_scale
from tnlib.sweeps.budget import Budget
from tnlib.sweeps.dense import fuse_row_and_column
from tnlib.sweeps.round import gather, truncate
from tnlib.sweeps.sketch import bond_bounds, project_on_sketch

T = TypeVar("T", TensorTrain, TTMatrix)

_FIRST = 16  # columns of the first sketch, where a tolerance is asked for
_MORE = 10  # columns more than `max_rank` at least, and half of it
_SHARE = 0.7  # of rtol that a sketch may leave out


@own_threads
def round_randomized(
    t: T | Sequence[T],
    *,
    rtol: float | None = None,
    max_rank: int | None = None,
    rng: np.random.Generator | int | None = None,
) -> Fit[T]:
    """Round a train, or the sum of several that is never formed, at the cost of ranks squared times the new one.

    `round` costs the third power of the ranks, which in a sum are those of all terms together. This is for ranks far
    above those that are wanted.

    Parameters
    ----------
    t
        A TensorTrain or a TTMatrix, or a list of them, all of one shape: then their sum is meant.
    rtol
        Relative Frobenius error of the whole; sketches grow until it is met.
    max_rank
        Cap on every rank; the smaller one wins. One of the two is needed.
    rng
        A numpy random generator or a seed for it; None always draws the same numbers.

    Returns
    -------
    Fit
        A train as `round` returns it. `error` is estimated from an independent sketch, two standard errors included,
        and `certified` False. With `max_rank` alone it is as a rule a few percent above that of `round` where singular
        values decay, and more where they do not.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        If the terms are no trains of one kind and shape, or neither tolerance nor cap is given.

    References
    ----------
    H. Al Daas et al., "Randomized algorithms for rounding in the tensor-train format", SIAM J. Sci. Comput. 45 (2023),
    Algorithm 3.2.

    Examples
    --------
    Fifty product states whose spins point between up and down, in equal steps, are nearly a state of rank 5.

    >>> import numpy as np, tnlib
    >>> angles = np.linspace(0, np.pi / 2, 50)
    >>> spins = [np.array([np.cos(a), np.sin(a)]).reshape(1, 2, 1) for a in angles]
    >>> terms = [tnlib.TensorTrain([spin] * 4) for spin in spins]
    >>> fit = tnlib.round_randomized(terms, rtol=1e-10)
    >>> fit.value.ranks, f"{fit.value.full()[0, 0, 0, 0]:.4f} of {sum(np.cos(angles) ** 4):.4f}"
    ((1, 2, 3, 2, 1), '18.8750 of 18.8750')
    """
    name = "round_randomized"
    rtol, max_rank = as_rtol(name, rtol), as_max_rank(name, max_rank)
    terms: list[T] = _as_terms(t)
    if rtol is None and max_rank is None:
        raise ArgumentError(f"{name}: rtol or max_rank must be given, got neither; for numerical ranks use round.")
    rng, dtype = as_rng(name, rng), np.result_type(*(one.dtype for one in terms))
    scaled, log_scale = in_one_scale([(fuse_row_and_column(one.cores), one.log_scale) for one in terms])
    cores = [[core.astype(dtype, copy=False) for core in some] for some in scaled]

    most = max(bond_bounds(cores))
    cap = most if max_rank is None else min(most, max_rank + max(_MORE, max_rank // 2))
    width = cap if rtol is None else min(cap, _FIRST)
    while True:
        found, lost, twos = project_on_sketch(cores, width, rng)
        held = norm(found[-1])
        whole = math.hypot(held, lost)
        if rtol is None or width == cap or lost <= _SHARE * rtol * whole:
            break
        width = min(cap, 2 * width)

    left_over = None if rtol is None else math.sqrt(max(0.0, rtol**2 - (lost / whole) ** 2)) if whole > 0 else rtol
    gathered, more = gather(found)
    budget = Budget(norm(gathered[0]), left_over, [max(len(core), len(found)) for core in gathered[1:]], dtype)
    rounded, _ = truncate(gathered, budget, max_rank)
    shared = int(np.rint(log_scale / math.log(2)))
    factor = math.exp(log_scale - shared * math.log(2))
    value = put_together(terms[0], rounded, len(rounded) - 1, twos + more + shared, factor)

    error = math.hypot(lost, budget.error * held) / whole if whole > 0 else 0.0
    missed = rtol is not None and error > max(rtol, roundoff(dtype, len(found) + 1))
    if missed:
        text = f"{name}: the error {error:.3g} misses rtol={rtol:.3g}; raise max_rank, or ask for less."
        warnings.warn(text, ConvergenceWarning, stacklevel=3)
    return Fit(value, error, False, not missed, 0)


def _as_terms(t: Any) -> list[Any]:
    """Return trains of one kind and shape."""
    terms = list(t) if isinstance(t, list | tuple) else [t]
    if not terms:
        raise ArgumentError("round_randomized: t must hold at least one train, got an empty list; pass a train.")
    for k, term in enumerate(terms):
        as_train("round_randomized", "t" if terms == [t] else f"term {k} of t", term)
    kind, legs = type(terms[0]), [core.shape[1:-1] for core in terms[0].cores]
    for k, term in enumerate(terms):
        if type(term) is not kind or [core.shape[1:-1] for core in term.cores] != legs:
            raise ArgumentError(
                f"round_randomized: all terms of t must be of one kind and shape, got term 0 {terms[0]!r} and "
                f"term {k} {term!r}; convert them first."
            )
    return terms
