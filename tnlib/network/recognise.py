"""Networks of quimb as formats: the open indices say which leg is which, the bonds say the rest."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

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
from tnlib.network.arguments import as_names, as_network
from tnlib.network.build import KINDS
from tnlib.network.parts import Parts
from tnlib.ops.canonicalize import isometry_errors
from tnlib.ops.trains import T

_ISOMETRIC = 1e4  # an isometry that was computed is off by a few eps per column
_SIDES = (TTMatrix, KroneckerTerms, LowRank)  # kinds whose columns have names of their own


def from_network(tn: Any, kind: type | None = None, *, names: Sequence[str] | None = None) -> Any:
    """Return the format that a TensorNetwork of quimb is.

    Whoever made it: tensors may stand in any order, their indices too, and bonds may have any name and be several
    indices between two tensors, which are fused.

    Parameters
    ----------
    tn
        A network as `to_network` makes them: a chain for TensorTrain and TTMatrix; a chain with a vector on every bond
        for Vidal; a star for Tucker; one index that all tensors share for CP, with or without a vector of weights; two
        tensors for LowRank, with a vector between them for SVD; one term index for KroneckerTerms.
    kind
        A format, for example `tnlib.TTMatrix`; by default the one whose name all tensors have as a tag.
    names
        Of the open indices in the order of the legs, an operator's row legs before its column legs; by default k0,
        k1, ... and b0, b1, ...

    Returns
    -------
    SVD | LowRank | TensorTrain | TTMatrix | Tucker | CP | KroneckerTerms | Vidal
        Of the same arrays, without copies where the order of indices allows. `exponent` becomes `log_scale`, or goes
        into the core, the weights, s or the left factor. The tag CENTER is believed where the other cores are
        isometric towards it.

    Raises
    ------
    ArgumentTypeError, ArgumentError
        If `tn` is no network, `kind` no format, or the network has other open indices or another structure.
    ModuleNotFoundError
        If quimb is not installed.

    Examples
    --------
    >>> import quimb.tensor as qtn, tnlib
    >>> tnlib.network.from_network(qtn.MPS_ghz_state(4), tnlib.TensorTrain).ranks
    (1, 2, 2, 2, 1)
    """
    as_network("from_network", tn)
    kind = _kind_by_tags(tn) if kind is None else kind
    if not isinstance(kind, type) or kind not in KINDS:
        raise ArgumentTypeError(
            f"from_network: kind must be a format, got {kind!r}; pass for example kind=tnlib.TensorTrain."
        )
    open_inds = tuple(tn.outer_inds())
    legs = _default_legs(open_inds, kind) if names is None else as_names("from_network", "names", names)
    if sorted(legs) != sorted(open_inds) or (kind in _SIDES and len(legs) % 2):
        raise ArgumentError(
            f"from_network: names must be those of all open indices, got {', '.join(legs)} where "
            f"{', '.join(open_inds) or 'none'} are open; an operator has as many rows as columns."
        )
    made: Any = _READ[kind](Parts(tn, kind.__name__, legs))
    return made


def _kind_by_tags(tn: Any) -> type:
    found = [kind for kind in KINDS if len(tn.tag_map.get(kind.__name__, ())) == tn.num_tensors]
    if len(found) != 1:
        raise ArgumentError(
            f"from_network: kind must be given where not all tensors have the name of one format as a tag, got "
            f"{len(found)} such names; pass for example kind=tnlib.TensorTrain."
        )
    return found[0]


def _default_legs(open_inds: Sequence[str], kind: type) -> tuple[str, ...]:
    """Return k0, k1, ..., then b0, b1, ... as far as there are any."""
    sides = "kb" if kind in _SIDES else "k"
    named = sorted(
        (sides.index(match[1]), int(match[2]), i) for i in open_inds if (match := re.fullmatch(f"([{sides}])(\\d+)", i))
    )
    if len(named) < len(open_inds):
        raise ArgumentError(
            f"from_network: names must be given for open indices other than k0, k1, ... and an operator's columns b0, "
            f"b1, ..., got {', '.join(open_inds)}; pass names in the order of the legs."
        )
    return tuple(i for *_, i in named)


def _read_train(parts: Parts) -> TensorTrain:
    cores, center = _read_chain(parts, 1)
    return _claim(TensorTrain(cores, None, parts.exponent * math.log(10)), center)


def _read_matrix(parts: Parts) -> TTMatrix:
    cores, center = _read_chain(parts, 2)
    return _claim(TTMatrix(cores, None, parts.exponent * math.log(10)), center)


def _read_chain(parts: Parts, sides: int) -> tuple[list[Array], int | None]:
    length = len(parts.legs) // sides
    groups = [parts.legs[k::length] for k in range(length)]
    found = parts.holders(groups)
    parts.others(found, 0)
    bonds = [(), *itertools.starmap(parts.shared, itertools.pairwise(found)), ()]
    cores = [
        parts.array(tensor, bonds[k], *((leg,) for leg in group), bonds[k + 1])
        for k, (tensor, group) in enumerate(zip(found, groups, strict=True))
    ]
    centers = [k for k, tensor in enumerate(found) if "CENTER" in parts.tags[tensor]]
    return cores, centers[0] if len(centers) == 1 else None


def _claim(train: T, center: int | None) -> T:
    """Return `train` with its centre, where the others are isometric towards it."""
    if center is None:
        return train
    limit = _ISOMETRIC * float(np.finfo(train.dtype).eps) * math.sqrt(max(train.ranks))
    off = max(isometry_errors(train, center))
    return type(train)(train.cores, center, train.log_scale) if off <= limit else train


def _read_vidal(parts: Parts) -> Vidal:
    found = parts.holders([(leg,) for leg in parts.legs])
    vectors = {parts.inds[k]: k for k in parts.others(found, len(found) - 1)}
    bonds = [(), *itertools.starmap(parts.shared, itertools.pairwise(found)), ()]
    if set(bonds[1:-1]) != set(vectors):
        parts.refuse("bonds without a vector of their own")
    gammas = [
        parts.array(tensor, bonds[k], (leg,), bonds[k + 1])
        for k, (tensor, leg) in enumerate(zip(found, parts.legs, strict=True))
    ]
    return Vidal(gammas, [parts.arrays[vectors[bond]] for bond in bonds[1:-1]], parts.exponent * math.log(10))


def _read_tucker(parts: Parts) -> Tucker:
    found = parts.holders([(leg,) for leg in parts.legs])
    (core,) = parts.others(found, 1)
    bonds = [parts.shared(tensor, core) for tensor in found]
    factors = [parts.array(tensor, (leg,), bond) for tensor, leg, bond in zip(found, parts.legs, bonds, strict=True)]
    return Tucker(parts.scaled(parts.array(core, *bonds)), factors)


def _read_cp(parts: Parts) -> CP:
    found = parts.holders([(leg,) for leg in parts.legs])
    bond = tuple(i for i in parts.inds[found[0]] if i not in parts.legs)
    factors = [parts.array(tensor, (leg,), bond) for tensor, leg in zip(found, parts.legs, strict=True)]
    weights = np.ones(factors[0].shape[1], factors[0].dtype)
    if len(parts.inds) > len(found):
        (vector,) = parts.others(found, 1)
        weights = parts.array(vector, bond)
    return CP(parts.scaled(weights), factors)


def _read_svd(parts: Parts) -> SVD:
    sides = [k for k, inds in enumerate(parts.inds) if set(inds) & set(parts.legs)]
    if len(sides) != 2:
        parts.refuse(f"open indices on {len(sides)} tensors")
    (vector,) = parts.others(sides, 1)
    named = [k for k in sides if "U" in parts.tags[k]]
    first = named[0] if len(named) == 1 else parts.holder(parts.legs[0])
    second = sides[1 - sides.index(first)]
    bond = parts.inds[vector]
    u_legs = [i for i in parts.inds[first] if i not in bond]
    vh_legs = [i for i in parts.legs if i not in u_legs]
    u = parts.array(first, *((i,) for i in u_legs), bond)
    vh = parts.array(second, bond, *((i,) for i in vh_legs))
    return SVD(u, parts.scaled(parts.array(vector, bond)), vh, tuple(parts.legs.index(i) for i in u_legs))


def _read_low_rank(parts: Parts) -> LowRank:
    if len(parts.legs) != 2:
        parts.refuse(f"{len(parts.legs)} open indices")
    row, column = parts.legs
    left, right = parts.holders([(row,), (column,)])
    parts.others([left, right], 0)
    bond = parts.shared(left, right)
    return LowRank(parts.scaled(parts.array(left, (row,), bond)), parts.array(right, bond, (column,)))


def _read_terms(parts: Parts) -> KroneckerTerms:
    if len(parts.legs) != 4:
        parts.refuse(f"{len(parts.legs)} open indices")
    p, q, p_in, q_in = parts.legs
    left, b, c = parts.holder(p, p_in), parts.holder(q), parts.holder(q_in)
    term = tuple(i for i in parts.inds[left] if i not in parts.legs)
    parts.others({left, b, c}, 0)
    if b == c:
        right: Sequence[Array | LowRank] = list(parts.array(b, term, (q,), (q_in,)))
    else:
        bond = tuple(i for i in parts.shared(b, c) if i not in term)
        pairs = zip(parts.array(b, term, (q,), bond), parts.array(c, term, bond, (q_in,)), strict=True)
        right = [LowRank(one, two) for one, two in pairs]
    return KroneckerTerms(parts.scaled(parts.array(left, term, (p,), (p_in,))), right)


_READ: dict[type, Callable[[Parts], Any]] = {
    TensorTrain: _read_train,
    TTMatrix: _read_matrix,
    Vidal: _read_vidal,
    Tucker: _read_tucker,
    CP: _read_cp,
    SVD: _read_svd,
    LowRank: _read_low_rank,
    KroneckerTerms: _read_terms,
}
