"""Random indices where a train differs most from its next entry: errors at a jump of a function lie beside these."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tnlib._typing import Array
from tnlib.formats.train.canonicalize import move_center
from tnlib.formats.train.cross.error_estimate import entries
from tnlib.formats.train.cross.sampling import Rng, sample_train
from tnlib.formats.train.format import TensorTrain


def sample_jumps(t: TensorTrain, heads: Array, least: float, rng: Rng) -> Array:
    """Return indices (2 m, d), two neighbours for each of `heads` (m, d), whose first legs are given, the others -1.

    The first of the two has these legs, and is drawn with a probability proportional to the square of its difference
    to the second, the next entry of the flat array: binary digits are carried. Where they differ by less than `least`,
    the two are the first and the last entry with these legs.
    """
    reverse = move_center(difference(t).T, len(t.cores) - 1)
    first = sample_train(reverse.cores, len(heads), rng, heads[:, ::-1])[:, ::-1]
    after = _next(first, t.shape)
    flat = np.abs(entries(t, first) - entries(t, after)) < least
    first[flat] = np.maximum(heads[flat], 0)
    after[flat] = np.where(heads[flat] < 0, np.array(t.shape) - 1, heads[flat])
    return np.concatenate([first, after])


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
