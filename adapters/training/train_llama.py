"""Train the built-in Llama: a small language model of Python's standard library.

    python adapters/training/train_llama.py --seed 1 --out FOLDER

trains a tokenizer and a model on one processor core, in about a quarter of an hour, writes the folder that
transformers writes, in bfloat16, and prints what the model has learned on the text held out: bits per byte
beside those of one and two tokens counted, and what they become where a layer or a head is taken out.
"""

from __future__ import annotations

import argparse
import math
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from python_text import documents
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCAB, CONTEXT = 1024, 256
END = "<|endoftext|>"  # after each document
BATCH, STEPS, WARM_UP = 16, 1300, 50
MATRICES, TABLES = 0.015, 0.006  # learning rates at the peak: Muon's, and AdamW's for embeddings and norms
DECAY = 0.05


def config() -> LlamaConfig:
    """Return the shape of the model: four layers of eight heads that share two key and value heads."""
    return LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=320,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
    )


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE of the texts, which takes any text and gives it back."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=END,
        eos_token=END,
        pad_token=END,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )


def encode(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> Tensor:
    """Return the tokens of all texts in one row, each text between two ends."""
    rows = tokenizer.backend_tokenizer.encode_batch(texts)
    return torch.tensor([0] + [token for row in rows for token in (*row.ids, 0)])


def optimizers(model: LlamaForCausalLM) -> list[torch.optim.Optimizer]:
    """Return Muon for the layers' matrices, and AdamW for all else."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and ".layers." in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or ".layers." not in name]
    return [
        torch.optim.Muon(matrices, lr=MATRICES, weight_decay=DECAY, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=TABLES, weight_decay=0.0, betas=(0.9, 0.98)),
    ]


def pace(step: int) -> float:
    """Return the learning rate as a fraction of its peak: up, level, and down to nothing over the last half."""
    return min((step + 1) / WARM_UP, 1.0, 2 * (STEPS - step) / STEPS)


def train(tokens: Tensor, seed: int, out: Path) -> LlamaForCausalLM:
    """Train from scratch on random pieces of the tokens; the model so far is saved on the way."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config())
    model.generation_config.pad_token_id = 0  # only there: the config's would keep the embedding of ends at zero
    for name, weight in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            nn.init.zeros_(weight)  # layers begin as the identity
    steppers = optimizers(model)
    schedules = [torch.optim.lr_scheduler.LambdaLR(one, pace) for one in steppers]
    offsets = torch.arange(CONTEXT + 1)
    begin = time.perf_counter()
    for step in range(STEPS):
        batch = tokens[torch.randint(len(tokens) - CONTEXT, (BATCH, 1)) + offsets]
        loss = functional.cross_entropy(model(batch[:, :-1]).logits.mT, batch[:, 1:])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for one in (*steppers, *schedules):
            one.step()
        model.zero_grad()
        if step % 50 == 49:
            print(f"step {step + 1:5d}   loss {loss:.3f}   {time.perf_counter() - begin:.0f} s", flush=True)
        if step % 200 == 199:
            model.save_pretrained(out / "so_far")
    return model


@torch.no_grad()
def losses(model: LlamaForCausalLM, tokens: Tensor) -> Tensor:
    """Return nats of each token after the first, from windows of a context that overlap by half."""
    half = CONTEXT // 2
    found = []
    for start in range(0, len(tokens) - 1, half):
        window = tokens[max(0, start - half) : start + half + 1]
        new = min(half, len(tokens) - 1 - start)
        logits = model(window[None, :-1]).logits[0, -new:]
        found.append(functional.cross_entropy(logits.float(), window[-new:], reduction="none"))
    return torch.cat(found)


def counted(known: np.ndarray, tokens: np.ndarray) -> tuple[float, float]:
    """Return the mean nats of tokens from counts of one token, and of one after another, each smoothed.

    A count of pairs is topped up by what single tokens say, in the proportion that is best on the tokens
    themselves, which favours it.
    """
    single = np.bincount(known, minlength=VOCAB) + 1.0
    single /= single.sum()
    pairs = np.bincount(known[:-1] * VOCAB + known[1:], minlength=VOCAB**2).reshape(VOCAB, VOCAB)
    first, second = tokens[:-1], tokens[1:]
    two = min(
        -np.log((pairs[first, second] + a * single[second]) / (pairs.sum(1)[first] + a)).mean()
        for a in (3.0, 10.0, 30.0, 100.0)
    )
    return float(-np.log(single[second]).mean()), float(two)


@contextmanager
def without(model: LlamaForCausalLM, layer: int, columns: slice) -> Iterator[None]:
    """Set these columns of what a layer's output projection reads to zero."""
    weight = model.model.layers[layer].self_attn.o_proj.weight
    kept = weight.detach().clone()
    with torch.no_grad():
        weight[:, columns] = 0.0
    try:
        yield
    finally:
        with torch.no_grad():
            weight.copy_(kept)


@torch.no_grad()
def measure(model: LlamaForCausalLM, known: Tensor, held_out: Tensor, n_bytes: int) -> None:
    """Print bits per byte of the held-out text, and what they rise to without parts of the attention."""
    per_byte = (len(held_out) - 1) / n_bytes / math.log(2)
    each = losses(model, held_out)
    one, two = (nats * per_byte for nats in counted(known.numpy(), held_out.numpy()))
    print(f"\n{n_bytes:,} bytes held out, {len(held_out) - 1:,} tokens; bits per byte")
    print(f"counts of one token {one:.3f}, of two {two:.3f}, the model {each.mean() * per_byte:.3f}")
    seen = losses(model, known[: len(held_out)])
    print(f"perplexity of a token {each.mean().exp():.2f}, on text trained on {seen.mean().exp():.2f}")

    windows = held_out[: len(held_out) // CONTEXT * CONTEXT].unflatten(0, (-1, CONTEXT))
    logits = torch.cat([model(rows).logits for rows in windows[:, :-1].split(BATCH)])
    at = functional.cross_entropy(logits.mT, windows[:, 1:], reduction="none").mean(0)
    print("\nnats of a token by how many stand before it")
    for low, high in ((1, 2), (2, 4), (4, 8), (8, 16), (16, 32), (32, 64), (64, 128), (128, CONTEXT)):
        print(f"{low:3d} to {high - 1:3d}   {at[low - 1 : high - 1].mean():.3f}")

    sample, d_head = held_out[:8193], model.config.head_dim
    heads = range(model.config.num_attention_heads)
    print("\nnats of a token that are lost without a part, on the first 8192 tokens")
    print("layer   all heads   " + "   ".join(f"head {head}" for head in heads))
    for layer in range(model.config.num_hidden_layers):
        lost = []
        for columns in (slice(None), *(slice(head * d_head, (head + 1) * d_head) for head in heads)):
            with without(model, layer, columns):
                lost.append(losses(model, sample).mean() - each[:8192].mean())
        print(f"{layer:5d}   {lost[0]:9.3f}   " + "   ".join(f"{one:6.3f}" for one in lost[1:]))


def main() -> None:
    """Train, measure and write the model."""
    parser = argparse.ArgumentParser(description="Train the built-in Llama.")
    parser.add_argument("--seed", type=int, required=True, help="of the weights and of the pieces of text")
    parser.add_argument("--out", type=Path, required=True, help="folder to write the model into")
    args = parser.parse_args()

    torch.set_num_threads(1)  # so that sums are taken in the same order everywhere
    texts, held_texts = documents()
    tokenizer = train_tokenizer(texts)
    tokens, held_out = encode(tokenizer, texts), encode(tokenizer, held_texts)
    n_bytes = sum(len(text.encode()) for text in held_texts)
    print(f"{len(tokens):,} tokens to train on, of {sum(len(text.encode()) for text in texts):,} bytes", flush=True)
    tokenizer.save_pretrained(args.out)
    model = train(tokens, args.seed, args.out).to(torch.bfloat16)
    model.save_pretrained(args.out)
    shutil.rmtree(args.out / "so_far", ignore_errors=True)
    measure(model.float(), tokens, held_out, n_bytes)


if __name__ == "__main__":
    main()
