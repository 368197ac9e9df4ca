r"""Tree tensor networks: the hierarchical Tucker format.

    o        o        o       root: two or three legs
    |       / \      / \
   ...     o   o    o   |     nodes, isometric towards the root
          /|   |\   |\  |
         o o   o o  o o o     leaves, one per leg of the tensor

A Tucker decomposition of the tensor gives the leaves; one of its core, legs joined by two or three, the nodes above
them, and so on. Every truncation is an orthogonal projection, so that the squares of the errors add up.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from tnlib._fit import Fit, report
from tnlib._typing import Array
from tnlib._validate import as_max_rank, as_rtol
from tnlib.decompose.prepare import prepare
from tnlib.linalg.scale import shift
from tnlib.linalg.threads import own_threads
from tnlib.network.arguments import need
from tnlib.network.build import default_names
from tnlib.network.value import Network
from tnlib.sweeps.budget import Budget
from tnlib.sweeps.hosvd import st_hosvd

Level = list[list[int]]  # groups of neighbouring nodes of the level below


@own_threads
def tree(x: Any, *, rtol: float | None = None, max_rank: int | None = None) -> Fit[Network]:
    """Decompose `x` into a balanced tree of tensors so that norm(x - fit.value.full()) <= rtol * norm(x).

    Parameters
    ----------
    x
        (n[0], ..., n[d-1]), real or complex, 32 or 64 bits a component; a format is multiplied out.
    rtol
        Relative Frobenius error of the whole. Without it and `max_rank`: the numerical ranks.
    max_rank
        Cap on every bond; the smaller rank wins.

    Returns
    -------
    Fit[Network]
        Legs are k0, k1, ... Leaf k has the tags LEAF and I{k}, nodes NODE, the root ROOT. All but the root are
        isometric towards it, so that `tn.compress` and the like start from an optimal place. A tree of up to three legs
        is a Tucker decomposition.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        If `x` is not a finite array of numbers, or a tolerance is off.
    ModuleNotFoundError
        If quimb is not installed.

    References
    ----------
    L. Grasedyck, "Hierarchical singular value decomposition of tensors", SIAM J. Matrix Anal. Appl. 31 (2010).

    Examples
    --------
    The sum of eight indices has rank 2 on every bond.

    >>> import numpy as np, tnlib
    >>> x = np.indices((3,) * 8).sum(0)
    >>> fit = tnlib.network.tree(x, rtol=1e-10)
    >>> set(fit.value.ranks), fit.value.n_parameters
    ({2}, 100)
    """
    rtol, max_rank = as_rtol("tree", rtol), as_max_rank("tree", max_rank)
    scaled, exponent, norm = prepare("tree", "x", x)
    need("tree")
    levels = _levels(scaled.ndim)
    budget = Budget(norm, rtol, list(_sides(levels, scaled.shape)), scaled.dtype)
    rest, nodes = scaled, []
    for groups in levels:
        children = rest.shape
        joined = rest.reshape([math.prod(children[k] for k in group) for group in groups])
        rest, bases = st_hosvd(joined, budget, [max_rank] * len(groups))
        nodes.append(
            [
                basis.reshape(*(children[k] for k in group), -1).astype(scaled.dtype, copy=False)  # children parent
                for basis, group in zip(bases, groups, strict=True)
            ]
        )
    root = shift(rest.astype(scaled.dtype, copy=False), exponent)
    value = Network(_assemble(levels, nodes, root), default_names(scaled.ndim))
    notes = ("max_rank separates equal singular values; another rank would be unique",) if budget.cuts else ()
    return report("tree", value, error=budget.error, rtol=rtol, notes=notes)


def _levels(legs: int) -> list[Level]:
    """Return the groups of every level: leaves alone, then neighbours by two, the last by three where one is left over.

    >>> _levels(5)
    [[[0], [1], [2], [3], [4]], [[0, 1], [2, 3, 4]]]
    """
    levels = [[[k] for k in range(legs)]]
    while legs > 3:
        groups = [[k, k + 1] for k in range(0, legs - 1, 2)]
        if legs % 2:
            groups[-1].append(legs - 1)
        levels.append(groups)
        legs = len(groups)
    return levels


def _sides(levels: Sequence[Level], shape: Sequence[int]) -> Iterator[int]:
    """Yield the smaller dimension of the unfolding that each truncation cuts."""
    sizes, total = list(shape), math.prod(shape)
    for groups in levels:
        sizes = [math.prod(sizes[k] for k in group) for group in groups]
        yield from (min(n, total // n) for n in sizes)


def _assemble(levels: Sequence[Level], nodes: Sequence[Sequence[Array]], root: Array) -> Any:
    qtn = need("tree")
    below, tensors = list(default_names(len(levels[0]))), []
    for height, (groups, arrays) in enumerate(zip(levels, nodes, strict=True)):
        above = [f"bond{height}_{k}" for k in range(len(groups))]
        for k, (group, a) in enumerate(zip(groups, arrays, strict=True)):
            tags = ("NODE",) if height else ("LEAF", f"I{k}")
            tensors.append(qtn.Tensor(a, (*(below[child] for child in group), above[k]), tags))
        below = above
    return qtn.TensorNetwork([*tensors, qtn.Tensor(root, below, "ROOT")])
