"""Random indices where a train has jumps and kinks: errors at those of a function lie beside them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tnlib._typing import Array
from tnlib.formats.train.canonicalize import move_center
from tnlib.formats.train.cross.error_estimate import entries
from tnlib.formats.train.cross.sampling import Rng
from tnlib.formats.train.format import TensorTrain
from tnlib.formats.train.perfect_sampling import invert_distribution

_KINK_LEGS = 8  # of a sample: the work for each is linear in the number of legs


def sample_jumps(t: TensorTrain, heads: Array, least: float, rng: Rng) -> Array:
    """Return indices (2 m, d), two neighbours for each of `heads` (m, d), whose first legs are given, the others -1.

    The first of the two has these legs, and is drawn with a probability proportional to the square of its difference
    to the second, the next entry of the flat array: binary digits are carried. Where they differ by less than `least`,
    the two are the first and the last entry with these legs.
    """
    first = _sample(difference(t), heads, rng)
    after = _next(first, t.shape)
    flat = np.abs(entries(t, first) - entries(t, after)) < least
    first[flat], after[flat] = _ends(heads[flat], t.shape)
    return np.concatenate([first, after])


def sample_kinks(t: TensorTrain, heads: Array, least: float, rng: Rng) -> Array:
    """Return indices (3 m, d), three neighbours along one leg for each of `heads` (m, d), whose first legs are given.

    The leg has more than two values and is random, among those that are not given where there are any. The neighbours
    are drawn with a probability proportional to the square of their second difference. Where it is less than `least`,
    they are a random corner, the first and the last entry with the given legs.
    """
    wide = np.flatnonzero(np.array(t.shape) > 2)
    wide = np.sort(rng.permutation(wide)[:_KINK_LEGS])
    n_given = np.searchsorted(wide, np.count_nonzero(heads >= 0, axis=1))
    legs, points = wide[rng.integers(n_given % len(wide), len(wide))], [heads[:0]]
    for leg in np.unique(legs):
        of_leg, step = heads[legs == leg], np.arange(len(t.cores)) == leg
        of_leg[:, leg] = -1
        before = _sample(second_difference(t, leg), of_leg, rng)
        middle, after = before + step, before + 2 * step
        flat = np.abs(entries(t, before) - 2 * entries(t, middle) + entries(t, after)) < least
        middle[flat], after[flat] = first, last = _ends(of_leg[flat], t.shape)
        before[flat] = np.where(rng.random(first.shape) < 0.5, first, last)
        points += [before, middle, after]
    return np.concatenate(points)


def _sample(t: TensorTrain, heads: Array, rng: Rng) -> Array:
    """Return indices (m, d) with the first legs of `heads`, drawn with a probability proportional to |t|^2."""
    return invert_distribution(move_center(t, 0).cores, rng.random((len(t.cores), len(heads))).T, heads)


def _ends(heads: Array, shape: Sequence[int]) -> tuple[Array, Array]:
    """Return the first and the last index (m, d) with the first legs of each of `heads`."""
    return np.maximum(heads, 0), np.where(heads < 0, np.array(shape) - 1, heads)


def second_difference(t: TensorTrain, leg: int) -> TensorTrain:
    """Return the train of t[i] - 2 t[i + 1] + t[i + 2] along `leg`, which has two values fewer."""
    cores = list(t.cores)
    core = cores[leg]
    cores[leg] = core[:, :-2] - 2 * core[:, 1:-1] + core[:, 2:]
    return TensorTrain.from_sweep(cores, None, t.exponent)


def difference(t: TensorTrain) -> TensorTrain:
    """Return the train of t[i + 1] - t[i], i the flat index; the last entry is -t[-1]. Ranks double.

    The upper rows of a core leave the legs on the left as they are, the lower ones carry into them.
    """
    cores = [_with_carry(core) for core in t.cores]
    last, right = cores[-1], t.cores[-1].shape[2]
    cores[-1] = last[:, :, right:] - last[:, :, :right]
    cores[0] = cores[0][:1]
    return TensorTrain.from_sweep(cores, None, t.exponent)


def _with_carry(core: Array) -> Array:
    """Return (2 l, n, 2 r): without a carry from the right and with one, which n - 1 passes on to the left."""
    left, n, right = core.shape
    out = np.zeros((2, left, n, 2, right), core.dtype)
    out[0, :, :, 0] = core
    out[0, :, :-1, 1] = core[:, 1:]
    out[1, :, -1, 1] = core[:, 0]
    return out.reshape(2 * left, n, 2 * right)


def _next(points: Array, shape: Sequence[int]) -> Array:
    """Return the indices that follow `points` (m, d) in the flat array, the first one after the last one."""
    out, carry = points.copy(), np.ones(len(points), np.intp)
    for k in range(len(shape) - 1, -1, -1):
        out[:, k] = (points[:, k] + carry) % shape[k]
        carry &= out[:, k] == 0
    return out
