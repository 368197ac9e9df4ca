"""Induction heads of a trained model, on sequences in which a segment occurs twice.

Measured are the attention to the preceding token and to the tokens that followed earlier occurrences, K-composition
with the previous-token head, copying, and the loss without a head: by attention knock-out, and in keys of later heads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from tnlib import ArgumentError
from tnlib._typing import Array
from tnlib._validate import as_count, as_real_dtype, as_rng
from tnlib.linalg.threads import single_threaded_blas
from tnlib_adapters.checkpoints.checkpoint import Checkpoint, accepts_models, as_one_stream
from tnlib_adapters.circuits.arguments import head_name
from tnlib_adapters.circuits.composition.composition_scores import compositions
from tnlib_adapters.circuits.discovery.edge_ablation import GatedModel
from tnlib_adapters.circuits.discovery.target_loss import targets_of
from tnlib_adapters.circuits.heads.attention_knockout import losses_without_attention
from tnlib_adapters.circuits.heads.pattern_scores import attention_targets, scores_of_sequences
from tnlib_adapters.circuits.tokens.copying import copying_scores
from tnlib_adapters.data.repeats import repeated_segments
from tnlib_adapters.frozen.frozen_stack import Head
from tnlib_adapters.reference.embedding import TokenEmbedding
from tnlib_adapters.reference.weights import Weights, as_unembedding, read_weights
from tnlib_adapters.result_table import HeadTable, descending

_CLEAR = 0.4  # smallest share of attention that makes an induction head
_SHARE = 0.2  # smallest effect of a head that is counted, as a share of the largest
_UPPER = 0.995  # quantile of Student's t whose interval contains the mean with a probability of 0.99
_CANDIDATES = 4  # previous-token heads that are removed from keys
_SHOWN = 16  # rows of repr


@dataclass(frozen=True, eq=False, repr=False)
class Induction(HeadTable):
    """Induction circuit of a model, returned by `find_induction`. Arrays have shape (layers, heads).

    Parameters
    ----------
    previous_token
        Mean attention to the preceding position, over all positions but the first.
    induction
        Mean attention to the tokens that followed earlier occurrences of the current token.
    composition
        K-composition score with the previous-token head, as a multiple of chance; NaN up to and including its layer,
        and for models whose queries and keys are normalised.
    copying
        Eigenvalue copying score of the circuit from embeddings to logits, from -1 to 1; see `copying_scores` for heads
        of deep models.
    lost
        Fraction of the gap between loss and chance that is lost if the keys of later layers do not read this head, for
        the four heads with the largest attention to the previous token; NaN for others, and if the loss exceeds chance.
        Above 1 if the loss without the head exceeds chance.
    loss, chance
        Loss of the model on repeated tokens and ln(vocab), in nats.
    effect
        Increase of the loss on repeated tokens, in nats, if the head does not attend to the tokens that followed
        earlier occurrences: its weights there are 0, and the others are rescaled. The mean over the sequences.
    standard_error
        Of `effect`, over the sampled sequences.
    n_sequences
        Number of sampled sequences.

    References
    ----------
    C. Olsson et al., "In-context Learning and Induction Heads" (2022); M. Geva et al., "Dissecting Recall of Factual
    Associations in Auto-Regressive Language Models" (2023), for attention knock-out.

    Examples
    --------
    >>> import tnlib_adapters
    >>> model = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path())
    >>> found = find_induction(model, n=4)
    >>> found.composition[1].round(1), f"loss {found.loss:.1f}, chance {found.chance:.2f}"
    (array([2. , 2. , 2. , 1.9]), 'loss 0.9, chance 4.85')
    """

    previous_token: Array
    induction: Array
    composition: Array
    copying: Array
    lost: Array
    loss: float
    chance: float
    effect: Array
    standard_error: Array
    n_sequences: int

    _SCORES = ("previous_token", "induction", "composition", "copying", "lost", "effect", "standard_error")
    _FORMATS: ClassVar = {"lost": ".1%"}

    @property
    def previous_head(self) -> Head:
        """The head before the last layer with the largest attention to the previous token."""
        layer, head = divmod(int(self.previous_token[:-1].argmax()), self.previous_token.shape[1])
        return layer, head

    @property
    def induction_heads(self) -> tuple[Head, ...]:
        """Heads with at least 40 % of their attention on the induction targets."""
        return _heads(self.induction >= _CLEAR)

    @property
    def causal_heads(self) -> tuple[Head, ...]:
        """Heads whose effect exceeds a fifth of the largest, by the interval of Student's t of probability 0.99.

        The interval is that of one head; the largest effect counts as exact.
        """
        return _heads(self.effect - self._half_width > _SHARE * self.effect.max())

    @property
    def undecided_heads(self) -> tuple[Head, ...]:
        """Heads whose effect may be above or below a fifth of the largest; more sequences decide."""
        limit, width = _SHARE * self.effect.max(), self._half_width
        return _heads((self.effect - width <= limit) & (self.effect + width > limit))

    @property
    def _half_width(self) -> Array:
        from scipy.special import stdtrit

        return np.asarray(stdtrit(self.n_sequences - 1, _UPPER) * self.standard_error)

    @property
    def _title(self) -> str:
        previous = head_name(self.previous_head)
        return f"Previous-token head {previous}; loss on repeats {self.loss:.2f}, chance {self.chance:.2f}"

    def _printed(self) -> Array:
        heads = [*np.flatnonzero(np.isfinite(self.lost)), *descending(np.maximum(self.effect, 0), _SHOWN)]
        return np.sort(list(dict.fromkeys(heads))[:_SHOWN])

    def _notes(self) -> list[str]:
        notes = ["copying: of embeddings; copying_scores has that of other inputs"] if len(self.copying) > 2 else []
        if np.nanmax(self.lost, initial=0) > 1:
            notes.append("lost above 100%: without this head in the keys the loss exceeds chance")
        return notes


@accepts_models
@single_threaded_blas
def find_induction(
    model: Checkpoint,
    *,
    n: int = 24,
    length: int | None = None,
    text: ArrayLike | None = None,
    rng: int | np.random.Generator = 0,
    dtype: DTypeLike = np.float64,
) -> Induction:
    """Find the induction circuit of a language model from patterns, weights and ablations.

    A previous-token head writes into every position the token before it. An induction head matches this, in its keys,
    with the current token and copies the attended token. Its effect is measured by attention knock-out: the loss on
    repeated tokens if the head does not attend to what followed earlier occurrences.

    Parameters
    ----------
    model
        A language model of at least two layers, of any architecture with one residual stream.
    n
        Number of sampled sequences, each with a segment that occurs twice.
    length
        Tokens of the segment, which is followed by itself. None: 24, and for attention-only models segments of random
        length at random offsets.
    text
        (m,), integers, or a text: segments are drawn from these tokens. None: random tokens, which are unlike the
        training text of most models, so that effects are smaller.
    rng
        Seed or generator for the samples.
    dtype
        Precision of the forward passes. In float32 they take half the time and half the memory.

    Returns
    -------
    Induction
        Printed as a table, one row per head.

    Raises
    ------
    ArgumentError
        If the model has one layer or no unembedding, its context is too short, the text is shorter than a segment, or
        `dtype` is neither float32 nor float64.

    References
    ----------
    C. Olsson et al., "In-context Learning and Induction Heads" (2022); M. Geva et al., "Dissecting Recall of Factual
    Associations in Auto-Regressive Language Models" (2023), for attention knock-out.

    Examples
    --------
    >>> import tnlib_adapters
    >>> model = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path())
    >>> found = find_induction(model, n=4)
    >>> found.previous_head, found.induction_heads
    ((0, 3), ((1, 0), (1, 1), (1, 2), (1, 3)))
    >>> bool(found.lost[0, 3] > 0.8), bool((found.lost[0, :3] < 0.1).all())
    (True, True)
    """
    n, generator = as_count("find_induction", "n", n, least=2), as_rng("find_induction", rng)
    weights = _checked(model, as_real_dtype("find_induction", dtype))
    if model.wiring.is_attention_only and length is None and text is None:
        tokens, repeated = random_segments("find_induction", weights, n, generator)
        distance = None
    else:
        tokens, repeated = segments_twice("find_induction", weights, n, length, text, generator)
        distance = tokens.shape[1] // 2 - 1
    targets = targets_of(weights, tokens, repeated, "find_induction")
    scores = scores_of_sequences(weights, tokens)
    losses, without = losses_without_attention(weights, targets, attention_targets(tokens)["induction"])
    effects = without - losses  # layer head sequence
    loss = float(np.average(losses, weights=repeated.sum(axis=1)))  # over all repeated tokens
    chance = math.log(len(weights.embedding.tokens))  # type: ignore[union-attr]
    return Induction(
        previous_token=scores.previous,
        induction=scores.induction,
        composition=_composition(model, scores.previous, distance),
        copying=copying_scores(model, inputs="embeddings").embeddings,  # type: ignore[arg-type]
        lost=_lost(weights, tokens, repeated, scores.previous, chance - loss),
        loss=loss,
        chance=chance,
        effect=effects.mean(axis=-1),
        standard_error=effects.std(axis=-1, ddof=1) / math.sqrt(n),
        n_sequences=n,
    )


def _checked(model: Checkpoint, dtype: DTypeLike) -> Weights:
    weights = read_weights(as_one_stream("find_induction", model, "model"), dtype=dtype)
    if model.n_layers < 2:
        raise ArgumentError(
            f"find_induction: model must have at least two attention layers, got {model.n_layers}; "
            "induction takes one to look back and one to match."
        )
    as_unembedding("find_induction", weights)
    return weights


def _composition(model: Checkpoint, previous: Array, distance: int | None) -> Array:
    """Return the K-composition of all heads with the previous-token head, (layers, heads).

    The distance is that of scores that depend on it.
    """
    head = divmod(int(previous[:-1].argmax()), previous.shape[1])
    layers = [model.attention(layer) for layer in range(model.n_layers)]
    if not all(layer.is_bilinear for layer in layers):
        return np.full((model.n_layers, model.sizes.n_heads), np.nan)
    by_distance = any(layer.depends_on_distance for layer in layers)
    return np.asarray(compositions(model, "K", distance=distance if by_distance else None).multiples[head])


def _heads(chosen: Array) -> tuple[Head, ...]:
    layers, heads = np.nonzero(chosen)
    return tuple(zip(layers.tolist(), heads.tolist(), strict=True))


def _lost(weights: Weights, tokens: Array, repeated: Array, previous: Array, gap: float) -> Array:
    """Return the share of the gap to chance lost without a head in the keys of later layers, (layers, heads)."""
    shares = np.full(previous.shape, np.nan)
    if gap <= 0:
        return shares
    order = np.argsort(-previous[:-1], axis=None, kind="stable")[:_CANDIDATES]
    candidates = list(zip(*np.unravel_index(order, previous[:-1].shape), strict=True))
    increases = [_increases_of_keys(weights, t, m, candidates) for t, m in zip(tokens, repeated, strict=True)]
    for head, value in zip(candidates, np.average(increases, axis=0, weights=repeated.sum(axis=1)), strict=True):
        shares[head] = value / gap
    return shares


def _increases_of_keys(weights: Weights, tokens: Array, repeated: Array, heads: Sequence[Head]) -> Array:
    """Return the increase of the loss of one sequence without each of some heads in the keys of later layers."""
    gated = GatedModel(weights, tokens, repeated, "find_induction")
    writers = [gated.writers.index(f"{layer}.{h}") for layer, h in heads]
    is_key = np.array([name.endswith(" K") for name in gated.readers])
    groups = [np.flatnonzero((gated.edges[:, 1] == writer) & is_key[gated.edges[:, 0]]) for writer in writers]
    gates = np.ones(len(gated.names))
    return gated.losses_without_groups(gates, groups) - gated.loss(gates)


_LONGEST = 96  # positions of sequences with segments of random length
_LENGTH = 24  # tokens of a segment, for models of text


def random_segments(function: str, weights: Weights, n: int, rng: np.random.Generator) -> tuple[Array, Array]:
    """Return n sequences with a segment of random length at random offsets, and where it is repeated."""
    context = min(_LONGEST, weights.context or _LONGEST)
    if context < 48:
        raise ArgumentError(
            f"{function}: model must hold sequences of 48 tokens, got a context of {context}; shorter repeats are too "
            "noisy."
        )
    vocab = len(weights.embedding.tokens)  # type: ignore[union-attr]
    return repeated_segments(n, vocab=vocab, context=context, rng=rng)


def segments_twice(
    function: str, weights: Weights, n: int, length: int | None, text: Any, rng: np.random.Generator
) -> tuple[Array, Array]:
    """Return n sequences (n, 2 length), a segment followed by itself, and where its tokens are predictable.

    Segments are of `text` (m,) at random offsets, or of random tokens for None.
    """
    length = as_count(function, "length", _LENGTH if length is None else length, least=4)
    if weights.context is not None and 2 * length > weights.context:
        raise ArgumentError(
            f"{function}: length must be at most {weights.context // 2}, half the context of the model, got {length}; "
            "pass a smaller one."
        )
    embedding: TokenEmbedding = weights.embedding  # type: ignore[assignment]
    if text is None:
        segments = rng.integers(0, len(embedding.tokens), (n, length))
    else:
        tokens = embedding.check(function, text, None, "text")
        if len(tokens) != 1 or tokens.shape[1] < length:
            raise ArgumentError(
                f"{function}: text must be one text of at least {length} tokens, got shape {tokens.shape}; pass a "
                "longer one, or a smaller length."
            )
        starts = rng.integers(0, tokens.shape[1] - length, n, endpoint=True)
        segments = tokens[0, starts[:, None] + np.arange(length)]
    tokens = np.tile(segments, (1, 2))
    return tokens, np.broadcast_to(np.arange(2 * length) > length, tokens.shape).copy()
