"""Legs of a train that go away: fixed, summed against vectors, or summed against another train."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from tnlib._typing import Array
from tnlib.linalg.scale import largest, shift


def absorb(parts: Sequence[Array]) -> tuple[list[Array], int]:
    """Return a train without the legs that are gone, and e: it is 2**e times smaller.

    `parts` are cores (l, n, r), and matrices (l, r) where a leg is gone. A matrix goes into the core on its right; what
    stands behind the last core goes into that one. Of matrices alone, what is left is one core without a leg, (1, 1).
    """
    cores: list[Array] = []
    carry, twos = np.ones((1, 1), parts[0].dtype), 0
    pending = False
    for part in parts:
        if pending or part.ndim == 2:
            part, e = _in_range(np.tensordot(carry, part, 1) if pending else part)  # l [r] n r' or l [r] r'
            twos += e
        pending = part.ndim == 2
        if pending:
            carry = part
        else:
            cores.append(part)
    if pending and cores:
        cores[-1], e = _in_range(np.tensordot(cores[-1], carry, 1))  # l n [r] r'
        twos += e
    return cores or [carry], twos


def sum_over_both(a: Sequence[Array], b: Sequence[Array | None], summed: Sequence[bool]) -> tuple[list[Array], int]:
    """Return what is left of two trains where the legs `summed` of both are summed over, and e as `absorb` does.

    Where b has None it has no core, and the leg of `a` stays alone; where it has one that is not summed, the core that
    comes out has both legs. The bonds that come out are pairs of bonds.
    """
    cores: list[Array] = []
    dtype = np.result_type(a[0], *(core for core in b if core is not None))
    carry: Array | None = np.ones((1, 1, 1), dtype)  # what legs that are gone have left since the last core: x la lb
    pairs, twos = (1, 1), 0
    for one, other, gone in zip(a, b, summed, strict=True):
        if carry is None:
            carry = np.eye(math.prod(pairs), dtype=dtype).reshape(-1, *pairs)
        half = np.tensordot(carry, one, axes=([1], [0]))  # x lb [la] n ra
        if gone and other is not None:
            carry, e = _in_range(np.tensordot(half, other, axes=([1, 2], [0, 1])))  # x [lb n] ra rb
            twos += e
            continue
        if other is None:
            both = half.transpose(0, 2, 3, 1)  # x n ra lb
        else:
            both = np.tensordot(half, other, axes=([1], [0])).transpose(0, 1, 3, 2, 4)  # x n m ra [lb] rb
        cores.append(both.reshape(*both.shape[:-2], -1))
        pairs, carry = both.shape[-2:], None
    if not cores and carry is not None:
        return [carry[:, :, 0]], twos
    if carry is not None:
        cores[-1] = np.tensordot(cores[-1], carry.reshape(-1, 1), 1)  # x n m [(ra rb)] 1
    return cores, twos


def _in_range(a: Array) -> tuple[Array, int]:
    e = math.frexp(largest(a))[1]
    return (a, 0) if abs(e) < 32 else (shift(a, -e), e)
