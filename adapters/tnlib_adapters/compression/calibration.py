"""From a text to the factors of every layer: what it shows, what is cut, and the fit of what is left."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tnlib import ArgumentError
from tnlib._typing import Array
from tnlib_adapters.attention.checkpoint import Checkpoint
from tnlib_adapters.checkpoints.factored import Piece
from tnlib_adapters.compression.calibrated import CalibratedHeads
from tnlib_adapters.compression.counting import count_attention
from tnlib_adapters.compression.cuts import Cut, cuts_of
from tnlib_adapters.compression.factorisation import Factorisation
from tnlib_adapters.compression.forecast import measure_of_text
from tnlib_adapters.compression.progress import Progress, quiet
from tnlib_adapters.compression.statistics import Save, Statistics, collect, forget, measure_gates
from tnlib_adapters.compression.statistics_file import origin, read_statistics, write_statistics

if TYPE_CHECKING:
    from tnlib_adapters.torch.hooks.running import Batch, RunningModel

# Moments and gates settle early; the fit has as many unknowns as a layer.
_TOKENS_OF_STATISTICS = 32_768
_TOKENS_OF_FIT = 65_536
_STEPS = 400  # of descent in every layer


def calibrated_heads(
    checkpoint: Checkpoint,
    model: RunningModel,
    batches: Sequence[Batch],
    progress: Progress = quiet,
    *,
    file: Path | None = None,
) -> list[CalibratedHeads]:
    """Return the heads of every layer, their components in the order in which the text misses them.

    Parameters
    ----------
    checkpoint, model
        The same model twice, with its weights and running.
    batches
        Of the text.
    progress
        Called with (stage, done, total).
    file
        Of statistics.
    """
    sizes, n_tokens = checkpoint.sizes, sum(batch.n_tokens for batch in batches)
    if n_tokens < sizes.widths["o"]:
        raise ArgumentError(
            f"compress: the text of calibrate must have at least {sizes.widths['o']:,} tokens for heads of together "
            f"{sizes.widths['o']:,} dimensions, got {n_tokens:,}, {sizes.widths['o'] - n_tokens:,} too few; add text."
        )
    cuts, gates = _see(checkpoint, model, _some(batches, _TOKENS_OF_STATISTICS), file, progress)
    return [
        CalibratedHeads(checkpoint.projections(layer), sizes, cuts[layer], gates[layer])
        for layer in range(checkpoint.n_layers)
    ]


def factorisation_of(checkpoint: Checkpoint, layers: Sequence[CalibratedHeads]) -> Factorisation:
    """Return them as something that a budget can be shared out over."""
    return Factorisation("heads", layers, sum(count_attention(checkpoint)), measure_of_text(checkpoint))


def fitted(
    model: RunningModel,
    layers: Sequence[CalibratedHeads],
    choice: Sequence[int],
    batches: Sequence[Batch],
    n_steps: int | None = None,
    progress: Progress = quiet,
) -> Iterator[list[Piece]]:
    """Yield the pieces of every layer after the fit, which leaves the running model truncated."""
    from tnlib_adapters.torch.hooks.local import fit_layers

    n = len(choice) // len(layers)
    chosen = [choice[k * n : (k + 1) * n] for k in range(len(layers))]
    found = fit_layers(
        model,
        _some(batches, _TOKENS_OF_FIT),
        lambda k: layers[k].truncated(chosen[k]),
        lambda k: layers[k].free(chosen[k]),
        n_steps=_STEPS if n_steps is None else n_steps,
        progress=progress,
    )
    for layer, dense, units in zip(layers, found, chosen, strict=True):
        yield layer.packed(dense, units)


def _see(
    checkpoint: Checkpoint, model: RunningModel, batches: Sequence[Batch], file: Path | None, progress: Progress
) -> tuple[list[dict[str, Cut]], list[dict[str, Array]]]:
    """Return where every layer can be cut, and what every unit of it is worth."""
    so_far: Statistics | None = None
    save: Save = forget
    if file is not None:
        of = origin(checkpoint, batches)
        so_far, save = read_statistics(file, of), partial(write_statistics, file, of)
    found = collect(model, batches, progress, so_far=so_far, save=save)
    group = model.sizes.n_heads // model.sizes.kv_heads
    cuts = [cuts_of(one, group, checkpoint.attention(layer).rotary) for layer, one in enumerate(found.moments)]
    return cuts, measure_gates(model, batches, cuts, found, progress, save=save)


def _some(batches: Sequence[Batch], n_tokens: int) -> list[Batch]:
    """Return batches of together about so many tokens, drawn at random by a fixed seed."""
    chosen, count = [], 0
    for k in np.random.default_rng(0).permutation(len(batches)):
        if count >= n_tokens:
            break
        chosen.append(batches[k])
        count += batches[k].n_tokens
    return chosen
