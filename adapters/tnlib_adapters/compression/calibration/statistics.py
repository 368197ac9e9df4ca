"""Statistics of a running model over text: input moments, gradient moments, and gate derivatives of components."""

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
    """Calibration statistics of the first batches of a text, by weight keys; collection can be resumed.

    Parameters
    ----------
    reads
        By input key: sums over tokens of x x^T; for an embedding table the token counts.
    slopes
        Sums of p p^T with the gradient p of a probe at the output. Both over `n_read` batches.
    gates
        Sums of squares of the derivative with respect to a gate on each component, over `n_weighed` batches.
    n_read, n_weighed
        Number of batches so far.
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
    """Do not save: the callback for collection without a file."""


def collect_reads(
    model: RunningModel, places: Places, batches: Sequence[Batch], progress: Progress = quiet
) -> dict[str, Array]:
    """Return by key the input moments over the batches: sums over tokens, for an embedding table the counts."""
    from tnlib_adapters.instrument.weight_inputs import read

    sums: dict[str, Array] = {}
    place_of = {place.reads: place for place in places.values()}
    for done, batch in enumerate(batches):
        progress("reading inputs", done, len(batches))
        for key, x in read(model, batch, places).items():
            _add(sums, key, _moments(x, place_of[key]).astype(np.float64))
    progress("reading inputs", len(batches), len(batches))
    return sums


def collect(
    model: RunningModel,
    places: Places,
    batches: Sequence[Batch],
    found: Statistics,
    progress: Progress = quiet,
    *,
    save: Save = forget,
) -> Statistics:
    """Return the statistics with input and gradient moments over the batches, resumed after the last batch.

    `save` is called every few seconds and at the end.
    """
    from tnlib_adapters.instrument.weight_inputs import observe

    place_of = {place.reads: place for place in places.values()}
    for k in _saving("reading activations", found.n_read, len(batches), progress, lambda: save(found)):
        reads, slopes = observe(model, batches[k], places, _generator(2 * k))
        for key, x in reads.items():
            _add(found.reads, key, _moments(x, place_of[key]))
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
    """Return for every weight the mean squared derivative with respect to a gate on each of its components.

    The mean is over texts and probes, or over tokens for language models. Half of it is, to lowest order, the loss of
    cosine similarity of the embeddings, or the increase of the divergence of the predictions, when the component is
    removed. Resumes after the last batch of `found`, and updates it.
    """
    from tnlib_adapters.instrument.weight_inputs import observe

    sides = {key: _sides(component) for key, component in components.items()}
    for k in _saving("measuring gates", found.n_weighed, len(batches), progress, lambda: save(found)):
        reads, gradients = observe(model, batches[k], places, _generator(2 * k + 1))
        for key, (left, right) in sides.items():
            x = reads[places[key].reads]
            # a table lookup has row -1 at padding, where slopes are 0
            on_left = left[x] if places[key].is_table else x[..., : len(left)] @ left  # b t [m] c
            slopes = (on_left * (gradients[key] @ right.T)).sum(1)  # b [t] c
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


def _add(sums: dict[str, Array], key: str, batch_sum: Array) -> None:
    if key in sums:
        sums[key] += batch_sum
    else:
        sums[key] = batch_sum


def _moments(x: torch.Tensor, place: Place) -> Array:
    """Return the sum of x x^T over tokens; for token ids, how often each row of the table occurs."""
    if not place.is_table:
        return second_moments(x.numpy())
    ids = x[x >= 0].numpy()
    return np.bincount(ids, minlength=len(place.module.get_parameter("weight"))).astype(np.float32)


def _sides(components: Components) -> tuple[torch.Tensor, torch.Tensor]:
    import torch

    return torch.from_numpy(components.left).float(), torch.from_numpy(components.right).float()


def _generator(seed: int) -> torch.Generator:
    """Return the generator for the probes of one batch, seeded per batch so that resuming is reproducible."""
    import torch

    return torch.Generator().manual_seed(_SEED + seed)
