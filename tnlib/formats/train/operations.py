"""Verbs of trains: inner, Kronecker and outer products, entries at many indices, contraction, concatenation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tnlib._array_api import adjoint, detached, from_host, namespace, permute, reshape, to_host
from tnlib._errors import ArgumentError, ArgumentTypeError
from tnlib._typing import Array
from tnlib._validate import as_list, as_position
from tnlib.formats.train.cores import add_cores, attach_left, columns, contract_fixed_legs, rows, with_common_exponent
from tnlib.formats.train.format import TensorTrain, Train
from tnlib.formats.train.tt_matrix import T, TTMatrix, as_column, as_train, refuse_unequal_legs
from tnlib.linalg.scaling import Scaled, normalize_rows, shift

_BATCH = 1 << 17  # numbers in the rows that `train_entries` carries through a train, a mebibyte that stays in cache
# A loop over rows takes a quarter to two thirds of the time of matrix products of the rows with one index, if there are
# many rows and they are short.
_SMALL_RANK, _MANY_POINTS = 20, 1 << 11
_SHORT_LEG = 16  # up to which a product with all indices takes less time than sorting the points by index


def inner_trains(a: Train, b: Train) -> Scaled:
    """Return the sum over all legs of conj(a) times b, from the left to the right."""
    (x, *left), (y, *right) = a.fused().cores, b.fused().cores
    carry = Scaled(adjoint(rows(x)) @ rows(y), a.exponent + b.exponent)  # ra [n] rb
    for x, y in zip(left, right, strict=True):
        carry = carry.update(adjoint(rows(x)) @ rows(attach_left(carry.array, y)))  # ra' [ra n] [rb] rb'
    return carry


def inner_between(a: Any, operator: Any, b: Any) -> Scaled:
    """Return the inner product of `a` with `operator` times `b`; no array has both bonds of the product."""
    as_train("inner", "operator", operator, TTMatrix)
    as_train("inner", "a", a)
    as_train("inner", "b", b)
    if type(a) is not type(b):
        raise ArgumentTypeError(
            f"inner: a and b must be of one kind on both sides of an operator, got a {type(a).__name__} and a "
            f"{type(b).__name__}; make one of the other with tnlib.convert."
        )
    left, right = (as_column(t) if isinstance(t, TensorTrain) else t for t in (a, b))
    refuse_unequal_legs("inner, a and operator", left.T, operator)
    refuse_unequal_legs("inner, operator and b", operator, right)
    refuse_unequal_legs("inner, a and b", left, right.T)
    dtype = np.result_type(left.dtype, operator.dtype, right.dtype)
    carry = Scaled(np.ones((1, 1, 1), dtype), left.exponent + operator.exponent + right.exponent)  # la l lb
    for x, m, y in zip(left.cores, operator.cores, right.cores, strict=True):
        half = np.tensordot(carry.array, y, axes=([2], [0]))  # la l [lb] n p rb
        half = np.tensordot(half, m, axes=([1, 2], [0, 2]))  # la [l n] p rb m r
        grown = np.tensordot(x.conj(), half, axes=([0, 1, 2], [0, 3, 1]))  # [la m p] ra rb r
        carry = carry.update(grown.transpose(0, 2, 1))  # ra r rb
    return carry


def train_entries(t: Train, points: Array) -> tuple[Array, Array]:
    """Return x and e: entry i of `t` is x[i] * 2**e[i] at the indices points[i], (N, d), of the fused legs."""
    train = t.fused()
    if train.library != "numpy":
        return _multiply_other_rows(train, points)
    step = max(1, _BATCH // max(train.ranks))
    parts = [_multiply_rows(train, points[i : i + step]) for i in range(0, len(points), step)]
    return np.concatenate([x for x, _ in parts]), np.concatenate([e for _, e in parts])


def _multiply_other_rows(train: TensorTrain, points: Array) -> tuple[Any, Array]:
    """Return the same for arrays of another library, (N, l, r) at a time: torch differentiates the entries."""
    exponents = np.full(len(points), train.exponent, np.int64)
    rows: Any = None
    for core, chosen in zip(train.cores, points.T, strict=True):
        xp = namespace(core)
        matrices = permute(xp.take(core, from_host(chosen, core), axis=1), (1, 0, 2))  # N l r
        rows = matrices if rows is None else rows @ matrices  # N 1 [l] r
        tops = to_host(detached(xp.max(xp.abs(rows), axis=(1, 2))))
        e = np.frexp(tops)[1].astype(np.int64)
        rows = shift(rows, -e[:, None, None])
        exponents += e
    return reshape(rows, (-1,)), exponents


def _multiply_rows(train: TensorTrain, points: Array) -> tuple[Array, Array]:
    """Every row has its own power of two. Of many points and small ranks, rows are multiplied one by one.

    Otherwise rows are multiplied with a whole core, if it is small, or those that share an index of the core together.
    """
    rows = np.ones((len(points), 1), train.dtype)
    exponents = np.full(len(points), train.exponent, np.int64)
    if max(train.ranks) <= _SMALL_RANK and len(points) >= _MANY_POINTS:
        return _multiply_each(train, points, rows, exponents)
    for k, core in enumerate(train.cores):
        _, n, right = core.shape
        if n <= _SHORT_LEG and len(points) * n * right <= _BATCH:
            products = (rows @ columns(core)).reshape(-1, n, right)  # N [l] (n r)
            grown = products[np.arange(len(points)), points[:, k]]
        else:
            grown = times_chosen(rows, core, points[:, k])
        rows, e = normalize_rows(grown)
        exponents += e
    return rows[:, 0], exponents


def times_chosen(rows: Array, core: Array, chosen: Array) -> Array:
    """Return row i of `rows` (N, l) times core[:, chosen[i]], (N, r).

    Every row is multiplied with a copy of its own matrix where these fit into cache: products of rows that share a
    matrix take 7 us for each of the matrices.
    """
    if len(rows) * core.shape[0] * core.shape[2] <= _BATCH:
        return np.asarray(np.einsum("il,lir->ir", rows, core.take(chosen, axis=1)))  # i [l] r
    out = np.empty((len(rows), core.shape[2]), rows.dtype)
    order = np.argsort(chosen, kind="stable")
    values, starts = np.unique(chosen[order], return_index=True)
    for index, members in zip(values, np.split(order, starts[1:]), strict=True):
        out[members] = rows[members] @ core[:, index]  # N [l] r
    return out


def _multiply_each(train: TensorTrain, points: Array, rows: Array, exponents: Array) -> tuple[Array, Array]:
    from tnlib.linalg import kernels

    largest = float(np.finfo(train.dtype).maxexp)
    scaling = 2.0 ** (-largest / 8), 2.0 ** (largest / 8)
    for k, core in enumerate(train.cores):
        products = np.empty((len(points), core.shape[2]), train.dtype)
        tables = np.ascontiguousarray(core.transpose(1, 0, 2))  # n l r
        kernels.times_chosen(rows, tables, np.ascontiguousarray(points[:, k]), scaling, products, exponents)
        rows = products
    return rows[:, 0], exponents


def kron_trains(a: TensorTrain, b: TensorTrain) -> TensorTrain:
    """Return the Kronecker product, leg by leg: core (l, n, r) (x) core (l', n', r'); ranks multiply."""
    cores = [np.kron(x, y) for x, y in zip(a.cores, b.cores, strict=True)]
    return TensorTrain.from_products(cores, a.exponent + b.exponent)


def chain_trains(a: T, b: T) -> T:
    """Return the outer product of two trains, or the Kronecker product of two TT-matrices: `b` behind `a`."""
    dtype = np.result_type(a.dtype, b.dtype)
    cores = [core.astype(dtype, copy=False) for core in (*a.cores, *b.cores)]
    return a.from_sweep(cores, None, a.exponent + b.exponent).folded()


def contract_vectors(t: TensorTrain, vectors: Mapping[int, Array]) -> Any:
    """Return `t` with legs summed against vectors: a TensorTrain, or a `Scaled` number where no leg is left."""
    parts = [vectors[k] @ c if k in vectors else c for k, c in enumerate(t.cores)]  # l [n] r
    cores, e = contract_fixed_legs(parts)
    if cores[0].ndim == 2:
        return Scaled(cores[0], e + t.exponent)
    return type(t).from_sweep(cores, None, e + t.exponent).folded()


def contract_trains(a: TensorTrain, b: TensorTrain, legs: Sequence[int]) -> TensorTrain | TTMatrix | Scaled:
    """Return two trains summed over the `legs` of `a`, ascending: as `tnlib.contract`, a `Scaled` for a number."""
    d, summed = len(a.cores), set(legs)
    partners: list[Array | None] = list(b.cores)
    if len(b.cores) == len(legs) < d:
        following = iter(b.cores)
        partners = [next(following) if k in summed else None for k in range(d)]
    cores, exponent = _sum_over_pairs(a.cores, partners, [k in summed for k in range(d)])
    exponent += a.exponent + b.exponent
    if cores[0].ndim == 2:
        return Scaled(cores[0], exponent)
    kind = TensorTrain if cores[0].ndim == 3 else TTMatrix
    return kind.from_products(cores, exponent)


def _sum_over_pairs(a: Sequence[Array], b: Sequence[Array | None], summed: Sequence[bool]) -> tuple[list[Array], int]:
    """Return the cores left of two trains when the legs `summed` of both are summed over, and their exponent.

    Where `b` has None, the leg of `a` stays alone; where its leg is not summed, the core carries both legs.
    """
    cores: list[Array] = []
    dtype = np.result_type(a[0], *(core for core in b if core is not None))
    carry = Scaled(np.ones((1, 1, 1), dtype))  # contracted legs since the last core: x la lb
    fresh = False  # True directly after a core, where the carry is the identity on a pair of bonds
    for x, y, contracted in zip(a, b, summed, strict=True):
        if fresh:
            pairs = carry.array.shape[1:]
            carry = Scaled(np.eye(math.prod(pairs), dtype=dtype).reshape(-1, *pairs), carry.exponent)
        half = np.tensordot(carry.array, x, axes=([1], [0]))  # x lb [la] n ra
        if contracted and y is not None:
            carry, fresh = carry.update(np.tensordot(half, y, axes=([1, 2], [0, 1]))), False  # x [lb n] ra rb
            continue
        if y is None:
            both = half.transpose(0, 2, 3, 1)  # x n ra lb
        else:
            both = np.tensordot(half, y, axes=([1], [0])).transpose(0, 1, 3, 2, 4)  # x n m ra [lb] rb
        cores.append(both.reshape(*both.shape[:-2], -1))
        carry, fresh = Scaled(np.empty((0, *both.shape[-2:]), dtype), carry.exponent), True
    if not cores:
        return [carry.array[:, :, 0]], carry.exponent
    if not fresh:
        cores[-1] = np.tensordot(cores[-1], carry.array.reshape(-1, 1), 1)  # x n m [(ra rb)] 1
    return cores, carry.exponent


def concatenate(trains: Sequence[TensorTrain], axis: int = 0) -> TensorTrain:
    """Return trains concatenated along one leg, as numpy.concatenate does for arrays; ranks add up.

    Parameters
    ----------
    trains
        Trains whose other legs agree.
    axis
        The leg along which trains are concatenated; negative numbers count from the end.

    Examples
    --------
    >>> import numpy as np, tnlib
    >>> ones = tnlib.TensorTrain([np.ones((1, 2, 1))] * 2)
    >>> tnlib.concatenate([ones, 5 * ones], axis=1).full()
    array([[1., 1., 5., 5.],
           [1., 1., 5., 5.]])
    """
    for j, train in enumerate(as_list("concatenate", "trains", trains, "trains")):
        as_train("concatenate", f"train {j}", train, TensorTrain)
    shape = trains[0].shape
    axis = as_position("concatenate", "axis", axis, len(shape), "legs")
    for j, train in enumerate(trains):
        differ = [k for k, (n, m) in enumerate(zip(shape, train.shape, strict=False)) if n != m and k != axis]
        if differ or train.ndim != len(shape):
            where = f"leg {differ[0]}" if differ else "the number of legs"
            raise ArgumentError(
                f"concatenate: all legs but leg {axis} must agree, got shapes {shape} and {train.shape} of train {j}, "
                f"which differ in {where}; slice or pad one of them."
            )
    terms, exponent = with_common_exponent([(train.cores, train.exponent) for train in trains])
    return TensorTrain.from_sweep(add_cores(terms, stacked=axis), None, exponent).folded()
