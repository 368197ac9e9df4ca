"""The four projections of one attention layer, taken out of the tensors of a checkpoint and put back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tnlib import FileFormatError
from tnlib._typing import Array
from tnlib_adapters.architectures.architecture import Config
from tnlib_adapters.architectures.table import Architecture
from tnlib_adapters.files.folder import Folder
from tnlib_adapters.files.tensor_file import FLOATS

NAMES = ("q", "k", "v", "o")


@dataclass(frozen=True)
class Sizes:
    """The numbers of a config that shape its attention.

    Without `kv_heads` there are as many as query heads, without `d_head` it is d_model / heads.
    """

    n_layers: int
    n_heads: int
    d_model: int
    kv_heads: int = 0
    d_head: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "kv_heads", self.kv_heads or self.n_heads)
        object.__setattr__(self, "d_head", self.d_head or self.d_model // self.n_heads)

    @property
    def widths(self) -> dict[str, int]:
        """Width of the inner dimension of every projection."""
        q, kv = self.n_heads * self.d_head, self.kv_heads * self.d_head
        return {"q": q, "k": kv, "v": kv, "o": q}


@dataclass(frozen=True)
class Projections:
    """Weights that act on rows, x @ weight + bias, heads side by side in the inner dimension.

    `weights` holds "q" of shape (d_model, heads * d_head), "k" and "v" of shape (d_model, kv_heads * d_head) and "o"
    of shape (heads * d_head, d_model); `biases` those that the architecture has.
    """

    weights: Mapping[str, Array]
    biases: Mapping[str, Array]

    def updated(self, other: Projections) -> Projections:
        """Return these with whatever the other ones hold in its place."""
        return Projections({**self.weights, **other.weights}, {**self.biases, **other.biases})


def read_sizes(row: Architecture, config: Config, where: str, function: str = "open_checkpoint") -> Sizes:
    """Return the sizes that a config states, checked against each other."""

    def positive(key: str, value: object) -> int:
        if type(value) is not int or value < 1:
            raise FileFormatError(f"{function}: {key} in {where} must be a positive integer, got {value!r}; repair it.")
        return value

    n_layers, n_heads, d_model = (
        positive(key, row.get(config, key)) for key in (row.n_layers, row.n_heads, row.d_model)
    )
    stated = None if row.d_head is None else row.get(config, row.d_head)
    if stated is None and d_model % n_heads:
        raise FileFormatError(
            f"{function}: {row.d_model} must be a multiple of {row.n_heads} in {where}, "
            f"got {d_model} and {n_heads}; repair it."
        )
    d_head = d_model // n_heads if stated is None else positive(str(row.d_head), stated)
    kv_heads = _kv_heads(row, config, n_heads)
    if n_heads % positive("the count of key and value heads", kv_heads):
        raise FileFormatError(
            f"{function}: {row.n_heads} must be a multiple of the count of key and value heads in {where}, "
            f"got {n_heads} and {kv_heads}; repair it."
        )
    return Sizes(n_layers, n_heads, d_model, kv_heads, d_head)


def _kv_heads(row: Architecture, config: Config, n_heads: int) -> int:
    if row.kv_heads is None:
        return n_heads
    if isinstance(row.kv_heads, str):
        stated: int | None = row.get(config, row.kv_heads)
        return n_heads if stated is None else stated
    return row.kv_heads(config, n_heads)


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
    row = folder.architecture
    for layer in range(sizes.n_layers):
        for module, held in module_names(row, prefix, layer).items():
            if factored is None or not set(held) <= set(factored[layer]):
                expect(folder, f"{module}.weight", weight_shape(row, sizes, held))
            if f"{module}.bias" in folder.tensors:
                expect(folder, f"{module}.bias", (n_out(sizes, held),))
        for norm in row.qk_norm or ():
            expect(folder, f"{prefix}{row.attention.format(layer=layer)}.{norm}.weight", (sizes.d_head,))


def weight_shape(row: Architecture, sizes: Sizes, held: str) -> tuple[int, int]:
    """Return the stored shape of the weight that holds these projections."""
    n_in = sizes.widths["o"] if held == "o" else sizes.d_model
    shape = (n_out(sizes, held), n_in)
    return shape if row.stored == "out_in" else shape[::-1]


def n_out(sizes: Sizes, held: str) -> int:
    """Return the width of what a module with these projections writes."""
    return sizes.d_model if held == "o" else sum(sizes.widths[name] for name in held)


def expect(folder: Folder, name: str, shape: tuple[int, ...], dtypes: Sequence[str] = FLOATS) -> None:
    """Raise unless there is a tensor of this name and shape, of one of these dtypes."""
    if name not in folder.tensors:
        raise FileFormatError(
            f"open_checkpoint: tensor {name!r} of shape {shape} is missing from {folder.path}; "
            "config.json states more layers than there are, or the download is incomplete."
        )
    if folder.tensors[name].dtype not in dtypes:
        raise FileFormatError(
            f"open_checkpoint: tensor {name!r} must be of {', '.join(dtypes)}, got {folder.tensors[name].dtype}; "
            "dequantize the checkpoint first."
        )
    if folder.tensors[name].shape != shape:
        raise FileFormatError(
            f"open_checkpoint: tensor {name!r} must have shape {shape} by config.json, got "
            f"{folder.tensors[name].shape}; one of the two belongs to another model."
        )


def take_apart(
    row: Architecture, sizes: Sizes, prefix: str, layer: int, get: Callable[[str], Array | None]
) -> Projections:
    """Build the projections of a layer from its tensors; `get` returns None for a name that does not exist."""
    weights: dict[str, Array] = {}
    biases: dict[str, Array] = {}
    for module, held in module_names(row, prefix, layer).items():
        weight, bias = get(f"{module}.weight"), get(f"{module}.bias")
        if weight is not None:
            on_rows = weight.T if row.stored == "out_in" else weight  # in out
            weights |= _split(row, sizes, held, on_rows)
        if bias is not None:
            biases |= _split(row, sizes, held, bias)
    return Projections(weights, biases)


def put_together(
    row: Architecture, sizes: Sizes, prefix: str, layer: int, projections: Projections
) -> dict[str, Array]:
    """Return the tensors of a layer as the architecture stores them: the inverse of `take_apart`."""
    found = join_modules(row, sizes, prefix, layer, projections, np.concatenate)
    return {name: np.ascontiguousarray(values) for name, values in found.items()}


def join_modules(
    row: Architecture,
    sizes: Sizes,
    prefix: str,
    layer: int,
    projections: Projections,
    concatenate: Callable[[Sequence[Any], int], Any],
) -> dict[str, Any]:
    """Return the tensors of a layer as views where they can be, of whatever library `concatenate` is from."""
    tensors: dict[str, Any] = {}
    for module, held in module_names(row, prefix, layer).items():
        on_rows = _join(row, sizes, [projections.weights[name] for name in held], concatenate)  # in out
        tensors[f"{module}.weight"] = on_rows.T if row.stored == "out_in" else on_rows
        if all(name in projections.biases for name in held):
            tensors[f"{module}.bias"] = _join(row, sizes, [projections.biases[name] for name in held], concatenate)
    return tensors


def columns_of_head(row: Architecture, sizes: Sizes, held: str, name: str, head: int) -> slice:
    """Return where a query head's part of a projection lies in the inner dimension of the module that holds it."""
    group = sizes.n_heads // sizes.kv_heads
    own, within = (head, head % group) if name in "qo" else (head // group, 0)
    if len(held) == 1 or row.fused == "blocks":
        before = sum(sizes.widths[other] for other in held[: held.index(name)])
        begin = before + own * sizes.d_head
    else:
        in_group = {"q": within, "k": group, "v": group + 1}[name]
        begin = (head // group * (group + 2) + in_group) * sizes.d_head
    return slice(begin, begin + sizes.d_head)


def _split(row: Architecture, sizes: Sizes, held: str, fused: Array) -> dict[str, Array]:
    """Return the projections that stand together in the last leg of a weight or bias."""
    if len(held) == 1:
        return {held: fused}
    if row.fused == "blocks":
        ends = np.cumsum([sizes.widths[name] for name in held])[:-1]
        return dict(zip(held, np.split(fused, ends, axis=-1), strict=True))
    shape = (*fused.shape[:-1], sizes.kv_heads, -1, sizes.d_head)
    by_group = fused.reshape(shape)  # ... kv (queries of the group, its key, its value) dh
    parts = (by_group[..., :-2, :], by_group[..., -2, :], by_group[..., -1, :])
    return {name: part.reshape(*fused.shape[:-1], -1) for name, part in zip("qkv", parts, strict=True)}


def _join(
    row: Architecture, sizes: Sizes, parts: Sequence[Any], concatenate: Callable[[Sequence[Any], int], Any]
) -> Any:
    """Put projections side by side in the last leg as the architecture stores them."""
    if len(parts) == 1:
        return parts[0]
    if row.fused == "blocks":
        return concatenate(parts, -1)
    legs = [part.reshape(*part.shape[:-1], sizes.kv_heads, -1, sizes.d_head) for part in parts]
    return concatenate(legs, -2).reshape(*parts[0].shape[:-1], -1)
