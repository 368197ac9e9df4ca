r"""Rounding: trains to trains of smaller ranks.

Two sweeps: first the centre moves to the first core,

    (core)--<|--<|--<|          <|  right-isometric core
       |     |   |   |

then each bond is truncated from the left: a truncated SVD of the whole train, as all cores on its right are isometric.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tnlib._array_api import reshape
from tnlib._typing import Array, MaxRank
from tnlib.formats.train.canonicalize import change_bond_bases, move_center
from tnlib.formats.train.cores import attach_left, attach_right, columns, rows
from tnlib.formats.train.format import TensorTrain, Train
from tnlib.formats.train.tt_matrix import T
from tnlib.linalg.canonical_basis import CanonicalForm, choose_groups
from tnlib.linalg.orthogonal import orthonormal_rows
from tnlib.linalg.scaling import Scaled, norm, rescale
from tnlib.linalg.thin_svd import truncated_svd
from tnlib.linalg.truncation import TruncationBudget


def round_train(t: T, rtol: float | None, max_rank: MaxRank, degeneracy_tol: float = 0.0) -> tuple[T, TruncationBudget]:
    """Return the rounded train, left-canonical, and its truncations."""
    train = right_canonicalize(t.fused())
    budget = train_budget(train, rtol, max_rank, degeneracy_tol)
    rounded, _ = truncate_bonds(train, budget)
    return t.unfused(rounded), budget


def canonical_train(t: Train, function: str, groups: Any) -> CanonicalForm:
    """Return the train in the basis of left singular vectors on every bond, canonical in groups of equal values."""
    train, spectra = schmidt_form(t.fused())
    chosen = choose_groups(function, t, spectra, groups)
    cores = change_bond_bases(train.cores, chosen)
    columns = [core.reshape(-1, core.shape[-1]) for core in cores[:-1]]
    value = t.unfused(TensorTrain.from_sweep(cores, train.center, train.exponent))
    return CanonicalForm(value, list(zip(columns, spectra, strict=True)), chosen)


def train_budget(
    train: TensorTrain, rtol: float | None, max_rank: MaxRank = None, degeneracy_tol: float = 0.0
) -> TruncationBudget:
    """Return the budget of a right-canonical train, whose first core carries the norm."""
    sides = [max(core.shape[0], len(train.cores)) for core in train.cores[1:]]
    return TruncationBudget(norm(train.cores[0]), rtol, sides, train.dtype, max_rank, degeneracy_tol)


def right_canonicalize(train: TensorTrain) -> TensorTrain:
    """Return the train with its centre at core 0.

    Unlike `canonicalize`, ranks fall to the numerical ranks of the parts on the right where they are larger.
    """
    out: list[Array] = []
    rest = Scaled(1 * train.cores[-1], train.exponent)  # a copy: of one core it is the result
    for core in train.cores[-2::-1]:
        factor, basis = orthonormal_rows(columns(rest.array))  # l [l'] (n r)
        out.append(reshape(basis, (-1, *rest.array.shape[1:])))  # l' n r
        rest = rest.update(attach_right(core, factor))  # l n [r] r'
    return TensorTrain.from_sweep([rest.array, *reversed(out)], 0, rest.exponent)


def truncate_bonds(
    train: TensorTrain, budget: TruncationBudget, *, diagonal: bool = False
) -> tuple[TensorTrain, list[Array]]:
    """Return a right-canonical train, truncated and left-canonical, and the singular values that every bond keeps.

    These are in units of 2**train.exponent. With `diagonal` they will stay on a diagonal between the bases, as in a
    Vidal form (`equality_tolerance`).
    """
    out: list[Array] = []
    spectra: list[Array] = []
    rest = train.cores[0]
    for core in train.cores[1:]:
        svd = truncated_svd(rows(rest), budget, diagonal=diagonal)
        out.append(reshape(svd.u, (*rest.shape[:2], -1)))  # l n r'
        spectra.append(svd.s)
        rest = attach_left(svd.rest, core)  # r' [r] n r''
    return TensorTrain.from_sweep([*out, rest], len(out), train.exponent), spectra


def change_pair(
    train: TensorTrain,
    site: int,
    change: Callable[[Array], Array],
    rtol: float | None = None,
    max_rank: MaxRank = None,
) -> tuple[TensorTrain, TruncationBudget]:
    """Return the train with cores `site` and `site` + 1 contracted, changed and split again, and the truncation.

    `change` maps their product (l, n, n', r) to an array (l, m, m', r). The centre is at `site` + 1.
    """
    moved = move_center(train, site + 1 if train.center is not None and train.center > site else site)
    cores = list(moved.cores)
    product = change(np.tensordot(cores[site], cores[site + 1], 1))  # l m m' r
    theta, exponent = rescale(np.ascontiguousarray(product), moved.exponent)
    left, m, m_next, right = theta.shape
    flat = theta.reshape(left * m, m_next * right)
    budget = TruncationBudget(norm(theta), rtol, [max(min(flat.shape), len(cores))], theta.dtype, max_rank)
    svd = truncated_svd(flat, budget)
    cores[site], cores[site + 1] = svd.u.reshape(left, m, -1), svd.rest.reshape(-1, m_next, right)
    return TensorTrain.from_sweep(cores, site + 1, exponent), budget


def schmidt_form(train: TensorTrain, *, diagonal: bool = False) -> tuple[TensorTrain, list[Array]]:
    """Return the result of `truncate_bonds` at the numerical ranks of the train."""
    gathered = right_canonicalize(train)
    return truncate_bonds(gathered, train_budget(gathered, None), diagonal=diagonal)
