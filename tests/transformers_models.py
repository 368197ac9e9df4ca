"""Models of transformers, random or trained, and what they themselves compute: the oracle of the adapters."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from architecture_models import MODELS as OF_ARCHITECTURES
from architecture_models import attention_modules
from tnlib_adapters.compression.compressed_part import compressed_weights
from tnlib_adapters.factors.model_weights import ModelWeight
from tnlib_adapters.factors.projections import put_together
from torch import nn
from transformers import BertConfig, BertForMaskedLM, BertModel, GPT2Config, GPT2LMHeadModel, GPT2Model

BERT_SIZES = {
    "vocab_size": 50,
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 40,
    "max_position_embeddings": 16,
}
GPT2_SIZES = {
    "vocab_size": 50,
    "n_positions": 16,
    "n_embd": 24,
    "n_layer": 3,
    "n_head": 4,
    "bos_token_id": 0,  # the defaults lie outside this vocabulary
    "eos_token_id": 0,
}

MODELS: dict[str, Callable[[], Any]] = {
    "bert": lambda: BertModel(BertConfig(**BERT_SIZES)),
    "bert_masked": lambda: BertForMaskedLM(BertConfig(**BERT_SIZES)),
    "gpt2": lambda: GPT2Model(GPT2Config(**GPT2_SIZES)),
    "gpt2_lm": lambda: GPT2LMHeadModel(GPT2Config(**GPT2_SIZES)),
    "gpt2_untied": lambda: GPT2LMHeadModel(GPT2Config(**GPT2_SIZES, tie_word_embeddings=False)),
    "gpt2_unscaled": lambda: GPT2Model(GPT2Config(**GPT2_SIZES, scale_attn_weights=False)),
    "gpt2_by_layer": lambda: GPT2Model(GPT2Config(**GPT2_SIZES, scale_attn_by_inverse_layer_idx=True)),
    **OF_ARCHITECTURES,
}


def random_model(name: str) -> Any:
    """A small model none of whose parameters is 0 or 1: transformers starts with no biases and plain norms."""
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    if model.config.model_type != "falcon":
        model.set_attn_implementation("eager")
    model.set_experts_implementation("eager")  # the grouped matrix product of torch has no double precision
    return model


def inputs(model: Any, n_tokens: int = 9) -> np.ndarray:
    """Two short sequences of tokens, or two images."""
    rng = np.random.default_rng(0)
    if model.config.model_type == "vit":
        return rng.standard_normal((2, 3, model.config.image_size, model.config.image_size)).astype(np.float32)
    return rng.integers(2, model.config.vocab_size, size=(2, n_tokens))  # 1 is the padding of RoBERTa


def decoder_inputs(model: Any, x: np.ndarray) -> np.ndarray | None:
    """The tokens of the decoder beside those of the encoder, fewer and in another order; None without a decoder."""
    return np.ascontiguousarray(x[:, :1:-1]) if model.config.is_encoder_decoder else None


def arguments(model: Any, x: np.ndarray) -> dict[str, torch.Tensor]:
    """What a model is called with."""
    y = decoder_inputs(model, x)
    name = "pixel_values" if model.config.model_type == "vit" else "input_ids"
    return {name: torch.from_numpy(x)} | ({} if y is None else {"decoder_input_ids": torch.from_numpy(y)})


def outputs(model: Any, x: np.ndarray) -> np.ndarray:
    """The logits of a model, or its last hidden state where it ends in that."""
    with torch.no_grad():
        got = model(**arguments(model, x))
    found: np.ndarray = (got.logits if "logits" in got else got.last_hidden_state).numpy()
    return found


def loaded_like(model: Any, folder: Path) -> Any:
    """The model of a folder, in the class, precision and kind of attention of another one."""
    kinds = {"attn_implementation": model.config._attn_implementation, "experts_implementation": "eager"}
    return type(model).from_pretrained(folder, dtype=model.dtype, **kinds).eval()


def trained_model(folder: Path) -> Any:
    return BertModel.from_pretrained(folder, attn_implementation="eager").eval()


@dataclass(frozen=True)
class Recorded:
    """What a model computed on one batch: per layer scores and patterns (batch, heads, n, n), and what attention
    read and wrote (batch, n, d_model); then the residual stream, hidden states and logits.

    `memories` holds what keys and values of cross-attention read: per layer one array, or none of other attention.
    """

    tokens: np.ndarray
    scores: list[np.ndarray]
    patterns: list[np.ndarray]
    inputs: list[np.ndarray]
    outputs: list[np.ndarray]
    residuals: list[np.ndarray]
    memories: list[tuple[np.ndarray, ...]]
    hidden: np.ndarray
    logits: np.ndarray | None
    decoder_tokens: np.ndarray | None

    @property
    def read(self) -> list[np.ndarray]:
        """Per layer, what keys and values read: the input of queries, but for cross-attention."""
        return [memory[0] if memory else x for memory, x in zip(self.memories, self.inputs, strict=True)]


def record(model: Any, tokens: np.ndarray) -> Recorded:
    """Run a model and write down what its attention layers read, compute and write."""
    kept: dict[str, list[Any]] = {"scores": [], "patterns": [], "inputs": [], "outputs": [], "memories": []}
    streams: list[np.ndarray] = []
    has_decoder = model.config.is_encoder_decoder
    eager = model.config._attn_implementation == "eager"
    with contextlib.ExitStack() as hooks:
        hooks.enter_context(_softmax_recorded(kept["scores"]) if eager else _sdpa_recorded(kept["scores"]))
        for reader, writer in attention_modules(model.base_model):
            hooks.callback(reader.register_forward_pre_hook(_reads(kept["inputs"]), with_kwargs=True).remove)
            hooks.callback(reader.register_forward_pre_hook(_reads_memory(kept["memories"]), with_kwargs=True).remove)
            hooks.callback(writer.register_forward_hook(_writes(kept["outputs"])).remove)
        if has_decoder:  # of which transformers returns the stream before every block, not before every layer
            for module in model.modules():
                if hasattr(module, "SelfAttention") or hasattr(module, "EncDecAttention"):
                    hooks.callback(module.register_forward_pre_hook(_reads(streams), with_kwargs=True).remove)
        with torch.no_grad():
            got = model(**arguments(model, tokens), output_attentions=eager, output_hidden_states=True)
    kept["patterns"] = [torch.from_numpy(a).softmax(-1).numpy() for a in kept["scores"]]
    if eager and not has_decoder:
        kept["patterns"] = [a.numpy() for a in got.attentions]
    stream = [a.numpy() for a in (got.decoder_hidden_states if has_decoder else got.hidden_states)]
    return Recorded(
        tokens,
        residuals=streams if has_decoder else stream[: len(kept["scores"])],
        hidden=got.last_hidden_state.numpy() if "last_hidden_state" in got else stream[-1],
        logits=got.logits.numpy() if model.can_generate() else None,
        decoder_tokens=decoder_inputs(model, tokens),
        **kept,
    )


def _reads(into: list[np.ndarray]) -> Callable[..., None]:
    return lambda module, args, kwargs: into.append((args[0] if args else kwargs["hidden_states"]).numpy())


def _reads_memory(into: list[tuple[np.ndarray, ...]]) -> Callable[..., None]:
    def hook(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        memory = kwargs.get("key_value_states")
        into.append(() if memory is None else (memory.numpy(),))

    return hook


def _writes(into: list[np.ndarray]) -> Callable[..., None]:
    return lambda module, args, output: into.append(output.numpy())


@contextlib.contextmanager
def _softmax_recorded(into: list[np.ndarray]) -> Iterator[None]:
    """Keep what every softmax of attention is given: the model's own scores, masked where a position may not look."""
    original = nn.functional.softmax

    def recorded(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if x.ndim == 4:  # those of routers of experts have two axes
            into.append(x.numpy())
        return original(x, *args, **kwargs)

    nn.functional.softmax = recorded
    try:
        yield
    finally:
        nn.functional.softmax = original


@contextlib.contextmanager
def _sdpa_recorded(into: list[np.ndarray]) -> Iterator[None]:
    """Keep the scores behind every scaled dot product attention, from what it is given."""
    original = nn.functional.scaled_dot_product_attention

    def recorded(q: torch.Tensor, k: torch.Tensor, *args: Any, attn_mask: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        into.append((q @ k.mT / q.shape[-1] ** 0.5 + attn_mask).numpy())
        return original(q, k, *args, attn_mask=attn_mask, **kwargs)

    nn.functional.scaled_dot_product_attention = recorded
    try:
        yield
    finally:
        nn.functional.scaled_dot_product_attention = original


def quiet() -> None:
    """No progress bars and no advice from transformers."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


# ------------------------------------------------------------------- folders that read text: made-up words and lines

N_WORDS = 45
SPECIAL = ("[PAD]", "[UNK]", "[BOS]", "[EOS]")


def save_tokenizer(folder: Path) -> None:
    """Write a tokenizer of 49 words, [BOS] in front of every text."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = {word: k for k, word in enumerate((*SPECIAL, *(f"w{k}" for k in range(N_WORDS))))}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="[BOS] $A", special_tokens=[("[BOS]", 2)])
    names = dict(zip(("pad_token", "unk_token", "bos_token", "eos_token"), SPECIAL, strict=True))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)


def made_up_text(n_lines: int = 120, seed: int = 0) -> str:
    """Lines of 4 to 12 words, some words more common than others."""
    rng = np.random.default_rng(seed)
    common = 1.0 / np.arange(1, N_WORDS + 1)
    lines = [
        " ".join(f"w{k}" for k in rng.choice(N_WORDS, size=rng.integers(4, 13), p=common / common.sum()))
        for _ in range(n_lines)
    ]
    return "\n".join(lines) + "\n"


def save_with_tokenizer(model: Any, folder: Path) -> Path:
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def weights_in(model: Any, what: str = "attention") -> list[ModelWeight]:
    """The weights of a running model that a compression on a text selects."""
    return compressed_weights(model.weights.source.checkpoint, what, with_text=True)


def install(model: Any, k: int, projections: Any) -> None:
    """Put projections into the k-th layer of a running model, whose weights are all in memory."""
    for name, values in put_together(model.wiring.layers[k].attention, projections).items():
        model.model.get_parameter(name).data.copy_(torch.from_numpy(values))
