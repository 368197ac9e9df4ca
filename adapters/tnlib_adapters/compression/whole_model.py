"""Attention and the matrices around it under one budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tnlib import ArgumentError
from tnlib_adapters.attention.checkpoint import Checkpoint
from tnlib_adapters.checkpoints.factored import Piece
from tnlib_adapters.compression.allocate import Curve
from tnlib_adapters.compression.calibration import calibrated_heads, factorisation_of, fitted
from tnlib_adapters.compression.modules import (
    Matrix,
    Seen,
    collect_matrices,
    names_of,
    read_matrices,
    weigh_matrices,
)
from tnlib_adapters.compression.plan import COSINE, DIVERGENCE, Factorisation, Plan, Progress, factorise
from tnlib_adapters.compression.whitening import PLAIN, factorise_whitened, inputs_of_text, some_batches

_TOKENS = 16_384  # of statistics: they settle early


@dataclass(frozen=True)
class Untouched:
    """An attention layer that stays as it is, and that no budget counts."""

    curves: Sequence[Curve] = ()
    fixed: int = 0

    def pieces(self, choice: Sequence[int]) -> list[Piece]:
        """Return no factors."""
        return []


def check_what(checkpoint: Checkpoint, what: str) -> None:
    """Raise if this model has no such matrices, or they cannot be replaced."""
    row = checkpoint.architecture
    if what != "attention" and (row.mlp is None or row.in_memory):
        raise ArgumentError(
            f"compress: what must be 'attention' for a {row.model_type}, got {what!r}; its other matrices cannot be "
            "compressed yet."
        )


def plan_whole(
    checkpoint: Checkpoint,
    what: str,
    method: str,
    text: str | None,
    budget: tuple[float | None, float | None],
    progress: Progress,
    statistics: Path | None,
) -> Plan:
    """Return the factors of all that `what` means, within (a fraction of its numbers, a predicted error)."""
    names = names_of(checkpoint, what)
    if text is None:
        factorisation = _with(checkpoint, what, factorise_plain(checkpoint, what, method, progress), names, None)
        return factorisation.at(factorisation.select(*budget), progress)
    if method in PLAIN:
        return _whitened(checkpoint, what, method, text, budget, progress)
    return _calibrated(checkpoint, what, text, budget, progress, statistics)


def factorise_plain(checkpoint: Checkpoint, what: str, method: str, progress: Progress) -> Factorisation:
    """Factorise the attention without a text, or leave it alone."""
    return _untouched(checkpoint, method) if what == "mlp" else factorise(checkpoint, method, progress)


def _untouched(checkpoint: Checkpoint, method: str) -> Factorisation:
    return Factorisation(method, [Untouched() for _ in range(checkpoint.n_layers)], 0)


def _with(
    checkpoint: Checkpoint, what: str, attention: Factorisation, names: Sequence[str], seen: Sequence[Seen] | None
) -> Factorisation:
    """Return a factorisation that counts the matrices of these modules as well."""
    matrices = read_matrices(checkpoint, names, seen)
    return replace(attention, modules=matrices, n_before=attention.n_before + sum(one.n_before for one in matrices))


def _whitened(
    checkpoint: Checkpoint,
    what: str,
    method: str,
    text: str,
    budget: tuple[float | None, float | None],
    progress: Progress,
) -> Plan:
    from tnlib_adapters.torch.hooks.running import open_running

    names = names_of(checkpoint, what)
    measure = DIVERGENCE if checkpoint.architecture.unembed else COSINE
    if what == "mlp":
        attention = replace(_untouched(checkpoint, method), measure=measure, foretells=False)
    else:
        attention = factorise_whitened(checkpoint, method, inputs_of_text(checkpoint, text, progress), progress)
    seen: list[Seen] = []
    if names:
        model = open_running(checkpoint.folder.path)
        seen = collect_matrices(model, names, some_batches(model, text, _TOKENS), progress)
    factorisation = _with(checkpoint, what, attention, names, [replace(one, slopes=None) for one in seen])
    return factorisation.at(factorisation.select(*budget), progress)


def _calibrated(
    checkpoint: Checkpoint,
    what: str,
    text: str,
    budget: tuple[float | None, float | None],
    progress: Progress,
    statistics: Path | None,
) -> Plan:
    from tnlib_adapters.torch.hooks.running import open_running

    model = open_running(checkpoint.folder.path)
    batches, some = model.batches(text), some_batches(model, text, _TOKENS)
    names = names_of(checkpoint, what)
    heads = [] if what == "mlp" else calibrated_heads(checkpoint, model, batches, progress, file=statistics)
    measure = DIVERGENCE if model.predicts else COSINE
    attention = (
        factorisation_of(checkpoint, model, heads)
        if heads
        else replace(_untouched(checkpoint, "heads"), measure=measure)
    )
    factorisation = _with(
        checkpoint, what, attention, names, collect_matrices(model, names, some, progress) if names else []
    )
    weigh_matrices(model, [one for one in factorisation.modules if isinstance(one, Matrix)], some, progress)
    choice = factorisation.select(*budget)
    plan = factorisation.at(choice, progress)
    if not heads:
        return plan
    n = sum(len(one.curves) for one in heads)
    return replace(plan, layers=list(fitted(model, heads, choice[:n], batches, progress=progress)))
