"""Contraction of some legs of trains: fixed indices, vectors, another train."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tnlib._typing import Array
from tnlib.formats.train.cores import contract_fixed_legs
from tnlib.formats.train.format import TensorTrain
from tnlib.formats.train.tt_matrix import TTMatrix
from tnlib.linalg.scaling import Scaled


def contract_vectors(t: TensorTrain, vectors: Mapping[int, Array]) -> Any:
    """Return `t` with legs summed against vectors: a TensorTrain, or a `Scaled` number where no leg is left."""
    parts = [np.tensordot(c, vectors[k], axes=([1], [0])) if k in vectors else c for k, c in enumerate(t.cores)]
    cores, e = contract_fixed_legs(parts)  # l [n] r
    if cores[0].ndim == 2:
        return Scaled(cores[0], e + t.exponent)
    return type(t).from_sweep(cores, None, e + t.exponent).folded()


def contract_trains(a: TensorTrain, b: TensorTrain, legs: Sequence[int]) -> TensorTrain | TTMatrix | Scaled:
    """Return two trains summed over the `legs` of `a`, ascending: as `tnlib.contract`, a `Scaled` for a number."""
    d = len(a.cores)
    partners: list[Array | None] = list(b.cores)
    if len(b.cores) == len(legs) < d:
        following = iter(b.cores)
        partners = [next(following) if k in legs else None for k in range(d)]
    cores, exponent = _sum_over_pairs(a.cores, partners, [k in legs for k in range(d)])
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
