"""Circuits by the measures of the Mechanistic Interpretability Benchmark: CPR, CMD and AUROC.

    python -m benchmarks.circuit_faithfulness known          edges of the built-in model with a known circuit
    python -m benchmarks.circuit_faithfulness ioi            indirect objects in SmolLM2
    python -m benchmarks.circuit_faithfulness greater-than   years in SmolLM2: the circuit within a divergence

Of the indirect object the metric is the logit difference of the two names, and corrupted prompts name the other subject
("Mary gave a drink to" in place of "John"), as in MIB. Edges are ranked on one set of prompts, and measured on another.
"""

from __future__ import annotations

import logging
import time
from typing import Any

import click
import numpy as np
import tnlib_adapters
from tnlib_adapters.circuits import Ablation, LogitDifference, circuit_faithfulness, edge_effects, find_circuit
from tnlib_adapters.data.coded_letters import CIRCUIT, coded_letters
from tnlib_adapters.reference.weights import Weights, read_weights

from benchmarks.path_orders import NAMES, NOUNS, PLACES
from benchmarks.smollm2 import smollm2_and_tokenizer

SEEDS = range(4)


def known(count: int) -> None:
    """Print AUROC and CMD of edges of the model with a known circuit, by seed."""
    model = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path("known_circuit"))
    print("| seed | effects | edges | true edges | AUROC | true among the first | CPR | CMD |\n" + "|---" * 8 + "|")
    for seed in SEEDS:
        tokens, answers = coded_letters(2 * count, rng=seed)
        how = Ablation("resample", corrupted=tokens[count:])
        text = tokens[:count], answers[:count]
        effects = edge_effects(model, *text, ablation=how)
        for kind in ("first_order", "integrated", "measured"):
            values = dict(zip(effects.names, getattr(effects, kind).tolist(), strict=True))
            found = circuit_faithfulness(model, *text, values, ablation=how, true_edges=CIRCUIT)
            first = sorted(values, key=lambda name: -abs(values[name]))[: len(CIRCUIT)]
            counts = f"{len(values)} | {len(CIRCUIT)} | {found.auroc:.3f} | {len({*first} & {*CIRCUIT})}"
            print(f"| {seed} | {kind.replace('_', ' ')} | {counts} | {found.cpr:.3f} | {found.cmd:.3f} |", flush=True)


def language_model() -> tuple[Weights, Any]:
    """Return the weights of SmolLM2 in single precision, and its tokenizer."""
    model, tokenizer = smollm2_and_tokenizer()
    return read_weights(model, dtype=np.float32), tokenizer


def last(tokens: np.ndarray) -> np.ndarray:
    """Return the mask of the last tokens."""
    return np.broadcast_to(np.arange(tokens.shape[1]) == tokens.shape[1] - 1, tokens.shape)


def indirect_objects(tokenizer: Any, count: int, rng: np.random.Generator) -> tuple[np.ndarray, Ablation]:
    """Return prompts with their answers, and the ablation by prompts with the other subject."""
    texts: list[list[str]] = [[], [], []]
    for _ in range(count):
        a, b = rng.choice(NAMES, 2, replace=False)
        place, thing = PLACES[0]  # one template, so that prompts have one length
        start = f"When {a} and {b} went to the {place},"
        for some, text in zip(texts, (f"{start} {b} gave {thing} to {a}", f"{start} {a} gave {thing} to {a}", f" {b}"),
                              strict=True):  # fmt: skip
            some.append(text)
    clean, corrupted, others = (np.array(tokenizer(some)["input_ids"]) for some in texts)
    return clean, Ablation("resample", metric=LogitDifference(others[:, 0]), corrupted=corrupted)


def ioi(count: int) -> None:
    """Print the faithfulness of circuits of indirect objects, ranked on `count` prompts and measured on others."""
    weights, tokenizer = language_model()
    rng, scores = np.random.default_rng(0), dict[str, dict[str, float]]()
    start = time.perf_counter()
    for _ in range(count // 4):
        tokens, how = indirect_objects(tokenizer, 4, rng)
        effects = edge_effects(weights, tokens, last(tokens), ablation=how, n_measured=0)
        for kind in ("integrated", "first_order"):
            of_kind = scores.setdefault(kind, dict.fromkeys(effects.names, 0.0))
            for name, value in zip(effects.names, getattr(effects, kind).tolist(), strict=True):
                of_kind[name] += value
    print(f"effects of {count} prompts: {time.perf_counter() - start:.0f} s", flush=True)
    tokens, how = indirect_objects(tokenizer, 16, rng)
    for kind, of_kind in scores.items():
        print(kind, circuit_faithfulness(weights, tokens, last(tokens), of_kind, ablation=how), flush=True)


def greater_than(count: int) -> None:
    """Print the circuit of greater-than within a KL divergence of 0.1, by integrated effects."""
    weights, tokenizer = language_model()
    rng = np.random.default_rng(0)
    clean, corrupted = [], []
    for _ in range(count):
        noun, century, tens = NOUNS[0], rng.integers(11, 20), rng.integers(2, 8)
        text = f"The {noun} lasted from the year {century}{{}} to the year {century}9"
        clean.append(tokenizer(text.format(f"{tens}{rng.integers(10)}"))["input_ids"])
        corrupted.append(tokenizer(text.format("01"))["input_ids"])
    tokens, how = np.array(clean), Ablation("resample", metric="kl", corrupted=np.array(corrupted))
    start = time.perf_counter()
    found = find_circuit(weights, tokens, last(tokens), loss_increase=0.1, by="integrated", ablation=how)
    print(f"{time.perf_counter() - start:.0f} s")
    print(found)
    for size, loss in found.curve:
        print(f"{size:8.0f} edges, KL divergence {loss:.4f}")


@click.command()
@click.argument("table", type=click.Choice(["known", "ioi", "greater-than"]))
@click.option("--count", default=None, type=int, help="Number of prompts.")
@click.option("--verbose", is_flag=True, help="Show the progress of the search.")
def main(table: str, count: int | None, *, verbose: bool) -> None:
    """Print a table."""
    if verbose:
        logging.basicConfig(level=logging.INFO)
    function, default = {"known": (known, 16), "ioi": (ioi, 16), "greater-than": (greater_than, 1)}[table]
    function(default if count is None else count)


if __name__ == "__main__":
    main()
