r"""Truncated layers fitted to the layers they replace, one after the other, first to last.

A layer sees what the truncated layers before it write, x', and is to write what the original layer wrote of the
original stream x. First W_O and its bias alone, all heads at once, by least squares in closed form:

    min  sum_t | y'_t W + b - o_t |^2 + ridge . |diag(E[y' y']) (W - W_O)|^2

(y' what the truncated heads mix, o what the original attention wrote), then all four projections by descent on the
squared difference at the output of the whole block. No gradient leaves the block. Columns of a head beyond its rank are
zero and stay so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from tnlib_adapters.checkpoints.projections import Projections, put_together, take_apart
from tnlib_adapters.torch.hooks.running import Batch, Layer, RunningModel, input_of, output_of

_RIDGE = 0.03
_RATE = 0.03  # of a projection's root mean square, per step
_WARM_UP = 10
_TOLD_BY = 4


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
    start: Callable[[int], Projections],
    free: Callable[[int], Projections],
    *,
    n_steps: int,
    seed: int = 0,
    progress: Callable[[str, int, int], None],
) -> Iterator[Projections]:
    """Yield the fitted projections of every layer; the model itself is truncated as this goes on.

    Parameters
    ----------
    model
        With its original weights.
    batches
        Of calibration text.
    start
        Layer -> its truncated projections.
    free
        Layer -> arrays of the same shapes, 1 where a number may move, 0 where it stays.
    n_steps
        Of descent in every layer, one batch each.
    seed
        Of the order of the batches.
    progress
        Called with (stage, done, total).
    """
    streams = [_enter(model, batch) for batch in batches]
    generator = torch.Generator().manual_seed(seed)
    for k, layer in enumerate(model.layers):
        progress("fitting layers", k, len(model.layers))
        tensors = _tensors(model, layer, k, start(k))
        scale = _steps(model, layer, k, start(k), free(k))
        targets, refitted = _refit_output(model, layer, k, streams, tensors)
        descended = _descend(layer, k, streams, targets, refitted, scale, n_steps, generator)
        # near an exact fit both steps add noise: what worsens is not kept; a part of the text tells
        best = min((tensors, refitted, descended), key=lambda tried: _loss(layer, k, streams, targets, tried))
        _install(layer.block, best)
        for stream, target in zip(streams, targets, strict=True):
            stream.original = target
            stream.truncated = _run(layer, k, stream, stream.truncated)
        yield _projections(model, layer, k)
    progress("fitting layers", len(model.layers), len(model.layers))


def install(model: RunningModel, k: int, projections: Projections) -> None:
    """Put projections into the k-th layer of a running model."""
    layer = model.layers[k]
    _install(layer.block, _tensors(model, layer, k, projections))


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


def _run(layer: Layer, k: int, stream: _Stream, x: Tensor, tensors: Mapping[str, Tensor] | None = None) -> Tensor:
    args, kwargs = stream.calls[k]
    with torch.set_grad_enabled(tensors is not None and any(t.requires_grad for t in tensors.values())):
        out = functional_call(layer.block, dict(tensors or {}), (x, *args), kwargs)
    return cast(Tensor, out[0] if isinstance(out, tuple) else out)


def _refit_output(
    model: RunningModel, layer: Layer, k: int, streams: Sequence[_Stream], tensors: dict[str, Tensor]
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Return what the original block writes, and `tensors` with W_O and its bias refitted."""
    o = layer.projections["o"].module
    wrote: dict[int, Tensor] = {}
    read: dict[int, Tensor] = {}
    targets, n = [], 0
    xx = xy = sx = sy = torch.zeros((), dtype=torch.float64)
    for stream in streams:
        with output_of(o, wrote, 0):
            targets.append(_run(layer, k, stream, stream.original))
        with input_of(o, read, 0), torch.no_grad():
            _run(layer, k, stream, stream.truncated, tensors)
        y, target = (t[0][stream.batch.valid].double() for t in (read, wrote))
        n += len(y)
        xx, xy, sx, sy = xx + y.T @ y, xy + y.T @ target, sx + y.sum(0), sy + target.sum(0)
    name = _name(layer.block, o)
    bias = tensors.get(f"{name}.bias")
    old = _on_rows(model, tensors[f"{name}.weight"]).double()
    mx, my = (sx / n, sy / n) if bias is not None else (torch.zeros_like(sx), torch.zeros_like(sy))
    xx, xy = xx / n - torch.outer(mx, mx), xy / n - torch.outer(mx, my)
    diagonal = torch.diag(xx)
    used = diagonal > 1e-12 * diagonal.max()  # columns beyond a head's rank are zero
    some = xx[used][:, used] + torch.diag(_RIDGE * diagonal[used])
    weight = old.clone()
    weight[used] += torch.linalg.solve(some, (xy - xx @ old)[used])
    tensors = dict(tensors)
    tensors[f"{name}.weight"] = _on_rows(model, weight.float())
    if bias is not None:
        tensors[f"{name}.bias"] = (my - mx @ weight).float()
    return targets, tensors


def _descend(
    layer: Layer,
    k: int,
    streams: Sequence[_Stream],
    targets: Sequence[Tensor],
    start: Mapping[str, Tensor],
    scale: Mapping[str, Tensor],
    n_steps: int,
    generator: torch.Generator,
) -> dict[str, Tensor]:
    """Return the tensors after `n_steps` of Adam, each number measured in its own scale."""
    moves = {name: torch.zeros_like(value, requires_grad=True) for name, value in start.items()}
    optimiser = torch.optim.Adam(moves.values(), lr=_RATE, betas=(0.9, 0.99))
    rate = torch.optim.lr_scheduler.LambdaLR(
        optimiser, lambda step: min(1.0, (step + 1) / _WARM_UP) * 0.5 * (1 + math.cos(math.pi * step / max(1, n_steps)))
    )
    order: list[int] = []
    for _ in range(n_steps):
        order = order or torch.randperm(len(streams), generator=generator).tolist()
        one = order.pop()
        stream, target = streams[one], targets[one]
        tensors = {name: start[name] + scale[name] * move for name, move in moves.items()}
        wrote = _run(layer, k, stream, stream.truncated, tensors)
        loss = (wrote - target)[stream.batch.valid].square().mean()
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        rate.step()
    return {name: start[name] + scale[name] * move.detach() for name, move in moves.items()}


def _loss(
    layer: Layer, k: int, streams: Sequence[_Stream], targets: Sequence[Tensor], tensors: Mapping[str, Tensor]
) -> float:
    """Return the squared difference at the output of the block, over one batch in `_TOLD_BY`."""
    total = 0.0
    for stream, target in zip(streams[::_TOLD_BY], targets[::_TOLD_BY], strict=True):
        with torch.no_grad():
            wrote = _run(layer, k, stream, stream.truncated, tensors)
        total += float((wrote - target)[stream.batch.valid].square().sum())
    return total


def _tensors(model: RunningModel, layer: Layer, k: int, projections: Projections) -> dict[str, Tensor]:
    """Return the parameters of a block's attention that hold these projections, named below the block."""
    stored = put_together(model.row, model.sizes, "", k, projections)
    base = model.row.attention.format(layer=k)
    tensors = {}
    for part, held in model.row.projections.items():
        module = layer.projections[held[0]].module
        for kind in ("weight", "bias"):
            values = stored.get(f"{base}.{part}.{kind}")
            if values is not None:
                tensors[f"{_name(layer.block, module)}.{kind}"] = torch.from_numpy(np.array(values, np.float32))
    return tensors


def _steps(model: RunningModel, layer: Layer, k: int, projections: Projections, free: Projections) -> dict[str, Tensor]:
    """Return how far each number moves in a unit step: the root mean square of its projection, 0 where it stays."""

    def steps(values: Any, mask: Any) -> Any:
        return mask * np.sqrt(np.sum(np.square(values * mask)) / max(1.0, np.sum(mask)))

    weights = {name: steps(values, free.weights[name]) for name, values in projections.weights.items()}
    biases = {name: steps(values, free.biases[name]) for name, values in projections.biases.items()}
    return _tensors(model, layer, k, Projections(weights, biases))


def _projections(model: RunningModel, layer: Layer, k: int) -> Projections:
    base = model.row.attention.format(layer=k)
    modules = {f"{base}.{part}": layer.projections[held[0]].module for part, held in model.row.projections.items()}

    def get(name: str) -> Any:
        module, _, kind = name.rpartition(".")
        value = getattr(modules[module], kind, None)
        return None if value is None else value.detach().numpy().astype(np.float64)

    return take_apart(model.row, model.sizes, "", k, get)


def _install(block: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, value in tensors.items():
            block.get_parameter(name).copy_(value)


def _name(block: nn.Module, module: nn.Module) -> str:
    return str(next(name for name, one in block.named_modules() if one is module))


def _on_rows(model: RunningModel, weight: Tensor) -> Tensor:
    """Return a weight as x @ weight wants it, or back."""
    return weight.T if model.row.stored == "out_in" else weight
