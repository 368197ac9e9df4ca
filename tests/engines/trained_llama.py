"""A small Llama with the vocabulary of GPT-2, trained here: converters of engines refuse vocabularies of their own."""

from __future__ import annotations

import inspect
import sys
from importlib import import_module
from pathlib import Path

import torch
import transformers

CONTEXT, BATCH, STEPS, RATE = 128, 8, 1500, 3e-3


def train(folder: Path, llama_cpp: Path) -> None:
    """Train a Llama on docstrings, save it with the vocabulary in llama.cpp's sources, and sentences beside it."""
    tokenizer = published_vocabulary(llama_cpp)
    lines = docstrings()
    trained(tokenizer("\n".join(lines))["input_ids"], len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    folder.with_name("calibration.txt").write_text("\n".join(lines[:400]), encoding="utf-8")


def published_vocabulary(llama_cpp: Path) -> transformers.PreTrainedTokenizerBase:
    """Return the byte-level tokenizer of GPT-2, which llama.cpp's own tests of vocabularies contain."""
    sys.path.append(str(llama_cpp / "gguf-py"))
    from gguf import GGUFReader

    fields = GGUFReader(llama_cpp / "models" / "ggml-vocab-gpt-2.gguf").fields
    tokens, merges = (fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "merges"))
    vocabulary = {token: k for k, token in enumerate(tokens)}
    return transformers.GPT2Tokenizer(vocab=vocabulary, merges=[tuple(merge.split(" ")) for merge in merges])


def docstrings() -> list[str]:
    """Return the lines of docstrings of modules of the standard library."""
    lines = list[str]()
    for name in ("argparse", "ast", "csv", "decimal", "difflib", "email.message", "fractions", "heapq", "inspect",
                 "json", "logging", "optparse", "pathlib", "pickle", "shutil", "socket", "ssl", "statistics",
                 "subprocess", "tarfile", "threading", "unittest.mock", "zipfile"):  # fmt: skip
        module = import_module(name)
        for owner in (module, *vars(module).values()):
            for part in (owner, *vars(owner).values()) if inspect.isclass(owner) else (owner,):
                lines += (inspect.getdoc(part) or "").splitlines() if callable(part) else []
    return sorted({line.strip() for line in lines if len(line.split()) > 4})


def trained(text: list[int], vocabulary: int) -> transformers.LlamaForCausalLM:
    """Return a Llama trained on a text: two minutes on one core."""
    torch.manual_seed(0)
    used, ids = torch.tensor(text).unique(return_inverse=True)  # the rows of other tokens would receive no gradient
    model = transformers.LlamaForCausalLM(config_of(len(used)))
    optimiser = torch.optim.AdamW(model.parameters(), lr=RATE)
    for step in range(STEPS):
        starts = torch.randint(len(ids) - CONTEXT, (BATCH,)).tolist()
        batch = torch.stack([ids[start : start + CONTEXT] for start in starts])
        loss = model(input_ids=batch, labels=batch).loss
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        optimiser.param_groups[0]["lr"] = RATE * (1 - step / STEPS)
    return with_all_tokens(model, used, vocabulary)


def config_of(vocabulary: int) -> transformers.LlamaConfig:
    """Return the sizes of the model."""
    return transformers.LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=16,
        max_position_embeddings=CONTEXT,
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
        bos_token_id=vocabulary - 1,
        eos_token_id=vocabulary - 1,
    )


def with_all_tokens(
    model: transformers.LlamaForCausalLM, used: torch.Tensor, vocabulary: int
) -> transformers.LlamaForCausalLM:
    """Return the model with a row of zeros for each token that it was not trained on: never the most probable one."""
    tensors = model.state_dict()
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        rows = torch.zeros(vocabulary, tensors[name].shape[1])
        rows[used] = tensors[name]
        tensors[name] = rows
    whole = transformers.LlamaForCausalLM(config_of(vocabulary))
    whole.load_state_dict(tensors)
    return whole.eval()
