"""Statistics of a running model over text: moments inside the heads, and what each of their components is worth."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from tnlib._typing import Array
from tnlib_adapters.compression.moments import KINDS, Moments
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
    model: RunningModel, batches: Sequence[Batch], moments: Sequence[Moments], progress: Progress = quiet
) -> list[dict[str, Array]]:
    """Return for every layer and kind, (heads, d_head): the mean square of the derivative by each component's gate.

    The mean is over texts and probes, for models that predict over tokens. Half of it is, to lowest order, what dropping
    the component takes from the cosine of the embeddings, or adds to the divergence of the predictions.
    """
    import torch

    from tnlib_adapters.torch.hooks.running import observe

    parts = [{kind: one.components(kind) for kind in KINDS} for one in moments]
    sums = [{kind: np.zeros(left.shape[::2]) for kind, (left, _) in layer.items()} for layer in parts]
    generator = torch.Generator().manual_seed(_SEED + 1)
    count = 0
    for done, batch in enumerate(batches):
        progress("measuring gates", done, len(batches))
        for layer, gates, seen in zip(parts, sums, observe(model, batch, _PROBES, generator), strict=True):
            for kind, a, p in (("qk", seen.q, seen.dq), ("vo", seen.y, seen.dy)):
                left, right = (side.astype(np.float32)[:, None] for side in layer[kind])
                on_left = np.moveaxis(a.numpy(), 2, 0) @ left  # h b t [d] c
                on_right = np.moveaxis(p.numpy(), 3, 1) @ right  # p h b t [d] c
                slopes = np.sum(on_left * on_right, axis=3)  # p h b [t] c
                gates[kind] += np.sum(np.square(slopes, dtype=np.float64), axis=(0, 2))
        count += _PROBES * (batch.n_tokens if model.predicts else len(batch.ids))
    progress("measuring gates", len(batches), len(batches))
    return [{kind: total / count for kind, total in layer.items()} for layer in sums]
