"""Compression report as data: operator errors per head, parameter counts and bytes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tnlib_adapters.compression.evaluation.error_measures import RELATIVE

SUBJECTS = {"attention": "attention", "mlp": "feed-forward layers", "all": "attention, feed-forward and embeddings"}


@dataclass(frozen=True)
class HeadReport:
    """One head: relative Frobenius errors of its operators, biases included, and their spectra.

    `kept` is the rank that the head's own factors have, None where factors are not per head.
    """

    layer: int
    head: int
    qk_error: float
    ov_error: float
    qk_spectrum: list[float]
    ov_spectrum: list[float]
    qk_kept: int | None = None
    ov_kept: int | None = None


@dataclass(frozen=True)
class LayerReport:
    """One layer: relative Frobenius errors over the operators of all heads, and its parameter count."""

    layer: int
    qk_error: float
    ov_error: float
    worst: float  # the largest error of any operator of any head
    n_before: int
    n_after: int


@dataclass(frozen=True)
class Report:
    """Report of one compression. Errors are measured on the written checkpoint, rounding to its dtype included.

    `n_after` counts the numbers of the factors. The dense layout stores the multiplied-out factors, `n_before` numbers.
    """

    source: str
    model_type: str
    method: str
    layout: str
    keep: float | None  # requested fraction, None if an error was requested
    kept: float
    n_before: int
    n_after: int
    n_other: int  # numbers in all other tensors
    bytes_before: dict[str, int]  # of the weight files: "attention", "other", and "matrices" outside the attention
    bytes_after: dict[str, int]
    seconds: float
    peak_memory: int  # bytes, of the whole process
    layers: list[LayerReport]
    heads: list[HeadReport]
    left_out: list[str] = field(default_factory=list)  # files of IN that were not copied to OUT
    quality: dict[str, float] = field(default_factory=dict)  # quality measures of the whole model
    max_error: float | None = None  # requested error
    store: str = "float"
    what: str = "attention"  # compressed part, to which `keep` refers
    plain_bytes: int = 0  # of the same part with its weights rounded to int8
    plain_measured: float | None = None  # error of plain int8, where `measured` is on a text
    measure: str = RELATIVE  # error measure; see `Forecast`
    predicted: float | None = None  # error predicted by the method, without fine-tuning; None: no prediction
    measured: float | None = None  # error of the written checkpoint: of the weights, or on held-out text
    curve: dict[str, list[float]] = field(default_factory=dict)  # "kept" and "predicted": every size of this method

    @property
    def subject(self) -> str:
        """Name of the compressed part of the model."""
        return SUBJECTS[self.what]

    def compressed(self, sizes: Mapping[str, int]) -> int:
        """Return the bytes of the compressed part, from `bytes_before` or `bytes_after`."""
        return sizes.get("matrices", 0) + (0 if self.what == "mlp" else sizes["attention"])

    @property
    def n_stored(self) -> int:
        """Numbers stored for the compressed part in OUT."""
        return self.n_before if self.layout == "dense" else self.n_after

    def to_json(self) -> str:
        """Return the report as JSON text."""
        return json.dumps(asdict(self), indent=1)

    def write(self, file: Path) -> None:
        """Write the JSON text to a file."""
        file.write_text(self.to_json() + "\n", encoding="utf-8")
