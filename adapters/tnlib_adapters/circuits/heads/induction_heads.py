r"""Induction heads: the circuit of a trained model, and a virtual induction head built from delta tensors.

In a trained model: previous-token heads, K-composition, copying, and ablation of the keys. From delta tensors: shift by
one token, match, copy,

    scores_ij = x_i . Match . (Shift x)_j / sqrt(d)        pattern = softmax(scores), causal       out = pattern x Copy

Shift_jk = delta_(k, j - 1) is the pattern of a previous-token head in layer 1; Match and Copy are identities. Keys hold
the preceding token, so position i attends to the tokens that followed earlier occurrences of x_i, and copies them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

import tnlib
from tnlib import ArgumentError
from tnlib._typing import Array
from tnlib._validate import as_array, as_count, as_rng
from tnlib.interop import quimb
from tnlib.linalg.threads import single_threaded_blas
from tnlib_adapters.attention.frozen.residual_product import Head
from tnlib_adapters.checkpoints.checkpoint import Checkpoint, accepts_models
from tnlib_adapters.circuits.composition.head_pairs import compositions
from tnlib_adapters.circuits.discovery.gated_model import GatedModel
from tnlib_adapters.circuits.discovery.gated_terms import attention_only
from tnlib_adapters.circuits.heads.pattern_scores import pattern_scores
from tnlib_adapters.circuits.tokens.copying_and_bigrams import copying_scores
from tnlib_adapters.data.repeats import repeated_segments
from tnlib_adapters.reference.layers import softmax
from tnlib_adapters.reference.model import run
from tnlib_adapters.reference.weights import Weights, read_weights

_LONGEST = 96  # positions of the sampled sequences
_CLEAR = 0.4  # smallest share of attention that makes an induction head


@dataclass(frozen=True, eq=False, repr=False)
class ToyInduction:
    """A virtual induction head on a sequence of vectors, returned by `toy_induction`.

    Parameters
    ----------
    network
        quimb TensorNetwork of the scores, open indices "query" and "key", tensors X, MATCH, X, SHIFT.
    pattern
        (n, n): causal attention weights.
    head
        The frozen head, pattern (x) Copy, again a delta in the features.
    output
        (n, d): output of the head.
    """

    network: Any
    pattern: Array
    head: tnlib.KroneckerTerms
    output: Array

    def __repr__(self) -> str:
        n, d = self.output.shape
        return f"ToyInduction({n} positions x {d} features, scores of {self.network.num_tensors} tensors)"


def toy_induction(x: Array) -> ToyInduction:
    """Return a virtual induction head of delta tensors, applied to a sequence of vectors.

    Parameters
    ----------
    x
        (n, d), real, one row per token; equal tokens have equal rows. Random rows with d entries of unit variance are
        sufficiently distinct.

    Returns
    -------
    ToyInduction
        The network of its scores, its pattern, and its output.

    Raises
    ------
    ArgumentError
        If `x` is not a real matrix.

    References
    ----------
    N. Elhage et al., "A Mathematical Framework for Transformer Circuits" (2021), "Induction heads".

    Examples
    --------
    Ten random vectors, twice; every position of the second half attends to the successor of its first occurrence:

    >>> import numpy as np
    >>> x = np.tile(np.random.default_rng(0).standard_normal((10, 64)), (2, 1))
    >>> toy = toy_induction(x)
    >>> toy.pattern[10:].argmax(axis=1)
    array([ 1,  2,  3,  4,  5,  6,  7,  8,  9, 10])
    """
    x = as_array("toy_induction", "x", x, ndim=2)
    if np.iscomplexobj(x):
        raise ArgumentError(f"toy_induction: x must be real, got {x.dtype}; pass real vectors.")
    import quimb.tensor as qtn

    n, d = x.shape
    shift, match, copy = np.eye(n, k=-1), np.eye(d), np.eye(d)
    queries = qtn.Tensor(x, ("query", "a"), tags="X")
    keys = qtn.Tensor(shift, ("key", "before"), tags="SHIFT") & qtn.Tensor(x, ("before", "b"), tags="X")
    scores = queries & qtn.Tensor(match, ("a", "b"), tags="MATCH") & keys
    s = quimb.contract(scores, legs=("query", "key")) / np.sqrt(d)  # query key [a b before]
    pattern = softmax(np.where(np.tri(n, dtype=bool), s, -np.inf))
    head = tnlib.KroneckerTerms(pattern[None], [copy])
    return ToyInduction(scores, pattern, head, head.apply(x))


@dataclass(frozen=True, eq=False, repr=False)
class Induction:
    """Induction circuit of a model, returned by `find_induction`. Arrays have shape (layers, heads).

    Parameters
    ----------
    previous_token
        Mean attention to the preceding position, over all positions but the first.
    induction
        Mean attention to the tokens that followed earlier occurrences of the current token.
    composition
        K-composition score with the previous-token head, as a multiple of chance; NaN up to and including its layer.
    copying
        Eigenvalue copying score of the circuit from tokens to logits, from -1 to 1.
    lost
        Fraction of the gap between loss and chance that is lost if the keys of later layers do not read this head;
        NaN in the last layer.
    loss, chance
        Loss of the model on repeated tokens and ln(vocab), in nats.
    """

    previous_token: Array
    induction: Array
    composition: Array
    copying: Array
    lost: Array
    loss: float
    chance: float

    @property
    def previous_head(self) -> Head:
        """The head before the last layer with the largest attention to the previous token."""
        return _largest(self.previous_token[:-1])

    @property
    def induction_heads(self) -> tuple[Head, ...]:
        """Heads with at least 40 % of their attention on the induction targets."""
        layers, heads = np.nonzero(self.induction >= _CLEAR)
        return tuple(zip(layers.tolist(), heads.tolist(), strict=True))

    def __repr__(self) -> str:
        layer, head = self.previous_head
        gap = f"loss on repeats {self.loss:.2f}, chance {self.chance:.2f}"
        lines = [
            f"Previous-token head {layer}.{head}; {gap}",
            "  head  one back  induction  K over chance  copying  lost without it in keys",
        ]
        for index in np.ndindex(self.lost.shape):
            k = "" if np.isnan(self.composition[index]) else f"{self.composition[index]:.2f}"
            lost_share = "" if np.isnan(self.lost[index]) else f"{100 * self.lost[index] + 0.0:.1f} %"
            patterns = f"{self.previous_token[index]:10.2f}{self.induction[index]:11.2f}"
            lines.append(
                f"{index[0]:>4}.{index[1]}{patterns}{k:>15}{self.copying[index]:9.2f}{lost_share:>25}".rstrip()
            )
        return "\n".join(lines)


@accepts_models
@single_threaded_blas
def find_induction(model: Checkpoint, *, n: int = 24, rng: int | np.random.Generator = 0) -> Induction:
    """Find the induction circuit of an attention-only model from patterns, weights and ablations.

    A previous-token head writes into every position the token before it. An induction head matches this, in its keys,
    with the current token and copies the attended token.

    Parameters
    ----------
    model
        At least two attention layers without norms and feed-forward layers, and an unembedding.
    n
        Number of sampled sequences of random tokens, each with a segment that occurs twice.
    rng
        Seed or generator for the sampled tokens.

    Returns
    -------
    Induction
        Printed as a table, one row per head.

    Raises
    ------
    ArgumentError
        If the model is not attention-only, or its context is shorter than 48 tokens.

    References
    ----------
    C. Olsson et al., "In-context Learning and Induction Heads" (2022).

    Examples
    --------
    >>> import tnlib_adapters
    >>> found = find_induction(tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path()), n=4)
    >>> found.previous_head, found.induction_heads
    ((0, 3), ((1, 0), (1, 1), (1, 2), (1, 3)))
    >>> bool(found.lost[0, 3] > 0.8), bool((found.lost[0, :3] < 0.1).all())
    (True, True)
    """
    n = as_count("find_induction", "n", n)
    tokens, repeated = _draw(model, n, as_rng("find_induction", rng))
    gated = GatedModel(model, tokens, repeated, "find_induction")
    weights = read_weights(model)
    loss, chance = gated.loss(np.ones(len(gated.names))), math.log(_vocab(weights))
    scores = pattern_scores(run(weights, tokens).patterns, tokens)
    return Induction(
        previous_token=scores.previous,
        induction=scores.induction,
        composition=compositions(model, "K").multiples[_largest(scores.previous[:-1])],
        copying=copying_scores(model),
        lost=(_losses_without(gated, scores.previous.shape) - loss) / (chance - loss),
        loss=loss,
        chance=chance,
    )


def _draw(model: Checkpoint, n: int, rng: np.random.Generator) -> tuple[Array, Array]:
    weights = read_weights(attention_only(model, "find_induction"))
    if model.n_layers < 2:
        raise ArgumentError(
            f"find_induction: model must have at least two attention layers, got {model.n_layers}; "
            "induction takes one to look back and one to match."
        )
    context = min(_LONGEST, weights.context or _LONGEST)
    if context < 48:
        raise ArgumentError(
            f"find_induction: model must hold sequences of 48 tokens, got a context of {context}; "
            "shorter repeats are too noisy."
        )
    return repeated_segments(n, vocab=_vocab(weights), context=context, rng=rng)


def _vocab(weights: Weights) -> int:
    return len(weights.embedding.tokens)  # type: ignore[union-attr]


def _largest(scores: Array) -> Head:
    layer, head = np.unravel_index(int(scores.argmax()), scores.shape)
    return int(layer), int(head)


def _losses_without(gated: GatedModel, shape: tuple[int, ...]) -> Array:
    """Return the loss with each head removed from the keys of later layers, (layers, heads)."""
    losses = np.full(shape, np.nan)
    for layer, head in np.ndindex(shape[0] - 1, *shape[1:]):
        edge = [name.startswith(f"{layer}.{head} -> ") and name.endswith(" K") for name in gated.names]
        losses[layer, head] = gated.loss(np.where(edge, 0.0, 1.0))
    return losses
