"""All that a page shows of a checkpoint, as data."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tnlib import ArgumentError, TnlibError
from tnlib._format import fits_in_memory
from tnlib._typing import Array
from tnlib_adapters.architectures.architecture import by_config
from tnlib_adapters.attention.attention import Attention
from tnlib_adapters.checkpoints.checkpoint import Checkpoint
from tnlib_adapters.circuits import Compositions, compositions
from tnlib_adapters.circuits.arguments import Kind, has_layer_norm
from tnlib_adapters.compression.progress import Progress
from tnlib_adapters.factors.projections import Sizes
from tnlib_adapters.inspection.heads import GaugeReport, Spectra, gauge_report, spectra
from tnlib_adapters.inspection.reading import Readings, read_heads
from tnlib_adapters.inspection.tokens import Tokens
from tnlib_adapters.reference.model import run
from tnlib_adapters.reference.weights import Weights, read_weights
from tnlib_adapters.transforms.folding import fold

DISTANCES = (0, 1, 8)  # at which scores are shown that depend on it
_MOST_WORK = 2e11  # multiplications for one kind of composition: seconds
_MOST_NUMBERS = 3e8  # of a model that is run without being asked to


@dataclass(frozen=True, eq=False, repr=False)
class Inspection:
    """What `inspect` found; all of it is on the page.

    Parameters
    ----------
    page
        The file that was written.
    checkpoint
        What was inspected.
    notes
        Sentences on what was done before measuring, and what was left out.
    n_shown
        The first so many layers were measured.
    compositions
        By kind, and distance where scores depend on it: "Q", "K at distance 1".
    spectra
        Schmidt values of all heads of these layers.
    gauges
        One report per layer.
    readings
        What heads do, and some of them in tokens.
    tokens, patterns
        The sequence and, per layer, (heads, n, n); None without a text.
    """

    page: Path
    checkpoint: Checkpoint
    notes: tuple[str, ...]
    n_shown: int
    compositions: Mapping[str, Compositions]
    spectra: Spectra
    gauges: tuple[GaugeReport, ...]
    readings: Readings
    tokens: Tokens | None = None
    patterns: tuple[Array, ...] | None = None

    def __repr__(self) -> str:
        lines = [repr(self.checkpoint), *self.notes]
        for name, found in self.compositions.items():
            for writer, reader, score in found.largest(1):
                heads = "{}.{} to {}.{}".format(*writer, *reader)
                lines.append(f"  {name:<18} strongest {heads}, {score.multiple:.2f} times chance")
        return "\n".join([*lines, f"  page               {self.page}"])


def measure(checkpoint: Checkpoint, tokens: Tokens | None, page: Path, progress: Progress) -> Inspection:
    """Measure a checkpoint."""
    progress("running the model", 0, 1)
    weights, notes = _weights(checkpoint, tokens)
    seen = None if weights is None or tokens is None else run(weights, tokens.ids).patterns
    patterns = None if seen is None else tuple(of_layer[0] for of_layer in seen)
    progress("running the model", 1, 1)
    shown = n_shown(checkpoint.sizes)
    if shown < checkpoint.n_layers:
        notes.append(
            f"Of {checkpoint.n_layers} layers the first {shown} are measured: all would have too many pairs of heads."
        )
    layers, told = _layers(checkpoint, shown, progress)
    distances, centred = _distances(layers[0]), has_layer_norm(checkpoint)
    if distances != [None]:
        told.append(f"Scores depend on the distance and are shown at {', '.join(map(str, distances))}.")
    progress("measuring heads", 0, 2)
    found = spectra(layers, distances)
    progress("measuring heads", 1, 2)
    gauges = tuple(gauge_report(checkpoint.attention(layer)) for layer in range(shown))
    progress("measuring heads", 2, 2)
    scores = _compositions(layers, distances, centred, progress)
    near = distances[-1] if len(distances) == 1 else distances[1]
    readings = read_heads(checkpoint, layers, weights, scores, distance=near, centred=centred, progress=progress)
    all_notes = (*notes, *told, *readings.notes)
    return Inspection(page, checkpoint, all_notes, shown, scores, found, gauges, readings, tokens, patterns)


def n_shown(sizes: Sizes) -> int:
    """Return of how many layers all pairs of heads can be compared in seconds: at least two."""
    one = sizes.n_heads**2 * sizes.d_head**2 * sizes.d_model
    fit = (k for k in range(sizes.n_layers, 2, -1) if k * (k - 1) / 2 * one <= _MOST_WORK)
    return next(fit, min(2, sizes.n_layers))


def _layers(checkpoint: Checkpoint, count: int, progress: Progress) -> tuple[list[Attention], list[str]]:
    """Return the layers that are compared, as they read the stream itself, and what was done to them."""
    notes = []
    if _place(checkpoint) == "before" and checkpoint.pieces is None:
        checkpoint = fold(checkpoint).checkpoint
        notes.append("The weights of the norm in front of a layer count as part of what its heads read.")
    elif _place(checkpoint) == "before":
        notes.append("Weights are stored as factors, and those of norms are not part of what heads read.")
    layers = []
    for layer in range(count):
        progress("reading weights", layer, count)
        layers.append(checkpoint.attention(layer))
    progress("reading weights", count, count)
    if any(one.head_norm is not None for one in layers):
        notes.append("Queries and keys are normalised: their operators are shown without the two divisions.")
        layers = [one.numerator() for one in layers]
    return layers, notes


def _place(checkpoint: Checkpoint) -> str | None:
    return by_config(checkpoint.architecture.norm_place, checkpoint.config)


def _distances(layer: Attention) -> list[int | None]:
    if layer.rotary is None and layer.alibi is None:
        return [None]
    return [distance for distance in DISTANCES if layer.context is None or distance < layer.context]


def _compositions(
    layers: Sequence[Attention], distances: Sequence[int | None], centred: bool, progress: Progress
) -> dict[str, Compositions]:
    if len(layers) < 2:
        return {}
    kinds: list[tuple[Kind, int | None]] = [*itertools.product(("Q", "K"), distances), ("V", None)]  # type: ignore[list-item]
    found = {}
    for done, (kind, distance) in enumerate(kinds):
        progress("comparing heads", done, len(kinds))
        name = kind if distance is None else f"{kind} at distance {distance}"
        found[name] = compositions(layers, kind, distance=distance, centred=centred)
    progress("comparing heads", len(kinds), len(kinds))
    return found


def _weights(checkpoint: Checkpoint, tokens: Tokens | None) -> tuple[Weights | None, list[str]]:
    """Return the weights of a model that is run; without a text only where that takes little."""
    if checkpoint.architecture.reads != "tokens":
        return None, []
    numbers = sum(info.size for info in checkpoint.folder.tensors.values())
    if tokens is None and numbers > _MOST_NUMBERS:
        return None, ["A model of this size is run on a text that is given only."]
    if not fits_in_memory(numbers, np.dtype(np.float64)):
        raise ArgumentError(
            f"inspect: text needs the model in memory in double precision, {numbers * 8 / 1e9:.1f} GB; leave it out."
        )
    try:
        return read_weights(checkpoint), []
    except TnlibError as problem:
        if tokens is not None:
            raise
        return None, [f"The model is not run: {problem}"]
