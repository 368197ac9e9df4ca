"""Contraction orders and their costs, by cotengra."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import cotengra
import quimb.tensor as qtn

from tnlib._errors import ArgumentError, ArgumentTypeError
from tnlib._validate import as_count, is_list
from tnlib.interop.quimb.network_arguments import as_network, as_output_indices

Path: TypeAlias = tuple[tuple[int, ...], ...]

_OPTIMAL_UP_TO = 10  # tensors; the number of contraction trees grows like a factorial
_GREEDY_REPEATS = 64
_COSTMOD = (0.5, 2.0)  # range of the weight that a greedy search gives to the sizes of its operands


@dataclass(frozen=True)
class Cost:
    """Cost of contracting a network pair by pair, as counted by cotengra.

    `multiplications` are the scalar ones of all pairwise products; there are about as many additions. `largest` and
    `written` are entries: of the largest product, the result included, and of all products. `path` is as in opt_einsum:
    each step removes the tensors at these positions of the list and appends their product. Steps of a single tensor sum
    over indices that no other tensor has; they come first and are not counted. `left_to_right` is the cost of
    multiplying the tensors in the order of the network, each one with the product of those before it, `all_at_once` the
    number of multiplications of a single sum over all indices.
    """

    multiplications: int
    largest: int
    written: int
    path: Path = field(repr=False)
    left_to_right: Cost | None = None
    all_at_once: int | None = None


def contraction_cost(
    tn: qtn.TensorNetwork, *, legs: Sequence[str] | None = None, path: Sequence[Sequence[int]] | None = None
) -> Cost:
    """Return the cost of contracting a network in an optimized order, left to right, and all at once.

    The order is optimal for up to ten tensors, and the best of 64 greedy searches with a fixed seed for more.

    Parameters
    ----------
    tn, legs
        As for `contract`; only indices and their sizes matter.
    path
        Contraction path to evaluate instead of an optimized one; pairs as in `Cost.path`, which `contract` accepts.

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
    naive = Cost(*_key(ordered), _path_of(ordered))
    return Cost(*_key(tree), steps, naive, int(tree.naive_cost()))


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
        raise ArgumentTypeError(f"{function}: path must be a sequence of pairs, got {path!r}; pass `Cost.path`.")
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
