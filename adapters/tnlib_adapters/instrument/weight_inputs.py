"""Inputs of the weights of a running model, and gradients of random probes at their outputs, by hooks on modules.

Inputs and weights have the keys of `ModelWeight`. A table of embeddings that also makes the predictions has two uses:
its own key, and `tied_key`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from tnlib_adapters.factors import UNEMBEDDING
from tnlib_adapters.factors.model_weights import OUTSIDE, ModelWeight
from tnlib_adapters.instrument.block_passes import Call, OuterLayers, run_block
from tnlib_adapters.instrument.running_model import Batch, Projection, RunningModel, find_matrix

_SUMS = 2**23  # cumulative sums of probabilities in memory at once


@dataclass(frozen=True)
class WeightUse:
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


WeightUses = Mapping[str, WeightUse]


def find_uses(model: RunningModel, weights: Iterable[ModelWeight]) -> WeightUses:
    """Return the uses of weights by key."""
    uses = dict[str, WeightUse]()
    for own in weights:
        projection = model.layers[own.group].projections[own.of] if own.of else None
        module = find_matrix(model, own.module) if projection is None else projection.module
        # only a module of another class scales what it looks up; other versions of transformers do so elsewhere
        scale = model.wiring.embedding.scale if own.is_table and type(module) is not nn.Embedding else 1.0
        uses[own.key] = WeightUse(module, own.reads, projection, scale, own.role == UNEMBEDDING, own.group)
        if own.tied_key is not None:
            uses[own.tied_key] = WeightUse(model.model.get_output_embeddings(), own.tied_key, predicts=True)
    return uses


Observed = tuple[dict[str, Tensor], dict[str, Tensor], Tensor]  # inputs, gradients at outputs, gradient at the stream


def of_group(uses: WeightUses, group: int) -> dict[str, WeightUse]:
    """Return the uses in one block, or outside the blocks."""
    return {key: use for key, use in uses.items() if use.group == group}


def observe_block(
    model: RunningModel, k: int, x: Tensor, call: Call, batch: Batch, uses: WeightUses, gradient: Tensor
) -> Observed:
    """Run the k-th block on the stream x; return inputs, gradients at outputs, and the gradient at x.

    `uses` are those in this block, `gradient` that of the probe at its output, (texts, tokens, d_model) as x.
    """
    leaf = x.detach().to(model.dtype).requires_grad_()
    return _observe(lambda: run_block(model, k, leaf, call), lambda _: gradient, leaf, uses, batch)


def observe_output(
    outer: OuterLayers, x: Tensor, batch: Batch, uses: WeightUses, generator: torch.Generator
) -> Observed:
    """Draw a probe of the output for the output x of the last block; return as `observe_block`, of unembeddings."""
    heads = {key: use for key, use in uses.items() if use.predicts}
    leaf = x.detach().requires_grad_()
    return _observe(
        lambda: outer.leave(leaf, batch), lambda out: draw_probe(outer.model, out, batch, generator), leaf, heads, batch
    )


def observe_input(outer: OuterLayers, batch: Batch, uses: WeightUses, gradient: Tensor) -> Observed:
    """Return as `observe_block`, of tables, for the gradient at the input of the first block."""
    tables = {key: use for key, use in uses.items() if use.is_table}
    if not tables:
        return {}, {}, gradient
    with ExitStack() as hooks:
        for use in tables.values():
            hooks.enter_context(_leaf_at(use.module))
        return _observe(lambda: outer.enter(batch)[0], lambda _: gradient, None, tables, batch)


def _observe(
    run: Callable[[], Tensor],
    gradient_of: Callable[[Tensor], Tensor],
    leaf: Tensor | None,
    uses: WeightUses,
    batch: Batch,
) -> Observed:
    """Run a part of a model; return inputs, gradients at outputs and at the leaf for the gradient of the result."""
    wrote, read = dict[str, Tensor](), dict[str, Tensor]()
    with ExitStack() as hooks, torch.enable_grad():
        for key, use in uses.items():
            hooks.enter_context(output_of(use.module, wrote, key))
        for key, module in {use.reads: use.module for use in uses.values()}.items():
            hooks.enter_context(input_of(module, read, key))
        out = run()
        gradient = gradient_of(out)
        tensors = {id(t): t for t in (*wrote.values(), *([] if leaf is None else [leaf]))}
        grads = dict(zip(tensors, torch.autograd.grad(out, [*tensors.values()], gradient.to(out)), strict=True))
    slopes = {}
    for key, use in uses.items():
        grad = grads[id(wrote[key])]
        grad = grad if use.projection is None else use.projection.written(grad)
        slopes[key] = _valid(grad if use.scale == 1 else use.scale * grad, batch)
    return _reads(read, uses, batch), slopes, gradient if leaf is None else grads[id(leaf)]


def _reads(reads: Mapping[str, Tensor], uses: WeightUses, batch: Batch) -> dict[str, Tensor]:
    inputs = {}
    for use in uses.values():
        x = reads[use.reads]
        if use.is_table:
            inputs[use.reads] = x.masked_fill(~batch.valid, -1)
        elif use.reads not in inputs:
            with_bias = use.projection is not None and use.projection.name != "o"
            inputs[use.reads] = _valid(nn.functional.pad(x, (0, 1), value=1.0) if with_bias else x, batch)
    return inputs


def _valid(x: Tensor, batch: Batch) -> Tensor:
    """Return (texts, tokens, width) in float32, 0 at padding; some models flatten texts and tokens in between."""
    x = x.detach().float().reshape(*batch.ids.shape, x.shape[-1])
    return x * batch.mask[..., None] if batch.is_padded else x


def _leaf_at(module: nn.Module) -> RemovableHandle:
    """Detach the output of a module and make it require gradients, so that no parameter has to."""

    def hook(_: nn.Module, __: Any, out: Tensor) -> Tensor:
        return out.detach().requires_grad_()

    return module.register_forward_hook(hook)


def draw_probe(model: RunningModel, out: Tensor, batch: Batch, generator: torch.Generator) -> Tensor:
    """Return the gradient of a random probe with respect to the output.

    The probe of an embedding e is v . e with v normal; that of predictions is the log-probability of tokens sampled
    from the predictions. The mean square of its change is, to lowest order, the squared change of the embedding, or
    twice the Kullback-Leibler divergence of the predictions.
    """
    if not model.predicts:
        return torch.randn(out.shape, generator=generator).to(out)
    p = out.detach().softmax(-1)
    drawn = draw_tokens(p, generator)
    # d log p[drawn] / d logits = 1[drawn] - p
    slope = p.neg_().scatter_add_(-1, drawn, torch.ones_like(drawn, dtype=p.dtype))
    return slope.mul_(batch.mask[..., None])


def draw_tokens(p: Tensor, generator: torch.Generator) -> Tensor:
    """Sample one index (..., 1) per row of probabilities (..., vocabulary), by inverting the cumulative sums.

    `torch.multinomial` draws one random number per entry, which takes longer than the forward pass of a small model.
    """
    rows = p.reshape(-1, p.shape[-1])
    at = torch.rand((len(rows), 1), generator=generator).to(p)
    few = max(1, _SUMS // p.shape[-1])
    drawn = []
    for k in range(0, len(rows), few):
        sums = rows[k : k + few].cumsum(-1)
        reached = torch.searchsorted(sums, at[k : k + few] * sums[:, -1:], right=True)
        drawn.append(reached.clamp_(max=p.shape[-1] - 1))
    return torch.cat(drawn).reshape(*p.shape[:-1], 1)


def output_of(module: nn.Module, into: dict[str, Tensor], key: str) -> RemovableHandle:
    """Store the output of a module in into[key] whenever it runs inside the block that the hook is entered for."""

    def hook(_: nn.Module, __: Any, out: Tensor) -> None:
        into[key] = out

    return module.register_forward_hook(hook)


def input_of(module: nn.Module, into: dict[str, Tensor], key: str) -> RemovableHandle:
    """Store the input of a module in into[key] whenever it runs inside the block that the hook is entered for."""

    def hook(_: nn.Module, args: tuple[Any, ...]) -> None:
        into[key] = args[0]

    return module.register_forward_pre_hook(hook)
