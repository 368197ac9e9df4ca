"""Matching of two CPs: the pairing of their components with the largest factor match score."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tnlib._errors import ArgumentError
from tnlib._fit import wrong_type
from tnlib._typing import Array
from tnlib._validate import as_flag
from tnlib.formats.cp.format import CP
from tnlib.formats.cp.operations import unit_components
from tnlib.linalg.canonical_basis import unit_phases


@dataclass(frozen=True, eq=False)
class Match:
    """Result of `match`: a CP with the order and signs of another CP.

    Parameters
    ----------
    value
        The first CP with unit columns and non-negative weights; component j is matched with component partners[j] of
        the second CP, components without a partner come last.
    permutation
        (R,), the position of each component of `value` in the first CP.
    partners
        (min(R, R'),), the components of the second CP that the leading components of `value` are matched with,
        ascending: all of its components unless it has more than the first.
    congruences
        (min(R, R'),), for each pair the product over all legs of the moduli of the cosines between columns.
    score
        The factor match score, from 0 to 1: the mean over pairs of the congruence, times the weight penalty if any.

    References
    ----------
    E. Acar, D. M. Dunlavy, T. G. Kolda, M. Morup, "Scalable tensor factorizations for incomplete data", Chemom. Intell.
    Lab. Syst. 106 (2011), section 4.2.

    Examples
    --------
    The one component of `b` has the directions of component 1 of `a`; weights are not compared:

    >>> import numpy as np, tnlib
    >>> a = tnlib.CP([3.0, 2.0], [np.eye(4)[:, :2]] * 3)
    >>> found = tnlib.match(a, tnlib.CP([5.0], [np.eye(4)[:, 1:2]] * 3))
    >>> found.permutation, found.congruences, found.value.weights
    (array([1, 0]), array([1.]), array([2., 3.]))
    """

    value: CP
    permutation: Array
    partners: Array
    congruences: Array
    score: float


def match(a: CP, b: CP, *, weight_penalty: bool = True) -> Match:
    r"""Pair the components of `a` with those of `b` such that the factor match score is maximal.

    Parameters
    ----------
    a, b
        CPs of the same shape, in any gauge and of any ranks; the score is the mean over min(R, R') pairs.
    weight_penalty
        Multiply the congruence of a pair by :math:`\min(w, w') / \max(w, w')`, with w and w' the weights for unit
        columns (1 if both are zero). If False, the score does not depend on the norms of `a` and `b`.

    Returns
    -------
    Match
        `.value` is `a`, reordered, with phases such that every cosine with the partner is real and positive. If the
        phases of a component do not multiply to 1, its smallest cosine is the exception.

    References
    ----------
    E. Acar, D. M. Dunlavy, T. G. Kolda, M. Morup, "Scalable tensor factorizations for incomplete data", Chemom. Intell.
    Lab. Syst. 106 (2011), section 4.2.

    Examples
    --------
    >>> import numpy as np, tnlib
    >>> a = tnlib.CP([3.0, 2.0], [np.eye(4)[:, :2]] * 3)
    >>> swapped = np.eye(4)[:, 1::-1]
    >>> b = tnlib.CP([2.0, 4.0], [swapped, -swapped, -swapped])
    >>> pairing = tnlib.match(a, b)
    >>> pairing.permutation, pairing.score
    (array([1, 0]), 0.875)
    """
    for name, value in (("a", a), ("b", b)):
        if not isinstance(value, CP):
            raise wrong_type("match", name, "a CP", value, "decompose it first, with tnlib.cp")
    if a.shape != b.shape:
        raise ArgumentError(
            f"match: a and b must have one shape, got {a.shape} and {b.shape}; compare two models of one tensor."
        )
    weight_penalty = as_flag("match", "weight_penalty", weight_penalty)
    (weights, factors), (b_weights, b_factors) = _normalized(a), _normalized(b)
    cosines = np.stack([x.conj().T @ y for x, y in zip(factors, b_factors, strict=True)])  # leg R R'
    congruences = np.abs(cosines).prod(axis=0)
    larger, smaller = np.maximum.outer(weights, b_weights), np.minimum.outer(weights, b_weights)
    ratios = np.where(larger > 0, smaller / np.where(larger > 0, larger, 1), 1)  # 1 for two zeros
    scores = congruences * ratios if weight_penalty else congruences
    rows, partners = _best_pairs(scores)
    order = np.concatenate([rows, np.setdiff1d(np.arange(len(weights)), rows)])
    phases = np.ones((len(factors), len(order)), factors[0].dtype)
    phases[:, : len(rows)] = _aligning_phases(cosines[:, rows, partners])
    value = CP(weights[order], tuple(factor[:, order] * phase for factor, phase in zip(factors, phases, strict=True)))
    score = min(1.0, float(scores[rows, partners].mean()))
    return Match(value, order, partners, congruences[rows, partners], score)


def _normalized(value: CP) -> tuple[Array, Sequence[Array]]:
    with np.errstate(over="ignore"):  # the format refuses weights outside the range of its dtype
        unit = CP(*unit_components(value.weights, value.promoted_arrays()[1:]))
    return unit.weights, unit.factors


def _best_pairs(scores: Array) -> tuple[Array, Array]:
    """Return the rows and the columns of the pairs with the largest sum of `scores`, by ascending column."""
    from scipy.optimize import linear_sum_assignment

    rows, columns = linear_sum_assignment(scores, maximize=True)
    order = np.argsort(columns)
    return rows[order], columns[order]


def _aligning_phases(cosines: Array) -> Array:
    """Return phases (d, R) of product 1 that make all `cosines` (d, R) but the smallest of each column positive."""
    phases = unit_phases(cosines)
    columns, least = np.arange(cosines.shape[1]), np.argmin(np.abs(cosines), axis=0)
    phases[least, columns] = 1
    phases[least, columns] = phases.prod(axis=0).conj()
    return phases
