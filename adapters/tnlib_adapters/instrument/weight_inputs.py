"""What the weights of a running model read, and gradients of random probes at what they write.

A weight goes by a key: a projection by its layer and name, "3.q", a module outside the attention by its own name. What
it reads has a key as well, because queries, keys and values read the same: "3.x", that of "3.o" is "3.y".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tnlib_adapters.factors.projections import NAMES
from tnlib_adapters.instrument.running_model import (
    Batch,
    Projection,
    RunningModel,
    draw_probe,
    find_module,
    input_of,
    output_of,
    start_of_gradients,
)


@dataclass(frozen=True)
class Place:
    """Where a weight stands in a running model, and the key of what it reads."""

    module: nn.Module
    reads: str
    projection: Projection | None = None

    @property
    def is_table(self) -> bool:
        """Whether it looks tokens up."""
        return isinstance(self.module, nn.Embedding)


Places = Mapping[str, Place]


def find_places(model: RunningModel, modules: Sequence[str] = (), *, attention: bool = True) -> Places:
    """Return by key the projections of every layer, if `attention` is asked for, and these modules."""
    found = {}
    for k, layer in enumerate(model.layers if attention else ()):
        for name in NAMES:
            one = layer.projections[name]
            found[f"{k}.{name}"] = Place(one.module, f"{k}.{'y' if name == 'o' else 'x'}", one)
    return found | {name: Place(find_module(model.model, name), name) for name in modules}


def read(model: RunningModel, batch: Batch, places: Places) -> dict[str, Tensor]:
    """Run one batch and return by key what its weights read, (texts, tokens, width): 0 beyond the end of a text.

    What queries, keys and values read has a last entry 1, which multiplies a bias. Tables read ids (texts, tokens), -1
    beyond the end.
    """
    with _keeping_reads(places) as reads, torch.no_grad():
        model(batch)
    return _reads(reads, places, batch)


def observe(
    model: RunningModel, batch: Batch, places: Places, generator: torch.Generator
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Run one batch; return the same, and for every weight the gradient of a random probe at what it writes.

    A probe of an embedding e is v . e with v normal; of predictions, the log-probability of tokens that are drawn from
    the predictions themselves. The mean square of its change is, to lowest order, the squared change of the embedding,
    or twice the divergence of the predictions.
    """
    wrote: dict[str, Tensor] = {}
    with _keeping_reads(places) as reads, ExitStack() as hooks:
        tables = [one.module for one in places.values() if one.is_table]
        hooks.enter_context(_leaf_at(*tables) if tables else start_of_gradients(model.layers[0].block))
        for key, place in places.items():
            hooks.enter_context(output_of(place.module, wrote, key))
        with torch.enable_grad():
            out = model(batch)
            tensors = {id(t): t for t in wrote.values()}  # some write for several
            slope = draw_probe(model, out, batch, generator)
            grads = dict(zip(tensors, torch.autograd.grad(out, list(tensors.values()), slope), strict=True))
    slopes = {}
    for key, place in places.items():
        grad = grads[id(wrote[key])]
        slopes[key] = _valid(grad if place.projection is None else place.projection.written(grad), batch)
    return _reads(reads, places, batch), slopes


@contextmanager
def _keeping_reads(places: Places) -> Iterator[dict[str, Tensor]]:
    """Keep what the weights read, whenever the model runs inside the block, by key."""
    reads: dict[str, Tensor] = {}
    with ExitStack() as hooks:
        for key, module in {place.reads: place.module for place in places.values()}.items():
            hooks.enter_context(input_of(module, reads, key))
        yield reads


def _reads(reads: Mapping[str, Tensor], places: Places, batch: Batch) -> dict[str, Tensor]:
    found = {}
    for place in places.values():
        x = reads[place.reads]
        if place.is_table:
            found[place.reads] = x.masked_fill(~batch.valid, -1)
        elif place.reads not in found:
            with_bias = place.projection is not None and place.projection.name != "o"
            found[place.reads] = _valid(nn.functional.pad(x, (0, 1), value=1.0) if with_bias else x, batch)
    return found


def _valid(x: Tensor, batch: Batch) -> Tensor:
    """Return (texts, tokens, width), 0 beyond the end of a text; some models lay all tokens in one row in between."""
    x = x.detach().reshape(*batch.ids.shape, x.shape[-1])
    return x if bool(batch.mask.all()) else x * batch.mask[..., None]


@contextmanager
def _leaf_at(module: nn.Module) -> Iterator[None]:
    """Let what a module writes be a leaf, so that gradients need no parameter."""

    def hook(_: nn.Module, __: Any, out: Tensor) -> Tensor:
        return out.detach().requires_grad_()

    handle = module.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()
