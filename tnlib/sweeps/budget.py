"""One tolerance for the whole object, split over the truncations of a sweep."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tnlib._typing import Array
from tnlib.linalg.rank import choose_rank, cuts_group, noise_level, tails

# What was discarded is told from the errors of a Gram matrix when it is this many times larger: its square is then
# right to five percent, and the norm to half of that.
_CLEAR = 4.5


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
    sides
        For each truncation to come, the smaller dimension of the unfolding of the whole tensor that it cuts.
    dtype
        That of the tensor.
    """

    norm: float
    rtol: float | None
    sides: Sequence[int]
    dtype: np.dtype[Any]
    _discarded: list[float] = field(default_factory=list, init=False)
    _charged: list[float] = field(default_factory=list, init=False)  # squared, out of (rtol * norm) ** 2
    _allowed: list[float] = field(default_factory=list, init=False)  # squared
    _doubtful: list[bool] = field(default_factory=list, init=False)  # another rank might do
    _cuts: list[int] = field(default_factory=list, init=False)

    @property
    def step(self) -> int:
        """Number of the truncation that comes next."""
        return len(self._discarded)

    @property
    def share(self) -> float | None:
        """Frobenius norm that the next truncation may discard; None where numerical ranks are kept."""
        if self.rtol is None:
            return None
        left = (self.rtol * self.norm) ** 2 - sum(self._charged)
        return math.sqrt(max(0.0, left) / (len(self.sides) - self.step))

    @property
    def noise(self) -> float:
        """Singular values of the next truncation below this are roundoff."""
        return noise_level(self.norm, self.dtype, self.sides[self.step])

    @property
    def limit(self) -> float:
        """`share`, or `noise` where numerical ranks are kept."""
        return self.noise if self.share is None else self.share

    @property
    def negligible(self) -> float:
        """Errors below this are roundoff, and need not be known to a few percent."""
        return noise_level(self.norm, self.dtype, 1)

    def admits(self, blur: float, max_rank: int | None) -> bool:
        """Say whether a Gram matrix of this `blur` may decide the next truncation: its share, or a cap, is coarser.

        Whether what it said can be relied upon is seen afterwards, by `clear` and `settle`.
        """
        return blur <= self.limit or max_rank is not None

    def choose(
        self, s: Array, *, max_rank: int | None = None, blur: float = 0.0, beyond: float = 0.0, apart: float = 0.0
    ) -> int:
        """Return how many of the singular values `s` the next truncation keeps, and book what it discards.

        `blur` is what `left_svd` says of their tails; all of it is counted as discarded, as is the norm `beyond` of
        singular values that are not in `s`. Values that differ by less than the part `apart` count as equal.
        """
        share, noise = self.share, self.noise
        most = choose_rank(s, budget=share, noise=noise, max_rank=max_rank)
        self._allowed.append(noise**2 + blur**2 if share is None else share**2)
        if share is not None:
            share = math.sqrt(max(0.0, share**2 - blur**2 - beyond**2))
        rank = choose_rank(s, budget=share, noise=noise, max_rank=max_rank)
        self._doubtful.append(rank != most or float(s[rank - 1]) < _CLEAR * blur)
        if rank < choose_rank(s, budget=share, noise=noise):
            last = float(s[rank - 1])
            if cuts_group(s, rank, noise + apart * last + (blur**2 / max(last, noise) if blur else 0.0)):
                self._cuts.append(self.step)
        lost = math.hypot(float(tails(s)[rank]), blur if rank < len(s) else 0.0, beyond)
        # What a rank cap discards beyond the share is lost; the rest of the sweep keeps its own shares.
        self._charged.append(min(lost**2, self._allowed[-1]))
        self._discarded.append(lost)
        return rank

    def settle(self, start: int, lost: float) -> bool:
        """Book that truncations from number `start` on discarded `lost` together; False where that is too much."""
        steps = self.step - start
        booked, allowed = sum(d**2 for d in self._discarded[start:]), sum(self._allowed[start:])
        if lost**2 > max(booked, allowed):
            return False
        self._charged[start:] = [min(lost**2, allowed) / steps] * steps
        self._discarded[start:] = [lost / math.sqrt(steps)] * steps
        return True

    def rewind(self, step: int) -> None:
        """Forget the truncations from number `step` on; they are made anew."""
        for booked in (self._discarded, self._charged, self._allowed, self._doubtful):
            del booked[step:]
        self._cuts = [k for k in self._cuts if k < step]

    def lost(self, since: int) -> float:
        """Frobenius norm of what was discarded since step number `since`."""
        return math.hypot(*self._discarded[since:])

    def clear(self, since: int, blur: float) -> bool:
        """Say whether ranks and losses since step number `since` stand out from an uncertainty `blur` of each."""
        if blur <= self.negligible:
            return True
        lost = self.lost(since)
        small = lost > 0.0 and lost < _CLEAR * blur * math.sqrt(self.step - since)
        return not (small or any(self._doubtful[since:]))

    @property
    def cuts(self) -> list[int]:
        """Truncations whose rank cap separated equal singular values."""
        return self._cuts

    @property
    def discarded(self) -> float:
        """Frobenius norm of all that was discarded so far."""
        return math.hypot(*self._discarded)

    @property
    def error(self) -> float:
        """`discarded` relative to the norm of the tensor; 0 for a zero tensor."""
        return self.discarded / self.norm if self.norm > 0 else 0.0
