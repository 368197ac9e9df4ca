"""Head scores, copying, subspace overlaps and heads in tokens, for the inspection page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import numpy as np

from tnlib import TnlibError
from tnlib._typing import Array
from tnlib_adapters.architectures.table import ATTENTION_ONLY
from tnlib_adapters.attention.attention import Attention
from tnlib_adapters.attention.frozen.residual_product import Head
from tnlib_adapters.checkpoints.checkpoint import Checkpoint
from tnlib_adapters.circuits import (
    Compositions,
    HeadReading,
    Induction,
    Overlaps,
    PatternScores,
    Vocabulary,
    copying,
    find_induction,
    read_head,
    read_vocabulary,
    repeat_scores,
    subspace_overlaps,
)
from tnlib_adapters.compression.progress import Progress
from tnlib_adapters.reference.weights import Weights

Doing: TypeAlias = Literal["previous", "duplicate", "induction"]
Reader: TypeAlias = Literal["Q", "K", "V"]

_MOST_READ = 8  # largest number of heads shown in tokens
_MOST_WORK = 1e11  # multiplications with the vocabulary for the heads shown in tokens
_MOST_COPIED = 8e11  # multiplications for copying scores: all heads of GPT-2 small


@dataclass(frozen=True, eq=False)
class Readings:
    """Head scores and heads in tokens.

    Parameters
    ----------
    scores
        Pattern scores on repeated random tokens; None if the model is not run.
    copying
        Eigenvalue copying scores (layers, heads), NaN where not measured; None without an unembedding.
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
    copying: Array | None
    heads: tuple[HeadReading, ...]
    overlaps: Mapping[Reader, Overlaps]
    induction: Induction | None
    notes: tuple[str, ...]


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
    scores, notes = None, []
    if weights is not None and (weights.context is None or weights.context >= 4):
        scores = repeat_scores(weights, n_sequences=1)
    progress("reading tokens", 1, 3)
    words: Vocabulary | None = None
    if checkpoint.architecture.reads == "tokens":
        try:
            words = read_vocabulary(checkpoint)
        except TnlibError as problem:  # attention weights only: no embedding
            notes.append(f"Tokens are not named: {problem}")
    copied = None if words is None else _copying(checkpoint, len(layers), words, progress)
    if copied is not None and np.isnan(copied).any():
        notes.append("Copying is measured in the first layers only: the vocabulary is large.")
    progress("reading tokens", 2, 3)
    chosen = [] if words is None else _chosen(checkpoint, len(layers), len(words), scores, compositions)
    heads = tuple(read_head(checkpoint, *head, distance=distance, vocabulary=words) for head in chosen)
    progress("reading tokens", 3, 3)
    overlaps = {by: subspace_overlaps(layers, "O", by, centred=centred) for by in get_args(Reader) if len(layers) > 1}
    return Readings(scores, copied, heads, overlaps, _induction(checkpoint), tuple(notes))


def _induction(checkpoint: Checkpoint) -> Induction | None:
    """Return the induction circuit, None if the model is not attention-only or its context is too short."""
    if checkpoint.architecture is not ATTENTION_ONLY:
        return None
    try:
        return find_induction(checkpoint, n=8)
    except TnlibError:
        return None


def _copying(checkpoint: Checkpoint, n_layers: int, words: Vocabulary, progress: Progress) -> Array | None:
    """Return the copying scores (layers, heads) of as many layers as can be measured in seconds."""
    if not words.ends_in_logits:
        return None
    sizes = checkpoint.sizes
    work = 2 * len(words) * sizes.d_head * sizes.d_model
    measured = min(n_layers, max(1, int(_MOST_COPIED / (work * sizes.n_heads))))
    scores = np.full((n_layers, sizes.n_heads), np.nan)
    for at in np.ndindex(measured, sizes.n_heads):
        progress("measuring copying", at[0], measured)
        scores[at] = copying(checkpoint, *at, vocabulary=words, sample=1).score
    progress("measuring copying", measured, measured)
    return scores


def _chosen(
    checkpoint: Checkpoint,
    n_layers: int,
    vocab: int,
    scores: PatternScores | None,
    compositions: Mapping[str, Compositions],
) -> list[Head]:
    """Return the heads with the highest scores, then those of the strongest pairs."""
    candidates: list[Head] = (
        [] if scores is None else [head for doing in get_args(Doing) for head, _ in scores.largest(doing, 1)]
    )
    for scores_of_kind in compositions.values():
        candidates += [head for writer, reader, _ in scores_of_kind.largest(1) for head in (writer, reader)]
    if n_layers * checkpoint.sizes.n_heads <= _MOST_READ:
        candidates += [(layer, head) for layer in range(n_layers) for head in range(checkpoint.sizes.n_heads)]
    chosen = dict.fromkeys(head for head in candidates if head[0] < n_layers)
    work = 8 * vocab * checkpoint.sizes.d_model * checkpoint.sizes.d_head
    return sorted(list(chosen)[: max(1, min(_MOST_READ, int(_MOST_WORK / work)))])
