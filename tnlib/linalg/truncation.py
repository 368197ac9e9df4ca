r"""Rank truncation under one tolerance for the whole object.

A sweep truncates an object several times. Every truncation projects orthogonally onto what it keeps, and a later one
discards a part of what an earlier one kept, so the squares of the discarded norms add up exactly:

    norm(x - y)^2  =  d_1^2 + ... + d_n^2  <=  (rtol norm(x))^2

Equal shares would be d_k = rtol norm(x) / sqrt(n). A truncation rarely uses its whole share, because ranks are
integers; the remainder is divided among the later truncations.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import numpy as np

from tnlib._array_api import eps
from tnlib._typing import Array, Caps

# Singular values below this many eps of the norm are rounding errors: of the entries, and of every factorization.
# Trains of 24 cores, contracted, have been measured to carry sixteen; this is twice that.
_NOISE = 32.0

# A discarded norm this many times larger than the error estimate of the singular values has a square that is right to
# five percent.
_RESOLVED = 4.5


def tail_norms(s: Array) -> Array:
    """Return t (len(s) + 1,) with t[r] = sqrt(sum(s[r:] ** 2)): the error of keeping r values."""
    out = np.zeros(len(s) + 1)
    # smallest first, so that the discarded part is summed without rounding against the kept one
    np.cumsum(np.square(s[::-1], dtype=np.float64), out=out[1:])
    return np.sqrt(out[::-1])


def noise_level(norm: float, dtype: np.dtype[Any], smaller_side: int) -> float:
    """Return the value below which singular values of a matrix of this norm are roundoff.

    `smaller_side` is the smaller dimension of the unfolding of the whole tensor, not of the matrix within a sweep.
    """
    return eps(dtype) * norm * max(_NOISE, math.sqrt(smaller_side))


def numerical_rank(s: Array, noise: float) -> int:
    """Return the number of singular values above the `noise_level`, at least 1."""
    return max(1, int(np.count_nonzero(s > noise)))


def _rank_above(values: Sequence[float], noise: float) -> int:
    """Return the `numerical_rank` of descending values."""
    rank = len(values)
    while rank > 1 and not values[rank - 1] > noise:
        rank -= 1
    return rank


def _rank_within(values: Sequence[float], budget: float) -> int:
    """Return the smallest rank, at least 1, whose tail norm is at most `budget`."""
    square = 0.0
    for rank in range(len(values), 1, -1):
        square += values[rank - 1] * values[rank - 1]  # inf, and no exception, beyond the range
        if math.sqrt(square) > budget:
            return rank
    return 1


def splits_group(values: Sequence[float], rank: int, noise: float) -> bool:
    """Test if the values on both sides of the cut are equal to roundoff, and not roundoff themselves."""
    return rank < len(values) and values[rank] > noise and values[rank - 1] - values[rank] <= noise


class Truncation(NamedTuple):
    """Record of one truncation."""

    rank: int
    discarded: float  # Frobenius norm of the discarded part, error estimates included
    charged: float  # the part of (rtol norm)^2 that it uses
    allowed: float  # the part of (rtol norm)^2 that it may use
    ambiguous: bool  # the error estimate of the singular values leaves another rank possible
    splits_group: bool  # a rank cap separates equal singular values


@dataclass
class TruncationBudget:
    """The truncations of a sweep, and the error that later ones may still make."""

    norm: float  # Frobenius norm of the tensor
    rtol: float | None  # relative tolerance of the whole; None keeps numerical ranks
    sides: Sequence[int]  # per truncation, the smaller dimension of the unfolding of the whole tensor that it cuts
    dtype: np.dtype[Any]  # of the tensor
    max_rank: Caps = None  # cap of all truncations, or of each of them
    degeneracy_tol: float = 0.0  # relative difference of neighbouring values that are kept or discarded together
    records: list[Truncation] = field(default_factory=list, init=False)
    estimate: ClassVar[str | None] = None  # note on an estimated error; here it is known

    @property
    def share(self) -> float | None:
        """Frobenius norm that the next truncation may discard; None where numerical ranks are kept."""
        return None if self.rtol is None else self._share(self.rtol)

    def _share(self, rtol: float) -> float:
        remaining = (rtol * self.norm) ** 2 - sum([record.charged for record in self.records])
        return math.sqrt(max(0.0, remaining) / (len(self.sides) - len(self.records)))

    @property
    def noise(self) -> float:
        """Singular values of the next truncation below this are roundoff."""
        return noise_level(self.norm, self.dtype, self.sides[len(self.records)])

    @property
    def threshold(self) -> float:
        """Frobenius norm that the next truncation may discard: its share, or the noise level."""
        return self.noise if self.share is None else self.share

    @property
    def negligible(self) -> float:
        """Errors below this are roundoff, and need not be known to a few percent."""
        return noise_level(self.norm, self.dtype, 1)

    @property
    def cap(self) -> int | None:
        """Maximal rank of the next truncation."""
        return self.max_rank[len(self.records)] if isinstance(self.max_rank, tuple) else self.max_rank

    def admits(self, error_estimate: float) -> bool:
        """Test if singular values with this error estimate may determine the next rank; a `trial` tests if they did."""
        return self.cap is not None or error_estimate <= self.threshold

    def truncate(
        self, s: Array, *, error_estimate: float = 0.0, discarded: float = 0.0, resolution: float = 0.0
    ) -> int:
        """Return the number of singular values `s`, descending, to keep, and record the truncation.

        `error_estimate` is that of the tail norms, as from `left_svd`, and counts as discarded. `discarded` is the
        Frobenius norm of singular values that are not in `s`, `resolution` the relative difference of equal values.
        """
        values = s.tolist()
        cap = self.cap or len(values)
        noise = noise_level(self.norm, self.dtype, self.sides[len(self.records)])
        share = noise if self.rtol is None else self._share(self.rtol)
        keeps_last = math.sqrt(values[-1] * values[-1]) > share  # as `_rank_within`: the square may be 0
        if keeps_last and not (error_estimate or discarded) and cap >= len(values):
            self.records.append(Truncation(len(values), 0.0, 0.0, share**2, False, False))
            return len(values)
        if self.rtol is None:
            allowed = noise**2 + error_estimate**2
            optimistic = needed = _rank_above(values, noise)
        else:
            allowed = share**2
            optimistic = needed = _rank_within(values, share)
            if error_estimate or discarded:
                needed = _rank_within(values, math.sqrt(max(0.0, allowed - error_estimate**2 - discarded**2)))
        rank = min(needed, cap)
        if self.degeneracy_tol:
            rank = self._between_groups(values, rank, cap, noise)
        last, split = values[rank - 1], False
        if rank < needed:
            uncertainty = error_estimate**2 / max(last, noise) if error_estimate else 0.0
            split = splits_group(values, rank, noise + resolution * last + uncertainty)
        ambiguous = rank != min(optimistic, cap) or last < _RESOLVED * error_estimate
        total = math.hypot(*values[rank:], error_estimate if rank < len(values) else 0.0, discarded)
        # A rank cap may discard more than the share; the rest of the sweep keeps its own shares.
        self.records.append(Truncation(rank, total, min(total**2, allowed), allowed, ambiguous, split))
        return rank

    def _between_groups(self, values: Sequence[float], rank: int, cap: int, noise: float) -> int:
        """Return the rank from which on the next group is discarded: `rank` or the next larger one, within `cap`.

        If the group ends beyond the cap, it is discarded as a whole, unless it is the first.
        """
        ends = [
            k
            for k in range(1, len(values) + 1)
            if k == len(values) or values[k] <= max(noise, (1 - self.degeneracy_tol) * values[k - 1])
        ]
        larger = next(k for k in ends if k >= rank)
        return larger if larger <= cap else max((k for k in ends if k <= cap), default=rank)

    @contextmanager
    def trial(self) -> Iterator[Trial]:
        """Roll back the truncations made inside at the end, unless they are committed."""
        trial = Trial(self, len(self.records))
        try:
            yield trial
        finally:
            if not trial.committed:
                del self.records[trial.start :]

    def notes(self, leg: str = "", *, first: int = 0, cap: str = "max_rank") -> tuple[str, ...]:
        """Return the notes of a `Fit`: at which bonds or legs, counted from `first`, a cap separated equal values."""
        split = [str(k) for k, record in enumerate(self.records, first) if record.splits_group]
        if not split:
            return ()
        where = f" at {leg} {', '.join(split)}" if leg else ""
        return (f"{cap} separates equal singular values{where}; another rank would be unique",)

    @property
    def discarded(self) -> float:
        """Frobenius norm of everything discarded so far."""
        return math.hypot(*[record.discarded for record in self.records])

    @property
    def error(self) -> float:
        """`discarded` relative to the norm of the tensor; 0 for a zero tensor."""
        return self.discarded / self.norm if self.norm > 0 else 0.0


@dataclass
class Trial:
    """Truncations since a point of a sweep, not yet final."""

    budget: TruncationBudget
    start: int
    committed: bool = False

    @property
    def records(self) -> list[Truncation]:
        """The truncations of this trial."""
        return self.budget.records[self.start :]

    @property
    def discarded(self) -> float:
        """Frobenius norm of everything that they discarded."""
        return math.hypot(*(record.discarded for record in self.records))

    def is_resolved(self, error_estimate: float) -> bool:
        """Test if the ranks and the discarded norm are certain with this `error_estimate` of each truncation."""
        if error_estimate <= self.budget.negligible:
            return True
        discarded = self.discarded
        unresolved = 0.0 < discarded < _RESOLVED * error_estimate * math.sqrt(len(self.records))
        return not (unresolved or any(record.ambiguous for record in self.records))

    def commit(self) -> None:
        """Make the truncations final, with their own estimates of the discarded norms."""
        self.committed = True

    def commit_measured(self, discarded: float) -> bool:
        """Make the truncations final with the measured norm of all they discard; False if that exceeds their shares."""
        records, n = self.records, len(self.records)
        # What an early truncation leaves of its share is allowed to the next one, and must not count twice.
        shares = sum(r.allowed for r in records) if self.budget.rtol is None else n * records[0].allowed
        estimated = sum(r.discarded**2 for r in records)
        if discarded**2 > max(estimated, shares):
            return False
        charged, each = min(discarded**2, shares) / n, discarded / math.sqrt(n)
        self.budget.records[self.start :] = [r._replace(discarded=each, charged=charged) for r in records]
        self.committed = True
        return True
