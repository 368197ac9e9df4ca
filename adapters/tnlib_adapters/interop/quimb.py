"""Convert to and from matrix product states and operators of quimb.

quimb identifies indices by name, without an order. An end tensor has no outer bond; `exponent` is the base-10 logarithm
of a common factor; the upper index of an operator is the row. quimb writes pickle files, which execute code when
loaded; `tnlib.save` stores the same values without pickle.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from tnlib._errors import ArgumentError, ArgumentTypeError
from tnlib._fit import refuse_other_arrays
from tnlib._typing import Array
from tnlib._validate import import_optional
from tnlib.formats.train.format import TensorTrain
from tnlib.formats.train.tt_matrix import TTMatrix
from tnlib.formats.train.vidal import Vidal
from tnlib_adapters.interop._cores import as_one_precision, find_center


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
        The same arrays, of one dtype; leg k is site k, row legs are the upper indices. `exponent` becomes `log_scale`.
        `center` is the first orthogonality centre, as measured, None if there is none. Index names and tags are
        dropped.

    Raises
    ------
    ArgumentTypeError
        If `obj` is neither a MatrixProductState nor a MatrixProductOperator.
    ArgumentError
        If it is cyclic, does not have one tensor per site, or skips a site.
    ModuleNotFoundError
        If quimb is not installed.

    Examples
    --------
    >>> import numpy as np, quimb.tensor as qtn
    >>> ghz = from_quimb(qtn.MPS_ghz_state(4))
    >>> ghz.ranks, ghz.center, f"{ghz.full()[1, 1, 1, 1]:.4f}"
    ((1, 2, 2, 2, 1), None, '0.7071')
    """
    qtn = import_optional("from_quimb", "quimb.tensor", "quimb")
    if isinstance(obj, qtn.MatrixProductState):
        ids = [obj.site_ind_id]
    elif isinstance(obj, qtn.MatrixProductOperator):
        ids = [obj.upper_ind_id, obj.lower_ind_id]
    else:
        raise ArgumentTypeError(
            f"from_quimb: obj must be a MatrixProductState or a MatrixProductOperator, got a {type(obj).__name__}; "
            "bring it to one of the two first."
        )
    if obj.cyclic:
        raise ArgumentError(
            f"from_quimb: obj must be an open chain, got a cyclic {type(obj).__name__}; a train has no bond between "
            "its ends, bring it to an open chain first."
        )
    legs = [_legs(obj, name) for name in ids]
    if len(set(map(len, legs))) > 1 or obj.num_tensors != len(legs[0]):
        raise ArgumentError(
            f"from_quimb: obj must have one tensor per site, got {obj.num_tensors} tensors and {len(legs[0])} sites; "
            "contract what belongs to one site first."
        )
    tensors = [_tensor(obj, [of_kind[k] for of_kind in legs]) for k in range(len(legs[0]))]
    bonds = [(), *itertools.starmap(_bond, itertools.pairwise(tensors)), ()]
    arrays = as_one_precision("from_quimb", "tensor", [tensor.data for tensor in tensors])
    cores = [
        _core(k, arrays[k], tensor.inds, bonds[k], [of_kind[k] for of_kind in legs], bonds[k + 1])
        for k, tensor in enumerate(tensors)
    ]
    kind = TensorTrain if len(ids) == 1 else TTMatrix
    return kind(tuple(cores), find_center(cores), float(obj.exponent) * math.log(10))


def to_quimb(value: TensorTrain | TTMatrix) -> Any:
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

    Raises
    ------
    ArgumentTypeError
        If `value` is neither a TensorTrain nor a TTMatrix.
    ModuleNotFoundError
        If quimb is not installed.

    Examples
    --------
    >>> import numpy as np, tnlib
    >>> bell = to_quimb(tnlib.tt_svd(np.eye(2) / np.sqrt(2)).value)
    >>> bell.site_inds, f"{bell.entropy(1):.4f}"  # in bits
    (('k0', 'k1'), '1.0000')
    """
    if not isinstance(value, TensorTrain | TTMatrix):
        hint = "pass value.train()" if isinstance(value, Vidal) else "pass a train, for example tnlib.tt_svd(x).value"
        raise ArgumentTypeError(
            f"to_quimb: value must be a TensorTrain or a TTMatrix, got a {type(value).__name__}; {hint}."
        )
    refuse_other_arrays("to_quimb", "value", value)
    qtn = import_optional("to_quimb", "quimb.tensor", "quimb")
    arrays = [np.array(core, value.dtype, order="C") for core in value.cores]
    arrays[0] = arrays[0][0]  # quimb recognises an open chain by the rank of its first array
    arrays[-1] = arrays[-1][..., 0]
    if isinstance(value, TensorTrain):
        network = qtn.MatrixProductState(arrays, shape="lpr")
    else:
        network = qtn.MatrixProductOperator(arrays, shape="ludr")
    network.exponent = value.log_scale / math.log(10)
    return network


def _legs(obj: Any, name: str) -> list[str]:
    """Return the outer indices for sites 0, 1, ... by a pattern such as k{}."""
    pattern = re.compile(r"(\d+)".join(re.escape(part) for part in name.split("{}")))
    indices = {int(match[1]): index for index in obj.outer_inds() if (match := pattern.fullmatch(index))}
    if not indices or sorted(indices) != list(range(len(indices))):
        raise ArgumentError(
            f"from_quimb: obj must have outer indices {name.format(0)}, {name.format(1)} and so on without gaps, got "
            f"those of sites {sorted(indices)}; number the sites from 0, or fill the empty ones."
        )
    return [indices[site] for site in range(len(indices))]


def _tensor(obj: Any, legs: Sequence[str]) -> Any:
    """Return the tensor with all of these outer indices."""
    holders = {tid for leg in legs for tid in obj.ind_map[leg]}
    if len(holders) > 1:
        raise ArgumentError(
            f"from_quimb: obj must hold indices {' and '.join(legs)} in one tensor, got {len(holders)} that hold them; "
            "contract these first."
        )
    return obj.tensor_map[holders.pop()]


def _bond(left: Any, right: Any) -> tuple[str, ...]:
    """Return the indices shared by two neighbours: none for a product state, several for an unfused bond."""
    return tuple(index for index in left.inds if index in right.inds)


def _core(
    k: int, a: Array, inds: Sequence[str], left: Sequence[str], legs: Sequence[str], right: Sequence[str]
) -> Array:
    """Return the array with legs `inds` as (l, legs ..., r)."""
    order = [*left, *legs, *right]
    if sorted(order) != sorted(inds):
        extra = ", ".join(sorted(set(inds) - set(order))) or "one index twice"
        raise ArgumentError(
            f"from_quimb: the tensor of site {k} must share bonds with its neighbours alone, got {extra} beside them; "
            "bring obj to a chain first."
        )
    core = a.transpose([list(inds).index(index) for index in order])
    rows, sizes = math.prod(core.shape[: len(left)]), core.shape[len(left) : len(left) + len(legs)]
    return core.reshape(rows, *sizes, -1)
