r"""Sweeps over cores of other libraries: the algorithms of the numpy modules beside this one, on the array API.

All are written over the primitives of `array_namespace.py`, so that torch differentiates through them. What is discrete
is computed on the host and enters as a constant: ranks, powers of two, signs and phases, the bases of equal singular
values. Results that do not depend on these, such as the dense array, have exact gradients.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from tnlib.linalg.array_namespace import (
    OtherArray,
    adjoint,
    dtype_of,
    namespace,
    project,
)
from tnlib.linalg.array_truncation import normalize, qr_positive, rescale, truncate
from tnlib.linalg.truncation import TruncationBudget


def contract_cores(cores: Sequence[OtherArray]) -> tuple[OtherArray, int]:
    """Contract cores (r[k], n[k], r[k+1]) to a vector (n[0] ... n[d-1],), times 2**e: both halves, then once."""
    sums = np.cumsum([math.log(core.shape[1]) for core in cores])
    half = 1 + int(np.argmin(np.abs(sums - sums[-1] / 2)))
    left, e = cores[0], 0
    for core in cores[1:half]:
        left, e = rescale(_times(left, core), e)  # 1 (n0 ...) [r] nk r'
    right = None
    for core in reversed(cores[half:]):
        right, e = rescale(core if right is None else _times(core, right), e)  # r (nk ... n(d-1)) 1
    product = left if right is None else _times(left, right)  # 1 (n0 ...) [r] (... n(d-1)) 1
    return namespace(product).reshape(product, (-1,)), e


def inner_product(a: Sequence[OtherArray], b: Sequence[OtherArray]) -> tuple[OtherArray, int]:
    """Return x and e: the sum over all legs of conj(a) times b is x * 2**e, x without legs."""
    xp, e = namespace(*a, *b), 0
    carry = project(rows(a[0]), rows(b[0]))  # ra [n] rb
    for x, y in zip(a[1:], b[1:], strict=True):
        carry, e = rescale(carry, e)
        carry = project(rows(x), rows(attach_left(carry, y)))  # ra' [ra n] [rb] rb'
    return xp.reshape(carry, ()), e


def move_center(
    cores: Sequence[OtherArray], exponent: int, start: int | None, center: int
) -> tuple[list[OtherArray], int]:
    """Return the cores isometric towards core `center`, and the exponent; `start` is the centre so far, if known."""
    out = list(cores)
    first, last = (0, len(out) - 1) if start is None else (start, start)
    for k in range(first, center):
        q, r = qr_positive(rows(out[k]))
        out[k] = like_rows(q, out[k])
        out[k + 1], exponent = rescale(attach_left(r, out[k + 1]), exponent)
    for k in range(last, center, -1):
        q, r = qr_positive(adjoint(columns(out[k])))  # core = r^H q^H
        out[k] = like_columns(adjoint(q), out[k])
        out[k - 1], exponent = rescale(attach_right(out[k - 1], adjoint(r)), exponent)
    return out, exponent


def round_cores(
    cores: Sequence[OtherArray], exponent: int, rtol: float | None, max_rank: int | None
) -> tuple[list[OtherArray], int, TruncationBudget]:
    """Return the left-canonical cores of the rounded train, the exponent, and the truncations (see `round.py`)."""
    out, exponent = move_center(cores, exponent, None, 0)
    out[0], exponent, size = normalize(out[0], exponent)
    sides = [max(core.shape[0], len(out)) for core in out[1:]]
    budget = TruncationBudget(size, rtol, sides, dtype_of(out[0]))
    for k in range(len(out) - 1):
        u, carry = truncate(rows(out[k]), budget, max_rank)
        out[k] = like_rows(u, out[k])
        out[k + 1] = attach_left(carry, out[k + 1])
    return out, exponent, budget


def multiply_matrices(a: Sequence[OtherArray], b: Sequence[OtherArray]) -> list[OtherArray]:
    """Return the cores (la lb, m, p, ra rb) of the matrix product of cores (la, m, n, ra) and (lb, n, p, rb)."""
    out = []
    for x, y in zip(a, b, strict=True):
        xp = namespace(x, y)
        (l, m, _, r), (k, _, p, s) = x.shape, y.shape
        product = xp.tensordot(x, y, axes=((2,), (1,)))  # la m [n] ra lb [n] p rb
        out.append(xp.reshape(xp.permute_dims(product, (0, 3, 1, 4, 2, 5)), (l * k, m, p, r * s)))
    return out


def rows(core: OtherArray) -> OtherArray:
    """Return a core (l, n, r) as a matrix (l n, r)."""
    return namespace(core).reshape(core, (-1, core.shape[-1]))


def columns(core: OtherArray) -> OtherArray:
    """Return a core (l, n, r) as a matrix (l, n r)."""
    return namespace(core).reshape(core, (core.shape[0], -1))


def like_rows(matrix: OtherArray, core: OtherArray) -> OtherArray:
    """Return a matrix (l n, r') with the left legs of `core`."""
    return namespace(matrix).reshape(matrix, (*core.shape[:-1], -1))


def like_columns(matrix: OtherArray, core: OtherArray) -> OtherArray:
    """Return a matrix (l', n r) with the right legs of `core`."""
    return namespace(matrix).reshape(matrix, (-1, *core.shape[1:]))


def attach_left(matrix: OtherArray, core: OtherArray) -> OtherArray:
    """Return matrix (l', l) times a core (l, n, r)."""
    return like_columns(namespace(matrix, core).matmul(matrix, columns(core)), core)  # l' [l] (n r)


def attach_right(core: OtherArray, matrix: OtherArray) -> OtherArray:
    """Return a core (l, n, r) times matrix (r, r')."""
    return like_rows(namespace(matrix, core).matmul(rows(core), matrix), core)  # (l n) [r] r'


def _times(x: OtherArray, y: OtherArray) -> OtherArray:
    """Return two cores (l, m, r) and (r, n, s) as one, (l, m n, s)."""
    xp = namespace(x, y)
    return xp.reshape(xp.matmul(rows(x), columns(y)), (x.shape[0], -1, y.shape[2]))  # (l m) [r] (n s)
