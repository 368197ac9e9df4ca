"""Layouts of inference engines: widths and groups of linear layers, and models that they hold.

Read by the command line: nothing here imports numpy.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tnlib import ArgumentError
from tnlib_adapters.compression.options import Budget

if TYPE_CHECKING:
    from tnlib_adapters.checkpoints.checkpoint import Checkpoint

GGUF, GGUF_FILE = "gguf", "model.gguf"
QUANTIZED = "quantized"  # the method that rounds on the grids of engines
_SUPER_BLOCK = 256  # inputs
_MULTIPLE = 32  # of inputs and outputs of every layer: codes and zeros fill words of 32 bits


@dataclass(frozen=True)
class EngineLayout:
    """Linear layers that a layout of an inference engine holds, each in one of these widths."""

    bits: tuple[int, ...]  # of a weight
    # numbers of inputs that share a scale; the largest that divides the inputs is an option, and 0 for all of them
    groups: tuple[int, ...]
    # formats of the tensors (`factors.engine_tensors`); "" if the engine has none
    of_causal: str  # of models that predict the next token
    of_encoders: str
    # bits of a weight whose inputs are a multiple of 256, with the average that they and their scales take
    super_bits: Mapping[int, float] = field(default_factory=dict)
    holds_tables: bool = False  # True if embedding and unembedding are integers too
    # True if weights of one input have one width and group: vLLM and SGLang join queries, keys and values, and gate
    # and up
    fuses: bool = False

    @property
    def fewest_bits(self) -> float:
        """Average below which no budget can be met without super-blocks."""
        return min(self.bits) + (0 if 0 in self.groups else 16 / max(self.groups))

    def format_of(self, checkpoint: Checkpoint) -> str:
        """Return the format of the tensors of a model."""
        return self.of_encoders if checkpoint.wiring.unembedding is None else self.of_causal


K_QUANTS = {2: 2.625, 3: 3.4375, 4: 4.5, 5: 5.5, 6: 6.5625, 8: 8.5}
ENGINES: Mapping[str, EngineLayout] = {
    "gptq": EngineLayout((2, 3, 4, 8), (0, 128, 64, 32), "gptq", "", fuses=True),
    "compressed-tensors": EngineLayout(
        (2, 3, 4, 5, 6, 8), (0, 128, 64, 32), "compressed-tensors", "compressed-tensors", fuses=True
    ),
    "onnxruntime": EngineLayout((2, 4, 8), (128, 64, 32), "gptq", "compressed-tensors"),
    # written as blocks in safetensors, measured, and converted
    GGUF: EngineLayout((4, 5, 8), (32,), GGUF, "", super_bits=K_QUANTS, holds_tables=True),
}


def check_engine_options(layout: str, method: str, budget: Budget, *, with_text: bool) -> None:
    """Raise if the options ask for what integers of an engine cannot hold."""
    if method != QUANTIZED or not with_text:
        raise ArgumentError(
            f"compress: layout {layout!r} must come with method {QUANTIZED!r} and a text, got method {method!r}"
            f"{'' if with_text else ' and none'}; pass a file as calibration (--calibrate TEXT)."
        )
    if budget.keep is not None:
        raise ArgumentError(
            f"compress: keep must be left out for layout {layout!r}, which holds whole weights, got {budget.keep}; "
            "pass bits."
        )
    engine = ENGINES[layout]
    fewest = min((engine.fewest_bits, *engine.super_bits.values()))
    if budget.bits is not None and budget.bits < fewest:
        raise ArgumentError(
            f"compress: bits must be at least {fewest:g} for layout {layout!r}, its smallest width and its scales, got "
            f"{budget.bits:g}; raise it."
        )
    _check_width(layout, budget, engine.super_bits or engine.bits)


def _check_width(layout: str, budget: Budget, widths: Iterable[int], which: str = "") -> None:
    """Raise if a budget asks for another width than these."""
    if budget.width is not None and budget.width not in widths:
        raise ArgumentError(
            f"compress: store must be of {', '.join(map(str, widths))} bits for layout {layout!r}{which}, got "
            f"{budget.store!r}; pass another."
        )


def check_engine(layout: str, checkpoint: Checkpoint, budget: Budget) -> None:
    """Raise if a model cannot be written in a layout of an engine."""
    engine, wiring, inputs = ENGINES[layout], checkpoint.wiring, set[int]()
    if not engine.format_of(checkpoint) or wiring.encoder is not None:
        raise ArgumentError(
            f"compress: layout {layout!r} needs a model that predicts tokens, got a {wiring.model_type}; pass layout "
            "'compressed-tensors' or 'factored'."
        )
    for layer in wiring.layers:
        for letters, linear in layer.attention.projections.items():
            if len(letters) > 1 or linear.stored != "out_in":
                raise ArgumentError(
                    f"compress: layout {layout!r} needs queries, keys and values in linear layers of their own, got "
                    f"{linear.name!r} of a {wiring.model_type} for {', '.join(letters)}; pass layout 'factored' or "
                    "'dense'."
                )
        both = next((m for m in layer.feed_forward_layers if m.gate is not None and m.gate == m.up), None)
        if both is not None:
            raise ArgumentError(
                f"compress: layout {layout!r} needs gate and up in linear layers of their own, got a "
                f"{wiring.model_type} with {both.up.name!r}; pass layout 'factored' or 'dense'."
            )
        for linear in (*layer.attention.matrices, *layer.feed_forward_matrices):
            shape = checkpoint.folder.tensors[linear.weight].shape
            inputs.add(shape[1])
            if any(n % _MULTIPLE for n in shape):
                raise ArgumentError(
                    f"compress: layout {layout!r} needs multiples of {_MULTIPLE} inputs and outputs, got "
                    f"{linear.weight!r} of shape {shape}; pass layout 'factored' or 'dense'."
                )
    if engine.super_bits and any(n % _SUPER_BLOCK for n in inputs):
        _check_width(layout, budget, engine.bits, f" and sides that are no multiples of {_SUPER_BLOCK}")
    if layout == GGUF:
        from tnlib_adapters.compression.gguf_file import check_gguf

        check_gguf(checkpoint)
