"""Validated options of `compress`, and checks of a model that need no weights.

Read by the command line: nothing here imports numpy before a model is checked.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from tnlib import ArgumentError, ArgumentTypeError
from tnlib_adapters.compression.layouts.layout_options import check_layout
from tnlib_adapters.compression.methods.table import FEED_FORWARD, METHODS, TABLE, WITH_TEXT
from tnlib_adapters.files.tokenizer import MAX_TOKENS

if TYPE_CHECKING:
    from tnlib_adapters.checkpoints.checkpoint import Checkpoint

WHAT = ("attention", "mlp", "all")
STORES = {"float": None, "int8": 8, "int4": 4, "int3": 3, "int2": 2}  # name -> bits of a number

DEFAULT_BITS = 4.0  # average of "quantized" where no size is requested

# files of OUT beside those of the checkpoint
REPORT = "tnlib_report.json"
PAGE = "tnlib_report.html"

Progress = Callable[[str, int, int], None]  # (stage, done, total)


class Stage(str):
    """Name of a stage of long work, for a progress bar, with what is being done and the tokens that a step passes.

    Parameters
    ----------
    name
        The string; equal for all steps of a stage.
    detail
        The current part, such as "block 7 of 22"; "" for none.
    tokens
        Mean number of tokens that pass a block, or a model, in a step; 0 without a text.

    Examples
    --------
    >>> stage = Stage("collecting statistics", "block 7 of 22", 1024)
    >>> stage == "collecting statistics", stage.detail
    (True, 'block 7 of 22')
    """

    detail: str
    tokens: int

    def __new__(cls, name: str, detail: str = "", tokens: int = 0) -> Self:
        """Return the string with its attributes."""
        stage = super().__new__(cls, name)
        stage.detail, stage.tokens = detail, tokens
        return stage


def quiet(stage: str, done: int, total: int) -> None:
    """Show no progress."""


@dataclass(frozen=True)
class Request:
    """Validated options of `compress`; invalid ones raise `ArgumentError`."""

    keep: float | None = None
    max_error: float | None = None
    bits: float | None = None
    flops: float | None = None
    method: str = ""  # see `_default_method`
    layout: str = "factored"
    store: str = "float"
    what: str = "attention"
    calibrate: Path | None = None
    statistics: Path | None = None
    calibration_tokens: int = MAX_TOKENS
    spill: Path | None = None
    max_memory: int | None = None
    sizes: Mapping[str, int] | None = None
    cluster: str | None = None
    workers: int | None = None
    device: str = "cpu"
    dtype: str = "float32"

    @classmethod
    def of(cls, **options: Any) -> Self:
        """Return the request for the options of `compress` by name, where paths may be strings."""
        from tnlib._validate import as_path

        paths = {name: options[name] for name in ("calibrate", "statistics", "spill") if options[name] is not None}
        return cls(**options | {name: as_path("compress", name, path) for name, path in paths.items()})

    def __post_init__(self) -> None:
        check_layout(vars(self), {field.name: field.default for field in fields(self)})
        if self.method == "":
            object.__setattr__(self, "method", self._default_method())
        if self.unsized and self.store != "float" and not self.in_bits:
            object.__setattr__(self, "keep", 1.0)
        elif self.in_bits and self.store == "float" and self.bits is None and self.max_error is None:
            object.__setattr__(self, "bits", DEFAULT_BITS)
        elif self.unsized and not self.in_bits:
            raise ArgumentError(
                f"compress: keep or max_error must be given with method {self.method!r}, got neither; pass for example "
                "keep=0.5 (--keep 0.5), the fraction of the numbers that is still stored."
            )
        if self.bits is not None:
            object.__setattr__(self, "bits", check_bits("compress", self.bits))
        if self.keep is not None:
            object.__setattr__(self, "keep", check_keep("compress", self.keep))
        if self.max_error is not None:
            object.__setattr__(self, "max_error", _check_error(self.max_error))
        if self.flops is not None:
            fraction = _check_fraction("compress", "flops", self.flops, "multiplications per token that is left")
            object.__setattr__(self, "flops", fraction)
        for name, known in (("store", tuple(STORES)), ("what", WHAT)):
            _check_one_of(name, getattr(self, name), known)
        self._check_method()
        self._check_statistics()
        self._check_tokens()
        self._check_memory()
        self._check_workers()
        self._check_device()

    @property
    def spill_folder(self) -> Path | None:
        """Folder of a calibration in progress, from which it is resumed; None for a temporary one."""
        if self.spill is None and self.statistics is not None:
            return self.statistics.with_name(f"{self.statistics.name}.partial")
        return self.spill

    @property
    def unsized(self) -> bool:
        """True if no size is requested."""
        sizes = (self.keep, self.max_error, self.bits, self.flops)
        return all(size is None for size in sizes) and not self.sizes

    @property
    def in_bits(self) -> bool:
        """True if the method spends a budget of bits, not of numbers."""
        return self.method in TABLE and TABLE[self.method].in_bits

    @property
    def width(self) -> int | None:
        """Bits of a stored number; None if factors are stored as floats."""
        return STORES[self.store]

    @property
    def fits_model(self) -> bool:
        """True if the method factorises all weights of a model from calibration statistics, which can be saved."""
        return TABLE[self.method].unit == "model"

    def check(self, checkpoint: Checkpoint) -> None:
        """Raise if this model cannot be compressed with these options."""
        check_uncompressed("compress", checkpoint)
        if self.what != "mlp":
            check_attention("compress", checkpoint, self.method)
        check_runs("compress", checkpoint, self.method)
        wiring = checkpoint.wiring
        if self.calibrate is not None:
            check_reads_text("compress", checkpoint)
            context = (wiring.context or math.inf) - wiring.embedding.first_position
            if self.calibration_tokens > context and self.calibration_tokens != MAX_TOKENS:
                raise ArgumentError(
                    f"compress: calibration_tokens must be at most {context}, the context of this model, got "
                    f"{self.calibration_tokens}; lower it."
                )
        experts = next((layer.experts for layer in wiring.layers if layer.experts), None)
        if self.what != "attention" and experts is not None:
            raise ArgumentError(
                f"compress: what must be 'attention' for a {wiring.model_type}, got {self.what!r}; its "
                f"{len(experts.experts)} experts a layer, such as {experts.experts[0].up.name!r}, are not compressed."
            )
        if self.what != "attention" and (wiring.layers[0].feed_forward is None or wiring.in_memory):
            raise ArgumentError(
                f"compress: what must be 'attention' for a {wiring.model_type}, got {self.what!r}; its other matrices "
                "cannot be compressed yet."
            )

    def _default_method(self) -> str:
        """Return the method for these options.

        With a text it is "calibrated" for a fraction of the numbers or an error, otherwise "quantized"; without one
        "heads", or "matrix" for the feed-forward matrices alone or to round weights.
        """
        if self.calibrate is not None:
            return "calibrated" if self.bits is None and not self.unsized else "quantized"
        return "matrix" if self.what == "mlp" or self.unsized else "heads"

    def _check_method(self) -> None:
        if self.calibrate is None:
            check_method("compress", self.method)
            if self.bits is not None:
                raise ArgumentError(
                    "compress: bits must come with a text, got none; pass a file as calibrate (--calibrate TEXT), or "
                    "store='int4' to round weights without one."
                )
        elif self.method not in WITH_TEXT:
            raise ArgumentError(
                f"compress: calibrate works with method {', '.join(map(repr, WITH_TEXT))}, got {self.method!r}; leave "
                "one of them out."
            )
        self._check_budget()
        self._check_flops_budget()
        row = TABLE[self.method]
        if self.what == "mlp" and FEED_FORWARD not in row.applies_to:
            names = [repr(name) for name, other in TABLE.items() if FEED_FORWARD in other.applies_to]
            raise ArgumentError(
                f"compress: what='mlp' works with method {' or '.join(names)}, got {self.method!r}, which factorises "
                "attention; pass method='matrix'."
            )
        predicts_error = row.predicts_error and (self.fits_model or self.calibrate is None)
        if self.max_error is not None and not predicts_error:
            raise ArgumentError(
                f"compress: max_error cannot be met by method {self.method!r}"
                f"{'' if self.calibrate is None else ' with a text'}, whose error is not known beforehand; pass keep, "
                "or use another method."
            )

    def _check_budget(self) -> None:
        """Raise if the method does not spend this kind of budget."""
        if self.bits is not None and not self.in_bits:
            names = ", ".join(repr(name) for name, row in TABLE.items() if row.in_bits)
            raise ArgumentError(
                f"compress: bits are a budget of method {names}, got {self.method!r}; pass keep, or leave the method "
                "out."
            )
        if self.in_bits and self.store != "float" and not self.unsized:
            raise ArgumentError(
                f"compress: store={self.store!r} gives all weights the same number of bits, so that bits, keep and "
                "max_error must be left out; pass one of them."
            )
        if self.in_bits and self.keep is not None and self.max_error is not None:
            raise ArgumentError(
                f"compress: keep must come with bits, not with max_error, for method {self.method!r}, got "
                f"{self.keep} and {self.max_error}; pass bits, for example bits=3."
            )

    def _check_flops_budget(self) -> None:
        """Raise if the multiplications cannot be limited with these options."""
        if self.flops is None:
            return
        if not TABLE[self.method].counts_flops:
            names = ", ".join(repr(name) for name, row in TABLE.items() if row.counts_flops)
            raise ArgumentError(
                f"compress: flops works with method {names}, which needs a text, got {self.method!r}; pass a file as "
                "calibrate (--calibrate TEXT), or leave flops out."
            )
        if self.max_error is not None or self.layout != "factored":
            raise ArgumentError(
                "compress: flops must come with keep or alone, and with layout 'factored', got max_error="
                f"{self.max_error} and layout {self.layout!r}; leave one of them out."
            )

    def _check_statistics(self) -> None:
        for name in ("statistics", "spill"):
            if getattr(self, name) is None:
                continue
            if self.calibrate is None:
                raise ArgumentError(f"compress: {name} must come with the text of calibrate; pass that too.")
            if not self.fits_model:
                raise ArgumentError(
                    f"compress: {name} must come with method 'calibrated' or 'quantized', got method {self.method!r}; "
                    f"leave {name} out."
                )

    def _check_tokens(self) -> None:
        if isinstance(self.calibration_tokens, bool) or not isinstance(self.calibration_tokens, int):
            raise ArgumentTypeError(
                f"compress: calibration_tokens must be an integer, got {self.calibration_tokens!r}; pass for example "
                f"{MAX_TOKENS}."
            )
        if self.calibration_tokens < 2:
            raise ArgumentError(
                f"compress: calibration_tokens must be at least 2, got {self.calibration_tokens}; the default is "
                f"{MAX_TOKENS}."
            )
        if self.calibrate is None and self.calibration_tokens != MAX_TOKENS:
            raise ArgumentError("compress: calibration_tokens must come with the text of calibrate; pass that too.")

    def _check_device(self) -> None:
        if (self.device, self.dtype) == ("cpu", "float32"):
            return
        if self.calibrate is None:
            raise ArgumentError(
                "compress: device and dtype are those of a model that runs on a text, got none; pass a file as "
                "calibrate (--calibrate TEXT), or leave them out."
            )
        from tnlib_adapters.instrument.placement import placement_of

        placement_of("compress", self.device, self.dtype)

    def _check_memory(self) -> None:
        if self.max_memory is None:
            return
        if isinstance(self.max_memory, bool) or not isinstance(self.max_memory, int):
            raise ArgumentTypeError(
                f"compress: max_memory must be an integer number of bytes, got {self.max_memory!r}; pass for example "
                f"{4 * 10**9} (--max-memory 4G)."
            )
        if self.max_memory < 1:
            raise ArgumentError(
                f"compress: max_memory must be a number of bytes above 0, got {self.max_memory}; pass for example "
                f"{4 * 10**9} (--max-memory 4G)."
            )

    def _check_workers(self) -> None:
        if self.workers is not None and self.cluster is not None:
            raise ArgumentError(
                f"compress: workers and cluster exclude each other, got {self.workers} and {self.cluster!r}; pass one "
                "of them."
            )
        if self.workers is not None and (isinstance(self.workers, bool) or not isinstance(self.workers, int)):
            raise ArgumentTypeError(
                f"compress: workers must be an integer, got {self.workers!r}; pass the number of processes, for "
                "example 2."
            )
        if self.workers is not None and self.workers < 1:
            raise ArgumentError(f"compress: workers must be at least 1, got {self.workers}; pass for example 2.")
        if self.cluster is not None and not isinstance(self.cluster, str):
            raise ArgumentTypeError(
                f"compress: cluster must be the address of a Dask scheduler, got {self.cluster!r}; pass for example "
                "'tcp://10.0.0.1:8786'."
            )


def check_keep(function: str, keep: Any) -> float:
    """Return the fraction to keep, in (0, 1]."""
    return _check_fraction(function, "keep", keep, "numbers that is still stored")


def _check_fraction(function: str, name: str, value: Any, meaning: str) -> float:
    if not _is_real(value) or not 0.0 < float(value) <= 1.0:
        raise ArgumentError(
            f"{function}: {name} must lie in (0, 1], got {value!r}; it is the fraction of the {meaning}, for example "
            "0.5."
        )
    return float(value)


def check_uncompressed(function: str, checkpoint: Checkpoint) -> None:
    """Raise if a checkpoint is already compressed."""
    if checkpoint.factored is not None:
        raise ArgumentError(
            f"{function}: IN must not be compressed already, got {checkpoint.folder.path}; take the checkpoint that it "
            "was made from."
        )


def check_attention(function: str, checkpoint: Checkpoint, method: str) -> None:
    """Raise if the attention is made from latent vectors and `method` factorises its projections."""
    if checkpoint.wiring.layers[0].attention.latent is None:
        return
    wiring = checkpoint.wiring
    if TABLE[method].unit == "layer":
        single = [repr(name) for name, row in TABLE.items() if row.unit != "layer"]
        raise ArgumentError(
            f"{function}: method must be {' or '.join(single)} for a {wiring.model_type}, whose queries, keys and "
            f"values are made from latent vectors, by matrices without heads of their own, got {method!r}; pass "
            "method='matrix'."
        )


def check_reads_text(function: str, checkpoint: Checkpoint, *, text_required: bool = False) -> None:
    """Raise if a model cannot be run on a text."""
    from tnlib_adapters.files.folder import TOKENIZERS

    wiring, folder = checkpoint.wiring, checkpoint.folder.path
    otherwise = "" if text_required else ", or do without a text"
    if wiring.reads != "tokens":
        raise ArgumentError(
            f"{function}: IN must read text, got a {wiring.model_type}, which reads {wiring.reads}; pass a model of "
            f"text{otherwise}."
        )
    if wiring.encoder is not None:
        raise ArgumentError(
            f"{function}: IN must be a model of one stack to read a text, got a {wiring.model_type} with an encoder "
            f"and a decoder; pass the encoder alone{otherwise}."
        )
    if not any((folder / name).is_file() for name in TOKENIZERS):  # transformers would make one without words
        raise ArgumentError(
            f"{function}: a text needs a tokenizer beside the weights, found none in {folder}; copy it there"
            f"{otherwise}."
        )


def check_method(function: str, method: str) -> None:
    """Raise if no method of this name runs without calibration data."""
    if method in TABLE and method not in METHODS:
        raise ArgumentError(
            f"{function}: method {method!r} needs a text, got none; pass a file as calibrate (--calibrate TEXT)."
        )
    if method not in METHODS:
        raise ArgumentError(
            f"{function}: method must be one of {', '.join(METHODS)}, or, with calibrate, of {', '.join(WITH_TEXT)}, "
            f"got {method!r}; choose one of them."
        )


def check_runs(function: str, checkpoint: Checkpoint, method: str) -> None:
    """Raise if a method cannot run on this model."""
    reason = TABLE[method].reason_to_refuse(checkpoint.sizes)
    if reason:
        raise ArgumentError(
            f"{function}: method {method!r} cannot run on this model, because {reason}; choose another."
        )


def check_bits(function: str, bits: Any) -> float:
    """Return the average number of bits, in (0, 32]."""
    if not _is_real(bits) or not 0.0 < float(bits) <= 32.0:
        raise ArgumentError(
            f"{function}: bits must lie in (0, 32], got {bits!r}; it is the average number of stored bits per number, "
            "for example 4."
        )
    return float(bits)


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
