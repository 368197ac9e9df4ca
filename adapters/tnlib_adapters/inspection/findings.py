"""Findings: what the measurements of a checkpoint say, in sentences with the numbers behind them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from tnlib_adapters.circuits import PatternScores, pattern_scores
from tnlib_adapters.circuits.arguments import READS, head_name
from tnlib_adapters.circuits.heads.pattern_scores import HeadKind
from tnlib_adapters.circuits.heads.singular_vectors import effective_rank
from tnlib_adapters.frozen.frozen_stack import Head
from tnlib_adapters.inspection.measure import Inspection
from tnlib_adapters.inspection.sections import OVERLAP_HEADINGS, overlap_cells, overlap_rows
from tnlib_adapters.result_table import descending

CLEAR = 0.4  # smallest score, a share of attention, that gives a head its name
_COPIES = 0.9  # smallest copying score of a head that copies
_SINK = 0.5  # share of attention on the first token that is pointed out
_MOST_HEADS = 6  # listed by name
_FAR = 5.0  # standard deviations above chance of an overlap that is pointed out
_ATTENDS: dict[HeadKind, str] = {
    "previous": "to the previous token",
    "duplicate": "to earlier occurrences of the same token",
    "induction": "to the token after an earlier occurrence of the same token (induction)",
}


class Finding(NamedTuple):
    """One sentence or two, the id of the section with the evidence, and a table of the numbers: headings and rows."""

    text: str
    section: str
    numbers: tuple[Sequence[str], Sequence[Sequence[str]]] = ((), ())


def findings(inspection: Inspection) -> list[Finding]:
    """Return what the measurements say about the heads of a model, the most specific findings first.

    Examples
    --------
    >>> import tnlib_adapters
    >>> from pathlib import Path
    >>> from tnlib_adapters.compression.progress import quiet
    >>> from tnlib_adapters.inspection.measure import measure
    >>> model = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path())
    >>> inspection = measure(model, tokens=None, page=Path("inspect.html"), progress=quiet)
    >>> findings(inspection)[0].text
    'Head 0.3 attends to the previous token: 0.87 of its attention on repeated random tokens, chance 0.04.'
    """
    parts = (_prediction, _named_heads, _induction, _circuit, _first_token, _copying, _composition, _ranks, _gauge)
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
        share = f"{heads[0][1]:.2f}" if is_single else f"{heads[-1][1]:.2f} to {heads[0][1]:.2f}"
        yield Finding(
            f"{_heads([head for head, _ in heads])} {'attends' if is_single else 'attend'} {target}: {share} of "
            f"{'its' if is_single else 'their'} attention on repeated random tokens, chance {scores.chance[kind]:.2f}.",
            "heads",
            (
                ["head", *_ATTENDS],
                [
                    [head_name(head), *(f"{getattr(scores, name)[head]:.2f}" for name in _ATTENDS)]
                    for head, _ in heads[:_MOST_HEADS]
                ],
            ),
        )
    if not _clear_heads(scores, "induction"):
        (head, score), *_ = scores.largest("induction", 1) or [((0, 0), 0.0)]
        yield Finding(
            f"No head is an induction head: the largest score is {score:.2f}, of head {head_name(head)}.", "heads"
        )


def _prediction(inspection: Inspection) -> Iterator[Finding]:
    """State the two most probable next tokens, and what decides between them."""
    predicted = inspection.predictions
    if predicted is None:
        return
    (first, second, *_), (p, q, *_) = predicted.names[-1], predicted.probabilities[-1]
    largest = [f"{_component(name)} ({value:+.2f})" for name, value in predicted.components[:3]]
    yield Finding(
        f"After the text, the most probable token is {first!r} ({p:.2f}), then {second!r} ({q:.2f}). Their logits "
        f"differ by {predicted.difference:.2f}; the largest direct contributions are those of {_listed(largest)}.",
        "predictions",
        (
            ["component", "contribution"],
            [[name, f"{value:+.3f}"] for name, value in predicted.components[:_MOST_HEADS]],
        ),
    )


def _induction(inspection: Inspection) -> Iterator[Finding]:
    """Name the induction heads whose keys read the output of a previous-token head."""
    scores, overlaps = inspection.readings.scores, inspection.readings.overlaps.get("K")
    composed = next((c for name, c in inspection.compositions.items() if name.startswith("K")), None)
    if scores is None or overlaps is None or composed is None:
        return
    sigmas, multiples = overlaps.sigmas, composed.multiples
    shown = range(len(sigmas))  # layers
    pairs = [
        (*writer, *reader)
        for writer, _ in _clear_heads(scores, "previous")
        for reader, _ in _clear_heads(scores, "induction")
        if writer[0] < reader[0] and reader[0] in shown and sigmas[*writer, *reader] > _FAR
    ]
    if pairs:
        pairs = sorted(pairs, key=lambda pair: -sigmas[pair])[:_MOST_HEADS]
        rows = [
            [head_name(pair[:2]), head_name(pair[2:]), f"{sigmas[pair]:+.1f}", f"{multiples[pair]:.2f}"]
            for pair in pairs
        ]
        earlier, later, sigma, _ = rows[0]
        yield Finding(
            f"Induction circuit: induction heads read the output of previous-token heads in their keys, the most head "
            f"{later} that of head {earlier}: the overlap of the subspaces is {float(sigma):.0f} standard deviations "
            "above chance.",
            "heads",
            (["previous-token head", "induction head", "overlap, sigma", "K-composition, times chance"], rows),
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
    inductive = dict(_clear_heads(scores, "induction")) if scores is not None and short is not None else {}
    on_text = pattern_scores(inspection.patterns, inspection.tokens.ids).induction
    known = [head for head in inductive if head in sinks and on_text[head] < CLEAR]  # False for NaN
    if known:
        shares = [f"{100 * end(sinks[head] for head in known):.0f}" for end in (min, max)]
        names, is_single = _heads(known, capital=False), len(known) == 1
        text = (
            f"On the text shown, {names} {'gives' if is_single else 'give'} {' to '.join(dict.fromkeys(shares))} % of "
            "the attention to the first token, although on repeated random tokens "
            f"{'it is an' if is_single else 'they are'} "
            f"induction head{'' if is_single else 's'}."
        )
        late = {head: short.induction[head] for head in known if short is not None and short.induction[head] < CLEAR}
        if late:
            text += (
                f" {_heads([*late])} {'is' if len(late) == 1 else 'are'} so at later positions only: on a repeated "
                f"segment of at most 16 tokens the score is at most {max(late.values()):.2f}."
            )
        yield Finding(text, "patterns")
    if others := sorted(sinks.keys() - inductive.keys(), key=lambda head: -sinks[head]):
        verb = "gives" if len(others) == 1 else "give"
        yield Finding(
            f"On the text shown, {_heads(others, capital=False)} {verb} more than half of the attention to the first "
            "token.",
            "patterns",
        )


def _copying(inspection: Inspection) -> Iterator[Finding]:
    """Name the heads that copy, by either of their inputs."""
    copying = inspection.readings.copying
    if copying is None:
        return
    scores = copying.by_inputs
    highest = np.max(list(scores.values()), axis=0)
    heads = [divmod(int(k), highest.shape[1]) for k in descending(highest, int(np.sum(highest >= _COPIES)))]
    if heads:
        verb, effect = ("copies", "it raises") if len(heads) == 1 else ("copy", "they raise")
        yield Finding(
            f"{_heads(heads)} {verb}: {effect} the logits of the attended tokens (copying score at least {_COPIES}, of "
            f"{' or '.join(scores)}).",
            "heads",
            (
                ["head", *scores],
                [[head_name(head), *(f"{of[head]:.2f}" for of in scores.values())] for head in heads[:_MOST_HEADS]],
            ),
        )


def _composition(inspection: Inspection) -> Iterator[Finding]:
    """State the largest overlap of subspaces, and the strongest pair of heads over all kinds of composition."""
    overlaps = sorted(overlap_rows(inspection.readings.overlaps), reverse=True)
    if overlaps:
        sigma, earlier, later, side, overlap = overlaps[0]
        yield Finding(
            f"Head {later} reads by its {side} where head {earlier} writes: the overlap of the subspaces is "
            f"{overlap:.2f}, {sigma:.0f} standard deviations above chance.",
            "heads",
            (OVERLAP_HEADINGS, overlap_cells(overlaps[:_MOST_HEADS])),
        )
    pairs = sorted(
        (score.multiple, name, writer, reader, scores.kind)
        for name, scores in inspection.compositions.items()
        for writer, reader, score in scores.largest(_MOST_HEADS)
    )[::-1]
    if pairs:
        multiple, name, writer, reader, kind = pairs[0]
        yield Finding(
            f"Strongest composition: head {head_name(reader)} reads the output of head {head_name(writer)} by its "
            f"{READS[kind]}{name[1:]}, with a composition score of {multiple:.2f} times its chance value.",
            "composition",
            (
                ["kind", "writing head", "reading head", "times chance"],
                [
                    [name, head_name(writer), head_name(reader), f"{multiple:.2f}"]
                    for multiple, name, writer, reader, _ in pairs[:_MOST_HEADS]
                ],
            ),
        )


def _ranks(inspection: Inspection) -> Iterator[Finding]:
    """State the range of the effective ranks of the OV operators."""
    ranks = effective_rank(inspection.spectra.ov)
    low, high = (divmod(int(k), ranks.shape[1]) for k in (ranks.argmin(), ranks.argmax()))
    if ranks.size > 1:
        yield Finding(
            f"The effective rank of the OV operators lies between {ranks[low]:.1f} (head {head_name(low)}) and "
            f"{ranks[high]:.1f} (head {head_name(high)}); the largest possible value is "
            f"{inspection.spectra.ov.shape[2]}.",
            "spectra",
        )


def _gauge(inspection: Inspection) -> Iterator[Finding]:
    n_free = sum(report.n_free for report in inspection.gauges)
    n_parameters = sum(report.n_parameters for report in inspection.gauges)
    if n_free:
        yield Finding(
            f"{100 * n_free / n_parameters:.0f} % of the attention parameters are gauge freedom: they can change "
            "without a change of the output.",
            "gauge",
        )


def _clear_heads(scores: PatternScores, kind: HeadKind) -> list[tuple[Head, float]]:
    """Return the heads with a clear score, the highest first."""
    return [(head, score) for head, score in scores.largest(kind, scores.previous.size) if score >= CLEAR]


def _heads(heads: Sequence[Head], *, capital: bool = True) -> str:
    """Return the names of heads as an enumeration.

    >>> _heads([(0, 1), (0, 2), (1, 3)])
    'Heads 0.1, 0.2 and 1.3'
    """
    names = [head_name(head) for head in heads[:_MOST_HEADS]]
    if len(heads) > _MOST_HEADS:
        names[-1] = f"{len(heads) - _MOST_HEADS + 1} more"
    noun = "head" if len(names) == 1 else "heads"
    return f"{noun.capitalize() if capital else noun} {_listed(names)}"


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _component(name: str) -> str:
    return name if name.startswith("mlp") else f"head {name}"
