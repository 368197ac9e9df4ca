"""Gradient descent on the factors of a block in which several processes compute the gradient of every step.

Each process has all factors, and moves them in the same way: by the sum of the gradients of the parts of a batch.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tnlib._typing import Array
from tnlib_adapters.factors.projections import Products
from tnlib_adapters.instrument.block import Block, as_array
from tnlib_adapters.instrument.block_passes import Call
from tnlib_adapters.instrument.layer_fit import RATE, MovingProducts, has_fused_adam, make_optimiser
from tnlib_adapters.instrument.running_model import Batch

_PARTS = 4  # of a batch, the same for any number of processes


class PartialDescent:
    """Adam on the factors of a block, as `layer_fit.adam`, with gradients that are given.

    Parameters
    ----------
    block
        The block.
    start
        Its factors.
    n_steps
        Steps.

    Attributes
    ----------
    n_done
        Steps that are done.
    """

    def __init__(self, block: Block, start: Products, n_steps: int) -> None:
        self._block, self._moving = block, MovingProducts(start)
        self._numbers = [a.numel() for a in start.parts]
        # one vector, and one kernel: every process does all of a step, which takes long with many of either
        self._moves = torch.zeros(sum(self._numbers), device=block.model.device, requires_grad=True)
        self._optimiser, self._schedule = make_optimiser(
            [self._moves], RATE, n_steps, fused=has_fused_adam(block.model.device)
        )
        self.n_done = 0

    def gradient(self, x: Tensor, call: Call, target: Tensor, valid: Tensor, n_tokens: int) -> Array:
        """Return the gradient, flat, of the squared difference to `target` summed over valid tokens.

        It is divided by `n_tokens`, those of the whole batch, and by the width.
        """
        wrote = self._block.run(x, call, self._block.weights(self._moved(), factored=True))
        loss = (wrote.float() - target)[valid].square().sum() / (n_tokens * x.shape[-1])
        return as_array(torch.autograd.grad(loss, self._moves)[0])

    def step(self, gradient: Array) -> None:
        """Do one step by the gradient of a batch."""
        self._moves.grad = self._tensor(gradient)
        self._optimiser.step()
        self._schedule.step()
        self.n_done += 1

    def products(self) -> Products:
        """Return the factors."""
        with torch.no_grad():
            return self._moved()

    def state(self) -> Array:
        """Return moves and means of gradients and of their squares, (3, numbers)."""
        own = self._optimiser.state[self._moves]
        return np.stack([as_array(part.detach()) for part in (self._moves, own["exp_avg"], own["exp_avg_sq"])])

    def restore(self, state: Array, n_done: int) -> None:
        """Go on from the state after so many steps, at least one."""
        moves, mean, square = map(self._tensor, state)
        with torch.no_grad():
            self._moves.copy_(moves)
        step = moves.new_tensor(n_done)
        self._optimiser.state[self._moves] = {"step": step, "exp_avg": mean, "exp_avg_sq": square}
        self._schedule.last_epoch = self.n_done = n_done
        for group, rate, factor in zip(
            self._optimiser.param_groups, self._schedule.base_lrs, self._schedule.lr_lambdas, strict=True
        ):
            group["lr"] = rate * factor(n_done)

    def _moved(self) -> Products:
        return self._moving.after(torch.split(self._moves, self._numbers))

    def _tensor(self, array: Array) -> Tensor:
        return torch.from_numpy(array).to(self._moves.device)


def parts_of_batch(batch: Batch) -> list[range]:
    """Return the texts of every part of a batch: at most four parts."""
    n_texts = len(batch.ids)
    n_parts = min(_PARTS, n_texts)
    return [range(p * n_texts // n_parts, (p + 1) * n_texts // n_parts) for p in range(n_parts)]
