"""What the projections of every layer read while a model runs, and gradients of random probes at what they write."""

from __future__ import annotations

from contextlib import ExitStack
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
class Seen:
    """One layer on one batch, entries beyond the end of a text 0.

    Parameters
    ----------
    x
        [x, 1] with x what queries, keys and values are made of, (texts, tokens, d_model + 1).
    y
        What the output projection reads, (texts, tokens, heads * d_head).
    slopes
        For "q", "k", "v" and "o" the gradient of a probe at what the projection writes, (texts, tokens, width).
    """

    x: Tensor
    y: Tensor
    slopes: dict[str, Tensor]

    def read_by(self, name: str) -> Tensor:
        """Return what the rows of a projection multiply."""
        return self.y if name == "o" else self.x


def observe(model: RunningModel, batch: Batch, generator: torch.Generator) -> list[Seen]:
    """Run one batch and return what every layer's attention reads, with gradients of a random probe.

    A probe of an embedding e is v . e with v normal; of predictions, the log-probability of tokens that are drawn from
    the predictions themselves. The mean square of its change is, to lowest order, the squared change of the embedding,
    or twice the divergence of the predictions.
    """
    reads: dict[str, dict[int, Tensor]] = {"x": {}, "y": {}}
    wrote: dict[str, dict[int, Tensor]] = {name: {} for name in NAMES}
    with ExitStack() as hooks:
        hooks.enter_context(start_of_gradients(model.layers[0].block))
        for k, layer in enumerate(model.layers):
            of = {name: one.module for name, one in layer.projections.items()}
            hooks.enter_context(input_of(of["q"], reads["x"], k))
            hooks.enter_context(input_of(of["o"], reads["y"], k))
            for name in NAMES:
                hooks.enter_context(output_of(of[name], wrote[name], k))
        with torch.enable_grad():
            out = model(batch)
            tensors = {id(t): t for by_layer in wrote.values() for t in by_layer.values()}  # some write for several
            slope = draw_probe(model, out, batch, generator)
            grads = dict(zip(tensors, torch.autograd.grad(out, list(tensors.values()), slope), strict=True))
    padded = not bool(batch.mask.all())

    def valid(x: Tensor) -> Tensor:
        return x * batch.mask[..., None] if padded else x

    seen = []
    for k, layer in enumerate(model.layers):
        slopes = {name: layer.projections[name].own(grads[id(wrote[name][k])]) for name in NAMES}
        x, y = torch.nn.functional.pad(reads["x"][k].detach(), (0, 1), value=1.0), reads["y"][k].detach()
        seen.append(Seen(valid(x), valid(y), {name: valid(one) for name, one in slopes.items()}))
    return seen
