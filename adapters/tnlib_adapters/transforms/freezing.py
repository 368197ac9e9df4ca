"""Attention-only models with frozen patterns."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tnlib import ArgumentError
from tnlib._typing import Array
from tnlib._validate import as_array, is_list
from tnlib_adapters.attention.frozen.stack import FrozenPaths, FrozenStack
from tnlib_adapters.checkpoints.checkpoint import Checkpoint, as_checkpoint

__all__ = ["FrozenPaths", "FrozenStack", "freeze"]


def freeze(checkpoint: Checkpoint, patterns: Sequence[Array]) -> FrozenStack:
    """Return an attention-only model, from its embeddings to its final stream, with all patterns frozen.

    Parameters
    ----------
    checkpoint
        Checkpoint of an architecture without norms and feed-forward layers.
    patterns
        Per layer (heads, n, n): attention weights, rows summing to one.

    Raises
    ------
    ArgumentError
        If the model has norms or feed-forward layers, which are not linear, or patterns do not fit it.

    Examples
    --------
    >>> import numpy as np, tnlib_adapters
    >>> from tnlib_adapters.reference.model import run
    >>> model = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path())
    >>> forward = run(model, [5, 6, 7, 5, 6])
    >>> stack = freeze(model, [of_layer[0] for of_layer in forward.patterns])
    >>> bool(np.allclose(stack.apply(forward.residuals[0][0]), forward.residuals[-1][0]))
    True
    """
    wiring = as_checkpoint("freeze", checkpoint).wiring
    if not wiring.is_attention_only:
        raise ArgumentError(
            f"freeze: checkpoint must be an attention-only model without norms, got a {wiring.model_type}, whose "
            "norms and feed-forward layers are not linear; freeze one layer with "
            "checkpoint.attention(layer).frozen(...)."
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
