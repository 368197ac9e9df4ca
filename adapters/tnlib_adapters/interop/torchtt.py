"""Convert to and from torchTT: trains and TT-matrices in torch, without centre and scale."""

from __future__ import annotations

import warnings
from typing import Any

from tnlib._errors import ArgumentError
from tnlib._validate import import_optional
from tnlib.formats.train.format import TensorTrain
from tnlib.formats.train.tt_matrix import TTMatrix
from tnlib_adapters.interop._cores import as_one_precision, find_center, to_torch, with_scale, wrong_object, wrong_value


def from_torchtt(obj: Any) -> TensorTrain | TTMatrix:
    """Return a `torchtt.TT` as a train.

    Parameters
    ----------
    obj
        A TT tensor or a TT operator.

    Returns
    -------
    TensorTrain | TTMatrix
        Detached copies of the cores; rows are the sizes M, columns N. `center` is measured.

    Raises
    ------
    ArgumentTypeError
        If `obj` is another object, or mixes precisions or devices.
    ArgumentError
        If it is empty.

    References
    ----------
    I.-G. Ion, D. Loukrezis, H. De Gersem, torchTT, https://github.com/ion-g-ion/torchTT.

    Examples
    --------
    >>> import numpy as np, tnlib
    >>> obj = to_torchtt(tnlib.TensorTrain([np.ones((1, 2, 2)), np.ones((2, 3, 1))]))
    >>> value = from_torchtt(obj + obj)
    >>> value.shape, value.ranks, f"{value.full()[0, 0]:.1f}"
    ((2, 3), (1, 4, 1), '4.0')
    """
    torchtt = _import("from_torchtt")
    if not isinstance(obj, torchtt.TT):
        raise wrong_object("from_torchtt", obj, "a TT")
    if not obj.cores:
        raise ArgumentError("from_torchtt: obj must have a core, got an empty TT; a train has at least one.")
    cores = as_one_precision("from_torchtt", "core", obj.cores)
    train = TTMatrix if obj.is_ttm else TensorTrain
    return train(cores, find_center(cores))


def to_torchtt(value: TensorTrain | TTMatrix) -> Any:
    """Return `value` as a `torchtt.TT`, on the CPU.

    Parameters
    ----------
    value
        A TensorTrain or TTMatrix.

    Returns
    -------
    torchtt.TT
        With copies of the cores; `log_scale` is absorbed into the centre, which is not stored.

    Raises
    ------
    ArgumentTypeError
        If `value` is another format.
    ArgumentError
        If the scale of `value` exceeds the range of its dtype.

    Examples
    --------
    >>> import numpy as np, tnlib
    >>> f"{float(to_torchtt(tnlib.tt_svd(np.ones((2, 3))).value).norm()):.4f}"
    '2.4495'
    """
    if not isinstance(value, TensorTrain | TTMatrix):
        raise wrong_value("to_torchtt", value, "a TensorTrain or a TTMatrix")
    torchtt = _import("to_torchtt")
    return torchtt.TT(to_torch(with_scale("to_torchtt", value)))


def _import(function: str) -> Any:
    with warnings.catch_warnings():  # torchTT warns if its compiled extension is missing; it is not used here
        warnings.simplefilter("ignore", UserWarning)
        return import_optional(function, "torchtt", "torchTT")
