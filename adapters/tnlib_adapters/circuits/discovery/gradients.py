"""Gradients of circuits in double precision, by the automatic differentiation of torch.

The forward passes of `reference` and of `AttentionWeights` accept tensors of torch as the stream: what torch
differentiates is the numpy forward pass itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tnlib._typing import Array
from tnlib._validate import import_optional


def differentiated(function: Callable[[Array], Array], x: Array) -> tuple[Array, Callable[[Array], Array]]:
    """Return function(x), and its vector-Jacobian product: from the gradient of a loss by function(x) to that by x.

    Raises
    ------
    ModuleNotFoundError
        If torch is not installed.

    Examples
    --------
    >>> import numpy as np
    >>> value, pull_back = differentiated(lambda x: x**2, np.array([1.0, 3.0]))  # doctest: +SKIP
    >>> value, pull_back(np.ones(2))  # doctest: +SKIP
    (array([1., 9.]), array([2., 6.]))
    """
    torch = import_optional("gradients of circuits", "torch", "torch")
    at = torch.tensor(x, requires_grad=True)
    value: Any = function(at)

    def pull_back(grad: Array) -> Array:
        (found,) = torch.autograd.grad(value, at, torch.tensor(grad))
        gradient: Array = found.numpy()
        return gradient

    return value.detach().numpy(), pull_back
