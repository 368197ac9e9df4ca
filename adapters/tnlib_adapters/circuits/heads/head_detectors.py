"""Head detectors: previous-token, duplicate-token and induction heads, from attention patterns and from weights.

From patterns, averaged over the positions i that have such a j, in repeated sequences of random tokens:

    previous     attention of position i to i - 1
    duplicate    to all earlier positions j with the same token, t_j = t_i
    induction    to all positions j with t_{j - 1} = t_i: the tokens that followed earlier occurrences

From weights, previous: with the same input at every position, the mean over a text or the mean token embedding plus
learned positions, the scores of a head depend on positions only; the score is the attention of the resulting pattern to
the previous position.

Matching. Let s(t, u) be the score of a query from token t with a key from token u, centred over u, because softmax is
invariant to a shift. The margin of the own token is

    mean over t of s(t, t)  /  root mean square of s    =    tr(T X) / sqrt(tr(T Q T^T K))

a number of standard deviations, at most sqrt(d_head). Q, K and X are d_head x d_head: second moments over tokens of
queries, of centred keys, and of queries with keys, all computed from the second moments of the token stream. T is the
mean over distances of the key rotations where embeddings are rotary.

Duplicate-token heads match a token with itself. Induction takes two heads: a head g that attends to the previous token
and writes the input it read, and a later head h that matches its token with the output of g: the keys are
W_V W_O of g times W_K of h. The score of h is

    max over g in earlier layers of    previous(g) * matching(g, h)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import ArrayLike

from tnlib import ArgumentError, ArgumentTypeError, TnlibError
from tnlib._html import heat_image
from tnlib._typing import Array
from tnlib._validate import as_array, as_count, as_rng, check_choice, is_list
from tnlib.linalg.threads import single_threaded_blas
from tnlib_adapters.attention.attention import Attention
from tnlib_adapters.attention.validation import as_index
from tnlib_adapters.checkpoints.checkpoint import Checkpoint, accepts_models, as_one_stream
from tnlib_adapters.circuits.composition.pair_norms import gram_root, pair_norms, pair_products
from tnlib_adapters.circuits.effective_head import as_length, key_turns, mean_queries_and_keys, stream_head
from tnlib_adapters.circuits.tokens.vocabulary import Inputs, Vocabulary, as_vocabulary
from tnlib_adapters.frozen.frozen_stack import Head
from tnlib_adapters.reference.embedding import TokenEmbedding, as_token_ids
from tnlib_adapters.reference.model import Forward, run
from tnlib_adapters.reference.weights import Weights, as_weights, read_weights
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
    """Return previous-token, duplicate-token and induction scores of every head (C. Olsson et al., 2022).

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
    targets = _targets(rows)
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
    count = as_count("repeat_scores", "n_sequences", n_sequences)
    tokens = _repeats("repeat_scores", weights, count, length, as_rng("repeat_scores", rng))
    patterns = [run(weights, row).patterns for row in tokens]
    return pattern_scores([np.concatenate(layer) for layer in zip(*patterns, strict=True)], tokens)


def _repeats(function: str, weights: Weights, n: int, length: int | None, rng: np.random.Generator) -> Array:
    """Return n sequences (n, 2 length) of a segment of random tokens, followed by itself."""
    vocab = len(weights.embedding.tokens)  # type: ignore[union-attr]
    longest = _LONGEST if weights.context is None else min(_LONGEST, weights.context // 2)
    length = as_count(function, "length", longest if length is None else length, least=2)
    segments = [rng.choice(vocab, length, replace=vocab < length) for _ in range(n)]
    return np.tile(np.stack(segments), (1, 2))


def induction_targets(tokens: Array) -> Array:
    """Return the tokens that followed earlier occurrences of the current one, bool (batch, n, n)."""
    return _targets(tokens)["induction"]


def _targets(tokens: Array) -> dict[HeadKind, Array]:
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


@dataclass(frozen=True, eq=False, repr=False)
class WeightScores(HeadTable):
    """Head scores from weights, returned by `weight_scores`.

    Parameters
    ----------
    previous
        (layers, heads): attention to the previous position in the pattern of the mean token, from 0 to 1.
    duplicate
        (layers, heads): margin of the own token over other tokens, in standard deviations.
    matching
        (layers, heads, layers, heads): the same for keys that read an earlier head; NaN unless it is earlier.
    induction
        (layers, heads): the largest product of `previous` of a writer and its `matching`; 0 in the first layer.
    chance
        `previous` of a head with uniform attention. The chance level of the other scores is 0.
    inputs, tokens
        What heads read for `previous`, and what of a token for the other scores, in words.
    """

    previous: Array
    duplicate: Array
    matching: Array
    induction: Array
    chance: float
    inputs: str = "the mean embedding"
    tokens: str = "embeddings"

    def writer(self, layer: int, head: int) -> tuple[int, int] | None:
        """Return the earlier head with the largest part in the induction score of this one; None in the first layer."""
        layer = as_index("WeightScores.writer", "layer", layer, len(self.previous))
        head = as_index("WeightScores.writer", "head", head, self.previous.shape[1])
        products = np.nan_to_num(self.previous[:, :, None, None] * self.matching)[:, :, layer, head]
        at = np.unravel_index(int(products.argmax()), products.shape)
        return (int(at[0]), int(at[1])) if products[at] > 0 else None

    _SCORES = ("previous", "duplicate", "induction")

    @property
    def _title(self) -> str:
        return f"WeightScores of {self.previous.size} heads"

    def _notes(self) -> list[str]:
        return [
            f"chance: previous {self.chance:.3f}, others 0",
            f"previous: heads read {self.inputs}; duplicate and induction: they read {self.tokens}",
        ]


@accepts_models
@single_threaded_blas
def weight_scores(
    model: Checkpoint,
    *,
    length: int | None = None,
    inputs: Forward | ArrayLike | Literal["embeddings"] | None = None,
    vocabulary: Inputs | Vocabulary | None = None,
) -> WeightScores:
    """Return previous-token, duplicate-token and induction scores of every head, from weights alone.

    The stream is assumed to hold tokens, positions and the output of one earlier head, without the norm between two
    heads. In deep models other layers decide where a head attends: there `previous` is that of their mean input.

    Parameters
    ----------
    model
        A checkpoint or transformers model that reads tokens.
    length
        Sequence length. None: the context of the model, at most 256.
    inputs
        What heads read, for `previous`: the mean input of every layer on tokens (n,) or (batch, n), on a text, or of a
        forward pass, `tnlib_adapters.reference.model.run(model, tokens)`; or "embeddings", the mean embedding plus
        learned positions. None: embeddings for one or two layers, learned positions (which a mean lacks) and models
        that cannot be run; otherwise inputs on repeated random tokens, as in `repeat_scores`.
    vocabulary
        What heads read for the other scores: "first layer" for streams after it, or the result of `read_vocabulary`.

    Returns
    -------
    WeightScores
        `previous`, `duplicate`, `matching`, `induction`.

    Raises
    ------
    ArgumentError
        If queries and keys are normalised, so that scores are not bilinear, or the sequence is too long.

    References
    ----------
    N. Elhage et al., "A Mathematical Framework for Transformer Circuits" (2021), "Mechanistic theory" of induction.

    Examples
    --------
    >>> import tnlib_adapters
    >>> found = weight_scores(tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path()))
    >>> bool(found.previous[0, 3] > 0.8), [found.writer(1, head) for head in range(4)]
    (True, [(0, 3), (0, 3), (0, 3), (0, 3)])
    """
    if not as_one_stream("weight_scores", model, "model").attention(0).is_bilinear:
        raise ArgumentError(
            f"weight_scores: scores of model must be bilinear, but a {model.wiring.model_type} normalises "
            "queries and keys or latent vectors; use repeat_scores, which runs the model."
        )
    words = as_vocabulary("weight_scores", model, vocabulary)
    streams, inputs_text = _mean_inputs(inputs, model, words)
    first, shape = stream_head("weight_scores", model, 0, None), (model.n_layers, model.sizes.n_heads)
    n = as_length("weight_scores", length, words, first.attention)
    moments = words.second_moments(first.norm)
    moved = moments - np.outer(moments[-1], moments[-1])  # centred: the last row is the mean over tokens
    previous, duplicate, factors = np.zeros(shape), np.zeros(shape), []
    for k in range(model.n_layers):
        head = stream_head("weight_scores", model, k, None)
        stream = None if streams is None else streams[k]
        pattern = position_pattern(head.attention, *mean_queries_and_keys(head, words, n, stream))
        previous[k] = np.diagonal(pattern, -1, 1, 2).mean(axis=1)
        duplicate[k], of_layer = _factors(head.attention, moments, moved, n)
        factors.append([a.astype(words.table.dtype) for a in of_layer])
    margins = _of_pairs(_PairFactors(*map(np.concatenate, zip(*factors, strict=True))))
    layer_of = np.repeat(np.arange(shape[0]), shape[1])
    matching = np.where(layer_of[:, None] < layer_of, margins, np.nan).reshape(shape + shape)
    products = np.nan_to_num(previous[:, :, None, None] * matching, nan=0.0)
    return WeightScores(
        previous=previous,
        duplicate=duplicate,
        matching=matching,
        induction=np.maximum(products, 0).max(axis=(0, 1)),
        chance=float((1 / first.attention.mask(n).sum(axis=1)[1:]).mean()),
        inputs=inputs_text,
        tokens=words.inputs_text,
    )


def _mean_inputs(inputs: Any, model: Checkpoint, words: Vocabulary) -> tuple[tuple[Array, ...] | None, str]:
    """Return the stream before every layer, None for embeddings, and what heads read, in words."""
    embeddings = None, "the mean embedding"
    if (inputs is None and (model.n_layers < 3 or words.positions is not None)) or str(inputs) == "embeddings":
        return embeddings
    if inputs is None:
        try:
            weights = read_weights(model, dtype=words.table.dtype)
        except TnlibError:
            return embeddings
        tokens = _repeats("weight_scores", weights, 4, None, np.random.default_rng(0))
        return run(replace(weights, unembed=None), tokens).residuals, "the mean input of every layer on random tokens"
    if not isinstance(inputs, Forward):
        weights = replace(read_weights(model, dtype=words.table.dtype), unembed=None)
        embedding: TokenEmbedding = weights.embedding  # type: ignore[assignment]
        inputs = run(weights, embedding.check("weight_scores", inputs, weights.context, "inputs"))
    if len(inputs.patterns) != model.n_layers or inputs.hidden.shape[-1] != model.sizes.d_model:
        raise ArgumentError(
            f"weight_scores: inputs must be those of this model, {model.n_layers} layers of {model.sizes.d_model} "
            f"features, got {len(inputs.patterns)} of {inputs.hidden.shape[-1]}; pass run(model, tokens)."
        )
    return inputs.residuals, "the mean input of every layer on a text"


def position_pattern(layer: Attention, queries: Array, keys: Array) -> Array:
    """Return the patterns (heads, n, n) of queries and keys (heads, n, d_head) before their rotation."""
    positions = np.arange(queries.shape[1])
    q, k = layer.as_queries(queries, queries, positions), layer.as_keys(keys, keys, positions)
    return layer.patterns_of(layer.scores_of(q, k, positions[:, None] - positions))


class _PairFactors(NamedTuple):
    """Factors of the margins of the heads of one layer as readers and as writers.

    For a writer g and a reader h with keys `reads` and `writes` of g times `key` of h, the margin is

        <reads[g] writes[g], towards[h] key[h]^T>  /  || written[g] matched[h]^T ||
    """

    key: Array  # (heads, d~, r)
    towards: Array  # (heads, d~, r), X T^T
    matched: Array  # (heads, r, d), root of T Q T^T, times the key
    reads: Array  # (heads, d~, r)
    writes: Array  # (heads, r, d)
    written: Array  # (heads, r, d), root of the second moments of the values, times `writes`


def _factors(layer: Attention, moments: Array, moved: Array, n: int) -> tuple[Array, _PairFactors]:
    """Return the margins for keys that read the stream of tokens, (heads,), and the factors of those of pairs.

    `moved` (d~, d~) are the centred second `moments` of the stream.
    """
    query, key, value = (layer.with_bias(name) for name in "QKV")
    key, value = layer.repeated(key), layer.repeated(value)
    turns = key_turns(layer, np.arange(1, n))
    query = query if turns is None else query @ turns.mean(axis=0).T
    towards = moved @ query  # h d~ [d~] r
    of_queries, of_keys, of_values = (
        x.swapaxes(1, 2) @ m @ x
        for x, m in ((query, moments), (key, moved), (value, moved))  # h r [d~] [d~] r
    )
    matched = gram_root(of_queries) @ key[:, :-1].swapaxes(1, 2)  # h r [r] d
    written = gram_root(of_values) @ layer.W_O  # h r [r] d
    traces, squares = np.einsum("hdr,hdr->h", towards, key), np.einsum("hab,hab->h", of_queries, of_keys)
    margins = _quotient(traces, np.sqrt(np.maximum(squares, 0)))
    return margins, _PairFactors(key, towards, matched, value, layer.W_O, written)


def _of_pairs(factors: _PairFactors) -> Array:
    """Return the margin for keys that read a head, (writers, readers)."""
    traces = pair_products(factors.reads, factors.writes, factors.towards, factors.key[:, :-1].swapaxes(1, 2))
    return _quotient(traces, pair_norms(factors.written, factors.matched))


def _quotient(traces: Array, rms: Array) -> Array:
    return np.divide(traces, rms, out=np.zeros_like(traces), where=rms > 0)
