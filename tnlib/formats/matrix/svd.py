"""Truncated singular value decomposition of a matrix, or of a tensor split into two groups of legs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tnlib._array_api import astype, contiguous, dtype_of, permute, refuse_different_libraries, reshape, to_host
from tnlib._errors import ArgumentError
from tnlib._fit import Fit, report
from tnlib._format import Format, numpy_arrays, with_arrays_of
from tnlib._stored_arrays import as_stored, refuse_too_large, set_fields
from tnlib._typing import Array, SlicedArray
from tnlib._validate import as_legs, as_max_rank, as_rtol, refuse_foreign_keywords
from tnlib.formats.matrix.low_rank import LowRank, scaled_product_svd
from tnlib.linalg.canonical_basis import canonical_basis_change
from tnlib.linalg.gram_svd import leading_svd
from tnlib.linalg.orthogonal import is_isometry
from tnlib.linalg.randomized import randomized_svd
from tnlib.linalg.scaling import norm, prepare, restore, shift
from tnlib.linalg.thin_svd import thin_svd
from tnlib.linalg.threads import single_threaded_blas
from tnlib.linalg.truncation import TruncationBudget
from tnlib.out_of_core import open_large

if TYPE_CHECKING:
    from tnlib.out_of_core.matrix_sketch import SketchedError
    from tnlib.out_of_core.one_read import SlabStream
    from tnlib.out_of_core.storage import Storage


@single_threaded_blas
@refuse_foreign_keywords
def svd(
    a: npt.ArrayLike | SlicedArray | SlabStream,
    *,
    left: int | Sequence[int] | None = None,
    rtol: float | None = None,
    max_rank: int | None = None,
    storage: Storage | None = None,
) -> Fit[SVD]:
    """Decompose `a` so that norm(a - fit.value.full()) <= rtol * norm(a), with the smallest rank.

    Parameters
    ----------
    a
        (m, n), or any number of legs if `left` is passed; real or complex, 32 or 64 bits a component. It may exceed
        memory, as in `tt_svd`.
    left
        Legs that form the rows; the others, in order, form the columns.
    rtol, max_rank
        Relative Frobenius error of the whole tensor, and maximal rank; the smaller rank is used. If both are None, the
        numerical rank.
    storage
        How an array that exceeds memory is read, see `Storage`.

    Returns
    -------
    Fit[SVD]
        `u` with orthonormal columns and positive leading entries, `s` descending, `vh` with orthonormal rows. The error
        is the smallest one at that rank (Eckart and Young, 1936). Without `rtol`, and for a `max_rank` of at most a
        quarter of the shorter side, a Gram matrix is used, whose error is larger by less than a part in 10,000, or, for
        a large matrix, subspace iteration, whose error is usually larger by less than a part in 1,000.

    References
    ----------
    C. Eckart and G. Young, "The approximation of one matrix by another of lower rank", Psychometrika 1 (1936). For
    subspace iteration: N. Halko, P. G. Martinsson, J. A. Tropp, "Finding structure with randomness", SIAM Review 53
    (2011), Algorithm 4.4.

    Examples
    --------
    >>> import numpy as np, tnlib
    >>> fit = tnlib.svd(np.diag([4.0, 3.0, 0.0]), max_rank=1)
    >>> fit.value.s, fit.error
    (array([4.]), 0.6)
    """
    rtol, max_rank = as_rtol("svd", rtol), as_max_rank("svd", max_rank)
    call = {"rtol": rtol, "max_rank": max_rank, "left": repr(left)}
    opened, dense = open_large("svd", "a", a, storage, call)
    budget: TruncationBudget | SketchedError
    if opened is None:
        x, exponent, norm = prepare("svd", "a", dense)
        shape, dtype = x.shape, x.dtype
        rows, columns = _split_legs(left, shape)
        matrix = x.transpose(*rows, *columns).reshape(math.prod(shape[k] for k in rows), -1)
        parts, budget = _truncated_svd(matrix, norm, rtol, max_rank)
    else:
        from tnlib.formats.matrix.svd_out_of_core import decompose_stored

        shape, dtype = opened.shape, opened.dtype
        rows, columns = _split_legs(left, shape)
        parts, exponent, budget = decompose_stored(opened, rows, rtol, max_rank)
    value = _canonical_svd(parts, shape, rows, columns, exponent, dtype)
    fit = report("svd", value, error=budget.error, rtol=rtol, estimate=budget.estimate, notes=budget.notes())
    return with_arrays_of(a, fit)


def _canonical_svd(
    parts: tuple[Array, Array, Array],
    shape: Sequence[int],
    rows: tuple[int, ...],
    columns: Sequence[int],
    exponent: int,
    dtype: np.dtype[Any],
) -> SVD:
    """Return u (m, r), s (r,), vh (r, n) times 2**exponent as an SVD of `dtype` with fixed signs."""
    u, vh = (a.astype(dtype, copy=False) for a in (parts[0], parts[2]))
    s = parts[1].astype(np.finfo(dtype).dtype, copy=False)
    change = canonical_basis_change(u, s, u.dtype, diagonal=True)
    u = change.columns(u).reshape(*[shape[k] for k in rows], -1)
    vh = change.rows(vh).reshape(-1, *[shape[k] for k in columns])
    return SVD.from_valid(u=u, s=restore("svd", "a", s, exponent), vh=vh, left=rows)


def _split_legs(left: int | Sequence[int] | None, shape: Sequence[int]) -> tuple[tuple[int, ...], list[int]]:
    """Return the legs that form the rows, and the others."""
    if left is None and len(shape) != 2:
        raise ArgumentError(
            f"svd: a must be a matrix unless left= names the legs that form its rows, got shape {shape}; pass left."
        )
    rows = (0,) if left is None else as_legs("svd", "left", left, len(shape))
    return rows, [k for k in range(len(shape)) if k not in rows]


def _truncated_svd(
    matrix: Array, norm: float, rtol: float | None, max_rank: int | None
) -> tuple[tuple[Array, Array, Array], TruncationBudget]:
    """Return u (m, r), s (r,) and vh (r, n) of a matrix of this norm, and the truncation."""
    budget = TruncationBudget(norm, rtol, [min(matrix.shape)], matrix.dtype, max_rank)
    leading = None
    if max_rank is not None and rtol is None:  # with a tolerance the rank is not known beforehand
        leading = randomized_svd(matrix, max_rank, norm=norm, negligible=budget.negligible)
        if leading is None:
            leading = leading_svd(matrix, max_rank, norm=norm, negligible=budget.negligible)
    if leading is None:
        u, s, vh = thin_svd(matrix)
        rank = budget.truncate(s)
    else:
        u, s, vh, discarded, resolution = leading
        rank = budget.truncate(s, discarded=discarded, resolution=resolution)
    return (u[:, :rank], s[:rank], vh[:rank]), budget


@dataclass(frozen=True, eq=False, repr=False)
class SVD(Format):
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
        Positions of the left legs in the dense array; None for the first ones, in order.

    References
    ----------
    C. Eckart and G. Young, "The approximation of one matrix by another of lower rank", Psychometrika 1 (1936).

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
        refuse_different_libraries("SVD", (self.u, self.s, self.vh))
        u, vh = (as_stored("SVD", name, a, any_library=True) for name, a in (("u", self.u), ("vh", self.vh)))
        s = as_stored("SVD", "s", self.s, ndim=1, any_library=True)
        if u.ndim < 2 or vh.ndim < 2 or not u.shape[-1] == s.shape[0] == vh.shape[0]:
            raise ArgumentError(
                f"SVD: u (..., r), s (r,) and vh (r, ...) must share r, got shapes {tuple(u.shape)}, "
                f"{tuple(s.shape)} and {tuple(vh.shape)}; truncate all three alike."
            )
        ndim = u.ndim + vh.ndim - 2
        left = tuple(range(u.ndim - 1)) if self.left is None else as_legs("SVD", "left", self.left, ndim)
        if len(left) != u.ndim - 1:
            raise ArgumentError(
                f"SVD: left must name the {u.ndim - 1} legs of u among {ndim}, got {left}; leave it out for the first."
            )
        set_fields(self, u=u, s=s, vh=vh, left=left)

    def __iter__(self) -> Iterator[Array]:
        return iter((self.u, self.s, self.vh))

    def attributes(self) -> dict[str, Any]:
        """Return the positions of the left legs."""
        return {"left": list(self.left or ())}

    def gauge_error(self) -> str | None:
        """Return which of s, u and vh is not as in an SVD."""
        rank = len(self.s)
        if (self.s < 0).any() or (np.diff(self.s) > 0).any():
            return "s must be non-negative and descending, and is not"
        for name, a in (("u", self.u.reshape(-1, rank)), ("vh", self.vh.reshape(rank, -1).T)):
            if not is_isometry(a):
                return f"{name} must be isometric, and is not"
        return None

    def is_subnormal(self) -> bool:
        """Test if the singular values are subnormal; u and vh are isometric."""
        s = to_host(self.s)
        return bool(0 < s.max() < np.finfo(s.dtype).tiny)

    def _dtype_of(self, name: str, dtype: np.dtype[Any]) -> np.dtype[Any]:
        return np.finfo(dtype).dtype if name == "s" else dtype

    @property
    def _positions(self) -> Array:
        """Position of every leg of the dense array among (left ..., right ...)."""
        left = self.left or ()
        return np.argsort([*left, *(k for k in range(self.u.ndim + self.vh.ndim - 2) if k not in left)])

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the dense array, legs in their original order."""
        sizes = (*self.u.shape[:-1], *self.vh.shape[1:])
        return tuple(sizes[k] for k in self._positions)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The one rank, (r,)."""
        return tuple(self.s.shape)

    def _part(self, *, imaginary: bool) -> SVD:
        """Return the SVD of one part of u s vh, by its factors: the rank doubles, or is the smaller side."""
        rank = len(self.s)
        product = LowRank(self.u.reshape(-1, rank) * self.s, self.vh.reshape(rank, -1))._part(imaginary=imaginary)
        u, s, vh, exponent = scaled_product_svd(product.left, product.right)
        u, vh = u.reshape(*self.u.shape[:-1], -1), vh.reshape(-1, *self.vh.shape[1:])
        return SVD(u, shift(s, exponent), vh, self.left)

    def full(self) -> Array:
        """Contract to the dense array, legs in their original order."""
        refuse_too_large(self)
        rank = self.s.shape[0]
        rows = reshape(self.u, (-1, rank)) * astype(self.s, dtype_of(self.u))
        flat = rows @ reshape(self.vh, (rank, -1))  # (left ...) [r] (right ...)
        out = reshape(flat, (*self.u.shape[:-1], *self.vh.shape[1:]))
        return contiguous(permute(out, [int(k) for k in self._positions]))  # type: ignore[no-any-return]

    @numpy_arrays
    def norm(self) -> float:
        """Frobenius norm: that of s, since u and vh are isometric."""
        return norm(self.s)
