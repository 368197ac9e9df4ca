"""Canonical forms: the gauge that depends on the tensor alone, whatever factors represent it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from tnlib._format import Format
from tnlib._registry import require
from tnlib.linalg.canonical_basis import Groups
from tnlib.linalg.threads import single_threaded_blas

F = TypeVar("F", bound=Format)


@single_threaded_blas
def canonical_form(t: F, *, groups: Groups | Sequence[Groups] | None = None) -> F:
    """Return the same tensor in a gauge that depends on the tensor alone, at its numerical ranks.

    Parameters
    ----------
    t
        A TensorTrain, TTMatrix, Tucker, CP, SVD or LowRank.
    groups
        Singular values that share a basis, as `degenerate_groups` returns them for this tensor; by default those that
        are equal to roundoff. For two tensors that agree only approximately, pass groups with a larger `rtol` to obtain
        the same gauge. In an SVD `s` stays diagonal, so the matrix changes by the differences of the values of a group.
        A CP has no groups.

    Returns
    -------
    TensorTrain | TTMatrix | Tucker | CP | SVD | LowRank
        Trains left-canonical, in the basis of left singular vectors on every bond. Tucker as the higher-order SVD:
        factors with orthonormal columns, an all-orthogonal core whose slices along every leg have descending norms. CP
        with unit columns and positive weights, descending; a CP of that rank that is not unique keeps its components.
        LowRank balanced, see `balance`. Signs, and bases of groups, are fixed on the left.

    Notes
    -----
    `tucker` returns this form if it does not truncate and `n_iter` is 0. The dense array is never formed.

    References
    ----------
    L. De Lathauwer, B. De Moor, J. Vandewalle, "A multilinear singular value decomposition", SIAM J. Matrix Anal. Appl.
    21 (2000).

    Examples
    --------
    >>> import numpy as np, tnlib
    >>> a = tnlib.Tucker(np.array([[6.0]]), [np.array([[0.0], [1.0]]), np.array([[1.0], [0.0]])])
    >>> b = tnlib.Tucker(np.array([[-1.0]]), [np.array([[0.0], [2.0]]), np.array([[-3.0], [0.0]])])
    >>> [float(tnlib.canonical_form(t).core[0, 0]) for t in (a, b)]
    [6.0, 6.0]
    """
    function = "canonical_form"
    canonicalize = require(function, function, "t", t, "decompose it first, for example with tnlib.svd")
    return canonicalize(t, function, groups).value  # type: ignore[no-any-return]
