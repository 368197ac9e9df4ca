"""Logit differences of SmolLM2 by the number of layers on a path, over prompts of three tasks, and the strongest paths.

    python -m benchmarks.smollm2
    python -m benchmarks.path_orders [--count 50] [--picture docs/pictures/path-orders.png]

Tasks: the indirect object ("When Mary and John went to the store, John gave a drink to": Mary - John), a segment of 12
random tokens repeated (the next token of the segment - the one before), and greater-than ("The war lasted from
the year 1732 to the year 17": the mean of the years after 32 - that of the others, by their first digit). Single
precision, patterns and gates frozen on each prompt. Prints two Markdown tables: medians and quartiles of the parts of
every order relative to the total, and the strongest paths by their median.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np

from benchmarks.smollm2 import smollm2_and_tokenizer

NAMES = ("Mary", "John", "Tom", "Anna", "James", "Sarah", "Paul", "Kate", "Peter", "Lisa", "David", "Emma")
PLACES = (
    ("store", "a drink"),
    ("park", "a ball"),
    ("school", "a book"),
    ("office", "a letter"),
    ("garden", "a flower"),
)
NOUNS = ("war", "trip", "strike", "journey", "project", "marriage", "dispute", "voyage", "study", "alliance")
Prompt = tuple[list[int], np.ndarray]  # tokens, readout of the final hidden state


def prompts(tokenizer: Any, table: np.ndarray) -> dict[str, Iterator[Prompt]]:
    """Return the prompts of every task, without end."""

    def number(text: str) -> int:
        first, *_ = tokenizer(text)["input_ids"]
        return int(first)

    def indirect_object(rng: np.random.Generator) -> Prompt:
        a, b = rng.choice(NAMES, 2, replace=False)
        place, thing = PLACES[rng.integers(len(PLACES))]
        text = f"When {a} and {b} went to the {place}, {b} gave {thing} to"
        return tokenizer(text)["input_ids"], table[number(f" {a}")] - table[number(f" {b}")]

    def repeated(rng: np.random.Generator) -> Prompt:
        segment = rng.integers(1000, 40_000, 12)
        k = int(rng.integers(1, 11))
        tokens = [*segment, *segment[: k + 1]]
        return [int(token) for token in tokens], table[segment[k + 1]] - table[segment[k - 1]]

    def greater_than(rng: np.random.Generator) -> Prompt:
        noun, century, tens = NOUNS[rng.integers(len(NOUNS))], int(rng.integers(11, 20)), int(rng.integers(2, 8))
        text = f"The {noun} lasted from the year {century}{tens}{rng.integers(10)} to the year {century}"
        digits = np.stack([table[number(str(digit))] for digit in range(10)])
        return tokenizer(text)["input_ids"], digits[tens + 1 :].mean(axis=0) - digits[:tens].mean(axis=0)

    def endless(make: Callable[[np.random.Generator], Prompt]) -> Iterator[Prompt]:
        rng = np.random.default_rng(0)
        return (make(rng) for _ in itertools.count())

    return {
        "indirect object": endless(indirect_object),
        "repeated tokens": endless(repeated),
        "greater-than": endless(greater_than),
    }


def quartiles(values: np.ndarray) -> str:
    """Return the median and the quartiles of numbers as text."""
    low, median, high = np.quantile(values, (0.25, 0.5, 0.75))
    return f"{median:.2f} ({low:.2f} to {high:.2f})"


def picture(found: dict[str, dict[str, np.ndarray]], file: Path) -> None:
    """Draw the sums up to every order, relative to the total: medians, quartiles shaded."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.5, 5.2), layout="constrained")
    axes = figure.subplots(2, len(found), sharex="row", squeeze=False)
    for column, (task, of_task) in enumerate(found.items()):
        for row, (counted, longest) in enumerate((("heads", 8), ("all", 30))):
            panel, sums = axes[row, column], np.cumsum(of_task[counted], axis=1)[:, : longest + 1]
            low, median, high = np.quantile(sums, (0.25, 0.5, 0.75), axis=0)
            orders = np.arange(longest + 1)
            panel.fill_between(orders, low, high, alpha=0.3, linewidth=0)
            panel.plot(orders, median, marker="o", markersize=3, linewidth=1.2)
            panel.axhline(1, color="grey", linewidth=0.8)
            panel.axhline(0, color="grey", linewidth=0.8)
            if row == 1:
                panel.set_yscale("symlog", linthresh=2)
            if row == 0:
                panel.set_title(task, fontsize=11)
            layers = "attention layers" if counted == "heads" else "layers"
            panel.set_xlabel(f"{layers} on a path, at most", fontsize=9)
            if column == 0:
                panel.set_ylabel("sum of these paths / total", fontsize=9)
    figure.savefig(file, dpi=110)


@click.command()
@click.option("--count", default=50, show_default=True)
@click.option("--picture", "file", type=click.Path(path_type=Path))
def main(count: int, file: Path | None) -> None:
    from tnlib_adapters import freeze
    from tnlib_adapters.circuits import logit_contributions, path_orders, strongest_paths
    from tnlib_adapters.reference.weights import read_weights

    checkpoint, tokenizer = smollm2_and_tokenizer()
    table, weights = checkpoint.read("model.embed_tokens.weight"), read_weights(checkpoint)
    tasks = prompts(tokenizer, table)
    relative: dict[str, dict[str, np.ndarray]] = {}
    strongest: dict[str, dict[str, list[float]]] = {}
    seconds = []
    for task, endless in tasks.items():
        rows: dict[str, list[np.ndarray]] = {"heads": [], "all": []}
        strongest[task] = {}
        for k, (tokens, readout) in enumerate(itertools.islice(endless, count)):
            contributions = logit_contributions(freeze(weights, tokens), direction=readout)
            for counted, of_task in rows.items():
                start = time.perf_counter()
                orders = path_orders(contributions, counted)  # type: ignore[arg-type]
                seconds.append(time.perf_counter() - start)
                of_task.append(orders.values / orders.total)
            if k < min(count, 5):
                paths = strongest_paths(contributions, 200)
                for path, value in zip(paths.paths, paths.values, strict=True):
                    strongest[task].setdefault(" > ".join((*path, "logit")), []).append(value / paths.orders.total)
        relative[task] = {counted: np.stack(of_task) for counted, of_task in rows.items()}
        print(task, flush=True)
    if file is not None:
        picture(relative, file)
    print("| task | counted | " + " | ".join(f"order {k}" for k in range(6)) + " | up to 3 | largest part |")
    print("|" + "---|" * 10)
    for task, of_task in relative.items():
        for counted, parts in of_task.items():
            cells = [quartiles(parts[:, k]) for k in range(6)]
            cells += [quartiles(parts[:, :4].sum(axis=1)), quartiles(np.abs(parts).max(axis=1))]
            print(f"| {task} | {counted} | {' | '.join(cells)} |")
    print("\n| task | path | part of the total, median of 5 |\n|---|---|---|")
    for task, paths in strongest.items():
        medians = {name: np.median([*values, *[0.0] * (5 - len(values))]) for name, values in paths.items()}
        for name in sorted(medians, key=lambda own: -abs(medians[own]))[:6]:
            print(f"| {task} | {name} | {medians[name]:.2f} |")
    print(f"\npath_orders takes {np.median(seconds):.1f} s, median")


if __name__ == "__main__":
    main()
