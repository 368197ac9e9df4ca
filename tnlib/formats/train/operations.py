"""Inner products, entries at many indices, Kronecker and outer products of trains."""

from __future__ import annotations

from typing import Any

import numpy as np

from tnlib._array_api import adjoint
from tnlib._errors import ArgumentTypeError
from tnlib._typing import Array
from tnlib.formats.train.arguments import as_train
from tnlib.formats.train.cores import attach_left, rows
from tnlib.formats.train.format import TensorTrain, Train
from tnlib.formats.train.tt_matrix import T, TTMatrix, as_column, refuse_unequal_legs
from tnlib.linalg.scaling import Scaled, normalize_rows

_BATCH = 1 << 20  # numbers in the rows that `train_entries` carries through a train


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
    step = max(1, _BATCH // max(train.ranks))
    parts = [_multiply_rows(train, points[i : i + step]) for i in range(0, len(points), step)]
    return np.concatenate([x for x, _ in parts]), np.concatenate([e for _, e in parts])


def _multiply_rows(train: TensorTrain, points: Array) -> tuple[Array, Array]:
    """Rows that share the index of a core are multiplied together; every row has its own power of two."""
    rows = np.ones((len(points), 1), train.dtype)
    exponents = np.full(len(points), train.exponent, np.int64)
    for k, core in enumerate(train.cores):
        grown = np.empty((len(points), core.shape[2]), rows.dtype)
        order = np.argsort(points[:, k], kind="stable")
        values, starts = np.unique(points[order, k], return_index=True)
        for index, members in zip(values, np.split(order, starts[1:]), strict=True):
            grown[members] = rows[members] @ core[:, index]  # N [l] r
        rows, e = normalize_rows(grown)
        exponents += e
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
