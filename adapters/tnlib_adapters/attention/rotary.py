r"""Rotary position embeddings as operators.

Queries and keys are rotated by their position. Plane f of a head, columns a and b, rotates by theta_f per position; a
score depends on the positions only through the distance D = query - key position:

    score(D) = sum_f cos(D theta_f) (q_a k_a + q_b k_b) + sin(D theta_f) (q_a k_b - q_b k_a)  +  sum_c q_c k_c

with c over the unrotated columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Real

import numpy as np
from numpy.typing import DTypeLike

from tnlib import ArgumentError
from tnlib._typing import Array
from tnlib._validate import as_array, to_numpy
from tnlib_adapters.attention.softmax import namespace_of


@dataclass(frozen=True, eq=False, repr=False)
class Rotary:
    """Rotated columns of a head, and their frequencies.

    Parameters
    ----------
    frequencies
        (F,), radians per position of each plane; the first 2F columns of a head are rotated.
    pairs
        Whether plane f is columns 2f and 2f + 1, instead of f and F + f.
    factor
        Factor of the rotated columns of queries and keys (attention factor of YaRN and longrope).

    Raises
    ------
    ArgumentError
        If there is no frequency, or `factor` is not positive.

    References
    ----------
    Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding" (2021), section 3.2.

    Examples
    --------
    >>> turn = Rotary([1.0, 0.1])
    >>> turn.planes
    (array([0, 1]), array([2, 3]))
    >>> turn.rotate(np.array([1.0, 0.0, 0.0, 0.0]), np.pi / 2).round(2)
    array([0., 0., 1., 0.])
    """

    frequencies: Array
    pairs: bool = False
    factor: float = 1.0

    def __post_init__(self) -> None:
        radians = as_array("Rotary", "frequencies", self.frequencies, ndim=1)
        object.__setattr__(self, "frequencies", radians.astype(np.float64))
        if not isinstance(self.factor, Real) or not self.factor > 0:
            raise ArgumentError(f"Rotary: factor must be positive, got {self.factor!r:.80}; pass 1.0 for none.")

    def __repr__(self) -> str:
        layout = "pairs" if self.pairs else "halves"
        return f"Rotary({self.n_columns} columns in {layout}, {len(self.frequencies)} frequencies)"

    @property
    def n_columns(self) -> int:
        """Number of rotated columns."""
        return 2 * len(self.frequencies)

    @property
    def planes(self) -> tuple[Array, Array]:
        """First and second column of every plane."""
        f = np.arange(len(self.frequencies))
        return (2 * f, 2 * f + 1) if self.pairs else (f, len(f) + f)

    def rotate(self, columns: Array, position: Array | float) -> Array:
        """Rotate the last axis of an array, (..., d_head), to a position; `position` may have the preceding axes."""
        columns, at = (to_numpy("Rotary.rotate", name, x) for name, x in (("columns", columns), ("position", position)))
        if columns.shape[-1:] < (self.n_columns,) or columns.dtype.kind not in "fc" or at.dtype.kind not in "iuf":
            raise ArgumentError(
                f"Rotary.rotate: columns must have at least {self.n_columns} entries in the last leg and position must "
                f"be numbers, got {columns.dtype} of shape {columns.shape} at {at.dtype}; pass (..., d_head)."
            )
        try:
            shape = np.broadcast_shapes(columns.shape, (*at.shape, 1))
        except ValueError:
            raise ArgumentError(
                f"Rotary.rotate: position must have the legs of columns but the last, got {at.shape} for columns "
                f"{columns.shape}; pass one number for each."
            ) from None
        return self.rotated(np.broadcast_to(columns, shape), at)

    def rotated(self, columns: Array, positions: Array | float) -> Array:
        """Return columns (..., n, d_head) rotated to positions (n,), without checks; also for a tensor of torch."""
        xp, (a, b) = namespace_of(columns), self.planes
        angle = np.asarray(positions, np.float64)[..., None] * self.frequencies  # ... f
        cos, sin = (xp.asarray(self.factor * wave(angle), dtype=columns.dtype) for wave in (np.cos, np.sin))
        first, second = columns[..., a], columns[..., b]
        turned: Array = columns.copy() if isinstance(columns, np.ndarray) else columns.clone()
        turned[..., a] = first * cos - second * sin
        turned[..., b] = second * cos + first * sin
        return turned

    def waves(self, distances: Array) -> Array:
        """Return cosines, then sines, of distance times frequency, (distances, 2F), scaled."""
        angle = np.asarray(distances, np.float64)[:, None] * self.frequencies  # D f
        return self.factor**2 * np.concatenate([np.cos(angle), np.sin(angle)], axis=1)

    def core(self, d_head: int, dtype: DTypeLike = np.float64) -> Array:
        r"""Return the form of one head, (2F, d_head, d_head), or (2F + 1, d_head, d_head) if not all columns rotate.

        The score at distance D is :math:`\sum_w \omega_w(D) q C_w k^T`, with the waves :math:`\omega_w` and the
        matrices :math:`C_w` of the form. The last wave is 1, for the unrotated columns.
        """
        n, (a, b) = len(self.frequencies), self.planes
        f = np.arange(n)
        still = np.setdiff1d(np.arange(d_head), np.concatenate([a, b]))
        core = np.zeros((2 * n + bool(still.size), d_head, d_head), dtype)
        core[f, a, a] = core[f, b, b] = 1
        core[n + f, a, b] = 1
        core[n + f, b, a] = -1
        core[-1, still, still] = 1  # no effect if all columns are rotated
        return core
