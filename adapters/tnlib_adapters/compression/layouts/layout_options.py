"""Layouts and their sizes. Read by the command line: nothing here imports numpy."""

from __future__ import annotations

from collections.abc import Mapping

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
