"""Evaluation of a model: outputs of two checkpoints on a text."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from tnlib import ArgumentError
from tnlib._typing import Array
from tnlib_adapters.checkpoints.checkpoint import Checkpoint, open_checkpoint
from tnlib_adapters.compression.methods.factorisation import Forecast
from tnlib_adapters.compression.methods.out_of_core import Workspace
from tnlib_adapters.compression.progress import Progress, quiet
from tnlib_adapters.compression.request import REPORT, check_reads_text
from tnlib_adapters.compression.source_model import SourceModel
from tnlib_adapters.compression.text import TokenSequences, read_documents
from tnlib_adapters.factors.integers import IntegerFormat
from tnlib_adapters.factors.model_weights import ModelWeight
from tnlib_adapters.factors.rounding import round_to_nearest

if TYPE_CHECKING:
    from torch import Tensor

    from tnlib_adapters.instrument.block_passes import Outputs
    from tnlib_adapters.instrument.running_model import RunningModel
    from tnlib_adapters.instrument.stored_weights import Group

LOGITS_AT_A_TIME = 1 << 22  # in double precision at a time


@dataclass(frozen=True)
class Evaluation:
    """Comparison of the outputs of two models on one text.

    Parameters
    ----------
    n_texts, n_tokens
        Number of compared texts and tokens.
    cosine
        Cosine similarity of the two embeddings of every text, for embedding models; None for language models.
    perplexity_before, perplexity_after, divergence
        For language models: exp of the mean loss of both, and the mean Kullback-Leibler divergence of their
        predictions in nats per token.

    Examples
    --------
    >>> import numpy as np
    >>> from tnlib_adapters import Evaluation
    >>> evaluation = Evaluation(n_texts=2, n_tokens=9, cosine=np.array([1.0, 0.5]))
    >>> evaluation.measures()["cosine, mean"]
    0.75
    """

    n_texts: int
    n_tokens: int
    cosine: Array | None = None
    perplexity_before: float | None = None
    perplexity_after: float | None = None
    divergence: float | None = None

    @property
    def error(self) -> float:
        """1 - mean cosine similarity, or the divergence; 0 for equal outputs."""
        if self.cosine is not None:
            return 1 - float(self.cosine.mean(dtype=np.float64))
        return float(self.divergence or 0.0)

    def measures(self) -> dict[str, float]:
        """Return the measures by name."""
        if self.cosine is not None:
            low = float(np.percentile(self.cosine, 5))
            return {
                "cosine, mean": float(self.cosine.mean()),
                "cosine, lowest 5 %": low,
                "cosine, worst": float(self.cosine.min()),
            }
        values = {
            "perplexity, before": self.perplexity_before,
            "perplexity, after": self.perplexity_after,
            "divergence (nats a token)": self.divergence,
        }
        return {name: value for name, value in values.items() if value is not None}


def evaluate(
    before: str | os.PathLike[str],
    after: str | os.PathLike[str],
    text: str | os.PathLike[str],
    *,
    device: str = "cpu",
    dtype: str = "float32",
    progress: Progress = quiet,
) -> Evaluation:
    """Compare a checkpoint with its compressed copy on a text file.

    Parameters
    ----------
    before, after
        Checkpoint folders of one architecture and size, each with its tokenizer.
    text
        Text file, or other data, see `Calibration`. Embedding models read each line, truncated at 256 tokens; language
        models read windows of 256 tokens.
    device, dtype
        Where both models run, as torch names it, and the dtype of their weights: "float32", "bfloat16" or "float16".
    progress
        Called as progress(stage, done, total).

    Raises
    ------
    ArgumentError, MissingFileError, FileFormatError
        If a file is missing or is not text, or the models do not match.

    Examples
    --------
    >>> import os, tempfile
    >>> from tnlib_adapters import builtin_path
    >>> text = os.path.join(tempfile.mkdtemp(), "text.txt")
    >>> with open(text, "w") as file:
    ...     _ = file.write("Return the sum of the entries.")
    >>> llama = builtin_path("llama")
    >>> evaluate(llama, llama, text).divergence  # of a model from itself
    0.0
    """
    from tnlib_adapters.instrument.running_model import open_running
    from tnlib_adapters.instrument.stored_weights import placement_of

    placement = placement_of("evaluate", device, dtype)
    documents = read_documents("evaluate", "text", text)
    checkpoints = [open_checkpoint(before), open_checkpoint(after)]
    for checkpoint in checkpoints:
        check_reads_text("evaluate", checkpoint, text_required=True)
    paths = [checkpoint.folder.path for checkpoint in checkpoints]
    # the dense layout is no original either: it has a report
    if checkpoints[0].factored is not None and not (paths[1] / REPORT).exists():
        raise ArgumentError(
            f"evaluate: the original must come first and its compression second, got the compression {paths[0]} first; "
            "swap IN and OUT."
        )
    before_running, after_running = (open_running(checkpoint, placement=placement) for checkpoint in checkpoints)
    return Reference(before_running, before_running.sequences(documents)).compare(after_running, progress)


class Reference:
    """A running model on a text, to compare others with. Every model runs block by block, and this one only once.

    Raises `ArgumentError` if the text has no line of two tokens.
    """

    def __init__(self, model: RunningModel, text: str | TokenSequences, workspace: Workspace | None = None) -> None:
        self._model, self._batches = model, model.batches(text)
        self._admits = (workspace or Workspace()).admits
        self._outputs: Outputs | None = None
        if not self._batches:
            raise ArgumentError(
                f"{model.function}: text must have at least one line of two tokens, got none; name another file."
            )

    def compare(self, other: RunningModel, progress: Progress = quiet) -> Evaluation:
        """Compare another model with the original; `ArgumentError` if it is of another architecture or size."""
        from tnlib_adapters.instrument.block_passes import Outputs

        model, batches = self._model, self._batches
        if (model.wiring.model_type, model.sizes) != (other.wiring.model_type, other.sizes):
            raise ArgumentError(
                f"{model.function}: both checkpoints must be of one architecture and size, got "
                f"{model.wiring.model_type} with {model.sizes} and {other.wiring.model_type} with {other.sizes}; "
                "compare a model with its own compression."
            )
        if self._outputs is None:
            self._outputs = Outputs(model, batches, partial(progress, "running the original"), self._admits)
        before = self._outputs
        after = Outputs(other, batches, partial(progress, "running the compressed model"), self._admits)
        cosines: list[Array] = []
        sums, n_predicted = np.zeros(3), 0
        in_part = max(1, LOGITS_AT_A_TIME // model.vocab_size)
        for b, batch in enumerate(batches):
            progress("comparing outputs", b, len(batches))
            if not model.predicts:
                cosines.append((before.of_batch(b) * after.of_batch(b)).sum(-1).cpu().numpy())
                continue
            parts = list(batch.parts(in_part))
            pairs = zip(before.of_parts(b, parts), after.of_parts(b, parts), strict=True)
            for (texts, tokens), logits in zip(parts, pairs, strict=True):
                following = texts, slice(tokens.start + 1, tokens.stop + 1)  # the last token of a text has none
                losses = _losses(*logits, batch.ids[following])[:, batch.valid[following].cpu()]
                sums += losses.sum(-1).numpy()
                n_predicted += losses.shape[1]
        progress("comparing outputs", len(batches), len(batches))
        n_texts, n_tokens = sum(len(batch.ids) for batch in batches), sum(batch.n_tokens for batch in batches)
        if not model.predicts:
            return Evaluation(n_texts, n_tokens, cosine=np.concatenate(cosines))
        loss_before, loss_after, divergence = (sums / n_predicted).tolist()
        return Evaluation(n_texts, n_tokens, None, float(np.exp(loss_before)), float(np.exp(loss_after)), divergence)


def _losses(before: Tensor, after: Tensor, next_ids: Tensor) -> Tensor:
    """Return the losses of two logits (texts, tokens, vocab) for the next tokens, and their divergence, (3, ...)."""
    import torch

    from tnlib_adapters.instrument.block import in_double_precision

    logs = [in_double_precision(logits[:, : next_ids.shape[1]].log_softmax(-1)) for logits in (before, after)]
    losses = [-log.gather(-1, next_ids[..., None].to(log.device))[..., 0] for log in logs]
    return torch.stack([*losses, (logs[0].exp() * (logs[0] - logs[1])).sum(-1)]).cpu()


def round_weights(model: RunningModel, weights: Sequence[ModelWeight]) -> RunningModel:
    """Return a copy of a model with these weights rounded to plain int8: one scale per output."""
    import torch

    source = model.weights.source
    linears = {own.linear.weight: own.linear for own in weights}

    def in_int8(_: int, values: Group) -> Group:
        changed = dict(values)
        for name, weight in values.items():
            stored = source.stored[name]
            if isinstance(stored, str) and stored in linears:  # joined and stacked tensors are of experts
                rounded = round_to_nearest(weight.numpy(), IntegerFormat(8, 1 - linears[stored].output_axis))
                changed[name] = torch.from_numpy(rounded.values())
        return changed

    return model.changed(in_int8)


def measure_on_text(
    source: SourceModel,
    after: Checkpoint,
    weights: Sequence[ModelWeight],
    text: TokenSequences,
    progress: Progress,
    workspace: Workspace,
) -> tuple[Evaluation, Evaluation]:
    """Compare the compressed checkpoint, and the source with these weights in plain int8, with the source."""
    reference = Reference(source.original, text, workspace)
    compressed = reference.compare(source.open(after.folder.path), progress)
    return compressed, reference.compare(round_weights(source.original, weights), progress)


def text_measures(compressed: Evaluation, forecast: Forecast) -> dict[str, float]:
    """Return the measures of the compressed model on held-out text by name, and their predictions."""
    values = {f"{name}, on held-out text": value for name, value in compressed.measures().items()}
    if forecast.error is not None:
        name, value = ("divergence", forecast.error) if compressed.cosine is None else ("cosine", 1 - forecast.error)
        values[f"{name}, predicted without the fit"] = value
    return values
