"""Groups of equal singular values: where they are, a basis of each, and how far that is from jumping."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

import numpy as np

from tnlib._errors import ArgumentError
from tnlib._typing import Array
from tnlib._validate import as_array, as_rtol
from tnlib.formats.base import Dense
from tnlib.formats.low_rank import LowRank
from tnlib.formats.svd import SVD
from tnlib.formats.train import TensorTrain, TTMatrix
from tnlib.formats.tucker import Tucker
from tnlib.linalg import groups as bases
from tnlib.linalg.threads import own_threads
from tnlib.ops.canonical_form import Groups, as_groups, equal, fix


@overload
def degenerate_groups(value: TensorTrain | TTMatrix | Tucker, *, rtol: float | None = None) -> list[Groups]: ...
@overload
def degenerate_groups(value: Any, *, rtol: float | None = None) -> Groups: ...
@own_threads
def degenerate_groups(value: Any, *, rtol: float | None = None) -> Any:
    """Return the groups of equal singular values in `value`, as slices; a value that is alone is in none.

    Parameters
    ----------
    value
        Singular values (r,), descending; an SVD or LowRank; a TensorTrain or TTMatrix, which has singular values on
        every bond; a Tucker, which has them on every leg.
    rtol
        Values are equal that differ from the first of their group by less than this part of the norm of all of them.
        By default, as wherever tnlib fixes a basis, 256 eps in trains and Tucker, and 24 eps where values stay on a
        diagonal: in SVD, LowRank and values alone. More for what an experiment or an iteration has left apart.

    Returns
    -------
    list of slice, or list of list of slice
        For a train one list for each of the bonds 1 ... d - 1, for a Tucker one for each leg; they count the numerical
        ranks, in the gauge of `canonical_form`.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        If `value` is none of these, is not descending, or `rtol` is off.

    Examples
    --------
    >>> import numpy as np, tnlib
    >>> tnlib.degenerate_groups(np.array([2.0, 1.0, 1.0, 0.5]))
    [slice(1, 3, None)]
    >>> tnlib.degenerate_groups(tnlib.tt_svd(np.eye(4).reshape(2, 2, 2, 2)).value)
    [[slice(0, 2, None)], [slice(0, 4, None)], [slice(0, 2, None)]]
    """
    rtol = as_rtol("degenerate_groups", rtol)
    if not isinstance(value, Dense):
        return equal(_as_values(value), rtol, diagonal=True)
    diagonal = isinstance(value, SVD | LowRank)
    lists = [equal(s, rtol, diagonal=diagonal) for _, s in fix("degenerate_groups", value).spaces]
    return lists[0] if diagonal else lists


def canonical_basis(u: Any, groups: Sequence[slice] = ()) -> Array:
    """Return the orthonormal columns `u` with a basis in every group that depends on nothing but the space it spans.

    Parameters
    ----------
    u
        (m, r), orthonormal columns, such as left singular vectors.
    groups
        Slices of columns that span a space together, from `degenerate_groups`. Columns outside are only multiplied with
        a phase.

    Returns
    -------
    ndarray
        (m, r). Within a group the pivoted Cholesky factor of the projector on its space, the first of the longest rows
        as pivot; outside, columns with a positive leading entry.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        If `u` is no matrix with orthonormal columns, or `groups` are no slices of its columns that stand apart.

    References
    ----------
    N. J. Higham, "Analysis of the Cholesky decomposition of a semi-definite matrix", in Reliable Numerical Computation
    (1990), for the factor and its perturbations.

    Examples
    --------
    >>> import numpy as np, tnlib
    >>> turned = np.array([[0.6, -0.8], [0.8, 0.6], [0.0, 0.0]])
    >>> abs(tnlib.canonical_basis(turned, [slice(0, 2)])).round(12)
    array([[1., 0.],
           [0., 1.],
           [0., 0.]])
    """
    columns = _as_isometry("canonical_basis", u)
    return bases.fix_basis(columns, as_groups("canonical_basis", groups, columns.shape[1])).columns(columns)


@own_threads
def nearest_tie(value: Any, groups: Any = None) -> float:
    """Return how far the fixed basis of `value` is from another one: 0 at a jump, 1 at most.

    It is the smallest relative change of a squared length of a row of some basis that would make another row the pivot,
    or the leading entry. Changes of the spaces that stay well below move the basis by as much, divided by the gaps
    between groups; beyond, it may jump. Rows of exactly equal length are not at a jump: of those the first leads, and
    goes on leading until it is shorter by a tolerance, 2 sqrt(eps), which is their distance here.

    Parameters
    ----------
    value
        Orthonormal columns (m, r); or an SVD, LowRank, TensorTrain, TTMatrix or Tucker, the nearest of all its bonds
        or legs in the gauge of `canonical_form`.
    groups
        As `degenerate_groups` returns them for `value`. By default those, and none for plain columns.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        If `value` or `groups` are none of these.

    Examples
    --------
    >>> import numpy as np, tnlib
    >>> f"{tnlib.nearest_tie(np.array([[0.6], [0.8]])):.4f}"
    '0.4375'
    """
    if not isinstance(value, Dense):
        columns = _as_isometry("nearest_tie", value)
        return bases.nearest_tie(columns, as_groups("nearest_tie", groups or (), columns.shape[1]))
    fixed = fix("nearest_tie", value, groups)
    ties = [bases.nearest_tie(u, g) for (u, _), g in zip(fixed.spaces, fixed.groups, strict=True)]
    return min(ties, default=1.0)


def _as_values(value: Any) -> Array:
    s = as_array("degenerate_groups", "value", value, ndim=1)
    if np.iscomplexobj(s) or (s < 0).any() or (np.diff(s) > 0).any():
        raise ArgumentError(
            "degenerate_groups: value must hold singular values, real, not negative and descending, got others; "
            "sort them first."
        )
    return s / (s[0] or 1)


def _as_isometry(function: str, u: Any) -> Array:
    columns = as_array(function, "u", u, ndim=2)
    gram = columns.conj().T @ columns
    off = float(np.abs(gram - np.eye(len(gram))).max())
    if not off <= np.sqrt(np.finfo(columns.dtype).eps):
        raise ArgumentError(
            f"{function}: u must have orthonormal columns, got some whose inner products are off by {off:.1g}; "
            "orthogonalise them first, for example with numpy.linalg.qr."
        )
    return columns
