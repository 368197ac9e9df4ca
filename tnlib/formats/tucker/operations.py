"""Verbs of the Tucker format: round, inner, kron, outer, contract."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tnlib._array_api import adjoint, vdot
from tnlib._typing import Array
from tnlib.formats.tucker.canonical_form import recompress
from tnlib.formats.tucker.conversion import refuse_large_core
from tnlib.formats.tucker.format import Tucker
from tnlib.linalg.multilinear import mode_product
from tnlib.linalg.scaling import Scaled, normalize, rescale_each, shift
from tnlib.linalg.truncation import TruncationBudget


def round_tucker(t: Tucker, rtol: float | None, max_rank: int | None) -> tuple[Tucker, TruncationBudget]:
    """Return the truncated HOSVD of `t`, and its truncations."""
    core, factors, budget = recompress(t, rtol, max_rank)
    return Tucker(shift(core.array, core.exponent), tuple(factors)), budget


def inner_tucker(a: Tucker, b: Tucker) -> Scaled:
    """Return the inner product: the core of `b` with its legs taken to those of `a` by conj(A_k)^T B_k."""
    core, small = normalize(a.core), normalize(b.core)
    for k, (left, right) in enumerate(zip(a.factors, b.factors, strict=True)):
        (x, e), (y, f) = normalize(left), normalize(right)
        overlap = adjoint(x) @ y  # rak [nk] rbk
        small = Scaled(small.array, small.exponent + e + f).update(mode_product(small.array, overlap, k))
    return Scaled(vdot(core.array, small.array), core.exponent + small.exponent)


def kron_tucker(a: Tucker, b: Tucker) -> Tucker:
    """Return the Kronecker product: of the cores, and of the factors of every leg."""
    ((x, *left), e), ((y, *right), f) = rescale_each(a.arrays()), rescale_each(b.arrays())
    return Tucker(shift(np.kron(x, y), e + f), tuple(map(np.kron, left, right)))


def outer_tucker(a: Tucker, b: Tucker) -> Tucker:
    """Return the outer product, the legs of `b` behind those of `a`."""
    refuse_large_core("outer", a.ranks + b.ranks, "convert both to TensorTrain first")
    ((x, *left), e), ((y, *right), f) = rescale_each(a.arrays()), rescale_each(b.arrays())
    return Tucker(shift(np.multiply.outer(x, y), e + f), (*left, *right))


def contract_vectors(t: Tucker, vectors: Mapping[int, Array]) -> Tucker | Scaled:
    """Return `t` with legs summed against vectors (n[k],): a Tucker, or a `Scaled` number where no leg is left."""
    core = normalize(t.core)
    for k, vector in vectors.items():
        (v, e), (factor, f) = normalize(vector), normalize(t.factors[k])
        row = (v @ factor)[None]  # 1 [nk] rk
        core = Scaled(core.array, core.exponent + e + f).update(mode_product(core.array, row, k))
    kept = [k for k in range(t.ndim) if k not in vectors]
    if not kept:
        return core
    ranks = [core.array.shape[k] for k in kept]
    return Tucker(shift(core.array.reshape(ranks), core.exponent), tuple(t.factors[k] for k in kept))
