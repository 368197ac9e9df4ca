"""Forward pass of a checkpoint in float64 numpy, the reference for all operators."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from tnlib import ArgumentError
from tnlib._typing import Array
from tnlib._validate import to_numpy
from tnlib_adapters.attention.attention import Attention
from tnlib_adapters.attention.softmax import softmax
from tnlib_adapters.checkpoints.checkpoint import Checkpoint, accepts_models
from tnlib_adapters.reference.layers import normed
from tnlib_adapters.reference.weights import ResidualBlock, Weights, as_unembedding, as_weights

_BATCH = 16  # sequences whose loss is computed at once: their patterns stay in memory that is used again


@dataclass(frozen=True, repr=False)
class Forward:
    """Activations of a forward pass on a batch of token sequences, in the precision of the weights.

    Parameters
    ----------
    patterns
        Per layer, (batch, heads, n, n): attention weights; rows sum to one.
    residuals
        Per layer, (batch, n, d_model): the stream before its attention, before any norm; then the final stream.
    inputs
        Per layer, (batch, n, d_model): the input of its attention, after the preceding norm, if any.
    outputs
        Per layer, (batch, n, d_model): the output of its attention, biases included, before any following norm.
    hidden
        (batch, n, d_model): the final stream after the final norm, if any.
    logits
        (batch, n, vocab), or None if the model has no unembedding.
    memory
        (batch, n', d_model), the output of the encoder, which cross-attention reads; None for a model of one stack.
        With an encoder, its layers come first, on its tokens; `residuals` ends in the stream of the decoder.
    """

    patterns: tuple[Array, ...]
    residuals: tuple[Array, ...]
    inputs: tuple[Array, ...]
    outputs: tuple[Array, ...]
    hidden: Array
    logits: Array | None
    memory: Array | None = None

    def __repr__(self) -> str:
        ends = "" if self.logits is None else f", logits {self.logits.shape}"
        return f"Forward({len(self.patterns)} layers, hidden {self.hidden.shape}{ends})"


@accepts_models
def run(model: Checkpoint | Weights, tokens: ArrayLike, decoder_tokens: Array | None = None) -> Forward:
    """Run a model on token sequences without padding: every position is attended to.

    Parameters
    ----------
    model
        A checkpoint or transformers model, whose weights are loaded, or loaded `Weights`.
    tokens
        (n,) or (batch, n), integers, what a tokenizer returned, or one or several texts, which the tokenizer in the
        folder of the checkpoint splits. Architectures with segments use the first segment for all tokens. Models that
        read images take (batch, channels, height, width).
    decoder_tokens
        (m,) or (batch, m), the tokens of the decoder where `tokens` are those of an encoder; None for other models.

    Returns
    -------
    Forward
        Patterns, residual stream, hidden states and logits, always with a batch axis.

    Raises
    ------
    ArgumentError
        If a token is not an integer or not in the vocabulary, a sequence exceeds the context, or the activation
        function of the model is unknown.
    FileFormatError
        If a tensor is missing, has an impossible shape, or holds NaN or inf.

    Examples
    --------
    >>> import tnlib_adapters
    >>> run(tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path()), [5, 6, 7, 5])
    Forward(2 layers, hidden (1, 4, 64), logits (1, 4, 128))
    """
    weights = as_weights("run", model, with_decoder=True)
    x = weights.embedding(weights.embedding.check("run", tokens, weights.context))  # batch n d_model
    memory, record = None, _Record([], [], [], [])
    if weights.encoder:
        if decoder_tokens is None:
            raise ArgumentError(
                f"run: decoder_tokens must be given for a {weights.architecture} with an encoder and a decoder, got "
                "None; pass the tokens so far, the start token first."
            )
        memory = normed(weights.encoder_norm, _through(weights.encoder, x, None, record))
        x = weights.embedding(weights.embedding.check("run", decoder_tokens, weights.context))  # batch m d_model
    elif decoder_tokens is not None:
        raise ArgumentError(
            f"run: decoder_tokens must be None for a {weights.architecture} without a decoder, got an array; leave "
            "them out."
        )
    if memory is not None and len(memory) != len(x):
        raise ArgumentError(
            f"run: decoder_tokens must hold as many sequences as tokens, got {len(x)} and {len(memory)}; pass one for "
            "each."
        )
    x = _through(weights.blocks, x, memory, record)
    hidden = normed(weights.final_norm, x)
    logits = None if weights.unembed is None else weights.unembed(hidden)  # batch n vocab
    patterns, residuals, inputs, outputs = (tuple(arrays) for arrays in record)
    return Forward(patterns, (*residuals, x), inputs, outputs, hidden, logits, memory)


class _Record(NamedTuple):
    """Arrays of the attention layers of a forward pass, first to last."""

    patterns: list[Array]
    residuals: list[Array]
    inputs: list[Array]
    outputs: list[Array]


def _through(blocks: Sequence[ResidualBlock], x: Array, memory: Array | None, record: _Record) -> Array:
    """Return the stream (batch, n, d_model) after these blocks, which record their attention."""

    def attend_and_record(layer: Attention, read: Array) -> Array:
        patterns, written = attend(layer, read, memory)
        for arrays, array in zip(record, (patterns, x, read, written), strict=True):
            arrays.append(array)
        return written

    for block in blocks:
        x = block.run(x, attend_and_record)
    return x


@accepts_models
def loss(model: Checkpoint | Weights, tokens: ArrayLike, mask: Array | None = None) -> float:
    """Return the mean cross-entropy, in nats, of predicting tokens[:, t] from the preceding tokens, where mask[:, t].

    Parameters
    ----------
    model
        A checkpoint or transformers model, whose weights are loaded, or loaded `Weights`; with an unembedding.
    tokens
        (n,) or (batch, n), integers, or one or several texts.
    mask
        Same shape, bool: target tokens. The first token of a sequence cannot be a target. None: the last one alone.

    Returns
    -------
    float
        The mean over all positions where `mask` is True.

    Raises
    ------
    ArgumentError
        If the model has no unembedding, `mask` does not match, or `run` refuses the tokens.

    Examples
    --------
    >>> import tnlib_adapters
    >>> model = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path())
    >>> segment = np.random.default_rng(0).permutation(128)[:20]
    >>> tokens = np.concatenate([segment, segment])
    >>> round(loss(model, tokens, np.arange(40) > 20), 2)  # chance is ln(128) = 4.85
    0.51
    """
    weights = as_weights("loss", model)
    unembed = as_unembedding("loss", weights)
    tokens = weights.embedding.check("loss", tokens, weights.context)
    targets = check_mask("loss", mask, tokens)
    headless = replace(weights, unembed=None)  # only what counts is unembedded, below
    batches = np.array_split(tokens, -(-len(tokens) // _BATCH))
    hidden = np.concatenate([run(headless, batch).hidden for batch in batches])[:, :-1]
    chosen, actual = targets[:, 1:], tokens[:, 1:]
    return float(unembed.cross_entropies(hidden[chosen], actual[chosen]).mean())


def check_mask(function: str, mask: Array | None, tokens: Array) -> Array:
    """Return the mask of target tokens (batch, n), validated; the last one of every sequence for None."""
    last = np.broadcast_to(np.arange(tokens.shape[1]) == tokens.shape[1] - 1, tokens.shape)
    targets = last if mask is None else np.atleast_2d(to_numpy(function, "mask", mask))
    if targets.shape != tokens.shape or targets.dtype != np.bool_ or targets[:, 0].any() or not targets.any():
        raise ArgumentError(
            f"{function}: mask must be bool of shape {tokens.shape}, False at the first position and True somewhere, "
            f"got {targets.dtype} of shape {targets.shape} with {int(np.count_nonzero(targets))} entries that count; "
            "mark the tokens to be predicted."
        )
    return targets


def attention_output(layer: Attention, x: Array) -> Array:
    """Return the output (batch, n, d_model) of attention on its input x, for `ResidualBlock.run`."""
    return attend(layer, x)[1]


def attend(layer: Attention, x: Array, memory: Array | None = None) -> tuple[Array, Array]:
    """Return patterns (batch, heads, n, n) and outputs (batch, n, d_model) of attention on its input x.

    In cross-attention, which reads the output of the encoder, `memory` (batch, n', d_model), patterns are (..., n, n').
    """
    read = memory if layer.cross and memory is not None else None
    visible = layer.mask(x.shape[1], None if read is None else read.shape[1])
    patterns, written = np.empty((len(x), layer.n_heads, *visible.shape), x.dtype), np.empty_like(x)
    for k, sequence in enumerate(x):
        other = None if read is None else read[k]
        patterns[k] = softmax(layer.scores(sequence, other), visible)
        written[k] = layer.output(patterns[k], sequence if other is None else other)
    return patterns, written
