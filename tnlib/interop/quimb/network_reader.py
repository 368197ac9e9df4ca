"""Networks of quimb as formats: `from_network` for any format, `from_quimb` for quimb's own classes of chains.

Open indices identify the legs, shared indices are the bonds.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, NoReturn, TypeAlias, TypeVar, overload

import numpy as np
import quimb.tensor as qtn

from tnlib._errors import ArgumentError, ArgumentTypeError
from tnlib._format import Format
from tnlib._typing import Array
from tnlib.formats.cp.format import CP
from tnlib.formats.matrix.kronecker_terms import KroneckerTerms
from tnlib.formats.matrix.low_rank import LowRank
from tnlib.formats.matrix.svd import SVD
from tnlib.formats.train.cores import find_center
from tnlib.formats.train.format import TensorTrain
from tnlib.formats.train.tt_matrix import T, TTMatrix
from tnlib.formats.train.vidal import Vidal
from tnlib.formats.tucker.format import Tucker
from tnlib.interop.core_arrays import as_one_precision, wrong_object
from tnlib.interop.quimb.network_arguments import as_arrays, as_index_names, as_network, binary_exponent
from tnlib.linalg.scaling import shift_in_range

F = TypeVar("F", bound=Format)
Indices: TypeAlias = tuple[str, ...]  # several of them are fused to one leg

_OPERATORS = (TTMatrix, KroneckerTerms, LowRank)  # column legs have default names of their own


@overload
def from_network(tn: qtn.TensorNetwork, kind: type[F], *, names: Sequence[str] | None = None) -> F: ...
@overload
def from_network(tn: qtn.TensorNetwork, kind: None = None, *, names: Sequence[str] | None = None) -> Format: ...
def from_network(
    tn: qtn.TensorNetwork, kind: type[Format] | None = None, *, names: Sequence[str] | None = None
) -> Format:
    """Return a quimb TensorNetwork as a format.

    Tensors and indices may have any order, bonds any names. Several indices between two tensors are fused.

    Parameters
    ----------
    tn
        A network as from `to_network`: a chain for TensorTrain and TTMatrix; a chain with a vector on every bond for
        Vidal; a star for Tucker; one index common to all tensors for CP, with or without a vector of weights; two
        tensors for LowRank, with a vector between them for SVD; one index of terms for KroneckerTerms.
    kind
        A format, for example `tnlib.TTMatrix`; by default the one whose name all tensors have as a tag.
    names
        Names of the open indices in the order of the legs, an operator's row legs before its column legs; by default
        k0, k1, ... and b0, b1, ...

    Returns
    -------
    SVD | LowRank | TensorTrain | TTMatrix | Tucker | CP | KroneckerTerms | Vidal
        The same arrays, without copies where the order of indices allows. `exponent` becomes `log_scale`, or is
        multiplied into the core, the weights, s or the left factor. A train has the centre that the tag CENTER marks if
        its other cores are isometric towards it.

    Examples
    --------
    >>> import quimb.tensor as qtn, tnlib
    >>> from tnlib.interop.quimb import from_network
    >>> from_network(qtn.MPS_ghz_state(4), tnlib.TensorTrain).ranks
    (1, 2, 2, 2, 1)
    """
    as_network("from_network", tn)
    kind = _kind_by_tags(tn) if kind is None else kind
    if not isinstance(kind, type) or kind not in _READERS:
        raise ArgumentTypeError(
            f"from_network: kind must be a format, got {kind!r}; pass for example kind=tnlib.TensorTrain."
        )
    outer = tuple(tn.outer_inds())
    legs = _default_legs(outer, kind) if names is None else as_index_names("from_network", "names", names)
    if sorted(legs) != sorted(outer) or (kind in _OPERATORS and len(legs) % 2):
        raise ArgumentError(
            f"from_network: names must be those of all open indices, got {', '.join(legs)} where "
            f"{', '.join(outer) or 'none'} are open; an operator has as many rows as columns."
        )
    return _READERS[kind](NetworkReader(tn, kind.__name__, legs))


def from_quimb(obj: Any) -> TensorTrain | TTMatrix:
    """Return a MatrixProductState or MatrixProductOperator of quimb as a train.

    Parameters
    ----------
    obj
        An open chain over the sites 0 ... L - 1, with tensors and indices in any order. Physical dimensions may differ
        between sites.

    Returns
    -------
    TensorTrain | TTMatrix
        Copies of the arrays, of one dtype; leg k is site k, row legs are the upper indices. `exponent` becomes
        `log_scale`. `center` is the first orthogonality centre, as measured, None if there is none. Index names and
        tags are dropped.

    Raises
    ------
    ArgumentTypeError
        If `obj` is neither a MatrixProductState nor a MatrixProductOperator, or mixes precisions.
    ArgumentError
        If it is cyclic, does not have one tensor per site, or skips a site.

    Notes
    -----
    quimb writes pickle files, which execute code when loaded; `tnlib.save` stores the same values without pickle.

    Examples
    --------
    >>> import quimb.tensor as qtn
    >>> from tnlib.interop.quimb import from_quimb
    >>> ghz = from_quimb(qtn.MPS_ghz_state(4))
    >>> ghz.ranks, ghz.center, f"{ghz.full()[1, 1, 1, 1]:.4f}"
    ((1, 2, 2, 2, 1), None, '0.7071')
    """
    kind: type[TensorTrain | TTMatrix]
    if isinstance(obj, qtn.MatrixProductState):
        kind, ids = TensorTrain, [obj.site_ind_id]
    elif isinstance(obj, qtn.MatrixProductOperator):
        kind, ids = TTMatrix, [obj.upper_ind_id, obj.lower_ind_id]
    else:
        raise wrong_object("from_quimb", obj, "a MatrixProductState or a MatrixProductOperator")
    if obj.cyclic:
        raise ArgumentError(
            f"from_quimb: obj must be an open chain, got a cyclic {type(obj).__name__}; a train has no bond between "
            "its ends, bring it to an open chain first."
        )
    sides = [_site_indices(obj, pattern) for pattern in ids]
    reader = NetworkReader(obj, kind.__name__, tuple(itertools.chain(*sides)), "from_quimb", "obj")
    if len(set(map(len, sides))) > 1:
        reader.refuse(f"{len(sides[0])} upper and {len(sides[1])} lower indices")
    groups = list(zip(*sides, strict=True))
    tensors = reader.tensors_with(groups)
    reader.remaining(tensors, 0)
    cores = as_one_precision("from_quimb", "tensor", _read_chain(reader, tensors, groups))
    return kind(cores, find_center(cores), float(obj.exponent) * math.log(10))


def _site_indices(obj: Any, name: str) -> list[str]:
    """Return the outer indices for sites 0, 1, ... by a pattern such as k{}."""
    pattern = re.compile(r"(\d+)".join(re.escape(part) for part in name.split("{}")))
    indices = {int(match[1]): index for index in obj.outer_inds() if (match := pattern.fullmatch(index))}
    if not indices or sorted(indices) != list(range(len(indices))):
        raise ArgumentError(
            f"from_quimb: obj must have outer indices {name.format(0)}, {name.format(1)} and so on without gaps, got "
            f"those of sites {sorted(indices)}; number the sites from 0, or fill the empty ones."
        )
    return [indices[site] for site in range(len(indices))]


def _kind_by_tags(tn: qtn.TensorNetwork) -> type:
    kinds = [kind for kind in _READERS if len(tn.tag_map.get(kind.__name__, ())) == tn.num_tensors]
    if len(kinds) != 1:
        raise ArgumentError(
            f"from_network: kind must be given where not all tensors have the name of one format as a tag, got "
            f"{len(kinds)} such names; pass for example kind=tnlib.TensorTrain."
        )
    return kinds[0]


def _default_legs(outer: Sequence[str], kind: type) -> Indices:
    """Return k0, k1, ..., then b0, b1, ... as far as there are any."""
    sides = "kb" if kind in _OPERATORS else "k"
    matches = [match for i in outer if (match := re.fullmatch(f"([{sides}])(\\d+)", i))]
    if len(matches) < len(outer):
        raise ArgumentError(
            f"from_network: names must be given for open indices other than k0, k1, ... and an operator's columns b0, "
            f"b1, ..., got {', '.join(outer)}; pass names in the order of the legs."
        )
    return tuple(match[0] for match in sorted(matches, key=lambda match: (sides.index(match[1]), int(match[2]))))


def _read_train(kind: type[T], reader: NetworkReader) -> T:
    length = len(reader.legs) // (2 if kind is TTMatrix else 1)
    groups = [reader.legs[k::length] for k in range(length)]
    tensors = reader.tensors_with(groups)
    reader.remaining(tensors, 0)
    factor, exponent = binary_exponent(reader.tn)
    train = kind(_read_chain(reader, tensors, groups), exponent=exponent)
    train = train if factor == 1.0 else train * factor
    centers = [k for k, tensor in enumerate(tensors) if "CENTER" in reader.tags[tensor]]
    if len(centers) != 1 or find_center(train.cores, centers[0]) != centers[0]:
        return train
    return kind.from_sweep(train.cores, centers[0], train.exponent)


def _read_chain(reader: NetworkReader, tensors: Sequence[int], groups: Sequence[Indices]) -> list[Array]:
    """Return the cores (l, legs ..., r) of a chain, with outer bonds of size 1."""
    bonds = [(), *itertools.starmap(reader.bond, itertools.pairwise(tensors)), ()]
    return [
        reader.array(tensor, left, *((leg,) for leg in group), right)
        for tensor, group, (left, right) in zip(tensors, groups, itertools.pairwise(bonds), strict=True)
    ]


def _read_vidal(reader: NetworkReader) -> Vidal:
    groups = [(leg,) for leg in reader.legs]
    tensors = reader.tensors_with(groups)
    vectors = {reader.inds[k]: reader.arrays[k] for k in reader.remaining(tensors, len(tensors) - 1)}
    bonds = list(itertools.starmap(reader.bond, itertools.pairwise(tensors)))
    if set(bonds) != set(vectors):
        reader.refuse("bonds without a vector of their own")
    gammas = _read_chain(reader, tensors, groups)
    return Vidal(gammas, [vectors[bond] for bond in bonds], float(reader.tn.exponent) * math.log(10))


def _read_tucker(reader: NetworkReader) -> Tucker:
    tensors = reader.tensors_with([(leg,) for leg in reader.legs])
    (core,) = reader.remaining(tensors, 1)
    bonds = [reader.bond(tensor, core) for tensor in tensors]
    legs = zip(tensors, reader.legs, bonds, strict=True)
    factors = [reader.array(tensor, (leg,), bond) for tensor, leg, bond in legs]
    return Tucker(reader.scaled(reader.array(core, *bonds)), factors)


def _read_cp(reader: NetworkReader) -> CP:
    tensors = reader.tensors_with([(leg,) for leg in reader.legs])
    bond = tuple(i for i in reader.inds[tensors[0]] if i not in reader.legs)
    factors = [reader.array(tensor, (leg,), bond) for tensor, leg in zip(tensors, reader.legs, strict=True)]
    weights = np.ones(factors[0].shape[1], factors[0].dtype)
    if len(reader.inds) > len(tensors):
        (vector,) = reader.remaining(tensors, 1)
        weights = reader.array(vector, bond)
    return CP(reader.scaled(weights), factors)


def _read_svd(reader: NetworkReader) -> SVD:
    sides = [k for k, inds in enumerate(reader.inds) if set(inds) & set(reader.legs)]
    if len(sides) != 2:
        reader.refuse(f"open indices on {len(sides)} tensors")
    (vector,) = reader.remaining(sides, 1)
    tagged = [k for k in sides if "U" in reader.tags[k]]
    first = tagged[0] if len(tagged) == 1 else reader.tensor_with(reader.legs[0])
    second = sides[1 - sides.index(first)]
    bond = reader.inds[vector]
    left = [i for i in reader.inds[first] if i not in bond]
    right = [i for i in reader.legs if i not in left]
    u = reader.array(first, *((i,) for i in left), bond)
    vh = reader.array(second, bond, *((i,) for i in right))
    return SVD(u, reader.scaled(reader.array(vector, bond)), vh, tuple(reader.legs.index(i) for i in left))


def _read_low_rank(reader: NetworkReader) -> LowRank:
    if len(reader.legs) != 2:
        reader.refuse(f"{len(reader.legs)} open indices")
    row, column = reader.legs
    left, right = reader.tensors_with([(row,), (column,)])
    reader.remaining([left, right], 0)
    bond = reader.bond(left, right)
    return LowRank(reader.scaled(reader.array(left, (row,), bond)), reader.array(right, bond, (column,)))


def _read_kronecker_terms(reader: NetworkReader) -> KroneckerTerms:
    if len(reader.legs) != 4:
        reader.refuse(f"{len(reader.legs)} open indices")
    p, q, p_in, q_in = reader.legs
    left, b, c = reader.tensor_with(p, p_in), reader.tensor_with(q), reader.tensor_with(q_in)
    term = tuple(i for i in reader.inds[left] if i not in reader.legs)
    reader.remaining({left, b, c}, 0)
    if b == c:
        right: Sequence[Array | LowRank] = list(reader.array(b, term, (q,), (q_in,)))
    else:
        bond = tuple(i for i in reader.bond(b, c) if i not in term)
        factors = zip(reader.array(b, term, (q,), bond), reader.array(c, term, bond, (q_in,)), strict=True)
        right = list(itertools.starmap(LowRank, factors))
    return KroneckerTerms(reader.scaled(reader.array(left, term, (p,), (p_in,))), right)


_READERS: dict[type, Callable[[NetworkReader], Format]] = {
    TensorTrain: partial(_read_train, TensorTrain),
    TTMatrix: partial(_read_train, TTMatrix),
    Vidal: _read_vidal,
    Tucker: _read_tucker,
    CP: _read_cp,
    SVD: _read_svd,
    LowRank: _read_low_rank,
    KroneckerTerms: _read_kronecker_terms,
}


class NetworkReader:
    """The tensors of `tn`, by number, to be read as a format of the name `kind` with the open indices `legs`.

    Errors name `function` and its `parameter`.
    """

    def __init__(
        self, tn: qtn.TensorNetwork, kind: str, legs: Indices, function: str = "from_network", parameter: str = "tn"
    ) -> None:
        self.tn, self.kind, self.legs, self.function, self.parameter = tn, kind, legs, function, parameter
        self.arrays = as_arrays(function, tn)
        self.inds = [tuple(tensor.inds) for tensor in tn]
        self.tags = [frozenset(tensor.tags) for tensor in tn]
        self.owners: defaultdict[str, set[int]] = defaultdict(set)  # numbers of the tensors with an index
        for k, i in ((k, i) for k, inds in enumerate(self.inds) for i in inds):
            self.owners[i].add(k)

    def tensor_with(self, *legs: str) -> int:
        """Return the tensor that has all of these open indices."""
        numbers = set.intersection(*(self.owners[leg] for leg in legs))
        if len(numbers) != 1:
            self.refuse(f"indices {' and '.join(legs)} in {len(numbers)} tensors")
        return numbers.pop()

    def tensors_with(self, groups: Sequence[Indices]) -> list[int]:
        """Return a tensor per group of open indices, all of them different."""
        numbers = [self.tensor_with(*group) for group in groups]
        if len(set(numbers)) < len(numbers):
            self.refuse("legs of several parts in one tensor")
        return numbers

    def remaining(self, known: Collection[int], count: int) -> list[int]:
        """Return the `count` tensors that are not in `known`."""
        numbers = sorted(set(range(len(self.inds))) - set(known))
        if len(numbers) != count:
            self.refuse(f"{len(self.inds)} tensors instead of {len(known) + count}")
        return numbers

    def bond(self, a: int, b: int) -> Indices:
        """Return the indices between two tensors: none for a product, several for a bond that is not fused."""
        return tuple(i for i in self.inds[a] if i in self.inds[b])

    def array(self, k: int, *groups: Indices) -> Array:
        """Return tensor k with one leg per group of indices, of size 1 for an empty group."""
        order = [i for group in groups for i in group]
        if sorted(order) != sorted(self.inds[k]):
            self.refuse(f"a tensor with indices {', '.join(self.inds[k]) or 'none'} where {', '.join(order)} are due")
        a = self.arrays[k].transpose([self.inds[k].index(i) for i in order])
        size = dict(zip(order, a.shape, strict=True))
        return a.reshape([math.prod(size[i] for i in group) for group in groups])

    def scaled(self, a: Array) -> Array:
        """Return `a` times 10**exponent of the network."""
        factor, e = binary_exponent(self.tn)
        advice = "only trains have an exponent of their own"
        return shift_in_range(
            a * a.real.dtype.type(factor), e, f"{self.function}: every entry of a {self.kind}", advice
        )

    def refuse(self, structure: str) -> NoReturn:
        """Raise because the network does not have the structure of the format."""
        raise ArgumentError(
            f"{self.function}: {self.parameter} must have the structure of a {self.kind}, got {structure}; "
            "pass another kind, or contract and split tensors first."
        )
