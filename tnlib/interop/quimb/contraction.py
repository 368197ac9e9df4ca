"""Contraction of networks in an optimized order, its cost, and its derivatives.

cotengra finds the order. Products on the way are rescaled by powers of two, so that they neither overflow nor
underflow. A contraction is linear in each tensor, so the derivative with respect to one is the rest of the network.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import cotengra
import numpy as np
import quimb.tensor as qtn
from cotengra.contract import einsum, tensordot

from tnlib._errors import ArgumentError, ArgumentTypeError
from tnlib._stored_arrays import fits_in_memory
from tnlib._typing import Array
from tnlib._validate import as_count, is_list
from tnlib.interop.quimb.network_arguments import (
    as_arrays,
    as_network,
    as_output_indices,
    as_tensor_id,
    binary_exponent,
    common_dtype,
)
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


Path: TypeAlias = tuple[tuple[int, ...], ...]

_OPTIMAL_UP_TO = 10  # tensors; the number of contraction trees grows like a factorial
_GREEDY_REPEATS = 64
_COSTMOD = (0.5, 2.0)  # range of the weight that a greedy search gives to the sizes of its operands


@dataclass(frozen=True)
class ContractionCost:
    """Cost of contracting a network pair by pair, as counted by cotengra.

    `multiplications` are the scalar ones of all pairwise products; there are about as many additions. `largest` and
    `written` are entries: of the largest product, the result included, and of all products. `path` is as in opt_einsum:
    each step removes the tensors at these positions of the list and appends their product. Steps of a single tensor sum
    over indices that no other tensor has; they come first and are not counted. `left_to_right` is the cost of
    multiplying the tensors in the order of the network, each one with the product of those before it, `all_at_once` the
    number of multiplications of a single sum over all indices.

    References
    ----------
    J. Gray and S. Kourtis, "Hyper-optimized tensor network contraction", Quantum 5 (2021).

    Examples
    --------
    Two matrices and a vector, multiplied from the right and from the left:

    >>> import numpy as np, quimb.tensor as qtn
    >>> matrix, vector = np.ones((100, 100)), np.ones(100)
    >>> network = qtn.TensorNetwork(
    ...     [qtn.Tensor(matrix, "ij"), qtn.Tensor(matrix, "jk"), qtn.Tensor(vector, "k")]
    ... )
    >>> cost = contraction_cost(network)
    >>> cost.multiplications, cost.left_to_right.multiplications
    (20000, 1010000)
    """

    multiplications: int
    largest: int
    written: int
    path: Path = field(repr=False)
    left_to_right: ContractionCost | None = None
    all_at_once: int | None = None


def contraction_cost(
    tn: qtn.TensorNetwork, *, legs: Sequence[str] | None = None, path: Sequence[Sequence[int]] | None = None
) -> ContractionCost:
    """Return the cost of contracting a network in an optimized order, left to right, and all at once.

    The order is optimal for up to ten tensors, and the best of 64 greedy searches with a fixed seed for more.

    Parameters
    ----------
    tn, legs
        As for `contract`; only indices and their sizes matter.
    path
        Contraction path to evaluate instead of an optimized one; pairs as in the `path` of the result, which `contract`
        accepts.

    References
    ----------
    J. Gray and S. Kourtis, "Hyper-optimized tensor network contraction", Quantum 5 (2021).

    Examples
    --------
    >>> import numpy as np, tnlib
    >>> from tnlib.interop.quimb import contraction_cost, to_network
    >>> a = tnlib.LowRank(np.ones((1000, 2)), np.ones((2, 1000)))
    >>> squared = to_network(a, names=("i", "j")) & to_network(a, names=("j", "k"))
    >>> cost = contraction_cost(squared)
    >>> cost.multiplications, cost.left_to_right.multiplications
    (2008000, 6000000)
    """
    as_network("contraction_cost", tn)
    outer = as_output_indices("contraction_cost", tn, legs)
    ordered = contraction_tree(tn, outer, _left_to_right(tn.num_tensors))
    if path is None:
        tree = optimized_tree(tn, outer)
        steps = _path_of(tree)
    else:
        steps = as_path("contraction_cost", tn, path)
        tree = contraction_tree(tn, outer, steps)
    naive = ContractionCost(*_key(ordered), _path_of(ordered))
    return ContractionCost(*_key(tree), steps, naive, int(tree.naive_cost()))


def optimized_tree(tn: qtn.TensorNetwork, legs: Sequence[str]) -> cotengra.ContractionTree:
    """Return the cheapest contraction tree that was found; the same for the same indices and sizes."""
    greedy = {"max_repeats": _GREEDY_REPEATS, "costmod": _COSTMOD, "seed": 0, "parallel": False}
    is_small = tn.num_tensors <= _OPTIMAL_UP_TO
    optimizer = cotengra.OptimalOptimizer() if is_small else cotengra.RandomGreedyOptimizer(**greedy)
    # around hyperindices the optimal search may lose to the order of the network
    orders = (optimizer, _left_to_right(tn.num_tensors))
    return min((contraction_tree(tn, legs, order) for order in orders), key=_key)


def contraction_tree(tn: qtn.TensorNetwork, legs: Sequence[str], order: Any) -> cotengra.ContractionTree:
    """Return the contraction tree of `tn` for a path or an optimizer of cotengra.

    Indices of size 1 are left out: they cost nothing, but an optimizer would count tensors that share one as connected.
    """
    sizes = {i: int(tn.ind_size(i)) for i in tn.ind_map if tn.ind_size(i) > 1}
    inputs = [[i for i in tensor.inds if i in sizes] for tensor in tn]
    return cotengra.array_contract_tree(inputs, [i for i in legs if i in sizes], sizes, optimize=order)


def as_path(function: str, tn: qtn.TensorNetwork, path: Any) -> Path:
    """Return a path that contracts all tensors of `tn` to one."""
    if not is_list(path) or not all(map(is_list, path)):
        raise ArgumentTypeError(f"{function}: path must be a sequence of pairs, got {path!r}; pass cost.path.")
    steps = tuple(tuple(as_count(function, "path", k, least=0) for k in step) for step in path)
    remaining = tn.num_tensors
    for step in steps:
        if not 0 < len(set(step)) == len(step) or max(step) >= remaining:
            raise ArgumentError(
                f"{function}: path must name tensors that are there, got step {step} with {remaining} tensors left; "
                "a product goes to the end of the list."
            )
        remaining += 1 - len(step)
    if remaining != 1:
        raise ArgumentError(f"{function}: path must leave one tensor, got one that leaves {remaining}; add steps.")
    return steps


def _left_to_right(count: int) -> Path:
    return ((0, 1), *((0, count - k) for k in range(2, count))) if count > 1 else ()


def _path_of(tree: cotengra.ContractionTree) -> Path:
    """Return the sums within single tensors, if there are any, and then the pairs."""
    sums = ((0,),) * tree.N if tree.has_preprocessing() else ()  # every tensor once: they are in order again
    return (*sums, *tree.get_path())


def _key(tree: cotengra.ContractionTree) -> tuple[int, int, int]:
    """Return multiplications, entries of the largest product, and entries of all products."""
    return int(tree.contraction_cost()), int(tree.max_size()), int(tree.total_write())


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

    References
    ----------
    J. C. Bridgeman, C. T. Chubb, "Hand-waving and interpretive dance: an introductory course on tensor networks",
    J. Phys. A 50 (2017).

    Examples
    --------
    >>> import numpy as np, tnlib
    >>> from tnlib.interop.quimb import poke_hole, to_network
    >>> tn = to_network(tnlib.tt_svd(np.eye(4)).value)
    >>> sorted(poke_hole(tn, "I0").outer_inds())
    ['bond1', 'k0', 'k0*', 'k1']
    """
    return _environment("poke_hole", tn, tensor, legs)[0]


@single_threaded_blas
def derivative(tn: qtn.TensorNetwork, tensor: str | Sequence[str], *, legs: Sequence[str] | None = None) -> Array:
    r"""Return the derivative of a contracted network with respect to one of its tensors.

    It is the complex derivative :math:`\partial f / \partial T` of a polynomial, the contraction f, with respect to the
    entries of the tensor T, without conjugates: a real function :math:`L = \mathrm{Re} f` has the gradient (torch's
    `.grad`) :math:`(\partial f / \partial T)^*`. The derivative with respect to an array is the sum over the tensors
    that hold it. Its conjugate counts as another array: :math:`\partial \langle \psi | \psi \rangle / \partial T^*` is
    the derivative with respect to the tensor in the bra.

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
    rest, outer = _environment("derivative", tn, tensor, legs)
    if not rest.num_tensors:  # the network was a single number
        rest |= qtn.Tensor(1.0)
    return contract_to_array("derivative", rest, outer)


def _environment(
    function: str, tn: qtn.TensorNetwork, tensor: str | Sequence[str], legs: Sequence[str] | None
) -> tuple[qtn.TensorNetwork, tuple[str, ...]]:
    """Return the network without `tensor`, and its open legs: `legs`, then those of the tensor, by its indices."""
    rest = as_network(function, tn).copy()
    removed, outer = rest.pop_tensor(as_tensor_id(function, tn, tensor)), as_output_indices(function, tn, legs)
    if len(set(removed.inds)) < len(removed.inds):
        raise ArgumentError(
            f"{function}: tensor must not have one index twice, got {', '.join(removed.inds)}; take its trace first."
        )
    open_legs, dtype = [], common_dtype([removed])
    for index, size in zip(removed.inds, removed.shape, strict=True):
        open_legs.append(_starred(index, tn) if index in outer else index)
        if index in outer:
            rest |= qtn.Tensor(np.eye(size, dtype=dtype), (index, open_legs[-1]), "IDENTITY")
        elif index not in rest.ind_map:  # an index of the removed tensor alone is summed over
            rest |= qtn.Tensor(np.ones(size, dtype), (index,), "ONES")
    return rest, (*outer, *open_legs)


def _starred(index: str, tn: qtn.TensorNetwork) -> str:
    """Return `index` with enough stars to be a new name."""
    while index in tn.ind_map:
        index += "*"
    return index
