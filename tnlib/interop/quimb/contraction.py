"""Contraction of a network to a dense array, free of overflow and underflow on the way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import quimb.tensor as qtn
from cotengra.contract import einsum, tensordot

from tnlib._errors import ArgumentError
from tnlib._format import fits_in_memory
from tnlib._typing import Array
from tnlib.interop.quimb.contraction_order import Path, as_path, contraction_tree, optimized_tree
from tnlib.interop.quimb.network_arguments import as_arrays, as_network, as_output_indices, binary_exponent
from tnlib.linalg.scaling import Scaled, rescale_each, shift_in_range
from tnlib.linalg.threads import single_threaded_blas


@single_threaded_blas
def contract(
    tn: qtn.TensorNetwork, *, legs: Sequence[str] | None = None, path: Sequence[Sequence[int]] | None = None
) -> Array:
    """Contract a network to a dense array, pair by pair in an optimized order.

    Parameters
    ----------
    tn
        A quimb TensorNetwork of numpy or torch arrays. An index may join any number of tensors.
    legs
        Indices of the result, in its order; by default `tn.outer_inds()`, those of exactly one tensor. All others are
        summed over.
    path
        The path of `contraction_cost`, to find the order once for many networks of the same structure.

    Returns
    -------
    ndarray
        One leg per name in `legs`, 0-dimensional without any, `tn.exponent` included. Intermediate products are kept in
        range by powers of two; ArgumentError where one does not fit into memory, or the result leaves its range.

    Examples
    --------
    >>> import numpy as np, tnlib
    >>> from tnlib.interop.quimb import contract, to_network
    >>> a = tnlib.CP(np.array([2.0]), [np.ones((3, 1)), np.ones((4, 1))])
    >>> contract(to_network(a), legs=("k1", "k0")).shape
    (4, 3)
    """
    as_network("contract", tn)
    outer = as_output_indices("contract", tn, legs)
    return contract_to_array("contract", tn, outer, None if path is None else as_path("contract", tn, path))


def contract_to_array(function: str, tn: qtn.TensorNetwork, legs: Sequence[str], path: Path | None = None) -> Array:
    """Return the contraction of `tn` to `legs`, its exponent included."""
    mantissa, exponent = contract_scaled(function, tn, legs, path)
    factor, e = binary_exponent(tn)
    scaled = mantissa * mantissa.real.dtype.type(factor)
    return shift_in_range(scaled, exponent + e, f"{function}: every entry", "lower tn.exponent")


def contract_scaled(function: str, tn: qtn.TensorNetwork, legs: Sequence[str], path: Path | None = None) -> Scaled:
    """Return the contraction of `tn` to `legs`, its exponent left out.

    Products are rescaled by powers of two, which is exact. cotengra's own `strip_exponent` divides by the largest
    entry, which rounds, sums logarithms in the precision of the data, and leaves the first product unscaled.
    """
    arrays, exponent = rescale_each(a.squeeze() for a in as_arrays(function, tn))
    tree = optimized_tree(tn, legs) if path is None else contraction_tree(tn, legs, path)
    if not fits_in_memory(tree.max_size(), np.result_type(*arrays)):
        raise ArgumentError(
            f"{function}: every product on the way must fit into memory, got one of "
            f"2**{int(tree.max_size()).bit_length() - 1} numbers or more; leave fewer legs open, see contraction_cost."
        )
    total = Scaled(np.ones(()), exponent)

    def rescaled(product: Callable[..., Any]) -> Callable[..., Array]:
        def run(*operands: Any) -> Array:
            nonlocal total
            total = total.update(np.asarray(product(*operands)))
            return total.array

        return run

    contractor = tree.get_contractor(implementation=(rescaled(einsum), rescaled(tensordot)))
    result = contractor(*arrays)
    return Scaled(np.asarray(result).reshape([tn.ind_size(i) for i in legs]), total.exponent)
