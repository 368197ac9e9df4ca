"""Derivatives of networks: a contraction is linear in each of its tensors, so the derivative is the rest of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tnlib._errors import ArgumentError
from tnlib._typing import Array
from tnlib.linalg.threads import own_threads
from tnlib.network.arguments import as_legs, as_network, dtype_of, need, one_tensor
from tnlib.network.contraction import evaluate
from tnlib.network.cost import find_path


def poke_hole(tn: Any, tensor: str | Sequence[str], *, legs: Sequence[str] | None = None) -> Any:
    """Return the network without one of its tensors, and with the legs that the tensor had open.

    Parameters
    ----------
    tn
        A TensorNetwork of quimb; it is not changed.
    tensor
        A tag, or several, of exactly one tensor.
    legs
        Indices of the contraction; by default those on one tensor alone.

    Returns
    -------
    quimb.tensor.TensorNetwork
        The legs of the hole keep the names of the tensor's indices. Only where one of these is among `legs` too, the
        leg of the hole is called {name}* and an identity joins the two.

    Raises
    ------
    ArgumentTypeError, ArgumentError
        If `tn` is no network, `tensor` are not the tags of exactly one tensor, or `legs` name no indices.
    ModuleNotFoundError
        If quimb is not installed.

    Examples
    --------
    >>> import numpy as np, tnlib
    >>> tn = tnlib.network.to_network(tnlib.tt_svd(np.eye(4)).value)
    >>> sorted(tnlib.network.poke_hole(tn, "I0").outer_inds())
    ['bond1', 'k0', 'k0*', 'k1']
    """
    as_network("poke_hole", tn)
    tid = one_tensor("poke_hole", tn, tensor)
    return _rest("poke_hole", tn, tid, as_legs("poke_hole", tn, legs))[0]


@own_threads
def derivative(tn: Any, tensor: str | Sequence[str], *, legs: Sequence[str] | None = None) -> Array:
    """Return the derivative of a contracted network with respect to one of its tensors, by poking a hole.

    No conjugates: it is the complex derivative of a polynomial, d contract(tn)[legs] / d tensor[...]. A real function
    L = Re f has the gradient (steepest ascent, torch's `.grad`) conj(derivative). Of the same array in several tensors
    each has a derivative of its own, and theirs is the sum; the conjugate of an array counts as another array, so that
    d <psi|psi> / d conj(T) is the hole at the conjugated tensor.

    Parameters
    ----------
    tn
        A TensorNetwork of quimb.
    tensor
        A tag, or several, of exactly one tensor.
    legs
        Indices of the contraction, in their order; by default `tn.outer_inds()`. All others are summed over.

    Returns
    -------
    ndarray
        First the legs of the contraction, then those of the tensor in the order of its indices. Contracted with the
        tensor over these it is the contraction itself.

    Raises
    ------
    ArgumentTypeError, ArgumentError
        If `tn` is no network, `tensor` are not the tags of exactly one tensor, or `legs` name no indices.
    ModuleNotFoundError
        If quimb is not installed.

    Examples
    --------
    The derivative of x^T A y with respect to A is the outer product of x and y:

    >>> import quimb.tensor as qtn, tnlib
    >>> x, y = qtn.Tensor([1.0, 2.0], ["i"]), qtn.Tensor([3.0, 4.0], ["j"])
    >>> a = qtn.Tensor([[0.0, 1.0], [1.0, 0.0]], ["i", "j"], ["A"])
    >>> tnlib.network.derivative(x & a & y, "A")
    array([[3., 4.],
           [6., 8.]])
    """
    as_network("derivative", tn)
    tid = one_tensor("derivative", tn, tensor)
    outer = as_legs("derivative", tn, legs)
    rest, hole = _rest("derivative", tn, tid, outer)
    result = (*outer, *hole)
    if not rest.num_tensors:  # the tensor was all there was, and a number
        return np.array(10.0 ** float(tn.exponent))
    return evaluate("derivative", rest, result, find_path("derivative", rest, result))


def _rest(function: str, tn: Any, tid: int, legs: Sequence[str]) -> tuple[Any, tuple[str, ...]]:
    """Return the network without the tensor, and the names of the hole's legs in the order of its indices."""
    qtn = need(function)
    rest = tn.copy()
    taken = rest.pop_tensor(tid)
    if len(set(taken.inds)) < len(taken.inds):
        raise ArgumentError(
            f"{function}: tensor must not have one index twice, got {', '.join(taken.inds)}; take its trace first."
        )
    hole = []
    for index in taken.inds:
        size, dtype = taken.ind_size(index), dtype_of(taken)
        hole.append(_starred(index, tn) if index in legs else index)
        if index in legs:
            rest |= qtn.Tensor(np.eye(size, dtype=dtype), (index, hole[-1]), "IDENTITY")
        elif index not in rest.ind_map:  # summed over on its own
            rest |= qtn.Tensor(np.ones(size, dtype), (index,), "ONES")
    return rest, tuple(hole)


def _starred(index: str, tn: Any) -> str:
    """Return `index` with as many stars as make it a new name."""
    name = f"{index}*"
    while name in tn.ind_map:
        name += "*"
    return name
