"""Inputs of the weights of a running model, and gradients of random probes at their outputs.

The key of a weight is its layer and name for a projection, "3.q", and the module name outside the attention. Inputs
have keys as well, because queries, keys and values share theirs: "3.x"; the input of "3.o" is "3.y". A table of
embeddings that also makes the predictions has two places, one for each use: its module name, and `Wiring.tied_key`.
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
    find_matrix,
    input_of,
    output_of,
    start_of_gradients,
)


@dataclass(frozen=True)
class Place:
    """A weight of a running model, in one of its uses.

    Parameters
    ----------
    module
        Module that computes with it.
    reads
        Key of its input.
    projection
        Its projection, if it is in the attention.
    scale
        Factor of what is looked up in a table.
    predicts
        True for an unembedding.
    """

    module: nn.Module
    reads: str
    projection: Projection | None = None
    scale: float = 1.0
    predicts: bool = False

    @property
    def is_table(self) -> bool:
        """True for a table of embeddings."""
        return isinstance(self.module, nn.Embedding)


Places = Mapping[str, Place]


def find_places(model: RunningModel, modules: Sequence[str] = (), *, attention: bool = True) -> Places:
    """Return places by key: the projections of every layer if `attention`, and these modules."""
    places = {}
    for k, layer in enumerate(model.layers if attention else ()):
        for name in NAMES:
            projection = layer.projections[name]
            places[f"{k}.{name}"] = Place(projection.module, f"{k}.{'y' if name == 'o' else 'x'}", projection)
    wiring = model.wiring
    for name in modules:
        module = find_matrix(model, name)
        if not wiring.is_embedding(name):
            places[name] = Place(module, name, predicts=wiring.is_unembedding(name))
            continue
        # only a module of another class scales what it looks up; other versions of transformers do so elsewhere
        places[name] = Place(module, name, scale=1.0 if type(module) is nn.Embedding else wiring.embedding.scale)
        if wiring.tied_key is not None:
            places[wiring.tied_key] = Place(model.model.get_output_embeddings(), wiring.tied_key, predicts=True)
    return places


def read(model: RunningModel, batch: Batch, places: Places) -> dict[str, Tensor]:
    """Run one batch and return the inputs of the weights by key, (texts, tokens, width), 0 at padding.

    Inputs of queries, keys and values have a last entry 1, which multiplies the bias. Inputs of tables are token ids
    (texts, tokens), -1 at padding.
    """
    with _keeping_reads(places) as reads, torch.no_grad():
        model(batch)
    return _reads(reads, places, batch)


def observe(
    model: RunningModel, batch: Batch, places: Places, generator: torch.Generator
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Run one batch; return the inputs of `read`, and the gradient of a random probe at the output of every weight.

    That of a table is with respect to its rows, before they are scaled.
    The probe of an embedding e is v . e with v normal; that of predictions is the log-probability of tokens sampled
    from the predictions. The mean square of its change is, to lowest order, the squared change of the embedding, or
    twice the Kullback-Leibler divergence of the predictions.
    """
    wrote: dict[str, Tensor] = {}
    with _keeping_reads(places) as reads, ExitStack() as hooks:
        tables = [place.module for place in places.values() if place.is_table]
        hooks.enter_context(_leaf_at(*tables) if tables else start_of_gradients(model.layers[0].block))
        for key, place in places.items():
            hooks.enter_context(output_of(place.module, wrote, key))
        with torch.enable_grad():
            out = model(batch)
            tensors = {id(t): t for t in wrote.values()}  # a fused module writes several projections
            slope = draw_probe(model, out, batch, generator)
            grads = dict(zip(tensors, torch.autograd.grad(out, list(tensors.values()), slope), strict=True))
    slopes = {}
    for key, place in places.items():
        grad = grads[id(wrote[key])]
        grad = grad if place.projection is None else place.projection.written(grad)
        slopes[key] = _valid(grad if place.scale == 1 else place.scale * grad, batch)
    return _reads(reads, places, batch), slopes


@contextmanager
def _keeping_reads(places: Places) -> Iterator[dict[str, Tensor]]:
    """Store the inputs of the weights by key whenever the model runs inside the block."""
    reads: dict[str, Tensor] = {}
    with ExitStack() as hooks:
        for key, module in {place.reads: place.module for place in places.values()}.items():
            hooks.enter_context(input_of(module, reads, key))
        yield reads


def _reads(reads: Mapping[str, Tensor], places: Places, batch: Batch) -> dict[str, Tensor]:
    inputs = {}
    for place in places.values():
        x = reads[place.reads]
        if place.is_table:
            inputs[place.reads] = x.masked_fill(~batch.valid, -1)
        elif place.reads not in inputs:
            with_bias = place.projection is not None and place.projection.name != "o"
            inputs[place.reads] = _valid(nn.functional.pad(x, (0, 1), value=1.0) if with_bias else x, batch)
    return inputs


def _valid(x: Tensor, batch: Batch) -> Tensor:
    """Return (texts, tokens, width), 0 at padding; some models flatten texts and tokens in between."""
    x = x.detach().reshape(*batch.ids.shape, x.shape[-1])
    return x if bool(batch.mask.all()) else x * batch.mask[..., None]


@contextmanager
def _leaf_at(module: nn.Module) -> Iterator[None]:
    """Detach the output of a module and make it require gradients, so that no parameter has to."""

    def hook(_: nn.Module, __: Any, out: Tensor) -> Tensor:
        return out.detach().requires_grad_()

    handle = module.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()
