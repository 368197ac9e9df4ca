"""Lists of train cores: contraction to dense arrays, sums, products, real parts, legs of matrices in pairs."""

from __future__ import annotations

import math
import operator
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from tnlib._array_api import astype, dtype_of, from_host, permute, reshape, tensordot
from tnlib._typing import Array
from tnlib.linalg.orthogonal import is_isometry
from tnlib.linalg.scaling import Scaled, is_near_one, largest, rescale_drift, shift

_FAR = 1 << 14  # powers of two; a term this much smaller than another one is lost in the sum


def contract_cores(cores: Sequence[Array]) -> Scaled:
    """Contract cores (r[k], n[k], r[k+1]) to a new matrix (r[0] n[0] ... n[d-1], r[d]): both halves, then once."""
    if len(cores) == 1:
        return Scaled(rows(cores[0]) * 1)
    half = _middle([core.shape[1] for core in cores])
    left, e = rows(cores[0]), 0  # (r0 n0) r
    for core in cores[1:half]:
        left, e = rescale_drift(reshape(left @ columns(core), (-1, core.shape[-1])), e)
    right, f = columns(cores[-1]), 0  # r (n(d-1) rd)
    for core in cores[half:-1][::-1]:
        right, f = rescale_drift(reshape(rows(core) @ right, (core.shape[0], -1)), f)
    product = left @ right  # (r0 n0 ...) [r] (... n(d-1) rd)
    return Scaled(reshape(product, (-1, cores[-1].shape[-1])), e + f)


def _middle(sizes: Sequence[int]) -> int:
    """Return the number of first legs whose product is the nearest to the root of the product of all, d - 1 at most."""
    *products, total = accumulate(sizes, operator.mul)
    k = min(bisect_left(products, math.isqrt(total)), len(products) - 1)
    return k if k > 0 and products[k] * products[k - 1] > total else k + 1


def rows(core: Array) -> Array:
    """Return a core (l, n, r) as a matrix (l n, r)."""
    return reshape(core, (-1, core.shape[-1]))  # type: ignore[no-any-return]


def columns(core: Array) -> Array:
    """Return a core (l, n, r) as a matrix (l, n r)."""
    return reshape(core, (core.shape[0], -1))  # type: ignore[no-any-return]


def attach_left(matrix: Array, core: Array) -> Array:
    """Return a matrix (l', l) times a core (l, n, r)."""
    return reshape(matrix @ columns(core), (-1, *core.shape[1:]))  # type: ignore[no-any-return]  # l' [l] (n r)


def attach_right(core: Array, matrix: Array) -> Array:
    """Return a core (l, n, r) times a matrix (r, r')."""
    return reshape(rows(core) @ matrix, (*core.shape[:-1], -1))  # type: ignore[no-any-return]  # (l n) [r] r'


def contract_fixed_legs(parts: Sequence[Array]) -> tuple[list[Array], int]:
    """Return the cores of a train without the contracted legs, and e: they are 2**e times smaller.

    `parts` are cores (l, n, r), and matrices (l, r) where a leg is contracted. A matrix goes into the core on its
    right, those behind the last core into that one. Matrices alone leave one core without a leg, (1, 1).
    """
    cores: list[Array] = []
    carry: Array | None = None
    e = 0
    for part in parts:
        if part.ndim == 2:
            carry = part if carry is None else carry.dot(part)  # l [r] r', 0.4 us faster than the operator
            if not is_near_one(carry):
                carry, e = rescale_drift(carry, e)
            continue
        core, e = (part, e) if carry is None else rescale_drift(attach_left(carry, part), e)
        cores.append(core)
        carry = None
    if carry is None:
        return cores, e
    if not cores:
        return [carry], e
    cores[-1], e = rescale_drift(attach_right(cores[-1], carry), e)
    return cores, e


def apply_cores(cores: Sequence[Array], x: Array) -> Scaled:
    """Return the matrix of `cores` (r[k], m[k], n[k], r[k+1]) times x (prod n, K), shape (prod m, K).

    Core by core: the column leg n[k] of x is exchanged for the row leg m[k], which joins the end.
    """
    columns = x.shape[1]
    y = Scaled(x)  # (l n0) (n1 ... K)
    for core in cores:
        left, m, n, right = core.shape
        exchange = core.transpose(0, 2, 1, 3).reshape(left * n, m * right)  # (l nk) (mk r)
        product = y.array.reshape(left * n, -1).T @ exchange  # (n(k+1) ... K m0 ...) [(l nk)] (mk r)
        y = y.update(product.reshape(-1, right).T)  # r (n(k+1) ... K m0 ... mk)
    return Scaled(y.array.reshape(columns, -1).T, y.exponent)  # (m0 ... m(d-1)) K


def add_cores(terms: Sequence[Sequence[Array]], *, stacked: int | None = None) -> list[Array]:
    """Return the cores (l, n, r) of the sum of trains, blocks along the diagonal; leg `stacked` is concatenated."""
    dtype, last = np.result_type(*{dtype_of(core) for cores in terms for core in cores}), len(terms[0]) - 1
    out = []
    for k in range(last + 1):
        blocks = [cores[k] for cores in terms]
        steps = [int(k > 0), int(k == stacked), int(k < last)]  # legs along which blocks follow each other
        sizes = [sum(b.shape[i] for b in blocks) if steps[i] else blocks[0].shape[i] for i in range(3)]
        core, at = from_host(np.zeros(sizes, dtype), blocks[0]), [0, 0, 0]
        for block in blocks:
            (i, j, p), (l, n, r) = at, block.shape
            part = core[i : i + l, j : j + n, p : p + r]
            part[...] = astype(block, dtype) if any(steps) else part + block
            at = [i + l * steps[0], j + n * steps[1], p + r * steps[2]]
        out.append(core)
    return out


def with_common_exponent(trains: Sequence[tuple[Sequence[Array], int]]) -> tuple[list[list[Array]], int]:
    """Return the cores of trains (cores, exponent) for one exponent, the largest of those that are not zero.

    The power of two of a train is spread over all its cores, one of which might not have the range for it.
    """
    if len({e for _, e in trains}) == 1:
        return [list(cores) for cores, _ in trains], trains[0][1]
    top = max((e for cores, e in trains if all(largest(core) > 0 for core in cores)), default=0)
    out = []
    for cores, exponent in trains:
        d, behind = len(cores), max(-_FAR * len(cores), min(0, exponent - top))
        steps = [behind // d + (k < behind % d) for k in range(d)]
        out.append([shift(core, e) for core, e in zip(cores, steps, strict=True)])
    return out, top


def multiply_entries(a: Sequence[Array], b: Sequence[Array]) -> list[Array]:
    """Return the cores of the entrywise product of two trains of cores (l, n, r)."""
    out = []
    for x, y in zip(a, b, strict=True):
        (l, n, r), (m, _, s) = x.shape, y.shape
        # la 1 n (ra rb) times 1 lb n (ra rb): both with long rows, which one product of numpy runs along
        wide, repeated = np.repeat(x, s, axis=2)[:, None], np.tile(y, r)[None]
        out.append((wide * repeated).reshape(l * m, n, r * s))
    return out


def multiply_matrices(a: Sequence[Array], b: Sequence[Array]) -> list[Array]:
    """Return the cores (la lb, m, p, ra rb) of the matrix product of cores (la, m, n, ra) and (lb, n, p, rb)."""
    out = []
    for x, y in zip(a, b, strict=True):
        (l, m, _, r), (k, _, p, s) = x.shape, y.shape
        product = tensordot(x, y, ((2,), (1,)))  # la m [n] ra lb [n] p rb
        out.append(reshape(permute(product, (0, 3, 1, 4, 2, 5)), (l * k, m, p, r * s)))
    return out


def attainable_ranks(ranks: Sequence[int], sizes: Sequence[int]) -> list[int]:
    """Return `ranks` (d + 1,), lowered to what the legs of these sizes on either side of a bond allow."""
    out = list(ranks)
    for k, n in enumerate(sizes):
        out[k + 1] = min(out[k + 1], n * out[k])
    for k, n in reversed(list(enumerate(sizes))):
        out[k] = min(out[k], n * out[k + 1])
    return out


def diagonal_core(factor: Array) -> Array:
    """Return a CP factor (n, R) or (m, n, R) as a core (R, ..., R), diagonal in its bonds."""
    core, i = np.zeros((factor.shape[-1], *factor.shape), factor.dtype), np.arange(factor.shape[-1])
    core[i, ..., i] = factor.transpose(-1, *range(factor.ndim - 1))
    return core


def real_part(cores: Sequence[Array], *, imaginary: bool = False) -> list[Array]:
    """Return real cores (2 l, ..., 2 r) of the real, or imaginary, part of a train of complex cores (l, ..., r).

    Multiplication by a complex number is the real matrix [[Re, -Im], [Im, Re]]; the first core takes one row of it,
    the last one the column that begins with 1.
    """
    if len(cores) == 1:
        return [np.ascontiguousarray(cores[0].imag if imaginary else cores[0].real)]
    out = []
    for k, core in enumerate(cores):
        rows = [np.concatenate([core.real, -core.imag], axis=-1), np.concatenate([core.imag, core.real], axis=-1)]
        if k == len(cores) - 1:
            rows = [core.real, core.imag]
        out.append(rows[int(imaginary)] if k == 0 else np.concatenate(rows, axis=0))
    return out


def fuse_legs(cores: Sequence[Array]) -> list[Array]:
    """Return TT-matrix cores (r, m, n, r') as train cores (r, m n, r')."""
    return [reshape(core, (core.shape[0], -1, core.shape[-1])) for core in cores]


def pair_legs(a: Array, row_shape: Sequence[int], col_shape: Sequence[int]) -> Array:
    """Return a matrix (prod m, prod n) as the array (m[0] n[0], m[1] n[1], ...) with paired legs."""
    d = len(row_shape)
    order = [leg for k in range(d) for leg in (k, d + k)]  # m0 n0 m1 n1 ...
    pairs = [m * n for m, n in zip(row_shape, col_shape, strict=True)]
    return a.reshape(*row_shape, *col_shape).transpose(order).reshape(pairs)


def unpair_legs(x: Array, row_shape: Sequence[int], col_shape: Sequence[int]) -> Array:
    """Undo `pair_legs`: the array (m[0] n[0], m[1] n[1], ...), flat or not, as the matrix (prod m, prod n)."""
    pairs = [(m, n) for m, n in zip(row_shape, col_shape, strict=True) if m * n > 1]  # numpy has at most 64 legs
    d = len(pairs)
    split = [size for pair in pairs for size in pair]  # m0 n0 m1 n1 ...
    order = [*range(0, 2 * d, 2), *range(1, 2 * d, 2)]  # m0 m1 ... n0 n1 ...
    return reshape(permute(reshape(x, split), order), (math.prod(row_shape), -1))  # type: ignore[no-any-return]


def find_center(cores: Sequence[Array], stated: int | None = None) -> int | None:
    """Return the index of an orthogonality centre of cores (r, legs ..., r'), None if there is none.

    A stored centre may be wrong: the user may have changed the cores since. The test costs one product per core. If
    several cores qualify, as in product states, return the stated one or the first.
    """
    last = len(cores) - 1
    rights = (k for k in range(last, 0, -1) if not is_isometry(cores[k].reshape(len(cores[k]), -1).T))
    lefts = (k for k in range(last) if not is_isometry(cores[k].reshape(-1, cores[k].shape[-1])))
    first, final = next(rights, 0), next(lefts, last)  # all after and all before them are isometric
    if final < first:
        return None
    return stated if stated is not None and first <= stated <= final else first
