"""Statistics of a running model over text: moments inside the heads, and what each of their components is worth."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from tnlib._typing import Array
from tnlib_adapters.compression.cuts import Cut
from tnlib_adapters.compression.moments import Moments
from tnlib_adapters.compression.progress import Progress, quiet

if TYPE_CHECKING:
    import torch

    from tnlib_adapters.torch.hooks.running import Batch, RunningModel

_PROBES = 1
_SEED = 0
_SAVED_EVERY = 10.0  # seconds


@dataclass
class Statistics:
    """What the first batches of a text showed of every layer; more batches can follow.

    Parameters
    ----------
    moments
        For every layer, over `n_read` batches.
    slopes
        For every layer and kind, (key heads, units): sums of squares of the derivative by a gate on each unit, over
        `n_weighed` batches. Empty before the first.
    n_read, n_weighed
        How far it went.
    """

    moments: list[Moments]
    slopes: list[dict[str, Array]] = field(default_factory=list)
    n_read: int = 0
    n_weighed: int = 0


Save = Callable[[Statistics], None]


def forget(_: Statistics) -> None:
    """Keep nothing in a file."""


def collect(
    model: RunningModel,
    batches: Sequence[Batch],
    progress: Progress = quiet,
    *,
    so_far: Statistics | None = None,
    save: Save = forget,
) -> Statistics:
    """Return the moments of every layer over the batches, going on from where `so_far` ends.

    `save` is called every few seconds and at the end.
    """
    from tnlib_adapters.torch.hooks.running import observe

    s = model.sizes
    found = so_far or Statistics([Moments.zeros(s.n_heads, s.d_head) for _ in model.layers])
    due = time.monotonic() + _SAVED_EVERY
    for done in range(found.n_read, len(batches)):
        progress("reading activations", done, len(batches))
        seen = observe(model, batches[done], _PROBES, _generator(2 * done))
        for moments, one in zip(found.moments, seen, strict=True):
            for kind, a, p in (("qk", one.q, one.dq), ("vo", one.y, one.dy)):
                moments.activations[kind] += _second_moments(a.numpy())
                moments.gradients[kind] += _second_moments(p.numpy())
        found.n_read = done + 1
        if time.monotonic() > due or found.n_read == len(batches):
            save(found)
            due = time.monotonic() + _SAVED_EVERY
    progress("reading activations", len(batches), len(batches))
    return found


def _second_moments(x: Array) -> Array:
    by_head = np.moveaxis(x.reshape(-1, *x.shape[-2:]), 1, 0)  # h (texts tokens) d
    return (by_head.transpose(0, 2, 1) @ by_head).astype(np.float64)  # h d [t] [t] d'


def measure_gates(
    model: RunningModel,
    batches: Sequence[Batch],
    cuts: Sequence[dict[str, Cut]],
    found: Statistics,
    progress: Progress = quiet,
    *,
    save: Save = forget,
) -> list[dict[str, Array]]:
    """Return for every layer and kind, (key heads, units): the mean square of the derivative by a gate on each unit.

    The mean is over texts and probes, or tokens where those are predicted. Half of it is, to lowest order, what
    dropping the unit takes from the cosine of the embeddings, or adds to the divergence of the predictions. Goes on
    from where `found` ends, and leaves there what it found.
    """
    from tnlib_adapters.torch.hooks.running import observe

    if not found.slopes:
        found.slopes = [
            {kind: np.zeros((len(c.left) // c.group, len(c.units))) for kind, c in layer.items()} for layer in cuts
        ]
    due = time.monotonic() + _SAVED_EVERY
    for done in range(found.n_weighed, len(batches)):
        progress("measuring gates", done, len(batches))
        seen = observe(model, batches[done], _PROBES, _generator(2 * done + 1))
        for layer, sums, one in zip(cuts, found.slopes, seen, strict=True):
            for kind, a, p in (("qk", one.q, one.dq), ("vo", one.y, one.dy)):
                slopes = layer[kind].slopes(a.numpy(), p.numpy())  # p b g u
                sums[kind] += np.sum(np.square(slopes, dtype=np.float64), axis=(0, 1))
        found.n_weighed = done + 1
        if time.monotonic() > due or found.n_weighed == len(batches):
            save(found)
            due = time.monotonic() + _SAVED_EVERY
    progress("measuring gates", len(batches), len(batches))
    count = _PROBES * sum(batch.n_tokens if model.predicts else len(batch.ids) for batch in batches)
    return [{kind: total / count for kind, total in layer.items()} for layer in found.slopes]


def _generator(seed: int) -> torch.Generator:
    """Return where the probes of one batch come from: of its own, so that it does not matter where one goes on."""
    import torch

    return torch.Generator().manual_seed(_SEED + seed)
