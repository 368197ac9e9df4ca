"""Layouts, and the options of `compress` that go with them. Read by the command line: nothing here imports numpy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tnlib import ArgumentError, ArgumentTypeError

HEAD, NEURONS = SIZES = ("head_dim", "intermediate_size")  # keys of config.json, the sizes of layout "narrow"

LAYOUTS = {  # with lines for the help of --layout
    "factored": "the factors; transformers loads them after `import tnlib_adapters.transformers_plugin`",
    "dense": "the product of the factors under the original names, at the original size; loads without tnlib",
    "narrow": "the same architecture with narrower heads and feed-forward layers, for models whose config.json states "
    f"head_dim or intermediate_size; loads without tnlib; sizes: {', '.join(SIZES)}",
}

# forms that `compress` does not write, and the commands that do
OTHER_COMMANDS: Mapping[str, str] = {
    "onnx": "`tnlib compress IN SMALL --keep 0.5`, then `tnlib export-onnx SMALL OUT`",
}

_OF_NARROW = ("layout", "sizes", "keep", "calibrate", "calibration_tokens", "device", "dtype")


def check_layout(options: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Raise if the layout among the options of `compress` is unknown, or does not go with the others."""
    layout, keep, sizes = options["layout"], options["keep"], options["sizes"]
    if layout not in LAYOUTS:
        instead = f"run {OTHER_COMMANDS[layout]}" if layout in OTHER_COMMANDS else "choose one of them"
        raise ArgumentError(f"compress: layout must be one of {', '.join(LAYOUTS)}, got {layout!r}; {instead}.")
    if layout != "narrow":
        if sizes:
            raise ArgumentError(f"compress: sizes must come with layout 'narrow', got {layout!r}; pass keep.")
        return
    for name, value in options.items():
        if name not in _OF_NARROW and value != defaults[name]:
            raise ArgumentError(
                f"compress: {name} must be left out with layout 'narrow', got {value!r}; its size is that of keep, or "
                f"of sizes ({', '.join(SIZES)})."
            )
    if (keep is None) == (not sizes):
        raise ArgumentError(
            f"compress: either keep or sizes must be given with layout 'narrow', got "
            f"{'neither' if keep is None else 'both'}; pass for example keep=0.5 (--keep 0.5), or sizes={{{HEAD!r}: "
            f"64}} (--size {HEAD}=64)."
        )
    for key, value in (sizes or {}).items():
        if key not in SIZES:
            raise ArgumentError(
                f"compress: sizes of layout 'narrow' must be among {', '.join(SIZES)}, got {key!r}; choose one of them."
            )
        if isinstance(value, bool) or not isinstance(value, int):
            raise ArgumentTypeError(f"compress: {key} in sizes must be an integer, got {value!r}; pass for example 64.")
    if options["calibrate"] is None:
        raise ArgumentError(
            "compress: layout 'narrow' needs a text, got none; pass a file as calibrate (--calibrate TEXT)."
        )
