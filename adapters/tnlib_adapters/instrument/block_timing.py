"""Seconds per token of the passes through one block, and of the output of the model."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tnlib_adapters.instrument.block import Block
from tnlib_adapters.instrument.block_passes import OuterLayers, run_block
from tnlib_adapters.instrument.running_model import Batch, RunningModel
from tnlib_adapters.instrument.stored_weights import OUTSIDE
from tnlib_adapters.instrument.weight_inputs import WeightUses, observe_block, observe_output, of_group


@dataclass(frozen=True)
class BlockTimes:
    """Seconds per token.

    Parameters
    ----------
    forward
        Of a forward pass of the block.
    probe
        Of a forward pass, a backward pass to the outputs of all uses, and second moments of inputs and gradients.
    step
        Of a step of the fit: a forward pass, a backward pass to the compressed weights, and a step of Adam.
    output
        Of the output of the model for the last block, and the gradient of a probe of it.
    """

    forward: float
    probe: float
    step: float
    output: float


def time_block(model: RunningModel, uses: WeightUses, k: int, batch: Batch) -> BlockTimes:
    """Return the seconds of the k-th block and of the output on a batch; `uses` are the weights to compress."""
    outer, block, of_block = OuterLayers(model), Block(model, k), of_group(uses, k)
    with torch.no_grad():
        x, calls = outer.enter(batch)
    gradient, generator = torch.randn_like(x), torch.Generator().manual_seed(0)
    model.load(k)
    compressed = {id(p) for use in of_block.values() for p in use.module.parameters() if p.ndim > 1}
    parameters = {name: p for name, p in block.layer.block.named_parameters() if id(p) in compressed}
    weights = {name: p.detach().float().clone().requires_grad_() for name, p in parameters.items()}
    optimiser = torch.optim.Adam(weights.values())

    def forward() -> Tensor:
        with torch.no_grad():
            return run_block(model, k, x, calls[k])

    def probe() -> Tensor:
        reads, slopes, out = observe_block(model, k, x, calls[k], batch, of_block, gradient)
        for a in (*reads.values(), *slopes.values()):
            out = out.flatten()[:1] + (a.flatten(0, -2).T @ a.flatten(0, -2))[0, 0]
        return out

    def step() -> Tensor:
        loss = block.run(x, calls[k], weights).float().square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        optimiser.zero_grad()
        return loss

    def output() -> Tensor:
        return observe_output(outer, x, batch, of_group(uses, OUTSIDE), generator)[2]

    n_tokens = batch.ids.numel()
    return BlockTimes(*(_seconds(call) / n_tokens for call in (forward, probe, step, output)))


def _seconds(call: Callable[[], Tensor]) -> float:
    """Return the seconds of the second call: libraries prepare themselves at the first. Waits for the device."""
    call().flatten()[0].item()
    started = time.perf_counter()
    call().flatten()[0].item()
    return time.perf_counter() - started
