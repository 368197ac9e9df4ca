"""What a compression did: errors of every head's operators, numbers and bytes, as data."""

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
    """One layer: relative Frobenius errors over all heads' operators together, and its numbers."""

    layer: int
    qk_error: float
    ov_error: float
    worst: float  # the largest error of any operator of any head
    n_before: int
    n_after: int


@dataclass(frozen=True)
class Report:
    """A compression from end to end. Errors are measured on what was written, rounding to its dtype included.

    `n_after` counts the numbers of the factors. In the dense layout they are multiplied out, and `n_before` numbers
    are stored as before.
    """

    source: str
    model_type: str
    method: str
    layout: str
    keep: float | None  # what was asked for, None where an error was
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
    left_out: list[str] = field(default_factory=list)  # files of IN that OUT does not have
    quality: dict[str, float] = field(default_factory=dict)  # what was measured on the model as a whole
    max_error: float | None = None  # what was asked for
    store: str = "float"
    what: str = "attention"  # what `keep` is a fraction of
    plain_bytes: int = 0  # of the attention, its weights rounded to int8 as they are
    plain_measured: float | None = None  # the error of that, where `measured` is of a text
    measure: str = RELATIVE  # what an error is here; see `Forecast`
    predicted: float | None = None  # error of these factors by the method, without a fit; None: it cannot tell
    measured: float | None = None  # the same of what was written: of the weights, or on held-out text
    curve: dict[str, list[float]] = field(default_factory=dict)  # "kept" and "predicted": every size of this method

    @property
    def subject(self) -> str:
        """What was compressed, in words."""
        return SUBJECTS[self.what]

    def compressed(self, sizes: Mapping[str, int]) -> int:
        """Return the bytes of what was compressed, of `bytes_before` or `bytes_after`."""
        return sizes.get("matrices", 0) + (0 if self.what == "mlp" else sizes["attention"])

    @property
    def n_stored(self) -> int:
        """Numbers that it holds in OUT."""
        return self.n_before if self.layout == "dense" else self.n_after

    def to_json(self) -> str:
        """Return the report as JSON text."""
        return json.dumps(asdict(self), indent=1)

    def write(self, file: Path) -> None:
        """Write the JSON text to a file."""
        file.write_text(self.to_json() + "\n", encoding="utf-8")
