"""Train the built-in induction model: two attention-only layers that continue a repeated segment.

    python adapters/training/train_induction.py --seed 0 --out FOLDER

writes ``model.safetensors`` and ``config.json`` into FOLDER and prints what the circuit looks like.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from tnlib_adapters.data.repeats import repeated_segments
from torch import Tensor, nn
from torch.nn import functional

VOCAB, CONTEXT, D_MODEL, HEADS, LAYERS = 128, 96, 64, 4, 2
CHANCE = math.log(VOCAB)
BATCH, STEPS, WARM_UP, PEAK, DECAY = 64, 8000, 200, 3e-3, 0.1
ELSEWHERE = 0.0
FRESH = 2**32  # seed of the sequences to measure on; training seeds are smaller


class Attention(nn.Module):
    """Causal attention with biases."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.output = (nn.Linear(D_MODEL, D_MODEL) for _ in range(4))

    def forward(self, x: Tensor, keys_read: Tensor | None = None) -> Tensor:
        """Attend within x (batch, position, d_model); the keys read `keys_read` instead where it is given."""
        q, k, v = (
            split(self.query(x)),
            split(self.key(x if keys_read is None else keys_read)),
            split(self.value(x)),
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)  # scale 1 / sqrt(d_head)
        return self.output(mixed.transpose(1, 2).flatten(2))

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return patterns (batch, head, query, key) and what each head adds (batch, head, position, d_model)."""
        scores = split(self.query(x)) @ split(self.key(x)).mT / math.sqrt(D_MODEL // HEADS)
        future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        patterns = scores.masked_fill(future, -torch.inf).softmax(-1)
        w_o = self.output.weight.mT.unflatten(0, (HEADS, -1))  # (head, d_head, d_model)
        return patterns, patterns @ split(self.value(x)) @ w_o


def split(x: Tensor) -> Tensor:
    """(batch, position, d_model) -> (batch, head, position, d_head)."""
    return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


class AttentionOnly(nn.Module):
    """Token and position embeddings, attention layers that add to them, an untied unembedding with a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, D_MODEL)
        self.positions = nn.Embedding(CONTEXT, D_MODEL)
        self.layers = nn.ModuleList(nn.ModuleDict({"attention": Attention()}) for _ in range(LAYERS))
        self.unembed = nn.Linear(D_MODEL, VOCAB)
        nn.init.normal_(self.embed.weight, std=0.5)
        nn.init.normal_(self.positions.weight, std=0.5)

    def forward(self, tokens: Tensor, ablate: Tensor | None = None) -> Tensor:
        """Return logits (batch, position, vocab); `ablate` is taken from what the keys of layer 1 read."""
        first, second = (layer["attention"] for layer in self.layers)
        x = self.embed(tokens) + self.positions.weight
        x = x + first(x)
        x = x + second(x, None if ablate is None else x - ablate)
        return self.unembed(x)


def batch(n: int, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
    tokens, repeated = repeated_segments(n, vocab=VOCAB, context=CONTEXT, rng=rng)
    return torch.from_numpy(tokens), torch.from_numpy(repeated[:, 1:])


def losses(logits: Tensor, tokens: Tensor, repeated: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean cross-entropy in nats over repeated tokens and over all others but the first."""
    each = functional.cross_entropy(logits[:, :-1].mT, tokens[:, 1:], reduction="none")
    return each[repeated].mean(), each[~repeated].mean()


def train(seed: int) -> AttentionOnly:
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    model = AttentionOnly()
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK, weight_decay=DECAY, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / WARM_UP, 0.5 + 0.5 * math.cos(math.pi * step / STEPS))
    )
    for step in range(STEPS):
        tokens, repeated = batch(BATCH, rng)
        on_repeats, elsewhere = losses(model(tokens), tokens, repeated)
        optimizer.zero_grad()
        (on_repeats + ELSEWHERE * elsewhere).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 500 == 499:
            print(f"step {step + 1:6d}  repeats {on_repeats:.3f}  elsewhere {elsewhere:.3f}", flush=True)
    return model


@torch.no_grad()
def measure(model: AttentionOnly, n: int = 1000) -> None:
    tokens, repeated = batch(n, np.random.default_rng(FRESH))
    trained, elsewhere = losses(model(tokens), tokens, repeated)
    print(f"loss on repeats {trained:.3f}, elsewhere {elsewhere:.3f}, chance {CHANCE:.3f}")
    x = model.embed(tokens) + model.positions.weight
    patterns, added = model.layers[0]["attention"].heads(x)
    previous = patterns.diagonal(-1, 2, 3).mean((0, 2))
    print("layer 0 head   previous-token score   % of gap lost: head to zero   to its mean")
    for head in range(HEADS):
        out = added[:, head]
        lost = [
            100 * (losses(model(tokens, gone), tokens, repeated)[0] - trained) / (CHANCE - trained)
            for gone in (out, out - out.mean(0))
        ]
        print(f"{head:12d}   {previous[head]:20.3f}   {lost[0]:27.1f}   {lost[1]:11.1f}")
    second_x = x + model.layers[0]["attention"](x)
    second, _ = model.layers[1]["attention"].heads(second_x)
    print("layer 1 induction mass:")
