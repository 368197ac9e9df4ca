"""Convert to and from pyttb, the Tensor Toolbox for Python: Kruskal tensors (CP) and Tucker tensors."""

from __future__ import annotations

from typing import Any

import numpy as np

from tnlib._errors import ArgumentTypeError
from tnlib._validate import import_optional
from tnlib.formats.cp.format import CP
from tnlib.formats.tucker.format import Tucker
from tnlib_adapters.interop._cores import as_copies, wrong_object, wrong_value


def from_pyttb(obj: Any) -> CP | Tucker:
    """Return a ktensor or ttensor of pyttb as CP or Tucker.

    Parameters
    ----------
    obj
        A `pyttb.ktensor` or `pyttb.ttensor`; a sparse core or factor becomes dense.

    Returns
    -------
    CP | Tucker
        Copies of the arrays, in C order. Weights and columns are unchanged; `tnlib.canonical_form` fixes a gauge.

    Raises
    ------
    ArgumentTypeError
        If `obj` is another object, or mixes precisions.
    ArgumentError
        If it is empty, or has an entry that is not finite.

    References
    ----------
    D. M. Dunlavy, N. T. Johnson, and others, pyttb: Python Tensor Toolbox, https://github.com/sandialabs/pyttb.

    Examples
    --------
    >>> import numpy as np, pyttb
    >>> value = from_pyttb(pyttb.ktensor([np.ones((2, 1)), np.ones((3, 1))], np.array([5.0])))
    >>> value.shape, f"{value.full()[1, 2]:.1f}"
    ((2, 3), '5.0')
    """
    ttb = import_optional("from_pyttb", "pyttb", "pyttb")
    if isinstance(obj, ttb.ktensor):
        weights, *factors = as_copies("from_pyttb", "array", [obj.weights, *obj.factor_matrices])
        return CP(weights, factors)
    if isinstance(obj, ttb.ttensor):
        core = obj.core.full().data if isinstance(obj.core, ttb.sptensor) else obj.core.data
        factors = [f.toarray() if hasattr(f, "toarray") else f for f in obj.factor_matrices]
        core, *factors = as_copies("from_pyttb", "array", [core, *factors])
        return Tucker(core, factors)
    raise wrong_object("from_pyttb", obj, "a ktensor or a ttensor")


def to_pyttb(value: CP | Tucker) -> Any:
    """Return `value` as a ktensor or ttensor of pyttb.

    Parameters
    ----------
    value
        A CP of dtype float64, the only dtype of a ktensor, or a Tucker. pyttb has no tensor trains.

    Returns
    -------
    pyttb.ktensor | pyttb.ttensor
        Copies of the arrays, in Fortran order.

    Raises
    ------
    ArgumentTypeError
        If `value` is another format, or a CP of another dtype.

    Examples
    --------
    >>> import numpy as np, tnlib
    >>> obj = to_pyttb(tnlib.CP([2.0, 1.0], [np.eye(3, 2)] * 3))
    >>> obj.ncomponents, f"{obj.norm():.4f}"
    (2, '2.2361')
    """
    if not isinstance(value, CP | Tucker):
        raise wrong_value("to_pyttb", value, "a CP or a Tucker")
    ttb = import_optional("to_pyttb", "pyttb", "pyttb")
    if isinstance(value, Tucker):
        core, *factors = (np.array(a, value.dtype, order="F") for a in value.arrays())
        return ttb.ttensor(ttb.tensor(core), factors)
    if value.dtype != np.float64:
        raise ArgumentTypeError(
            f"to_pyttb: value must be float64, the only dtype of a ktensor, got {value.dtype}; convert its factors "
            "first."
        )
    return ttb.ktensor([np.array(f, order="F") for f in value.factors], np.array(value.weights))
