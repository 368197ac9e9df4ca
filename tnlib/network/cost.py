"""The order of a contraction: found, and what it costs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tnlib._errors import ArgumentError, ArgumentTypeError
from tnlib._validate import as_count
from tnlib.network.arguments import as_legs, as_network, need

Path = tuple[tuple[int, ...], ...]

_OPTIMAL = 10  # tensors up to which all orders are compared; their number grows like a factorial
_GREEDY_RUNS = 64
_NARROW, _WIDE = (0.5, 2.0), (0.1, 4.0)  # how much greedy runs mind the sizes of what they contract
_WIDE_UP_TO = 150  # tensors; in long chains a run that hardly minds takes seconds


@dataclass(frozen=True)
class Cost:
    """What it costs to contract a network pair by pair.

    Parameters
    ----------
    multiplications
        Of numbers; about as many additions come with them.
    largest
        Numbers in the largest tensor that comes about, the result included.
    written
        Numbers in all tensors that come about.
    path
        What is contracted at each step: positions in the list of tensors, from which a pair is taken and to whose end
        its product is put. A step of one tensor sums over an index that no other has.
    left_to_right
        The cost of taking the tensors as they stand in the network, each one times all before it.
    all_at_once
        The multiplications of one sum over all indices, without any tensor in between.
    """

    multiplications: int
    largest: int
    written: int
    path: Path = field(repr=False)
    left_to_right: Cost | None = None
    all_at_once: int | None = None


def contraction_cost(
    tn: Any, *, legs: Sequence[str] | None = None, path: Sequence[Sequence[int]] | None = None
) -> Cost:
    """Return what it costs to contract a network in the order that is found for it, and in bad ones.

    Up to ten tensors all orders are compared; for more it is the best of a hundred greedy
    ones, the same at every call.

    Parameters
    ----------
    tn
        A TensorNetwork of quimb; only its indices and sizes matter.
    legs
        Indices of the result; by default all that are on one tensor alone. All others are summed over.
    path
        An order of your own, of which to tell the cost: pairs as in `Cost.path`.

    Returns
    -------
    Cost
        Its `path` goes into `contract`.

    Raises
    ------
    ArgumentTypeError, ArgumentError
        If `tn` is no network, `legs` name no indices of it, or `path` does not fit it.
    ModuleNotFoundError
        If quimb is not installed.

    References
    ----------
    J. Gray and S. Kourtis, "Hyper-optimized tensor network contraction", Quantum 5 (2021).

    Examples
    --------
    >>> import numpy as np, tnlib
    >>> a = tnlib.LowRank(np.ones((1000, 2)), np.ones((2, 1000)))
    >>> squared = [tnlib.network.to_network(a, names=names) for names in (("i", "j"), ("j", "k"))]
    >>> cost = tnlib.network.contraction_cost(squared[0] & squared[1])
    >>> cost.multiplications, cost.left_to_right.multiplications
    (2008000, 6000000)
    """
    as_network("contraction_cost", tn)
    outer = as_legs("contraction_cost", tn, legs)
    found = find_path("contraction_cost", tn, outer) if path is None else as_path("contraction_cost", tn, path)
    in_order = _left_to_right(tn)
    all_at_once = math.prod(tn.ind_size(i) for i in tn.ind_map)
    naive = Cost(*_measure(tn, outer, in_order), in_order)
    return Cost(*_measure(tn, outer, found), found, naive, all_at_once)


def find_path(function: str, tn: Any, legs: Sequence[str]) -> Path:
    """Return the order in which to contract `tn` pair by pair; the same for the same indices and sizes."""
    sizes = {i: tn.ind_size(i) for i in tn.ind_map if tn.ind_size(i) > 1}  # others would hold together what is apart
    inputs = [tuple(i for i in tensor.inds if i in sizes) for tensor in tn.tensor_map.values()]
    outer = tuple(i for i in legs if i in sizes)
    found = [finder(inputs, outer, sizes) for finder in _finders(function, tn.num_tensors)]
    paths = [tuple(tuple(int(k) for k in step) for step in path) for path in found]
    return min(*paths, _left_to_right(tn), key=lambda path: _measure(tn, legs, path))


def _finders(function: str, count: int) -> Iterator[Any]:
    cotengra = need(function, "cotengra")
    if count <= _OPTIMAL:
        yield cotengra.OptimalOptimizer()
        return
    for costs in (_NARROW, _WIDE)[: 1 if count > _WIDE_UP_TO else 2]:
        yield cotengra.RandomGreedyOptimizer(max_repeats=_GREEDY_RUNS, costmod=costs, seed=0, parallel=False)


def _left_to_right(tn: Any) -> Path:
    count = tn.num_tensors
    return ((0, 1), *((0, count - k) for k in range(2, count))) if count > 1 else ()


def as_path(function: str, tn: Any, path: Any) -> Path:
    """Return a path that leaves one tensor of those in `tn`."""
    if not isinstance(path, Sequence) or not all(isinstance(step, Sequence) for step in path):
        raise ArgumentTypeError(f"{function}: path must be a sequence of pairs, got {path!r}; pass `Cost.path`.")
    found = tuple(tuple(as_count(function, "path", k, least=0) for k in step) for step in path)
    left = tn.num_tensors
    for step in found:
        if not 0 < len(set(step)) == len(step) or max(step) >= left:
            raise ArgumentError(
                f"{function}: path must name tensors that are there, got step {step} where {left} are left; "
                "a product goes to the end of the list."
            )
        left += 1 - len(step)
    if left != 1:
        raise ArgumentError(f"{function}: path must leave one tensor, got one that leaves {left}; add steps.")
    return found


def steps(
    inputs: Sequence[Sequence[str]], legs: Sequence[str], path: Path
) -> Iterator[tuple[tuple[int, ...], tuple[str, ...]]]:
    """Go along a path: positions that are taken out of the list, largest first, and the indices of their product.

    An index is kept as long as another tensor, or the result, has it.
    """
    left = [tuple(inds) for inds in inputs]
    appearances = Counter(i for inds in left for i in inds)
    for step in path:
        positions = tuple(sorted(step, reverse=True))
        taken = Counter(i for k in positions for i in left.pop(k))
        kept = tuple(i for i in taken if i in legs or appearances[i] > taken[i])
        appearances.subtract(taken)
        appearances.update(kept)
        left.append(kept)
        yield positions, kept


def largest_product(tn: Any, legs: Sequence[str], path: Path) -> int:
    """Return how many numbers the largest product on a path has."""
    return _measure(tn, legs, path)[1]


def _measure(tn: Any, legs: Sequence[str], path: Path) -> tuple[int, int, int]:
    """Return multiplications, the largest product and the numbers in all products."""
    left = [tuple(tensor.inds) for tensor in tn.tensor_map.values()]
    size = {i: tn.ind_size(i) for i in tn.ind_map}
    multiplications, products = 0, []
    for positions, kept in steps(left, legs, path):
        taken = {i for k in positions for i in left.pop(k)}
        left.append(kept)
        multiplications += (len(positions) - 1) * math.prod(size[i] for i in taken)
        products.append(math.prod(size[i] for i in kept))
    return multiplications, max(products, default=math.prod(size[i] for i in legs)), sum(products)
