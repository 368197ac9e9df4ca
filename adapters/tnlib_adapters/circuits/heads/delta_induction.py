r"""A two-layer induction model whose weights are deltas.

The residual stream has four blocks of coordinates, all of them one-hot:

    token       the current token, V coordinates
    position    the current position, N
    before      the preceding token, V, written by head 0.0
    next        the predicted token, V, written by head 1.0

Every weight matrix is a delta between two blocks. Head 0.0 attends to the preceding position, head 1.0 to positions
whose preceding token is the current one:

    0.0   scores_ij = c delta(i, j + 1)                        value: token -> before
    1.0   scores_ij = c (delta(x_i, before_j) - delta(j, 0))   value: token -> next

Position 0 has no preceding token, attends to itself, and is excluded by the second term. The unembedding reads `next`.
"""

from __future__ import annotations

import itertools

import numpy as np

from tnlib._errors import ArgumentError
from tnlib._typing import Array
from tnlib._validate import as_count, as_real
from tnlib_adapters.checkpoints.checkpoint import Checkpoint
from tnlib_adapters.checkpoints.modified import checkpoint_of_arrays


def build_induction(vocab: int = 128, context: int = 96, *, sharpness: float = 20.0) -> Checkpoint:
    """Return a two-layer attention-only model made of deltas that continues repeated sequences of tokens.

    Parameters
    ----------
    vocab
        Number of tokens.
    context
        Number of positions.
    sharpness
        Score of a match, where all other scores are 0; also the logit of a token that receives all attention. At 20 a
        match among 96 positions gets all but 2e-7 of the attention.

    Returns
    -------
    Checkpoint
        One head per layer, of width d_model = 3 vocab + context. Head 0.0 is a previous-token head, 1.0 an induction
        head. Weights are dense and in memory, eight matrices of this width; `save_checkpoint` writes them.

    Raises
    ------
    ArgumentError
        If `sharpness` is not positive, or exceeds 1000.

    References
    ----------
    N. Elhage et al., "A Mathematical Framework for Transformer Circuits" (2021), "Induction heads".

    Examples
    --------
    >>> from tnlib_adapters.circuits import build_induction, find_induction
    >>> found = find_induction(build_induction(), n=4)
    >>> found.previous_head, found.induction_heads, f"{found.previous_token[0, 0]:.4f}"
    ((0, 0), ((1, 0),), '1.0000')
    """
    vocab, context = as_count("build_induction", "vocab", vocab), as_count("build_induction", "context", context)
    sharpness = as_real("build_induction", "sharpness", sharpness, "sharpness=20.0")
    if not 0 < sharpness <= 1000:
        raise ArgumentError(f"build_induction: sharpness must lie between 0 and 1000, got {sharpness}; pass 20.0.")
    blocks = _Blocks(vocab, context)
    config = {
        "model_type": "tnlib_attention_only",
        "architectures": ["AttentionOnly"],
        "vocab_size": vocab,
        "hidden_size": blocks.d_model,
        "num_attention_heads": 1,
        "num_hidden_layers": 2,
        "max_position_embeddings": context,
        "dtype": "float32",
    }
    arrays = {
        "embed.weight": blocks.delta("token")[: blocks.vocab],
        "positions.weight": blocks.delta("position")[: blocks.context],
        "unembed.weight": sharpness * blocks.delta("next")[: blocks.vocab],
        "unembed.bias": np.zeros(vocab),
        **_layer("layers.0.attention", _previous_token_head(blocks, sharpness)),
        **_layer("layers.1.attention", _matching_head(blocks, sharpness)),
    }
    return checkpoint_of_arrays("build_induction", config, arrays)


class _Blocks:
    """The blocks of coordinates of the residual stream."""

    def __init__(self, vocab: int, context: int) -> None:
        self.vocab, self.context = vocab, context
        sizes = {"token": vocab, "position": context, "before": vocab, "next": vocab}
        ends = list(itertools.accumulate(sizes.values()))
        self.slices = {name: slice(end - n, end) for (name, n), end in zip(sizes.items(), ends, strict=True)}
        self.d_model = ends[-1]

    def delta(self, block: str, shift: int = 0) -> Array:
        """Return (d_model, d_model): entry (k, b + k - shift) is 1 in the columns b, b + 1, ... of `block`."""
        columns = self.slices[block]
        out = np.zeros((self.d_model, self.d_model))
        size = columns.stop - columns.start
        out[:size, columns] = np.eye(size, k=-shift)
        return out


def _previous_token_head(blocks: _Blocks, sharpness: float) -> dict[str, Array]:
    """Return weights (out, in): query e_i, key e_(j+1), the token as value, written to `before`."""
    return {
        "query": sharpness * np.sqrt(blocks.d_model) * blocks.delta("position"),
        "key": blocks.delta("position", shift=1),
        "value": blocks.delta("token"),
        "output": blocks.delta("before").T,
    }


def _matching_head(blocks: _Blocks, sharpness: float) -> dict[str, Array]:
    """Return weights (out, in): the token as query, `before` as key, the token as value, written to `next`."""
    key = blocks.delta("before")
    key[: blocks.vocab, blocks.slices["position"].start] = -1.0  # every token avoids position 0
    return {
        "query": sharpness * np.sqrt(blocks.d_model) * blocks.delta("token"),
        "key": key,
        "value": blocks.delta("token"),
        "output": blocks.delta("next").T,
    }


def _layer(module: str, weights: dict[str, Array]) -> dict[str, Array]:
    """Return the tensors of an attention layer, with biases of zero."""
    tensors = {f"{module}.{name}.weight": weight for name, weight in weights.items()}
    return tensors | {f"{module}.{name}.bias": np.zeros(len(weight)) for name, weight in weights.items()}
