r"""Tree tensor networks: the hierarchical Tucker decomposition.

    o        o        o       root: two or three legs
    |       / \      / \
   ...     o   o    o   |     nodes, isometric towards the root
          /|   |\   |\  |
         o o   o o  o o o     leaves, one per leg of the tensor

A Tucker decomposition of the tensor gives the leaves. One of its core, neighbouring legs fused by two or three, gives
the next level of nodes, and so on. Every truncation is an orthogonal projection, so the squares of the errors add up.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy.typing as npt
import quimb.tensor as qtn

from tnlib._fit import Fit, report
from tnlib._typing import Array
from tnlib._validate import as_max_rank, as_rtol, refuse_foreign_keywords
from tnlib.formats.tucker.st_hosvd import st_hosvd
from tnlib.interop.quimb.network_format import Network
from tnlib.linalg.scaling import prepare, shift
from tnlib.linalg.threads import single_threaded_blas
from tnlib.linalg.truncation import TruncationBudget

Level = list[list[int]]  # groups of neighbouring nodes of the level below


@single_threaded_blas
@refuse_foreign_keywords
def tree(x: npt.ArrayLike, *, rtol: float | None = None, max_rank: int | None = None) -> Fit[Network]:
    """Decompose `x` into a balanced tree of tensors so that norm(x - fit.value.full()) <= rtol * norm(x).

    Parameters
    ----------
    x
        (n[0], ..., n[d-1]), real or complex, 32 or 64 bits a component; a format is contracted first.
    rtol
        Relative Frobenius error of the whole tensor. If it and `max_rank` are None, the numerical ranks.
    max_rank
        Maximal rank of every bond; with `rtol`, the smaller rank is used.

    Returns
    -------
    Fit[Network]
        Legs are k0, k1, ... Leaf k has the tags LEAF and I{k}, nodes NODE, the root ROOT. All tensors but the root are
        isometric towards it, so that quimb's `compress` and the like truncate optimally from the start. A tree of up to
        three legs is a Tucker decomposition.

    References
    ----------
    L. Grasedyck, "Hierarchical singular value decomposition of tensors", SIAM J. Matrix Anal. Appl. 31 (2010).

    Examples
    --------
    >>> import numpy as np
    >>> from tnlib.interop.quimb import tree
    >>> x = np.indices((3,) * 8).sum(0)  # the sum of eight indices has rank 2 on every bond
    >>> fit = tree(x, rtol=1e-10)
    >>> set(fit.value.ranks), fit.value.n_parameters
    ({2}, 100)
    """
    rtol, max_rank = as_rtol("tree", rtol), as_max_rank("tree", max_rank)
    core, exponent, norm = prepare("tree", "x", x)
    dtype, names = core.dtype, tuple(f"k{k}" for k in range(core.ndim))
    levels = _levels(core.ndim)
    count = sum(map(len, levels))  # truncations to come
    remaining = 0.0 if rtol is None else rtol**2  # squared relative error that they may make together
    nodes: list[list[Array]] = []
    budgets: list[TruncationBudget] = []
    for groups in levels:
        children = core.shape
        fused = core.reshape([math.prod(children[k] for k in group) for group in groups])
        share = remaining * len(groups) / count
        level_rtol = None if rtol is None else math.sqrt(share)
        core, bases, budget = st_hosvd(fused, norm, level_rtol, max_rank)
        core = core.astype(dtype, copy=False)
        nodes.append(
            [
                basis.reshape(*(children[k] for k in group), -1).astype(dtype, copy=False)  # children parent
                for basis, group in zip(bases, groups, strict=True)
            ]
        )
        budgets.append(budget)
        remaining, count = remaining - min(share, budget.error**2), count - len(groups)
    value = Network(_as_network(levels, nodes, shift(core, exponent), names), names)
    notes = tuple(dict.fromkeys(note for budget in budgets for note in budget.notes()))
    return report("tree", value, error=math.hypot(*(budget.error for budget in budgets)), rtol=rtol, notes=notes)


def _levels(ndim: int) -> list[Level]:
    """Return the groups of every level: legs, then neighbours by two, the last by three if their count is odd."""
    levels = [[[k] for k in range(ndim)]]
    while ndim > 3:
        groups = [[k, k + 1] for k in range(0, ndim - 1, 2)]
        if ndim % 2:
            groups[-1].append(ndim - 1)
        levels.append(groups)
        ndim = len(groups)
    return levels


def _as_network(
    levels: Sequence[Level], nodes: Sequence[Sequence[Array]], root: Array, names: Sequence[str]
) -> qtn.TensorNetwork:
    tensors = []
    for height, (groups, arrays) in enumerate(zip(levels, nodes, strict=True)):
        parents = [f"bond{height}_{k}" for k in range(len(groups))]
        for k, (group, a) in enumerate(zip(groups, arrays, strict=True)):
            tags = ("NODE",) if height else ("LEAF", f"I{k}")
            tensors.append(qtn.Tensor(a, (*(names[child] for child in group), parents[k]), tags))
        names = parents
    return qtn.TensorNetwork([*tensors, qtn.Tensor(root, names, "ROOT")])
