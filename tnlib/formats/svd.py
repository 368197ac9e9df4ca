"""A truncated singular value decomposition of a matrix or of a tensor split in two."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tnlib._errors import ArgumentError
from tnlib._typing import Array
from tnlib._validate import as_legs, to_numpy
from tnlib.formats.base import Dense, as_stored, refuse_too_large
from tnlib.linalg.scale import norm


@dataclass(frozen=True, eq=False, repr=False)
class SVD(Dense):
    """u diag(s) vh, with isometric u and vh; unpacks to the three.

    Parameters
    ----------
    u
        (left legs ..., r), isometric from r into the left legs.
    s
        (r,), non-negative, descending.
    vh
        (r, right legs ...), isometric from the right legs onto r.
    left
        Where the left legs stand in the dense array; None for the first ones, in order.

    Raises
    ------
    ArgumentError
        If the inner legs differ in size, or `left` does not fit `u`.

    Examples
    --------
    >>> import numpy as np, tnlib
    >>> u, s, vh = tnlib.svd(np.diag([3.0, 4.0])).value
    >>> s
    array([4., 3.])
    """

    u: Array
    s: Array
    vh: Array
    left: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        u, vh = (to_numpy("SVD", name, a) for name, a in (("u", self.u), ("vh", self.vh)))
        u, vh = as_stored("SVD", "u", u, ndim=u.ndim), as_stored("SVD", "vh", vh, ndim=vh.ndim)
        s = as_stored("SVD", "s", self.s, ndim=1)
        if u.ndim < 2 or vh.ndim < 2 or not u.shape[-1] == len(s) == len(vh):
            raise ArgumentError(
                f"SVD: u (..., r), s (r,) and vh (r, ...) must share r, got shapes {u.shape}, {s.shape} and "
                f"{vh.shape}; truncate all three alike."
            )
        ndim = u.ndim + vh.ndim - 2
        left = tuple(range(u.ndim - 1)) if self.left is None else as_legs("SVD", "left", self.left, ndim)
        if len(left) != u.ndim - 1:
            raise ArgumentError(
                f"SVD: left must name the {u.ndim - 1} legs of u among {ndim}, got {left}; leave it out for the first."
            )
        for name, value in (("u", u), ("s", s), ("vh", vh), ("left", left)):
            object.__setattr__(self, name, value)

    def __iter__(self) -> Iterator[Array]:
        return iter((self.u, self.s, self.vh))

    def arrays(self) -> tuple[Array, ...]:
        """Return u, s, vh."""
        return self.u, self.s, self.vh

    @property
    def _order(self) -> tuple[int, ...]:
        """Legs of the dense array in the order (left ..., right ...)."""
        left = self.left or ()
        return left + tuple(k for k in range(self.u.ndim + self.vh.ndim - 2) if k not in left)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the dense array, legs in their original order."""
        sizes = dict(zip(self._order, self.u.shape[:-1] + self.vh.shape[1:], strict=True))
        return tuple(sizes[k] for k in range(len(sizes)))

    @property
    def ranks(self) -> tuple[int, ...]:
        """The one rank, (r,)."""
        return self.s.shape

    def full(self) -> Array:
        """Multiply out, legs in their original order."""
        refuse_too_large(self)
        rank = len(self.s)
        flat = (self.u.reshape(-1, rank) * self.s) @ self.vh.reshape(rank, -1)  # (left ...) [r] (right ...)
        out = flat.reshape(self.u.shape[:-1] + self.vh.shape[1:])
        return np.ascontiguousarray(out.transpose(np.argsort(self._order)))

    def norm(self) -> float:
        """Frobenius norm: that of s, since u and vh are isometric."""
        return norm(self.s)
