"""Factorisation by calibration data and its fit, block by block or of the whole model: steps, and what is saved."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, count
from typing import cast

import numpy as np

from tnlib._typing import Array
from tnlib_adapters.compression.calibration.collect_calibration import collect_calibration
from tnlib_adapters.compression.calibration.resumed_run import CalibrationFolder, FittedFiles
from tnlib_adapters.compression.calibration.statistics import GroupFactorisation
from tnlib_adapters.compression.compressed_part import compressed_weights, widest_component
from tnlib_adapters.compression.methods.factorisation import COSINE, DIVERGENCE, Chosen, Factorisation
from tnlib_adapters.compression.methods.out_of_core import LazyPart, StoredArrays, Workspace
from tnlib_adapters.compression.progress import Progress, quiet
from tnlib_adapters.compression.request import Request
from tnlib_adapters.compression.source_model import SourceModel
from tnlib_adapters.compression.text import TokenSequences, check_tokens, sample_batches
from tnlib_adapters.factors import UNEMBEDDING
from tnlib_adapters.factors.expansion import weight_of_parts
from tnlib_adapters.factors.factored_matrix import FactoredMatrix, by_module
from tnlib_adapters.factors.interpolative import without_gauge
from tnlib_adapters.factors.model_weights import count_parameters
from tnlib_adapters.instrument.block_passes import Streams
from tnlib_adapters.instrument.layer_fit import fit_layers
from tnlib_adapters.instrument.output_fit import fit_to_output
from tnlib_adapters.instrument.running_model import RunningModel

# Most batches of the fit of a layer, one in a step, of factors and of rounded weights; of a whole model as the latter
STEPS, ROUNDED_STEPS = 400, 200
PASSES = {"low": 0, "default": 2, "high": 1000}  # over the text in a layer, by effort
_WITHOUT_MODEL_FIT = 3  # times these passes are those of factors, where no fit of the whole model follows
# Of all weights of a language model. SmolLM2 in 2 bits: 0.943 nats a token with 2, 0.886 with 6, 0.883 with 10
OUTPUT_PASSES = {"low": 0, "default": 2, "high": 6}


def fit_steps(n_batches: int, effort: str, *, in_bits: bool, fit_in_memory: bool, predicts: bool) -> tuple[int, int]:
    """Return the batches that the fit of a layer reads, one in a step, and those that the fit of the whole model reads.

    Language models that fit in memory are fitted as a whole, factors layer by layer before. Three quarters of the
    built-in Llama: 0.0386 nats a token after a longer fit by layers, 0.0387 as a whole, 0.0356 by both, in the same
    time. Rounded weights gain nothing by a fit by layers, in half of the time more. Models that do not fit in memory
    are fitted layer by layer, in at most one pass over the text.
    """
    as_whole, passes = fit_in_memory and predicts, PASSES[effort]
    model_steps = min(ROUNDED_STEPS, OUTPUT_PASSES[effort] * n_batches) if as_whole else 0
    if in_bits and as_whole:
        return 0, model_steps
    if not in_bits and not as_whole:
        passes *= _WITHOUT_MODEL_FIT
    if not fit_in_memory:
        passes = min(passes, 1)
    return min(ROUNDED_STEPS if in_bits else STEPS, passes * n_batches), model_steps


@dataclass(frozen=True)
class ChosenWeights:
    """The weights of a model at their chosen options, by block."""

    model: RunningModel
    parts: Mapping[str, LazyPart]  # weights by module
    options: Mapping[str, Sequence[int]]  # chosen, by module

    def of_block(self, k: int) -> list[FactoredMatrix]:
        """Return the weights of a block, the attention first."""
        return [*chain.from_iterable(map(self._of_module, self._in_blocks[k]))]

    def outside(self) -> Iterator[FactoredMatrix]:
        """Yield the weights outside the blocks."""
        known = [name for modules in self._in_blocks for name in modules]
        yield from chain.from_iterable(self._of_module(name) for name in self.parts if name not in known)

    def _of_module(self, name: str) -> Iterator[FactoredMatrix]:
        weights = dict(self.parts[name].load().weights)
        for of, option in zip(list(weights), self.options[name], strict=True):
            # the last reference to a weight with its moments: those of large tables take much memory
            yield replace(weights.pop(of).at(option), module=name)

    @property
    def _in_blocks(self) -> list[list[str]]:
        """Modules of every block."""
        return [[name for name in of_block if name in self.parts] for of_block in self.model.wiring.modules_by_block]


def factorise_and_fit(
    source: SourceModel,
    text: TokenSequences,
    request: Request,
    workspace: Workspace | None,
    factorise: GroupFactorisation,
    not_fitted: int = 1,
) -> Factorisation:
    """Factorise the weights of a request by the statistics of a text; the chosen forms are fitted on it.

    The losses of weights that make the predictions, and are not fitted, count `not_fitted` times beside a fit. There is
    none with effort "low". Raises `ArgumentError` if the text is too short, or the folder of the run belongs to another
    model, text, method or choice of weights.
    """
    checkpoint, model, workspace = source.checkpoint, source.original, workspace or Workspace()
    weights, batches = compressed_weights(checkpoint, request.what, with_text=True), model.batches(text)
    check_tokens(model.function, batches, widest_component(weights))
    in_fit = sample_batches(batches, request.tokens)
    effort, in_bits = request.effort, request.in_bits
    n_steps, n_output_batches = fit_steps(
        len(in_fit), effort, in_bits=in_bits, fit_in_memory=model.fits_in_memory, predicts=model.predicts
    )
    folder = None if request.folder is None else CalibrationFolder(request.folder)
    streams = Streams(
        in_fit,
        model.sizes.d_model,
        model.dtype,
        folder=request.folder,
        admits=workspace.admits if folder is None else None,  # those of a folder are for a later run too
        keeps_inputs=n_steps > 0,
    )
    parts = collect_calibration(model, streams, factorise, request, workspace, folder)

    def fit(options: Mapping[str, Sequence[int]]) -> Iterator[tuple[str, list[FactoredMatrix]]]:
        chosen = ChosenWeights(model, parts, options)
        files = None if folder is None else FittedFiles(streams, options, n_steps)
        return fit_blocks(chosen, streams, n_steps, workspace, files, request.run.progress)

    def finish(chosen: Chosen) -> tuple[Chosen, Mapping[str, Array]]:
        fitted, vectors = fit_model(model, streams, chosen, n_output_batches, request)
        return fitted if in_bits else _without_gauge(fitted, tables), vectors

    tables = {own.module for own in weights if own.is_table}
    predicting = [own.module for own in weights if own.role == UNEMBEDDING or own.tied_key is not None]
    return Factorisation(
        request.method,
        parts,
        count_parameters(weights),
        COSINE if checkpoint.wiring.unembedding is None else DIVERGENCE,
        fit=fit if n_steps else None,
        finish=finish,
        weights=dict.fromkeys(predicting, not_fitted) if n_steps or n_output_batches else {},
        in_bits=in_bits,
    )


def _without_gauge(chosen: Chosen, tables: Collection[str]) -> Chosen:
    """Yield matrices without gauge freedom, but for tables: a look-up needs all rows of a factor."""
    for name, matrices in chosen:
        yield name, matrices if name in tables else [without_gauge(matrix) for matrix in matrices]
        del matrices  # the name would keep them in memory while the next are made


def fit_model(
    model: RunningModel, streams: Streams, chosen: Chosen, n_batches: int, request: Request
) -> tuple[Chosen, Mapping[str, Array]]:
    """Return matrices fitted to the predictions in `n_batches`, and fitted vectors by stored name."""
    if not n_batches:
        return chosen, {}
    without_values = {
        name: [replace(matrix.without_values(), module=name) for matrix in matrices] for name, matrices in chosen
    }
    if request.folder is None:  # the fit of blocks has read them; those of a folder are for a resumed run
        for k in range(len(model.layers)):
            streams.remove(f"stream-{k}")
            streams.remove(f"truncated-{k + 1}")
    show = partial(request.run.progress, "fitting to the predictions")
    with_vectors = request.what in ("all", "linear")
    fitted, vectors = fit_to_output(model, streams, without_values, n_batches, show, with_vectors=with_vectors)
    with_values = ((name, [matrix.with_integers(matrix.integers) for matrix in of]) for name, of in fitted.items())
    return with_values, vectors


def fit_blocks(
    chosen: ChosenWeights,
    streams: Streams,
    n_steps: int,
    workspace: Workspace,
    files: FittedFiles | None = None,
    progress: Progress = quiet,
) -> Iterator[tuple[str, list[FactoredMatrix]]]:
    """Yield the chosen weights of every module, those of blocks after the block-wise reconstruction in `n_steps` steps.

    `workspace` has the changed tables. With `files`, blocks that are saved there are not fitted again, and others are
    saved.
    """
    model, tables = chosen.model, StoredArrays(workspace)
    yield from _not_fitted(chosen, tables)

    def save(k: int, fitted: list[FactoredMatrix]) -> Chosen:
        if files is not None:
            files.save(k, fitted)
        return by_module(fitted).items()

    n_done = 0 if files is None else files.resume()
    for k in range(n_done):
        yield from cast(FittedFiles, files).read(k).items()
    fit = fit_layers(model, streams, chosen.of_block, tables=tables, n_steps=n_steps, first=n_done, progress=progress)
    # a name for the weights of a block would keep them in memory while the next one is fitted
    yield from chain.from_iterable(map(save, count(n_done), fit))


def _not_fitted(chosen: ChosenWeights, tables: StoredArrays) -> Iterator[tuple[str, list[FactoredMatrix]]]:
    """Yield the weights outside the blocks by module, and add changed embeddings to `tables`, in float32."""
    for matrix in chosen.outside():
        name = matrix.module
        if chosen.model.wiring.is_embedding(name) and matrix.describe().is_rewritten:
            tables.add({name: weight_of_parts([np.asarray(part, np.float32) for part in matrix.arrays.values()])})
        yield name, [matrix]
        del matrix
