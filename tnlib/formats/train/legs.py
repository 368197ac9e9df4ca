r"""Legs of trains: split, joined and put in another order; diagonals of operators, and operators among identities."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias, overload

import numpy as np
import numpy.typing as npt

from tnlib._errors import ArgumentError
from tnlib._fit import wrong_type
from tnlib._stored_arrays import refuse_unallocatable
from tnlib._typing import Array
from tnlib._validate import as_array, as_legs, as_sizes, is_list
from tnlib.formats.train.format import TensorTrain
from tnlib.formats.train.tt_matrix import T, TTMatrix, as_train
from tnlib.formats.train.tt_rounding import change_pair, round_train
from tnlib.formats.train.tt_svd import ttm_svd
from tnlib.linalg.orthogonal import qr_positive
from tnlib.linalg.threads import single_threaded_blas

Sizes: TypeAlias = tuple[int, ...]  # of the legs of one core: (n,), or (m, n) of a TT-matrix


@overload
def reshape(tt: TensorTrain, shape: Sequence[int]) -> TensorTrain: ...
@overload
def reshape(tt: TTMatrix, shape: tuple[Sequence[int], Sequence[int]]) -> TTMatrix: ...
@single_threaded_blas
def reshape(tt: Any, shape: Any) -> Any:
    """Return the same train with its legs split or joined, as numpy.reshape does in C order.

    Parameters
    ----------
    tt
        A TensorTrain or TTMatrix.
    shape
        New sizes of the legs; of a TTMatrix a pair, those of the rows and those of the columns, as many of both. The
        smallest groups of old and new legs with equal products are joined and split again, each in one core.

    Returns
    -------
    TensorTrain | TTMatrix
        The same tensor to roundoff. If a leg was split, at the numerical ranks.

    Raises
    ------
    ArgumentError
        If the sizes do not multiply to those of `tt`, or a group of legs does not fit into memory.

    Examples
    --------
    A vector of 2^20 numbers, in bits and back:

    >>> import numpy as np, tnlib
    >>> line = tnlib.TensorTrain([np.linspace(0, 1, 2**20).reshape(1, -1, 1)])
    >>> bits = tnlib.reshape(line, (2,) * 20)
    >>> max(bits.ranks), tnlib.reshape(bits, (1024, 1024)).ranks
    (2, (1, 2, 1))
    """
    as_train("reshape", "tt", tt)
    old = [core.shape[1:-1] for core in tt.cores]
    new = _new_sizes(tt, old, shape)
    cores, splits = list[Array](), False
    for first, after in _groups(old, new):
        rows = tuple(math.prod(sizes) for sizes in zip(*(old[k] for k in first), strict=True))
        ends = tt.cores[first[0]].shape[0], tt.cores[first[-1]].shape[-1]
        refuse_unallocatable("reshape", (ends[0], *rows, ends[1]), tt.dtype)
        joined = _joined([tt.cores[k] for k in first])
        cores += _split(joined, [new[k] for k in after])
        splits |= len(after) > 1
    value = type(tt)(cores, exponent=tt.exponent)
    return round_train(value, None, None)[0] if splits else value


@single_threaded_blas
def permute(tt: T, legs: Sequence[int]) -> T:
    """Return the train with its legs in another order, as numpy.transpose does.

    Parameters
    ----------
    tt
        A TensorTrain, or a TTMatrix, whose row and column legs stay together.
    legs
        Leg k of the result is leg legs[k] of `tt`.

    Returns
    -------
    TensorTrain | TTMatrix
        The same tensor to roundoff, at the numerical ranks of the new order, which may be much larger. The cost is one
        SVD for every pair of legs that change their order.

    Examples
    --------
    >>> import numpy as np, tnlib
    >>> pairs = tnlib.outer(tnlib.tt_svd(np.eye(2)).value, tnlib.tt_svd(np.eye(2)).value)
    >>> pairs.ranks, tnlib.permute(pairs, (0, 2, 1, 3)).ranks
    ((1, 2, 1, 2, 1), (1, 2, 4, 2, 1))
    """
    as_train("permute", "tt", tt)
    order = list(as_legs("permute", "legs", legs, len(tt.cores), proper=False))
    if len(order) != len(tt.cores):
        raise ArgumentError(
            f"permute: legs must name all {len(tt.cores)} legs, got {tuple(order)}; append those that stay."
        )
    sizes, places = [core.shape[1:-1] for core in tt.cores], list(range(len(order)))
    train = tt.fused()
    for k, leg in enumerate(order):
        for site in range(places.index(leg) - 1, k - 1, -1):
            train, _ = change_pair(train, site, lambda pair: pair.transpose(0, 2, 1, 3))  # l n' n r
            places[site], places[site + 1] = places[site + 1], places[site]
    cores = [core.reshape(len(core), *sizes[leg], -1) for core, leg in zip(train.cores, order, strict=True)]
    return type(tt).from_sweep(cores, train.center, train.exponent).folded()


@overload
def diag(tt: TTMatrix) -> TensorTrain: ...
@overload
def diag(tt: TensorTrain) -> TTMatrix: ...
def diag(tt: Any) -> Any:
    """Return the diagonal of a TT-matrix as a train, or the diagonal TT-matrix of a train, of the same ranks.

    Examples
    --------
    >>> import numpy as np, tnlib
    >>> values = tnlib.tt_svd(np.arange(8.0).reshape(2, 2, 2)).value
    >>> tnlib.diag(values).full().diagonal().round(12) + 0.0
    array([0., 1., 2., 3., 4., 5., 6., 7.])
    >>> bool(tnlib.distance(tnlib.diag(tnlib.diag(values)), values) < 1e-12)
    True
    """
    as_train("diag", "tt", tt)
    if isinstance(tt, TensorTrain):
        cores = [np.einsum("lnr,nm->lnmr", core, np.eye(core.shape[1], dtype=core.dtype)) for core in tt.cores]
        return TTMatrix.from_sweep(cores, None, tt.exponent)
    if tt.row_shape != tt.col_shape:
        raise ArgumentError(
            f"diag: row and column legs of tt must have the same sizes, got {tt.row_shape} and {tt.col_shape}; reshape "
            "it first."
        )
    return TensorTrain([np.einsum("lnnr->lnr", core) for core in tt.cores], exponent=tt.exponent)


def embed(operator: TTMatrix | npt.ArrayLike, legs: int | Sequence[int], shape: Sequence[int]) -> TTMatrix:
    """Return the operator that acts on some legs, and as the identity on all others.

    Parameters
    ----------
    operator
        A TTMatrix with a core for each of `legs`; or a matrix: (m, n) for one leg, square for several, its rows and
        columns in the order of `legs`, the first one slowest. It is split at its numerical ranks.
    legs
        Legs in any order, which need not be neighbours.
    shape
        Column sizes of all legs of the result.

    Raises
    ------
    ArgumentError
        If the columns of the operator have other sizes than these legs.

    Examples
    --------
    A gate on distant legs of a state of six:

    >>> import numpy as np, tnlib
    >>> cnot = np.eye(4)[[0, 1, 3, 2]]
    >>> gate = tnlib.embed(cnot, (1, 4), (2,) * 6)
    >>> gate.ranks
    (1, 1, 2, 2, 2, 1, 1)
    """
    return embed_for("embed", operator, legs, shape)


def embed_for(
    function: str, operator: TTMatrix | npt.ArrayLike, legs: int | Sequence[int], shape: Sequence[int]
) -> TTMatrix:
    """Return `embed`; errors name `function`."""
    sizes = as_sizes(function, "shape", shape)
    sites = as_legs(function, "legs", legs, len(sizes), proper=False)
    if not isinstance(operator, TTMatrix):
        if isinstance(operator, TensorTrain):
            raise wrong_type(function, "operator", "a TTMatrix or a matrix", operator, "pass tnlib.diag of it")
        operator = _split_matrix(
            function, as_array(function, "operator", operator, ndim=2), [sizes[leg] for leg in sites]
        )
    if len(sites) != len(operator.cores):
        raise ArgumentError(
            f"{function}: legs must be {len(operator.cores)}, one for each core of operator, got {sites}; name all."
        )
    if tuple(sizes[leg] for leg in sites) != operator.col_shape:
        raise ArgumentError(
            f"{function}: legs must have sizes {operator.col_shape}, the columns of the operator, got "
            f"{tuple(sizes[leg] for leg in sites)}; name other legs."
        )
    if list(sites) != sorted(sites):
        operator = permute(operator, sorted(range(len(sites)), key=sites.__getitem__))
    of_operator, cores, bond = iter(operator.cores), list[Array](), 1
    for leg, n in enumerate(sizes):
        if leg in sites:
            cores.append(next(of_operator))
            bond = cores[-1].shape[-1]
        else:
            identity = np.eye(bond)[:, None, None, :] * np.eye(n)[None, :, :, None]
            cores.append(identity.astype(operator.dtype))
    return TTMatrix(cores, exponent=operator.exponent)


def _split_matrix(function: str, matrix: Array, sizes: Sequence[int]) -> TTMatrix:
    """Return a matrix on legs of these sizes as a TT-matrix; on several legs it must be square."""
    if len(sizes) == 1:
        return TTMatrix([matrix[None, ..., None]])
    if matrix.shape != (math.prod(sizes),) * 2:
        raise ArgumentError(
            f"{function}: operator must be square, of {math.prod(sizes)} rows, for legs of sizes {tuple(sizes)}, got "
            f"{matrix.shape}; name other legs, or pass tnlib.ttm_svd of it."
        )
    return ttm_svd(matrix, sizes, sizes).value


def _new_sizes(tt: Any, old: Sequence[Sizes], shape: Any) -> list[Sizes]:
    """Return the sizes of the new cores, validated."""
    totals = [math.prod(side) for side in zip(*old, strict=True)]
    if isinstance(tt, TensorTrain):
        return [(n,) for n in as_sizes("reshape", "shape", shape, total=totals[0])]
    if not isinstance(shape, tuple | list) or len(shape) != 2 or not all(map(is_list, shape)):
        raise ArgumentError(
            f"reshape: shape of a TTMatrix must be a pair, (rows, columns), got {shape!r:.80}; pass both."
        )
    rows, columns = (as_sizes("reshape", "shape", split, total=n) for split, n in zip(shape, totals, strict=True))
    if len(rows) != len(columns):
        raise ArgumentError(
            f"reshape: shape must have as many row legs as column legs, got {len(rows)} and {len(columns)}; add legs "
            "of size 1."
        )
    return list(zip(rows, columns, strict=True))


def _groups(old: Sequence[Sizes], new: Sequence[Sizes]) -> list[tuple[range, range]]:
    """Return the smallest groups of neighbouring old and new legs with equal products."""
    groups = list[tuple[range, range]]()
    i = j = 0
    while i < len(old) and j < len(new):
        first, after, before, behind = i, j, np.array(old[i], object), np.array(new[j], object)
        i, j = i + 1, j + 1
        while (before != behind).any():
            if j == len(new) or (i < len(old) and math.prod(before) <= math.prod(behind)):
                before, i = before * old[i], i + 1
            else:
                behind, j = behind * new[j], j + 1
        groups.append((range(first, i), range(after, j)))
    last = groups.pop()  # legs of size 1 at the end
    return [*groups, (range(last[0].start, len(old)), range(last[1].start, len(new)))]


def _joined(cores: Sequence[Array]) -> Array:
    """Return the core of several neighbours, (l, sizes ..., r)."""
    out = cores[0]
    for core in cores[1:]:
        sides = out.ndim - 2
        pair = np.tensordot(out, core, 1)  # l [sizes] [sizes] r
        order = [0, *(k for side in range(sides) for k in (1 + side, 1 + sides + side)), 1 + 2 * sides]
        sizes = [n * m for n, m in zip(out.shape[1:-1], core.shape[1:-1], strict=True)]
        out = pair.transpose(order).reshape(len(out), *sizes, core.shape[-1])
    return out


def _split(core: Array, sizes: Sequence[Sizes]) -> list[Array]:
    """Return cores of these sizes whose product is one core, all but the last one left-isometric."""
    cores, rest = list[Array](), core
    for dims in sizes[:-1]:
        sides, left = len(dims), len(rest)
        rests = [n // m for n, m in zip(rest.shape[1:-1], dims, strict=True)]
        factored = rest.reshape(left, *(n for pair in zip(dims, rests, strict=True) for n in pair), rest.shape[-1])
        order = [0, *range(1, 2 * sides, 2), *range(2, 2 * sides + 1, 2), 2 * sides + 1]
        q, r = qr_positive(np.ascontiguousarray(factored.transpose(order)).reshape(left * math.prod(dims), -1))
        cores.append(q.reshape(left, *dims, -1))
        rest = r.reshape(len(r), *rests, core.shape[-1])
    return [*cores, rest.reshape(len(rest), *sizes[-1], core.shape[-1])]
