"""Path ablation: change of a loss when paths are removed, with frozen patterns."""

from __future__ import annotations

import numbers
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tnlib import ArgumentTypeError
from tnlib._typing import Array
from tnlib.linalg.threads import single_threaded_blas
from tnlib_adapters.circuits.paths.contributions import (
    ConcatenatedHeads,
    forward_by_order,
    heads_of,
    longest_order,
    padded,
    path_arguments,
)
from tnlib_adapters.frozen.frozen_stack import FrozenStack, Head


@dataclass(frozen=True, eq=False)
class PathLosses:
    """Changes of a loss under path ablation, returned by `path_losses`.

    Parameters
    ----------
    loss
        Loss with all paths.
    without_order
        (orders,): the loss without all paths of an order, minus `loss`; the last entry is for orders above `max_order`.
    up_to_order
        (orders,): the loss with only the paths up to an order; the last entry is `loss`.
    without_head
        (heads,): the loss without all paths through a head, minus `loss`. The biases of the head stay.
    heads
        The heads as (layer, head), in the order of the axis of heads.

    References
    ----------
    N. Elhage et al., "A Mathematical Framework for Transformer Circuits" (2021).

    Examples
    --------
    >>> import tnlib_adapters
    >>> from tnlib_adapters.reference.model import run
    >>> model = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path())
    >>> forward, out = run(model, [5, 6, 7, 8, 5, 6]), model.read("unembed.weight")[7]
    >>> stack = tnlib_adapters.freeze(model, [patterns[0] for patterns in forward.patterns])
    >>> embedding = forward.residuals[0][0]
    >>> found = path_losses(stack, embedding, lambda stream: -float(stream[-1] @ out))
    >>> found.without_order[:3].round(1), found.heads[found.without_head.argmax()]
    (array([-0.3,  3.4, -1.4]), (1, 0))
    """

    loss: float
    without_order: Array
    up_to_order: Array
    without_head: Array
    heads: tuple[Head, ...]


@single_threaded_blas
def path_losses(
    stack: FrozenStack, x: Array, loss: Callable[[Array], float], *, max_order: int | None = None
) -> PathLosses:
    """Return the change of a loss without the paths of each order, and without the paths through each head.

    Patterns are frozen: a path counts for its output only, not for its effect on later patterns.

    Parameters
    ----------
    stack
        Layers with frozen patterns.
    x
        (n, d_model), the input stream of the first layer.
    loss
        Function of the output stream of the last layer, (n, d_model), that returns a number.
    max_order
        Longer paths are removed together. None: the number of layers.

    References
    ----------
    N. Elhage et al., "A Mathematical Framework for Transformer Circuits" (2021).

    Examples
    --------
    >>> import numpy as np, tnlib_adapters
    >>> from tnlib_adapters.attention.softmax import log_softmax
    >>> from tnlib_adapters.reference.model import run
    >>> model = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path())
    >>> tokens = np.tile(np.random.default_rng(0).permutation(128)[:30], 2)
    >>> forward = run(model, tokens)
    >>> out, bias = model.read("unembed.weight"), model.read("unembed.bias")
    >>> stack = tnlib_adapters.freeze(model, [patterns[0] for patterns in forward.patterns])
    >>> def of_the_repeat(stream):
    ...     log_p = log_softmax(stream[30:-1] @ out.T + bias)
    ...     return -float(log_p[np.arange(29), tokens[31:]].mean())
    >>> found = path_losses(stack, forward.residuals[0][0], of_the_repeat)
    >>> found.up_to_order.round(2)  # no head, one, two in a row; chance is ln 128 = 4.85
    array([4.94, 0.12, 0.11, 0.11])
    """
    layers, x = path_arguments("path_losses", stack, x)
    m = longest_order("path_losses", max_order, len(layers))
    streams = list(forward_by_order(layers, x, m))
    by_order = padded(streams[-1], m, axis=0)  # order n d
    total = by_order.sum(axis=0)
    full_loss = _number(loss, total)
    without_head = [
        _number(loss, total - missing) - full_loss
        for number, layer in enumerate(layers)
        for missing in _through(layers, number, layer.read(streams[number].sum(axis=0)))
    ]
    return PathLosses(
        loss=full_loss,
        without_order=np.array([_number(loss, total - part) - full_loss for part in by_order]),
        up_to_order=np.array([_number(loss, part) for part in np.cumsum(by_order, axis=0)]),
        without_head=np.array(without_head),
        heads=heads_of(layers),
    )


def _number(loss: Callable[[Array], float], stream: Array) -> float:
    value = loss(stream) if callable(loss) else loss
    if not callable(loss) or not isinstance(value, numbers.Real):
        description = f"one that returns {type(value).__name__}" if callable(loss) else type(loss).__name__
        raise ArgumentTypeError(
            f"path_losses: loss must be a function of a stream (n, d_model) that returns a number, got {description}; "
            "pass for example the mean cross-entropy of its logits."
        )
    return float(value)


def _through(layers: list[ConcatenatedHeads], number: int, values: list[Array]) -> Array:
    """Return the addition of every head of a layer to the last stream, directly and through later layers, (h, n, d)."""
    layer = layers[number]
    s = np.stack([v @ layer.out[columns] for v, columns in zip(values, layer.head_columns, strict=True)])  # h n [r] d
    for later in layers[number + 1 :]:
        s = s + later.write(later.read(s))
    return s
