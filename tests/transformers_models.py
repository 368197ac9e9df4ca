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
}


def random_model(name: str) -> Any:
    """A small model none of whose parameters is 0 or 1: transformers starts with no biases and plain norms."""
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    model.set_attn_implementation("eager")
    return model


def trained_model(folder: Path) -> Any:
    return BertModel.from_pretrained(folder, attn_implementation="eager").eval()


@dataclass(frozen=True)
class Recorded:
    """What a model computed on one batch: per layer scores and patterns (batch, heads, n, n), and what attention
    read and wrote (batch, n, d_model); then the residual stream, hidden states and logits."""

    tokens: np.ndarray
    scores: list[np.ndarray]
    patterns: list[np.ndarray]
    inputs: list[np.ndarray]
    outputs: list[np.ndarray]
    residuals: list[np.ndarray]
    hidden: np.ndarray
    logits: np.ndarray | None


def record(model: Any, tokens: np.ndarray) -> Recorded:
    """Run a model and write down what its attention layers read, compute and write."""
    kept: dict[str, list[np.ndarray]] = {"scores": [], "patterns": [], "inputs": [], "outputs": []}
    base = model.base_model
    with contextlib.ExitStack() as hooks:
        hooks.enter_context(_softmax_recorded(kept["scores"]))
        for reader, writer in _attention_modules(base):
            hooks.callback(reader.register_forward_pre_hook(_reads(kept["inputs"]), with_kwargs=True).remove)
            hooks.callback(writer.register_forward_hook(_writes(kept["outputs"])).remove)
        with torch.no_grad():
            got = model(torch.from_numpy(tokens), output_attentions=True, output_hidden_states=True)
    kept["patterns"] = [a.numpy() for a in got.attentions]
    stream = [a.numpy() for a in got.hidden_states]
    logits = got.logits.numpy() if isinstance(model, GPT2LMHeadModel) else None
    return Recorded(tokens, residuals=stream[:-1], hidden=stream[-1], logits=logits, **kept)


def _attention_modules(base: Any) -> list[tuple[nn.Module, nn.Module]]:
    """Per layer, the module that reads the input of attention and the one that writes its output."""
    if isinstance(base, BertModel):
        return [(block.attention.self, block.attention.output.dense) for block in base.encoder.layer]
    return [(block.attn, block.attn.c_proj) for block in base.h]


def _reads(into: list[np.ndarray]) -> Callable[..., None]:
    return lambda module, args, kwargs: into.append((args[0] if args else kwargs["hidden_states"]).numpy())


def _writes(into: list[np.ndarray]) -> Callable[..., None]:
    return lambda module, args, output: into.append(output.numpy())


@contextlib.contextmanager
def _softmax_recorded(into: list[np.ndarray]) -> Iterator[None]:
    """Keep what every softmax is given: the model's own scores, masked where a position may not look."""
    original = nn.functional.softmax

    def recorded(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        into.append(x.numpy())
        return original(x, *args, **kwargs)

    nn.functional.softmax = recorded
    try:
        yield
    finally:
        nn.functional.softmax = original


def quiet() -> None:
    """No progress bars and no advice from transformers."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
