"""Induction heads and circuits of the built-in models over seeds: the tables of docs/circuits.md.

python -m benchmarks.circuit_discovery induction    causal heads of the built-in Llama, by length and seed
python -m benchmarks.circuit_discovery edges        searches against exhaustive ablation, in the attention-only model
python -m benchmarks.circuit_discovery llama        the same in the built-in Llama, for integrated effects
python -m benchmarks.circuit_discovery searches     all searches in the built-in Llama, on short sequences
python -m benchmarks.circuit_discovery similarities most similar QK and OV operators of SmolLM2
python -m benchmarks.circuit_discovery heads        copying, previous-token scores and patched heads of SmolLM2
python -m benchmarks.circuit_discovery ioi          terms, singular directions and head loadings of SmolLM2
python -m benchmarks.circuit_discovery pruned       circuits of SmolLM2 from estimates, pruned further by measurement
python -m benchmarks.circuit_discovery gpt2         times for a GPT-2 small of random weights
"""

from __future__ import annotations

import argparse
import csv
import heapq
import inspect
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np
from tnlib_adapters import builtin_path, circuits, freeze, open_checkpoint, open_model
from tnlib_adapters.data.repeats import repeated_segments
from tnlib_adapters.reference.model import run
from tnlib_adapters.reference.weights import read_weights

from benchmarks.smollm2 import smollm2_and_tokenizer

HERE = Path(__file__).parent
SEEDS = range(4)
LENGTHS = ((20, 48), (50, 48), (100, 32))
SEARCHES = {"greedy": "greedy", "acdc": "ACDC", "integrated": "integrated", "attribution": "attribution patching"}
CASES = {
    "zero, loss": circuits.Ablation("zero"),
    "resample, KL": circuits.Ablation("resample", metric="kl"),
}


def python_text() -> np.ndarray:
    """Return the tokens of four files of Python's standard library."""
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(str(builtin_path("llama") / "tokenizer.json"))
    source = "".join(inspect.getsource(module) for module in (argparse, textwrap, csv, heapq))
    return np.array(tokenizer.encode(source).ids)


def induction_rows() -> Iterator[str]:
    """Yield rows of the table of causal heads."""
    model, text = open_checkpoint(builtin_path("llama")), python_text()
    yield "| length | sequences | seed | causal heads | largest effect, nats | undecided heads |"
    yield "|---|---|---|---|---|---|"
    for length, n in LENGTHS:
        for seed in SEEDS:
            found = circuits.find_induction(model, n=n, length=length, text=text, rng=seed)
            causal, undecided = (_names(heads) for heads in (found.causal_heads, found.undecided_heads))
            yield f"| {length} | {n} | {seed} | {causal} | {found.effect.max():.3f} | {undecided} |"


def edge_rows() -> Iterator[str]:
    """Yield rows of the table of searches: medians and ranges over seeds."""
    model = open_checkpoint(builtin_path())
    rows: dict[tuple[str, str], list[tuple[float, ...]]] = {}
    shares: dict[str, list[tuple[float, float]]] = {}
    for seed in SEEDS:
        text = repeated_segments(4, rng=np.random.default_rng(seed))
        for case, ablation in CASES.items():
            effects = circuits.edge_effects(model, *text, ablation=ablation)
            both = (share_of_largest(effects, values, 0.1) for values in (effects.first_order, effects.integrated))
            shares.setdefault(case, []).append((next(both), next(both)))
            for by in SEARCHES:
                if by == "attribution" and ablation.metric == "kl":
                    continue
                search: Any = by
                start = time.process_time()
                found = circuits.find_circuit(model, *text, loss_increase=1.0, by=search, ablation=ablation)
                seconds = time.process_time() - start
                recovery = effects.recovery(found.kept, 0.1)
                row = (len(found.kept), recovery.precision, recovery.recall, seconds)
                rows.setdefault((case, by), []).append(row)
    yield "| ablation, metric | search | edges kept | precision | recall | seconds |"
    yield "|---|---|---|---|---|---|"
    for (case, by), measured in rows.items():
        low, middle, high = np.quantile(np.array(measured), [0, 0.5, 1], axis=0)
        kept = f"{middle[0]:.0f} ({low[0]:.0f} to {high[0]:.0f})"
        recovered = " | ".join(f"{middle[k]:.2f} ({low[k]:.2f} to {high[k]:.2f})" for k in (1, 2))
        yield f"| {case} | {SEARCHES[by]} | {kept} | {recovered} | {middle[3]:.1f} |"
    yield "| ablation, metric | to first order | integrated |"
    yield "|---|---|---|"
    for case, values in shares.items():
        low, high = np.min(values, axis=0), np.max(values, axis=0)
        first, integrated = (f"{low[k]:.2f} to {high[k]:.2f}" for k in (0, 1))
        if CASES[case].metric == "kl":
            first = "all effects are zero"
        yield f"| {case} | {first} | {integrated} |"


def share_of_largest(effects: circuits.EdgeEffects, estimates: np.ndarray, least: float) -> float:
    """Return the share of edges of at least `least` nats among as many of largest estimated effect."""
    wanted = np.flatnonzero(np.abs(effects.measured) >= least)
    return len(set(wanted) & set(np.argsort(-np.abs(estimates))[: len(wanted)])) / len(wanted)


def llama_rows(length: int = 20, least: float = 0.005) -> Iterator[str]:
    """Yield rows of the table of corrupted runs: another first copy of a repeated segment of Python."""
    model, text = open_checkpoint(builtin_path("llama")), python_text()
    yield (
        "| seed | edges of at least 0.005 nats | among as many of largest integrated effect | correlation | edges kept "
        "| precision | recall |"
    )
    yield "|---|---|---|---|---|---|---|"
    for seed in SEEDS:
        rng = np.random.default_rng(seed)
        segment, other = (text[rng.integers(0, len(text) - length, 4)[:, None] + np.arange(length)] for _ in range(2))
        tokens, repeated, how = corrupted_runs(segment, other)
        effects = circuits.edge_effects(model, tokens, repeated, ablation=how)
        budget = quarter_of_divergence(model, tokens, repeated, how)
        found = circuits.find_circuit(model, tokens, repeated, loss_increase=budget, by="integrated", ablation=how)
        share = share_of_largest(effects, effects.integrated, least)
        correlation = np.corrcoef(effects.integrated, effects.measured)[0, 1]
        precision, recall, n_edges = effects.recovery(found.kept, least)
        yield (
            f"| {seed} | {n_edges} | {share:.2f} | {correlation:.2f} | {len(found.kept)} | {precision:.2f} "
            f"| {recall:.2f} |"
        )


def search_rows(length: int = 6, least: float = 0.005) -> Iterator[str]:
    """Yield rows of the table of all searches, on two repeated segments of random tokens."""
    model, rng = open_checkpoint(builtin_path("llama")), np.random.default_rng(0)
    tokens, repeated, how = corrupted_runs(*(rng.integers(0, 1024, (2, length)) for _ in range(2)))
    effects = circuits.edge_effects(model, tokens, repeated, ablation=how)
    budget = quarter_of_divergence(model, tokens, repeated, how)
    yield f"{int((np.abs(effects.measured) >= least).sum())} edges of at least {least} nats"
    yield "| search | edges kept | divergence | precision | recall | seconds |"
    yield "|---|---|---|---|---|---|"
    for by, name in SEARCHES.items():
        if by == "attribution":  # refused: first-order effects of the divergence are zero
            continue
        search: Any = by
        start = time.process_time()
        found = circuits.find_circuit(model, tokens, repeated, loss_increase=budget, by=search, ablation=how)
        seconds = time.process_time() - start
        precision, recall, _ = effects.recovery(found.kept, least)
        yield f"| {name} | {len(found.kept)} | {found.loss:.4f} | {precision:.2f} | {recall:.2f} | {seconds:.1f} |"


def similarity_rows() -> Iterator[str]:
    """Yield the tables of the most similar operators of heads of SmolLM2, QK at distance 1, and seconds."""
    model, _ = smollm2_and_tokenizer()
    for operator, distance in (("OV", None), ("QK", 1)):
        start = time.process_time()
        found = circuits.operator_similarities(model, operator, distance=distance)  # type: ignore[arg-type]
        yield f"{found!r}\n{time.process_time() - start:.1f} s"


def indirect_object(tokenizer: Any) -> tuple[np.ndarray, np.ndarray, Any]:
    """Return a prompt with its answer, the mask of the answer, and the ablation by the other subject."""
    clean, corrupted, other = (
        np.array(tokenizer(f"When Mary and John went to the store, {name}")["input_ids"])
        for name in ("John gave a drink to Mary", "Mary gave a drink to Mary", "John gave a drink to John")
    )
    metric = circuits.LogitDifference(other[-1:])
    return clean, np.arange(len(clean)) == len(clean) - 1, circuits.Ablation("resample", metric, corrupted)


def head_rows() -> Iterator[str]:
    """Yield copying and previous-token scores of SmolLM2 by their inputs, and the heads that recover IOI most."""
    model, tokenizer = smollm2_and_tokenizer()
    yield "copying: head | embeddings | first layer"
    copying = circuits.copying_scores(model)
    for at in ((23, 0), (23, 1), (23, 7), (29, 1)):
        yield f"{at[0]}.{at[1]} | {copying.embeddings[at]:.2f} | {copying.first_layer[at]:.2f}"
    start, cpu = time.perf_counter(), time.process_time()
    circuits.bigrams(model)
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    yield f"bigrams of all tokens: {seconds:.0f} s, {cpu:.0f} CPU seconds"
    texts = ((HERE / f"prose_{name}.txt").read_text(encoding="utf-8") for name in ("calibration", "held_out"))
    first, second = (np.array(tokenizer(text)["input_ids"][:256]) for text in texts)
    patterns = circuits.pattern_scores(run(model, second[None]).patterns, second[None]).previous
    repeated = circuits.repeat_scores(model).induction
    yield "scores from weights: inputs | of tokens | correlation with patterns: previous | induction"
    for inputs, vocabulary in (("embeddings", None), (None, None), (first, None), (None, "first layer")):
        scores = circuits.weight_scores(model, inputs=inputs, vocabulary=vocabulary)
        measured = ((scores.previous, patterns), (scores.induction, repeated))
        found = " | ".join(f"{np.corrcoef(a.ravel(), b.ravel())[0, 1]:.2f}" for a, b in measured)
        yield f"{scores.inputs} | {scores.tokens} | {found}"
    clean, at_end, how = indirect_object(tokenizer)
    found = circuits.activation_patching(model, clean, at_end, how.corrupted, of="heads", metric=how.metric)
    yield f"patching\n{found!r}"


def ioi_rows() -> Iterator[str]:
    """Yield ten terms, effects of singular directions and head loadings of SmolLM2 for an indirect object."""
    model, tokenizer = smollm2_and_tokenizer()
    weights, (answer, at_end, how) = read_weights(model), indirect_object(tokenizer)
    tokens, mary, (john,) = answer[:-1], answer[-1], how.metric.others
    unembedding: Any = weights.unembed
    difference = unembedding.affine.weight[:, mary] - unembedding.affine.weight[:, john]
    norm: Any = weights.final_norm
    readout = difference * norm.weight / norm.divisors(run(weights, tokens).residuals[-1][0, -1])
    start = time.process_time()
    terms = circuits.ten_terms(weights, tokens, layers=(20, 23), method="path_integral")
    seconds = time.process_time() - start
    values = (f"{name} {value:.2f}" for name, value in zip(terms.names, terms.arrays[:, -1] @ readout, strict=True))
    yield f"ten terms of layers 20, 23, {seconds:.1f} s: {', '.join(values)}"
    pairs = terms.by_pair[:, :, :, -1] @ readout  # side, writer, head
    side, writer, head = np.unravel_index(np.argmax(np.abs(pairs)), pairs.shape)
    yield f"largest pair: {'QKV'[side]} {terms.writers[writer]} > 23.{head} {pairs[side, writer, head]:.2f}"
    for layer, head, operator in ((23, 3, "OV"), (23, 0, "OV"), (20, 0, "OV"), (23, 3, "Q"), (23, 0, "Q")):
        start = time.process_time()
        of: Any = operator
        effects = circuits.singular_vector_effects(weights, answer, at_end, layer, head, operator=of, metric=how.metric)
        yield f"{effects!r}\n{time.process_time() - start:.1f} s"
    start = time.process_time()
    contributions = circuits.logit_contributions(freeze(weights, tokens), direction=difference)
    loadings = circuits.head_loadings(contributions, 1, layer=20)
    yield f"{loadings!r}\n{time.process_time() - start:.1f} s"
    start = time.process_time()
    by_position = circuits.edge_effects(weights, answer, at_end, ablation=how, n_measured=0, by_position=True)
    yield f"{by_position!r}\n{time.process_time() - start:.1f} s"


def pruned_rows(first: float = 0.5, last: float = 2.0) -> Iterator[str]:
    """Yield rows of the table of circuits of SmolLM2 for an indirect object: estimated, and measured within these."""
    model, tokenizer = smollm2_and_tokenizer()
    weights, (clean, at_end, how) = read_weights(model, dtype=np.float32), indirect_object(tokenizer)
    yield "| search | among edges | allowed increase | edges kept | increase | CPU s |"
    yield "|---|---|---|---|---|---|"
    outer: circuits.Circuit | None = None
    for by, increase in (("integrated", last), ("integrated", first), ("acdc", last), ("greedy", last)):
        search: Any = by
        terms: Any = "edges" if by == "integrated" else outer
        start = time.process_time()
        outer = circuits.find_circuit(weights, clean, at_end, loss_increase=increase, by=search, of=terms, ablation=how)
        seconds = time.process_time() - start
        edges = "all" if terms == "edges" else f"{len(terms.kept)}"
        increased = outer.loss - outer.full_loss
        yield f"| {SEARCHES[by]} | {edges} | {increase:g} | {len(outer.kept)} | {increased:.2f} | {seconds:.0f} |"


def gpt2_rows() -> Iterator[str]:
    """Yield rows of the table of CPU seconds for a GPT-2 small of random weights, on random tokens."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = open_model(GPT2LMHeadModel(GPT2Config()))
    weights = read_weights(model, dtype=np.float32)
    yield "| call | tokens | CPU s |"
    yield "|---|---|---|"
    for length in (16, 64):
        tokens = np.random.default_rng(0).integers(0, 50_000, (2, length))
        mask = np.broadcast_to(np.arange(length) > 0, tokens.shape)
        start = time.process_time()
        circuits.edge_effects(weights, tokens, mask, n_measured=0)
        seconds = time.process_time() - start
        yield f"| `edge_effects(weights, tokens, mask, n_measured=0)` | 2 x {length} | {seconds:.1f} |"
    for dtype in (np.float64, np.float32):
        start = time.process_time()
        circuits.find_induction(model, n=2, length=8, dtype=dtype)
        seconds, named = time.process_time() - start, "" if dtype == np.float64 else ", dtype=np.float32"
        yield f"| `find_induction(model, n=2, length=8{named})` | 2 x 16 | {seconds:.1f} |"


def corrupted_runs(segment: np.ndarray, other: np.ndarray) -> tuple[np.ndarray, np.ndarray, circuits.Ablation]:
    """Return sequences (n, 2 length) of a segment twice, the predictable tokens, and runs with another first copy."""
    tokens = np.hstack([segment, segment])
    repeated = np.broadcast_to(np.arange(tokens.shape[1]) > segment.shape[1], tokens.shape)
    return tokens, repeated, circuits.Ablation("resample", metric="kl", corrupted=np.hstack([other, segment]))


def quarter_of_divergence(model: Any, tokens: np.ndarray, repeated: np.ndarray, how: circuits.Ablation) -> float:
    """Return a quarter of the divergence of the circuit without edges."""
    nothing = circuits.find_circuit(model, tokens, repeated, loss_increase=1e9, by="integrated", ablation=how)
    return nothing.loss / 4


def _names(heads: tuple[tuple[int, int], ...]) -> str:
    return ", ".join(f"{layer}.{head}" for layer, head in heads)


TABLES = {
    "induction": induction_rows,
    "edges": edge_rows,
    "llama": llama_rows,
    "searches": search_rows,
    "similarities": similarity_rows,
    "heads": head_rows,
    "ioi": ioi_rows,
    "pruned": pruned_rows,
    "gpt2": gpt2_rows,
}


@click.command()
@click.argument("table", type=click.Choice(list(TABLES)))
def main(table: str) -> None:
    """Print a table."""
    for row in TABLES[table]():
        print(row, flush=True)


if __name__ == "__main__":
    main()
