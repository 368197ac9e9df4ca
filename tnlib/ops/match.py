"""Two CPs side by side: which component is which, and how alike they are."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tnlib._errors import ArgumentError, ArgumentTypeError
from tnlib._typing import Array
from tnlib._validate import as_flag
from tnlib.formats.cp import CP
from tnlib.gauge.cp import aligning_phases, congruences, unit_components


@dataclass(frozen=True, eq=False)
class Match:
    """One CP in the order and with the signs of another.

    Parameters
    ----------
    value
        The first CP with unit columns and positive weights; component j stands where its partner stands among the
        partners, those without one at the end.
    permutation
        (R,), where each component of `value` stood in the first CP.
    partners
        (min(R, R'),), what the leading components of `value` are matched with in the second CP, ascending: all of its
        components unless it has more than the first.
    congruences
        (min(R, R'),), for each pair the product over all legs of the moduli of the cosines between columns.
    score
        The factor match score, from 0 to 1: the mean over pairs of congruence, times the weight penalty if asked for.
    """

    value: CP
    permutation: Array
    partners: Array
    congruences: Array
    score: float


def match(a: CP, b: CP, *, weight_penalty: bool = True) -> Match:
    """Pair the components of `a` with those of `b` so that the factor match score is the largest of all pairings.

    Parameters
    ----------
    a, b
        CPs of the same shape, in any gauge and of any two ranks; the score is over the smaller one.
    weight_penalty
        Whether a pair counts min(w, w') / max(w, w') of its congruence, w and w' being the weights beside unit
        columns; two zero weights count in full. Without it the weights, and the scales of `a` and `b`, do not matter.

    Returns
    -------
    Match
        `.value` is `a`, reordered and with phases that make every cosine with the partner positive real; where they
        do not multiply to 1, the factor with the smallest cosine takes the rest, so that the tensor stays the same.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        If `a` or `b` is no CP, or they differ in shape.

    References
    ----------
    G. Tomasi, R. Bro, "A comparison of algorithms for fitting the PARAFAC model", Comput. Stat. Data Anal. 50 (2006),
    for the congruence. E. Acar, D. M. Dunlavy, T. G. Kolda, M. Morup, "Scalable tensor factorizations for incomplete
    data", Chemom. Intell. Lab. Syst. 106 (2011), section 4.2, for the score.

    Examples
    --------
    >>> import numpy as np, tnlib
    >>> a = tnlib.CP([3.0, 2.0], [np.eye(4)[:, :2]] * 3)
    >>> b = tnlib.CP([2.0, 4.0], [np.eye(4)[:, 1::-1], -np.eye(4)[:, 1::-1], -np.eye(4)[:, 1::-1]])
    >>> found = tnlib.match(a, b)
    >>> found.permutation, found.score
    (array([1, 0]), 0.875)
    """
    for name, value in (("a", a), ("b", b)):
        if not isinstance(value, CP):
            raise ArgumentTypeError(
                f"match: {name} must be a CP, got a {type(value).__name__}; decompose it first, with tnlib.cp."
            )
    if a.shape != b.shape:
        raise ArgumentError(
            f"match: a and b must have one shape, got {a.shape} and {b.shape}; compare two models of one tensor."
        )
    weight_penalty = as_flag("match", "weight_penalty", weight_penalty)
    weights, factors = _unit(a)
    others, models = _unit(b)
    inner = np.stack(congruences(factors, models))  # leg R R'
    congruence = np.abs(inner).prod(axis=0)
    rows, partners = _pairs(congruence * _likeness(weights, others) if weight_penalty else congruence)
    score = congruence[rows, partners]
    whole = score * _likeness(weights, others)[rows, partners] if weight_penalty else score
    order = np.concatenate([rows, np.setdiff1d(np.arange(len(weights)), rows)])
    phases = np.ones((len(factors), len(order)), factors[0].dtype)
    phases[:, : len(rows)] = aligning_phases(inner[:, rows, partners])
    aligned = tuple(factor[:, order] * phase for factor, phase in zip(factors, phases, strict=True))
    return Match(CP(weights[order], aligned), order, partners, score, min(1.0, float(whole.mean())))


def _unit(value: CP) -> tuple[Array, list[Array]]:
    factors = [factor.astype(value.dtype, copy=False) for factor in value.factors]
    with np.errstate(over="ignore"):  # the format refuses what leaves the range of its dtype
        weights, factors = unit_components(value.weights, factors)
    return CP(weights, factors).weights, factors


def _likeness(w: Array, v: Array) -> Array:
    """Return 1 - |w - v| / max(w, v) for all pairs (R, R'), 1 for two zeros."""
    larger = np.maximum.outer(w, v)
    return np.asarray(np.where(larger > 0, np.minimum.outer(w, v) / np.where(larger > 0, larger, 1), 1))


def _pairs(scores: Array) -> tuple[Array, Array]:
    """Return the rows and the columns of the pairs with the largest sum of `scores`, by ascending column."""
    from scipy.optimize import linear_sum_assignment

    rows, columns = linear_sum_assignment(scores, maximize=True)
    order = np.argsort(columns)
    return rows[order], columns[order]
