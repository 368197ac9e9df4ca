"""Train a GPT-2 of two layers whose circuit is known: six edges compute the answer, whatever the others carry.

    python adapters/training/train_known_circuit.py --seed 0 --out FOLDER

writes ``model.safetensors`` and ``config.json`` into FOLDER, and prints the accuracy of the model, of the circuit
alone, and of the model with the circuit removed.

Task: eight distinct letters, then four letters of these, each followed by its answer: the code of the letter that came
after it. Circuit: head 0.0 moves each letter to the next position, the keys of head 1.0 match it with the query, its
values go to feed-forward layer 1, which computes the code. In every step a random share of all other edges carries
what it carries on another sequence (interchange interventions, as for InterpBench), so that they do not matter.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import save_file
from tnlib_adapters.data.coded_letters import CIRCUIT, CODES, coded_letters
from torch import Tensor, nn
from torch.nn import functional

D_MODEL, HEADS, LAYERS, D_FF = 32, 4, 2, 128
CONTEXT = 16
BATCH, STEPS, WARM_UP, PEAK = 128, 3000, 100, 4e-3
WRITERS = ["tokens", *(f"{k}.{h}" if h < HEADS else f"mlp {k}" for k in range(LAYERS) for h in range(HEADS + 1))]
CONFIG = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "vocab_size": 2 * CODES,
    "n_positions": CONTEXT,
    "n_embd": D_MODEL,
    "n_layer": LAYERS,
    "n_head": HEADS,
    "n_inner": D_FF,
    "layer_norm_epsilon": 1e-5,
    "activation_function": "gelu_new",
    "tie_word_embeddings": False,
    "dtype": "float32",
}


class Block(nn.Module):
    """The weights of a layer of GPT-2."""

    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(D_MODEL), nn.LayerNorm(D_MODEL)
        self.qkv, self.proj = nn.Linear(D_MODEL, 3 * D_MODEL), nn.Linear(D_MODEL, D_MODEL)
        self.up, self.down = nn.Linear(D_MODEL, D_FF), nn.Linear(D_FF, D_MODEL)


class Interchanged(NamedTuple):
    """What writers write on another sequence, and gates by reader: 1 to read the own sequence, 0 the other."""

    writers: Tensor  # writer b n d
    gates: dict[str, Tensor]  # reader -> (writers before it,)


class Model(nn.Module):
    """GPT-2 with separate inputs of every query, key, value, feed-forward layer and of the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(2 * CODES, D_MODEL), nn.Embedding(CONTEXT, D_MODEL)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.ln_f, self.head = nn.LayerNorm(D_MODEL), nn.Linear(D_MODEL, 2 * CODES, bias=False)

    def forward(self, tokens: Tensor, other: Interchanged | None = None) -> tuple[Tensor, Tensor]:
        """Return logits (b, n, vocab), and what every writer writes."""
        constant = self.wpe.weight[: tokens.shape[1]]
        writers = [self.wte(tokens)]

        def read(readers: list[str], n: int) -> Tensor:
            stream = torch.stack(writers[:n])
            if other is None:
                return (stream.sum(0) + constant).expand(len(readers), *stream.shape[1:])
            gates = torch.stack([other.gates[reader] for reader in readers])
            return (
                torch.einsum("rw,wbnd->rbnd", gates, stream)
                + torch.einsum("rw,wbnd->rbnd", 1 - gates, other.writers[:n])
                + constant
            )

        future = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).triu(1)
        for k, block in enumerate(self.blocks):
            n = len(writers)
            reads = block.ln_1(read([f"{k}.{h} {side}" for side in "QKV" for h in range(HEADS)], n))
            sides = reads.unflatten(0, (3, HEADS))  # side h b n d
            weight, bias = block.qkv.weight.view(3, HEADS, -1, D_MODEL), block.qkv.bias.view(3, HEADS, 1, 1, -1)
            q, key, v = torch.einsum("shbnd,shed->shbne", sides, weight) + bias
            scores = (q @ key.mT / math.sqrt(D_MODEL // HEADS)).masked_fill(future, -torch.inf)
            mixed = scores.softmax(-1) @ v  # h b n e
            writers += list(torch.einsum("hbne,dhe->hbnd", mixed, block.proj.weight.view(D_MODEL, HEADS, -1)))
            constant = constant + block.proj.bias
            (x,) = block.ln_2(read([f"mlp {k}"], len(writers)))
            writers.append(block.down(functional.gelu(block.up(x), approximate="tanh")))
        return self.head(self.ln_f(read(["logits"], len(writers))[0])), torch.stack(writers)


def readers() -> dict[str, int]:
    """Return the number of writers before every reader."""
    names = {}
    for k in range(LAYERS):
        n = 1 + k * (HEADS + 1)
        names |= {f"{k}.{h} {side}": n for side in "QKV" for h in range(HEADS)} | {f"mlp {k}": n + HEADS}
    return names | {"logits": len(WRITERS)}


def random_gates(share: float, of_circuit: float = 1.0) -> dict[str, Tensor]:
    """Return gates that are open for a random share of all edges, and for those of the circuit."""
    gates = {reader: (torch.rand(n) < share).float() for reader, n in readers().items()}
    for edge in CIRCUIT:
        writer, reader = edge.split(" -> ")
        gates[reader][WRITERS.index(writer)] = of_circuit
    return gates


def batch(seed: int, size: int = BATCH) -> tuple[Tensor, Tensor]:
    """Return sequences, and the positions before their answers."""
    tokens, answers = coded_letters(size, rng=seed)
    return torch.from_numpy(tokens), torch.from_numpy(answers[0]).nonzero()[:, 0] - 1


def loss_and_accuracy(model: Model, seed: int, share: float, of_circuit: float = 1.0) -> tuple[Tensor, float]:
    """Return the cross-entropy of answers, and the share of right ones, for edges of `random_gates`."""
    (tokens, at), (others, _) = batch(2 * seed), batch(2 * seed + 1)
    _, written = model(others)
    logits, _ = model(tokens, Interchanged(written, random_gates(share, of_circuit)))
    rows, answers = logits[:, at].flatten(0, 1), tokens[:, at + 1].flatten()
    return functional.cross_entropy(rows, answers), float((rows.argmax(-1) == answers).float().mean())


def save(model: Model, folder: Path) -> None:
    """Write the weights under the names of transformers."""
    tensors = {"transformer.wte.weight": model.wte.weight, "transformer.wpe.weight": model.wpe.weight}
    tensors |= {f"transformer.ln_f.{name}": value for name, value in model.ln_f.named_parameters()}
    tensors["lm_head.weight"] = model.head.weight
    for k, block in enumerate(model.blocks):
        of_block = {"ln_1": block.ln_1, "ln_2": block.ln_2}
        of_block |= {
            "attn.c_attn": block.qkv,
            "attn.c_proj": block.proj,
            "mlp.c_fc": block.up,
            "mlp.c_proj": block.down,
        }
        for name, layer in of_block.items():
            weight = layer.weight.T if isinstance(layer, nn.Linear) else layer.weight
            tensors |= {f"transformer.h.{k}.{name}.weight": weight, f"transformer.h.{k}.{name}.bias": layer.bias}
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: a.detach().contiguous() for name, a in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=1) + "\n")


def main() -> None:
    """Train, save and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK, weight_decay=0.01)
    rate = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda k: min((k + 1) / WARM_UP, 0.5 + 0.5 * math.cos(math.pi * k / arguments.steps))
    )
    for step in range(arguments.steps):
        share = float(torch.rand(())) if step % 2 else 0.0
        loss, accuracy = loss_and_accuracy(model, step + 10**6 * (arguments.seed + 1), share)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rate.step()
        if step % 200 == 0:
            print(step, f"{loss.item():.3f} {accuracy:.3f}", flush=True)
    save(model, arguments.out)
    model.eval()
    for name, share, of_circuit in (("model", 1.0, 1.0), ("circuit alone", 0.0, 1.0), ("the other edges", 1.0, 0.0)):
        with torch.no_grad():
            print(name, f"accuracy {loss_and_accuracy(model, 0, share, of_circuit)[1]:.3f}")


if __name__ == "__main__":
    main()
