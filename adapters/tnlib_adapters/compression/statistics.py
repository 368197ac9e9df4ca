"""Statistics of a running model over text: what its attention reads, what components of its weights are worth."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from tnlib._typing import Array
from tnlib_adapters.compression.components import Components
from tnlib_adapters.compression.moments import Moments
from tnlib_adapters.compression.progress import Progress, quiet

if TYPE_CHECKING:
    import torch

    from tnlib_adapters.torch.hooks.running import Batch, RunningModel

_SEED = 0
_SAVED_EVERY = 10.0  # seconds


@dataclass
class Statistics:
    """What the first batches of a text showed of every layer; more batches can follow.

    Parameters
    ----------
    moments
        For every layer, over `n_read` batches. Empty before the first.
    gates
        For every layer and projection: sums of squares of the derivative by a gate on each component, over `n_weighed`
        batches. Empty before the first.
    n_read, n_weighed
        How far it went.
    """

    moments: list[Moments] = field(default_factory=list)
    gates: list[dict[str, Array]] = field(default_factory=list)
    n_read: int = 0
    n_weighed: int = 0


Save = Callable[[Statistics], None]


def forget(_: Statistics) -> None:
    """Keep nothing in a file."""


def collect(
    model: RunningModel,
    batches: Sequence[Batch],
    found: Statistics,
    progress: Progress = quiet,
    *,
    save: Save = forget,
) -> Statistics:
    """Return the statistics with the moments of every layer over the batches, gone on with from where they end.

    `save` is called every few seconds and at the end.
    """
    from tnlib_adapters.torch.hooks.attention import observe

    due = time.monotonic() + _SAVED_EVERY
    for done in range(found.n_read, len(batches)):
        progress("reading activations", done, len(batches))
        of_batch = [Moments.of(seen) for seen in observe(model, batches[done], _generator(2 * done))]
        if found.moments:
            for moments, one in zip(found.moments, of_batch, strict=True):
                moments.add(one)
        else:
            found.moments = of_batch
        found.n_read = done + 1
        if time.monotonic() > due or found.n_read == len(batches):
            save(found)
            due = time.monotonic() + _SAVED_EVERY
    progress("reading activations", len(batches), len(batches))
    return found


def measure_gates(
    model: RunningModel,
    batches: Sequence[Batch],
    layers: Sequence[Mapping[str, Components]],
    found: Statistics,
    progress: Progress = quiet,
    *,
    save: Save = forget,
) -> list[dict[str, Array]]:
    """Return for every layer and projection the mean square of the derivative by a gate on each of its components.

    The mean is over texts and probes, or tokens where those are predicted. Half of it is, to lowest order, what
    dropping the component takes from the cosine of the embeddings, or adds to the divergence of the predictions. Goes
    on from where `found` ends, and leaves there what it found.
    """
    from tnlib_adapters.torch.hooks.attention import observe

    if not found.gates:
        found.gates = [{name: np.zeros(len(one.losses)) for name, one in layer.items()} for layer in layers]
    sides = [{name: _sides(one) for name, one in layer.items()} for layer in layers]
    due = time.monotonic() + _SAVED_EVERY
    for done in range(found.n_weighed, len(batches)):
        progress("measuring gates", done, len(batches))
        seen = observe(model, batches[done], _generator(2 * done + 1))
        for of_layer, sums, one in zip(sides, found.gates, seen, strict=True):
            for name, (left, right) in of_layer.items():
                on_left = one.by(name)[..., : len(left)] @ left  # b t [m] c
                slopes = (on_left * (one.slopes[name] @ right.T)).sum(1)  # b [t] c
                sums[name] += slopes.double().square().sum(0).numpy()
        found.n_weighed = done + 1
        if time.monotonic() > due or found.n_weighed == len(batches):
            save(found)
            due = time.monotonic() + _SAVED_EVERY
    progress("measuring gates", len(batches), len(batches))
    count = sum(batch.n_tokens if model.predicts else len(batch.ids) for batch in batches)
    return [{name: total / count for name, total in layer.items()} for layer in found.gates]


def _sides(components: Components) -> tuple[torch.Tensor, torch.Tensor]:
    import torch

    return torch.from_numpy(components.left).float(), torch.from_numpy(components.right).float()


def _generator(seed: int) -> torch.Generator:
    """Return where the probes of one batch come from: of its own, so that it does not matter where one goes on."""
    import torch

    return torch.Generator().manual_seed(_SEED + seed)
