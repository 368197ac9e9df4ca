"""Losses of SmolLM2 by the orders of paths, and its strongest paths: tables of docs/circuits-paths.md.

    python -m benchmarks.smollm2
    python -m benchmarks.path_losses losses [--count 8]
    python -m benchmarks.path_losses strongest

The text is benchmarks/prose_held_out.txt in pieces of 64 tokens, in single precision; patterns, divisors of norms and
gates are frozen on each piece. The prompt of the strongest paths is "When Mary and John went to the store, John gave a
drink to", and their values are logits of Mary less those of John.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np

from benchmarks.smollm2 import smollm2_and_tokenizer

HERE = Path(__file__).parent
LENGTH = 64


def loss_rows(weights: Any, tokenizer: Any, count: int) -> Iterator[str]:
    """Yield the losses up to every order and without it, means over pieces of text."""
    import tnlib_adapters
    from tnlib_adapters.circuits import order_losses

    text = (HERE / "prose_held_out.txt").read_text(encoding="utf-8")
    pieces = np.array(tokenizer(text)["input_ids"][: count * LENGTH]).reshape(count, LENGTH)
    yield "| counted | loss | | " + " | ".join(map(str, range(9))) + " | within 0.1 nats from order |"
    yield "|" + "---|" * 13
    for counted in ("heads", "all"):
        start = time.process_time()
        found = [order_losses(tnlib_adapters.freeze(weights, piece), counted) for piece in pieces]  # type: ignore[arg-type]
        seconds = (time.process_time() - start) / count
        orders = max(len(losses.up_to) for losses in found)
        up_to, without = (
            np.mean(
                [np.pad(getattr(losses, name), (0, orders - len(losses.up_to)), "edge") for losses in found], axis=0
            )
            for name in ("up_to", "without")
        )
        within = sorted(losses.order_within(0.1) for losses in found)
        for label, values in (("up to", up_to), ("without", without)):
            cells = " | ".join(f"{value:.2f}" for value in values[:9])
            yield f"| {counted} | {up_to[-1]:.2f} | {label} | {cells} | {within[0]} to {within[-1]} |"
        yield f"{counted}: {seconds:.1f} CPU s a piece; largest {up_to.max():.1f}, up to order {up_to.argmax()}"


def strongest_rows(weights: Any, tokenizer: Any, table: np.ndarray) -> Iterator[str]:
    """Yield numbers of heads, sums and bounds of the strongest paths."""
    import tnlib_adapters
    from tnlib_adapters.circuits import logit_contributions, strongest_paths

    tokens = tokenizer("When Mary and John went to the store, John gave a drink to")["input_ids"]
    mary, john = (tokenizer(name)["input_ids"][0] for name in (" Mary", " John"))
    contributions = logit_contributions(tnlib_adapters.freeze(weights, tokens), direction=table[mary] - table[john])
    yield "| paths | through 0, 1, 2, 3, 4 heads | their sum | total | no other above | CPU seconds |"
    yield "|" + "---|" * 6
    for k in (100, 1000):
        start = time.process_time()
        found = strongest_paths(contributions, k)
        seconds = time.process_time() - start
        orders = np.bincount([len(path) for path in found.paths], minlength=5)
        yield (
            f"| {k:,} | {', '.join(map(str, orders))} | {found.values.sum():.2f} | {found.orders.total:.2f} "
            f"| {found.bound:.4f} | {seconds:.0f} |"
        )


@click.command()
@click.argument("table", type=click.Choice(["losses", "strongest"]))
@click.option("--count", default=8, show_default=True, help="Pieces of text.")
def main(table: str, count: int) -> None:
    """Print a table."""
    from tnlib_adapters.reference.weights import read_weights

    checkpoint, tokenizer = smollm2_and_tokenizer()
    weights = read_weights(checkpoint, dtype=np.float32)
    embeddings = checkpoint.read("model.embed_tokens.weight")
    rows = loss_rows(weights, tokenizer, count) if table == "losses" else strongest_rows(weights, tokenizer, embeddings)
    for row in rows:
        print(row, flush=True)


if __name__ == "__main__":
    main()
