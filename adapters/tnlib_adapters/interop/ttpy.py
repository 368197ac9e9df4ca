"""Convert to and from ttpy (package `tt`): trains and TT-matrices with flat, Fortran-ordered cores.

Vectors and matrices number their legs as tnlib does, but flatten with the first leg fastest; in `full()` of a tnlib
matrix the first leg is slowest. ttpy computes in float64 and complex128.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tnlib._errors import ArgumentError, ArgumentTypeError
from tnlib._typing import Array
from tnlib._validate import import_optional
from tnlib.formats.train.format import TensorTrain
from tnlib.formats.train.tt_matrix import TTMatrix
from tnlib_adapters.interop._cores import as_one_precision, find_center, with_scale, wrong_object, wrong_value


def from_ttpy(obj: Any) -> TensorTrain | TTMatrix:
    """Return a `tt.vector` or `tt.matrix` as a train.

    Parameters
    ----------
    obj
        A vector (d, n, r, ps, core) or a matrix (n, m and its vector tt); ttpy need not be installed.

    Returns
    -------
    TensorTrain | TTMatrix
        Copies of the cores; rows of a matrix are its sizes n, columns m. `center` is measured.

    Raises
    ------
    ArgumentTypeError
        If `obj` is another object.
    ArgumentError
        If it is empty, its outer bonds are not 1, or the length of its core does not match its sizes.

    References
    ----------
    I. V. Oseledets, "Tensor-train decomposition", SIAM J. Sci. Comput. 33 (2011); https://github.com/oseledets/ttpy.

    Examples
    --------
    >>> import numpy as np
    >>> from types import SimpleNamespace
    >>> vector = SimpleNamespace(d=2, n=np.array([2, 2]), r=np.array([1, 2, 1]), ps=np.array([1, 5, 9]),
    ...                          core=np.array([1.0, 2, 3, 4, 1, 0, 0, 1]))
    >>> from_ttpy(vector).full()[1].tolist()
    [2.0, 4.0]
    """
    vector = getattr(obj, "tt", obj)
    if not all(hasattr(vector, name) for name in ("n", "r", "ps", "core")):
        raise wrong_object("from_ttpy", obj, "a tt.vector or a tt.matrix")
    r, n, ps = (np.asarray(getattr(vector, name), int).tolist() for name in ("r", "n", "ps"))
    legs: list[tuple[int, ...]] = [(size,) for size in n]
    if vector is not obj:
        legs = list(zip(np.asarray(obj.n, int).tolist(), np.asarray(obj.m, int).tolist(), strict=True))
    shapes = [(r[k], *sizes, r[k + 1]) for k, sizes in enumerate(legs)] if len(r) == len(legs) + 1 else []
    (flat,) = as_one_precision("from_ttpy", "core", [vector.core])
    starts = [p - 1 for p in ps]  # ps counts from 1
    if (
        not shapes
        or len(ps) != len(r)
        or any(
            starts[k] < 0 or starts[k + 1] - starts[k] != np.prod(shape) or starts[k + 1] > flat.size
            for k, shape in enumerate(shapes)
        )
    ):
        raise ArgumentError(
            f"from_ttpy: obj must have cores of the sizes that n and r give, got n = {n}, r = {r}, ps = {ps} and "
            f"{flat.size} numbers; call get_ps() after changing them."
        )
    cores = [_core(flat[starts[k] : starts[k + 1]], shape) for k, shape in enumerate(shapes)]
    train = TensorTrain if vector is obj else TTMatrix
    return train(cores, find_center(cores))


def to_ttpy(value: TensorTrain | TTMatrix) -> Any:
    """Return `value` as a `tt.vector` or `tt.matrix`.

    Parameters
    ----------
    value
        A TensorTrain or TTMatrix of dtype float64 or complex128, the dtypes of ttpy.

    Returns
    -------
    tt.vector | tt.matrix
        With copies of the cores; `log_scale` is absorbed into the centre, which is not stored.

    Raises
    ------
    ArgumentTypeError
        If `value` is another format, or of single precision.
    ArgumentError
        If the scale of `value` exceeds the range of its dtype.
    ModuleNotFoundError
        If ttpy is not installed.

    Examples
    --------
    See `from_ttpy`.
    """
    if not isinstance(value, TensorTrain | TTMatrix):
        raise wrong_value("to_ttpy", value, "a TensorTrain or a TTMatrix")
    if value.dtype not in (np.float64, np.complex128):
        raise ArgumentTypeError(
            f"to_ttpy: value must be float64 or complex128, the dtypes of ttpy, got {value.dtype}; convert its cores "
            "first."
        )
    tt = import_optional("to_ttpy", "tt", "ttpy")
    kind = tt.vector if isinstance(value, TensorTrain) else tt.matrix
    return kind.from_list(with_scale("to_ttpy", value))


def _core(flat: Array, shape: tuple[int, ...]) -> Array:
    return np.ascontiguousarray(flat.reshape(shape, order="F"))
