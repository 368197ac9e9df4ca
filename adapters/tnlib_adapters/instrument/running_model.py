"""A loaded transformers model: loading, the modules of its attention, and the sequences of a text.

Every projection of the table of architectures is a module, so that forward hooks on modules suffice for any attention
kernel:

    q[t, h] = x[t] W_Q^h + b_Q^h          output of the module of "q", before any rotation
    y[t, h] = sum_u A^h[t, u] v[u, h]     input of the module of "o"
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from tnlib import ArgumentError
from tnlib_adapters.architectures.grouped_heads import Sizes
from tnlib_adapters.architectures.wiring import Wiring
from tnlib_adapters.attention.layer_arguments import wire_model
from tnlib_adapters.checkpoints.checkpoint import Checkpoint, open_checkpoint
from tnlib_adapters.factors.projections import columns_of_head
from tnlib_adapters.files.process_memory import BATCH_TOKENS, release_free_memory
from tnlib_adapters.files.tokenizer import MAX_TOKENS, OFFLINE, load_tokenizer, loaded
from tnlib_adapters.instrument.stored_weights import (
    Change,
    Placement,
    Source,
    StoredWeights,
    find_stored,
)

_FEWEST, _BATCHES = 512, 8  # tokens of a batch, and batches, of a short text


# a text, a conversation as messages with "role" and "content", or token ids
Document = str | list[dict[str, str]] | npt.NDArray[np.integer[Any]]


@dataclass(frozen=True)
class Projection:
    """One projection of all heads: columns (heads, d_head) of the output of a module, or of the input for "o"."""

    module: nn.Module
    columns: npt.NDArray[np.intp]
    name: str

    def written(self, x: Tensor) -> Tensor:
        """Return the columns of this projection of an output, (..., heads * d_head); all columns for "o"."""
        flat = self.columns.ravel()
        if self.name == "o" or (len(flat) == x.shape[-1] and np.all(np.diff(flat) == 1)):
            return x
        return x[..., torch.from_numpy(flat).to(x.device)]


@dataclass(frozen=True)
class RunningLayer:
    """One block of the model and the four projections of its attention."""

    block: nn.Module
    projections: dict[str, Projection]


Part = tuple[slice, slice]  # texts and tokens


@dataclass(frozen=True)
class Batch:
    """Tokenized texts and attention mask, (texts, tokens) each; the mask is 1 at tokens and 0 at padding.

    `is_padded` is False if there is none, known without waiting for the device.
    """

    ids: Tensor
    mask: Tensor
    is_padded: bool = True

    @property
    def valid(self) -> Tensor:
        """Boolean mask."""
        return self.mask.bool()

    @property
    def n_tokens(self) -> int:
        """Number of tokens without padding."""
        return int(self.mask.sum())

    def parts(self, n_tokens: int) -> Iterator[Part]:
        """Yield the indices of parts of at most so many tokens of one text: logits of a batch would be large."""
        for text in range(len(self.ids)):
            for start in range(0, self.ids.shape[1], n_tokens):
                yield slice(text, text + 1), slice(start, start + n_tokens)

    def part(self, at: Part) -> Batch:
        """Return a part."""
        return replace(self, ids=self.ids[at], mask=self.mask[at])


@dataclass(frozen=True, repr=False)
class RunningModel:
    """A transformers model, its tokenizer, and the modules of its attention.

    What it returns is in float32, whatever the dtype of its weights.

    Texts are read up to `max_tokens` tokens, if the model has as many positions, in batches of `batch_tokens` tokens.
    Errors on texts begin with `function`.
    """

    model: Any
    tokenizer: Any
    wiring: Wiring
    layers: tuple[RunningLayer, ...]
    weights: StoredWeights
    max_tokens: int
    function: str
    batch_tokens: int

    def changed(self, change: Change) -> RunningModel:
        """Return a copy with `change` applied to every group of weights; those that it returns unchanged are shared."""
        arguments = self.tokenizer, self.max_tokens, self.function, self.batch_tokens
        return _load(self.weights.source.checkpoint, *arguments, change=change, original=self.weights)

    @property
    def device(self) -> torch.device:
        """Device of the weights, the batches and the outputs."""
        return self.weights.placement.device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights, and of the streams between blocks while they are computed."""
        return self.weights.placement.dtype

    @property
    def fits_in_memory(self) -> bool:
        """True if all weights stay in memory."""
        return self.weights.fit_in_memory

    def load(self, k: int) -> None:
        """Put the weights of the k-th block in place, if they are not in memory."""
        self.weights.load(k)

    def drop(self) -> None:
        """Free the weights of a model that does not fit in memory; they are read again when they are used."""
        if not self.fits_in_memory:
            self.weights.drop()
            release_free_memory()

    @property
    def sizes(self) -> Sizes:
        """Sizes of the attention layers."""
        return self.wiring.sizes

    @property
    def predicts(self) -> bool:
        """True for a model that predicts tokens, False for one that embeds texts."""
        return self.wiring.unembedding is not None and self.model.get_output_embeddings() is not None

    @property
    def vocab_size(self) -> int:
        """Number of tokens of the vocabulary."""
        return int(self.model.get_input_embeddings().weight.shape[0])

    @property
    def longest(self) -> int:
        """Maximum number of tokens per text."""
        positions = (self.wiring.context or math.inf) - self.wiring.embedding.first_position
        return int(min(self.max_tokens, positions))

    def sequences(self, documents: Sequence[Document]) -> list[list[int]]:
        """Return the token ids of documents: windows of a language model, lines of an embedding model.

        A language model reads documents one after the other, with a line break between strings, and conversations
        through the template of its tokenizer. Sequences have at most `longest` tokens; those of one token are left out.
        """
        texts = [document for document in documents if isinstance(document, str)]
        ids = [self._ids_of(document) for document in documents if not isinstance(document, str)]
        if self.predicts:
            joined = self.tokenizer("\n".join(texts), verbose=False)["input_ids"] if texts else []
            stream = list(chain(joined, *ids))
            sequences = [stream[start : start + self.longest] for start in range(0, len(stream), self.longest)]
        else:
            lines = _lines_of(documents)
            of_lines = self.tokenizer(lines, truncation=True, max_length=self.longest)["input_ids"] if lines else []
            sequences = [*of_lines, *(tokens[: self.longest] for tokens in ids)]
        return [sequence for sequence in sequences if len(sequence) > 1]

    def _ids_of(self, document: Sequence[Any] | npt.NDArray[Any]) -> list[int]:
        """Return the token ids of a conversation, or check those of a document."""
        if isinstance(document, np.ndarray):
            outside = document[(document < 0) | (document >= self.vocab_size)]
            if len(outside):
                raise ArgumentError(
                    f"{self.function}: token ids must lie below {self.vocab_size:,}, the size of the vocabulary, got "
                    f"{outside[0]}; tokenize with the tokenizer of this model."
                )
            return cast(list[int], document.tolist())
        if not self.predicts or not self.tokenizer.chat_template:
            raise ArgumentError(
                f"{self.function}: conversations need a language model whose tokenizer has a chat template, got a "
                f"{self.wiring.model_type} without; pass text."
            )
        ids = self.tokenizer.apply_chat_template(document, tokenize=True, return_dict=True)["input_ids"]
        return cast(list[int], list(ids))

    def batches(self, text: str | Sequence[Sequence[int]]) -> list[Batch]:
        """Return the sequences of a text, or sequences of token ids, in batches; sorted by length."""
        ids = sorted(self.sequences([text]) if isinstance(text, str) else text, key=len)
        batches, start = [], 0
        n_tokens = min(self.batch_tokens, max(_FEWEST, sum(map(len, ids)) // _BATCHES))
        for end in range(1, len(ids) + 1):
            if end == len(ids) or (end + 1 - start) * len(ids[end]) > n_tokens:
                batches.append(_padded(ids[start:end], self.tokenizer.pad_token_id or 0, self.device))
                start = end
        return batches

    def count_truncated(self, documents: Sequence[Document]) -> int:
        """Return how many lines of texts an embedding model reads truncated at `longest` tokens."""
        lines = _lines_of(documents)
        return sum(len(ids) > self.longest for ids in self.tokenizer(lines, verbose=False)["input_ids"]) if lines else 0

    def __call__(self, batch: Batch) -> Tensor:
        """Return logits (texts, tokens, vocabulary), or one embedding of norm 1 for every text (texts, d_model)."""
        no_cache = {"use_cache": False} if self.wiring.layers[0].attention.causal else {}
        out = self.model(input_ids=batch.ids, attention_mask=batch.mask, **no_cache)
        return cast(Tensor, out.logits).float() if self.predicts else pooled(out.last_hidden_state.float(), batch.mask)


def open_running(
    source: Checkpoint | str | os.PathLike[str],
    function: str = "evaluate",
    max_tokens: int = MAX_TOKENS,
    *,
    batch_tokens: int = BATCH_TOKENS,
    max_weights: int | None = None,
    placement: Placement | None = None,
) -> RunningModel:
    """Open a checkpoint, or its folder, of a model of text, with its tokenizer, as a transformers model.

    At most `max_weights` bytes of weights, in float32, stay in memory, None for `IN_MEMORY`. They are in float32 on the
    host if `placement` is None. `FileFormatError` if the architecture is not known, or the folder does not hold the
    whole model; messages on the latter begin with `function`.
    """
    checkpoint = source if isinstance(source, Checkpoint) else open_checkpoint(source)
    tokenizer = load_tokenizer(function, checkpoint.folder.path)
    arguments = checkpoint, tokenizer, max_tokens, function, batch_tokens
    return _load(*arguments, max_bytes=max_weights, placement=placement)


def make_without_weights(function: str, checkpoint: Checkpoint) -> Any:
    """Return the transformers model of a checkpoint with all parameters on the meta device, in evaluation mode.

    Buffers that are computed from the config, such as rotary frequencies, are in place.
    """
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForTextEncoding
    from transformers.models.auto.modeling_auto import MODEL_FOR_TEXT_ENCODING_MAPPING

    import tnlib_adapters.transformers_plugin  # noqa: F401  registers the config of compressed folders

    folder = checkpoint.folder.path

    def make() -> Any:
        config = AutoConfig.from_pretrained(str(folder), **OFFLINE)
        if hasattr(config, "quantization_config"):  # of a compressed folder: its weights are multiplied out
            del config.quantization_config
        predicts = checkpoint.wiring.unembedding is not None
        encodes = type(config) in MODEL_FOR_TEXT_ENCODING_MAPPING  # AutoModel may also make a decoder, as for T5
        loader: Any = AutoModelForCausalLM if predicts else AutoModelForTextEncoding if encodes else AutoModel
        with _parameters_on_meta():
            return loader.from_config(config, dtype=torch.float32).eval()

    return loaded(function, f"the model in {folder}", make)


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Move every parameter to the meta device as it is assigned to a module, uninitialized; buffers stay."""
    from transformers import PreTrainedModel

    register, initialize = nn.Module.register_parameter, PreTrainedModel.initialize_weights

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        on_meta = None if parameter is None else nn.Parameter(parameter.to("meta"), requires_grad=False)
        register(module, name, on_meta)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign,assignment]
    # three quarters of the time for a small model, whose values are read from files
    PreTrainedModel.initialize_weights = lambda model: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
        PreTrainedModel.initialize_weights = initialize  # type: ignore[method-assign]


def _load(
    checkpoint: Checkpoint, tokenizer: Any, max_tokens: int, function: str, batch_tokens: int, **options: Any
) -> RunningModel:
    """Return the model of a checkpoint; options are those of `StoredWeights`."""
    model = make_without_weights(function, checkpoint)
    stored = find_stored(model, checkpoint, function)
    wiring = wire_model(model, function)
    layers = running_layers(model, wiring)
    weights = StoredWeights(model, [layer.block for layer in layers], Source(checkpoint, wiring, stored), **options)
    return RunningModel(model, tokenizer, wiring, layers, weights, max_tokens, function, batch_tokens)


def running_layers(model: Any, wiring: Wiring) -> tuple[RunningLayer, ...]:
    """Return the blocks of a model with the modules of their attention."""
    sizes, modules, layers = wiring.sizes, dict(model.named_modules()), []
    for layer in wiring.layers:
        projections = {}
        for letters, linear in layer.attention.projections.items():
            for name in letters:
                heads = range(0, sizes.n_heads, 1 if name in "qo" else sizes.group_size)
                slices = [columns_of_head(layer.attention, letters, name, head) for head in heads]
                columns = np.array([range(s.start, s.stop) for s in slices])
                projections[name] = Projection(modules[linear.module], columns, name)
        layers.append(RunningLayer(modules[layer.module], projections))
    return tuple(layers)


def find_module(model: nn.Module, name: str) -> nn.Module:
    """Return the module of this name, or of this name below the base model of one with a head."""
    module: nn.Module = next(m for path, m in model.named_modules() if path == name or path.endswith(f".{name}"))
    return module


def find_matrix(model: RunningModel, name: str) -> nn.Module:
    """Return the module that holds a matrix outside the attention, by its name in the file.

    Of several that hold the embedding (T5's shared one, and that of the encoder) it is the innermost, which runs.
    """
    if model.wiring.is_unembedding(name):
        return cast(nn.Module, model.model.get_output_embeddings())
    module = find_module(model.model, name)
    if not model.wiring.is_embedding(name):
        return module
    return [m for m in model.model.modules() if isinstance(m, nn.Embedding) and m.weight is module.weight][-1]


def pooled(hidden: Tensor, mask: Tensor) -> Tensor:
    """Return the mean over tokens, of norm 1."""
    weights = mask[..., None].to(hidden.dtype)
    return nn.functional.normalize((hidden * weights).sum(1) / weights.sum(1), dim=-1)


def _lines_of(documents: Sequence[Document]) -> list[str]:
    texts = [document for document in documents if isinstance(document, str)]
    return [line for text in texts for line in text.splitlines() if line.strip()]


def _padded(ids: Sequence[Sequence[int]], pad: int, device: torch.device) -> Batch:
    longest = max(map(len, ids))
    tokens = torch.tensor([[*row, *[pad] * (longest - len(row))] for row in ids], device=device)
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in ids], device=device)
    return Batch(tokens, mask, is_padded=any(len(row) < longest for row in ids))
