"""Trial of factors in a running model: error on a text, and bytes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tnlib_adapters.checkpoints.checkpoint import Checkpoint
from tnlib_adapters.compression.compare.trials import Tried
from tnlib_adapters.compression.evaluation.evaluate import Evaluation, evaluate_running
from tnlib_adapters.compression.methods.int8_baseline import plain_bytes, round_weights
from tnlib_adapters.compression.sizes import attention_tensors, stored_bytes
from tnlib_adapters.factors.attention_factors import Piece, expand
from tnlib_adapters.files.tensor_file import STORED_AS

if TYPE_CHECKING:
    from tnlib_adapters.instrument.running_model import RunningModel

Pieces = Sequence[Sequence[Piece]]


@dataclass(frozen=True)
class TextRow:
    """One method at one fraction, measured on held-out text.

    `error` is 1 - the mean cosine similarity, or the divergence in nats per token; `worst` is the largest error of a
    single text, for embedding models. Bytes are of the attention alone, with factors in the dtype of the weights and in
    int8.
    """

    method: str
    keep: float
    kept: float
    n_bytes: int
    error: float
    worst: float | None
    n_bytes_int8: int
    error_int8: float
    seconds: float


@dataclass(frozen=True)
class Bench:
    """Two running models, the original and one to install factors into, and the text to compare them on."""

    checkpoint: Checkpoint
    before: RunningModel
    after: RunningModel
    text: str

    @property
    def bytes_before(self) -> int:
        """Bytes of the attention in the original."""
        return stored_bytes(self.checkpoint)[0]["attention"]

    def rounded(self, name: str, bits: int) -> TextRow:
        """Return the row of plain rounding of all weights, with one scale per output."""
        from tnlib_adapters.instrument.running_model import open_running

        started = time.perf_counter()
        model = round_weights(open_running(self.checkpoint.folder.path), bits=bits)
        evaluation, size = evaluate_running(self.before, model, self.text), plain_bytes(self.checkpoint, bits=bits)
        worst = None if evaluation.cosine is None else 1 - float(evaluation.cosine.min())
        return TextRow(
            name, 1.0, 1.0, size, evaluation.error, worst, size, evaluation.error, time.perf_counter() - started
        )

    def measure(self, tried: Tried, factorising: float) -> TextRow:
        """Return the row of a plan, with factors as stored and in int8; `factorising` is its share of those seconds."""
        pieces, layers = tried.plan.layers, tried.found.layers
        width = STORED_AS[attention_tensors(self.checkpoint, 0)[0].dtype].itemsize
        fixed = width * sum(layer.fixed for layer in layers)
        stored = [piece.parts(in_int8=True) for layer in pieces for piece in layer]
        evaluation = self._run(pieces)
        rounded = self._run([[piece.rounded() for piece in layer] for layer in pieces])
        return TextRow(
            method=tried.name,
            keep=tried.keep,
            kept=tried.plan.kept,
            n_bytes=fixed + width * sum(a.size for layer in pieces for piece in layer for a in piece.arrays.values()),
            error=evaluation.error,
            worst=None if evaluation.cosine is None else 1 - float(evaluation.cosine.min()),
            n_bytes_int8=fixed
            + sum(a.nbytes if is_own else width * a.size for arrays in stored for a, is_own in arrays.values()),
            error_int8=rounded.error,
            seconds=factorising + tried.planning,
        )

    def _run(self, pieces: Pieces) -> Evaluation:
        from tnlib_adapters.instrument.block_replacement import install

        for layer, of_layer in enumerate(pieces):
            projections = self.checkpoint.projections(layer).updated(expand(of_layer, self.checkpoint.sizes))
            install(self.after, layer, projections)
        return evaluate_running(self.before, self.after, self.text)
