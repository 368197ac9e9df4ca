"""Leading singular vectors of a large matrix: randomized subspace iteration, and the row space of a sample of rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tnlib._typing import Array
from tnlib.linalg.gram import gram, project, times_adjoint
from tnlib.linalg.gram_svd import LeadingSVD, LeftSVD, left_svd
from tnlib.linalg.scaling import shift
from tnlib.linalg.thin_svd import thin_svd
from tnlib.linalg.threads import parallel_matmul
from tnlib.linalg.truncation import tail_norms

_SMALLEST_SIDE = 512  # of a matrix for which an iteration is worth its products
_PART = 5  # of the smaller side: with more vectors than this part of it LAPACK is as fast
_SETTLED = 1e-3  # relative distance to the smallest error at which the iteration ends
_RESOLUTION = 1e-4  # relative difference of singular values that the iteration resolves
_STEPS = 8
_IN_RANGE = 12  # powers of two, of 127 in single precision
_FAINT = 1e-5  # relative: a Gram matrix does not determine smaller singular values
_SPENT = 1e-7  # relative: columns with smaller diagonals of the Cholesky factor are dependent to roundoff
_COARSE = 1e-3  # of the squares: single precision then determines the discarded part to a part in a thousand


def randomized_svd(a: Array, rank: int, *, norm: float, negligible: float) -> LeadingSVD | None:
    """Return the leading `rank` singular vectors of `a` (m, n), or None where LAPACK is faster or more accurate.

    Subspace iteration (Halko, Martinsson and Tropp, "Finding structure with randomness", SIAM Review 53 (2011),
    algorithm 4.4) with half as many vectors more than `rank`, until the error at `rank` is an estimated 0.1 % above the
    smallest one. The residual is not estimated but measured. `norm` is the Frobenius norm of `a`; errors up to
    `negligible` count as roundoff.
    """
    m, n = a.shape
    count = rank + max(16, rank // 2)
    if min(m, n) < _SMALLEST_SIDE or count * _PART > min(m, n) or norm == 0:
        return None
    e = math.frexp(norm)[1]
    if abs(e) > _IN_RANGE:  # the sixth power of a norm is formed
        norm, negligible = math.ldexp(norm, -e), math.ldexp(negligible, -e)
        result = randomized_svd(shift(a, -e), rank, norm=norm, negligible=negligible)
        return result and result._replace(s=shift(result.s, e), residual=math.ldexp(result.residual, e))
    single = np.finfo(a.dtype).eps > np.finfo(np.float64).eps
    spaces = _iterate(a, rank, count, norm, negligible)
    if spaces is None:
        return None
    x, y, error = spaces
    if single and error**2 > _COARSE * norm**2:
        return _ritz(x, y, rank, norm)
    q = _orthonormal(y.astype(np.result_type(y, np.float64), copy=False), roughly=False)
    small, residual = project(q, a, size=norm, negligible=negligible)  # l n
    left = left_svd(small[None], exact=not single)
    if left.s[rank - 1] > _FAINT * left.s[0]:
        u, s = left.u, left.s
        vh = parallel_matmul(_adjoint(u[:, :rank] / s[:rank]), small)  # rank [l] n
        if not single:
            vh = _adjoint(_orthonormal(_adjoint(vh), roughly=False))
    else:
        u, s, vh = thin_svd(small)
    return LeadingSVD(parallel_matmul(q, u[:, :rank]), s, vh[:rank], residual, _RESOLUTION)


def standard_normal(shape: Sequence[int], dtype: np.dtype[Any], rng: np.random.Generator) -> Array:
    """Return independent standard normal entries of `dtype`, complex ones with variance 1 too."""
    draw = rng.standard_normal(shape)
    if dtype.kind == "c":
        draw = (draw + 1j * rng.standard_normal(shape)) / math.sqrt(2)
    return draw.astype(dtype, copy=False)


def _iterate(a: Array, rank: int, count: int, norm: float, negligible: float) -> tuple[Array, Array, float] | None:
    """Return right vectors x (n, count), nearly orthonormal, a x, and the error at `rank`; None without convergence."""
    rng = np.random.default_rng(0)  # the same input gives the same output
    y = parallel_matmul(a, rng.standard_normal((a.shape[1], count), a.real.dtype))  # m [n] l
    previous = math.inf
    for _ in range(_STEPS):
        x = _orthonormal(parallel_matmul(_adjoint(a), y), roughly=True)  # n [m] l
        y = parallel_matmul(a, x)  # m [n] l
        squares = np.linalg.eigvalsh(_column_gram(y))[::-1]
        error = math.sqrt(max(0.0, norm**2 - float(squares[:rank].sum())))
        # A step multiplies the distance to the smallest error by about this factor, once the values have settled.
        factor = float(squares[-1] / squares[rank - 1]) ** 2
        distance = (previous - error) * factor / max(1 - factor, _SETTLED)
        if error <= negligible or distance <= _SETTLED * error:
            return x, y, error
        previous = error
    return None


def _ritz(x: Array, y: Array, rank: int, norm: float) -> LeadingSVD:
    """Return the singular values and vectors of `a` in the span of x (n, l), nearly orthonormal, from y = a x."""
    to_orthonormal = _adjoint(np.linalg.inv(np.linalg.cholesky(_column_gram(x))))
    values, vectors = np.linalg.eigh(_adjoint(to_orthonormal) @ _column_gram(y) @ to_orthonormal)
    s = np.sqrt(np.maximum(values[::-1], 0.0))
    to_ritz = to_orthonormal @ vectors[:, : -rank - 1 : -1]
    u = parallel_matmul(y.astype(to_ritz.dtype), to_ritz / s[:rank])  # m [l] rank
    vh = parallel_matmul(_adjoint(to_ritz), _adjoint(x).astype(to_ritz.dtype))  # rank [l] n
    return LeadingSVD(u, s, vh, math.sqrt(max(0.0, norm**2 - float(values.sum()))), _RESOLUTION)


def _adjoint(a: Array) -> Array:
    return a.conj().T


def _column_gram(y: Array) -> Array:
    return gram(np.ascontiguousarray(y.T)[None]).conj()


def _orthonormal(y: Array, *, roughly: bool) -> Array:
    """Return orthonormal columns that span those of `y`, by one Cholesky QR, or two to be orthonormal to roundoff."""
    try:
        for _ in range(1 if roughly else 2):
            lower = np.linalg.cholesky(_column_gram(y))
            diagonal = np.diagonal(lower).real
            if diagonal.min() < _SPENT * diagonal.max():
                break
            y = parallel_matmul(y, _adjoint(np.linalg.inv(lower)).astype(y.dtype))  # m [l] l
        else:
            return y
    except np.linalg.LinAlgError:
        pass
    return np.linalg.qr(y)[0]  # some columns are nearly linear combinations of others


LEAST_ROWS = 64
_ROWS_PER_RANK = 3
_RESOLVED_IN_SAMPLE = 4.0  # times the error estimate of the sample's Gram spectrum
_FAINT_IN_SAMPLE, _ROUNDOFF_IN_SAMPLE = (
    3e-7,
    1e-14,
)  # relative: smaller singular values of the sample are rounding errors


def sampled_range(a: Array, *, limit: float) -> Array | None:
    """Return a V^H (m, l) for a few orthonormal rows V that nearly span the row space of `a` (m, n), or None.

    The leading right singular vectors of some random rows do so if the rank is low and no single row differs from all
    others; the product with all of `a` then is as accurate as a step of power iteration. None means that the sample has
    no low rank within the Frobenius norm `limit`. The caller must verify the result: rows outside the sample may
    matter.
    """
    rows = sampled_rows(a.__getitem__, a.shape, limit=limit, most=len(a))
    return None if rows is None else times_adjoint(a, rows)  # m [n] l


def sampled_rows(take: Callable[[Array], Array], shape: tuple[int, ...], *, limit: float, most: int) -> Array | None:
    """Return orthonormal rows (l, n) that span a sample of rows within `limit`, or None if l were not small.

    `take` returns rows of a matrix of `shape` (m, n) by an array of ascending numbers, up to `most` of them.
    """
    m, n = shape
    rng = np.random.default_rng(0)  # the same input gives the same output
    count = LEAST_ROWS
    while 2 * count <= m and count <= most:
        sample = take(np.sort(rng.choice(m, count, replace=False)))
        sample = sample.astype(np.result_type(sample, np.float64), copy=False)
        scale = math.sqrt(m / count)  # the norms of the sample times this estimate those of the matrix
        svd, floor = _decompose(sample, limit / scale)
        tails = tail_norms(svd.s) * scale
        n_resolved = int(np.count_nonzero(svd.s > svd.s[0] * floor))
        rank = max(1, min(int(np.argmax(tails <= limit)), n_resolved))
        if 4 * rank > min(m, n) or n_resolved == 0:
            return None
        if _ROWS_PER_RANK * rank <= count:
            rank_at_quarter = int(np.argmax(tails <= limit / 4))  # where the spectrum decays, so that little is lost
            kept = max(min(rank_at_quarter, rank + rank // 4), rank + 4)
            kept = min(-(-kept // 4) * 4, n_resolved)  # the kernel computes four columns at a time
            if 2 * kept > min(m, n):  # the product would be hardly smaller than `a`
                return None
            return _orthonormalize((svd.u[:, :kept] / svd.s[:kept]).conj().T @ sample)  # l [rows] n
        count = max(2 * count, _ROWS_PER_RANK * rank)
    return None


def _decompose(sample: Array, limit: float) -> tuple[LeftSVD, float]:
    """Return the left SVD of a sample, exact where one Gram matrix does not resolve `limit`, and its relative floor."""
    svd = left_svd(sample[None], exact=False)
    if limit < _RESOLVED_IN_SAMPLE * svd.error_estimate:
        return left_svd(sample[None], exact=True), _ROUNDOFF_IN_SAMPLE
    return svd, _FAINT_IN_SAMPLE


def _orthonormalize(rows: Array) -> Array | None:
    """Return nearly orthonormal `rows` (l, n) made orthonormal to roundoff, by two Cholesky QRs."""
    for _ in range(2):
        try:
            rows = np.linalg.inv(np.linalg.cholesky(rows @ rows.conj().T)) @ rows  # l [l] n
        except np.linalg.LinAlgError:
            return None
    return rows
