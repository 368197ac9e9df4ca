"""The four projections of one attention layer, taken out of the tensors of a checkpoint and put back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tnlib import FileFormatError
from tnlib._typing import Array
from tnlib_adapters.checkpoints.architectures import Architecture
from tnlib_adapters.checkpoints.folder import CONFIG, Folder
from tnlib_adapters.checkpoints.tensor_file import FLOATS

NAMES = ("q", "k", "v", "o")


@dataclass(frozen=True)
class Sizes:
    """The numbers of a config that shape its attention."""

    n_layers: int
    n_heads: int
    d_model: int

    @property
    def d_head(self) -> int:
        """Width of one head."""
        return self.d_model // self.n_heads


@dataclass(frozen=True)
class Projections:
    """Weights that act on rows, x @ weight + bias, heads side by side in the inner dimension.

    `weights` holds "q", "k", "v" of shape (d_model, heads * d_head) and "o" of shape (heads * d_head, d_model);
    `biases` those that the architecture has.
    """

    weights: Mapping[str, Array]
    biases: Mapping[str, Array]

    def updated(self, other: Projections) -> Projections:
        """Return these with whatever the other ones hold in its place."""
        return Projections({**self.weights, **other.weights}, {**self.biases, **other.biases})


def read_sizes(folder: Folder) -> Sizes:
    """Return the sizes that config.json states, checked against each other."""
    row = folder.architecture
    values = {}
    for key in (row.n_layers, row.n_heads, row.d_model):
        value = folder.config.get(key)
        if type(value) is not int or value < 1:
            raise FileFormatError(
                f"open_checkpoint: {key} in {folder.path / CONFIG} must be a positive integer, got {value!r}; "
                "repair it."
            )
        values[key] = value
    sizes = Sizes(values[row.n_layers], values[row.n_heads], values[row.d_model])
    if sizes.d_model % sizes.n_heads:
        raise FileFormatError(
            f"open_checkpoint: {row.d_model} must be a multiple of {row.n_heads} in {folder.path / CONFIG}, "
            f"got {sizes.d_model} and {sizes.n_heads}; repair it."
        )
    return sizes


def module_names(row: Architecture, prefix: str, layer: int) -> dict[str, str]:
    """Return the modules of one layer's attention, full name -> the projections it holds."""
    base = prefix + row.attention.format(layer=layer)
    return {f"{base}.{module}": held for module, held in row.projections.items()}


def find_prefix(folder: Folder) -> str:
    """Return the prefix under which the tensors of the architecture stand in this checkpoint."""
    row = folder.architecture
    # embeddings: every checkpoint of the architecture has them, a compressed one too
    probes = [f"{prefix}{row.embeddings[0]}.weight" for prefix in row.prefixes]
    for prefix, probe in zip(row.prefixes, probes, strict=True):
        if probe in folder.tensors:
            return prefix
    raise FileFormatError(
        f"open_checkpoint: a {row.model_type} must hold tensor {probes[0]!r}, found none of that name in "
        f"{folder.path}; check that config.json belongs to these weights."
    )


def check_shapes(folder: Folder, sizes: Sizes, prefix: str, factored: Sequence[str] | None) -> None:
    """Raise unless all attention tensors are there, in the shapes that the config states.

    `factored` names, for each layer of a compressed checkpoint, the projections that stand as factors instead.
    """
    row, d = folder.architecture, sizes.d_model
    for layer in range(sizes.n_layers):
        for module, held in module_names(row, prefix, layer).items():
            shape = (d * len(held), d) if row.stored == "out_in" else (d, d * len(held))
            if factored is None or not set(held) <= set(factored[layer]):
                expect(folder, f"{module}.weight", shape)
            if f"{module}.bias" in folder.tensors:
                expect(folder, f"{module}.bias", (d * len(held),))


def expect(folder: Folder, name: str, shape: tuple[int, ...]) -> None:
    """Raise unless there is a tensor of this name and shape."""
    if name not in folder.tensors:
        raise FileFormatError(
            f"open_checkpoint: tensor {name!r} of shape {shape} is missing from {folder.path}; "
            "config.json states more layers than there are, or the download is incomplete."
        )
    if folder.tensors[name].dtype not in FLOATS:
        raise FileFormatError(
            f"open_checkpoint: tensor {name!r} must be of {', '.join(FLOATS)}, got {folder.tensors[name].dtype}; "
            "dequantize the checkpoint first."
        )
    if folder.tensors[name].shape != shape:
        raise FileFormatError(
            f"open_checkpoint: tensor {name!r} must have shape {shape} by config.json, got "
            f"{folder.tensors[name].shape}; one of the two belongs to another model."
        )


def take_apart(row: Architecture, prefix: str, layer: int, get: Callable[[str], Array | None]) -> Projections:
    """Build the projections of a layer from its tensors; `get` returns None for a name that does not exist."""
    weights: dict[str, Array] = {}
    biases: dict[str, Array] = {}
    for module, held in module_names(row, prefix, layer).items():
        weight, bias = get(f"{module}.weight"), get(f"{module}.bias")
        if weight is not None:
            on_rows = weight.T if row.stored == "out_in" else weight  # in out
            weights |= dict(zip(held, np.split(on_rows, len(held), axis=1), strict=True))
        if bias is not None:
            biases |= dict(zip(held, np.split(bias, len(held)), strict=True))
    return Projections(weights, biases)


def put_together(row: Architecture, prefix: str, layer: int, projections: Projections) -> dict[str, Array]:
    """Return the tensors of a layer as the architecture stores them: the inverse of `take_apart`."""
    tensors: dict[str, Array] = {}
    for module, held in module_names(row, prefix, layer).items():
        on_rows = np.concatenate([projections.weights[name] for name in held], axis=1)  # in out
        tensors[f"{module}.weight"] = np.ascontiguousarray(on_rows.T if row.stored == "out_in" else on_rows)
        if all(name in projections.biases for name in held):
            tensors[f"{module}.bias"] = np.concatenate([projections.biases[name] for name in held])
    return tensors
