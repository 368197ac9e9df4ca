r"""Next-token loss of a frozen model without the paths above an order, or without those of one order.

The stream is propagated apart by the number k of counted layers that its paths have passed. With K_l the linear parts
of the layers, c_l their biases and remainders, and N the linear part of the norm behind a block with bias b,

    x_k -> N (x_k + sum_(l not counted) K_l x_k + sum_(l counted) K_l x_(k-1)),   and x_0 has N sum_l c_l + b added.

A path from a bias or a remainder has as many counted layers as come after it. The norm at the end keeps its divisors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, get_args

import numpy as np

from tnlib import ArgumentError, ArgumentTypeError
from tnlib._html import heat_image
from tnlib._typing import Array
from tnlib._validate import check_choice
from tnlib_adapters.circuits.paths.path_orders import LAYERS, Counted, order_within
from tnlib_adapters.frozen.frozen_heads import FrozenHeads
from tnlib_adapters.frozen.frozen_model import FrozenBlock, FrozenModel
from tnlib_adapters.result_table import Columns, Table


@dataclass(frozen=True, eq=False, repr=False)
class OrderLosses(Table):
    """Mean next-token loss in nats by the number of layers on a path, returned by `order_losses`.

    Parameters
    ----------
    up_to
        (L + 1,): with the paths through at most 0, 1, ..., L counted layers; the last is the loss of the model.
    without
        (L + 1,): without the paths of one order.
    counted
        "heads" or "all".

    References
    ----------
    N. Elhage et al., "A Mathematical Framework for Transformer Circuits" (2021), path expansion.

    Examples
    --------
    Paths through at most two of the four attention layers have the loss of all paths within 0.1 nats:

    >>> import tnlib_adapters
    >>> llama = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path("llama"))
    >>> found = order_losses(tnlib_adapters.freeze(llama, [5, 6, 7, 8]))
    >>> found.order_within(0.1), f"{found.loss:.2f}"
    (2, '5.45')
    """

    up_to: Array
    without: Array
    counted: Counted

    @property
    def loss(self) -> float:
        """The loss of the model, with all paths."""
        return float(self.up_to[-1])

    def order_within(self, atol: float) -> int:
        """Return the smallest order from which on `up_to` stays within `atol` nats of the loss."""
        return order_within(self.up_to, atol)

    @property
    def _title(self) -> str:
        return f"OrderLosses, {self.loss:.3f} nats, by the number of {LAYERS[self.counted]} on a path"

    def _columns(self, rows: Any) -> Columns:
        return {"order": np.arange(len(self.up_to))[rows], "up_to": self.up_to[rows], "without": self.without[rows]}

    def _printed(self) -> slice:
        return slice(0, min(len(self.up_to), self.order_within(1e-3) + 1))

    def _notes(self) -> list[str]:
        return [f"within 0.1 nats from order {self.order_within(0.1)} on"]

    def _picture(self) -> str:
        label = "losses with paths up to an order, above, and without those of an order, below"
        return heat_image(np.stack([self.up_to, self.without]), label, width=320)


def order_losses(model: FrozenModel, counted: Counted = "heads") -> OrderLosses:
    """Return the next-token losses of a model on its text with the paths up to every order, and without one order.

    Patterns, divisors of norms and slopes of feed-forward layers stay those of the text.

    Parameters
    ----------
    model
        A model on one sequence, returned by `freeze(model, tokens)`.
    counted
        "heads": attention layers count, and feed-forward layers are part of what lies between them. "all": both count.

    Raises
    ------
    ArgumentError
        If the model has no unembedding, or its sequence is an image or a single token.

    References
    ----------
    N. Elhage et al., "A Mathematical Framework for Transformer Circuits" (2021), path expansion.

    Examples
    --------
    >>> import numpy as np, tnlib_adapters
    >>> from tnlib_adapters.reference.model import loss
    >>> llama = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path("llama"))
    >>> found = order_losses(tnlib_adapters.freeze(llama, [5, 6, 7, 8]))
    >>> whole = loss(llama, [5, 6, 7, 8], [False, True, True, True])
    >>> len(found.up_to), bool(np.isclose(found.loss, whole))
    (5, True)
    """
    check_choice("order_losses", "counted", counted, get_args(Counted))
    if not isinstance(model, FrozenModel):
        raise ArgumentTypeError(
            f"order_losses: model must be a FrozenModel, got {type(model).__name__}; pass freeze(model, tokens)."
        )
    if model.unembed is None or model.tokens.ndim != 1 or len(model.tokens) < 2:
        raise ArgumentError(
            f"order_losses: model must be a language model on at least two tokens, got {model!r}; "
            "freeze a longer text, or a model with an unembedding."
        )
    streams = streams_by_order(model, counted)  # order n d
    total = streams.sum(axis=0)
    return OrderLosses(
        up_to=np.array([_next_token_loss(model, part) for part in np.cumsum(streams, axis=0)]),
        without=np.array([_next_token_loss(model, total - part) for part in streams]),
        counted=counted,
    )


def streams_by_order(model: FrozenModel, counted: Counted) -> Array:
    """Return the final stream apart by order, (L + 1, n, d)."""
    streams = model.embedding[None]
    for block in model.blocks:
        streams = _behind_block(block, streams, counted)
    return streams


def _behind_block(block: FrozenBlock, streams: Array, counted: Counted) -> Array:
    passed, counted_once, constant = streams.copy(), np.zeros_like(streams), np.zeros_like(streams[0])
    for branch in block.branches:
        target = counted_once if counted == "all" or isinstance(branch, FrozenHeads) else passed
        target += branch.linear(streams)
        constant += branch.constant if branch.remainder is None else branch.constant + branch.remainder
    if counted_once.any():
        passed, counted_once = (np.concatenate([a, np.zeros_like(a[:1])]) for a in (passed, counted_once))
        passed[1:] += counted_once[:-1]
    passed[0] += constant
    if block.after is None:
        return passed
    out = block.after.linear(passed)
    out[0] += 0.0 if block.after.bias is None else block.after.bias
    return out


def _next_token_loss(model: FrozenModel, stream: Array) -> float:
    """Return the mean loss of the final stream (n, d), the norm at the end frozen."""
    hidden = (stream if model.final_norm is None else model.final_norm.apply(stream))[:-1]
    unembed: Any = model.unembed
    return float(unembed.cross_entropies(hidden, model.tokens[1:]).mean(dtype=np.float64))
