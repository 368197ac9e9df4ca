"""The validated request of a compression, and checks of a model that need no weights.

Read by the command line: nothing here imports numpy before a model is checked.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from tnlib import ArgumentError, ArgumentTypeError
from tnlib_adapters.compression.engine_layouts import ENGINES, QUANTIZED, check_engine, check_engine_options
from tnlib_adapters.compression.methods.method_table import METHODS, TABLE, WITH_TEXT
from tnlib_adapters.compression.options import (
    CALIBRATION_TOKENS,
    LAYOUTS,
    OTHER_COMMANDS,
    Budget,
    Calibration,
    Run,
    check_one_of,
)
from tnlib_adapters.factors import FEED_FORWARD
from tnlib_adapters.files.tokenizer import MAX_TOKENS

if TYPE_CHECKING:
    from tnlib_adapters.architectures.wiring import Wiring
    from tnlib_adapters.checkpoints.checkpoint import Checkpoint

EFFORTS = ("low", "default", "high")
WHAT = ("all", "linear", "attention", "mlp")

LINEAR = "linear"
DEFAULT_BITS = 4.0  # average of "quantized" where no size is requested

# files of OUT beside those of the checkpoint
REPORT = "tnlib_report.json"
PAGE = "tnlib_report.html"


@dataclass(frozen=True)
class Request:
    """Options of `compress` that go together; others raise `ArgumentError`."""

    budget: Budget
    calibration: Calibration | None
    method: str
    what: str = "all"
    layout: str = "factored"
    effort: str = "default"
    run: Run = Run()

    @classmethod
    def of(
        cls,
        budget: Budget | None = None,
        *,
        calibration: Calibration | str | os.PathLike[str] | None = None,
        method: str | None = None,
        **options: Any,
    ) -> Self:
        """Return the request for the arguments of `compress`, with the defaults of method and budget."""
        if budget is not None and not isinstance(budget, Budget):
            raise ArgumentTypeError(
                f"compress: budget must be a Budget, got {budget!r}; pass for example Budget(bits=4) or "
                "Budget(keep=0.5)."
            )
        if calibration is not None and not isinstance(calibration, Calibration):
            calibration = Calibration(calibration)
        budget = budget or Budget()
        if options.get("layout") in ENGINES:
            method = method or QUANTIZED
            if options.get("what", cls.what) == cls.what and not ENGINES[options["layout"]].holds_tables:
                options["what"] = LINEAR
        if method is None:
            method = _default_method(budget, options.get("what", cls.what), with_text=calibration is not None)
        in_bits = method in TABLE and TABLE[method].in_bits
        if budget.unbounded and budget.store != "float" and not in_bits:
            budget = replace(budget, keep=1.0)
        elif in_bits and budget.store == "float" and budget.bits is None and budget.max_error is None:
            engine = ENGINES.get(options.get("layout", ""))
            budget = replace(budget, bits=max(DEFAULT_BITS, engine.fewest_bits if engine else 0.0))
        return cls(budget, calibration, method, **options)

    def __post_init__(self) -> None:
        if not isinstance(self.run, Run):
            raise ArgumentTypeError(
                f"compress: run must be a Run, got {self.run!r}; pass for example Run(device='cuda')."
            )
        for name, known in (("what", WHAT), ("effort", EFFORTS)):
            check_one_of("compress", name, getattr(self, name), known)
        self._check_layout()
        if self.budget.unbounded and self.calibration is None and not self.in_bits:
            raise ArgumentError(
                "compress: a text or a size must be given, got neither; pass a file as calibration (--calibrate TEXT), "
                "which rounds the weights to 4 bits on average, or Budget(keep=0.5) (--keep 0.5), the fraction of the "
                "parameters that is still stored."
            )
        if self.budget.unbounded and not self.in_bits:
            raise ArgumentError(
                f"compress: keep or max_error must be given with method {self.method!r}, got neither; pass for example "
                "Budget(keep=0.5) (--keep 0.5), the fraction of the parameters that is still stored."
            )
        self._check_method()
        self._check_run()

    @property
    def with_text(self) -> bool:
        """True if there are calibration data."""
        return self.calibration is not None

    @property
    def window(self) -> int:
        """Tokens that are read of each line of the calibration text, or in each window."""
        return MAX_TOKENS if self.calibration is None else self.calibration.window

    @property
    def tokens(self) -> int:
        """Tokens of the calibration text that are used."""
        return CALIBRATION_TOKENS if self.calibration is None else self.calibration.tokens

    @property
    def folder(self) -> Path | None:
        """Folder of the statistics, from which an interrupted run is resumed; None for a temporary one."""
        return None if self.run.folder is None else Path(self.run.folder)

    @property
    def in_bits(self) -> bool:
        """True if the method spends a budget of bits, not of parameters."""
        return self.method in TABLE and TABLE[self.method].in_bits

    def check(self, checkpoint: Checkpoint) -> None:
        """Raise if this model cannot be compressed with these options."""
        wiring = checkpoint.wiring
        if checkpoint.factored is not None:
            raise ArgumentError(
                f"compress: IN must not be compressed already, got {checkpoint.folder.path}; take the checkpoint that "
                "it was made from."
            )
        if self.layout in ENGINES:
            check_engine(self.layout, checkpoint, self.budget)
        if self.what != "mlp" and wiring.layers[0].attention.latent is not None and TABLE[self.method].unit == "layer":
            single = [repr(name) for name, row in TABLE.items() if row.unit != "layer"]
            raise ArgumentError(
                f"compress: method must be {' or '.join(single)} for a {wiring.model_type}, whose queries, keys and "
                "values are made from latent vectors, by matrices without heads of their own, got "
                f"{self.method!r}; pass method='matrix'."
            )
        if reason := TABLE[self.method].reason_to_refuse(checkpoint.sizes):
            raise ArgumentError(
                f"compress: method {self.method!r} cannot run on this model, because {reason}; choose another."
            )
        if self.calibration is not None:
            check_reads_text("compress", checkpoint)
            context = (wiring.context or math.inf) - wiring.embedding.first_position
            if self.window > context and self.window != MAX_TOKENS:
                raise ArgumentError(
                    f"compress: window (--window) must be at most {context}, the context of this model, got "
                    f"{self.window}; lower it."
                )
        self._check_what(wiring)

    def _check_what(self, wiring: Wiring) -> None:
        """Raise if the weights outside the attention cannot be compressed."""
        if self.what == "attention":
            return
        advice = "pass what='attention' (--what attention)"
        experts = next((layer.experts for layer in wiring.layers if layer.experts), None)
        if experts is not None:
            raise ArgumentError(
                f"compress: what must be 'attention' for a {wiring.model_type}, got {self.what!r}, because its "
                f"{len(experts.experts)} experts a layer, such as {experts.experts[0].up.name!r}, are not compressed; "
                f"{advice}."
            )
        if self.what == "all" and wiring.is_attention_only:
            return
        if wiring.layers[0].feed_forward is None or wiring.in_memory:
            raise ArgumentError(
                f"compress: what must be 'attention' for a {wiring.model_type}, got {self.what!r}, because its other "
                f"matrices cannot be compressed yet; {advice}."
            )

    def _check_layout(self) -> None:
        """Raise if the layout is unknown, or does not go with the other options."""
        layout, budget = self.layout, self.budget
        if layout not in LAYOUTS:
            instead = f"run {OTHER_COMMANDS[layout]}" if layout in OTHER_COMMANDS else "choose one of them"
            raise ArgumentError(f"compress: layout must be one of {', '.join(LAYOUTS)}, got {layout!r}; {instead}.")
        if layout in ENGINES:
            check_engine_options(layout, self.method, budget, with_text=self.with_text)

    def _check_method(self) -> None:
        if self.calibration is None:
            if self.method in WITH_TEXT:
                raise ArgumentError(
                    f"compress: method {self.method!r} needs a text, got none; pass a file as calibration (--calibrate "
                    "TEXT)."
                )
            if self.method not in METHODS:
                raise ArgumentError(
                    f"compress: method must be one of {', '.join(METHODS)}, or, with calibration data, of "
                    f"{', '.join(WITH_TEXT)}, got {self.method!r}; choose one of them."
                )
            if self.budget.bits is not None:
                raise ArgumentError(
                    "compress: bits must come with a text, got none; pass a file as calibration (--calibrate TEXT), or "
                    "store='int4' (--store int4) to round weights without one."
                )
        elif self.method not in WITH_TEXT:
            raise ArgumentError(
                f"compress: calibration works with method {', '.join(map(repr, WITH_TEXT))}, got {self.method!r}; "
                "leave one of them out."
            )
        self._check_bits()
        self._check_flops()
        row, budget = TABLE[self.method], self.budget
        if self.what == "mlp" and FEED_FORWARD not in row.applies_to:
            names = [repr(name) for name, other in TABLE.items() if FEED_FORWARD in other.applies_to]
            raise ArgumentError(
                f"compress: what='mlp' works with method {' or '.join(names)}, got {self.method!r}, which factorises "
                "attention; pass method='matrix'."
            )
        if budget.max_error is not None and not row.predicts_error:
            raise ArgumentError(
                f"compress: max_error cannot be met by method {self.method!r}, whose error is not known beforehand; "
                "pass keep, or use another method."
            )

    def _check_bits(self) -> None:
        """Raise if the method does not spend this kind of budget."""
        if self.budget.bits is not None and not self.in_bits:
            names = ", ".join(repr(name) for name, row in TABLE.items() if row.in_bits)
            raise ArgumentError(
                f"compress: bits are a budget of method {names}, got {self.method!r}; pass keep, or leave the method "
                "out."
            )
        if self.in_bits and self.budget.store != "float" and not self.budget.unbounded:
            raise ArgumentError(
                f"compress: store={self.budget.store!r} gives all weights the same number of bits; pass either it or "
                "one of bits, keep and max_error."
            )
        if self.in_bits and self.budget.keep is not None and self.budget.max_error is not None:
            raise ArgumentError(
                f"compress: keep must come with bits, not with max_error, for method {self.method!r}, got "
                f"{self.budget.keep} and {self.budget.max_error}; pass bits, for example Budget(bits=3)."
            )

    def _check_flops(self) -> None:
        """Raise if the multiplications cannot be limited with these options."""
        if self.budget.flops is None:
            return
        if not TABLE[self.method].counts_flops:
            names = ", ".join(repr(name) for name, row in TABLE.items() if row.counts_flops)
            raise ArgumentError(
                f"compress: flops works with method {names}, which needs a text, got {self.method!r}; pass a file as "
                "calibration (--calibrate TEXT), or leave flops out."
            )
        if self.budget.max_error is not None or self.layout != "factored":
            raise ArgumentError(
                "compress: flops must come with keep or alone, and with layout 'factored', got max_error="
                f"{self.budget.max_error} and layout {self.layout!r}; leave one of them out."
            )

    def _check_run(self) -> None:
        """Raise if device, dtype or folder need a text."""
        run = self.run
        if self.calibration is None and run.folder is not None:
            raise ArgumentError(
                "compress: folder must come with calibration (--calibrate TEXT), got none; pass that too."
            )
        if (run.device, run.dtype) == ("cpu", "float32"):
            return
        if self.calibration is None:
            raise ArgumentError(
                "compress: device and dtype are those of a model that runs on a text, got none; pass a file as "
                "calibration (--calibrate TEXT), or leave them out."
            )
        from tnlib_adapters.instrument.stored_weights import placement_of

        placement_of("compress", run.device, run.dtype)


def _default_method(budget: Budget, what: str, *, with_text: bool) -> str:
    """Return the method for these options.

    With a text it is "calibrated" for a fraction of the parameters or of the multiplications, or for factors in
    integers within an error, otherwise "quantized"; without one "heads", or "matrix" for the feed-forward matrices
    alone or to round weights.
    """
    if with_text:
        factors = budget.keep is not None or budget.flops is not None
        factors = factors or (budget.max_error is not None and budget.width is not None)
        return "calibrated" if factors and budget.bits is None else "quantized"
    return "matrix" if what == "mlp" or budget.unbounded else "heads"


def check_reads_text(function: str, checkpoint: Checkpoint, *, text_required: bool = False) -> None:
    """Raise if a model cannot be run on a text."""
    from tnlib_adapters.files.tokenizer import has_tokenizer

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
    if not has_tokenizer(folder):
        raise ArgumentError(
            f"{function}: a text needs a tokenizer beside the weights, found none in {folder}; copy it there"
            f"{otherwise}."
        )
