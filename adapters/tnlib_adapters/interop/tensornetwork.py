"""Convert to and from Google's TensorNetwork: finite matrix product states and operators.

A state core has legs (l, n, r), an operator core (l, r, row, column). The norm is in the cores.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tnlib._errors import ArgumentError
from tnlib._validate import import_optional
from tnlib.formats.train.format import TensorTrain
from tnlib.formats.train.tt_matrix import TTMatrix
from tnlib_adapters.interop._cores import as_one_precision, find_center, with_scale, wrong_object, wrong_value


def from_tensornetwork(obj: Any) -> TensorTrain | TTMatrix:
    """Return a FiniteMPS or FiniteMPO of TensorNetwork as a train.

    Parameters
    ----------
    obj
        A `tensornetwork.FiniteMPS` or FiniteMPO, of the numpy, pytorch or symmetric backend. Blocks of the symmetric
        backend become dense.

    Returns
    -------
    TensorTrain | TTMatrix
        Detached copies of the tensors. `center` is measured; if several cores qualify, it is `obj.center_position`.

    Raises
    ------
    ArgumentTypeError
        If `obj` is another object, such as an InfiniteMPS, or mixes precisions or devices.
    ArgumentError
        If it is empty, its outer bonds are not 1, or a tensor has another number of legs.

    References
    ----------
    C. Roberts, A. Milsted, M. Ganahl, and others, "TensorNetwork: a library for physics and machine learning",
    arXiv:1905.01330 (2019).

    Examples
    --------
    >>> import numpy as np, tensornetwork as tn  # doctest: +SKIP
    >>> mps = tn.FiniteMPS([np.ones((1, 2, 2)), np.ones((2, 3, 1))], canonicalize=False)  # doctest: +SKIP
    >>> value = from_tensornetwork(mps)  # doctest: +SKIP
    >>> value.ranks, f"{value.full()[0, 0]:.1f}"  # doctest: +SKIP
    ((1, 2, 1), '2.0')
    """
    tn = import_optional("from_tensornetwork", "tensornetwork", "tensornetwork")
    if not isinstance(obj, tn.FiniteMPS | tn.FiniteMPO):
        raise wrong_object("from_tensornetwork", obj, "a FiniteMPS or a FiniteMPO")
    state = isinstance(obj, tn.FiniteMPS)
    # get_tensor multiplies the last tensor of a state by its connector_matrix
    tensors = [obj.get_tensor(k) for k in range(len(obj))] if state else list(obj.tensors)
    n_legs = 3 if state else 4
    if not tensors or any(len(a.shape) != n_legs for a in tensors):
        raise ArgumentError(
            f"from_tensornetwork: obj must have tensors of {n_legs} legs, got {[len(a.shape) for a in tensors]}; "
            f"give it one tensor ({'l, n, r' if state else 'l, r, row, column'}) per site."
        )
    dense = [a.todense() if isinstance(a, tn.BlockSparseTensor) else a for a in tensors]
    cores = as_one_precision("from_tensornetwork", "tensor", dense)
    if state:
        return TensorTrain(cores, find_center(cores, obj.center_position))
    cores = [np.ascontiguousarray(np.moveaxis(core, 1, 3)) for core in cores]  # l m n r
    return TTMatrix(cores, find_center(cores))


def to_tensornetwork(value: TensorTrain | TTMatrix) -> Any:
    """Return `value` as a FiniteMPS or FiniteMPO of TensorNetwork, with the numpy backend.

    Parameters
    ----------
    value
        A TensorTrain or TTMatrix.

    Returns
    -------
    tensornetwork.FiniteMPS | tensornetwork.FiniteMPO
        With copies of the cores, of one dtype; `log_scale` is absorbed into the centre. The centre of a state becomes
        `center_position`; a state without one is not canonicalized, because FiniteMPS would normalize it.

    Raises
    ------
    ArgumentTypeError
        If `value` is another format.
    ArgumentError
        If the scale of `value` exceeds the range of its dtype.

    Examples
    --------
    >>> import numpy as np, tnlib  # doctest: +SKIP
    >>> mps = to_tensornetwork(tnlib.tt_svd(np.ones((2, 3))).value)  # doctest: +SKIP
    >>> mps.center_position, f"{mps.norm(mps.tensors[1]):.4f}"  # doctest: +SKIP
    (1, '2.4495')
    """
    if not isinstance(value, TensorTrain | TTMatrix):
        raise wrong_value("to_tensornetwork", value, "a TensorTrain or a TTMatrix")
    tn = import_optional("to_tensornetwork", "tensornetwork", "tensornetwork")
    cores = with_scale("to_tensornetwork", value)
    if isinstance(value, TTMatrix):
        cores = [np.ascontiguousarray(np.moveaxis(core, 3, 1)) for core in cores]  # l r m n
        return tn.FiniteMPO(cores, backend="numpy")
    state = tn.FiniteMPS(cores, canonicalize=False, backend="numpy")
    state.center_position = value.center  # the constructor takes a centre only if it may normalize
    return state
