"""What paths are worth to a loss: its change when they are taken out, patterns fixed."""

from __future__ import annotations

import numbers
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tnlib import ArgumentTypeError
from tnlib._typing import Array
from tnlib.linalg.threads import single_threaded_blas
from tnlib_adapters.attention.frozen.residual_product import Head
from tnlib_adapters.attention.frozen.stack import FrozenStack
from tnlib_adapters.circuits.paths.path_orders import (
    Layer,
    forward_by_order,
    heads_of,
    longest_order,
    padded,
    path_arguments,
)


@dataclass(frozen=True, eq=False)
class PathLosses:
    """How a loss changes when paths are taken out; made by `path_losses`.

    Parameters
    ----------
    loss
        With all paths.
    without_order
        (orders,): the loss less that, if all paths of so many heads are missing; the last entry those of more than
        `max_order`.
    up_to_order
        (orders,): the loss itself if only paths of at most so many heads are there; the last entry is `loss`.
    without_head
        (heads,): the loss less that with all heads, if all paths through a head are missing. Its biases stay.
    heads
        Which head is which, (layer, head).
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
    """Return what a loss loses without the paths of one order, and without those through one head.

    Patterns stay as they are, so a path counts for what it carries and not for what it lets later heads attend to.

    Parameters
    ----------
    stack
        Layers with fixed patterns.
    x
        (n, d_model), the stream in front of the first layer.
    loss
        Of the stream behind the last layer, (n, d_model), to a number.
    max_order
        Longer paths are taken together. None: up to the count of layers.

    Examples
    --------
    >>> import numpy as np, tnlib_adapters
    >>> from tnlib_adapters.reference.layers import log_softmax
    >>> from tnlib_adapters.reference.model import run
    >>> model = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path())
    >>> tokens = np.tile(np.random.default_rng(0).permutation(128)[:30], 2)
    >>> seen, out, bias = run(model, tokens), model.read("unembed.weight"), model.read("unembed.bias")
    >>> stack = tnlib_adapters.freeze(model, [patterns[0] for patterns in seen.patterns])
    >>> def of_the_repeat(stream):
    ...     log_p = log_softmax(stream[30:-1] @ out.T + bias)
    ...     return -float(log_p[np.arange(29), tokens[31:]].mean())
    >>> found = path_losses(stack, seen.residuals[0][0], of_the_repeat)
    >>> found.up_to_order.round(2)        # no attention, one head, two heads in a row; chance is ln 128 = 4.85
    array([4.94, 0.12, 0.11, 0.11])
    """
    layers, x = path_arguments("path_losses", stack, x)
    m = longest_order("path_losses", max_order, len(layers))
    streams = list(forward_by_order(layers, x, m))
    by_order = padded(streams[-1][None], m)[0]  # order n d
    total = by_order.sum(axis=0)
    whole = _number(loss, total)
    without_head = [
        _number(loss, total - missing) - whole
        for number, layer in enumerate(layers)
        for missing in _through(layers, number, layer.read(streams[number].sum(axis=0)))
    ]
    return PathLosses(
        loss=whole,
        without_order=np.array([_number(loss, total - part) - whole for part in by_order]),
        up_to_order=np.array([_number(loss, part) for part in np.cumsum(by_order, axis=0)]),
        without_head=np.array(without_head),
        heads=heads_of(layers),
    )


def _number(loss: Callable[[Array], float], stream: Array) -> float:
    value = loss(stream) if callable(loss) else loss
    if not callable(loss) or not isinstance(value, numbers.Real):
        told = f"one that returns {type(value).__name__}" if callable(loss) else type(loss).__name__
        raise ArgumentTypeError(
            f"path_losses: loss must be a function of a stream (n, d_model) that returns a number, got {told}; "
            "pass for example the mean cross-entropy of its logits."
        )
    return float(value)


def _through(layers: list[Layer], number: int, read: list[Array]) -> Array:
    """Return what every head of a layer adds to the last stream, by itself and through later layers, (h, n, d)."""
    layer = layers[number]
    s = np.stack([one @ layer.out[own] for one, own in zip(read, layer.own, strict=True)])  # h n [r] d
    for later in layers[number + 1 :]:
        s = s + later.write(later.read(s))
    return s
