"""Everything that the inspection page shows of a checkpoint: the tokens it is shown on, measurements and notes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import numpy as np

from tnlib import ArgumentError, TnlibError
from tnlib._typing import Array
from tnlib_adapters.attention.attention import Attention
from tnlib_adapters.checkpoints.checkpoint import Checkpoint
from tnlib_adapters.circuits import Compositions, heat_map
from tnlib_adapters.circuits.arguments import Kind, has_layer_norm, head_name
from tnlib_adapters.circuits.composition.composition_scores import compositions_of_kinds
from tnlib_adapters.compression.progress import Progress
from tnlib_adapters.factors.projections import Sizes
from tnlib_adapters.files.folder import path_text
from tnlib_adapters.files.tokenizer import token_names, tokenizer_or_none
from tnlib_adapters.inspection.head_measurements import (
    GaugeReport,
    Readings,
    Spectra,
    gauge_report,
    read_heads,
    spectra,
)
from tnlib_adapters.inspection.pictures import (
    head_score_maps,
    pattern_panels,
    rank_maps,
    schmidt_values,
)
from tnlib_adapters.inspection.predictions import Predictions, predictions
from tnlib_adapters.reference.model import run
from tnlib_adapters.reference.weights import Weights, read_weights
from tnlib_adapters.result_table import data_frame
from tnlib_adapters.transforms.folding import fold

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DISTANCE = 1  # query-key distance of scores that depend on it
MOST_WORK = 2e11  # multiplications for one kind of composition: seconds
MOST_NUMBERS = 3e8  # parameters of the largest model that is run without a given text, and that is read only once


@dataclass(frozen=True, eq=False, repr=False)
class Inspection:
    """Result of `inspect`; the page shows all of it.

    Parameters
    ----------
    page
        Path of the page.
    checkpoint
        The inspected checkpoint.
    notes
        Sentences on preprocessing and omissions.
    n_shown
        Number of measured layers, from the first.
    compositions
        By kind, and by distance where scores depend on it: "Q", "K at distance 1".
    spectra
        Singular values of all heads of these layers.
    gauges
        Gauge report of each layer.
    readings
        Head scores, and some heads in tokens.
    tokens, patterns
        Token sequence and, per layer, patterns (heads, n, n); None without a text.
    predictions
        Predictions on the text; None without one, for a model that is not causal or has no unembedding, and for a large
        one.

    Examples
    --------
    `inspect` returns one after it has written the page; without the page:

    >>> import tnlib_adapters
    >>> model = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path("known_circuit"))
    >>> found = measure(model, None, Path("inspect.html"), lambda stage, done, total: None)
    >>> found.n_shown, found.compositions["K"].largest(1)[0][:2]
    (2, ((0, 0), (1, 0)))
    """

    page: Path
    checkpoint: Checkpoint
    notes: tuple[str, ...]
    n_shown: int
    compositions: Mapping[str, Compositions]
    spectra: Spectra
    gauges: tuple[GaugeReport, ...]
    readings: Readings
    tokens: TokenSequence | None = None
    patterns: tuple[Array, ...] | None = None
    predictions: Predictions | None = None

    def figures(self) -> dict[str, Figure]:
        """Return the heat maps and curves of the page as matplotlib figures, by name."""
        drawn = {f"composition {name}": heat_map(scores) for name, scores in self.compositions.items()}
        drawn |= {"effective ranks": rank_maps(self.spectra), "Schmidt values": schmidt_values(self.spectra)}
        if self.readings.has_scores:
            drawn["head scores"] = head_score_maps(self.readings)
        if self.patterns is not None and self.tokens is not None:
            panels = (pattern_panels(of_layer, self.tokens.names) for of_layer in self.patterns)
            drawn |= {f"patterns of layer {layer}": panel for layer, panel in enumerate(panels)}
        return drawn

    def frames(self) -> dict[str, Any]:
        """Return the tables of the page as data frames of pandas, by name, with all their rows.

        Raises
        ------
        ModuleNotFoundError
            If pandas is not installed.
        """
        tables = {f"composition {name}": scores.to_frame() for name, scores in self.compositions.items()}
        tables |= {f"overlaps O with {side}": overlaps.to_frame() for side, overlaps in self.readings.overlaps.items()}
        if self.readings.scores is not None:
            tables["head scores"] = self.readings.scores.to_frame()
        if self.predictions is not None:
            columns = zip(("component", "contribution"), zip(*self.predictions.components, strict=True), strict=True)
            tables["contributions"] = data_frame("Inspection.frames", dict(columns))
        names = ("n_parameters", "n_free", "queries_to_keys", "values_to_outputs")
        gauges = {name: [getattr(report, name) for report in self.gauges] for name in names}
        return tables | {"gauges": data_frame("Inspection.frames", {"layer": range(len(self.gauges)), **gauges})}

    def __repr__(self) -> str:
        lines = [repr(self.checkpoint), *self.notes]
        for name, scores in self.compositions.items():
            for writer, reader, score in scores.largest(1):
                heads = f"{head_name(writer)} to {head_name(reader)}"
                lines.append(f"  {name:<18} strongest {heads}, {score.multiple:.2f} times chance")
        return "\n".join([*lines, f"  page               {path_text(self.page)}"])


def measure(checkpoint: Checkpoint, tokens: TokenSequence | None, page: Path, progress: Progress) -> Inspection:
    """Return all measurements of a checkpoint."""
    progress("running the model", 0, 1)
    weights, notes = _weights(checkpoint, tokens)
    patterns = predicted = None
    headless = None if weights is None else replace(weights, unembed=None)  # patterns need no logits
    if weights is not None and headless is not None and tokens is not None:
        is_causal = checkpoint.wiring.layers[0].attention.causal
        predicted = predictions(weights, tokens.ids, tokens.name) if is_causal else None
        patterns = tuple(of_layer[0] for of_layer in run(headless, tokens.ids).patterns)
    progress("running the model", 1, 1)
    count = n_shown(checkpoint.sizes)
    if count < checkpoint.n_layers:
        notes.append(
            f"Of {checkpoint.n_layers} layers the first {count} are measured: all would have too many pairs of heads."
        )
    layers, layer_notes = _layers(checkpoint, count, progress)
    distance, centred = DISTANCE if layers[0].depends_on_distance else None, has_layer_norm(checkpoint)
    if distance is not None:
        layer_notes.append(f"Scores depend on the distance of query and key and are shown at distance {distance}.")
    progress("measuring heads", 0, 2)
    head_spectra = spectra(layers, [distance])
    progress("measuring heads", 1, 2)
    stored = (checkpoint.attention(k) for k in range(count))
    gauges = tuple(gauge_report(layer if layer.latent_norm is None else layer.numerator()) for layer in stored)
    progress("measuring heads", 2, 2)
    scores = _compositions(layers, distance, centred, progress)
    readings = read_heads(checkpoint, layers, headless, scores, distance=distance, centred=centred, progress=progress)
    all_notes = (*notes, *layer_notes, *readings.notes)
    return Inspection(
        page, checkpoint, all_notes, count, scores, head_spectra, gauges, readings, tokens, patterns, predicted
    )


def n_shown(sizes: Sizes) -> int:
    """Return the number of layers whose pairs of heads can be compared in seconds, at least two."""
    work = sizes.n_heads**2 * sizes.d_model**2 / 2
    fit = (k for k in range(sizes.n_layers, 2, -1) if k * (k - 1) / 2 * work <= MOST_WORK)
    return next(fit, min(2, sizes.n_layers))


def _layers(checkpoint: Checkpoint, count: int, progress: Progress) -> tuple[list[Attention], list[str]]:
    """Return the compared layers, with adjacent norms folded in where possible, and notes on that."""
    notes = []
    pre_norm = checkpoint.wiring.layers[0].attention.pre_norm
    if pre_norm is not None and checkpoint.factored is None:
        checkpoint = fold(checkpoint).checkpoint
        notes.append("The weights of the norm in front of a layer count as part of what its heads read.")
    elif pre_norm is not None:
        notes.append("Weights are stored as factors, and those of norms are not part of what heads read.")
    layers = []
    for layer in range(count):
        progress("reading weights", layer, count)
        layers.append(checkpoint.attention(layer))
    progress("reading weights", count, count)
    if not all(attention.is_bilinear for attention in layers):
        normalised = "Queries and keys" if layers[0].latent_norm is None else "Latent vectors"
        notes.append(f"{normalised} are normalised: operators are shown without the divisions.")
        layers = [attention.numerator() for attention in layers]
    return layers, notes


def _compositions(
    layers: Sequence[Attention], distance: int | None, centred: bool, progress: Progress
) -> dict[str, Compositions]:
    if len(layers) < 2:
        return {}
    progress("comparing heads", 0, 1)
    of_kinds = compositions_of_kinds(layers, get_args(Kind), distance, centred)
    progress("comparing heads", 1, 1)
    at = "" if distance is None else f" at distance {distance}"
    return {scores.kind if scores.kind == "V" else f"{scores.kind}{at}": scores for scores in of_kinds}


def _weights(checkpoint: Checkpoint, tokens: TokenSequence | None) -> tuple[Weights | None, list[str]]:
    """Return the weights of a model to run; None if it is too large to run without a text.

    A large model is read block by block, and without its unembedding.
    """
    if checkpoint.wiring.reads != "tokens":
        return None, []
    numbers = sum(info.size for info in checkpoint.folder.tensors.values())
    if tokens is None and numbers > MOST_NUMBERS:
        return None, ["A model of this size is run only if a text is given."]
    try:
        is_small = numbers <= MOST_NUMBERS
        weights = read_weights(checkpoint, in_memory=is_small, dtype=np.float32)
        return (weights if is_small else replace(weights, unembed=None)), []
    except TnlibError as problem:
        if tokens is not None:
            raise
        return None, [f"The model is not run: {problem}"]


_MOST = 80  # tokens; larger patterns are not legible in a picture
_LETTERS = 50 * _MOST  # characters that are tokenized: enough for more than _MOST tokens


@dataclass(frozen=True, eq=False)
class TokenSequence:
    """One token sequence: numbers (n,), the texts of all known tokens, and whether the text was truncated."""

    ids: Array
    vocabulary: Mapping[int, str]
    cut: bool

    @property
    def names(self) -> tuple[str, ...]:
        """Printable names of the tokens."""
        return tuple(self.name(int(number)) for number in self.ids)

    def name(self, number: int) -> str:
        """Return the printable name of a token, its text with signs for blanks and line breaks, or its number."""
        text = self.vocabulary.get(number, str(number))
        visible = text.replace(" ", "·").replace("\n", "↵").replace("\r", "↵").replace("\t", "⇥")
        return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in visible)


def read_tokens(checkpoint: Checkpoint, text: str) -> TokenSequence:
    """Return a text as tokens by the tokenizer of the folder, or parse token numbers if there is no tokenizer.

    Raises
    ------
    ArgumentError
        If the model reads images, the text has fewer than two tokens, or is not token numbers where there is no
        tokenizer.
    """
    if checkpoint.wiring.reads != "tokens":
        raise ArgumentError(
            f"inspect: text must be left out for a model of images, got one for a {checkpoint.wiring.model_type}."
        )
    names = token_names(checkpoint.folder.path, "inspect") or {}
    limit, tokenizer = _longest(checkpoint), tokenizer_or_none("inspect", checkpoint.folder.path)
    if tokenizer is None:
        numbers = _numbers(checkpoint, text)
        truncated, numbers = len(numbers) > limit, numbers[:limit]
    else:
        start = text[:_LETTERS]
        truncated = len(text) > _LETTERS or len(tokenizer(start, verbose=False)["input_ids"]) > limit
        numbers = tokenizer(start, truncation=True, max_length=limit)["input_ids"]  # includes end markers
    if len(numbers) < 2:
        raise ArgumentError(f"inspect: text must hold at least two tokens, got {len(numbers)}; pass a longer one.")
    return TokenSequence(np.array(numbers), names, truncated)


def own_tokens(checkpoint: Checkpoint) -> TokenSequence | None:
    """Return a sequence like the training data of the built-in model; None for any other model."""
    if not checkpoint.wiring.is_attention_only or _vocabulary(checkpoint) < 2:
        return None
    rng = np.random.default_rng(0)
    segment = rng.permutation(min(128, _vocabulary(checkpoint)))[: min(16, _longest(checkpoint) // 2)]
    ids = np.concatenate([segment, segment])
    return TokenSequence(ids, {}, cut=False)


def _longest(checkpoint: Checkpoint) -> int:
    """Return the largest number of tokens of a sequence."""
    wiring = checkpoint.wiring
    return int(min(_MOST, (wiring.context or _MOST) - wiring.embedding.first_position))


def _vocabulary(checkpoint: Checkpoint) -> int:
    info = checkpoint.locate(checkpoint.wiring.embedding.table.weight)
    return 0 if info is None else int(info.shape[0])


def _numbers(checkpoint: Checkpoint, text: str) -> list[int]:
    """Parse token numbers, separated by blanks or commas."""
    vocab, parts = _vocabulary(checkpoint), text.replace(",", " ").split()
    for part in parts:
        if not (part.isascii() and part.isdigit() and len(part) < 10 and int(part) < vocab):
            raise ArgumentError(
                f"inspect: text must be numbers of tokens from 0 to {vocab - 1}, because there is no tokenizer for "
                f"{checkpoint.folder.path}, or no transformers to read it with; got {part[:40]!r}."
            )
    return [int(part) for part in parts]
