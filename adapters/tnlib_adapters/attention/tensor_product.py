"""Matrix product of torch tensors by the BLAS of numpy, with its gradient.

torch multiplies by MKL, which on AMD processors takes three to five times as long as OpenBLAS for products of doubles
as small as those of attention heads. Tensors on the host and arrays share memory, so the product needs no copies.
"""

from __future__ import annotations

from typing import Any

import torch

from tnlib._typing import Array


def as_tensor(a: Array) -> torch.Tensor:
    """Return an array as a tensor, without a copy where it is writeable: torch warns of read-only memory."""
    return torch.asarray(a if a.flags.writeable else a.copy())


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Return a b."""
        ctx.save_for_backward(a, b)
        return torch.from_numpy(a.numpy() @ b.numpy())

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return grad b^T and a^T grad, each None where it is not needed."""
        a, b = ctx.saved_tensors
        of_a = of_b = None
        if ctx.needs_input_grad[0]:
            of_a = torch.from_numpy(grads[0].numpy() @ b.numpy().swapaxes(-1, -2)).sum_to_size(a.shape)
        if ctx.needs_input_grad[1]:
            of_b = torch.from_numpy(a.numpy().swapaxes(-1, -2) @ grads[0].numpy()).sum_to_size(b.shape)
        return of_a, of_b


def tensor_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return a (..., m, k) times b (..., k, n) of tensors on the host; leading legs of size 1 are broadcast."""
    product: torch.Tensor = _Product.apply(a, b)  # type: ignore[no-untyped-call]
    return product
