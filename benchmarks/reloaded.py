"""Factored layers in transformers beside the dense ones they multiply out to: memory, time per token, difference.

    OPENBLAS_NUM_THREADS=1 python benchmarks/reloaded.py [--keep 0.5 --keep 0.25] [--method heads ...]

A GPT-2 of four layers of the usual width (768, 12 heads) with made-up weights is compressed and loaded; time and memory
do not depend on what weights say. Its vocabulary is small, so that the attention is a third of it. CP is left out by
default: it takes minutes to fit. One thread. Times are ratios, factored to dense, of rounds in which one runs right
after the other: the median of all rounds and the half of them in the middle. A second table has factors in integers,
the time of a written token, in CPU seconds, as loaded and with a dequantized copy.
Prints two Markdown tables; docs/compression-results.md holds them.
"""

from __future__ import annotations

import copy
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

ROUNDS, N_NEW, N_READ = 20, 16, 512


def made_up(folder: Path) -> None:
    """Save a model whose weights nobody trained."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(n_layer=4, vocab_size=2000, bos_token_id=0, eos_token_id=0)
    GPT2LMHeadModel(config).save_pretrained(folder)


def attention_bytes(model: Any) -> int:
    """Return the bytes of all parameters of the attention."""
    return sum(p.numel() * p.element_size() for name, p in model.named_parameters() if ".attn." in name)


def ratios(dense: Callable[[], Any], factored: Callable[[], Any]) -> str:
    """Return the median of the ratios of times, factored to dense, and their quartiles."""
    found = []
    for k in range(ROUNDS + 1):
        # who goes first changes, so that neither always finds the caches of the other
        times = {call: _seconds(call) for call in ((dense, factored), (factored, dense))[k % 2]}
        found.append(times[factored] / times[dense])
    low, middle, high = statistics.quantiles(found[1:], n=4)  # the first round warms up
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def _seconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def measure(folder: Path) -> str:
    """Return the cells of one row."""
    import torch
    from transformers import AutoModelForCausalLM

    factored = AutoModelForCausalLM.from_pretrained(folder).eval()
    dense = copy.deepcopy(factored).dequantize()
    ids = torch.arange(N_READ)[None] % 2000
    options = {"max_new_tokens": N_NEW, "min_new_tokens": N_NEW, "do_sample": False, "pad_token_id": 0}
    models = (dense, factored)
    with torch.no_grad():
        one, two = (model(ids).logits for model in models)
        difference = float((one - two).abs().max() / one.abs().max())
        writing = ratios(*(lambda m=m: m.generate(ids[:, :8], **options) for m in models))  # type: ignore[misc]
        reading = ratios(*(lambda m=m: m(ids) for m in models))  # type: ignore[misc]
    memory = attention_bytes(factored) / attention_bytes(dense)
    return f"{memory:.2f} | {writing} | {reading} | {difference:.0e}"


def integers(folder: Path) -> str:
    """Return the cells of one row of factors in integers: times of a written token relative to the dense model."""
    import torch
    from tnlib_adapters.transformers_plugin import keep_dequantized
    from transformers import AutoModelForCausalLM

    as_loaded, by_copy = (AutoModelForCausalLM.from_pretrained(folder).eval() for _ in range(2))
    models = [copy.deepcopy(as_loaded).dequantize(), as_loaded, by_copy]
    keep_dequantized(by_copy)
    ids = torch.arange(8)[None]
    options = {"max_new_tokens": N_NEW, "min_new_tokens": N_NEW, "do_sample": False, "pad_token_id": 0}
    found: list[list[float]] = [[] for _ in models]
    for _ in range(ROUNDS // 2 + 1):
        for model, own in zip(models, found, strict=True):
            start = time.process_time()
            model.generate(ids, attention_mask=torch.ones_like(ids), **options)
            own.append(time.process_time() - start)
    pairs = [[time / dense for time, dense in zip(own[1:], found[0][1:], strict=True)] for own in found[1:]]
    return " | ".join(f"{statistics.median(own):.2f}" for own in pairs)


@click.command()
@click.option("--store", "stores", multiple=True, default=("int8", "int4"))
@click.option("--keep", "keeps", type=float, multiple=True, default=(0.5, 0.25))
@click.option("--method", "methods", multiple=True, default=("heads", "matrix", "ttm", "tucker"))
def main(keeps: tuple[float, ...], methods: tuple[str, ...], stores: tuple[str, ...]) -> None:
    """Print one row for every method and fraction, then for integers."""
    import tnlib_adapters.transformers_plugin  # noqa: F401 - so that transformers reads factored folders
    import torch
    import transformers
    from tnlib_adapters import Budget, compress

    torch.set_num_threads(1)
    transformers.logging.disable_progress_bar()
    transformers.logging.set_verbosity_error()
    print("| method | keep | bytes of the attention | time of a written token | of a read token | logits differ by |")
    print("|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as scratch:
        made_up(Path(scratch) / "in")
        for method in methods:
            for keep in keeps:
                out = Path(scratch) / f"{method}-{keep}"
                compress(Path(scratch) / "in", out, Budget(keep=keep), method=method, what="attention")
                print(f"| {method} | {keep} | {measure(out)} |", flush=True)
        print("\n| integers | keep | as loaded | `keep_dequantized` |\n|---|---|---|---|")
        for store in stores:
            for keep in (1.0, *keeps):
                out = Path(scratch) / f"{store}-{keep}"
                compress(Path(scratch) / "in", out, Budget(keep=keep, store=store), what="all", method="matrix")
                print(f"| {store} | {keep} | {integers(out)} |", flush=True)


if __name__ == "__main__":
    main()
