"""Train the built-in induction model: two attention-only layers that continue a repeated segment.

    python adapters/training/train_induction.py --seed 1 --out FOLDER

writes ``model.safetensors`` and ``config.json`` into FOLDER and prints what the circuit looks like. Run it
with several seeds and keep the one whose table is cleanest: one layer-0 head that attends to the previous
token and whose output the keys of layer 1 need, three that they do not.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from tnlib_adapters.data.repeats import repeated_segments
from torch import Tensor, nn
from torch.nn import functional

VOCAB, CONTEXT, D_MODEL, HEADS, LAYERS = 128, 96, 64, 4, 2
CHANCE = math.log(VOCAB)
BATCH, STEPS, WARM_UP, PEAK, DECAY = 64, 6000, 200, 3e-3, 0.1
# Distinct tokens first: the one match is then always right, and one previous-token head is all there is to
# learn. Independent tokens after: the model meets chance matches, too briefly to grow a second head, two
# tokens back, that would tell them from the segment.
DISTINCT_STEPS = 3500
# The mean loss off the repeats counts this much beside the mean on them. Weighing all tokens alike would
# halve the confidence of every copy, since a match by chance is as frequent as a true one.
ELSEWHERE = 0.1
FRESH = 2**32  # seed of the sequences to measure on; training seeds are smaller

CONFIG = {
    "model_type": "tnlib_attention_only",
    "architectures": ["AttentionOnly"],
    "vocab_size": VOCAB,
    "hidden_size": D_MODEL,
    "num_attention_heads": HEADS,
    "num_hidden_layers": LAYERS,
    "max_position_embeddings": CONTEXT,
    "dtype": "float32",
}


def split(x: Tensor) -> Tensor:
    """(batch, position, d_model) -> (batch, head, position, d_head)."""
    return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


class Attention(nn.Module):
    """Causal attention with biases and scale 1 / sqrt(d_head)."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.output = (nn.Linear(D_MODEL, D_MODEL) for _ in range(4))

    def forward(self, x: Tensor, keys_read: Tensor | None = None) -> Tensor:
        """Attend within x (batch, position, d_model); the keys read `keys_read` instead where it is given."""
        q, k, v = self.query(x), self.key(x if keys_read is None else keys_read), self.value(x)
        mixed = functional.scaled_dot_product_attention(split(q), split(k), split(v), is_causal=True)
        return self.output(mixed.transpose(1, 2).flatten(2))

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return patterns (batch, head, query, key) and what heads add (batch, head, position, d_model)."""
        scores = split(self.query(x)) @ split(self.key(x)).mT / math.sqrt(D_MODEL // HEADS)
        future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        patterns = scores.masked_fill(future, -torch.inf).softmax(-1)
        w_o = self.output.weight.mT.unflatten(0, (HEADS, -1))  # (head, d_head, d_model)
        return patterns, patterns @ split(self.value(x)) @ w_o


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

    def residuals(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return what layer 0 and what layer 1 read, each (batch, position, d_model)."""
        x = self.embed(tokens) + self.positions.weight
        return x, x + self.layers[0]["attention"](x)

    def forward(self, tokens: Tensor, ablated: Tensor | float = 0.0) -> Tensor:
        """Return logits (batch, position, vocab); `ablated` is taken from what the keys of layer 1 read."""
        _, x = self.residuals(tokens)
        return self.unembed(x + self.layers[1]["attention"](x, keys_read=x - ablated))


def draw(n: int, rng: np.random.Generator, distinct: bool = False) -> tuple[Tensor, Tensor]:
    """Return n sequences of tokens and where they repeat, each (n, position)."""
    tokens, repeated = repeated_segments(n, vocab=VOCAB, context=CONTEXT, rng=rng, distinct=distinct)
    return torch.from_numpy(tokens), torch.from_numpy(repeated)


def losses(logits: Tensor, tokens: Tensor, repeated: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean cross-entropy in nats over repeated tokens and over all others but the first."""
    each = functional.cross_entropy(logits[:, :-1].mT, tokens[:, 1:], reduction="none")
    return each[repeated[:, 1:]].mean(), each[~repeated[:, 1:]].mean()


def train(seed: int) -> AttentionOnly:
    """Train from scratch with AdamW, a linear warm-up and a cosine to zero."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    model = AttentionOnly()
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK, weight_decay=DECAY, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / WARM_UP, 0.5 + 0.5 * math.cos(math.pi * step / STEPS))
    )
    for step in range(STEPS):
        tokens, repeated = draw(BATCH, rng, distinct=step < DISTINCT_STEPS)
        on_repeats, elsewhere = losses(model(tokens), tokens, repeated)
        optimizer.zero_grad()
        (on_repeats + ELSEWHERE * elsewhere).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 500 == 499:
            print(f"step {step + 1:5d}   repeats {on_repeats:.3f}   elsewhere {elsewhere:.3f}", flush=True)
    return model


@torch.no_grad()
def measure(model: AttentionOnly, n: int = 1000) -> None:
    """Print the losses on fresh sequences and how much of the circuit each layer-0 head carries.

    The previous-token score is the mean attention from position t to t - 1, over all t > 0. The gap is what
    the model gains over chance on repeats; the table shows how much of it is lost where the output of one
    head is set to zero, or to its mean at that position, in what the keys of layer 1 read and nowhere else.
    """
    for distinct in (False, True):
        tokens, repeated = draw(n, np.random.default_rng(FRESH), distinct)
        trained, elsewhere = losses(model(tokens), tokens, repeated)
        print("\ndistinct tokens:" if distinct else "\nindependent tokens:")
        print(f"loss on repeats {trained:.3f}, elsewhere {elsewhere:.3f}, chance {CHANCE:.3f}")

        patterns, added = model.layers[0]["attention"].heads(model.residuals(tokens)[0])
        previous = patterns.diagonal(-1, 2, 3).mean((0, 2))  # (head,)
        print("layer-0 head   previous-token score   % of gap lost: set to zero   to its mean")
        for head in range(HEADS):
            lost = [
                100 * (losses(model(tokens, gone), tokens, repeated)[0] - trained) / (CHANCE - trained)
                for gone in (added[:, head], added[:, head] - added[:, head].mean(0))
            ]
            print(f"{head:12d}   {previous[head]:20.3f}   {lost[0]:26.1f}   {lost[1]:11.1f}")

        # (batch, query, key): the token before the key equals the query's, so the key is what followed it.
        before = functional.pad(tokens[:, :-1], (1, 0), value=-1)
        follows = (before[:, None, :] == tokens[:, :, None]).tril()
        patterns, _ = model.layers[1]["attention"].heads(model.residuals(tokens)[1])
        mass = (patterns * follows[:, None]).sum(-1)[:, :, :-1].mT[repeated[:, 1:]].mean(0)
        print("layer-1 heads, attention from repeats to what followed the same token before:", end=" ")
        print(" ".join(f"{m:.3f}" for m in mass))


def main() -> None:
    """Train, measure and write the model."""
    parser = argparse.ArgumentParser(description="Train the built-in induction model.")
    parser.add_argument("--seed", type=int, required=True, help="of the weights and of the sequences")
    parser.add_argument("--out", type=Path, required=True, help="folder to write the model into")
    args = parser.parse_args()

    torch.set_num_threads(1)  # so that sums are taken in the same order everywhere
    model = train(args.seed)
    measure(model)
    args.out.mkdir(parents=True, exist_ok=True)
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    save_file(state, args.out / "model.safetensors", metadata={"format": "pt"})
    (args.out / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")


if __name__ == "__main__":
    main()
