"""Derivatives of networks: a contraction is linear in each tensor, so the derivative is the rest of the network."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import quimb.tensor as qtn

from tnlib._errors import ArgumentError
from tnlib._typing import Array
from tnlib.interop.quimb.contraction import contract_to_array
from tnlib.interop.quimb.network_arguments import as_network, as_output_indices, as_tensor_id, common_dtype
from tnlib.linalg.threads import single_threaded_blas


def poke_hole(
    tn: qtn.TensorNetwork, tensor: str | Sequence[str], *, legs: Sequence[str] | None = None
) -> qtn.TensorNetwork:
    """Return the network without one of its tensors (its environment), the bonds of that tensor open.

    Parameters
    ----------
    tn, legs
        As for `contract`.
    tensor
        A tag, or several, of exactly one tensor.

    Returns
    -------
    quimb.tensor.TensorNetwork
        The open legs have the names of the tensor's indices. An index that is also in `legs` gets an identity matrix,
        and the leg of the removed tensor is called {name}* there.

    Examples
    --------
    >>> import numpy as np, tnlib
    >>> from tnlib.interop.quimb import poke_hole, to_network
    >>> tn = to_network(tnlib.tt_svd(np.eye(4)).value)
    >>> sorted(poke_hole(tn, "I0").outer_inds())
    ['bond1', 'k0', 'k0*', 'k1']
    """
    as_network("poke_hole", tn)
    tid = as_tensor_id("poke_hole", tn, tensor)
    return _environment("poke_hole", tn, tid, as_output_indices("poke_hole", tn, legs))[0]


@single_threaded_blas
def derivative(tn: qtn.TensorNetwork, tensor: str | Sequence[str], *, legs: Sequence[str] | None = None) -> Array:
    """Return the derivative of a contracted network with respect to one of its tensors.

    It is the complex derivative d contract(tn)[legs] / d tensor[...] of a polynomial, without conjugates: a real
    function L = Re f has the gradient (torch's `.grad`) conj(derivative). The derivative with respect to an array is
    the sum over the tensors that hold it. Its conjugate counts as another array: d <psi|psi> / d conj(T) is the
    derivative with respect to the tensor in the bra.

    Parameters
    ----------
    tn, tensor, legs
        As for `poke_hole`. All indices but `legs` are summed over.

    Returns
    -------
    ndarray
        The legs of the contraction, then those of the tensor in the order of its indices. Contracted with the tensor
        over the latter it is the contraction itself.

    Examples
    --------
    >>> import quimb.tensor as qtn
    >>> from tnlib.interop.quimb import derivative
    >>> x, y = qtn.Tensor([1.0, 2.0], ["i"]), qtn.Tensor([3.0, 4.0], ["j"])
    >>> a = qtn.Tensor([[0.0, 1.0], [1.0, 0.0]], ["i", "j"], ["A"])
    >>> derivative(x & a & y, "A")  # of x^T A y: the outer product of x and y
    array([[3., 4.],
           [6., 8.]])
    """
    as_network("derivative", tn)
    tid = as_tensor_id("derivative", tn, tensor)
    outer = as_output_indices("derivative", tn, legs)
    rest, open_legs = _environment("derivative", tn, tid, outer)
    if not rest.num_tensors:  # the network was a single number
        rest |= qtn.Tensor(1.0)
    return contract_to_array("derivative", rest, (*outer, *open_legs))


def _environment(
    function: str, tn: qtn.TensorNetwork, tid: int, legs: Sequence[str]
) -> tuple[qtn.TensorNetwork, tuple[str, ...]]:
    """Return the network without tensor `tid`, and the names of that tensor's legs in the order of its indices."""
    rest = tn.copy()
    removed = rest.pop_tensor(tid)
    if len(set(removed.inds)) < len(removed.inds):
        raise ArgumentError(
            f"{function}: tensor must not have one index twice, got {', '.join(removed.inds)}; take its trace first."
        )
    open_legs, dtype = [], common_dtype([removed])
    for index, size in zip(removed.inds, removed.shape, strict=True):
        open_legs.append(_starred(index, tn) if index in legs else index)
        if index in legs:
            rest |= qtn.Tensor(np.eye(size, dtype=dtype), (index, open_legs[-1]), "IDENTITY")
        elif index not in rest.ind_map:  # an index of the removed tensor alone is summed over
            rest |= qtn.Tensor(np.ones(size, dtype), (index,), "ONES")
    return rest, tuple(open_legs)


def _starred(index: str, tn: qtn.TensorNetwork) -> str:
    """Return `index` with enough stars to be a new name."""
    while index in tn.ind_map:
        index += "*"
    return index
