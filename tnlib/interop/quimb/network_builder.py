"""Formats as quimb networks: `to_network` for any format, `to_quimb` for chains as quimb's own classes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import numpy as np
import quimb.tensor as qtn

from tnlib._errors import ArgumentError
from tnlib._fit import refuse_other_arrays, wrong_type
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
from tnlib.interop.core_arrays import wrong_value
from tnlib.interop.quimb.network_arguments import as_index_names

Names: TypeAlias = tuple[str, ...]
_Tensor: TypeAlias = tuple[Array, Names, Names]  # data, indices, tags


def to_network(value: Format, *, names: Sequence[str] | None = None) -> qtn.TensorNetwork:
    """Return `value` as a quimb TensorNetwork with named indices and tags.

    Parameters
    ----------
    value
        Any format.
    names
        Names of the open indices; an operator's row legs before its column legs, of KroneckerTerms (positions,
        features) on both sides. By default k0, k1, ... and, for the columns of an operator, b0, b1, ...

    Returns
    -------
    quimb.tensor.TensorNetwork
        One tensor per array, copied. Diagonal factors (s of an SVD, weights of a CP, lambdas of a Vidal) are vectors on
        the index of their bond, which then joins three or more tensors; `spell_out` replaces such a hyperindex by a
        copy tensor. Tags of a tensor are the name of the format, its part (CORE, FACTOR, WEIGHTS, U, S, VH, LEFT,
        RIGHT, GAMMA, LAMBDA) and, at leg k, I{k}; the centre of a train has CENTER. Bonds of a train are bond1,
        bond2, ... `log_scale` becomes `exponent`. The right factors of KroneckerTerms are stacked into one tensor, or
        into two if all of them are LowRank, padded with zeros to the largest rank.

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
        advice = "decompose an array first, for example with tnlib.tt_svd"
        raise wrong_type("to_network", "value", "a format of tnlib", value, advice)
    default = leg_names(value)
    legs = default if names is None else as_index_names("to_network", "names", names)
    if len(legs) != len(default):
        raise ArgumentError(
            f"to_network: names must be {len(default)}, one per leg, got {len(legs)}; "
            "an operator's row legs come before its column legs."
        )
    tensors = list(tensors_of(value, default))
    bonds = {i for _, inds, _ in tensors for i in inds} - set(default)
    if conflicts := bonds & set(legs):
        raise ArgumentError(f"to_network: names must not be those of bonds, got {', '.join(conflicts)}; choose others.")
    renamed = dict(zip(default, legs, strict=True))
    tn = qtn.TensorNetwork(
        qtn.Tensor(np.array(a, order="C"), [renamed.get(i, i) for i in inds], (type(value).__name__, *tags))
        for a, inds, tags in tensors
    )
    tn.exponent = getattr(value, "log_scale", 0.0) / math.log(10)
    return tn


def to_quimb(value: TensorTrain | TTMatrix) -> qtn.MatrixProductState | qtn.MatrixProductOperator:
    """Return `value` as a MatrixProductState or MatrixProductOperator of quimb.

    Parameters
    ----------
    value
        A TensorTrain or TTMatrix. For a Vidal, pass `value.train()`: a quimb state holds no Schmidt values.

    Returns
    -------
    quimb.tensor.MatrixProductState | quimb.tensor.MatrixProductOperator
        Copies of the cores with quimb's default names: physical indices k0, k1, ... (rows; columns are b0, b1, ...),
        tags I0, I1, ... `log_scale` becomes `exponent`, which quimb includes in norms, overlaps, sums and dense arrays,
        but not in Schmidt values and local expectation values. The centre is not stored; quimb measures it.

    Examples
    --------
    >>> import numpy as np, tnlib
    >>> from tnlib.interop.quimb import to_quimb
    >>> bell = to_quimb(tnlib.tt_svd(np.eye(2) / np.sqrt(2)).value)
    >>> bell.site_inds, f"{bell.entropy(1):.4f}"  # in bits
    (('k0', 'k1'), '1.0000')
    """
    if not isinstance(value, TensorTrain | TTMatrix):
        raise wrong_value("to_quimb", value, "a TensorTrain or a TTMatrix")
    refuse_other_arrays("to_quimb", "value", value)
    arrays = [np.array(core, value.dtype, order="C") for core in value.cores]
    arrays[0] = arrays[0][0]  # quimb recognises an open chain by the rank of its first array
    arrays[-1] = arrays[-1][..., 0]
    is_state = isinstance(value, TensorTrain)
    kind, order = (qtn.MatrixProductState, "lpr") if is_state else (qtn.MatrixProductOperator, "ludr")
    network = kind(arrays, shape=order)
    network.exponent = value.log_scale / math.log(10)
    return network


def leg_names(value: Format) -> Names:
    """Return the default names of the open indices of `value`, in the order of its legs."""
    if isinstance(value, TTMatrix | KroneckerTerms | LowRank):  # with as many column legs as row legs
        return tuple(f"{side}{k}" for side in "kb" for k in range(np.size(value._legs) // 2))
    return tuple(f"k{k}" for k in range(value.ndim))


def _train_tensors(value: TensorTrain | TTMatrix, legs: Names) -> Iterator[_Tensor]:
    last = len(value.cores) - 1
    for k, core in enumerate(value.cores):
        center = ("CENTER",) if k == value.center else ()
        yield *_without_outer_bonds(core, k, legs[k :: last + 1], last), ("CORE", f"I{k}", *center)


def _vidal_tensors(value: Vidal, legs: Names) -> Iterator[_Tensor]:
    for k, gamma in enumerate(value.gammas):
        yield *_without_outer_bonds(gamma, k, legs[k : k + 1], len(legs) - 1), ("GAMMA", f"I{k}")
    for k, s in enumerate(value.lambdas):
        yield s, (f"bond{k + 1}",), ("LAMBDA",)


def _without_outer_bonds(core: Array, k: int, legs: Names, last: int) -> tuple[Array, Names]:
    """Return core k (l, legs ..., r) without the bonds of size 1 at the ends of the chain, and its indices."""
    outer = [0] * (k == 0) + [core.ndim - 1] * (k == last)
    inds = (f"bond{k}", *legs, f"bond{k + 1}")
    return core.squeeze(tuple(outer)), tuple(i for axis, i in enumerate(inds) if axis not in outer)


def _tucker_tensors(value: Tucker, legs: Names) -> Iterator[_Tensor]:
    bonds = tuple(f"bond{k}" for k in range(len(legs)))
    yield value.core, bonds, ("CORE",)
    for k, (factor, leg, bond) in enumerate(zip(value.factors, legs, bonds, strict=True)):
        yield factor, (leg, bond), ("FACTOR", f"I{k}")


def _cp_tensors(value: CP, legs: Names) -> Iterator[_Tensor]:
    yield value.weights, ("bond",), ("WEIGHTS",)
    for k, (factor, leg) in enumerate(zip(value.factors, legs, strict=True)):
        yield factor, (leg, "bond"), ("FACTOR", f"I{k}")


def _svd_tensors(value: SVD, legs: Names) -> Iterator[_Tensor]:
    left = value.left or ()
    right = [k for k in range(len(legs)) if k not in left]
    yield value.u, (*(legs[k] for k in left), "bond"), ("U", *(f"I{k}" for k in left))
    yield value.s, ("bond",), ("S",)
    yield value.vh, ("bond", *(legs[k] for k in right)), ("VH", *(f"I{k}" for k in right))


def _low_rank_tensors(value: LowRank, legs: Names) -> Iterator[_Tensor]:
    yield value.left, (legs[0], "bond"), ("LEFT",)
    yield value.right, ("bond", legs[1]), ("RIGHT",)


def _kronecker_tensors(value: KroneckerTerms, legs: Names) -> Iterator[_Tensor]:
    p, q, p_in, q_in = legs
    yield value.left, ("term", p, p_in), ("LEFT", "I0")
    low = [term for term in value.right if isinstance(term, LowRank)]
    if len(low) < len(value.right):
        yield np.stack([np.asarray(term) for term in value.right]), ("term", q, q_in), ("RIGHT", "I1")
        return
    rank, (m, n) = max(term.ranks[0] for term in low), low[0].shape
    left, right = np.zeros((len(low), m, rank), value.dtype), np.zeros((len(low), rank, n), value.dtype)
    for h, term in enumerate(low):
        left[h, :, : term.ranks[0]], right[h, : term.ranks[0]] = term.left, term.right
    yield left, ("term", q, "bond"), ("RIGHT", "I1")
    yield right, ("term", "bond", q_in), ("RIGHT", "I1")


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
