"""Circuit functions beside TransformerLens: the same quantities of a GPT-2 small with random weights, on one thread.

python -m benchmarks.circuit_peers     print the table of docs/circuits.md

Both compute in float32. Runs alternate; seconds are medians of the CPU time.
"""

from __future__ import annotations

import functools
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import click
import numpy as np
from tnlib_adapters import Attention, circuits, freeze, open_model
from tnlib_adapters.circuits.heads.pattern_scores import attention_targets
from tnlib_adapters.reference.layers import rows_product
from tnlib_adapters.reference.weights import read_weights

from benchmarks.frozen_models import random_gpt2

OPENED = 3  # runs of the cases that open the model
TOKEN = 5  # whose logit is attributed
VOCAB = 50257


class Case(NamedTuple):
    """A quantity, the number of tokens and of runs, and two functions of the tokens that return it."""

    name: str
    n: int
    runs: int
    ours: Callable[[np.ndarray], np.ndarray]
    theirs: Callable[[np.ndarray], np.ndarray]


def bridge(model: Any, folder: str) -> Any:
    """Return a model, saved in a folder too, as TransformerLens runs it, with its weight processing in place."""
    from transformer_lens.model_bridge import TransformerBridge

    found = TransformerBridge.boot_transformers(folder, hf_model=model, load_weights=False)
    found.enable_compatibility_mode()
    return found


def cases(folder: str) -> Iterator[Case]:
    """Yield all comparisons of the model, which is saved in the folder."""
    import torch

    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    model = random_gpt2()
    model.save_pretrained(folder)
    lens = bridge(random_gpt2(), folder)
    checkpoint = open_model(model)
    weights = read_weights(checkpoint, dtype=np.float32)
    table = model.lm_head.weight.numpy()
    direction = table[TOKEN] - table.mean(axis=0)  # TransformerLens centres the unembedding

    def patterns(tokens: np.ndarray, model: Any = weights) -> np.ndarray:
        frozen = freeze(model, tokens)
        return np.stack([heads.patterns for block in frozen.blocks for heads in block.heads if heads is not None])

    def their_patterns(tokens: np.ndarray, lens: Any = lens) -> np.ndarray:
        _, cache = lens.run_with_cache(torch.from_numpy(tokens)[None], names_filter=lambda name: "hook_pattern" in name)
        return torch.stack([cache["pattern", layer][0] for layer in range(12)]).numpy()

    def contributions(tokens: np.ndarray, model: Any = weights, *, on_all_paths: bool = False) -> np.ndarray:
        found = circuits.logit_contributions(freeze(model, tokens), direction=direction)
        if on_all_paths:
            _ = found.through
        return np.array([v for name, v in zip(found.names, found.direct, strict=True) if "mlp" not in name])

    def their_direct(tokens: np.ndarray, lens: Any = lens) -> np.ndarray:
        _, cache = lens.run_with_cache(torch.from_numpy(tokens)[None])
        parts, labels = cache.get_full_resid_decomposition(
            expand_neurons=False, apply_ln=False, pos_slice=-1, return_labels=True
        )
        found = cache.logit_attrs(parts, tokens=torch.tensor([TOKEN]), pos_slice=-1)[:, 0].numpy()
        return found[[label.startswith("L") for label in labels]]

    def knocked_out(tokens: np.ndarray) -> np.ndarray:
        return circuits.find_induction(checkpoint, n=2, length=len(tokens) // 2, dtype=np.float32).effect

    def their_knocked_out(tokens: np.ndarray) -> np.ndarray:
        n = len(tokens)
        texts = np.tile(np.random.default_rng(0).integers(0, VOCAB, (2, n // 2)), (1, 2))  # those of find_induction
        blocked, inputs = torch.from_numpy(attention_targets(texts)["induction"]), torch.from_numpy(texts)

        def losses(hooks: list[Any]) -> torch.Tensor:
            each = lens.run_with_hooks(inputs, return_type="loss", loss_per_token=True, fwd_hooks=hooks)
            return each[:, n // 2 :].mean()  # of the repeated tokens but the first

        def without(pattern: torch.Tensor, head: int) -> torch.Tensor:
            left = torch.where(blocked, 0.0, pattern[:, head])
            pattern[:, head] = left / left.sum(-1, keepdim=True).clamp_min(1e-30)
            return pattern

        whole = losses([])
        effects = [
            losses([(f"blocks.{layer}.attn.hook_pattern", lambda a, hook, head=head: without(a, head))]) - whole
            for layer in range(12)
            for head in range(12)
        ]
        return torch.stack(effects).reshape(12, 12).numpy()

    def compositions(_: np.ndarray) -> np.ndarray:
        return np.nan_to_num(circuits.compositions(checkpoint, "K").scores)

    def their_compositions(_: np.ndarray) -> np.ndarray:
        return lens.all_composition_scores("K").scores.numpy()

    def copying(_: np.ndarray) -> np.ndarray:
        return circuits.copying_scores(checkpoint, inputs="embeddings").embeddings

    def their_copying(_: np.ndarray) -> np.ndarray:
        from transformer_lens import FactoredMatrix

        scores = np.empty((12, 12))
        for layer in range(12):
            circuit = FactoredMatrix(lens.W_E @ lens.W_V[layer], lens.W_O[layer] @ lens.W_U)
            eigenvalues = circuit.eigenvalues
            scores[layer] = (eigenvalues.sum(-1).real / eigenvalues.abs().sum(-1)).numpy()
        return scores

    matrices = []
    for layer in (branch.layer for block in weights.blocks for branch in block.branches):
        if isinstance(layer, Attention):
            by_head = (layer.W_Q, layer.W_K, layer.W_V, layer.W_O.transpose(0, 2, 1))
            matrices += [np.ascontiguousarray(weight.transpose(1, 0, 2)).reshape(768, -1) for weight in by_head]
        else:
            matrices += [layer.up.weight, layer.down.weight]

    def products(tokens: np.ndarray) -> np.ndarray:
        inputs = {width: np.ones((len(tokens), width), np.float32) for width in (768, 3072)}
        return np.hstack([rows_product(inputs[len(matrix)], matrix)[:, :1] for matrix in matrices])

    def their_products(tokens: np.ndarray) -> np.ndarray:
        inputs = {width: torch.ones(len(tokens), width) for width in (768, 3072)}
        return torch.hstack([(inputs[len(matrix)] @ torch.from_numpy(matrix))[:, :1] for matrix in matrices]).numpy()

    unopened = [random_gpt2() for _ in range(2 * (OPENED + 1))]  # TransformerLens changes the weights of each

    def opening(function: Callable[..., np.ndarray], tokens: np.ndarray) -> np.ndarray:
        return function(tokens, read_weights(open_model(model), dtype=np.float32))

    def their_opening(function: Callable[..., np.ndarray], tokens: np.ndarray) -> np.ndarray:
        return function(tokens, bridge(unopened.pop(), folder))

    for name, ours, theirs in (
        ("attention patterns of all heads", patterns, their_patterns),
        ("contributions to a logit, direct", contributions, their_direct),
    ):
        both = functools.partial(opening, ours), functools.partial(their_opening, theirs)
        yield Case(f"model in memory opened, then {name}", 64, OPENED, *both)
    for n in (64, 128):
        yield Case("matrix products of the layers alone, by numpy and torch", n, 9, products, their_products)
        yield Case("attention patterns of all heads", n, 9, patterns, their_patterns)
        for name, on_all_paths in (("direct", False), ("direct, and ours on all paths", True)):
            ours = functools.partial(contributions, on_all_paths=on_all_paths)
            yield Case(f"contributions to a logit, {name}", n, 9, ours, their_direct)
    yield Case("attention knock-out of every head, 2 texts", 64, 1, knocked_out, their_knocked_out)
    yield Case("K-composition of all pairs", 0, 3, compositions, their_compositions)
    yield Case("copying scores of all heads", 0, 3, copying, their_copying)


def measure(case: Case) -> str:
    """Return the row of a comparison: medians of the CPU seconds of alternating runs, and the relative difference."""
    functions = (case.ours, case.theirs)
    seconds: list[list[float]] = [[] for _ in functions]
    values: list[np.ndarray] = []
    for run in range(case.runs + (case.runs > 1)):
        tokens = np.random.default_rng(run).integers(0, VOCAB, case.n)
        values = []
        for times, function in zip(seconds, functions, strict=True):
            start = time.process_time()
            values.append(function(tokens))
            times.append(time.process_time() - start)
    medians = [statistics.median(times[case.runs > 1 :]) for times in seconds]  # the first run warms up
    begin = f"| {case.name} | {case.n or '-'} | {medians[0]:.2f} |"
    difference = np.linalg.norm(values[0] - values[1]) / np.linalg.norm(values[1])
    return f"{begin} {medians[1]:.2f} | {medians[0] / medians[1]:.2f} | {difference:.0e} |"


@click.command()
def main() -> None:
    """Print the table."""
    if os.environ.get("OMP_NUM_THREADS") != "1":
        raise click.ClickException("set OMP_NUM_THREADS=1, so that both libraries run on one thread")
    print("| quantity | tokens | tnlib | TransformerLens | ratio | relative difference |")
    print("|---|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for case in cases(folder):
            print(measure(case), flush=True)


if __name__ == "__main__":
    main()
