"""Convert to and from tntorch: trains with CP or Tucker factors per leg, TT- and CP-matrices.

A core (l, n, r) is a train core; a core (n, R) is a CP factor, equivalent to a diagonal core (R, n, R); a factor
`Us[k]` (n, s) multiplies leg k. The outer bonds need not be 1, tntorch sums over them.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

from tnlib._errors import ArgumentError
from tnlib._typing import Array
from tnlib._validate import import_optional
from tnlib.formats.cp.format import CP
from tnlib.formats.train.format import TensorTrain
from tnlib.formats.train.tt_matrix import TTMatrix
from tnlib.formats.train.tt_svd import tt_svd
from tnlib.formats.tucker.format import Tucker
from tnlib_adapters.interop._cores import as_one_precision, find_center, to_torch, with_scale, wrong_object, wrong_value

Value: TypeAlias = TensorTrain | TTMatrix | Tucker | CP


def from_tntorch(obj: Any) -> TensorTrain | TTMatrix | CP:
    """Return a tensor or matrix of tntorch in the corresponding tnlib format.

    Parameters
    ----------
    obj
        A `tntorch.Tensor`, TTMatrix or CPMatrix, without a batch.

    Returns
    -------
    TensorTrain | TTMatrix | CP
        CP with unit weights if every core is a CP factor. Otherwise a train: Tucker factors are multiplied into their
        cores (`tnlib.convert(value, tnlib.Tucker)` recovers them), CP factors become diagonal cores. The first legs of
        a matrix, tntorch's inputs, are rows. Tensors are detached; `center` is measured.

    Raises
    ------
    ArgumentTypeError
        If `obj` is another object, or mixes precisions or devices.
    ArgumentError
        If it is a batch of tensors.

    References
    ----------
    M. Usvyatsov, R. Ballester-Ripoll, K. Schindler, "tntorch: tensor network learning with PyTorch", JMLR 23 (2022).

    Examples
    --------
    >>> import tntorch, torch
    >>> cores = [torch.ones(1, 2, 3), torch.ones(4, 3), torch.ones(3, 5, 1)]  # the one in the middle is a CP factor
    >>> value = from_tntorch(tntorch.Tensor(cores))
    >>> value.shape, value.ranks, f"{value.full()[0, 0, 0]:.1f}"
    ((2, 4, 5), (1, 3, 3, 1), '3.0')
    """
    tn = import_optional("from_tntorch", "tntorch", "tntorch")
    if not isinstance(obj, tn.Tensor | tn.TTMatrix | tn.CPMatrix):
        raise wrong_object("from_tntorch", obj, "a Tensor, a TTMatrix or a CPMatrix")
    if getattr(obj, "batch", False):
        raise ArgumentError(
            f"from_tntorch: obj must be one tensor, got a batch of {len(obj.cores[0])}; take them one by one."
        )
    matrix = not isinstance(obj, tn.Tensor)
    factors = [None] * len(obj.cores) if matrix else list(obj.Us)
    present = [k for k, u in enumerate(factors) if u is not None]
    arrays = as_one_precision("from_tntorch", "core", [*obj.cores, *(factors[k] for k in present)])
    cores = arrays[: len(obj.cores)]
    for k, u in zip(present, arrays[len(cores) :], strict=True):
        cores[k] = np.moveaxis(np.tensordot(u, cores[k], (1, -2)), 0, -2)  # (l) n [s] r
    if not matrix and all(core.ndim == 2 for core in cores):
        return CP(np.ones(cores[0].shape[1], cores[0].real.dtype), cores)
    cores = [_as_core(core, 4 if matrix else 3) for core in cores]
    cores[0] = cores[0].sum(axis=0, keepdims=True) if len(cores[0]) > 1 else cores[0]
    cores[-1] = cores[-1].sum(axis=-1, keepdims=True) if cores[-1].shape[-1] > 1 else cores[-1]
    train = TTMatrix if matrix else TensorTrain
    return train(cores, find_center(cores))


def to_tntorch(value: Value) -> Any:
    """Return `value` as a tensor or matrix of tntorch, on the CPU.

    Parameters
    ----------
    value
        A TensorTrain, TTMatrix, Tucker or CP.

    Returns
    -------
    tntorch.Tensor | tntorch.TTMatrix
        Copies: a train as its cores, with `log_scale` absorbed into its centre; a CP as factors, the first scaled by
        the weights; a Tucker as its factors and an exact train of its core. The centre is not stored.

    Raises
    ------
    ArgumentTypeError
        If `value` is another format.
    ArgumentError
        If the scale of a train exceeds the range of its dtype.

    Examples
    --------
    >>> import numpy as np, tnlib
    >>> obj = to_tntorch(tnlib.CP([2.0], [np.ones((3, 1)), np.ones((4, 1))]))
    >>> [tuple(core.shape) for core in obj.cores], f"{float(obj.torch().sum()):.1f}"
    ([(3, 1), (4, 1)], '24.0')
    """
    if not isinstance(value, TensorTrain | TTMatrix | Tucker | CP):
        raise wrong_value("to_tntorch", value, "a TensorTrain, TTMatrix, Tucker or CP")
    tn = import_optional("to_tntorch", "tntorch", "tntorch")
    match value:
        case TensorTrain():
            return tn.Tensor(to_torch(with_scale("to_tntorch", value)))
        case TTMatrix():
            cores = to_torch(with_scale("to_tntorch", value))
            return tn.TTMatrix(cores, list(value.ranks[1:-1]), list(value.row_shape), list(value.col_shape))
        case CP():
            first, *others = (np.array(factor, value.dtype) for factor in value.factors)
            return tn.Tensor(to_torch([first * value.weights, *others]))
        case Tucker():
            core, *factors = (np.array(a, value.dtype) for a in value.arrays())
            train = tt_svd(core).value
            return tn.Tensor(to_torch(with_scale("to_tntorch", train)), Us=to_torch(factors))


def _as_core(a: Array, n_legs: int) -> Array:
    """Return a CP factor (n, R) or (m, n, R) as a core (R, ..., R), diagonal in its bonds."""
    if a.ndim == n_legs:
        return a
    rank = a.shape[-1]
    core = np.zeros((rank, *a.shape), a.dtype)
    core[np.arange(rank), ..., np.arange(rank)] = np.moveaxis(a, -1, 0)
    return core
