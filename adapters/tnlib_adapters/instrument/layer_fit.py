r"""Block-wise reconstruction: truncated layers fitted to the layers they replace, first to last.

A layer reads x', the stream written by the truncated layers before it, and is fitted to the output of the original
layer on the original stream x. First the last factor R of W_O = L R and its bias, by least squares in closed form:

    min  sum_t | z_t R + b - o_t |^2 + ridge . |diag(E[z z]) (R - R_0)|^2,        z = y' L

with y' the mixed values of the truncated heads, o the output of the original attention, and L the identity if W_O is
not factored. Then all factors of the block, those of a truncated feed-forward layer included, by gradient descent on
the squared difference at the output of the block. No gradient leaves the block. The factors of a layer, as truncated,
refitted, descended or halfway, are chosen on held-out batches by the output of the whole model, later layers unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from tnlib._typing import Array
from tnlib_adapters.factors.projections import Products, Projections, join_modules
from tnlib_adapters.instrument.running_model import Batch, Layer, RunningModel, find_module, input_of, output_of

_RIDGE = 0.03
_RATE = 0.03  # learning rate, relative to the root mean square of a factor
_WARM_UP = 10
_HELD_OUT = 6  # batches on which the factors of a layer are chosen


@dataclass(frozen=True)
class Block:
    """The k-th block of the model; runs alone, with its own or other parameters."""

    model: RunningModel
    k: int

    @property
    def layer(self) -> Layer:
        """The block and its projections."""
        return self.model.layers[self.k]

    def parameters(self, products: Products) -> dict[str, Tensor]:
        """Return the parameters of the block for products of tensors, by name below the block."""
        return self.of_weights(products.expand(self.model.sizes), products.modules())

    def of_weights(self, attention: Projections, modules: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the parameters of the block for all four projections or none, and other weights (in, out)."""
        parameters_by_name = self.of_attention(attention) if attention.weights else {}
        for name, weight in modules.items():
            module = find_module(self.model.model, name)
            matrix = self.model.wiring.matrices[name]
            parameters_by_name[f"{_name(self.layer.block, module)}.weight"] = matrix.on_rows(weight)
        return parameters_by_name

    def of_attention(self, projections: Projections) -> dict[str, Tensor]:
        """Return the parameters of the block for all four projections."""
        attention, layer, parameters = self.model.wiring.layers[self.k].attention, self.layer, {}
        joined = join_modules(attention, projections, lambda parts, leg: torch.cat([*parts], leg))
        for held, linear in attention.projections.items():
            name = _name(layer.block, layer.projections[held[0]].module)
            for kind in ("weight", "bias"):
                if f"{linear.module}.{kind}" in joined:
                    parameters[f"{name}.{kind}"] = joined[f"{linear.module}.{kind}"]
        return parameters

    def run(
        self, x: Tensor, call: tuple[tuple[Any, ...], dict[str, Any]], parameters: Mapping[str, Tensor] | None = None
    ) -> Tensor:
        """Return the output of the block for input x and further call arguments, optionally with other parameters."""
        args, kwargs = call
        moving = parameters is not None and any(t.requires_grad for t in parameters.values())
        with torch.set_grad_enabled(moving):
            out = functional_call(self.layer.block, dict(parameters or {}), (x, *args), kwargs)
        return cast(Tensor, out[0] if isinstance(out, tuple) else out)

    def install(self, parameters: Mapping[str, Tensor]) -> None:
        """Copy these parameters into the model."""
        with torch.no_grad():
            for name, value in parameters.items():
                self.layer.block.get_parameter(name).copy_(value)


def install(model: RunningModel, k: int, projections: Projections) -> None:
    """Put projections into the k-th layer of a running model."""
    block = Block(model, k)
    tensors: Any = [
        {name: as_tensor(a) for name, a in arrays.items()} for arrays in (projections.weights, projections.biases)
    ]
    block.install(block.of_attention(Projections(*tensors)))


def as_tensor(values: Array) -> Tensor:
    """Return a copy in the precision of a running model."""
    return torch.from_numpy(np.array(values, np.float32))


def _name(block: nn.Module, module: nn.Module) -> str:
    return str(next(name for name, candidate in block.named_modules() if candidate is module))


@dataclass
class Stream:
    """Streams of one batch before the current layer: after the original and after the truncated layers."""

    batch: Batch
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]]  # per layer, the further arguments of its block
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
    """Yield the fitted weights of every layer; each is installed in the model before the next is fitted.

    Parameters
    ----------
    model
        Model with its original weights.
    batches
        Calibration batches.
    start
        Function from a layer index to its truncated weights.
    tables
        Truncated tables of embeddings, by module: they feed the first layer.
    n_steps
        Number of gradient steps per layer, one batch each.
    seed
        Seed of the order of the batches.
    progress
        Called as progress(stage, done, total).
    """
    held_out, streams = enter(model, batches, tables)
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
        if truncated.parts:  # otherwise nothing of the block is truncated
            descended = _descend(block, streams, refitted, n_steps, generator)
            halfway = refitted.each(lambda a, b: (a + b) / 2, descended)
            candidates = (descended, halfway, refitted, truncated)
            best = min(candidates, key=lambda products: model_error(block, held_out, block.parameters(products)))
            block.install(block.parameters(best))
        for stream in streams:
            stream.truncated = block.run(stream.truncated, stream.calls[k])
        yield best.each(Tensor.numpy)
    progress("fitting layers", len(model.layers), len(model.layers))


def enter(
    model: RunningModel, batches: Sequence[Batch], tables: Mapping[str, Array] | None
) -> tuple[list[tuple[Batch, Tensor]], list[Stream]]:
    """Return held-out batches with the outputs of the model, and the streams of the other batches.

    The truncated streams start from these tables of embeddings, which are copied into the model.
    """
    count = min(_HELD_OUT, len(batches) // 2)
    held_out = [(batch, _model_output(model, batch)) for batch in batches[: max(1, count)]]
    streams = [_enter(model, batch) for batch in batches[count:]]
    if tables:
        _look_up(model, tables, streams)
    return held_out, streams


def _enter(model: RunningModel, batch: Batch) -> Stream:
    """Run a batch; return the input of the first block and the further arguments of all blocks."""
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
    return Stream(batch, calls, entering[0], entering[0])


def _look_up(model: RunningModel, tables: Mapping[str, Array], streams: Sequence[Stream]) -> None:
    """Copy these embeddings into the model and recompute the truncated streams."""
    for name, table in tables.items():
        with torch.no_grad():
            find_module(model.model, name).get_parameter("weight").copy_(as_tensor(table))
    for stream in streams:
        stream.truncated = _enter(model, stream.batch).truncated


def _refit_output(block: Block, streams: Sequence[Stream], start: Products) -> Products:
    """Return `start` with the last factor of W_O and its bias refitted; original streams advance past the block."""
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
    block: Block, streams: Sequence[Stream], start: Products, n_steps: int, generator: torch.Generator
) -> Products:
    """Return the factors after `n_steps` of Adam, in units of the root mean square of each factor."""
    scales = start.each(lambda a: a.square().mean().sqrt() if a.numel() else a)
    moves = start.each(lambda a: torch.zeros_like(a, requires_grad=True))

    def moved() -> Products:
        return start.each(lambda a, scale, move: a + scale * move, scales, moves)

    adam(block, streams, moves.parts, lambda: block.parameters(moved()), _RATE, n_steps, generator)
    return moved().each(Tensor.detach)


def adam(
    block: Block,
    streams: Sequence[Stream],
    moves: Sequence[Any],
    parameters: Callable[[], Mapping[str, Tensor]],
    rate: float,
    n_steps: int,
    generator: torch.Generator,
) -> None:
    """Minimise the squared difference at the output of a block by Adam over `moves`, one batch a step.

    The rate rises over a few steps and falls to 0 along a cosine.
    """
    optimiser = torch.optim.Adam(moves, lr=rate, betas=(0.9, 0.99))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimiser, lambda step: min(1.0, (step + 1) / _WARM_UP) * 0.5 * (1 + math.cos(math.pi * step / max(1, n_steps)))
    )
    order: list[int] = []
    for _ in range(n_steps):
        order = order or torch.randperm(len(streams), generator=generator).tolist()
        stream = streams[order.pop()]
        wrote = block.run(stream.truncated, stream.calls[block.k], parameters())
        loss = (wrote - stream.original)[stream.batch.valid].square().mean()
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        schedule.step()


def model_error(block: Block, held_out: Sequence[tuple[Batch, Tensor]], parameters: Mapping[str, Tensor]) -> float:
    """Return the error of the whole model with these parameters of a block, which are copied into the model.

    It is 1 - cosine, or the Kullback-Leibler divergence, summed.
    """
    block.install(parameters)
    total = 0.0
    for batch, before in held_out:
        after = _model_output(block.model, batch)
        if block.model.predicts:
            total += float((before.exp() * (before - after)).sum())
        else:
            total += float((1 - (before * after).sum(-1)).sum())
    return total


def _model_output(model: RunningModel, batch: Batch) -> Tensor:
    """Return the embeddings of a batch, or its log-probabilities."""
    with torch.no_grad():
        out = model(batch)
    return out[batch.valid].log_softmax(-1) if model.predicts else out
