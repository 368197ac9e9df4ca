"""Conversion of formats to quimb networks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import quimb.tensor as qtn

from tnlib._errors import ArgumentError, ArgumentTypeError
from tnlib._format import Format
from tnlib._typing import Array
from tnlib.formats.cp.format import CP
from tnlib.formats.matrix.kronecker_terms import KroneckerTerms
from tnlib.formats.matrix.low_rank import LowRank
from tnlib.formats.matrix.svd import SVD
from tnlib.formats.train.format import TensorTrain
from tnlib.formats.train.tt_matrix import TTMatrix
from tnlib.formats.train.vidal import Vidal
from tnlib.formats.tucker.format import Tucker
from tnlib.interop.quimb.network_arguments import as_index_names

Names: TypeAlias = tuple[str, ...]


class _Tensor(NamedTuple):
    data: Array
    inds: Names
    tags: Names


def to_network(value: Format, *, names: Sequence[str] | None = None) -> qtn.TensorNetwork:
    """Return `value` as a quimb TensorNetwork with named indices and tags.

    Parameters
    ----------
    value
        Any format: SVD, LowRank, TensorTrain, TTMatrix, Tucker, CP, KroneckerTerms, Vidal.
    names
        Names of the open indices, one per leg; an operator's row legs before its column legs, of KroneckerTerms
        (positions, features) on both sides. By default k0, k1, ... and, for the columns of an operator, b0, b1, ...

    Returns
    -------
    quimb.tensor.TensorNetwork
        One tensor per array, copied. Diagonal factors (s of an SVD, weights of a CP, lambdas of a Vidal) are vectors on
        the index of their bond, which then joins three or more tensors; `spell_out` replaces such a hyperindex by a
        copy tensor. Tags of a tensor are the name of the format, its part (CORE, FACTOR, WEIGHTS, U, S, VH, LEFT,
        RIGHT, GAMMA, LAMBDA) and, at leg k, I{k}; the centre of a train has CENTER. Bonds of a train are bond1, bond2,
        ... `log_scale` becomes `exponent`. The right factors of KroneckerTerms are stacked into one tensor, or into two
        if all of them are LowRank, padded with zeros to the largest rank.

    Raises
    ------
    ArgumentTypeError
        If `value` is not a format.
    ArgumentError
        If there is not one name per leg, a name occurs twice, or is that of a bond.

    Examples
    --------
    >>> import numpy as np, tnlib
    >>> from tnlib.interop.quimb import contract, to_network
    >>> qk = tnlib.LowRank(np.ones((5, 2)), np.ones((2, 4)))
    >>> tn = to_network(qk, names=("query", "key"))
    >>> tn.outer_inds(), float(contract(tn)[0, 0])
    (('query', 'key'), 2.0)
    """
    tensors_of = next((function for kind, function in _TENSORS.items() if isinstance(value, kind)), None)
    if tensors_of is None:
        raise ArgumentTypeError(
            f"to_network: value must be a format of tnlib, got a {type(value).__name__}; "
            "decompose an array first, for example with tnlib.tt_svd."
        )
    default = leg_names(value)
    legs = default if names is None else as_index_names("to_network", "names", names)
    if len(legs) != len(default):
        raise ArgumentError(
            f"to_network: names must be {len(default)}, one per leg, got {len(legs)}; "
            "an operator's row legs come before its column legs."
        )
    tensors = list(tensors_of(value, default))
    bonds = {i for tensor in tensors for i in tensor.inds} - set(default)
    if conflicts := bonds & set(legs):
        raise ArgumentError(f"to_network: names must not be those of bonds, got {', '.join(conflicts)}; choose others.")
    renamed = dict(zip(default, legs, strict=True))
    tn = qtn.TensorNetwork(
        qtn.Tensor(np.array(a, order="C"), [renamed.get(i, i) for i in inds], (type(value).__name__, *tags))
        for a, inds, tags in tensors
    )
    tn.exponent = getattr(value, "log_scale", 0.0) / math.log(10)
    return tn


def leg_names(value: Format) -> Names:
    """Return the default names of the open indices of `value`, in the order of its legs."""
    if isinstance(value, TTMatrix):
        return default_names(len(value.cores), columns=True)
    if isinstance(value, KroneckerTerms):
        return default_names(2, columns=True)
    return default_names(1, columns=True) if isinstance(value, LowRank) else default_names(value.ndim)


def default_names(count: int, *, columns: bool = False) -> Names:
    """Return k0, k1, ... and, for an operator, b0, b1, ...: quimb's names of the legs of states and operators."""
    return tuple(f"{side}{k}" for side in ("kb" if columns else "k") for k in range(count))


def _train_tensors(value: TensorTrain | TTMatrix, legs: Names) -> Iterator[_Tensor]:
    last = len(value.cores) - 1
    for k, core in enumerate(value.cores):
        center = ("CENTER",) if k == value.center else ()
        yield _Tensor(*_without_outer_bonds(core, k, legs[k :: last + 1], last), ("CORE", f"I{k}", *center))


def _vidal_tensors(value: Vidal, legs: Names) -> Iterator[_Tensor]:
    for k, gamma in enumerate(value.gammas):
        yield _Tensor(*_without_outer_bonds(gamma, k, legs[k : k + 1], len(legs) - 1), ("GAMMA", f"I{k}"))
    for k, s in enumerate(value.lambdas):
        yield _Tensor(s, (f"bond{k + 1}",), ("LAMBDA",))


def _without_outer_bonds(core: Array, k: int, legs: Names, last: int) -> tuple[Array, Names]:
    """Return core k (l, legs ..., r) without the bonds of size 1 at the ends of the chain, and its indices."""
    first, behind = int(k == 0), int(k == last)
    return (
        core.reshape(core.shape[first : core.ndim - behind]),
        (*(f"bond{k}",)[first:], *legs, *(f"bond{k + 1}",)[behind:]),
    )


def _tucker_tensors(value: Tucker, legs: Names) -> Iterator[_Tensor]:
    bonds = tuple(f"bond{k}" for k in range(len(legs)))
    yield _Tensor(value.core, bonds, ("CORE",))
    for k, (factor, leg, bond) in enumerate(zip(value.factors, legs, bonds, strict=True)):
        yield _Tensor(factor, (leg, bond), ("FACTOR", f"I{k}"))


def _cp_tensors(value: CP, legs: Names) -> Iterator[_Tensor]:
    yield _Tensor(value.weights, ("bond",), ("WEIGHTS",))
    for k, (factor, leg) in enumerate(zip(value.factors, legs, strict=True)):
        yield _Tensor(factor, (leg, "bond"), ("FACTOR", f"I{k}"))


def _svd_tensors(value: SVD, legs: Names) -> Iterator[_Tensor]:
    left = value.left or ()
    right = [k for k in range(len(legs)) if k not in left]
    yield _Tensor(value.u, (*(legs[k] for k in left), "bond"), ("U", *(f"I{k}" for k in left)))
    yield _Tensor(value.s, ("bond",), ("S",))
    yield _Tensor(value.vh, ("bond", *(legs[k] for k in right)), ("VH", *(f"I{k}" for k in right)))


def _low_rank_tensors(value: LowRank, legs: Names) -> Iterator[_Tensor]:
    yield _Tensor(value.left, (legs[0], "bond"), ("LEFT",))
    yield _Tensor(value.right, ("bond", legs[1]), ("RIGHT",))


def _kronecker_tensors(value: KroneckerTerms, legs: Names) -> Iterator[_Tensor]:
    p, q, p_in, q_in = legs
    yield _Tensor(value.left, ("term", p, p_in), ("LEFT", "I0"))
    low = [term for term in value.right if isinstance(term, LowRank)]
    if len(low) < len(value.right):
        yield _Tensor(np.stack([np.asarray(term) for term in value.right]), ("term", q, q_in), ("RIGHT", "I1"))
        return
    rank, (m, n) = max(term.ranks[0] for term in low), low[0].shape
    left, right = np.zeros((len(low), m, rank), value.dtype), np.zeros((len(low), rank, n), value.dtype)
    for h, term in enumerate(low):
        left[h, :, : term.ranks[0]], right[h, : term.ranks[0]] = term.left, term.right
    yield _Tensor(left, ("term", q, "bond"), ("RIGHT", "I1"))
    yield _Tensor(right, ("term", "bond", q_in), ("RIGHT", "I1"))


_TENSORS: dict[type, Callable[..., Iterator[_Tensor]]] = {
    TensorTrain: _train_tensors,
    TTMatrix: _train_tensors,
    Vidal: _vidal_tensors,
    Tucker: _tucker_tensors,
    CP: _cp_tensors,
    SVD: _svd_tensors,
    LowRank: _low_rank_tensors,
    KroneckerTerms: _kronecker_tensors,
}
