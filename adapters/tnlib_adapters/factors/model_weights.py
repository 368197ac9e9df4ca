"""The weights of a model that are compressed, as one list.

Projections of the attention, matrices on latent vectors, those of feed-forward layers, the embedding and an unembedding
of its own are one entry each. A tensor that holds several projections belongs to an entry for each of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from tnlib import FileFormatError
from tnlib._typing import Array
from tnlib_adapters.architectures.wiring import Linear, Wiring
from tnlib_adapters.factors import ATTENTION, EMBEDDING, FEED_FORWARD, UNEMBEDDING
from tnlib_adapters.factors.projections import NAMES
from tnlib_adapters.files.safetensors_file import STORED_AS, TensorInfo, widest_float

OUTSIDE = -1  # the group of weights outside the blocks


@dataclass(frozen=True)
class ModelWeight:
    """A weight of a model, with its bias, as a checkpoint stores it."""

    module: str  # path without the prefix of the checkpoint; of a projection that of its attention module
    of: str  # the projection "q", "k", "v" or "o"; "" for the weight of `module`
    role: str  # an embedding that also makes the predictions is an embedding
    group: int  # index of its block, or `OUTSIDE`
    linear: Linear
    wiring: Wiring = field(repr=False, compare=False)
    tensors: Mapping[str, TensorInfo] = field(repr=False, compare=False)  # of the checkpoint

    @property
    def weight(self) -> TensorInfo:
        """The stored weight; `FileFormatError` if there is none."""
        if self.linear.weight not in self.tensors:
            raise FileFormatError(
                f"open_checkpoint: there must be a tensor {self.linear.weight!r}, found none; check that config.json "
                "belongs to these weights."
            )
        return self.tensors[self.linear.weight]

    @property
    def bias(self) -> TensorInfo | None:
        """The stored bias, if there is one."""
        return self.tensors.get(self.linear.bias or "")

    @property
    def shape(self) -> tuple[int, ...]:
        """The sides (in, out)."""
        if not self.of:
            return self.weight.shape[::-1] if self.linear.stored == "out_in" else self.weight.shape
        return self.wiring.sizes.sides(self.of)

    @property
    def name(self) -> str:
        """Name among the weights of its block."""
        return self.of or self.module

    @property
    def key(self) -> str:
        """Name in calibration statistics."""
        return f"{self.group}.{self.of}" if self.of else self.module

    @property
    def reads(self) -> str:
        """Name of its input in calibration statistics, which queries, keys and values share."""
        return f"{self.group}.{'y' if self.of == 'o' else 'x'}" if self.of else self.module

    @property
    def is_table(self) -> bool:
        """True for an embedding, of which single rows are read."""
        return self.role == EMBEDDING

    @property
    def tied_key(self) -> str | None:
        """Key of the predictions, if this embedding makes them."""
        return self.wiring.tied_key if self.is_table else None

    @property
    def keys(self) -> set[str]:
        """Names of all its statistics."""
        return {self.key, self.reads, self.tied_key or self.key}

    @property
    def fused(self) -> str:
        """Name of the first weight that reads the same input in its layer; "" for one that is alone."""
        layers = [] if self.group == OUTSIDE else [self.wiring.layers[self.group]]
        readers = [layer.attention.inputs for layer in layers]
        readers += [part.inputs for layer in layers for part in layer.feed_forward_layers]
        return next((inputs[0].name for inputs in readers if self.linear in inputs), "")

    def read(self) -> Array:
        """Return the weight of a module as (in, out)."""
        values: Array = self.linear.on_rows(self.weight.read_finite())
        return values


def weights_of(wiring: Wiring, tensors: Mapping[str, TensorInfo]) -> list[ModelWeight]:
    """Return the weights of a model: projections of all layers, other matrices of all blocks, and those outside."""
    rows = list[tuple[str, str, str, int, Linear]]()
    for k, (module, layer) in enumerate(zip(wiring.attention_modules, wiring.layers, strict=True)):
        projections = {} if layer.attention.latent else layer.attention.projections
        linears = {of: linear for letters, linear in projections.items() for of in letters}
        rows += [(module, of, ATTENTION, k, linears[of]) for of in NAMES if of in linears]
    for k, layer in enumerate(wiring.layers):
        rows += [(matrix.name, "", ATTENTION, k, matrix) for matrix in layer.latent_matrices]
        rows += [(matrix.name, "", FEED_FORWARD, k, matrix) for matrix in layer.feed_forward_matrices]
    for name, matrix in wiring.matrices.items() if wiring.reads == "tokens" else ():
        if wiring.is_embedding(name) or wiring.is_unembedding(name):
            rows.append((name, "", EMBEDDING if wiring.is_embedding(name) else UNEMBEDDING, OUTSIDE, matrix))
    return [ModelWeight(*own, wiring, tensors) for own in rows]


def tensors_of(weights: Iterable[ModelWeight]) -> dict[str, TensorInfo]:
    """Return the stored weights and biases by name, each once."""
    stored = (info for own in weights for info in (own.weight, own.bias))
    return {info.name: info for info in stored if info is not None}


def count_parameters(weights: Iterable[ModelWeight]) -> int:
    """Return the parameters in weights and biases of a checkpoint that is not compressed."""
    return sum(info.size for info in tensors_of(weights).values())


def biases_of(weights: Iterable[ModelWeight]) -> dict[str, TensorInfo]:
    """Return the stored biases by name, each once."""
    return {own.bias.name: own.bias for own in weights if own.bias is not None}


def n_bytes(tensors: Iterable[TensorInfo]) -> int:
    """Return the bytes of tensors in their files."""
    return sum(info.end - info.begin for info in tensors)


def float_width(replaced: Iterable[TensorInfo]) -> int:
    """Return the bits of a float in the tensors that replace these ones."""
    return 8 * STORED_AS[widest_float(replaced)].itemsize
