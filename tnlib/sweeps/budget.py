"""One tolerance for the whole object, split over the truncations of a sweep."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from tnlib._typing import Array
from tnlib.linalg.rank import noise_level
from tnlib.linalg.svd import Truncated, truncated_svd


@dataclass
class Budget:
    r"""Hands out error to the truncations of a sweep so that the whole stays within `rtol`.

    Every truncation projects orthogonally onto what it keeps, and what a later one discards lies inside what
    an earlier one kept. So the squares of the discarded norms add up exactly:

        norm(x - y)^2  =  d_1^2 + ... + d_n^2  <=  (rtol norm(x))^2

    Equal shares would be d_k = rtol norm(x) / sqrt(n). A truncation rarely needs its whole share, because
    ranks are integers; what it leaves is divided among those still to come.

    Parameters
    ----------
    norm
        Frobenius norm of the tensor.
    rtol
        Relative tolerance of the whole; None keeps numerical ranks.
    steps
        How many truncations there will be.
    """

    norm: float
    rtol: float | None
    steps: int
    _taken: float = field(default=0.0, init=False)  # squared, out of (rtol * norm) ** 2
    _discarded: list[float] = field(default_factory=list, init=False)
    cuts: list[int] = field(default_factory=list, init=False)  # truncations whose cap split a group

    def truncate(self, a: Array, *, smaller_side: int, max_rank: int | None = None) -> Truncated:
        """Truncate the next matrix of the sweep with its share, and book what it discarded."""
        share = self._share()
        noise = noise_level(self.norm, a.dtype, smaller_side)
        kept = truncated_svd(a, budget=share, noise=noise, max_rank=max_rank)
        if share is not None:
            # What a rank cap discards beyond the share is lost; the rest of the sweep keeps its own shares.
            self._taken += min(kept.discarded, share) ** 2
        if kept.cuts_group:
            self.cuts.append(len(self._discarded))
        self._discarded.append(kept.discarded)
        return kept

    def _share(self) -> float | None:
        if self.rtol is None:
            return None
        left = max(0.0, (self.rtol * self.norm) ** 2 - self._taken)
        return math.sqrt(left / (self.steps - len(self._discarded)))

    @property
    def discarded(self) -> float:
        """Frobenius norm of all that was discarded so far."""
        return math.hypot(*self._discarded)

    @property
    def error(self) -> float:
        """`discarded` relative to the norm of the tensor; 0 for a zero tensor."""
        return self.discarded / self.norm if self.norm > 0 else 0.0
