"""Formats as networks of quimb."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from tnlib._errors import ArgumentError, ArgumentTypeError
from tnlib._typing import Array
from tnlib.formats.cp import CP
from tnlib.formats.kronecker import KroneckerTerms
from tnlib.formats.low_rank import LowRank
from tnlib.formats.svd import SVD
from tnlib.formats.train import TensorTrain, TTMatrix
from tnlib.formats.tucker import Tucker
from tnlib.formats.vidal import Vidal
from tnlib.network.arguments import as_names, need

KINDS = (SVD, LowRank, TensorTrain, TTMatrix, Tucker, CP, KroneckerTerms, Vidal)


class Node(NamedTuple):
    """A tensor of a network: its array, the names of its indices, its tags."""

    data: Array
    inds: tuple[str, ...]
    tags: tuple[str, ...]


def to_network(value: Any, *, names: Sequence[str] | None = None) -> Any:
    """Return `value` as a TensorNetwork of quimb with named indices and tags.

    Parameters
    ----------
    value
        Any format: SVD, LowRank, TensorTrain, TTMatrix, Tucker, CP, KroneckerTerms, Vidal.
    names
        Of the open indices, one per leg; an operator's row legs before its column legs, of KroneckerTerms (positions,
        features) on either side. By default k0, k1, ... and, for the columns of an operator, b0, b1, ...

    Returns
    -------
    quimb.tensor.TensorNetwork
        One tensor per array, copied. The diagonal ones (s of an SVD, weights of a CP, lambdas of a Vidal) are vectors
        whose one index is that of the bond they stand on, which then joins three tensors or more: the copy tensor on
        it is not stored (`spell_out` stores it). Every tensor has the name of the format as a tag, its part (CORE,
        FACTOR, WEIGHTS, U, S, VH, LEFT, RIGHT, GAMMA, LAMBDA) and, at leg k, I{k}; the centre of a train has CENTER.
        Bonds of a train are bond1, bond2, ... `log_scale` becomes `exponent`. The right matrices of KroneckerTerms are
        stacked into one tensor, or two where all of them are LowRank, padded with zeros to the largest rank.

    Raises
    ------
    ArgumentTypeError
        If `value` is no format.
    ArgumentError
        If `names` are not as many as the legs, occur twice, or are those of bonds.
    ModuleNotFoundError
        If quimb is not installed.

    Examples
    --------
    >>> import numpy as np, tnlib
    >>> qk = tnlib.LowRank(np.ones((5, 2)), np.ones((2, 4)))
    >>> tn = tnlib.network.to_network(qk, names=("query", "key"))
    >>> tn.outer_inds(), float(tnlib.network.contract(tn)[0, 0])
    (('query', 'key'), 2.0)
    """
    if not isinstance(value, KINDS):
        raise ArgumentTypeError(
            f"to_network: value must be a format of tnlib, got a {type(value).__name__}; "
            "decompose an array first, for example with tnlib.tt_svd."
        )
    qtn = need("to_network")
    default = leg_names(value)
    legs = default if names is None else as_names("to_network", "names", names)
    if len(legs) != len(default):
        raise ArgumentError(
            f"to_network: names must be {len(default)}, one per leg, got {len(legs)}; "
            "an operator's row legs come before its column legs."
        )
    nodes = list(_nodes(value, default))
    bonds = {i for node in nodes for i in node.inds} - set(default)
    if taken := bonds & set(legs):
        raise ArgumentError(f"to_network: names must not be those of bonds, got {', '.join(taken)}; choose others.")
    given = dict(zip(default, legs, strict=True))
    tensors = [
        qtn.Tensor(np.array(a, order="C"), [given.get(i, i) for i in inds], (type(value).__name__, *tags))
        for a, inds, tags in nodes
    ]
    tn = qtn.TensorNetwork(tensors)
    tn.exponent = getattr(value, "log_scale", 0.0) / math.log(10)
    return tn


def leg_names(value: Any) -> tuple[str, ...]:
    """Return the names that `to_network` gives to the open indices of `value` by default, in the order of its legs."""
    if isinstance(value, TTMatrix):
        return default_names(len(value.cores), columns=True)
    if isinstance(value, KroneckerTerms):
        return default_names(2, columns=True)
    return default_names(1, columns=True) if isinstance(value, LowRank) else default_names(len(value.shape))


def default_names(count: int, *, columns: bool = False) -> tuple[str, ...]:
    """Return k0, k1, ... and, for an operator, b0, b1, ...; quimb calls the legs of states and operators so."""
    return tuple(f"{side}{k}" for side in ("kb" if columns else "k") for k in range(count))


def _nodes(value: Any, legs: Sequence[str]) -> Iterator[Node]:
    match value:
        case TensorTrain() | TTMatrix():
            return _of_train(value, legs)
        case Vidal():
            return _of_vidal(value, legs)
        case Tucker():
            return _of_tucker(value, legs)
        case CP():
            return _of_cp(value, legs)
        case SVD():
            return _of_svd(value, legs)
        case LowRank():
            return _of_low_rank(value, legs)
    return _of_terms(value, legs)


def _of_train(value: TensorTrain | TTMatrix, legs: Sequence[str]) -> Iterator[Node]:
    last = len(value.cores) - 1
    for k, core in enumerate(value.cores):
        center = ("CENTER",) if k == value.center else ()
        yield Node(*_chained(core, k, legs[k :: last + 1], last), ("CORE", f"I{k}", *center))


def _of_vidal(value: Vidal, legs: Sequence[str]) -> Iterator[Node]:
    for k, gamma in enumerate(value.gammas):
        yield Node(*_chained(gamma, k, legs[k : k + 1], len(legs) - 1), ("GAMMA", f"I{k}"))
    for k, s in enumerate(value.lambdas):
        yield Node(s, (f"bond{k + 1}",), ("LAMBDA",))


def _chained(core: Array, k: int, legs: Sequence[str], last: int) -> tuple[Array, tuple[str, ...]]:
    """Return core k (l, legs ..., r) without the bonds of size 1 at the ends of the chain, and its indices."""
    first, behind = int(k == 0), int(k == last)
    kept = core.reshape(core.shape[first : core.ndim - behind])
    return kept, (*(f"bond{k}",)[first:], *legs, *(f"bond{k + 1}",)[behind:])


def _of_tucker(value: Tucker, legs: Sequence[str]) -> Iterator[Node]:
    bonds = tuple(f"bond{k}" for k in range(len(legs)))
    yield Node(value.core, bonds, ("CORE",))
    for k, (factor, leg, bond) in enumerate(zip(value.factors, legs, bonds, strict=True)):
        yield Node(factor, (leg, bond), ("FACTOR", f"I{k}"))


def _of_cp(value: CP, legs: Sequence[str]) -> Iterator[Node]:
    yield Node(value.weights, ("bond",), ("WEIGHTS",))
    for k, (factor, leg) in enumerate(zip(value.factors, legs, strict=True)):
        yield Node(factor, (leg, "bond"), ("FACTOR", f"I{k}"))


def _of_svd(value: SVD, legs: Sequence[str]) -> Iterator[Node]:
    left = value.left or ()
    right = [k for k in range(len(legs)) if k not in left]
    yield Node(value.u, (*(legs[k] for k in left), "bond"), ("U", *(f"I{k}" for k in left)))
    yield Node(value.s, ("bond",), ("S",))
    yield Node(value.vh, ("bond", *(legs[k] for k in right)), ("VH", *(f"I{k}" for k in right)))


def _of_low_rank(value: LowRank, legs: Sequence[str]) -> Iterator[Node]:
    yield Node(value.left, (legs[0], "bond"), ("LEFT",))
    yield Node(value.right, ("bond", legs[1]), ("RIGHT",))


def _of_terms(value: KroneckerTerms, legs: Sequence[str]) -> Iterator[Node]:
    p, q, p_in, q_in = legs
    yield Node(value.left, ("term", p, p_in), ("LEFT", "I0"))
    low = [term for term in value.right if isinstance(term, LowRank)]
    if len(low) < len(value.right):
        yield Node(np.stack([np.asarray(term) for term in value.right]), ("term", q, q_in), ("RIGHT", "I1"))
        return
    most, (m, n) = max(term.ranks[0] for term in low), low[0].shape
    left, right = np.zeros((len(low), m, most), value.dtype), np.zeros((len(low), most, n), value.dtype)
    for h, term in enumerate(low):
        left[h, :, : term.ranks[0]], right[h, : term.ranks[0]] = term.left, term.right
    yield Node(left, ("term", q, "bond"), ("RIGHT", "I1"))
    yield Node(right, ("term", "bond", q_in), ("RIGHT", "I1"))
