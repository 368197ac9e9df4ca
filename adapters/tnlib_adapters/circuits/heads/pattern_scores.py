r"""What heads do, seen in their patterns: attention to the previous token, to the same token, behind the same token.

    previous     the weight that position i gives to i - 1
    duplicate    to all earlier positions j with the same token, t_j = t_i
    induction    to all positions j behind one, t_{j - 1} = t_i: what followed the present token before

each averaged over the positions i that have such a j, in sequences of random tokens that come twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from tnlib import ArgumentError, ArgumentTypeError
from tnlib._typing import Array
from tnlib._validate import as_array, as_count, as_rng, is_list, is_one_of, to_numpy
from tnlib_adapters.attention.frozen.residual_product import Head
from tnlib_adapters.checkpoints.checkpoint import Checkpoint
from tnlib_adapters.reference.embedding import TokenEmbedding
from tnlib_adapters.reference.model import run
from tnlib_adapters.reference.weights import Weights, as_weights

Doing = Literal["previous", "duplicate", "induction"]

_LONGEST = 50  # tokens of a segment


@dataclass(frozen=True, eq=False, repr=False)
class PatternScores:
    """Shares of attention, of every head; made by `pattern_scores` and `repeat_scores`.

    Parameters
    ----------
    previous, duplicate, induction
        (layers, heads), from 0 to 1; NaN where no position has such a one.
    chance
        The same three numbers of a head that attends alike to itself and everything before, or to everything where
        some head sees what comes later.
    """

    previous: Array
    duplicate: Array
    induction: Array
    chance: dict[Doing, float]

    def largest(self, doing: Doing, n: int) -> list[tuple[Head, float]]:
        """Return the n heads that do most of it, as (layer, head), and how much."""
        if not is_one_of(doing, get_args(Doing)):
            raise ArgumentError(
                f"PatternScores.largest: doing must be 'previous', 'duplicate' or 'induction', got {doing!r}; "
                "choose one."
            )
        count = as_count("PatternScores.largest", "n", n, least=0)
        found: Array = getattr(self, doing)
        order = np.argsort(-found, axis=None, kind="stable")[:count]
        at = [divmod(int(k), found.shape[1]) for k in order]
        return [(head, float(found[head])) for head in at if np.isfinite(found[head])]

    def __repr__(self) -> str:
        lines = [f"PatternScores of {self.previous.size} heads"]
        for doing in get_args(Doing):
            heads = "  ".join(f"{layer}.{head} {share:.2f}" for (layer, head), share in self.largest(doing, 4))
            lines.append(f"  {doing:10} chance {self.chance[doing]:.2f}   {heads}")
        return "\n".join(lines)


def pattern_scores(patterns: Sequence[Array], tokens: Array) -> PatternScores:
    """Return how much every head attends to previous, to equal, and to following tokens.

    Parameters
    ----------
    patterns
        Per layer (batch, heads, n, n) or, of one sequence, (heads, n, n): `run(model, tokens).patterns`, or any others.
    tokens
        (batch, n) or (n,), integers: what the patterns were made on.

    Returns
    -------
    PatternScores
        `previous`, `duplicate`, `induction`, each (layers, heads), and their `chance`.

    Raises
    ------
    ArgumentError
        If shapes do not fit.

    Examples
    --------
    >>> import numpy as np
    >>> back = np.eye(6, k=-1)                                                    # attends to the previous token
    >>> found = pattern_scores([back[None]], [7, 8, 9, 7, 8, 9])
    >>> found.previous, found.induction
    (array([[1.]]), array([[0.]]))
    """
    if not is_list(patterns):
        raise ArgumentTypeError(
            f"pattern_scores: patterns must be a list of arrays, one per layer, got {type(patterns).__name__}; "
            "pass run(model, tokens).patterns."
        )
    rows = np.atleast_2d(to_numpy("pattern_scores", "tokens", tokens))
    layers = [_four_legs(as_array("pattern_scores", "patterns", layer)) for layer in patterns]
    wanted = (len(rows), rows.shape[1], rows.shape[1])
    for k, layer in enumerate(layers):
        if (layer.shape[0], *layer.shape[2:]) != wanted or layer.shape[1] != layers[0].shape[1]:
            raise ArgumentError(
                f"pattern_scores: patterns of layer {k} must have shape (batch, heads, n, n) with batch and n of "
                f"tokens, {rows.shape}, and heads as in layer 0, got {layer.shape}; pass run(model, tokens).patterns."
            )
    if not layers:
        raise ArgumentError("pattern_scores: patterns must hold at least one layer, got none; pass those of a model.")
    n = rows.shape[1]
    sees_later = any(np.triu(layer, 1).any() for layer in layers)
    uniform = np.ones((n, n)) / n if sees_later else np.tril(np.ones((n, n))) / np.arange(1, n + 1)[:, None]
    targets = _targets(rows)
    found = {doing: np.stack([_share(layer, target) for layer in layers]) for doing, target in targets.items()}
    alike = np.broadcast_to(uniform, (len(rows), 1, n, n))
    return PatternScores(**found, chance={doing: float(_share(alike, t)[0]) for doing, t in targets.items()})


def repeat_scores(
    model: Checkpoint | Weights,
    *,
    n_sequences: int = 4,
    length: int | None = None,
    rng: int | np.random.Generator = 0,
) -> PatternScores:
    """Return how much every head attends to previous, equal and following tokens, on random tokens that come twice.

    Parameters
    ----------
    model
        A checkpoint, whose weights are read anew, or the `Weights` of one; run in float64.
    n_sequences
        How many sequences to draw.
    length
        Of the segment that comes twice. None: 50, or as long as the model takes.
    rng
        For the draw.

    Returns
    -------
    PatternScores
        See `pattern_scores`.

    Raises
    ------
    ArgumentError
        If the model reads images, or takes no sequence of twice that length.

    References
    ----------
    C. Olsson et al., "In-context Learning and Induction Heads" (2022), for the repeated random tokens.

    Examples
    --------
    >>> import tnlib_adapters
    >>> found = repeat_scores(tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path()), length=40)
    >>> found.largest("previous", 1)[0][0], bool(found.induction[1].min() > 0.5)
    ((0, 3), True)
    """
    weights = as_weights("repeat_scores", model)
    if not isinstance(weights.embedding, TokenEmbedding):
        raise ArgumentError(
            f"repeat_scores: model must read tokens, got a {weights.architecture}, which reads images; "
            "pass patterns to pattern_scores."
        )
    context, vocab = weights.context, len(weights.embedding.tokens)
    longest = _LONGEST if context is None else min(_LONGEST, context // 2)
    length = as_count("repeat_scores", "length", longest if length is None else length, least=2)
    draw = as_rng("repeat_scores", rng)
    segments = [
        draw.choice(vocab, length, replace=vocab < length)
        for _ in range(as_count("repeat_scores", "n_sequences", n_sequences))
    ]
    tokens = np.tile(np.stack(segments), (1, 2))
    patterns = [run(weights, row).patterns for row in tokens]
    return pattern_scores([np.concatenate(layer) for layer in zip(*patterns, strict=True)], tokens)


def _targets(tokens: Array) -> dict[Doing, Array]:
    """Return where each kind of head looks, bool (batch, n, n)."""
    n = tokens.shape[1]
    earlier = np.tril(np.ones((n, n), dtype=bool), -1)
    same = (tokens[:, :, None] == tokens[:, None]) & earlier  # batch i j
    behind = np.zeros_like(same)
    behind[:, :, 1:] = same[:, :, :-1]
    previous = np.broadcast_to(np.eye(n, k=-1, dtype=bool), same.shape)
    return {"previous": previous, "duplicate": same, "induction": behind & earlier}


def _share(patterns: Array, target: Array) -> Array:
    """Return the weight that falls on the target, averaged over positions that have one, (heads,)."""
    counted = target.any(axis=2)  # batch i
    if not counted.any():
        return np.full(patterns.shape[1], np.nan)
    weight = np.einsum("bhij,bij->bhi", patterns, target.astype(patterns.dtype))  # b h i [j]
    total = np.einsum("bhi,bi->h", weight, counted.astype(patterns.dtype))  # [b] h [i]
    return np.asarray(total / counted.sum())


def _four_legs(patterns: Array) -> Array:
    return patterns[None] if patterns.ndim == 3 else patterns
