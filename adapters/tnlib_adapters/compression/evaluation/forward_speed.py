"""Tokens per second of the forward pass of a running model."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tnlib_adapters.instrument.running_model import Batch, RunningModel

_RUNS = 3


def tokens_per_second(models: Sequence[RunningModel], batches: Sequence[Batch]) -> list[float] | None:
    """Return the tokens per second of every model on the longest batch, the best of a few runs, models in turn.

    Without a cache; None for models that do not fit in memory, whose time is that of reading them.
    """
    import torch

    if not all(model.fits_in_memory for model in models):
        return None
    batch = max(batches, key=lambda own: own.n_tokens)
    seconds = [float("inf")] * len(models)
    with torch.no_grad():
        for run in range(_RUNS + 1):
            for k, model in enumerate(models):
                started = time.perf_counter()
                model(batch).flatten()[:1].cpu()  # a device computes on after the call has returned
                if run > 0:  # the first one allocates memory
                    seconds[k] = min(seconds[k], time.perf_counter() - started)
    return [batch.n_tokens / own for own in seconds]
