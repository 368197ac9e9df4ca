r"""Singular value decomposition of the QK and OV operators of a head.

Omega = sum_k s_k u_k v_k^T pairs a query direction u_k with a key direction v_k; OV = sum_k s_k u_k v_k^T maps the
input direction u_k to the output direction v_k. For equal singular values only the two singular subspaces and the map
between them are defined, not the vectors: such a group is one feature, a span.
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
    """Singular value decomposition, grouped by equal singular values; returned by `singular_features`.

    Parameters
    ----------
    values
        (r,), descending.
    left
        (m, r), orthonormal columns: query directions, or directions that values read.
    right
        (r, n), orthonormal rows: key directions, or output directions.
    groups
        Slices that cover all values in order: of length 1 for a simple value, longer for equal values.
    """

    values: Array
    left: Array
    right: Array
    groups: tuple[slice, ...]

    def __len__(self) -> int:
        return len(self.groups)

    @property
    def spans(self) -> tuple[slice, ...]:
        """The groups of more than one value, which define a subspace only."""
        return tuple(group for group in self.groups if group.stop - group.start > 1)

    @property
    def effective_rank(self) -> float:
        """Participation ratio of the singular values, (sum s^2)^2 / sum s^4, from 1 to r; 0 of a zero operator."""
        s = self.values / (self.values[0] if len(self.values) and self.values[0] else 1.0)
        total = float(np.square(s).sum())
        return total**2 / float((s**4).sum()) if total else 0.0

    def __repr__(self) -> str:
        leading = ", ".join(f"{value:.4g}" for value in self.values[:4])
        more = ", ..." if len(self.values) > 4 else ""
        spans = f", {len(self.spans)} spans" if self.spans else ""
        return f"Features({len(self.values)} singular values {leading}{more}{spans})"


@single_threaded_blas
def singular_features(operator: LowRank, *, rtol: float | None = None) -> Features:
    """Return the singular value decomposition of a bilinear form or a map; equal singular values form spans.

    Parameters
    ----------
    operator
        `attention.qk(head)` or `attention.ov(head)`; the product is never formed. The last coordinate is the constant
        1: biases are part of the singular vectors.
    rtol
        Singular values are equal if they differ by less than `rtol` times the Frobenius norm. None: 24 eps, as
        elsewhere in tnlib. Use a larger value to group values that rounding or training has separated.

    Returns
    -------
    Features
        Truncated at the numerical rank; empty for a zero operator. Signs are fixed by the left vectors.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        If `operator` is not a LowRank, or `rtol` is invalid.

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
