"""Findings of an inspection in sentences, each with the section of the page that holds its evidence."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from tnlib._typing import Array
from tnlib_adapters.circuits import PatternScores, pattern_scores
from tnlib_adapters.circuits.arguments import READS, head_name
from tnlib_adapters.circuits.heads.pattern_scores import HeadKind
from tnlib_adapters.frozen.frozen_stack import Head
from tnlib_adapters.inspection.head_measurements import effective_rank
from tnlib_adapters.inspection.measure import Inspection

CLEAR = 0.4  # smallest score, a share of attention, that gives a head its name
_COPIES = 0.9  # smallest copying score of a head that copies
_SINK = 0.5  # share of attention on the first token that is pointed out
_MOST_HEADS = 6  # listed by name
_ATTENDS: dict[HeadKind, str] = {
    "previous": "to the previous token",
    "duplicate": "to earlier occurrences of the same token",
    "induction": "to the token after an earlier occurrence of the same token (induction)",
}


class Finding(NamedTuple):
    """One sentence or two, and the id of the section with the evidence."""

    text: str
    section: str


def findings(inspection: Inspection) -> list[Finding]:
    """Return what the measurements say about the heads of a model, the most specific findings first.

    Examples
    --------
    >>> import tnlib_adapters
    >>> from pathlib import Path
    >>> from tnlib_adapters.compression.request import quiet
    >>> from tnlib_adapters.inspection.measure import measure
    >>> checkpoint = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path())
    >>> inspection = measure(checkpoint, tokens=None, page=Path("inspect.html"), progress=quiet)
    >>> findings(inspection)[0].text
    'Head 0.3 attends to the previous token: 0.87 of its attention on repeated random tokens, chance 0.04.'
    """
    parts = (_named_heads, _circuit, _first_token, _copying, _composition, _ranks, _gauge)
    return [finding for part in parts for finding in part(inspection)]


def _named_heads(inspection: Inspection) -> Iterator[Finding]:
    """Name the heads with clear scores on repeated random tokens."""
    scores = inspection.readings.scores
    if scores is None:
        return
    for kind, target in _ATTENDS.items():
        heads = _clear_heads(scores, kind)
        if not heads:
            continue
        is_single = len(heads) == 1
        values = sorted(score for _, score in heads)
        share = f"{values[0]:.2f}" if is_single else f"{values[0]:.2f} to {values[-1]:.2f}"
        yield Finding(
            f"{_heads([head for head, _ in heads])} {'attends' if is_single else 'attend'} {target}: {share} of "
            f"{'its' if is_single else 'their'} attention on repeated random tokens, chance {scores.chance[kind]:.2f}.",
            "heads",
        )
    if not _clear_heads(scores, "induction"):
        (head, score), *_ = scores.largest("induction", 1) or [((0, 0), 0.0)]
        yield Finding(
            f"No head is an induction head: the largest score is {score:.2f}, of head {head_name(head)}.", "heads"
        )


def _circuit(inspection: Inspection) -> Iterator[Finding]:
    """State the loss without the previous-token head in the keys, for an attention-only model."""
    induction = inspection.readings.induction
    if induction is None or not np.isfinite(induction.lost).any():
        return
    head = divmod(int(np.nanargmax(induction.lost)), induction.lost.shape[1])
    share = float(induction.lost[head])
    if share >= CLEAR:
        yield Finding(
            f"Induction depends on head {head_name(head)}: if the keys of later layers do not read it, "
            f"{100 * share:.0f} % of the gap between the loss of chance and the loss on repeated tokens is lost.",
            "heads",
        )


def _first_token(inspection: Inspection) -> Iterator[Finding]:
    """Point out heads that attend to the first token of the text, and induction heads that do so there."""
    if inspection.patterns is None or inspection.tokens is None:
        return
    sinks = {
        (layer, head): float(share)
        for layer, of_layer in enumerate(inspection.patterns)
        for head, share in enumerate(of_layer[:, 1:, 0].mean(axis=1))
        if share > _SINK
    }
    scores, short = inspection.readings.scores, inspection.readings.short_scores
    inductive = dict(_clear_heads(scores, "induction")) if scores is not None else {}
    on_text = pattern_scores(inspection.patterns, inspection.tokens.ids).induction
    for head in sinks.keys() & inductive.keys():
        if short is None or not np.isfinite(on_text[head]) or on_text[head] >= CLEAR:
            continue
        text = (
            f"On the text shown, head {head_name(head)} gives {100 * sinks[head]:.0f} % of its attention to the first "
            f"token, although its induction score is {inductive[head]:.2f}."
        )
        if short.induction[head] < CLEAR:
            text += (
                " It is an induction head at later positions only: on a repeated segment of at most 16 tokens its "
                f"score is {short.induction[head]:.2f}."
            )
        yield Finding(text, "patterns")
    if others := sorted(sinks.keys() - inductive.keys()):
        verb = "gives" if len(others) == 1 else "give"
        yield Finding(
            f"On the text shown, {_heads(others, capital=False)} {verb} more than half of the attention to the first "
            "token.",
            "patterns",
        )


def _copying(inspection: Inspection) -> Iterator[Finding]:
    scores = inspection.readings.copying
    if scores is None:
        return
    heads = [_at(scores, int(k)) for k in np.flatnonzero(scores >= _COPIES)]
    if heads:
        verb, effect = ("copies", "it raises") if len(heads) == 1 else ("copy", "they raise")
        yield Finding(
            f"{_heads(heads)} {verb}: {effect} the logits of the attended tokens (copying score at least {_COPIES}).",
            "heads",
        )


def _composition(inspection: Inspection) -> Iterator[Finding]:
    """State the strongest pair of heads over all kinds of composition."""
    pairs = [
        (score.multiple, READS[scores.kind] + name[1:], writer, reader)  # with "at distance 1"
        for name, scores in inspection.compositions.items()
        for writer, reader, score in scores.largest(1)
    ]
    if pairs:
        multiple, read, writer, reader = max(pairs)
        yield Finding(
            f"Strongest composition: head {head_name(reader)} reads the output of head {head_name(writer)} by its "
            f"{read}, with a composition score of {multiple:.2f} times its chance value.",
            "composition",
        )


def _ranks(inspection: Inspection) -> Iterator[Finding]:
    """State the range of the effective ranks of the OV operators."""
    ranks = effective_rank(inspection.spectra.ov)
    low, high = (_at(ranks, int(k)) for k in (ranks.argmin(), ranks.argmax()))
    if ranks.size > 1:
        yield Finding(
            f"The effective rank of the OV operators lies between {ranks[low]:.1f} (head {head_name(low)}) and "
            f"{ranks[high]:.1f} (head {head_name(high)}); the largest possible value is "
            f"{inspection.spectra.ov.shape[2]}.",
            "spectra",
        )


def _gauge(inspection: Inspection) -> Iterator[Finding]:
    n_free, n_numbers = (sum(getattr(report, name) for report in inspection.gauges) for name in ("n_free", "n_numbers"))
    if n_free:
        yield Finding(
            f"{100 * n_free / n_numbers:.0f} % of the attention parameters are gauge freedom: they can change "
            "without a change of the output.",
            "gauge",
        )


def _clear_heads(scores: PatternScores, kind: HeadKind) -> list[tuple[Head, float]]:
    return sorted((head, score) for head, score in scores.largest(kind, scores.previous.size) if score >= CLEAR)


def _at(values: Array, k: int) -> Head:
    layer, head = divmod(int(k), values.shape[1])
    return layer, head


def _heads(heads: Sequence[Head], *, capital: bool = True) -> str:
    """Return the names of heads as an enumeration.

    >>> _heads([(0, 1), (0, 2), (1, 3)])
    'Heads 0.1, 0.2 and 1.3'
    """
    names = [head_name(head) for head in heads[:_MOST_HEADS]]
    if len(heads) > _MOST_HEADS:
        names[-1] = f"{len(heads) - _MOST_HEADS + 1} more"
    listed = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
    noun = "head" if len(names) == 1 else "heads"
    return f"{noun.capitalize() if capital else noun} {listed}"
