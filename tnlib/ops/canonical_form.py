"""Formats in the gauge that depends on the tensor alone, so that two forms of one tensor become the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from tnlib._errors import ArgumentError, ArgumentTypeError
from tnlib._typing import Array
from tnlib.formats.base import Dense
from tnlib.formats.cp import CP
from tnlib.formats.low_rank import LowRank
from tnlib.formats.svd import SVD
from tnlib.formats.train import TensorTrain, TTMatrix
from tnlib.formats.tucker import Tucker
from tnlib.gauge import bilinear, cp, train, tucker
from tnlib.linalg.groups import equal_values, fix_basis, resolution
from tnlib.linalg.scale import exponent, shift
from tnlib.linalg.threads import own_threads
from tnlib.ops.trains import put_together, take_apart
from tnlib.sweeps.round import schmidt_basis

F = TypeVar("F", TensorTrain, TTMatrix, Tucker, CP, SVD, LowRank)

Groups = list[slice]


@own_threads
def canonical_form(value: F, *, groups: Any = None) -> F:
    """Return the same tensor in the gauge that depends on it alone, at its numerical ranks; nothing dense is made.

    Parameters
    ----------
    value
        A TensorTrain, TTMatrix, Tucker, CP, SVD or LowRank.
    groups
        Singular values that share a basis, as `degenerate_groups` returns them for this value; by default those that
        are equal to roundoff. Where two values of one tensor agree to 1e-9, say, groups with a coarser `rtol` make
        their gauges agree as well. An SVD, whose `s` stays diagonal, changes by as much as a group's values differ.
        A CP has none.

    Returns
    -------
    TensorTrain | TTMatrix | Tucker | CP | SVD | LowRank
        Trains left-canonical, in the basis of left singular vectors on every bond. Tucker as the higher-order SVD:
        factors with orthonormal columns, an all-orthogonal core whose slices fall in length along every leg. CP with
        unit columns and positive weights, the largest first; its components are fixed no further, for where a CP of
        that rank is not unique, they are its own. LowRank balanced, see `balance`. Signs, and bases of groups, are
        fixed on the left.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        If `value` is none of these, or `groups` are not those of this value.

    Notes
    -----
    `tucker` without a tolerance and without caps returns this form. Where a tolerance or a cap drops more than
    roundoff, later legs are truncated after the slices along earlier ones were made orthogonal, and `n_iter` looks for
    the smallest error whatever the slices: there this is another form of the same approximation.

    References
    ----------
    L. De Lathauwer, B. De Moor, J. Vandewalle, "A multilinear singular value decomposition", SIAM J. Matrix Anal. Appl.
    21 (2000).

    Examples
    --------
    >>> import numpy as np, tnlib
    >>> one = tnlib.Tucker(np.array([[6.0]]), [np.array([[0.0], [1.0]]), np.array([[1.0], [0.0]])])
    >>> other = tnlib.Tucker(np.array([[-1.0]]), [np.array([[0.0], [2.0]]), np.array([[-3.0], [0.0]])])
    >>> [float(tnlib.canonical_form(t).core[0, 0]) for t in (one, other)]
    [6.0, 6.0]
    """
    if isinstance(value, CP):
        if groups is not None:
            raise ArgumentError(
                "canonical_form: groups must be left out for a CP, whose components are no basis of one space; "
                "pass the CP alone."
            )
        factors = [factor.astype(value.dtype, copy=False) for factor in value.factors]
        with np.errstate(over="ignore"):  # the format refuses what leaves the range of its dtype
            weights, factors = cp.fix_components(value.weights, factors)
        return CP(weights, tuple(factors))  # type: ignore[return-value]
    return fix("canonical_form", value, groups).value  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Fixed:
    """A format in its gauge, with the spaces that it is unique in but for their bases."""

    value: Any
    spaces: Sequence[tuple[Array, Array]]  # orthonormal columns (m, r), in that gauge, and their singular values (r,)
    groups: Sequence[Groups]


def fix(function: str, value: Any, groups: Any = None) -> Fixed:
    """Return a format in the gauge of its singular vectors, with a fixed basis in `groups`: see `canonical_form`."""
    match value:
        case TensorTrain() | TTMatrix():
            return _train(function, value, groups)
        case Tucker():
            return _tucker(function, value, groups)
        case SVD():
            return _svd(function, value, groups)
        case LowRank():
            return _low_rank(function, value, groups)
    raise ArgumentTypeError(
        f"{function}: value must be a TensorTrain, TTMatrix, Tucker, SVD or LowRank, got a {type(value).__name__}; "
        "decompose what you have first, for example with tnlib.svd."
    )


def _train(function: str, value: Any, groups: Any) -> Fixed:
    cores, twos, factor = take_apart(value)
    cores, spectra, more = schmidt_basis(cores, value.dtype)
    chosen = _choose(function, value, spectra, groups)
    cores = train.turn_bonds(cores, chosen)
    flats = [core.reshape(-1, core.shape[-1]) for core in cores[:-1]]
    whole = put_together(value, cores, len(cores) - 1, twos + more, factor)
    return Fixed(whole, list(zip(flats, spectra, strict=True)), chosen)


def _tucker(function: str, value: Tucker, groups: Any) -> Fixed:
    core, bases, twos = tucker.orthonormal_factors(value.core, value.factors)
    core, factors = tucker.all_orthogonal(core, bases, value.dtype)
    spectra = tucker.mode_spectra(core)
    chosen = _choose(function, value, spectra, groups)
    core, factors = tucker.turn_modes(core, factors, chosen)
    return Fixed(Tucker(shift(core, twos), tuple(factors)), list(zip(factors, spectra, strict=True)), chosen)


def _svd(function: str, value: SVD, groups: Any) -> Fixed:
    u, vh = (a.astype(value.dtype, copy=False) for a in (value.u, value.vh))
    flat, s = u.reshape(-1, len(value.s)), shift(value.s, -exponent(value.s))
    (chosen,) = _choose(function, value, [s], groups)
    turn = fix_basis(flat, chosen)
    fixed = turn.columns(flat)
    right = turn.rows(vh.reshape(len(s), -1)).reshape(vh.shape)
    return Fixed(SVD(fixed.reshape(u.shape), value.s, right, value.left), [(fixed, s)], [chosen])


def _low_rank(function: str, value: LowRank, groups: Any) -> Fixed:
    left, right = (a.astype(value.dtype, copy=False) for a in value.arrays())
    u, s, vh, twos = bilinear.product_in_range(left, right)
    (chosen,) = _choose(function, value, [s], groups)
    whole = LowRank(*bilinear.share_out(u, s, vh, twos, 0.5, chosen))
    return Fixed(whole, [(fix_basis(u, chosen).columns(u), s)], [chosen])


def _choose(function: str, value: Dense, spectra: Sequence[Array], groups: Any) -> list[Groups]:
    """Return one list of groups for each of the `spectra`, checked; by default where values are equal to roundoff."""
    if groups is None:
        return [equal(s, None, diagonal=isinstance(value, SVD | LowRank)) for s in spectra]
    lists = [groups] if isinstance(value, SVD | LowRank) else groups
    if not isinstance(lists, Sequence) or len(lists) != len(spectra):
        raise ArgumentError(
            f"{function}: groups must be as tnlib.degenerate_groups returns them, {len(spectra)} lists of slices for "
            f"this {type(value).__name__}, got {groups!r}; call it on the same value."
        )
    return [as_groups(function, g, len(s)) for g, s in zip(lists, spectra, strict=True)]


def as_groups(function: str, groups: Any, rank: int) -> Groups:
    """Return slices of `rank` columns, ascending and apart."""
    if not isinstance(groups, Sequence) or not all(isinstance(g, slice) for g in groups):
        raise ArgumentTypeError(
            f"{function}: groups must be a sequence of slices, got {groups!r}; "
            "pass what tnlib.degenerate_groups returns."
        )
    found: Groups = []
    for group in groups:
        start, stop, step = group.indices(rank)
        beyond = group.stop is not None and group.stop > rank
        if step != 1 or beyond or start >= stop or start < (found[-1].stop if found else 0):
            raise ArgumentError(
                f"{function}: groups must be slices of {rank} columns, ascending and apart, got {group}; "
                "pass what tnlib.degenerate_groups returns."
            )
        found.append(slice(start, stop))
    return found


def equal(s: Array, rtol: float | None, *, diagonal: bool) -> Groups:
    """Return the groups of `s`, descending and in range: closer than `rtol` of their norm, or as in `resolution`."""
    if rtol is None:
        return equal_values(s, resolution(s, s.dtype, diagonal=diagonal))
    return equal_values(s, rtol * float(np.linalg.norm(s)))
