"""Leading left space of a matrix of low rank, from a sample of its rows and one product."""

from __future__ import annotations

import math

import numpy as np

from tnlib._typing import Array
from tnlib.linalg.gram import times_adjoint
from tnlib.linalg.gram_svd import LeftSVD, left_svd
from tnlib.linalg.truncation import tail_norms

LEAST_ROWS = 64
_ROWS_PER_RANK = 3
_RESOLVED = 4.0  # times the error estimate of the sample's Gram spectrum
_FAINT, _ROUNDOFF = 3e-7, 1e-14  # relative: smaller singular values of the sample are rounding errors


def sampled_range(a: Array, *, limit: float) -> Array | None:
    """Return a V^H (m, l) for a few orthonormal rows V that nearly span the row space of `a` (m, n), or None.

    The leading right singular vectors of some random rows do so if the rank is low and no single row differs from all
    others; the product with all of `a` then is as accurate as a step of power iteration. None means that the sample has
    no low rank within the Frobenius norm `limit`. The caller must verify the result: rows outside the sample may
    matter.
    """
    rows = sampled_rows(a, limit=limit, most=len(a))
    return None if rows is None else times_adjoint(a, rows)  # m [n] l


def sampled_rows(a: Array, *, limit: float, most: int) -> Array | None:
    """Return orthonormal rows (l, n) that span a sample of rows within `limit`, or None if l were not small.

    `a` (m, n) is anything from which rows can be taken by an array of indices, `most` of them at a time.
    """
    m, n = a.shape
    rng = np.random.default_rng(0)  # the same input gives the same output
    count = LEAST_ROWS
    while 2 * count <= m and count <= most:
        sample = a[np.sort(rng.choice(m, count, replace=False))].astype(np.result_type(a.dtype, np.float64), copy=False)
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
    if limit < _RESOLVED * svd.error_estimate:
        return left_svd(sample[None], exact=True), _ROUNDOFF
    return svd, _FAINT


def _orthonormalize(rows: Array) -> Array | None:
    """Return nearly orthonormal `rows` (l, n) made orthonormal to roundoff, by two Cholesky QRs."""
    for _ in range(2):
        try:
            rows = np.linalg.inv(np.linalg.cholesky(rows @ rows.conj().T)) @ rows  # l [l] n
        except np.linalg.LinAlgError:
            return None
    return rows
