r"""Block-wise reconstruction of zero-padded layers: entries that are 0 stay 0.

As `layer_fit`, for weights that are no products: first W_O and W_down by least squares in closed form, from the inputs
that they have after truncated blocks to the outputs that they had, then all weights by gradient descent on the squared
difference at the output of the block. The weights of a block, as chosen, refitted, descended or halfway, are chosen on
held-out batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import nn

from tnlib_adapters.factors.projections import NAMES, Products
from tnlib_adapters.instrument.block import Block, in_double_precision
from tnlib_adapters.instrument.block_passes import Streams
from tnlib_adapters.instrument.layer_fit import FitSteps, FitStreams, descend, fit_layers, inputs_and_targets
from tnlib_adapters.instrument.running_model import RunningModel, find_module

_RIDGE = 0.03  # relative to the second moment of each input


def fit_narrowed(
    model: RunningModel,
    streams: Streams,
    start: Callable[[int], Products],
    *,
    n_steps: int,
    progress: Callable[[str, int, int], None],
) -> Iterator[Products]:
    """Yield the fitted weights of every layer.

    Parameters are those of `fit_layers`; `start` returns zero-padded weights, one matrix each.
    """
    return fit_layers(model, streams, start, steps=FitSteps(n_steps, _refit_writers, _descend), progress=progress)


def _refit_writers(block: Block, streams: FitStreams, start: Products) -> Products:
    """Return `start` with the matrices that write the stream refitted one after the other."""
    refitted = start
    for name in _writers(block, start):
        refitted = _refit(block, streams, refitted, name)
    return refitted


def _writers(block: Block, products: Products) -> list[str]:
    """Return the matrices that write the stream, in the order of the block."""
    feed_forward = block.model.wiring.layers[block.k].feed_forward
    down = [] if feed_forward is None else [feed_forward.down.name]
    return [name for name in ("o", *down) if name in products.factors]


def _refit(block: Block, streams: FitStreams, start: Products, name: str) -> Products:
    """Return `start` with the weight of this name refitted; its bias stays."""
    module: nn.Module = block.layer.projections["o"].module if name in NAMES else find_module(block.model.model, name)
    (old,) = start.factors[name]
    bias = getattr(module, "bias", None)
    new = in_double_precision(old)
    xx, xy = new.new_zeros(len(old), len(old)), torch.zeros_like(new)
    for pair in inputs_and_targets(block, streams, module, block.weights(start)):
        z, target = map(in_double_precision, pair)
        xx += z.T @ z  # [t]
        xy += z.T @ (target if bias is None else target - bias.to(target))
    used = torch.diag(xx) > 0
    if bool(used.any()):
        own_xx, own_xy, own = xx[used][:, used], xy[used], new[used]
        damped = own_xx + torch.diag(_RIDGE * torch.diag(own_xx))
        new[used] = own + torch.linalg.solve(damped, own_xy - own_xx @ own)
    return replace(start, factors={**start.factors, name: (new.to(old),)})


def _descend(block: Block, streams: FitStreams, start: Products, order: Sequence[int]) -> Products:
    """Return the weights after the steps of `descend`; entries that are 0 stay 0."""
    return descend(block, streams, start, order, lambda a: (a != 0) * a[a != 0].square().mean().sqrt().nan_to_num())
