"""Truncation, QR and scaling of matrices of other libraries, with ranks, signs and powers of two from the host."""

from __future__ import annotations

import math

import numpy as np

from tnlib._errors import ArgumentError
from tnlib._typing import Array
from tnlib.linalg.array_namespace import (
    OtherArray,
    adjoint,
    all_finite,
    dtype_of,
    from_host,
    largest,
    namespace,
    norm,
    qr,
    records_gradient,
    shift,
    svd,
    to_host,
)
from tnlib.linalg.canonical_basis import canonical_basis_change, unit_phases
from tnlib.linalg.scaling import DRIFT
from tnlib.linalg.truncation import TruncationBudget

_SINGULAR = 1e4  # eps, of the largest diagonal of a triangular factor
_EQUAL = 8  # eps, of the largest singular value


def rescale(x: OtherArray, exponent: int = 0) -> tuple[OtherArray, int]:
    """Return y and e with x * 2**exponent = y * 2**e, the largest part of y near 1: an exact power of two."""
    e = math.frexp(largest(x))[1]
    return (x, exponent) if abs(e) < DRIFT else (shift(x, -e), exponent + e)


def normalize(x: OtherArray, exponent: int) -> tuple[OtherArray, int, float]:
    """Return y, e and the norm of y in [1/2, 1), with x * 2**exponent = y * 2**e.

    The gradient of an SVD of complex matrices in torch 2.13 multiplies rounding errors by the squares of singular
    values; of values up to 1 nothing is lost.
    """
    e = math.frexp(norm(x))[1]
    y = shift(x, -e)
    return y, exponent + e, norm(y)


def truncate(
    x: OtherArray, budget: TruncationBudget, max_rank: int | None, frame: OtherArray | None = None
) -> tuple[OtherArray, OtherArray]:
    """Return u (m, r) isometric, in canonical bases, and u^H x (r, n) of `x` (m, n), at the rank of the budget.

    With a `frame` (M, m) of orthonormal columns, in which `x` holds coordinates, the result is frame u (M, r).
    """
    xp = namespace(x)
    u, s, vh = svd(x)
    values = to_host(s)
    if records_gradient(x):
        _refuse_equal(values)
    rank = budget.truncate(values, max_rank=max_rank)
    u, s, vh = u[:, :rank], s[:rank], vh[:rank, :]
    if frame is not None:
        u = xp.matmul(frame, u)  # M [m] r
    change = canonical_basis_change(to_host(u), values[:rank], budget.dtype)
    basis = from_host(change.columns(np.eye(rank, dtype=budget.dtype)), x)
    rest = xp.matmul(adjoint(basis), xp.astype(s, x.dtype)[:, None] * vh)  # r' [r] n
    return xp.matmul(u, basis), rest


def qr_positive(x: OtherArray) -> tuple[OtherArray, OtherArray]:
    """Return q (m, k) isometric and r (k, n) with a real, non-negative diagonal."""
    q, r = qr(x)
    diagonal = to_host(namespace(r).linalg.diagonal(r))
    if records_gradient(x):
        _refuse_singular(diagonal)
    phases = unit_phases(diagonal)
    return q * from_host(phases, x), from_host(phases.conj(), x)[:, None] * r


def _refuse_singular(diagonal: Array) -> None:
    """Raise where a triangular factor is singular to roundoff: the gradient of its QR is not defined."""
    sizes = np.abs(diagonal)
    if sizes.min() <= _SINGULAR * np.finfo(sizes.dtype).eps * sizes.max():
        raise ArgumentError(
            "round, apply and canonicalize: bonds of a train with a gradient must not exceed its ranks, got a singular "
            "core; round it under torch.no_grad() first."
        )


def _refuse_equal(values: Array) -> None:
    """Raise where singular values are equal or zero to roundoff: the gradient of the SVD in torch is NaN."""
    gaps = np.abs(np.diff(values, append=0))
    if len(values) > 1 and gaps.min() <= _EQUAL * np.finfo(values.dtype).eps * values[0]:
        raise ArgumentError(
            "round and apply: the singular values of a value with a gradient must be distinct and positive, got equal "
            "ones or a zero; round it under torch.no_grad() first."
        )


def shift_in_range(x: OtherArray, exponent: int, subject: str, advice: str) -> OtherArray:
    """Return `x` * 2**`exponent`, or raise "`subject` must lie in the range of float64, got about 10**400"."""
    out = shift(x, exponent)
    if exponent > 0 and not all_finite(out):
        top = (math.log2(largest(x)) + exponent) * math.log10(2)
        raise ArgumentError(f"{subject} must lie in the range of {dtype_of(x)}, got about 10**{top:.0f}; {advice}.")
    return out
