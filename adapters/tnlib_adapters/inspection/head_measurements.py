r"""Measurements of attention heads for the inspection page: spectra, gauge freedom, head scores, heads in tokens.

Schmidt values are the singular values of an operator, those of the bond between its two sides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

import numpy as np

from tnlib import LowRank, TnlibError
from tnlib._typing import Array
from tnlib.linalg.orthogonal import r_factor
from tnlib.linalg.threads import single_threaded_blas
from tnlib_adapters.attention.attention import Attention
from tnlib_adapters.attention.head_gauge import Columns
from tnlib_adapters.checkpoints.checkpoint import Checkpoint
from tnlib_adapters.circuits import (
    Compositions,
    CopyingScores,
    HeadReading,
    Induction,
    Overlaps,
    PatternScores,
    Vocabulary,
    find_induction,
    read_head,
    read_vocabulary,
    repeat_scores,
)
from tnlib_adapters.circuits.arguments import Kind
from tnlib_adapters.circuits.composition.head_subspaces import overlaps_with
from tnlib_adapters.circuits.heads.pattern_scores import HeadKind
from tnlib_adapters.circuits.tokens.copying import scores_of_inputs
from tnlib_adapters.circuits.tokens.vocabulary import with_inputs
from tnlib_adapters.compression.progress import Progress
from tnlib_adapters.frozen.frozen_stack import Head
from tnlib_adapters.reference.weights import Weights

_SHORT = 16  # tokens of the short repeated segment
_MOST_READ = 8  # largest number of heads shown in tokens
MOST_WORK = 1e11  # multiplications with the vocabulary for the heads shown in tokens
MOST_COPIED = 4e11  # multiplications for copying scores of all heads: a minute
_OF_A_BLOCK = 12  # d_model^2 parameters, about


@dataclass(frozen=True, eq=False)
class Spectra:
    """Singular values (Schmidt values) of the operators of all heads, descending.

    Parameters
    ----------
    qk
        Maps a distance (None where scores do not depend on it) to values (layers, heads, rank).
    ov
        (layers, heads, d_head).
    """

    qk: Mapping[int | None, Array]
    ov: Array


@single_threaded_blas
def spectra(layers: Sequence[Attention], distances: Sequence[int | None]) -> Spectra:
    """Return the singular values of the QK operators at some distances and of the OV operators, biases included."""

    def of(distance: int | None) -> Array:
        return np.array([[_values(layer.qk(h, distance)) for h in range(layer.n_heads)] for layer in layers])

    ov = np.array([[_values(layer.ov(h)) for h in range(layer.n_heads)] for layer in layers])
    return Spectra({distance: of(distance) for distance in distances}, ov)


@dataclass(frozen=True)
class GaugeReport:
    """Gauge degrees of freedom and norms of the weights of a layer.

    Parameters
    ----------
    n_parameters, n_free
        Number of weights and biases of the layer, and number of gauge degrees of freedom among them.
    queries_to_keys, values_to_outputs
        Smallest and largest quotient of norms over key and value heads: 1 in the balanced gauge.
    """

    n_parameters: int
    n_free: int
    queries_to_keys: tuple[float, float]
    values_to_outputs: tuple[float, float]


@single_threaded_blas
def gauge_report(layer: Attention) -> GaugeReport:
    """Return the gauge degrees of freedom of a layer and how far it is from the balanced gauge."""
    group = layer.group_size
    queries, outputs = (_by_key_head(w, group) for w in (layer.W_Q, layer.W_O))
    keys, values = (_by_key_head(w, 1) for w in (layer.W_K, layer.W_V))
    arrays = (getattr(layer, name) for name in ("W_Q", "W_K", "W_V", "W_O", "b_Q", "b_K", "b_V", "b_O"))
    return GaugeReport(
        sum(a.size for a in arrays if a is not None),
        layer.kv_heads * (_free_scores(layer) + _free_values(layer)),
        _range(queries, keys),
        _range(values, outputs),
    )


def _values(operator: LowRank) -> Array:
    left, right = (r_factor(a.astype(np.float64)) for a in (operator.left, operator.right.T))
    return np.asarray(np.linalg.svd(left @ right.T, compute_uv=False))


def _by_key_head(weights: Array, group: int) -> Array:
    """Return the norms of all groups of heads that share a key and value head, (kv_heads,)."""
    squares = np.square(weights.astype(np.float64)).sum(axis=(1, 2)).reshape(-1, group)
    return np.asarray(np.sqrt(squares.sum(axis=1)))


def _range(a: Array, b: Array) -> tuple[float, float]:
    ratio = np.where(b > 0, a / np.where(b > 0, b, 1), np.inf)
    return float(ratio.min()), float(ratio.max())


def _free_scores(layer: Attention) -> int:
    """Count the gauge freedom of the scores of one key head: GL on unrotated columns, a complex factor per plane."""
    columns = Columns.of(layer.rotary, layer.d_head)
    if layer.head_norm is not None:
        return 0  # only signs and quarter turns, a discrete group
    still = len(columns.still)
    bias = still if layer.b_K is not None and layer.softcap is None else 0
    return still**2 + 2 * len(columns.planes[0]) + sum(2 * len(a) ** 2 for a, _ in columns.alike) + bias


def _free_values(layer: Attention) -> int:
    bias = layer.d_value if layer.b_V is not None and layer.b_O is not None else 0
    return layer.d_value**2 + bias


@dataclass(frozen=True, eq=False)
class Readings:
    """Head scores and heads in tokens.

    Parameters
    ----------
    scores, short_scores
        Pattern scores on a repeated segment of up to 50 random tokens, and on one of up to 16: a head may depend on the
        position. None if the model is not run.
    copying
        Eigenvalue copying scores of all heads by their inputs; None without an unembedding, or if it is large.
    heads
        Some heads in tokens: those with the highest scores, and those of the strongest compositions.
    overlaps
        Overlaps of output subspaces with subspaces read by "Q", "K" or "V".
    induction
        Induction circuit of an attention-only model; None for other models.
    notes
        Sentences on omissions.
    """

    scores: PatternScores | None
    short_scores: PatternScores | None
    copying: CopyingScores | None
    heads: tuple[HeadReading, ...]
    overlaps: Mapping[Kind, Overlaps]
    induction: Induction | None
    notes: tuple[str, ...]

    @property
    def has_scores(self) -> bool:
        """True if there are pattern scores or copying scores."""
        return self.scores is not None or self.copying is not None


def read_heads(
    checkpoint: Checkpoint,
    layers: Sequence[Attention],
    weights: Weights | None,
    compositions: Mapping[str, Compositions],
    *,
    distance: int | None,
    centred: bool,
    progress: Progress,
) -> Readings:
    """Return the measurements of the heads of the shown layers; `weights` are None for a model that is not run."""
    progress("reading tokens", 0, 3)
    scores, short_scores, notes = None, None, []
    if weights is not None and (weights.context is None or weights.context >= 4):
        scores = repeat_scores(weights, n_sequences=1)
        short = _SHORT if weights.context is None else min(_SHORT, weights.context // 2)
        short_scores = repeat_scores(weights, n_sequences=1, length=short)
    progress("reading tokens", 1, 3)
    words: Vocabulary | None = None
    if checkpoint.wiring.reads == "tokens":
        try:
            words = read_vocabulary(checkpoint)
        except TnlibError as problem:  # attention weights only: no embedding
            notes.append(f"Tokens are not named: {problem}")
    copying = None
    if words is not None and words.ends_in_logits:
        if len(words) * checkpoint.sizes.d_model**2 <= MOST_COPIED:
            inputs = [words]
            work = len(words) * _OF_A_BLOCK * checkpoint.sizes.d_model**2
            if weights is not None and checkpoint.n_layers > 1 and work <= MOST_COPIED:
                inputs.append(with_inputs(checkpoint, words, "first layer"))
            copying = scores_of_inputs(checkpoint, inputs)
        else:
            notes.append("Copying is not measured: the vocabulary is large.")
    progress("reading tokens", 2, 3)
    heads: tuple[HeadReading, ...] = ()
    if words is not None:
        chosen = _choose_heads(checkpoint, len(layers), len(words), scores, compositions)
        heads = tuple(read_head(checkpoint, *head, distance=distance, inputs=words) for head in chosen)
    progress("reading tokens", 3, 3)
    overlaps: dict[Kind, Overlaps] = {}
    if len(layers) > 1:
        overlaps = dict(zip(get_args(Kind), overlaps_with(layers, "O", get_args(Kind), centred), strict=True))
    return Readings(scores, short_scores, copying, heads, overlaps, _induction(checkpoint), tuple(notes))


def _induction(checkpoint: Checkpoint) -> Induction | None:
    """Return the induction circuit, None if the model is not attention-only or its context is too short."""
    if not checkpoint.wiring.is_attention_only:
        return None
    try:
        return find_induction(checkpoint, n=8)
    except TnlibError:
        return None


def _choose_heads(
    checkpoint: Checkpoint,
    n_layers: int,
    vocab: int,
    scores: PatternScores | None,
    compositions: Mapping[str, Compositions],
) -> list[Head]:
    """Return the heads with the highest scores, then those of the strongest pairs."""
    candidates: list[Head] = (
        [] if scores is None else [head for kind in get_args(HeadKind) for head, _ in scores.largest(kind, 1)]
    )
    for scores_of_kind in compositions.values():
        candidates += [head for writer, reader, _ in scores_of_kind.largest(1) for head in (writer, reader)]
    if n_layers * checkpoint.sizes.n_heads <= _MOST_READ:
        candidates += [(layer, head) for layer in range(n_layers) for head in range(checkpoint.sizes.n_heads)]
    chosen = dict.fromkeys(head for head in candidates if head[0] < n_layers)
    work = 8 * vocab * checkpoint.sizes.d_model * checkpoint.sizes.d_head
    return list(chosen)[: max(1, min(_MOST_READ, int(MOST_WORK / work)))]
