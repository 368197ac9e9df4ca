r"""Block-wise reconstruction of zero-padded layers: entries that are 0 stay 0.

As `layer_fit`, for weights that are no products: first W_O and W_down by least squares in closed form, from the inputs
that they have after truncated blocks to the outputs that they had, then all weights by gradient descent on the squared
difference at the output of the block. The weights of a block, as chosen, refitted, descended or halfway, are chosen on
held-out batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from tnlib_adapters.factors.projections import NAMES, Products
from tnlib_adapters.instrument.block import Block, as_tensor, in_double_precision
from tnlib_adapters.instrument.block_passes import Streams
from tnlib_adapters.instrument.layer_fit import FitStreams, adam, blocks_to_fit
from tnlib_adapters.instrument.running_model import RunningModel, find_module, input_of, output_of, stopping_after

_RIDGE = 0.03  # relative to the second moment of each input
_RATE = 0.03  # learning rate, relative to the root mean square of a weight


def fit_narrowed(
    model: RunningModel,
    streams: Streams,
    start: Callable[[int], Products],
    *,
    n_steps: int,
    progress: Callable[[str, int, int], None],
) -> Iterator[Products]:
    """Yield the fitted weights of every layer, one batch of the text a step.

    Parameters
    ----------
    model
        Model with its original weights.
    streams
        For the streams of the calibration batches between layers.
    start
        Function from a layer index to its zero-padded weights, one matrix each.
    n_steps
        Number of gradient steps per layer.
    progress
        Called as progress(stage, done, total).
    """
    both = FitStreams(model, streams)
    for k, order in blocks_to_fit(both, n_steps, 0, 0, progress):
        model.load(k)
        block, best = Block(model, k), start(k).each(lambda a: as_tensor(a, model.device))
        refitted = best
        for name in _writers(block, best):
            refitted = _refit(block, both, refitted, name)
        descended = _descend(block, both, refitted, order)
        halfway = refitted.each(lambda a, b: (a + b) / 2, descended)
        candidates = (descended, halfway, refitted, best)
        errors = both.errors(block, (block.weights(products) for products in candidates))
        best = candidates[int(np.argmin(errors))]
        both.advance(block, block.weights(best))
        yield best.each(lambda a: a.cpu().numpy())


def _writers(block: Block, products: Products) -> list[str]:
    """Return the matrices that write the stream, in the order of the block."""
    feed_forward = block.model.wiring.layers[block.k].feed_forward
    down = [] if feed_forward is None else [feed_forward.down.name]
    return [name for name in ("o", *down) if name in products.factors]


def _refit(block: Block, streams: FitStreams, start: Products, name: str) -> Products:
    """Return `start` with the weight of this name refitted; its bias stays."""
    module: nn.Module = block.layer.projections["o"].module if name in NAMES else find_module(block.model.model, name)
    weights, k, (old,) = block.weights(start), block.k, start.factors[name]
    wrote: dict[int, Tensor] = {}
    read: dict[int, Tensor] = {}
    bias = getattr(module, "bias", None)
    new = in_double_precision(old)
    xx, xy = new.new_zeros(len(old), len(old)), torch.zeros_like(new)
    for b in streams.fitted:
        with output_of(module, wrote, 0), stopping_after(module):
            block.run(streams.original(k, b), streams.call(k, b))
        with input_of(module, read, 0), stopping_after(module):
            block.run(streams.truncated(k, b), streams.call(k, b), weights)
        valid = streams.valid(b)
        z, target = (in_double_precision(x[0].reshape(*valid.shape, -1)[valid]) for x in (read, wrote))
        xx += z.T @ z  # [t]
        xy += z.T @ (target if bias is None else target - bias.to(target))
    used = torch.diag(xx) > 0
    if bool(used.any()):
        own_xx, own_xy, own = xx[used][:, used], xy[used], new[used]
        damped = own_xx + torch.diag(_RIDGE * torch.diag(own_xx))
        new[used] = own + torch.linalg.solve(damped, own_xy - own_xx @ own)
    return replace(start, factors={**start.factors, name: (new.to(old),)})


def _descend(block: Block, streams: FitStreams, start: Products, order: Sequence[int]) -> Products:
    """Return the weights after one step of Adam on every batch of `order`, in units of their root mean squares."""
    scales = start.each(lambda a: (a != 0) * a[a != 0].square().mean().sqrt().nan_to_num())
    moves = start.each(lambda a: torch.zeros_like(a, requires_grad=True))

    def _moved() -> Products:
        return start.each(lambda a, scale, move: a + scale * move, scales, moves)

    adam(block, streams, moves.parts, lambda: block.weights(_moved()), _RATE, order)
    return _moved().each(Tensor.detach)
