"""A checkpoint folder as a model's attention layers, and validation of arguments that are checkpoints or layers."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ParamSpec, TypeVar

from tnlib import ArgumentError, ArgumentTypeError, FileFormatError
from tnlib._html import facts, squares
from tnlib._typing import Array
from tnlib._validate import as_count
from tnlib_adapters.architectures.architecture import Architecture
from tnlib_adapters.architectures.grouped_heads import Sizes
from tnlib_adapters.architectures.resolve_wiring import wire
from tnlib_adapters.architectures.wiring import Wiring
from tnlib_adapters.attention.attention import Attention
from tnlib_adapters.attention.layer_arguments import layer_arguments, per_head
from tnlib_adapters.attention.validation import as_index
from tnlib_adapters.checkpoints.loaded_tensors import folder_of_model, is_loaded_model
from tnlib_adapters.factors.config_section import check_attention, check_factors, descriptions
from tnlib_adapters.factors.engine_tensors import with_dequantized
from tnlib_adapters.factors.expansion import expand, with_expanded
from tnlib_adapters.factors.factored_matrix import Description
from tnlib_adapters.factors.projections import Projections, columns_of_head, take_apart
from tnlib_adapters.files.folder import CONFIG, Folder, open_folder
from tnlib_adapters.files.safetensors_file import TensorInfo

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, repr=False)
class Checkpoint:
    """A transformer checkpoint on disk, returned by `open_checkpoint`; tensors are read lazily.

    Examples
    --------
    >>> import tnlib_adapters
    >>> model = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path("llama"))
    >>> model
    Checkpoint(llama, 4 layers, 8 heads of 16 on 2 key and value heads, d_model 128, ...)
    >>> model.config["vocab_size"], model.read("embed_tokens.weight").shape
    (1024, (1024, 128))
    """

    folder: Folder
    wiring: Wiring
    factored: list[Description] | None  # weights stored as factors; None for an ordinary checkpoint

    @property
    def config(self) -> Mapping[str, Any]:
        """The content of config.json."""
        return self.folder.config

    @property
    def architecture(self) -> Architecture:
        """Its row of the architecture table."""
        return self.wiring.architecture

    @property
    def sizes(self) -> Sizes:
        """Sizes of the attention layers."""
        return self.wiring.sizes

    @property
    def prefix(self) -> str:
        """Prefix of tensor names in this checkpoint."""
        return self.wiring.prefix

    @property
    def n_layers(self) -> int:
        """Number of attention layers."""
        return self.sizes.n_layers

    def __repr__(self) -> str:
        s = self.sizes
        shared = "" if s.kv_heads == s.n_heads else f" on {s.kv_heads} key and value heads"
        return (
            f"Checkpoint({self.wiring.model_type}, {s.n_layers} layers, {s.n_heads} heads of {s.d_head}{shared}, "
            f"d_model {s.d_model}, {self.folder.path})"
        )

    def _repr_html_(self) -> str:
        s = self.sizes
        shared = "" if s.kv_heads == s.n_heads else f", {s.kv_heads} key and value heads"
        rows = {
            "layers": str(s.n_layers),
            "heads of a layer": f"{s.n_heads} of {s.d_head}{shared}",
            "width of the stream": f"{s.d_model:,}",
            "parameters": f"{sum(info.size for info in self.folder.tensors.values()):,}",
            "folder": str(self.folder.path),
        }
        group = s.group_size  # one shade for heads that share their keys and values
        shades = [[head // group % 2 for head in range(s.n_heads)]] * s.n_layers
        picture = squares(shades, f"{s.n_layers} layers of {s.n_heads} heads")
        return facts(f"Checkpoint, {self.wiring.model_type}", rows, picture)

    def locate(self, name: str) -> TensorInfo | None:
        """Return the location of a tensor or None; its name may lack the prefix of this checkpoint."""
        if not isinstance(name, str):
            raise ArgumentTypeError(
                f"Checkpoint: the name of a tensor must be a string, got {name!r:.80}; "
                "pass for example 'unembed.weight'."
            )
        tensors = self.folder.tensors
        return tensors.get(self.prefix + name) or tensors.get(name)

    def read(self, name: str) -> Array:
        """Read one tensor by a name as in `locate`; half precision is converted to float32.

        Raises
        ------
        FileFormatError
            If there is no such tensor, or it holds NaN or inf.
        """
        info = self.locate(name)
        if info is None:
            full = name if name.startswith(self.prefix) else self.prefix + name
            raise FileFormatError(
                f"Checkpoint.read: {self.folder.path} must hold tensor {full!r}; "
                "check that config.json belongs to these weights."
            )
        return info.read_finite()

    def projections(self, layer: int) -> Projections:
        """Return the weights and biases of the attention of one layer, multiplied out if stored as factors."""
        layer = as_index("Checkpoint.projections", "layer", layer, self.n_layers)
        stored = take_apart(self.wiring.layers[layer].attention, self._get)
        module = self.wiring.attention_modules[layer]
        factored = [
            entry.read(self._part_of(entry)) for entry in self.factored or () if entry.of and entry.module == module
        ]
        return stored.updated(expand(factored, self.sizes))

    def attention(self, layer: int, *, length: int | None = None) -> Attention:
        """Return one attention layer, weights in float32, or float64 if stored so.

        Parameters
        ----------
        layer
            Index, from 0.
        length
            Sequence length, on which the rotary frequencies of some long-context variants depend. None: at most the
            training length.

        Raises
        ------
        ArgumentError
            If there is no such layer, or `length` exceeds the context of the model.
        FileFormatError
            If a tensor holds NaN or inf, or the file was truncated since it was opened.
        """
        layer = as_index("Checkpoint.attention", "layer", layer, self.n_layers)
        arguments = self._arguments(layer, length, "Checkpoint.attention")
        return Attention(**arguments, **per_head(self.projections(layer), self.sizes))

    def head(self, layer: int, head: int, *, length: int | None = None) -> Attention:
        """Return one query head, with its key and value head, as a layer.

        Only the weights of this head are read, so that iteration over the heads of a large model needs little memory.
        The output bias belongs to the layer and is None here.

        Parameters
        ----------
        layer, head
            Indices, from 0.
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
        LowRank(shape 65 x 65, ranks (16,), 2,080 parameters, float32)
        """
        layer = as_index("Checkpoint.head", "layer", layer, self.n_layers)
        head = as_index("Checkpoint.head", "head", head, self.sizes.n_heads)
        if self.factored is not None or self.wiring.layers[layer].attention.latent is not None:
            return replace(self.attention(layer, length=length).of_heads([head]), b_O=None)
        arguments = self._arguments(layer, length, "Checkpoint.head")
        if arguments["alibi"] is not None:
            arguments["alibi"] = arguments["alibi"][head : head + 1]
        if arguments["relative_bias"] is not None:
            arguments["relative_bias"] = arguments["relative_bias"].of_heads([head])
        return Attention(**arguments, **self._read_head(layer, head))

    def positions(self) -> Array:
        """Return the learned position embeddings (context, d_model), from the first position of a sequence on.

        They are added to the token embeddings before the norm of the embedding, if any; see `Attention.qk_positions`.

        Raises
        ------
        ArgumentError
            If positions are not learned.
        """
        embedding = self.wiring.embedding
        if embedding.positions is None:
            raise ArgumentError(
                f"Checkpoint.positions: positions must be learned, but a {self.wiring.model_type} has none; its scores "
                "depend on the distance: use qk with a distance, or qk_tensor."
            )
        table = self.read(embedding.positions).reshape(-1, self.sizes.d_model)  # (1, context, d_model) for images
        return table[embedding.first_position :]

    def _arguments(self, layer: int, length: int | None, function: str) -> dict[str, Any]:
        length = None if length is None else as_count(function, "length", length)
        return layer_arguments(self.wiring.layers[layer].attention, self._get, length=length, function=function)

    def _read_head(self, layer: int, head: int) -> dict[str, Any]:
        """Read only the weights and biases of one head."""
        attention, tensors, everything = self.wiring.layers[layer].attention, self.folder.tensors, slice(None)
        arrays: dict[str, Any] = {}
        for names, linear in attention.projections.items():
            for name in names:
                columns = columns_of_head(attention, names, name, head)
                heads_first = (linear.stored == "out_in") != (name == "o")
                part = tensors[linear.weight].read_part((columns, everything) if heads_first else (everything, columns))
                arrays[f"W_{name.upper()}"] = linear.on_rows(part)[None]
                if name != "o" and linear.bias:
                    arrays[f"b_{name.upper()}"] = tensors[linear.bias].read_part((columns,))[None]
        return arrays

    def _get(self, name: str) -> Array | None:
        """Read a tensor; None if there is none, or if it is the empty one of a factored weight."""
        info = self.folder.tensors.get(name)
        return None if info is None or info.size == 0 else info.read_finite()

    def _part_of(self, described: Description) -> Callable[[str], Array]:
        return lambda part: self.folder.tensors[described.stored_name(part, self.wiring)].read_finite()


def open_checkpoint(folder: str | os.PathLike[str]) -> Checkpoint:
    """Open a checkpoint folder with config.json and safetensors, single or sharded; only headers are read.

    Parameters
    ----------
    folder
        Path of the folder, or the name of a model in the local cache of the Hugging Face hub, where nothing is
        downloaded. Architectures: BERT, RoBERTa, ViT, GPT-2, GPT-J, GPT-NeoX, OPT, Llama, Mistral, Mixtral, Qwen2,
        Qwen3, Qwen3-MoE, Gemma, Gemma 2, Gemma 3 (text), Phi, Phi-3, StarCoder2, Falcon, BLOOM, DeepSeek-V2 and V3, T5
        with and without its decoder, and the model that is shipped with this package.

    Returns
    -------
    Checkpoint
        `.config` and `.attention(layer)`; folders written by `tnlib compress` open like any other, and so do those of
        GPTQ and of compressed-tensors (pack-quantized), as the models that their integers stand for.

    Raises
    ------
    MissingFileError
        If the folder or its config.json is missing.
    ArgumentTypeError
        If `folder` is no path, but for example a model in memory.
    FileFormatError
        If the architecture is unknown, a file is damaged or pickled, or a shape contradicts the config.

    Examples
    --------
    >>> import tnlib_adapters
    >>> tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path()).n_layers
    2
    """
    return _as_checkpoint(with_dequantized(open_folder(folder)))


def open_model(model: Any) -> Checkpoint:
    """Return a transformers model in memory as a checkpoint, without a copy of its weights.

    All functions that take a checkpoint take such a model too, and open it themselves. A change of its parameters in
    place is seen by everything that reads them later; after a change of their dtype or of a module, open it again.
    Hooks, dropout and the attention backend do not matter: results are those of the weights in evaluation mode.

    Parameters
    ----------
    model
        A model of a supported architecture, with or without a task head, on any device; or one that torch.compile or
        nnsight wraps, or a TransformerBridge of TransformerLens before `enable_compatibility_mode`. Adapters of peft
        must be merged.

    Raises
    ------
    ArgumentTypeError
        If this is no model of transformers.
    ArgumentError, FileFormatError
        If the architecture or the variant is not supported, or weights are quantized or not loaded.

    Examples
    --------
    >>> import tnlib_adapters
    >>> from transformers import AutoModelForCausalLM
    >>> model = AutoModelForCausalLM.from_pretrained(tnlib_adapters.builtin_path("llama"))
    >>> open_model(model).attention(0).qk(3, distance=1).shape  # d_model + 1
    (129, 129)
    """
    return _as_checkpoint(folder_of_model(model))


def accepts_models(function: Callable[P, R]) -> Callable[P, R]:
    """Return a function that takes a transformers model in memory wherever it takes a checkpoint."""

    @functools.wraps(function)
    def _run(*args: P.args, **kwargs: P.kwargs) -> R:
        opened: Any = [open_model(value) if is_loaded_model(value) else value for value in args]
        named: Any = {name: open_model(value) if is_loaded_model(value) else value for name, value in kwargs.items()}
        return function(*opened, **named)

    return _run


def _as_checkpoint(opened: Folder) -> Checkpoint:
    wiring = wire_folder(opened)
    factored = descriptions(opened.config, wiring.attention_modules, wiring.sizes)
    check_factors(opened, wiring, factored or [])
    expanded = with_expanded(opened, wiring, factored or [])
    check_attention(expanded, wiring, factored or [])
    for layer in wiring.layers:
        layer.attention.frequencies(None, "open_checkpoint")
    return Checkpoint(expanded, wiring, factored)


def wire_folder(folder: Folder) -> Wiring:
    """Return the wiring of the model in a folder."""
    return wire(folder.config, folder.tensors, where=str(folder.path / CONFIG), function="open_checkpoint")


def as_checkpoint(function: str, model: Any, parameter: str = "checkpoint") -> Checkpoint:
    """Return the checkpoint; raise `ArgumentTypeError` for anything else, such as a path."""
    if not isinstance(model, Checkpoint):
        raise ArgumentTypeError(
            f"{function}: {parameter} must be a Checkpoint or a transformers model, got {type(model).__name__}; "
            "pass open_checkpoint(folder)."
        )
    return model


def as_dense(function: str, model: Any, change: str, parameter: str = "checkpoint") -> Checkpoint:
    """Return the checkpoint; raise `ArgumentError` if its attention is stored as factors, which `change` cannot be."""
    checkpoint = as_checkpoint(function, model, parameter)
    if checkpoint.factored is not None:
        raise ArgumentError(
            f"{function}: {parameter} must hold dense weights, got one that is stored as factors; {change} first, then "
            "compress."
        )
    return checkpoint


def as_one_stream(function: str, model: Any, parameter: str = "checkpoint") -> Checkpoint:
    """Return the checkpoint of a model with one residual stream; raise for encoder and decoder, and as above."""
    checkpoint = as_checkpoint(function, model, parameter)
    if checkpoint.wiring.encoder is not None:
        raise two_streams(function, parameter, f"a {checkpoint.wiring.model_type}")
    return checkpoint


def two_streams(function: str, parameter: str, model: str) -> ArgumentError:
    """Return the error for a model of an encoder and a decoder."""
    return ArgumentError(
        f"{function}: {parameter} must have one residual stream, got {model} with an encoder and a decoder; "
        "pass its encoder alone, a transformers.T5EncoderModel, or single layers, checkpoint.attention(layer)."
    )


def as_layer(function: str, layer: Any, parameter: str = "attention") -> Attention:
    """Return the attention layer; raise `ArgumentTypeError` for anything else."""
    if not isinstance(layer, Attention):
        raise ArgumentTypeError(
            f"{function}: {parameter} must be an Attention, got {type(layer).__name__}; "
            "pass one layer of a checkpoint, checkpoint.attention(0)."
        )
    return layer


def check_form(function: str, layer: Attention, distance: Any) -> None:
    """Raise `ArgumentError` if scores are not a bilinear form, or depend on a distance that is not given."""
    if not layer.is_bilinear:
        raise ArgumentError(
            f"{function}: scores of this model are not a bilinear form, because its queries and keys, or latent "
            "vectors, are normalised; pass attention.numerator() of its layers, which omits the divisions."
        )
    layer.distance(function, distance)
