"""Singular value decompositions with arrays of other libraries."""

from __future__ import annotations

from typing import Any, ClassVar

from tnlib._errors import ArgumentError
from tnlib._format import refuse_too_large, set_fields
from tnlib._validate import as_legs
from tnlib.formats.matrix.svd import SVD
from tnlib.formats.other_arrays import OtherArrays, Verbs
from tnlib.linalg.array_namespace import as_other_array, namespace, refuse_different_libraries, to_host
from tnlib.linalg.scaling import norm, rescale
from tnlib.linalg.truncation import TruncationBudget


def round_array_svd(t: ArraySVD, rtol: float | None, max_rank: int | None) -> tuple[ArraySVD, TruncationBudget]:
    """Return the leading singular triplets."""
    scaled = rescale(to_host(t.s)).array
    budget = TruncationBudget(norm(scaled), rtol, [len(scaled)], t.dtype)
    rank = budget.truncate(scaled, max_rank=max_rank)
    return ArraySVD(t.u[..., :rank], t.s[:rank], t.vh[:rank, ...], t.left), budget


class ArraySVD(OtherArrays, SVD):
    """An SVD with arrays of another library: `full` and `round`; unpacks to the three."""

    numpy_class = SVD
    verbs: ClassVar[Verbs] = {"round": round_array_svd}

    def __post_init__(self) -> None:
        refuse_different_libraries("SVD", (self.u, self.s, self.vh))
        u, vh = (as_other_array("SVD", name, a) for name, a in (("u", self.u), ("vh", self.vh)))
        s = as_other_array("SVD", "s", self.s, ndim=1)
        if u.ndim < 2 or vh.ndim < 2 or not u.shape[-1] == s.shape[0] == vh.shape[0]:
            raise ArgumentError(
                f"SVD: u (..., r), s (r,) and vh (r, ...) must share r, got shapes {tuple(u.shape)}, {tuple(s.shape)} "
                f"and {tuple(vh.shape)}; truncate all three alike."
            )
        left = tuple(range(u.ndim - 1)) if self.left is None else self.left
        set_fields(self, u=u, s=s, vh=vh, left=as_legs("SVD", "left", left, u.ndim + vh.ndim - 2))

    def __iter__(self) -> Any:
        return iter((self.u, self.s, self.vh))

    @property
    def ranks(self) -> tuple[int, ...]:
        """The one rank, (r,)."""
        return tuple(self.s.shape)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the dense array, legs in their original order."""
        sizes = (*self.u.shape[:-1], *self.vh.shape[1:])
        return tuple(sizes[k] for k in self._positions)

    def full(self) -> Any:
        """Contract to the dense array, legs in their original order."""
        refuse_too_large(self)
        xp, rank = namespace(self.u), self.s.shape[0]
        rows = xp.reshape(self.u, (-1, rank)) * xp.astype(self.s, self.u.dtype)
        flat = xp.matmul(rows, xp.reshape(self.vh, (rank, -1)))  # (left ...) [r] (right ...)
        dense = xp.reshape(flat, (*self.u.shape[:-1], *self.vh.shape[1:]))
        return xp.permute_dims(dense, tuple(map(int, self._positions)))
