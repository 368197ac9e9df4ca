"""What the projections of every layer read while a model runs, and gradients of random probes at what they write."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from tnlib_adapters.checkpoints.projections import NAMES
from tnlib_adapters.torch.hooks.running import (
    Batch,
    RunningModel,
    draw_probe,
    input_of,
    output_of,
    start_of_gradients,
)


@dataclass(frozen=True)
class Reads:
    """One layer on one batch, entries beyond the end of a text 0.

    Parameters
    ----------
    x
        [x, 1] with x what queries, keys and values are made of, (texts, tokens, d_model + 1).
    y
        What the output projection reads, (texts, tokens, heads * d_head).
    """

    x: Tensor
    y: Tensor

    def by(self, name: str) -> Tensor:
        """Return what the rows of a projection multiply."""
        return self.y if name == "o" else self.x


@dataclass(frozen=True)
class Seen(Reads):
    """The same, and for "q", "k", "v" and "o" the gradient of a probe at what each writes, (texts, tokens, width)."""

    slopes: dict[str, Tensor]


def read(model: RunningModel, batch: Batch) -> list[Reads]:
    """Run one batch and return what every layer's attention reads."""
    with _keeping_reads(model) as (xs, ys), torch.no_grad():
        model(batch)
    return [Reads(_with_one(xs[k], batch), _valid(ys[k], batch)) for k in range(len(model.layers))]


def observe(model: RunningModel, batch: Batch, generator: torch.Generator) -> list[Seen]:
    """Run one batch and return what every layer's attention reads, with gradients of a random probe.

    A probe of an embedding e is v . e with v normal; of predictions, the log-probability of tokens that are drawn from
    the predictions themselves. The mean square of its change is, to lowest order, the squared change of the embedding,
    or twice the divergence of the predictions.
    """
    wrote: dict[str, dict[int, Tensor]] = {name: {} for name in NAMES}
    with _keeping_reads(model) as (xs, ys), ExitStack() as hooks:
        hooks.enter_context(start_of_gradients(model.layers[0].block))
        for k, layer in enumerate(model.layers):
            for name in NAMES:
                hooks.enter_context(output_of(layer.projections[name].module, wrote[name], k))
        with torch.enable_grad():
            out = model(batch)
            tensors = {id(t): t for by_layer in wrote.values() for t in by_layer.values()}  # some write for several
            slope = draw_probe(model, out, batch, generator)
            grads = dict(zip(tensors, torch.autograd.grad(out, list(tensors.values()), slope), strict=True))
    seen = []
    for k, layer in enumerate(model.layers):
        slopes = {name: _valid(layer.projections[name].written(grads[id(wrote[name][k])]), batch) for name in NAMES}
        seen.append(Seen(_with_one(xs[k], batch), _valid(ys[k], batch), slopes))
    return seen


@contextmanager
def _keeping_reads(model: RunningModel) -> Iterator[tuple[dict[int, Tensor], dict[int, Tensor]]]:
    """Keep what the projections of every layer read, whenever the model runs inside the block: x and y by layer."""
    xs: dict[int, Tensor] = {}
    ys: dict[int, Tensor] = {}
    with ExitStack() as hooks:
        for k, layer in enumerate(model.layers):
            hooks.enter_context(input_of(layer.projections["q"].module, xs, k))
            hooks.enter_context(input_of(layer.projections["o"].module, ys, k))
        yield xs, ys


def _with_one(x: Tensor, batch: Batch) -> Tensor:
    return _valid(torch.nn.functional.pad(x, (0, 1), value=1.0), batch)


def _valid(x: Tensor, batch: Batch) -> Tensor:
    return x.detach() if bool(batch.mask.all()) else x.detach() * batch.mask[..., None]
