"""Formats put side by side: Kronecker products, and concatenation along a leg."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np

from tnlib._errors import ArgumentError, ArgumentTypeError
from tnlib._validate import as_count
from tnlib.formats.cp import CP
from tnlib.formats.low_rank import LowRank
from tnlib.formats.train import TensorTrain, TTMatrix
from tnlib.formats.tucker import Tucker
from tnlib.ops.trains import as_train
from tnlib.sweeps.arithmetic import add_cores, in_one_scale

F = TypeVar("F", TensorTrain, TTMatrix, Tucker, CP, LowRank)


def kron(a: F, b: F) -> F:
    """Return the Kronecker product: of matrices as numpy.kron, of tensors with the legs of `b` behind those of `a`.

    Parameters
    ----------
    a, b
        Two formats of one kind: TensorTrain, TTMatrix, Tucker, CP or LowRank.

    Returns
    -------
    TensorTrain | TTMatrix | Tucker | CP | LowRank
        Of the same kind. Flattened, the product of two tensors is the numpy.kron of their vectors.

    Raises
    ------
    ArgumentTypeError
        If the two are not of one of these kinds.

    Examples
    --------
    >>> import numpy as np, tnlib
    >>> pair = tnlib.TensorTrain([np.eye(2)[None], np.eye(2)[..., None]])
    >>> tnlib.kron(pair, pair).ranks
    (1, 2, 1, 2, 1)
    """
    kinds = TensorTrain | TTMatrix | Tucker | CP | LowRank
    if not isinstance(a, kinds) or type(a) is not type(b):
        raise ArgumentTypeError(
            f"kron: a and b must be two TensorTrain, TTMatrix, Tucker, CP or LowRank, got a {type(a).__name__} and a "
            f"{type(b).__name__}; make one of the other with tnlib.convert."
        )
    return _KRON[type(a)](a, b)  # type: ignore[no-any-return]


def concatenate(values: Sequence[TensorTrain], leg: int = 0) -> TensorTrain:
    """Return trains laid end to end along one leg, as numpy.concatenate does: ranks add up.

    Parameters
    ----------
    values
        Trains whose other legs agree.
    leg
        The leg that grows; a negative one counts from the end.

    Returns
    -------
    TensorTrain
        Its ranks are sums, which `round` lowers where it can.

    Raises
    ------
    ArgumentTypeError, ArgumentError
        If a value is no TensorTrain, or a leg differs.

    Examples
    --------
    >>> import numpy as np, tnlib
    >>> ones = tnlib.TensorTrain([np.ones((1, 2, 1))] * 2)
    >>> tnlib.concatenate([ones, 5 * ones], 1).full()
    array([[1., 1., 5., 5.],
           [1., 1., 5., 5.]])
    """
    if not isinstance(values, Sequence) or len(values) == 0:
        raise ArgumentTypeError(
            f"concatenate: values must be a non-empty sequence of trains, got {type(values).__name__}; pass a list."
        )
    for j, value in enumerate(values):
        as_train("concatenate", f"value {j}", value, TensorTrain)
    shape = values[0].shape
    leg = as_count("concatenate", "leg", leg, least=-len(shape))
    if leg >= len(shape):
        raise ArgumentError(f"concatenate: leg must lie below {len(shape)}, got {leg}; count from 0.")
    leg %= len(shape)
    for j, value in enumerate(values):
        differ = [k for k, (n, m) in enumerate(zip(shape, value.shape, strict=False)) if n != m and k != leg]
        if differ or len(value.shape) != len(shape):
            where = f"leg {differ[0]}" if differ else "the count of legs"
            raise ArgumentError(
                f"concatenate: all legs but leg {leg} must agree, got shapes {shape} and {value.shape} of value {j}, "
                f"which differ in {where}; slice or pad one of them."
            )
    terms, log_scale = in_one_scale([(value.cores, value.log_scale) for value in values])
    return TensorTrain(tuple(add_cores(terms, stacked=leg)), None, log_scale)


def _kron_trains(a: Any, b: Any) -> Any:
    dtype = np.result_type(a.dtype, b.dtype)
    cores = tuple(core.astype(dtype, copy=False) for core in (*a.cores, *b.cores))
    return type(a)(cores, None, a.log_scale + b.log_scale)


def _kron_tucker(a: Tucker, b: Tucker) -> Tucker:
    return Tucker(np.multiply.outer(a.core, b.core), (*a.factors, *b.factors))


def _kron_cp(a: CP, b: CP) -> CP:
    r, s = len(a.weights), len(b.weights)
    left = (np.repeat(factor, s, axis=1) for factor in a.factors)  # n (R S)
    right = (np.tile(factor, (1, r)) for factor in b.factors)
    return CP(np.kron(a.weights, b.weights), (*left, *right))


def _kron_low_rank(a: LowRank, b: LowRank) -> LowRank:
    return LowRank(np.kron(a.left, b.left), np.kron(a.right, b.right))


_KRON: dict[type, Any] = {
    TensorTrain: _kron_trains,
    TTMatrix: _kron_trains,
    Tucker: _kron_tucker,
    CP: _kron_cp,
    LowRank: _kron_low_rank,
}
