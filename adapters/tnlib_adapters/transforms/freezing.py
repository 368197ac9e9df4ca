"""Models with frozen attention: of any architecture on one sequence, or attention-only with given patterns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args, overload

import numpy as np
from numpy.typing import ArrayLike

from tnlib import ArgumentError, ArgumentTypeError
from tnlib._typing import Array
from tnlib._validate import as_array, check_choice, is_list
from tnlib_adapters.attention.frozen.stack import FrozenPaths, FrozenStack
from tnlib_adapters.checkpoints.checkpoint import Checkpoint, accepts_models, as_checkpoint
from tnlib_adapters.reference.weights import Weights, as_weights
from tnlib_adapters.transforms.frozen_feed_forward import LocalMap
from tnlib_adapters.transforms.frozen_model import FrozenModel, freeze_weights

__all__ = ["FrozenModel", "FrozenPaths", "FrozenStack", "freeze"]


@overload
def freeze(checkpoint: Checkpoint, tokens: Sequence[Array], *, feed_forward: LocalMap = "secant") -> FrozenStack: ...
@overload
def freeze(
    checkpoint: Checkpoint | Weights, tokens: ArrayLike, *, feed_forward: LocalMap = "secant"
) -> FrozenModel: ...
@overload
def freeze(checkpoint: Checkpoint, *, patterns: Sequence[Array]) -> FrozenStack: ...
@accepts_models
def freeze(
    checkpoint: Checkpoint | Weights, tokens: Any = None, *, patterns: Any = None, feed_forward: LocalMap = "secant"
) -> FrozenStack | FrozenModel:
    """Return a model on one sequence as an affine map of its residual stream: all patterns and norm divisors frozen.

    Parameters
    ----------
    checkpoint
        A checkpoint or transformers model of any architecture with one residual stream, or loaded `Weights`.
    tokens
        (n,), integers: the sequence, without padding, because every token is attended to. A single image (channels,
        height, width) for a model of images.
    patterns
        In place of `tokens`, or in their position, for an attention-only model without norms: per layer (heads, n, n),
        attention weights, rows summing to one.
    feed_forward
        Linear map of a feed-forward layer at each position. "secant": activations a(u) = (a(u) / u) u with a(u) / u
        frozen, or the open gates frozen, which leaves no remainder. "jacobian": the derivative, which leaves one.

    Returns
    -------
    FrozenModel
        For `patterns` a `FrozenStack`.

    Raises
    ------
    ArgumentError
        If the tokens are not one sequence that fits the model, or patterns do not fit it or are given for a model with
        norms or feed-forward layers.

    Examples
    --------
    >>> import numpy as np, tnlib_adapters
    >>> from tnlib_adapters.reference.model import run
    >>> llama = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path("llama"))
    >>> frozen = freeze(llama, [5, 6, 7, 5, 6])
    >>> bool(np.allclose(frozen.apply(frozen.embedding), run(llama, [5, 6, 7, 5, 6]).residuals[-1][0]))
    True

    With patterns:

    >>> model = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path())
    >>> forward = run(model, [5, 6, 7, 5, 6])
    >>> stack = freeze(model, [of_layer[0] for of_layer in forward.patterns])
    >>> bool(np.allclose(stack.apply(forward.residuals[0][0]), forward.residuals[-1][0]))
    True
    """
    check_choice("freeze", "feed_forward", feed_forward, get_args(LocalMap))
    if (tokens is None) == (patterns is None):
        count = "neither" if tokens is None else "both"
        raise ArgumentTypeError(f"freeze: tokens or patterns must be given, got {count}; pass one sequence of tokens.")
    if patterns is None and not _are_patterns(tokens):
        return freeze_weights("freeze", as_weights("freeze", checkpoint, "checkpoint"), tokens, feed_forward)
    return _freeze_patterns(checkpoint, tokens if patterns is None else patterns)


def _are_patterns(value: Any) -> bool:
    """Test if the second argument is a list of arrays with legs, not token numbers or an image."""
    return isinstance(value, list | tuple) and any(np.ndim(entry) > 1 for entry in value)


def _freeze_patterns(checkpoint: Any, patterns: Any) -> FrozenStack:
    wiring = as_checkpoint("freeze", checkpoint).wiring
    if not wiring.is_attention_only:
        raise ArgumentError(
            f"freeze: checkpoint must be an attention-only model without norms for patterns, got a "
            f"{wiring.model_type}, whose norms and feed-forward layers are not linear; pass tokens, or freeze one "
            "layer with checkpoint.attention(layer).frozen(...)."
        )
    if not is_list(patterns) or len(patterns) != checkpoint.n_layers:
        received = len(patterns) if is_list(patterns) else type(patterns).__name__
        raise ArgumentError(
            f"freeze: patterns must be one array per layer, {checkpoint.n_layers}, got {received}; "
            "pass the patterns of one sequence."
        )
    checked = [as_array("freeze", f"patterns of layer {layer}", a) for layer, a in enumerate(patterns)]
    for layer, a in enumerate(checked):
        _check_pattern(layer, a, (checkpoint.sizes.n_heads, *checked[0].shape[-1:] * 2))
    return FrozenStack([checkpoint.attention(layer).frozen(a) for layer, a in enumerate(checked)])


def _check_pattern(layer: int, a: Array, shape: tuple[int, ...]) -> None:
    if a.shape != shape:
        raise ArgumentError(
            f"freeze: patterns of layer {layer} must have shape (heads, n, n) = {shape}, got {a.shape}; "
            "pass those of one sequence, the same in all layers."
        )
    sums = a.sum(axis=2)
    off = np.abs(sums - 1)
    if off.max() > 1e-3:  # accuracy of half precision
        head, i = np.unravel_index(off.argmax(), off.shape)
        raise ArgumentError(
            f"freeze: patterns of layer {layer} must have rows that sum to one, got {sums[head, i]:.4g} in row {i} of "
            f"head {head}; pass what softmax returned, or build layers of any weights with Attention.frozen."
        )
