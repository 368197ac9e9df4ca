r"""Singular features of a head: which direction goes with which, and how strongly.

Omega = sum_k s_k u_k v_k^T pairs a direction u_k of the queries with one v_k of the keys; OV = sum_k s_k u_k v_k^T
turns what stands along u_k into v_k. Where values coincide only the two spaces and the map between them are given, not
the vectors: such a group is one feature, a span.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

import tnlib
from tnlib import ArgumentTypeError, LowRank
from tnlib._typing import Array
from tnlib._validate import as_rtol
from tnlib.linalg.scaling import norm
from tnlib.linalg.threads import single_threaded_blas
from tnlib.linalg.truncation import noise_level


@dataclass(frozen=True, eq=False, repr=False)
class Features:
    """A singular value decomposition, cut into pairs of directions and pairs of spans; made by `singular_features`.

    Parameters
    ----------
    values
        (r,), descending.
    left
        (m, r), orthonormal columns: what queries ask along, or what values are read along.
    right
        (r, n), orthonormal rows: what keys answer along, or what is written.
    groups
        Slices that cover all values in order: of one where a value is alone, of more where they are equal.
    """

    values: Array
    left: Array
    right: Array
    groups: tuple[slice, ...]

    def __len__(self) -> int:
        return len(self.groups)

    @property
    def spans(self) -> tuple[slice, ...]:
        """The groups of more than one value, of which only the space is given."""
        return tuple(group for group in self.groups if group.stop - group.start > 1)

    @property
    def effective_rank(self) -> float:
        """How many values matter: (sum s^2)^2 / sum s^4, from 1 to r; 0 of a zero operator."""
        s = self.values / (self.values[0] if len(self.values) and self.values[0] else 1.0)
        total = float(np.square(s).sum())
        return total**2 / float((s**4).sum()) if total else 0.0

    def __repr__(self) -> str:
        shown = ", ".join(f"{value:.4g}" for value in self.values[:4])
        more = ", ..." if len(self.values) > 4 else ""
        spans = f", {len(self.spans)} spans" if self.spans else ""
        return f"Features({len(self.values)} singular values {shown}{more}{spans})"


@single_threaded_blas
def singular_features(operator: LowRank, *, rtol: float | None = None) -> Features:
    """Return the pairs of directions of a bilinear form or a map, with their singular values; equal ones as spans.

    Parameters
    ----------
    operator
        `attention.qk(head)` or `attention.ov(head)`; it is never multiplied out. The last coordinate is the constant
        one: what a bias adds is part of a direction.
    rtol
        Values are equal that differ by less than this part of the norm of all of them. None: 24 eps, as elsewhere in
        tnlib; more where near-equal values should count as spans, because rounding or training has set them apart.

    Returns
    -------
    Features
        At the numerical rank, none of a zero operator; signs fixed in the left vectors.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        If `operator` is no LowRank, or `rtol` is off.

    Examples
    --------
    >>> import tnlib_adapters
    >>> layer = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path()).attention(1)
    >>> found = singular_features(layer.ov(2))
    >>> len(found), found.left.shape
    (16, (65, 16))
    """
    if not isinstance(operator, LowRank):
        raise ArgumentTypeError(
            f"singular_features: operator must be a LowRank, got {type(operator).__name__}; "
            "pass attention.qk(head) or attention.ov(head)."
        )
    rtol = as_rtol("singular_features", rtol)
    u, s, vh = tnlib.convert(operator, tnlib.SVD)
    rank = int(np.count_nonzero(s > noise_level(norm(s), s.dtype, min(operator.shape))))
    u, s, vh = u[:, :rank], s[:rank], vh[:rank]
    groups, start = [], 0
    for span in tnlib.degenerate_groups(s, rtol=rtol) if rank else ():
        groups += [slice(k, k + 1) for k in range(start, span.start)] + [span]
        start = span.stop
    return Features(s, u, vh, (*groups, *(slice(k, k + 1) for k in range(start, len(s)))))
