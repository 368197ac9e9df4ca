"""Tucker tensors with a core and factors of other libraries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from tnlib._errors import ArgumentError
from tnlib._format import refuse_too_large, set_fields
from tnlib._validate import as_list
from tnlib.formats.other_arrays import OtherArrays, Verbs
from tnlib.formats.tucker.format import Tucker
from tnlib.linalg.array_namespace import (
    OtherArray,
    adjoint,
    as_other_array,
    is_complex,
    namespace,
    qr,
    refuse_different_libraries,
    shift,
)
from tnlib.linalg.array_truncation import normalize, rescale, shift_in_range, truncate
from tnlib.linalg.truncation import TruncationBudget


def round_array_tucker(
    t: ArrayTucker, rtol: float | None, max_rank: int | None
) -> tuple[ArrayTucker, TruncationBudget]:
    """Return the truncated HOSVD of `t`, from the triangular factors of its factors, and its truncations."""
    core, exponent = rescale(t.core)
    bases = []
    for k, factor in enumerate(t.factors):
        scaled, e = rescale(factor)
        q, r = qr(scaled)
        core, exponent = rescale(mode_product(core, r, k), exponent + e)  # r0 ... rk' [rk] ...
        bases.append(q)
    sides = [min(n, t.size // n) for n in t.shape]
    core, exponent, size = normalize(core, exponent)
    budget = TruncationBudget(size, rtol, sides, t.dtype)
    factors = []
    for k, basis in enumerate(bases):
        xp = namespace(core)
        front = (k, *(j for j in range(core.ndim) if j != k))
        unfolded = xp.permute_dims(core, front)  # rk r0 ...
        u, rest = truncate(xp.reshape(unfolded, (core.shape[k], -1)), budget, max_rank, basis)
        back = tuple(front.index(j) for j in range(core.ndim))
        core = xp.permute_dims(xp.reshape(rest, (-1, *unfolded.shape[1:])), back)
        factors.append(u)
    return ArrayTucker(shift(core, exponent), factors), budget


def inner_array_tucker(a: Any, b: Any) -> OtherArray:
    """Return the inner product, an array without legs: the core of `b` in the basis of the factors of `a`."""
    refuse_different_libraries("inner", [a.core, b.core])
    (core, exponent), (small, e) = rescale(a.core), rescale(b.core)
    exponent += e
    for k, (left, right) in enumerate(zip(a.factors, b.factors, strict=True)):
        (x, e), (y, f) = rescale(left), rescale(right)
        overlap = namespace(x, y).matmul(adjoint(x), y)  # rak [nk] rbk
        small, exponent = rescale(mode_product(small, overlap, k), exponent + e + f)
    xp = namespace(core, small)
    product = xp.sum((xp.conj(core) if is_complex(core) else core) * small)
    return shift_in_range(product, exponent, "inner: the result", "scale one of the two down")


def mode_product(x: OtherArray, matrix: OtherArray, mode: int) -> OtherArray:
    """Return the product of `matrix` (m, n) with leg `mode` of `x`, whose size n becomes m."""
    xp = namespace(x, matrix)
    out = xp.tensordot(matrix, x, axes=((1,), (mode,)))  # m [n] ...
    return xp.permute_dims(out, (*range(1, mode + 1), 0, *range(mode + 1, x.ndim)))


class ArrayTucker(OtherArrays, Tucker):
    """A Tucker with arrays of another library: `full`, `round`, `inner`."""

    numpy_class = Tucker
    verbs: ClassVar[Verbs] = {"round": round_array_tucker, "inner": inner_array_tucker}

    def __post_init__(self) -> None:
        checked: Sequence[Any] = [self.core, *as_list("Tucker", "factors", self.factors, "arrays")]
        refuse_different_libraries("Tucker", checked)
        core = as_other_array("Tucker", "core", checked[0], ndim=len(checked) - 1)
        factors = [as_other_array("Tucker", f"factor {k}", a, ndim=2) for k, a in enumerate(checked[1:])]
        for k, factor in enumerate(factors):
            if factor.shape[1] != core.shape[k]:
                raise ArgumentError(
                    f"Tucker: factor {k} must have {core.shape[k]} columns, one per entry of leg {k} of the core, "
                    f"got shape {tuple(factor.shape)}; factors are (n, r)."
                )
        dtype = namespace(core).result_type(core, *factors)
        core, *factors = (namespace(core).astype(a, dtype, copy=False) for a in (core, *factors))
        set_fields(self, core=core, factors=tuple(factors))

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes (n[0], ..., n[d-1]) of the outer legs."""
        return tuple(factor.shape[0] for factor in self.factors)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Multilinear ranks, the shape of the core."""
        return tuple(self.core.shape)

    def full(self) -> Any:
        """Contract to the dense array (n[0], ..., n[d-1])."""
        refuse_too_large(self)
        out: OtherArray = self.core
        for k, factor in enumerate(self.factors):
            out = mode_product(out, factor, k)  # n0 ... nk [rk] r(k+1) ...
        return out
