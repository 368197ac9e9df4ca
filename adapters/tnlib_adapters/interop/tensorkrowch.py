"""Convert to and from TensorKrowch: matrix product states and operators as torch models.

An MPO core has legs (left, input, right, output). Inputs are row legs here, as in its `mat_to_mpo`: the model maps data
x to `x @ A`. Open chains end in two vectors, `left_node` and `right_node`, which are contracted into the end cores.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tnlib._errors import ArgumentError
from tnlib._validate import import_optional
from tnlib.formats.train.format import TensorTrain
from tnlib.formats.train.tt_matrix import TTMatrix
from tnlib_adapters.interop._cores import as_one_precision, find_center, to_torch, with_scale, wrong_object, wrong_value

_LEGS = {"MPS": ["left", "input", "right"], "MPO": ["left", "input", "output", "right"]}


def from_tensorkrowch(obj: Any) -> TensorTrain | TTMatrix:
    """Return an MPS or MPO of TensorKrowch as a train.

    Parameters
    ----------
    obj
        An open `tensorkrowch.models.MPS`, MPSLayer or MPO. The list of input features is dropped.

    Returns
    -------
    TensorTrain | TTMatrix
        Detached copies of the tensors; leg k is feature k, inputs are rows. `center` is measured.

    Raises
    ------
    ArgumentTypeError
        If `obj` is another model, or mixes precisions or devices.
    ArgumentError
        If its boundary is periodic.

    References
    ----------
    J. R. Pareja Monturiol, D. Perez-Garcia, A. Pozas-Kerstjens, "TensorKrowch: smooth integration of tensor networks
    in machine learning", Quantum 8 (2024).

    Examples
    --------
    >>> import tensorkrowch as tk
    >>> value = from_tensorkrowch(tk.models.MPS(n_features=3, phys_dim=2, bond_dim=2, init_method="ones"))
    >>> value.ranks, f"{value.full()[0, 1, 0]:.1f}"
    ((1, 2, 2, 1), '4.0')
    """
    tk = import_optional("from_tensorkrowch", "tensorkrowch", "tensorkrowch")
    if not isinstance(obj, tk.models.MPS | tk.models.MPO):
        raise wrong_object("from_tensorkrowch", obj, "an MPS or an MPO")
    if obj.boundary != "obc":
        raise ArgumentError(
            f"from_tensorkrowch: obj must have an open boundary, got {obj.boundary!r}; a train has no bond between its "
            "ends."
        )
    names = _LEGS["MPS" if isinstance(obj, tk.models.MPS) else "MPO"]
    nodes = list(obj.mats_env)
    left, right, *tensors = as_one_precision(
        "from_tensorkrowch", "tensor", [a.tensor for a in (obj.left_node, obj.right_node, *nodes)]
    )
    cores = [
        a.transpose([node.axes_names.index(name) for name in names]) for node, a in zip(nodes, tensors, strict=True)
    ]
    cores[0] = np.tensordot(left, cores[0], (0, 0))[None]  # 1 [l] n (m) r
    cores[-1] = np.tensordot(cores[-1], right, (-1, 0))[..., None]  # l n (m) [r] 1
    cores = [np.ascontiguousarray(core) for core in cores]
    train = TensorTrain if len(names) == 3 else TTMatrix
    return train(cores, find_center(cores))


def to_tensorkrowch(value: TensorTrain | TTMatrix) -> Any:
    """Return `value` as an MPS or MPO of TensorKrowch, on the CPU.

    Parameters
    ----------
    value
        A TensorTrain, or a TTMatrix with inputs as rows: pass `value.T` if rows are outputs.

    Returns
    -------
    tensorkrowch.models.MPS | tensorkrowch.models.MPO
        With trainable copies of the cores, every feature an input. `log_scale` is absorbed into the centre, which is
        not stored. TensorKrowch pads the end cores with zeros.

    Raises
    ------
    ArgumentTypeError
        If `value` is another format.
    ArgumentError
        If the scale of `value` exceeds the range of its dtype.

    Examples
    --------
    >>> import numpy as np, tnlib, torch
    >>> mps = to_tensorkrowch(tnlib.tt_svd(np.ones((2, 3))).value)
    >>> ones = [torch.ones(1, 2, dtype=torch.float64), torch.ones(1, 3, dtype=torch.float64)]
    >>> f"{mps(ones).detach().item():.1f}"
    '6.0'
    """
    if not isinstance(value, TensorTrain | TTMatrix):
        raise wrong_value("to_tensorkrowch", value, "a TensorTrain or a TTMatrix")
    tk = import_optional("to_tensorkrowch", "tensorkrowch", "tensorkrowch")
    cores = with_scale("to_tensorkrowch", value)
    if isinstance(value, TTMatrix):
        cores = [core.swapaxes(2, 3) for core in cores]  # l m r n
        cores[-1] = cores[-1][:, :, 0]
    else:
        cores[-1] = cores[-1][..., 0]
    cores[0] = cores[0][0]
    model = tk.models.MPS if isinstance(value, TensorTrain) else tk.models.MPO
    return model(tensors=to_torch([np.ascontiguousarray(core) for core in cores]))
