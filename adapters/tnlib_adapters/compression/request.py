"""What is asked of a compression, and whether it can be had: all that is refused before anything is read or run."""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tnlib import ArgumentError
from tnlib_adapters.checkpoints.checkpoint import Checkpoint
from tnlib_adapters.compression.choices import BY_TEXT, LAYOUTS, LOW_RANK, METHODS, STORES, WHAT
from tnlib_adapters.compression.methods.table import REFUSE, UNPREDICTED
from tnlib_adapters.files.folder import TOKENIZERS


@dataclass(frozen=True)
class Request:
    """How far to compress, what, how, and how to store it: the arguments of `compress`, refused where they are off."""

    keep: float | None = None
    max_error: float | None = None
    method: str = ""  # "calibrated" with a text; without one "heads", or "matrix" for the feed-forward matrices alone
    layout: str = "factored"
    store: str = "float"
    what: str = "attention"
    calibrate: Path | None = None
    statistics: Path | None = None

    def __post_init__(self) -> None:
        if self.method == "":
            plain = "matrix" if self.what == "mlp" else "heads"
            object.__setattr__(self, "method", plain if self.calibrate is None else "calibrated")
        if self.keep is None and self.max_error is None:
            raise ArgumentError(
                "compress: keep or max_error must be given, got neither; pass for example keep=0.5 (--keep 0.5), the "
                "fraction of the numbers that is still stored."
            )
        if self.keep is not None:
            object.__setattr__(self, "keep", check_keep("compress", self.keep))
        if self.max_error is not None:
            object.__setattr__(self, "max_error", _check_error(self.max_error))
        for name, known in (("layout", LAYOUTS), ("store", STORES), ("what", WHAT)):
            _check_one_of(name, getattr(self, name), known)
        if self.in_int8 and self.layout == "dense":
            raise ArgumentError("compress: store='int8' needs layout 'factored', got 'dense'; leave one of them out.")
        self._check_method()
        self._check_statistics()

    @property
    def in_int8(self) -> bool:
        """Whether factors are stored in one byte a number."""
        return self.store == "int8"

    @property
    def by_gates(self) -> bool:
        """Whether a text tells what every component is worth: the one way that also fits, and keeps statistics."""
        return self.method == "calibrated"

    def check(self, checkpoint: Checkpoint) -> None:
        """Raise unless this model can be compressed so."""
        check_uncompressed("compress", checkpoint)
        check_runs("compress", checkpoint, self.method)
        if self.calibrate is not None:
            check_reads_text("compress", checkpoint)
        row = checkpoint.architecture
        if self.what != "attention" and (row.mlp is None or row.in_memory):
            raise ArgumentError(
                f"compress: what must be 'attention' for a {row.model_type}, got {self.what!r}; its other matrices "
                "cannot be compressed yet."
            )

    def _check_method(self) -> None:
        if self.calibrate is None:
            check_method("compress", self.method)
        elif self.method not in BY_TEXT:
            raise ArgumentError(
                f"compress: calibrate works with method {', '.join(map(repr, BY_TEXT))}, got {self.method!r}; leave "
                "one of them out."
            )
        if self.what == "mlp" and self.method not in LOW_RANK:
            raise ArgumentError(
                f"compress: what='mlp' works with method {' or '.join(map(repr, LOW_RANK))}, got {self.method!r}, "
                "which factorises attention; pass method='matrix'."
            )
        foretells = self.by_gates if self.calibrate is not None else self.method not in UNPREDICTED
        if self.max_error is not None and not foretells:
            raise ArgumentError(
                f"compress: max_error cannot be met by method {self.method!r}"
                f"{'' if self.calibrate is None else ' with a text'}, whose error is not known beforehand; pass keep, "
                "or use another method."
            )

    def _check_statistics(self) -> None:
        if self.statistics is None:
            return
        if self.calibrate is None:
            raise ArgumentError("compress: statistics must come with the text of calibrate; pass that too.")
        if not self.by_gates:
            raise ArgumentError(
                f"compress: statistics are those of method 'calibrated', got method {self.method!r}; leave statistics "
                "out."
            )


def check_keep(function: str, keep: Any) -> float:
    """Return the fraction to keep, in (0, 1]."""
    if not _is_real(keep) or not 0.0 < float(keep) <= 1.0:
        raise ArgumentError(
            f"{function}: keep must lie in (0, 1], got {keep!r}; it is the fraction of the numbers that is still "
            "stored, for example 0.5."
        )
    return float(keep)


def check_uncompressed(function: str, checkpoint: Checkpoint) -> None:
    """Raise if a checkpoint is stored as factors already."""
    if checkpoint.pieces is not None:
        raise ArgumentError(
            f"{function}: IN must not be compressed already, got {checkpoint.folder.path}; take the checkpoint that it "
            "was made from."
        )


def check_reads_text(function: str, checkpoint: Checkpoint, *, text_required: bool = False) -> None:
    """Raise unless a model can be run on a text."""
    row, folder = checkpoint.architecture, checkpoint.folder.path
    otherwise = "" if text_required else ", or do without a text"
    if row.reads != "tokens":
        raise ArgumentError(
            f"{function}: IN must read text, got a {row.model_type}, which reads {row.reads}; pass a model of text"
            f"{otherwise}."
        )
    if not any((folder / name).is_file() for name in TOKENIZERS):  # transformers would make one without words
        raise ArgumentError(
            f"{function}: a text needs a tokenizer beside the weights, found none in {folder}; copy it there"
            f"{otherwise}."
        )


def check_method(function: str, method: str) -> None:
    """Raise unless there is such a method that needs no text."""
    if method == "calibrated":
        raise ArgumentError(f"{function}: method 'calibrated' needs a text, got none; pass one as calibrate.")
    if method not in METHODS:
        raise ArgumentError(
            f"{function}: method must be one of {', '.join(METHODS)}, or, with calibrate, of {', '.join(BY_TEXT)}, "
            f"got {method!r}; choose one of them."
        )


def check_runs(function: str, checkpoint: Checkpoint, method: str) -> None:
    """Raise if a method cannot run on this model."""
    reason = REFUSE[method](checkpoint.sizes) if method in REFUSE else None
    if reason:
        raise ArgumentError(
            f"{function}: method {method!r} cannot run on this model, because {reason}; choose another."
        )


def _check_error(max_error: Any) -> float:
    if not _is_real(max_error) or not 0.0 <= float(max_error) < math.inf:
        raise ArgumentError(
            f"compress: max_error must be a number from 0 on, got {max_error!r}; it is the predicted error that is "
            "allowed, for example 0.02."
        )
    return float(max_error)


def _check_one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ArgumentError(f"compress: {name} must be one of {', '.join(known)}, got {value!r}; choose one of them.")


def _is_real(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)
