"""Factors put into a running model, and what that costs on a text, in bytes and in quality."""

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
    """One method at one fraction, measured on text that no method has seen.

    `error` is 1 - the mean cosine, or the divergence in nats a token; `worst` that of the worst text, where texts are
    embedded. Bytes are those of the attention alone, with factors in the dtype of the weights and in int8.
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
    """Two running models, one as it came and one to put factors into, and the text to compare them on."""

    checkpoint: Checkpoint
    before: RunningModel
    after: RunningModel
    text: str

    @property
    def bytes_before(self) -> int:
        """Bytes of the attention as it came."""
        return stored_bytes(self.checkpoint)[0]["attention"]

    def rounded(self, name: str, bits: int) -> TextRow:
        """Return the row of all weights rounded as they are, a scale for every output."""
        from tnlib_adapters.instrument.running_model import open_running

        started = time.perf_counter()
        model = round_weights(open_running(self.checkpoint.folder.path), bits=bits)
        found, size = evaluate_running(self.before, model, self.text), plain_bytes(self.checkpoint, bits=bits)
        worst = None if found.cosine is None else 1 - float(found.cosine.min())
        return TextRow(name, 1.0, 1.0, size, found.error, worst, size, found.error, time.perf_counter() - started)

    def measure(self, tried: Tried, factorising: float) -> TextRow:
        """Return the row of a plan, its factors as they are and rounded; `factorising` is its part of those seconds."""
        pieces, layers = tried.plan.layers, tried.found.layers
        width = STORED_AS[attention_tensors(self.checkpoint, 0)[0].dtype].itemsize
        fixed = width * sum(layer.fixed for layer in layers)
        stored = [piece.parts(in_int8=True) for layer in pieces for piece in layer]
        found = self._run(pieces)
        rounded = self._run([[piece.rounded() for piece in layer] for layer in pieces])
        return TextRow(
            method=tried.name,
            keep=tried.keep,
            kept=tried.plan.kept,
            n_bytes=fixed + width * sum(a.size for layer in pieces for piece in layer for a in piece.arrays.values()),
            error=found.error,
            worst=None if found.cosine is None else 1 - float(found.cosine.min()),
            n_bytes_int8=fixed + sum(a.nbytes if own else width * a.size for one in stored for a, own in one.values()),
            error_int8=rounded.error,
            seconds=factorising + tried.planning,
        )

    def _run(self, pieces: Pieces) -> Evaluation:
        from tnlib_adapters.instrument.block_replacement import install

        for layer, of_layer in enumerate(pieces):
            projections = self.checkpoint.projections(layer).updated(expand(of_layer, self.checkpoint.sizes))
            install(self.after, layer, projections)
        return evaluate_running(self.before, self.after, self.text)
