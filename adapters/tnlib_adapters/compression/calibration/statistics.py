"""Statistics of a running model over text: what its weights read, what components of them are worth."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from tnlib._typing import Array
from tnlib_adapters.compression.calibration.moments import Moments, second_moments
from tnlib_adapters.compression.methods.components import Components
from tnlib_adapters.compression.progress import Progress, quiet
from tnlib_adapters.factors.projections import NAMES

if TYPE_CHECKING:
    import torch

    from tnlib_adapters.instrument.running_model import Batch, RunningModel
    from tnlib_adapters.instrument.weight_inputs import Place, Places

_SEED = 0
_SAVED_EVERY = 10.0  # seconds


@dataclass
class Statistics:
    """What the first batches of a text showed of weights, by their keys; more batches can follow.

    Parameters
    ----------
    reads
        By the keys of what they read: sums over tokens of x x^T, of a table counts alone.
    slopes
        Of p p^T with p the gradient of a probe at what they write. Both over `n_read` batches.
    gates
        Sums of squares of the derivative by a gate on each component, over `n_weighed` batches.
    n_read, n_weighed
        How far it went.
    """

    reads: dict[str, Array] = field(default_factory=dict)
    slopes: dict[str, Array] = field(default_factory=dict)
    gates: dict[str, Array] = field(default_factory=dict)
    n_read: int = 0
    n_weighed: int = 0

    def of_layer(self, k: int) -> Moments:
        """Return the moments of the attention of one layer."""
        return Moments(self.reads[f"{k}.x"], self.reads[f"{k}.y"], {n: self.slopes[f"{k}.{n}"] for n in NAMES})


Save = Callable[[Statistics], None]


def forget(_: Statistics) -> None:
    """Keep nothing in a file."""


def collect_reads(
    model: RunningModel, places: Places, batches: Sequence[Batch], progress: Progress = quiet
) -> dict[str, Array]:
    """Return by key the moments of what weights read over the batches: sums over tokens, of a table counts."""
    from tnlib_adapters.instrument.weight_inputs import read

    found: dict[str, Array] = {}
    of = {place.reads: place for place in places.values()}
    for done, batch in enumerate(batches):
        progress("reading inputs", done, len(batches))
        for key, x in read(model, batch, places).items():
            _add(found, key, _moments(x, of[key]).astype(np.float64))
    progress("reading inputs", len(batches), len(batches))
    return found


def collect(
    model: RunningModel,
    places: Places,
    batches: Sequence[Batch],
    found: Statistics,
    progress: Progress = quiet,
    *,
    save: Save = forget,
) -> Statistics:
    """Return the statistics with the moments of weights over the batches, gone on with from where they end.

    `save` is called every few seconds and at the end.
    """
    from tnlib_adapters.instrument.weight_inputs import observe

    of = {place.reads: place for place in places.values()}
    for k in _saving("reading activations", found.n_read, len(batches), progress, lambda: save(found)):
        reads, slopes = observe(model, batches[k], places, _generator(2 * k))
        for key, x in reads.items():
            _add(found.reads, key, _moments(x, of[key]))
        for key, slope in slopes.items():
            _add(found.slopes, key, second_moments(slope.numpy()))
        found.n_read = k + 1
    return found


def measure_gates(
    model: RunningModel,
    places: Places,
    batches: Sequence[Batch],
    components: Mapping[str, Components],
    found: Statistics,
    progress: Progress = quiet,
    *,
    save: Save = forget,
) -> dict[str, Array]:
    """Return for every weight the mean square of the derivative by a gate on each of its components.

    The mean is over texts and probes, or tokens where those are predicted. Half of it is, to lowest order, what
    dropping the component takes from the cosine of the embeddings, or adds to the divergence of the predictions. Goes
    on from where `found` ends, and leaves there what it found.
    """
    from tnlib_adapters.instrument.weight_inputs import observe

    sides = {key: _sides(one) for key, one in components.items()}
    for k in _saving("measuring gates", found.n_weighed, len(batches), progress, lambda: save(found)):
        reads, seen = observe(model, batches[k], places, _generator(2 * k + 1))
        for key, (left, right) in sides.items():
            x = reads[places[key].reads]
            # of a table rows are looked up, some row for -1, where slopes are 0
            on_left = left[x] if places[key].is_table else x[..., : len(left)] @ left  # b t [m] c
            slopes = (on_left * (seen[key] @ right.T)).sum(1)  # b [t] c
            _add(found.gates, key, slopes.double().square().sum(0).numpy())
        found.n_weighed = k + 1
    count = sum(batch.n_tokens if model.predicts else len(batch.ids) for batch in batches)
    return {key: total / count for key, total in found.gates.items()}


def _saving(stage: str, start: int, total: int, progress: Progress, save: Callable[[], None]) -> Iterator[int]:
    """Count from `start` to `total`; save every few seconds and at the end."""
    due = time.monotonic() + _SAVED_EVERY
    for done in range(start, total):
        progress(stage, done, total)
        yield done
        if time.monotonic() > due or done + 1 == total:
            save()
            due = time.monotonic() + _SAVED_EVERY
    progress(stage, total, total)


def _add(sums: dict[str, Array], key: str, one: Array) -> None:
    if key in sums:
        sums[key] += one
    else:
        sums[key] = one


def _moments(x: torch.Tensor, place: Place) -> Array:
    """Return the sum of x x^T over tokens, or, of ids, how often each row of the table comes."""
    if not place.is_table:
        return second_moments(x.numpy())
    ids = x[x >= 0].numpy()
    return np.bincount(ids, minlength=len(place.module.get_parameter("weight"))).astype(np.float32)


def _sides(components: Components) -> tuple[torch.Tensor, torch.Tensor]:
    import torch

    return torch.from_numpy(components.left).float(), torch.from_numpy(components.right).float()


def _generator(seed: int) -> torch.Generator:
    """Return where the probes of one batch come from: of its own, so that it does not matter where one goes on."""
    import torch

    return torch.Generator().manual_seed(_SEED + seed)
