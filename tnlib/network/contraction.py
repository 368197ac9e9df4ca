"""Contraction of a network to an array, in whatever range its numbers lie."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from tnlib._errors import ArgumentError
from tnlib._typing import Array
from tnlib.formats.base import fits_in_memory
from tnlib.linalg.scale import largest, shift
from tnlib.linalg.threads import own_threads
from tnlib.network.arguments import arrays_of, as_legs, as_network, need
from tnlib.network.cost import Path, as_path, find_path, largest_product, steps


@own_threads
def contract(tn: Any, *, legs: Sequence[str] | None = None, path: Sequence[Sequence[int]] | None = None) -> Array:
    """Contract a network to a dense array, pair by pair in an order that is found for it.

    Parameters
    ----------
    tn
        A TensorNetwork of quimb, of arrays of numpy or torch. An index may join any number of tensors.
    legs
        Indices of the result, in its order; by default `tn.outer_inds()`, those on one tensor alone. All others are
        summed over.
    path
        The order of `contraction_cost`, where many networks of the same form are to be contracted.

    Returns
    -------
    ndarray
        One leg per name in `legs`, without any for a number; `exponent` is multiplied in. Products on the way are kept
        in range by powers of two.

    Raises
    ------
    ArgumentTypeError, ArgumentError
        If `tn` is no network, `legs` name no indices of it, `path` does not fit it, a product on the way does not fit
        into memory, or the result leaves the range of its dtype.
    ModuleNotFoundError
        If quimb is not installed.

    Examples
    --------
    >>> import numpy as np, tnlib
    >>> a = tnlib.CP(np.array([2.0]), [np.ones((3, 1)), np.ones((4, 1))])
    >>> tnlib.network.contract(tnlib.network.to_network(a), legs=("k1", "k0")).shape
    (4, 3)
    """
    as_network("contract", tn)
    outer = as_legs("contract", tn, legs)
    order = find_path("contract", tn, outer) if path is None else as_path("contract", tn, path)
    return evaluate("contract", tn, outer, order)


def evaluate(function: str, tn: Any, legs: Sequence[str], path: Path) -> Array:
    """Contract `tn` along `path`."""
    return _times_power(function, *mantissa(function, tn, legs, path), float(tn.exponent))


def mantissa(function: str, tn: Any, legs: Sequence[str], path: Path) -> tuple[Array, int]:
    """Return m and e such that m * 2**e is the contraction of `tn` but for its exponent.

    Every product on the way is scaled to largest entries between 1/2 and 1.
    """
    qtn = need(function)
    twos, left = 0, []
    given = list(tn.tensor_map.values())
    for tensor, data in zip(given, arrays_of(function, given), strict=True):
        data, e = _in_range(data)
        twos += e
        left.append(qtn.Tensor(data.squeeze(), [i for i in tensor.inds if tn.ind_size(i) > 1]))
    most = largest_product(tn, legs, path)
    if not fits_in_memory(most, left[0].data.dtype):
        raise ArgumentError(
            f"{function}: every product on the way must fit into memory, got one of 2**{most.bit_length() - 1} numbers "
            "or more; leave fewer legs open, see contraction_cost."
        )
    for positions, kept in steps([tensor.inds for tensor in left], legs, path):
        taken = [left.pop(k) for k in positions]
        product = qtn.tensor_contract(*taken, output_inds=kept, preserve_tensor=True)
        data, e = _in_range(product.data)
        twos += e
        left.append(qtn.Tensor(data, kept))
    (last,) = left
    result = qtn.tensor_contract(last, output_inds=[i for i in legs if tn.ind_size(i) > 1], preserve_tensor=True)
    return np.asarray(result.data).reshape([tn.ind_size(i) for i in legs]), twos


def _in_range(a: Array) -> tuple[Array, int]:
    """Return a * 2**-e and e, the largest part of a * 2**-e between 1/2 and 1."""
    a = np.asarray(a)
    e = math.frexp(largest(a))[1]
    return shift(a, -e), e


def _times_power(function: str, a: Array, twos: int, exponent: float) -> Array:
    """Return a * 2**twos * 10**exponent."""
    more = exponent * math.log2(10)
    whole = math.floor(more)
    with np.errstate(over="ignore"):
        out = shift(a * a.real.dtype.type(2.0 ** (more - whole)) if more != whole else a, twos + whole)
    if not np.isfinite(out).all():
        raise ArgumentError(
            f"{function}: the result must lie in the range of {out.dtype}, got entries of about "
            f"10**{(twos + more) / math.log2(10):.0f}; lower tn.exponent."
        )
    return np.asarray(out)
