"""Seconds of the parts of a model on one batch, with random weights: no weight is read."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from tnlib_adapters.instrument.block_passes import Frame, run_block
from tnlib_adapters.instrument.running_model import Batch, RunningModel
from tnlib_adapters.instrument.weight_inputs import Places, observe_block, of_group

_PRODUCTS = 2e11  # multiplications of the timed forward pass, at most: some seconds of a core
_ROWS = 4096  # of the unembedding that is timed; the seconds of all rows are a multiple
_NUMBERS = 2**22  # of the arrays on which an elementwise operation is timed
_SCALE = 0.02  # standard deviation of the random weights


@dataclass(frozen=True)
class BlockTimes:
    """Seconds of a block, and of the unembedding.

    Parameters
    ----------
    forward
        Seconds per token of a forward pass of the block.
    observed
        Seconds per token of a forward pass and a backward pass to the outputs of all places.
    head
        Seconds per token of the unembedding and its softmax; 0 without predictions.
    elementwise
        Seconds per number of an elementwise operation.
    """

    forward: float
    observed: float
    head: float
    elementwise: float


def time_block(model: RunningModel, places: Places, k: int, batch: Batch) -> BlockTimes:
    """Return the seconds of the k-th block of a model without weights, which are made up for it.

    Parameters
    ----------
    model
        A model of `open_without_weights`; its parameters are replaced.
    places
        The weights that are compressed.
    k
        Index of the block.
    batch
        Batch of a text; of a large model only some texts of it are run.
    """
    _make_up_weights(model, (0, k))
    n_weights = sum(parameter.numel() for parameter in model.layers[k].block.parameters())
    n_texts = max(1, min(len(batch.ids), int(_PRODUCTS / n_weights / batch.ids.shape[1])))
    batch = Batch(batch.ids[:n_texts], batch.mask[:n_texts])
    with torch.no_grad():
        x, calls = Frame(model).enter(batch)
    x, gradient = torch.randn_like(x), torch.randn_like(x)
    own = of_group(places, k)

    def forward() -> None:
        with torch.no_grad():
            run_block(model, k, x, calls[k])

    def observe() -> None:
        observe_block(model, k, x, calls[k], batch, own, gradient)

    n_tokens = batch.ids.numel()
    forward()  # libraries prepare themselves at the first call
    return BlockTimes(
        min(_seconds(forward), _seconds(forward)) / n_tokens,
        min(_seconds(observe), _seconds(observe)) / n_tokens,
        _time_head(model, x[0]),
        _time_elementwise(),
    )


def _make_up_weights(model: RunningModel, blocks: tuple[int, ...]) -> None:
    """Make random weights for some blocks; weights outside the blocks are zeros that take no memory."""
    inside = {id(p) for layer in model.layers for p in layer.block.parameters()}
    of_blocks = {id(p) for k in blocks for p in model.layers[k].block.parameters()}
    for module in model.model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) in of_blocks:
                values = _SCALE * torch.randn(parameter.shape)
            elif id(parameter) not in inside:
                values = torch.zeros(()).expand(parameter.shape)
            else:
                continue
            setattr(module, name, nn.Parameter(values, requires_grad=False))


def _time_head(model: RunningModel, x: torch.Tensor) -> float:
    if not model.predicts:
        return 0.0
    vocab, width = map(int, model.model.get_output_embeddings().weight.shape)
    rows = min(vocab, _ROWS)
    stream, table = torch.randn(len(x), width), _SCALE * torch.randn(rows, width)

    def head() -> None:
        (stream @ table.T).log_softmax(-1)

    head()
    return _seconds(head) / len(x) * vocab / rows


def _time_elementwise() -> float:
    a, b = torch.ones(_NUMBERS), torch.ones(_NUMBERS)

    def multiply() -> None:
        torch.mul(a, b)

    multiply()
    return min(_seconds(multiply) for _ in range(3)) / _NUMBERS


def _seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started
