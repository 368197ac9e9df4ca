"""Convert to and from TensorLy: trains, TT-matrices, Tucker and CP tensors, in any backend.

TensorLy's formats are lists of arrays with the same legs as in tnlib, without centre and scale. Missing weights of a
CP tensor are ones.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

from tnlib._errors import ArgumentError
from tnlib._validate import import_optional
from tnlib.formats.cp.format import CP
from tnlib.formats.train.format import TensorTrain
from tnlib.formats.train.tt_matrix import TTMatrix
from tnlib.formats.tucker.format import Tucker
from tnlib_adapters.interop._cores import (
    as_copies,
    as_one_precision,
    find_center,
    with_scale,
    wrong_object,
    wrong_value,
)

Value: TypeAlias = TensorTrain | TTMatrix | Tucker | CP


def from_tensorly(obj: Any) -> Value:
    """Return a factorised tensor of TensorLy in the corresponding tnlib format.

    Parameters
    ----------
    obj
        A TTTensor, TTMatrix, TuckerTensor or CPTensor, or a list of cores (l, n, r) or (l, m, n, r). Arrays may be
        numpy's or torch's; torch tensors are detached.

    Returns
    -------
    TensorTrain | TTMatrix | Tucker | CP
        The same arrays. `center` of a train is measured.

    Raises
    ------
    ArgumentTypeError
        If `obj` is another object (a tensor ring, PARAFAC2, a regression), or mixes precisions or devices.
    ArgumentError
        If neighbouring ranks differ, or an entry is not finite.

    References
    ----------
    J. Kossaifi, Y. Panagakis, A. Anandkumar, M. Pantic, "TensorLy: tensor learning in Python", JMLR 20 (2019).

    Examples
    --------
    >>> import numpy as np
    >>> from tensorly.decomposition import tucker
    >>> x = np.add.outer(np.arange(4.0), np.arange(5.0))
    >>> value = from_tensorly(tucker(x, rank=[2, 2]))
    >>> value.ranks, f"{np.linalg.norm(value.full() - x):.4f}"
    ((2, 2), '0.0000')
    """
    tl = import_optional("from_tensorly", "tensorly", "tensorly")
    if isinstance(obj, tl.cp_tensor.CPTensor):
        factors = as_copies("from_tensorly", "factor", list(obj.factors))
        if obj.weights is None:
            return CP(np.ones(factors[0].shape[-1], factors[0].real.dtype), factors)
        weights, *factors = as_copies("from_tensorly", "array", [obj.weights, *obj.factors])
        return CP(weights, factors)
    if isinstance(obj, tl.tucker_tensor.TuckerTensor):
        core, *factors = as_copies("from_tensorly", "array", [obj.core, *obj.factors])
        return Tucker(core, factors)
    if not isinstance(obj, tl.tt_tensor.TTTensor | tl.tt_matrix.TTMatrix | list | tuple):
        raise wrong_object("from_tensorly", obj, "a TTTensor, TTMatrix, TuckerTensor, CPTensor or a list of cores")
    cores = as_one_precision("from_tensorly", "core", list(obj))
    if not cores or len({core.ndim for core in cores}) > 1 or cores[0].ndim not in (3, 4):
        raise ArgumentError(
            f"from_tensorly: obj must be cores of 3 legs each or of 4 legs each, got {[core.ndim for core in cores]}; "
            "wrap weights and factors in a CPTensor, a core and factors in a TuckerTensor."
        )
    train = TensorTrain if cores[0].ndim == 3 else TTMatrix
    return train(cores, find_center(cores))


def to_tensorly(value: Value) -> Any:
    """Return `value` as a factorised tensor of TensorLy, in the current backend.

    Parameters
    ----------
    value
        A TensorTrain, TTMatrix, Tucker or CP.

    Returns
    -------
    tensorly.tt_tensor.TTTensor | TTMatrix | TuckerTensor | CPTensor
        Copies of the arrays, of one dtype (weights of a CP keep theirs). `log_scale` is absorbed into the centre, which
        is not stored.

    Raises
    ------
    ArgumentTypeError
        If `value` is another format.
    ArgumentError
        If the scale of a train exceeds the range of its dtype.

    Examples
    --------
    >>> import numpy as np, tnlib
    >>> obj = to_tensorly(tnlib.tt_svd(np.ones((2, 3, 4))).value)
    >>> obj.rank, f"{obj.to_tensor().sum():.1f}"
    ((1, 1, 1, 1), '24.0')
    """
    tl = import_optional("to_tensorly", "tensorly", "tensorly")
    match value:
        case TensorTrain():
            return tl.tt_tensor.TTTensor([tl.tensor(core) for core in with_scale("to_tensorly", value)])
        case TTMatrix():
            return tl.tt_matrix.TTMatrix([tl.tensor(core) for core in with_scale("to_tensorly", value)])
        case Tucker():
            core, *factors = (tl.tensor(np.array(a, value.dtype)) for a in value.arrays())
            return tl.tucker_tensor.TuckerTensor((core, factors))
        case CP():
            dtype = np.result_type(*value.factors)
            factors = [tl.tensor(np.array(factor, dtype)) for factor in value.factors]
            return tl.cp_tensor.CPTensor((tl.tensor(np.array(value.weights)), factors))
    raise wrong_value("to_tensorly", value, "a TensorTrain, TTMatrix, Tucker or CP")
