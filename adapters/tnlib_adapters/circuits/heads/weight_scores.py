"""Head detectors from weights: previous-token, duplicate-token and induction heads.

Previous tokens: with the same input at every position, the mean over a text or the mean token embedding plus learned
positions, the scores of a head depend on positions only; the score is the attention of the resulting pattern to the
previous position.

Matching. Let s(t, u) be the score of a query from token t with a key from token u, centred over u, because softmax is
invariant to a shift. The margin of the own token is

    mean over t of s(t, t)  /  root mean square of s    =    tr(T X) / sqrt(tr(T Q T^T K))

a number of standard deviations, at most sqrt(d_head). Q, K and X are d_head x d_head: second moments over tokens of
queries, of centred keys, and of queries with keys, all computed from the second moments of the token stream. T is the
mean over distances of the key rotations where embeddings are rotary.

Duplicate-token heads match a token with itself. Induction takes two heads: a head g that attends to the previous token
and writes the input it read, and a later head h that matches its token with the output of g: the keys are
W_V W_O of g times W_K of h. The score of h is a share of attention, that of a head that attends to its highest score:

    max over g in earlier layers of    previous(g) * p(margin(g, h))

    p(m) = P(m + x_0 > x_1, ..., x_n)  =  int phi(x) Phi(m + x)^n dx

p is the probability that the own token has a higher score than the n other keys that a query has on average, with
normal deviations x_k of all scores. It is 1 / (n + 1) for m = 0, and a half for m = 2.5 and n = 100.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from tnlib import ArgumentError, TnlibError
from tnlib._typing import Array
from tnlib.linalg.threads import single_threaded_blas
from tnlib_adapters.attention.attention import Attention
from tnlib_adapters.attention.validation import as_index
from tnlib_adapters.checkpoints.checkpoint import Checkpoint, accepts_models, as_one_stream
from tnlib_adapters.circuits.composition.pair_norms import gram_root, pair_norms, pair_products, quotient
from tnlib_adapters.circuits.effective_head import as_length, key_turns, mean_queries_and_keys, stream_head
from tnlib_adapters.circuits.heads.pattern_scores import HeadKind, repeated_tokens
from tnlib_adapters.circuits.tokens.vocabulary import Inputs, Vocabulary, as_vocabulary
from tnlib_adapters.reference.embedding import TokenEmbedding
from tnlib_adapters.reference.model import Forward, run
from tnlib_adapters.reference.weights import read_weights
from tnlib_adapters.result_table import HeadTable

_STEP, _LARGEST = 0.25, 6.0  # nodes of the integral over a normal deviation: the trapezoidal rule is exact to 1e-7


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
    shares
        (layers, heads, layers, heads), from 0 to 1: `previous` of the earlier head times the probability that with its
        `matching` the own token has the highest score of all keys; NaN as there.
    induction
        (layers, heads): the largest of the `shares`; 0 in the first layer.
    chance
        The three scores of a head with uniform attention, for `induction` behind a perfect previous-token head.
    inputs, tokens
        What heads read for `previous`, and what of a token for the other scores, in words.

    References
    ----------
    N. Elhage et al., "A Mathematical Framework for Transformer Circuits" (2021), "Mechanistic theory" of induction.

    Examples
    --------
    >>> import tnlib_adapters
    >>> found = weight_scores(tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path()))
    >>> found.induction[1].round(1), found.writer(1, 2), round(found.chance["induction"], 2)
    (array([0.7, 0.7, 0.7, 0.7]), (0, 3), 0.02)
    """

    previous: Array
    duplicate: Array
    matching: Array
    shares: Array
    induction: Array
    chance: dict[HeadKind, float]
    inputs: str = "the mean embedding"
    tokens: str = "embeddings"

    def writer(self, layer: int, head: int) -> tuple[int, int] | None:
        """Return the earlier head with the largest part in the induction score of this one; None in the first layer."""
        layer = as_index("WeightScores.writer", "layer", layer, len(self.previous))
        head = as_index("WeightScores.writer", "head", head, self.previous.shape[1])
        shares = np.nan_to_num(self.shares[:, :, layer, head])
        at = divmod(int(shares.argmax()), shares.shape[1])
        return at if shares[at] > 0 else None

    _SCORES = ("previous", "duplicate", "induction")

    @property
    def _title(self) -> str:
        return f"WeightScores of {self.previous.size} heads"

    def _notes(self) -> list[str]:
        return [
            "chance: " + ", ".join(f"{kind} {chance:.3f}" for kind, chance in self.chance.items()),
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
        forward pass, `tnlib_adapters.reference.run(model, tokens)`; or "embeddings", the mean embedding plus
        learned positions. None: embeddings for one or two layers, learned positions (which a mean lacks) and models
        that cannot be run; otherwise inputs on repeated random tokens, as in `repeat_scores`.
    vocabulary
        What heads read for the other scores: "first layer" for streams after it, or the result of `read_vocabulary`.

    Returns
    -------
    WeightScores
        `previous`, `duplicate`, `matching`, `shares`, `induction`.

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
    previous, duplicate, factors, n_others = np.zeros(shape), np.zeros(shape), [], np.zeros(shape)
    for k in range(model.n_layers):
        head = stream_head("weight_scores", model, k, None)
        stream = None if streams is None else streams[k]
        pattern = position_pattern(head.attention, *mean_queries_and_keys(head, words, n, stream))
        previous[k] = np.diagonal(pattern, -1, 1, 2).mean(axis=1)
        n_others[k] = head.attention.mask(n).sum() / n - 1
        duplicate[k], of_layer = _factors(head.attention, moments, moved, n)
        factors.append([a.astype(words.table.dtype) for a in of_layer])
    pairs = _PairFactors(*map(np.concatenate, zip(*factors, strict=True)))
    traces = pair_products(pairs.reads, pairs.writes, pairs.towards, pairs.key[:, :-1].swapaxes(1, 2))
    margins = quotient(traces, pair_norms(pairs.written, pairs.matched))  # writer reader
    layer_of = np.repeat(np.arange(shape[0]), shape[1])
    matching = np.where(layer_of[:, None] < layer_of, margins, np.nan).reshape(shape + shape)
    shares = previous[:, :, None, None] * highest_of(matching, n_others)
    return WeightScores(
        previous=previous,
        duplicate=duplicate,
        matching=matching,
        shares=shares,
        induction=np.nan_to_num(shares).max(axis=(0, 1)),
        chance={
            "previous": float((1 / first.attention.mask(n).sum(axis=1)[1:]).mean()),
            "duplicate": 0.0,
            "induction": float(1 / (1 + n_others[-1].mean())),
        },
        inputs=inputs_text,
        tokens=words.inputs_text,
    )


def highest_of(margins: Array, n: Array) -> Array:
    """Return the probability p(m) that m plus a normal deviation is above n others, for m and n that broadcast."""
    from scipy.special import ndtr

    nodes = np.arange(-_LARGEST, _LARGEST + _STEP, _STEP)
    weights = np.exp(-np.square(nodes) / 2) * (_STEP / np.sqrt(2 * np.pi))
    return np.asarray(sum(weight * ndtr(margins + x) ** n for x, weight in zip(nodes, weights, strict=True)))


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
        tokens = repeated_tokens("weight_scores", weights, 4, None, np.random.default_rng(0))
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
    margins = quotient(traces, np.sqrt(np.maximum(squares, 0)))
    return margins, _PairFactors(key, towards, matched, value, layer.W_O, written)
