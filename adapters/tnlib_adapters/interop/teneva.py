"""Convert to and from teneva: a tensor train is a list of numpy cores (l, n, r), without centre and scale."""

from __future__ import annotations

from typing import Any

from tnlib._errors import ArgumentTypeError
from tnlib._typing import Array
from tnlib.formats.train.format import TensorTrain
from tnlib_adapters.interop._cores import as_one_precision, find_center, with_scale, wrong_object, wrong_value


def from_teneva(obj: Any) -> TensorTrain:
    """Return a list of cores of teneva as a train.

    Parameters
    ----------
    obj
        A list of numpy arrays (l, n, r).

    Returns
    -------
    TensorTrain
        Copies of the cores; `center` is measured.

    Raises
    ------
    ArgumentTypeError
        If `obj` is not such a list, or mixes precisions. For a stabilised train, a pair of a list and a power of two,
        pass the list and multiply by the power.
    ArgumentError
        If neighbouring ranks differ, or an entry is not finite.

    References
    ----------
    A. Chertkov, G. Ryzhakov, I. Oseledets, "Black box approximation in the tensor train format initialized by ANOVA
    decomposition", SIAM J. Sci. Comput. 45 (2023).

    Examples
    --------
    >>> import teneva
    >>> value = from_teneva(teneva.const([2, 3, 4], v=5.0))
    >>> value.ranks, f"{value.full()[1, 2, 3]:.1f}"
    ((1, 1, 1, 1), '5.0')
    """
    if not isinstance(obj, list | tuple) or not obj:
        raise wrong_object("from_teneva", obj, "a list of cores")
    if len(obj) == 2 and isinstance(obj[0], list) and not isinstance(obj[1], list):
        raise ArgumentTypeError(
            "from_teneva: obj must be a list of cores, got a list of cores and a power of two; pass the first and "
            "multiply with the second."
        )
    cores = as_one_precision("from_teneva", "core", list(obj))
    return TensorTrain(cores, find_center(cores))


def to_teneva(value: TensorTrain) -> list[Array]:
    """Return `value` as a list of cores for teneva.

    Parameters
    ----------
    value
        A TensorTrain. teneva has no Tucker and CP, and only square TT-matrices with legs of size 2.

    Returns
    -------
    list of numpy.ndarray
        Copies of the cores (l, n, r), of one dtype; `log_scale` is absorbed into the centre, which is not stored. Cores
        may be complex, which not all functions of teneva support.

    Raises
    ------
    ArgumentTypeError
        If `value` is another format.
    ArgumentError
        If the scale of `value` exceeds the range of its dtype.

    Examples
    --------
    >>> import numpy as np, teneva, tnlib
    >>> f"{teneva.norm(to_teneva(tnlib.tt_svd(np.ones((2, 3))).value)):.4f}"
    '2.4495'
    """
    if not isinstance(value, TensorTrain):
        raise wrong_value("to_teneva", value, "a TensorTrain")
    return with_scale("to_teneva", value)
