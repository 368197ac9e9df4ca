"""Canonical forms: the gauge that depends on the tensor alone; groups of equal singular values, and nearest ties."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar, overload

import numpy as np
import numpy.typing as npt

from tnlib._errors import ArgumentError, ArgumentTypeError
from tnlib._fit import Fit
from tnlib._format import Format
from tnlib._registry import require
from tnlib._typing import Array
from tnlib._validate import as_array, as_rtol
from tnlib.formats.cp.format import CP
from tnlib.formats.matrix.low_rank import LowRank
from tnlib.formats.matrix.svd import SVD
from tnlib.formats.train.format import TensorTrain
from tnlib.formats.train.tt_matrix import TTMatrix
from tnlib.formats.tucker.format import Tucker
from tnlib.linalg import canonical_basis as bases
from tnlib.linalg.canonical_basis import Groups, as_groups, default_groups
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
    >>> import tnlib
    >>> a = tnlib.Tucker([[6.0]], [[[0.0], [1.0]], [[1.0], [0.0]]])
    >>> b = tnlib.Tucker([[-1.0]], [[[0.0], [2.0]], [[-3.0], [0.0]]])
    >>> [float(tnlib.canonical_form(t).core[0, 0]) for t in (a, b)]
    [6.0, 6.0]
    """
    function = "canonical_form"
    canonicalize = require(function, function, "t", t, "decompose it first, for example with tnlib.svd")
    return canonicalize(t, function, groups).value  # type: ignore[no-any-return]


@overload
def degenerate_groups(t: TensorTrain | TTMatrix | Tucker, *, rtol: float | None = None) -> list[Groups]: ...
@overload
def degenerate_groups(t: SVD | LowRank | npt.ArrayLike, *, rtol: float | None = None) -> Groups: ...
@single_threaded_blas
def degenerate_groups(t: Format | npt.ArrayLike, *, rtol: float | None = None) -> Groups | list[Groups]:
    """Return the groups of equal singular values of `t`, as slices; simple values are in no group.

    Parameters
    ----------
    t
        Singular values (r,), descending; an SVD or LowRank; a TensorTrain or TTMatrix, which has singular values on
        every bond; a Tucker, which has them on every leg.
    rtol
        Two values are equal if they differ by less than this fraction of the norm of all values of the bond or leg. By
        default 256 eps in trains and Tucker, and 24 eps in SVD, LowRank and plain values, which stay on a diagonal.

    Returns
    -------
    list of slice, or list of list of slice
        For a train one list for each of the bonds 1 ... d - 1, for a Tucker one for each leg, in `canonical_form`.

    Examples
    --------
    >>> import numpy as np, tnlib
    >>> tnlib.degenerate_groups(np.array([2.0, 1.0, 1.0, 0.5]))
    [slice(1, 3, None)]
    >>> tnlib.degenerate_groups(tnlib.tt_svd(np.eye(4).reshape(2, 2, 2, 2)).value)
    [[slice(0, 2, None)], [slice(0, 4, None)], [slice(0, 2, None)]]
    """
    rtol = as_rtol("degenerate_groups", rtol)
    if not isinstance(t, Format | Fit):
        return default_groups(_as_values(t), rtol, diagonal=True)
    diagonal = isinstance(t, SVD | LowRank)
    spaces = _canonical_form("degenerate_groups", t, None).spaces
    lists = [default_groups(s, rtol, diagonal=diagonal) for _, s in spaces]
    return lists[0] if diagonal else lists


def canonical_basis(u: npt.ArrayLike, groups: Sequence[slice] = ()) -> Array:
    """Return orthonormal columns `u` with every group in a basis that depends on its span alone.

    Parameters
    ----------
    u
        (m, r), orthonormal columns, such as left singular vectors.
    groups
        Slices of columns that span a space together, from `degenerate_groups`.

    Returns
    -------
    ndarray
        (m, r). Within a group the pivoted Cholesky factor of the projector on its space, the first of the longest rows
        as pivot; outside, columns multiplied by a phase, with a positive leading entry.

    References
    ----------
    N. J. Higham, "Analysis of the Cholesky decomposition of a semi-definite matrix", Reliable Numerical Computation
    (1990).

    Examples
    --------
    >>> import numpy as np, tnlib
    >>> rotated = np.array([[0.6, -0.8], [0.8, 0.6], [0.0, 0.0]])
    >>> abs(tnlib.canonical_basis(rotated, [slice(0, 2)])).round(12)
    array([[1., 0.],
           [0., 1.],
           [0., 0.]])
    """
    columns = _as_isometry("canonical_basis", u)
    return bases.group_basis_change(columns, as_groups("canonical_basis", groups, columns.shape[1])).columns(columns)


@single_threaded_blas
def nearest_tie(t: Format | npt.ArrayLike, groups: Groups | Sequence[Groups] | None = None) -> float:
    r"""Return the distance from 0 to 1 of the canonical basis of `t` to its nearest discontinuity.

    It is the smallest relative change of the squared norm of a row that would make another row the pivot, or another
    entry the leading one. Perturbations well below it change the basis by their size divided by the gaps between
    groups. For rows of equal norm, of which the first is the pivot within a tolerance, it is
    :math:`2 \sqrt{\mathtt{eps}}`.

    Parameters
    ----------
    t
        Orthonormal columns (m, r); or an SVD, LowRank, TensorTrain, TTMatrix or Tucker, for the smallest distance of
        all its bonds or legs in the gauge of `canonical_form`.
    groups
        Groups as returned by `degenerate_groups`, which is also the default for formats. For an array the default is no
        groups.

    Examples
    --------
    >>> import numpy as np, tnlib
    >>> f"{tnlib.nearest_tie(np.array([[0.6], [0.8]])):.4f}"
    '0.4375'
    """
    if not isinstance(t, Format | Fit):
        columns = _as_isometry("nearest_tie", t)
        return bases.nearest_tie(columns, as_groups("nearest_tie", groups or (), columns.shape[1]))
    form = _canonical_form("nearest_tie", t, groups)
    return min((bases.nearest_tie(u, g) for (u, _), g in zip(form.spaces, form.groups, strict=True)), default=1.0)


def _canonical_form(function: str, t: Any, groups: Any) -> bases.CanonicalForm:
    if isinstance(t, CP):
        raise ArgumentTypeError(
            f"{function}: t must have singular subspaces, got a CP, whose components are no basis of one space; "
            "convert it to Tucker with tnlib.convert."
        )
    canonicalize = require(function, "canonical_form", "t", t, "decompose it first, for example with tnlib.svd")
    return canonicalize(t, function, groups)  # type: ignore[no-any-return]


def _as_values(values: Any) -> Array:
    s = as_array("degenerate_groups", "t", values, ndim=1)
    if np.iscomplexobj(s) or (s < 0).any() or (np.diff(s) > 0).any():
        raise ArgumentError(
            "degenerate_groups: t must hold singular values, real, not negative and descending, got others; "
            "sort them first."
        )
    return np.asarray(s / (s[0] or 1))


def _as_isometry(function: str, u: Any) -> Array:
    columns = as_array(function, "u", u, ndim=2)
    gram = columns.conj().T @ columns
    off = float(np.abs(gram - np.eye(len(gram))).max())
    if not off <= np.sqrt(np.finfo(columns.dtype).eps):
        raise ArgumentError(
            f"{function}: u must have orthonormal columns, got some whose inner products are off by {off:.1g}; "
            "orthonormalize them first, for example with numpy.linalg.qr."
        )
    return columns
