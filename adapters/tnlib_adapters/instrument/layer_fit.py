r"""Truncated layers fitted to the layers they replace, one after the other, first to last.

A layer sees what the truncated layers before it write, x', and is to write what the original layer wrote of the
original stream x. First the last factor R of W_O = L R and its bias alone, by least squares in closed form:

    min  sum_t | z_t R + b - o_t |^2 + ridge . |diag(E[z z]) (R - R_0)|^2,        z = y' L

(y' what the truncated heads mix, o what the original attention wrote, L the identity where W_O is whole), then all
factors of the block, those of a truncated feed-forward layer among them, by descent on the squared difference at the
output of the whole block. No gradient leaves the block. What is kept of a layer, its factors as they were truncated,
refitted, descended or halfway, is told by batches that neither step has seen: by what the whole model makes of them,
the layers behind as they came.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from tnlib._typing import Array
from tnlib_adapters.factors.products import Products
from tnlib_adapters.instrument.block_replacement import Block, as_tensor
from tnlib_adapters.instrument.running_model import Batch, RunningModel, find_module, input_of, output_of

_RIDGE = 0.03
_RATE = 0.03  # of a factor's root mean square, per step
_WARM_UP = 10
_TELLING = 6  # batches that tell which step is kept


@dataclass
class _Stream:
    """One batch on its way through the layers: what the original and what the truncated layers wrote."""

    batch: Batch
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]]  # per layer, what else its block is called with
    original: Tensor
    truncated: Tensor


def fit_layers(
    model: RunningModel,
    batches: Sequence[Batch],
    start: Callable[[int], Products],
    *,
    tables: Mapping[str, Array] | None = None,
    n_steps: int,
    seed: int = 0,
    progress: Callable[[str, int, int], None],
) -> Iterator[Products]:
    """Yield the fitted weights of every layer; the model itself is truncated as this goes on.

    Parameters
    ----------
    model
        With its original weights.
    batches
        Of calibration text.
    start
        Layer -> its truncated weights.
    tables
        Embeddings that are truncated too, by module: what the first layer reads.
    n_steps
        Of descent in every layer, one batch each.
    seed
        Of the order of the batches.
    progress
        Called with (stage, done, total).
    """
    count = min(_TELLING, len(batches) // 2)
    telling = [(batch, _output(model, batch)) for batch in batches[: max(1, count)]]
    streams = [_enter(model, batch) for batch in batches[count:]]
    if tables:
        _look_up(model, tables, streams)
    generator = torch.Generator().manual_seed(seed)
    for k in range(len(model.layers)):
        progress("fitting layers", k, len(model.layers))
        block, truncated = Block(model, k), start(k).each(as_tensor)
        if "o" in truncated.factors:
            refitted = _refit_output(block, streams, truncated)
        else:
            refitted = truncated
            for stream in streams:
                stream.original = block.run(stream.original, stream.calls[k])
        best = truncated
        if truncated.parts:  # otherwise all of the block stays as it is
            descended = _descend(block, streams, refitted, n_steps, generator)
            halfway = refitted.each(lambda one, other: (one + other) / 2, descended)
            tried = (descended, halfway, refitted, truncated)
            best = min(tried, key=lambda one: _error(block, telling, one))
            block.install(block.parameters(best))
        for stream in streams:
            stream.truncated = block.run(stream.truncated, stream.calls[k])
        yield best.each(Tensor.numpy)
    progress("fitting layers", len(model.layers), len(model.layers))


def _enter(model: RunningModel, batch: Batch) -> _Stream:
    """Run a batch and keep what the first block reads, and with what every block is called."""
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    entering: list[Tensor] = []

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        entering.append(args[0] if args else kwargs["hidden_states"])
        rest = {name: value for name, value in kwargs.items() if name != "hidden_states"}
        calls.append((args[1:], rest))

    with ExitStack() as hooks, torch.no_grad():
        for layer in model.layers:
            hooks.callback(layer.block.register_forward_pre_hook(hook, with_kwargs=True).remove)
        model(batch)
    return _Stream(batch, calls, entering[0], entering[0])


def _look_up(model: RunningModel, tables: Mapping[str, Array], streams: Sequence[_Stream]) -> None:
    """Let the model, and the truncated streams, have these embeddings."""
    for name, table in tables.items():
        with torch.no_grad():
            find_module(model.model, name).get_parameter("weight").copy_(as_tensor(table))
    for stream in streams:
        stream.truncated = _enter(model, stream.batch).truncated


def _refit_output(block: Block, streams: Sequence[_Stream], start: Products) -> Products:
    """Return `start` with the last factor of W_O and its bias refitted; the original streams have passed the block."""
    o, truncated = block.layer.projections["o"].module, block.parameters(start)
    *first, old = start.factors["o"]
    wrote: dict[int, Tensor] = {}
    read: dict[int, Tensor] = {}
    n = 0
    xx = xy = sx = sy = torch.zeros((), dtype=torch.float64)
    for stream in streams:
        with output_of(o, wrote, 0):
            stream.original = block.run(stream.original, stream.calls[block.k])
        with input_of(o, read, 0), torch.no_grad():
            block.run(stream.truncated, stream.calls[block.k], truncated)
        z = reduce(torch.matmul, first, read[0][stream.batch.valid]).double()  # t [w], [w] r
        target = wrote[0][stream.batch.valid].double()
        n += len(z)
        xx, xy, sx, sy = xx + z.T @ z, xy + z.T @ target, sx + z.sum(0), sy + target.sum(0)
    has_bias = start.output_bias is not None
    mx, my = (sx / n, sy / n) if has_bias else (torch.zeros_like(sx), torch.zeros_like(sy))
    xx, xy = xx / n - torch.outer(mx, mx), xy / n - torch.outer(mx, my)
    new = old.double()
    if bool((torch.diag(xx) > 0).any()):  # W_V may be truncated to nothing
        damped = xx + torch.diag(_RIDGE * torch.diag(xx).clamp(min=1e-12 * float(torch.diag(xx).max())))
        new = new + torch.linalg.solve(damped, xy - xx @ new)
    bias = (my - mx @ new).float() if has_bias else None
    return replace(start, factors={**start.factors, "o": (*first, new.float())}, output_bias=bias)


def _descend(
    block: Block, streams: Sequence[_Stream], start: Products, n_steps: int, generator: torch.Generator
) -> Products:
    """Return the factors after `n_steps` of Adam, each number measured in the root mean square of its factor."""
    scales = start.each(lambda one: one.square().mean().sqrt() if one.numel() else one)
    moves = start.each(lambda one: torch.zeros_like(one, requires_grad=True))
    optimiser = torch.optim.Adam(moves.parts, lr=_RATE, betas=(0.9, 0.99))
    rate = torch.optim.lr_scheduler.LambdaLR(
        optimiser, lambda step: min(1.0, (step + 1) / _WARM_UP) * 0.5 * (1 + math.cos(math.pi * step / max(1, n_steps)))
    )

    def moved() -> Products:
        return start.each(lambda one, scale, move: one + scale * move, scales, moves)

    order: list[int] = []
    for _ in range(n_steps):
        order = order or torch.randperm(len(streams), generator=generator).tolist()
        stream = streams[order.pop()]
        wrote = block.run(stream.truncated, stream.calls[block.k], block.parameters(moved()))
        loss = (wrote - stream.original)[stream.batch.valid].square().mean()
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        rate.step()
    return moved().each(Tensor.detach)


def _error(block: Block, telling: Sequence[tuple[Batch, Tensor]], products: Products) -> float:
    """Return how far the whole model with these factors is from what it once wrote: 1 - cosine, or a divergence."""
    block.install(block.parameters(products))
    total = 0.0
    for batch, before in telling:
        after = _output(block.model, batch)
        if block.model.predicts:
            total += float((before.exp() * (before - after)).sum())
        else:
            total += float((1 - (before * after).sum(-1)).sum())
    return total


def _output(model: RunningModel, batch: Batch) -> Tensor:
    """Return the embeddings of a batch, or the logarithms of the probabilities of its tokens."""
    with torch.no_grad():
        out = model(batch)
    return out[batch.valid].log_softmax(-1) if model.predicts else out
