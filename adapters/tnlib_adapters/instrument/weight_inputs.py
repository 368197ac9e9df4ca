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
from tnlib_adapters.instrument.block_passes import Call, Frame, run_block
from tnlib_adapters.instrument.running_model import (
    Batch,
    Projection,
    RunningModel,
    draw_probe,
    find_matrix,
    input_of,
    output_of,
)
from tnlib_adapters.instrument.stored_weights import OUTSIDE


@dataclass(frozen=True)
class Place:
    """A weight of a running model, in one of its uses."""

    module: nn.Module  # computes with it
    reads: str  # key of its input
    projection: Projection | None = None  # its projection, if it is in the attention
    scale: float = 1.0  # factor of what is looked up in a table
    predicts: bool = False  # True for an unembedding
    group: int = OUTSIDE  # index of its block, or `OUTSIDE`

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
            reads = f"{k}.{'y' if name == 'o' else 'x'}"
            places[f"{k}.{name}"] = Place(projection.module, reads, projection, group=k)
    wiring = model.wiring
    blocks = {
        matrix.name: k
        for k, wired in enumerate(wiring.layers)
        for matrix in (*wired.latent_matrices, *wired.feed_forward_matrices)
    }
    for name in modules:
        module, group = find_matrix(model, name), blocks.get(name, OUTSIDE)
        if not wiring.is_embedding(name):
            places[name] = Place(module, name, predicts=wiring.is_unembedding(name), group=group)
            continue
        # only a module of another class scales what it looks up; other versions of transformers do so elsewhere
        places[name] = Place(module, name, scale=1.0 if type(module) is nn.Embedding else wiring.embedding.scale)
        if wiring.tied_key is not None:
            places[wiring.tied_key] = Place(model.model.get_output_embeddings(), wiring.tied_key, predicts=True)
    return places


Observed = tuple[dict[str, Tensor], dict[str, Tensor], Tensor]  # inputs, gradients at outputs, gradient at the stream


def of_group(places: Places, group: int) -> dict[str, Place]:
    """Return the places in one block, or outside the blocks."""
    return {key: place for key, place in places.items() if place.group == group}


def observe_block(
    model: RunningModel, k: int, x: Tensor, call: Call, batch: Batch, places: Places, gradient: Tensor
) -> Observed:
    """Run the k-th block on the stream x; return inputs, gradients at outputs, and the gradient at x.

    `places` are those in this block, `gradient` that of the probe at its output, (texts, tokens, d_model) as x.
    """
    wrote: dict[str, Tensor] = {}
    with _keeping_reads(places) as reads, _keeping_writes(places, wrote), torch.enable_grad():
        leaf = x.detach().to(model.dtype).requires_grad_()
        out = run_block(model, k, leaf, call)
        slopes, at_stream = _slopes(out, gradient, places, wrote, leaf, batch)
    return _reads(reads, places, batch), slopes, at_stream


def observe_output(frame: Frame, x: Tensor, batch: Batch, places: Places, generator: torch.Generator) -> Observed:
    """Draw a probe of the output for the output x of the last block; return as `observe_block`, of unembeddings."""
    heads = {key: place for key, place in places.items() if place.predicts}
    wrote: dict[str, Tensor] = {}
    with _keeping_reads(heads) as reads, _keeping_writes(heads, wrote), torch.enable_grad():
        leaf = x.detach().requires_grad_()
        out = frame.leave(leaf, batch)
        slope = draw_probe(frame.model, out, batch, generator)
        slopes, at_stream = _slopes(out, slope, heads, wrote, leaf, batch)
    return _reads(reads, heads, batch), slopes, at_stream


def observe_input(
    frame: Frame, batch: Batch, places: Places, gradient: Tensor
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return inputs of tables, and gradients at their outputs, for the gradient at the input of the first block."""
    tables = {key: place for key, place in places.items() if place.is_table}
    if not tables:
        return {}, {}
    wrote: dict[str, Tensor] = {}
    with _keeping_reads(tables) as reads, ExitStack() as hooks, torch.enable_grad():
        for place in tables.values():
            hooks.enter_context(_leaf_at(place.module))
        hooks.enter_context(_keeping_writes(tables, wrote))
        x, _ = frame.enter(batch)
        slopes, _ = _slopes(x, gradient, tables, wrote, None, batch)
    return _reads(reads, tables, batch), slopes


def _slopes(
    out: Tensor, gradient: Tensor, places: Places, wrote: Mapping[str, Tensor], leaf: Tensor | None, batch: Batch
) -> tuple[dict[str, Tensor], Tensor]:
    """Return the gradients at what places wrote, and at the leaf."""
    tensors = {id(t): t for t in (*wrote.values(), *([] if leaf is None else [leaf]))}
    grads = dict(zip(tensors, torch.autograd.grad(out, [*tensors.values()], gradient.to(out)), strict=True))
    slopes = {}
    for key, place in places.items():
        grad = grads[id(wrote[key])]
        grad = grad if place.projection is None else place.projection.written(grad)
        slopes[key] = _valid(grad if place.scale == 1 else place.scale * grad, batch)
    return slopes, gradient if leaf is None else grads[id(leaf)]


@contextmanager
def _keeping_writes(places: Places, wrote: dict[str, Tensor]) -> Iterator[None]:
    """Store the outputs of the modules of places by key whenever they run inside the block."""
    with ExitStack() as hooks:
        for key, place in places.items():
            hooks.enter_context(output_of(place.module, wrote, key))
        yield


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
    """Return (texts, tokens, width) in float32, 0 at padding; some models flatten texts and tokens in between."""
    x = x.detach().float().reshape(*batch.ids.shape, x.shape[-1])
    return x * batch.mask[..., None] if batch.is_padded else x


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
