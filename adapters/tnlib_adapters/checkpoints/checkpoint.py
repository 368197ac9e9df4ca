"""A checkpoint folder as a model's attention layers."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tnlib import ArgumentError, ArgumentTypeError, FileFormatError
from tnlib._typing import Array
from tnlib._validate import as_count
from tnlib_adapters.architectures.architecture import by_config
from tnlib_adapters.architectures.rope import read_frequencies
from tnlib_adapters.architectures.table import Architecture
from tnlib_adapters.attention.attention import Attention
from tnlib_adapters.attention.indices import as_index
from tnlib_adapters.attention.layer_arguments import layer_arguments, one_head, per_head
from tnlib_adapters.factors.attention_factors import Piece, check_factors, descriptions, expand, factor_name
from tnlib_adapters.factors.module_factors import with_products
from tnlib_adapters.factors.projections import (
    Projections,
    Sizes,
    check_shapes,
    columns_of_head,
    find_prefix,
    module_names,
    read_sizes,
    take_apart,
)
from tnlib_adapters.files.folder import CONFIG, Folder, open_folder
from tnlib_adapters.files.tensor_file import TensorInfo


@dataclass(frozen=True, repr=False)
class Checkpoint:
    """A transformer checkpoint on disk; tensors are read when they are asked for.

    Made by `open_checkpoint`.
    """

    folder: Folder
    sizes: Sizes
    prefix: str
    pieces: list[list[dict[str, Any]]] | None  # for each layer, how its attention is stored; None as it came

    @property
    def config(self) -> Mapping[str, Any]:
        """The content of config.json."""
        return self.folder.config

    @property
    def architecture(self) -> Architecture:
        """The row of the table of architectures that describes it."""
        return self.folder.architecture

    @property
    def n_layers(self) -> int:
        """Count of attention layers."""
        return self.sizes.n_layers

    def __repr__(self) -> str:
        s = self.sizes
        shared = "" if s.kv_heads == s.n_heads else f" on {s.kv_heads} key and value heads"
        return (
            f"Checkpoint({self.architecture.model_type}, {s.n_layers} layers, {s.n_heads} heads of {s.d_head}{shared}, "
            f"d_model {s.d_model}, {self.folder.path})"
        )

    def locate(self, name: str) -> TensorInfo | None:
        """Return where a tensor lies, None if there is none; its name may lack the prefix of this checkpoint."""
        if not isinstance(name, str):
            raise ArgumentTypeError(
                f"Checkpoint: the name of a tensor must be a string, got {name!r:.80}; "
                "pass for example 'unembed.weight'."
            )
        tensors = self.folder.tensors
        return tensors.get(self.prefix + name) or tensors.get(name)

    def read(self, name: str) -> Array:
        """Read one tensor by a name that `locate` knows; half precision comes as float32.

        Raises
        ------
        FileFormatError
            If there is no such tensor, or it holds NaN or inf.
        """
        found = self.locate(name)
        if found is None:
            raise FileFormatError(
                f"Checkpoint.read: {self.folder.path} must hold tensor {self.prefix + name!r}; "
                "check that config.json belongs to these weights."
            )
        return found.read_finite()

    def projections(self, layer: int) -> Projections:
        """Return the weights and biases of one layer's attention, multiplied out if they are stored as factors."""
        layer = as_index("Checkpoint.projections", "layer", layer, self.n_layers)
        stored = take_apart(self.architecture, self.sizes, self.prefix, layer, self._get)
        if self.pieces is None:
            return stored
        return stored.updated(expand([self._piece(layer, one) for one in self.pieces[layer]], self.sizes))

    def attention(self, layer: int, *, length: int | None = None) -> Attention:
        """Return one attention layer, weights in float32 or, where stored so, float64.

        Parameters
        ----------
        layer
            Counted from 0.
        length
            Of the sequences that the model is to run on: some long-context variants turn their rotary embeddings
            by frequencies that depend on it. None: no longer than in training.

        Raises
        ------
        ArgumentError
            If there is no such layer, or the model does not reach so far.
        FileFormatError
            If a tensor holds NaN or inf, or the file was cut short since it was opened.
        """
        layer = as_index("Checkpoint.attention", "layer", layer, self.n_layers)
        told = self._arguments(layer, length, "Checkpoint.attention")
        return Attention(**told, **per_head(self.projections(layer), self.sizes))

    def head(self, layer: int, head: int, *, length: int | None = None) -> Attention:
        """Return one query head, with the key and value head that it reads, as a layer of its own.

        Only the numbers of this head are read and kept, so that all heads of a large model can be walked in little
        memory. The output bias belongs to the layer and is None here.

        Parameters
        ----------
        layer, head
            Counted from 0.
        length
            As in `attention`.

        Raises
        ------
        ArgumentError, FileFormatError
            As `attention` does.

        Examples
        --------
        >>> import tnlib_adapters
        >>> tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path()).head(1, 3).qk(0)
        LowRank(shape 65 x 65, ranks (16,), 2,080 numbers, float32)
        """
        layer = as_index("Checkpoint.head", "layer", layer, self.n_layers)
        head = as_index("Checkpoint.head", "head", head, self.sizes.n_heads)
        told = self._arguments(layer, length, "Checkpoint.head")
        if told["alibi"] is not None:
            told["alibi"] = told["alibi"][head : head + 1]
        if self.pieces is not None:
            return Attention(**told, **one_head(per_head(self.projections(layer), self.sizes), head))
        return Attention(**told, **self._read_head(layer, head))

    def positions(self) -> Array:
        """Return the learned positions (context, d_model), from the first position of a sequence on.

        They are what the stream starts with on top of its tokens, before any norm of the two; see
        `Attention.qk_positions`.

        Raises
        ------
        ArgumentError
            If positions are not learned.
        """
        row = self.architecture
        if row.reads == "images":
            table: Array = self.read(f"{row.embeddings[0].split('.')[0]}.position_embeddings")[0]
            return table
        if len(row.embeddings) < 2:
            raise ArgumentError(
                f"Checkpoint.positions: positions must be learned, but a {row.model_type} has none; its layers know "
                "the distance: use qk with a distance, or qk_tensor."
            )
        first = by_config(row.first_position, self.config)
        return self.read(f"{row.embeddings[1]}.weight")[first:]

    def _arguments(self, layer: int, length: int | None, function: str) -> dict[str, Any]:
        length = None if length is None else as_count(function, "length", length)
        base = self.prefix + self.architecture.attention.format(layer=layer)
        return layer_arguments(
            self.architecture,
            self.config,
            self.sizes,
            layer,
            lambda name: self._get(f"{base}.{name}"),
            length=length,
            function=function,
        )

    def _read_head(self, layer: int, head: int) -> dict[str, Any]:
        """Read the weights and biases of one head, and nothing else."""
        row, tensors, everything = self.architecture, self.folder.tensors, slice(None)
        found: dict[str, Any] = {}
        for module, held in module_names(row, self.prefix, layer).items():
            for name in held:
                own = columns_of_head(row, self.sizes, held, name, head)
                outer_first = (row.stored == "out_in") != (name == "o")  # of the stored legs, heads are in the first
                part = tensors[f"{module}.weight"].read_part((own, everything) if outer_first else (everything, own))
                found[f"W_{name.upper()}"] = (part.T if outer_first != (name == "o") else part)[None]
                if name != "o" and f"{module}.bias" in tensors:
                    found[f"b_{name.upper()}"] = tensors[f"{module}.bias"].read_part((own,))[None]
        return found

    def _get(self, name: str) -> Array | None:
        """Read a tensor, None if there is none: an empty one stands where the weights are factors."""
        found = self.folder.tensors.get(name)
        return None if found is None or found.size == 0 else found.read_finite()

    def _piece(self, layer: int, described: dict[str, Any]) -> Piece:
        def get(part: str) -> Array:
            name = factor_name(self.architecture, self.prefix, layer, described["of"], part)
            return self.folder.tensors[name].read_finite()

        return Piece.read(described, get)


def open_checkpoint(folder: str | os.PathLike[str]) -> Checkpoint:
    """Open a checkpoint folder: config.json beside safetensors, single or sharded; only headers are read.

    Parameters
    ----------
    folder
        Path of the folder. Architectures: BERT, RoBERTa, ViT, GPT-2, GPT-J, GPT-NeoX, OPT, Llama, Mistral, Qwen2,
        Qwen3, Gemma, Gemma 2, Phi, Phi-3, Falcon, BLOOM, and the model that is shipped with this package.

    Returns
    -------
    Checkpoint
        `.config` and `.attention(layer)`; a folder that `tnlib compress` wrote opens like any other.

    Raises
    ------
    MissingFileError
        If the folder or its config.json is missing.
    FileFormatError
        If the architecture is not known, a file is damaged or pickled, or a shape contradicts the config.

    Examples
    --------
    >>> import tnlib_adapters
    >>> tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path()).n_layers
    2
    """
    opened = open_folder(folder)
    sizes = read_sizes(opened.architecture, opened.config, str(opened.path / CONFIG))
    for layer in range(sizes.n_layers):
        read_frequencies(opened.architecture, opened.config, sizes.d_head, None, "open_checkpoint", layer=layer)
    prefix = find_prefix(opened)
    pieces = descriptions(opened.config)
    if pieces is not None and len(pieces) != sizes.n_layers:
        raise FileFormatError(
            f"open_checkpoint: config.json must describe the factors of {sizes.n_layers} layers, got {len(pieces)}; "
            "compress again."
        )
    factored = None if pieces is None else ["".join(piece["of"] for piece in layer) for layer in pieces]
    check_shapes(opened, sizes, prefix, factored)
    check_factors(opened, prefix, pieces or [])
    return Checkpoint(with_products(opened, prefix), sizes, prefix, pieces)


def as_attention(projections: Projections, sizes: Sizes, scale: float) -> Attention:
    """Split projections into heads, without positions."""
    return Attention(**per_head(projections, sizes), scale=scale)
