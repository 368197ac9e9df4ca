"""The forward pass of a checkpoint in float64 numpy: a reference that every operator can be held against."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from tnlib import ArgumentError
from tnlib._typing import Array
from tnlib._validate import to_numpy
from tnlib_adapters.attention.attention import Attention
from tnlib_adapters.checkpoints.checkpoint import Checkpoint
from tnlib_adapters.reference.layers import Norm, log_softmax, softmax
from tnlib_adapters.reference.weights import Weights, as_weights


@dataclass(frozen=True, repr=False)
class Forward:
    """What a model computes on a batch of token sequences, all in float64.

    Parameters
    ----------
    patterns
        Per layer, (batch, heads, n, n): the weight that a position gives to each other, rows sum to one.
    residuals
        Per layer, (batch, n, d_model): the stream in front of its attention, before any norm; then the final one.
    inputs
        Per layer, (batch, n, d_model): what its attention reads, after the norm where one stands in front.
    outputs
        Per layer, (batch, n, d_model): what its attention writes, biases included, before any norm behind it.
    hidden
        (batch, n, d_model): the final stream after the final norm, where there is one.
    logits
        (batch, n, vocab), or None where the model ends in hidden states.
    """

    patterns: tuple[Array, ...]
    residuals: tuple[Array, ...]
    inputs: tuple[Array, ...]
    outputs: tuple[Array, ...]
    hidden: Array
    logits: Array | None

    def __repr__(self) -> str:
        ends = "" if self.logits is None else f", logits {self.logits.shape}"
        return f"Forward({len(self.patterns)} layers, hidden {self.hidden.shape}{ends})"


def run(model: Checkpoint | Weights, tokens: Array) -> Forward:
    """Run a model on token sequences; every position is attended to, so pass sequences without padding.

    Parameters
    ----------
    model
        A checkpoint, whose weights are read anew, or the `Weights` of one.
    tokens
        (n,) or (batch, n), integers. Where the architecture has segments, all tokens are of the first. Images
        (batch, channels, height, width) where it reads those.

    Returns
    -------
    Forward
        Patterns, residual stream, hidden states and logits, always with a batch leg.

    Raises
    ------
    ArgumentError
        If a token is no integer or not in the vocabulary, a sequence is longer than the positions, or the
        activation function of the model is not known.
    FileFormatError
        If a tensor is missing, has an impossible shape, or holds NaN or inf.

    Examples
    --------
    >>> import tnlib_adapters
    >>> run(tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path()), [5, 6, 7, 5])
    Forward(2 layers, hidden (1, 4, 64), logits (1, 4, 128))
    """
    weights = as_weights("run", model)
    x = weights.embedding(weights.embedding.check("run", tokens, weights.context))  # batch n d_model
    patterns, residuals, inputs, outputs = [], [], [], []
    for block in weights.blocks:
        added = np.zeros_like(x)
        for branch in block.branches:
            read = _normed(branch.before, x)
            if isinstance(branch.layer, Attention):
                pattern, written = _attend(branch.layer, read)
                patterns.append(pattern)
                residuals.append(x)
                inputs.append(read)
                outputs.append(written)
            else:
                written = branch.layer(read)
            added += _normed(branch.behind, written)
        x = _normed(block.after, x + added)

    hidden = _normed(weights.final_norm, x)
    logits = None if weights.unembed is None else weights.unembed(hidden)  # batch n vocab
    return Forward(tuple(patterns), (*residuals, x), tuple(inputs), tuple(outputs), hidden, logits)


def loss(model: Checkpoint | Weights, tokens: Array, mask: Array) -> float:
    """Return the mean cross-entropy, in nats, of predicting tokens[:, t] from what stands before, where mask[:, t].

    Parameters
    ----------
    model
        A checkpoint, whose weights are read anew, or the `Weights` of one; of an architecture with an unembedding.
    tokens
        (n,) or (batch, n), integers.
    mask
        Same shape, bool: which tokens count. Nothing stands before the first of a sequence, so it cannot.

    Returns
    -------
    float
        The mean over all positions where `mask` is True.

    Raises
    ------
    ArgumentError
        If the model has no unembedding, `mask` does not fit, or `run` refuses the tokens.

    Examples
    --------
    >>> import tnlib_adapters
    >>> model = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path())
    >>> segment = np.random.default_rng(0).permutation(128)[:20]
    >>> tokens = np.concatenate([segment, segment])
    >>> loss(model, tokens, np.arange(40) > 20) < 1  # chance is ln(128) = 4.85
    True
    """
    weights = as_weights("loss", model)
    if weights.unembed is None:
        raise ArgumentError(
            f"loss: model must have an unembedding, got a {weights.architecture}, which ends in hidden states; "
            "use run and compare hidden states."
        )
    tokens = weights.embedding.check("loss", tokens, weights.context)
    counted = check_mask("loss", mask, tokens)
    hidden = run(replace(weights, unembed=None), tokens).hidden[:, :-1]  # only what counts is unembedded, below
    chosen, actual = counted[:, 1:], tokens[:, 1:]
    log_p = log_softmax(weights.unembed(hidden[chosen]))  # token vocab
    return float(-np.take_along_axis(log_p, actual[chosen][:, None], axis=1).mean())


def check_mask(function: str, mask: Array, tokens: Array) -> Array:
    """Return which tokens (batch, n) are to be predicted."""
    counted = np.atleast_2d(to_numpy(function, "mask", mask))
    if counted.shape != tokens.shape or counted.dtype != np.bool_ or counted[:, 0].any() or not counted.any():
        raise ArgumentError(
            f"{function}: mask must be bool of shape {tokens.shape}, False at the first position and True somewhere, "
            f"got {counted.dtype} of shape {counted.shape} with {int(np.count_nonzero(counted))} entries that count; "
            "mark the tokens to be predicted."
        )
    return counted


def _attend(layer: Attention, x: Array) -> tuple[Array, Array]:
    """Return patterns (batch, heads, n, n) and what the layer writes (batch, n, d_model)."""
    seen = layer.mask(x.shape[1])
    patterns, written = [], []
    for sequence in x:
        pattern = softmax(np.where(seen, layer.scores(sequence), -np.inf))  # h n n
        patterns.append(pattern)
        written.append(layer.frozen(pattern).apply(sequence))  # n d_model
    return np.stack(patterns), np.stack(written)


def _normed(norm: Norm | None, x: Array) -> Array:
    return x if norm is None else norm(x)
