"""Layouts, and the table of those that write a smaller model of an architecture that transformers knows.

Read by the command line: nothing here imports numpy. A layout is one row and one file beside this one: a class, made
from the checkpoint and a `LayoutRequest`, that refuses models which the architecture cannot hold (`SmallerModel`).
"""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tnlib import ArgumentError

LAYOUTS = {  # of the original sizes, with lines for the help of --layout
    "factored": "the factors; transformers loads them after `import tnlib_adapters.transformers_plugin`",
    "dense": "the product of the factors under the original names, at the original size; loads without tnlib",
}

_HERE = __name__.rpartition(".")[0]


@dataclass(frozen=True)
class Layout:
    """Row of the table.

    Parameters
    ----------
    name
        Value of `compress(layout=...)`.
    writes
        Architecture of the written model, for messages and help.
    takes
        Models that it takes, for help.
    sizes
        Keys of config.json whose values may be requested.
    make
        "module:class".
    sizes_required
        Reason why `keep` does not apply; "" if it does.
    """

    name: str
    writes: str
    takes: str
    sizes: tuple[str, ...]
    make: str
    sizes_required: str = ""

    @property
    def help(self) -> str:
        """Lines for the help of --layout."""
        return f"{self.writes}, for {self.takes}; loads without tnlib; sizes: {', '.join(self.sizes)}"

    def resolve(self) -> Any:
        """Return the class."""
        return pkgutil.resolve_name(self.make)


SMALLER_MODELS: Mapping[str, Layout] = {
    row.name: row
    for row in (
        Layout(
            name="narrow",
            writes="the same architecture with narrower heads and feed-forward layers",
            takes="models whose config.json states head_dim or intermediate_size",
            sizes=("head_dim", "intermediate_size"),
            make=f"{_HERE}.narrow:NarrowModel",
        ),
    )
}

# forms that `compress` does not write, and the commands that do
OTHER_COMMANDS: Mapping[str, str] = {
    "onnx": "`tnlib compress IN SMALL --keep 0.5`, then `tnlib export-onnx SMALL OUT`",
}


def check_layout(layout: str) -> None:
    """Raise if a layout is none of `LAYOUTS`."""
    if layout not in LAYOUTS:
        known = ", ".join((*LAYOUTS, *SMALLER_MODELS))
        instead = f"run {OTHER_COMMANDS[layout]}" if layout in OTHER_COMMANDS else "choose one of them"
        raise ArgumentError(f"compress: layout must be one of {known}, got {layout!r}; {instead}.")
