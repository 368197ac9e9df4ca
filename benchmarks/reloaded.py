"""Factored layers in transformers beside the dense ones they multiply out to: memory, time per token, difference.

    OPENBLAS_NUM_THREADS=1 python benchmarks/reloaded.py [--keep 0.5 --keep 0.25] [--method heads ...]

A GPT-2 of four layers of the usual width (768, 12 heads) with made-up weights is compressed and loaded; time and memory
do not depend on what weights say. Its vocabulary is small, so that the attention is a third of it. CP is left out by
default: it takes minutes to fit. One thread; the best of several rounds, dense and factored in turn. Prints a Markdown
table; docs/compress.md holds one such run.
"""

from __future__ import annotations

import copy
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

ROUNDS, N_NEW, N_READ = 5, 16, 512


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


def best_times(calls: list[Callable[[], Any]]) -> list[float]:
    """Return the shortest time of each call, all of them in turn."""
    best = [float("inf")] * len(calls)
    for _ in range(ROUNDS):
        for k, call in enumerate(calls):
            start = time.perf_counter()
            call()
            best[k] = min(best[k], time.perf_counter() - start)
    return best


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
        writing = best_times([lambda m=m: m.generate(ids[:, :8], **options) for m in models])
        reading = best_times([lambda m=m: m(ids) for m in models])
    sizes = [attention_bytes(model) / 1e6 for model in models]
    written, read = ([1e3 * t / n for t in times] for times, n in ((writing, N_NEW), (reading, N_READ)))
    cells = [f"{a:.1f} | {b:.1f}" for a, b in (sizes, written)] + [f"{read[0]:.2f} | {read[1]:.2f}"]
    return " | ".join([*cells, f"{difference:.0e}"])


@click.command()
@click.option("--keep", "keeps", type=float, multiple=True, default=(0.5, 0.25))
@click.option("--method", "methods", multiple=True, default=("heads", "matrix", "ttm", "tucker"))
def main(keeps: tuple[float, ...], methods: tuple[str, ...]) -> None:
    """Print one row for every method and fraction."""
    import tnlib_adapters.torch  # noqa: F401 - so that transformers reads factored folders
    import torch
    import transformers
    from tnlib_adapters import compress

    torch.set_num_threads(1)
    transformers.logging.disable_progress_bar()
    transformers.logging.set_verbosity_error()
    print(
        "| method | keep | MB dense | factored | ms a written token, dense | factored | ms a read token, dense |",
        end="",
    )
    print(" factored | logits differ by |")
    print("|---|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as scratch:
        made_up(Path(scratch) / "in")
        for method in methods:
            for keep in keeps:
                out = Path(scratch) / f"{method}-{keep}"
                compress(Path(scratch) / "in", out, keep=keep, method=method)
                print(f"| {method} | {keep} | {measure(out)} |", flush=True)


if __name__ == "__main__":
    main()
