"""Head detectors from attention patterns: previous-token, duplicate-token and induction heads.

Averaged over the positions i that have such a j, in repeated sequences of random tokens:

    previous     attention of position i to i - 1
    duplicate    to all earlier positions j with the same token, t_j = t_i
    induction    to all positions j with t_{j - 1} = t_i: the tokens that followed earlier occurrences
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np

from tnlib import ArgumentError, ArgumentTypeError
from tnlib._html import heat_image
from tnlib._typing import Array
from tnlib._validate import as_array, as_count, as_rng, check_choice, is_list
from tnlib_adapters.checkpoints.checkpoint import Checkpoint, accepts_models
from tnlib_adapters.frozen.frozen_stack import Head
from tnlib_adapters.reference.embedding import TokenEmbedding, as_token_ids
from tnlib_adapters.reference.model import run
from tnlib_adapters.reference.weights import Weights, as_weights
from tnlib_adapters.result_table import HeadTable, descending

HeadKind = Literal["previous", "duplicate", "induction"]

_LONGEST = 50  # tokens per segment


@dataclass(frozen=True, eq=False, repr=False)
class PatternScores(HeadTable):
    """Attention scores of every head, returned by `pattern_scores` and `repeat_scores`.

    Parameters
    ----------
    previous, duplicate, induction
        (layers, heads), from 0 to 1; NaN where no position has a target.
    chance
        The same three scores for uniform attention: causal, or over all positions if some head attends to later ones.

    References
    ----------
    C. Olsson et al., "In-context Learning and Induction Heads" (2022).

    Examples
    --------
    A head that attends to the previous token, and one with uniform attention:

    >>> import numpy as np
    >>> uniform = np.tril(np.ones((4, 4))) / np.arange(1, 5)[:, None]
    >>> found = pattern_scores([np.stack([np.eye(4, k=-1), uniform])], [7, 8, 7, 8])
    >>> found.previous.round(3), round(found.chance["previous"], 3)
    (array([[1.   , 0.361]]), 0.361)
    """

    previous: Array
    duplicate: Array
    induction: Array
    chance: dict[HeadKind, float]

    def largest(self, kind: HeadKind, n: int) -> list[tuple[Head, float]]:
        """Return the n heads with the highest scores of a kind, as ((layer, head), score)."""
        check_choice("PatternScores.largest", "kind", kind, get_args(HeadKind))
        count = as_count("PatternScores.largest", "n", n, least=0)
        shares: Array = getattr(self, kind)
        at = [divmod(int(k), shares.shape[1]) for k in descending(shares, count)]
        return [(head, float(shares[head])) for head in at if np.isfinite(shares[head])]

    _SCORES = ("previous", "duplicate", "induction")

    @property
    def _title(self) -> str:
        return f"PatternScores of {self.previous.size} heads"

    def _notes(self) -> list[str]:
        return ["chance: " + ", ".join(f"{kind} {chance:.3f}" for kind, chance in self.chance.items())]

    def _picture(self) -> str:
        shares = {kind: getattr(self, kind) for kind in get_args(HeadKind)}
        label = "shares of attention, white 0, blue 1; layers as rows, heads as columns"
        return "".join(f"<div>{kind}<br>{heat_image(a, label, width=160, top=1.0)}</div>" for kind, a in shares.items())


def pattern_scores(patterns: Sequence[Array], tokens: Array) -> PatternScores:
    """Return previous-token, duplicate-token and induction scores of every head.

    Parameters
    ----------
    patterns
        Per layer (batch, heads, n, n) or, for one sequence, (heads, n, n), for example `run(model, tokens).patterns`.
    tokens
        (batch, n) or (n,), integers, or what a tokenizer returned: the input tokens of the patterns.

    Returns
    -------
    PatternScores
        `previous`, `duplicate`, `induction`, each (layers, heads), and their `chance`.

    Raises
    ------
    ArgumentError
        If shapes do not match.

    References
    ----------
    C. Olsson et al., "In-context Learning and Induction Heads" (2022).

    Examples
    --------
    >>> import numpy as np
    >>> back = np.eye(6, k=-1)  # attends to the previous token
    >>> found = pattern_scores([back[None]], [7, 8, 9, 7, 8, 9])
    >>> found.previous, found.induction
    (array([[1.]]), array([[0.]]))
    """
    if not is_list(patterns):
        raise ArgumentTypeError(
            f"pattern_scores: patterns must be a list of arrays, one per layer, got {type(patterns).__name__}; "
            "pass run(model, tokens).patterns."
        )
    rows = np.atleast_2d(as_token_ids("pattern_scores", tokens, None))
    arrays = [as_array("pattern_scores", "patterns", layer) for layer in patterns]
    layers = [layer[None] if layer.ndim == 3 else layer for layer in arrays]
    expected = (len(rows), rows.shape[1], rows.shape[1])
    for k, layer in enumerate(layers):
        if (layer.shape[0], *layer.shape[2:]) != expected or layer.shape[1] != layers[0].shape[1]:
            raise ArgumentError(
                f"pattern_scores: patterns of layer {k} must have shape (batch, heads, n, n) with batch and n of "
                f"tokens, {rows.shape}, and heads as in layer 0, got {layer.shape}; pass run(model, tokens).patterns."
            )
    if not layers:
        raise ArgumentError("pattern_scores: patterns must hold at least one layer, got none; pass those of a model.")
    n = rows.shape[1]
    sees_later = any(np.triu(layer, 1).any() for layer in layers)
    uniform = np.ones((n, n)) / n if sees_later else np.tril(np.ones((n, n))) / np.arange(1, n + 1)[:, None]
    targets = attention_targets(rows)
    shares = {kind: np.stack([_share(layer, target) for layer in layers]) for kind, target in targets.items()}
    alike = np.broadcast_to(uniform, (len(rows), 1, n, n))
    return PatternScores(**shares, chance={kind: float(_share(alike, t)[0]) for kind, t in targets.items()})


@accepts_models
def repeat_scores(
    model: Checkpoint | Weights,
    *,
    n_sequences: int = 4,
    length: int | None = None,
    rng: int | np.random.Generator = 0,
) -> PatternScores:
    """Return previous-token, duplicate-token and induction scores of every head on repeated random tokens.

    Parameters
    ----------
    model
        A checkpoint or transformers model, whose weights are loaded, or loaded `Weights`; run in float64.
    n_sequences
        Number of sampled sequences.
    length
        Length of the repeated segment. None: 50, or half the context of the model if that is shorter.
    rng
        Seed or generator for the sampled tokens.

    Returns
    -------
    PatternScores
        See `pattern_scores`.

    Raises
    ------
    ArgumentError
        If the model reads images, or its context is shorter than twice `length`.

    References
    ----------
    C. Olsson et al., "In-context Learning and Induction Heads" (2022), for the repeated random tokens.

    Examples
    --------
    >>> import tnlib_adapters
    >>> model = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path())
    >>> found = repeat_scores(model, length=40)
    >>> found.largest("previous", 1)[0][0], bool(found.induction[1].min() > 0.5)
    ((0, 3), True)
    """
    weights = as_weights("repeat_scores", model)
    if not isinstance(weights.embedding, TokenEmbedding):
        raise ArgumentError(
            f"repeat_scores: model must read tokens, got a {weights.architecture}, which reads images; "
            "pass patterns to pattern_scores."
        )
    count = as_count("repeat_scores", "n_sequences", n_sequences)
    tokens = repeated_tokens("repeat_scores", weights, count, length, as_rng("repeat_scores", rng))
    return scores_of_sequences(weights, tokens)


def scores_of_sequences(weights: Weights, tokens: Array) -> PatternScores:
    """Return the `pattern_scores` of a model on sequences (batch, n), run one after the other."""
    headless = replace(weights, unembed=None)  # patterns need no logits
    patterns = [run(headless, row).patterns for row in tokens]
    return pattern_scores([np.concatenate(layer) for layer in zip(*patterns, strict=True)], tokens)


def repeated_tokens(function: str, weights: Weights, n: int, length: int | None, rng: np.random.Generator) -> Array:
    """Return n sequences (n, 2 length) of a segment of random tokens, followed by itself."""
    vocab = len(weights.embedding.tokens)  # type: ignore[union-attr]
    longest = _LONGEST if weights.context is None else min(_LONGEST, weights.context // 2)
    length = as_count(function, "length", longest if length is None else length, least=2)
    segments = [rng.choice(vocab, length, replace=vocab < length) for _ in range(n)]
    return np.tile(np.stack(segments), (1, 2))


def attention_targets(tokens: Array) -> dict[HeadKind, Array]:
    """Return the attention targets of each kind of head, bool (batch, n, n)."""
    n = tokens.shape[1]
    earlier = np.tril(np.ones((n, n), dtype=bool), -1)
    same = (tokens[:, :, None] == tokens[:, None]) & earlier  # batch i j
    successors = np.zeros_like(same)
    successors[:, :, 1:] = same[:, :, :-1]
    previous = np.broadcast_to(np.eye(n, k=-1, dtype=bool), same.shape)
    return {"previous": previous, "duplicate": same, "induction": successors & earlier}


def _share(patterns: Array, target: Array) -> Array:
    """Return the attention weight on the targets, averaged over positions that have a target, (heads,)."""
    has_target = target.any(axis=2)  # batch i
    if not has_target.any():
        return np.full(patterns.shape[1], np.nan)
    weight = np.einsum("bhij,bij->bhi", patterns, target.astype(patterns.dtype))  # b h i [j]
    total = np.einsum("bhi,bi->h", weight, has_target.astype(patterns.dtype))  # [b] h [i]
    return np.asarray(total / has_target.sum())
