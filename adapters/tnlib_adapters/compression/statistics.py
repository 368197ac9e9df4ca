"""Statistics of a running model over text: moments inside the heads, and what each of their components is worth."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from tnlib._typing import Array
from tnlib_adapters.compression.cuts import Cut
from tnlib_adapters.compression.moments import Moments
from tnlib_adapters.compression.plan import Progress, quiet

if TYPE_CHECKING:
    from tnlib_adapters.torch.hooks.running import Batch, RunningModel

_PROBES = 2
_SEED = 0


def collect(model: RunningModel, batches: Sequence[Batch], progress: Progress = quiet) -> list[Moments]:
    """Return the moments of every layer over the batches."""
    import torch

    from tnlib_adapters.torch.hooks.running import observe

    s = model.sizes
    found = [Moments.zeros(s.n_heads, s.d_head) for _ in model.layers]
    generator = torch.Generator().manual_seed(_SEED)
    for done, batch in enumerate(batches):
        progress("reading activations", done, len(batches))
        for moments, seen in zip(found, observe(model, batch, _PROBES, generator), strict=True):
            for kind, a, p in (("qk", seen.q, seen.dq), ("vo", seen.y, seen.dy)):
                moments.activations[kind] += _second_moments(a.numpy())
                moments.gradients[kind] += _second_moments(p.numpy())
    progress("reading activations", len(batches), len(batches))
    return found


def _second_moments(x: Array) -> Array:
    by_head = np.moveaxis(x.reshape(-1, *x.shape[-2:]), 1, 0)  # h (texts tokens) d
    return (by_head.transpose(0, 2, 1) @ by_head).astype(np.float64)  # h d [t] [t] d'


def measure_gates(
    model: RunningModel, batches: Sequence[Batch], cuts: Sequence[dict[str, Cut]], progress: Progress = quiet
) -> list[dict[str, Array]]:
    """Return for every layer and kind, (key heads, units): the mean square of the derivative by a gate on each unit.

    The mean is over texts and probes, or tokens where those are predicted. Half of it is, to lowest order, what
    dropping the unit takes from the cosine of the embeddings, or adds to the divergence of the predictions.
    """
    import torch

    from tnlib_adapters.torch.hooks.running import observe

    sums = [{kind: np.zeros((len(c.left) // c.group, len(c.units))) for kind, c in layer.items()} for layer in cuts]
    generator = torch.Generator().manual_seed(_SEED + 1)
    count = 0
    for done, batch in enumerate(batches):
        progress("measuring gates", done, len(batches))
        for layer, gates, seen in zip(cuts, sums, observe(model, batch, _PROBES, generator), strict=True):
            for kind, a, p in (("qk", seen.q, seen.dq), ("vo", seen.y, seen.dy)):
                slopes = layer[kind].slopes(a.numpy(), p.numpy())  # p b g u
                gates[kind] += np.sum(np.square(slopes, dtype=np.float64), axis=(0, 1))
        count += _PROBES * (batch.n_tokens if model.predicts else len(batch.ids))
    progress("measuring gates", len(batches), len(batches))
    return [{kind: total / count for kind, total in layer.items()} for layer in sums]
