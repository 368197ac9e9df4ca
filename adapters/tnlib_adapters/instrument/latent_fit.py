"""Block-wise reconstruction of layers with multi-head latent attention in place of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from tnlib_adapters.factors.projections import Products
from tnlib_adapters.instrument.block import as_tensor
from tnlib_adapters.instrument.block_passes import Frame, Streams
from tnlib_adapters.instrument.latent_attention import LatentBlock, LatentShape
from tnlib_adapters.instrument.layer_fit import fit_layers, n_held_out
from tnlib_adapters.instrument.narrowed_fit import refit_writers
from tnlib_adapters.instrument.running_model import RunningModel


def fit_latent(
    model: RunningModel,
    streams: Streams,
    shape: LatentShape,
    start: Callable[[int], Products],
    *,
    n_steps: int,
    progress: Callable[[str, int, int], None],
) -> Iterator[Products]:
    """Yield the fitted weights of every layer: W_O and W_down by least squares, then all by gradient descent.

    Parameters are those of `fit_layers`; `start` returns the weights of latent attention of this shape, W_O, and the
    matrices of the feed-forward layer, one matrix each.
    """
    latent_block = partial(LatentBlock, shape=shape)
    return fit_layers(
        model, streams, start, n_steps=n_steps, refit=refit_writers, make_block=latent_block, progress=progress
    )


def truncated_divergence(
    model: RunningModel, streams: Streams, shape: LatentShape, start: Callable[[int], Products]
) -> float:
    """Return the divergence of the predictions with the weights of `start` in all layers, on held-out batches."""
    frame, batches = Frame(model), streams.batches[: n_held_out(len(streams.batches))]
    with torch.no_grad():
        entered = [frame.enter(batch) for batch in batches]
        before, after = ([x for x, _ in entered] for _ in range(2))
        for k in range(len(model.layers)):
            model.load(k)
            block = LatentBlock(model, k, shape)
            weights = block.weights(start(k).each(lambda a: as_tensor(a, model.device)))
            for b, (_, calls) in enumerate(entered):
                before[b], after[b] = block.run(before[b], calls[k]), block.run(after[b], calls[k], weights)
        total = 0.0
        for batch, x, y in zip(batches, before, after, strict=True):
            p, q = (frame.leave(own, batch)[batch.valid].log_softmax(-1) for own in (x, y))
            total += float((p.exp() * (p - q)).sum())
    return total
