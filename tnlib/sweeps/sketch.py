r"""A sum of trains to one train of smaller ranks, by random sketches of what stands on the right of every bond.

Al Daas, Ballard, Cazeaux, Hallman, Miedlar, Pasha, Reid and Saibaba, "Randomized algorithms for rounding in the
tensor-train format", SIAM J. Sci. Comput. 45 (2023). A sweep from the right multiplies each term of the sum A with a
random train of l columns, W[k] = (part on the right of bond k) Omega; a sweep from the left takes

    Q[k] R = Y[k] = (Q[k-1]^H A)[k] W[k],

an orthonormal basis of what that bond is seen to span, and in the end A is projected on all of them. Nothing on the way
is larger than a rank of one term times l. What the projection leaves out at a bond is orthogonal to what it leaves out
at the others, so another random train W', of columns that keep norms on average, tells

    norm(A - Q Q^H A)^2  =  mean over j of  sum over k of  norm((1 - Q[k] Q[k]^H) (Q[k-1]^H A)[k] W'[k][:, j])^2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from tnlib._typing import Array
from tnlib.linalg.scale import largest, shift

Train = Sequence[Array]
_SURE = 2.0  # standard errors


def bond_bounds(terms: Sequence[Train]) -> list[int]:
    """Return the rank that each of the d + 1 bonds of the sum has at most."""
    legs = [core.shape[1] for core in terms[0]]
    return [
        *(min(sum(len(t[k]) for t in terms), math.prod(legs[:k]), math.prod(legs[k:])) for k in range(len(legs))),
        1,
    ]


def project_on_sketch(terms: Sequence[Train], width: int, rng: np.random.Generator) -> tuple[list[Array], float, int]:
    """Return cores (l, n, r) of a projection of the sum of `terms`, of ranks up to `width`, and what it left out.

    The cores are left-isometric but the last; what was left out is a norm, two standard errors included. Both are 2**e
    times smaller than for the given terms, with e the third that is returned.
    """
    dtype = np.result_type(*(core for term in terms for core in term))
    sizes = [min(width, bound) for bound in bond_bounds(terms)]
    right, check = (_sketch(terms, sizes, dtype, rng) for _ in range(2))
    rests = [np.ones((1, 1), dtype) for _ in terms]  # q l, of every term
    out: list[Array] = []
    squares: list[tuple[float, int]] = []
    twos = 0
    for k in range(len(sizes) - 2):
        n = terms[0][k].shape[1]
        grown, e = _in_range([_times(rest, term[k]) for rest, term in zip(rests, terms, strict=True)])  # (q n) [l] r
        twos += e
        q = np.linalg.qr(_sum_of_products(grown, right[k + 1][0]))[0]
        fresh, e = check[k + 1]
        seen = _sum_of_products(grown, fresh)
        missing = np.square(np.abs(seen - q @ (q.conj().T @ seen))).sum(axis=0, dtype=np.float64)
        squares.append((float(missing.mean() + _SURE * missing.std() / math.sqrt(len(missing))), 2 * (twos + e)))
        rests = [q.conj().T @ a for a in grown]  # q' [(q n)] r
        out.append(q.reshape(-1, n, q.shape[1]))
    last = _sum_of_products(rests, [term[-1].reshape(len(term[-1]), -1) for term in terms])  # q n
    with np.errstate(over="ignore"):
        lost = math.sqrt(sum(float(np.ldexp(square, e - 2 * twos)) for square, e in squares))
    return [*out, last.reshape(*last.shape, 1)], lost, twos


def _sketch(
    terms: Sequence[Train], sizes: Sequence[int], dtype: np.dtype[Any], rng: np.random.Generator
) -> list[tuple[list[Array], int]]:
    """Return, for every bond, what stands on its right in each term times the same random train, (r, l), and e.

    It is 2**e times smaller; on average every column keeps norms.
    """
    parts, twos = [np.ones((1, 1), dtype) for _ in terms], 0
    out = [(parts, twos)]
    for k in range(len(sizes) - 2, 0, -1):
        n, columns = terms[0][k].shape[1], sizes[k + 1]
        omega = _normal((n * columns, sizes[k]), dtype, rng) / math.sqrt(columns)
        omega = omega.astype(dtype, copy=False)
        grown = [np.tensordot(term[k], part, 1) for term, part in zip(terms, parts, strict=True)]  # l n [r] j
        parts, e = _in_range([a.reshape(len(a), -1) @ omega for a in grown])  # l [n] [j] j'
        twos += e
        out.append((parts, twos))
    return [out[0], *reversed(out)]  # nothing is asked of bond 0


def _times(rest: Array, core: Array) -> Array:
    return np.tensordot(rest, core, 1).reshape(len(rest) * core.shape[1], -1)  # (q n) [l] r


def _sum_of_products(lefts: Sequence[Array], rights: Sequence[Array]) -> Array:
    total = lefts[0] @ rights[0]
    for left, right in zip(lefts[1:], rights[1:], strict=True):
        total += left @ right
    return total


def _in_range(arrays: list[Array]) -> tuple[list[Array], int]:
    e = math.frexp(max(largest(a) for a in arrays))[1]
    return [shift(a, -e) for a in arrays], e


def _normal(shape: tuple[int, int], dtype: np.dtype[Any], rng: np.random.Generator) -> Array:
    draw = rng.standard_normal(shape)
    if np.issubdtype(dtype, np.complexfloating):
        return np.asarray((draw + 1j * rng.standard_normal(shape)) / math.sqrt(2))
    return draw
