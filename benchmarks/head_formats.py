"""Error against parameters of the QK and OV operators of a layer in every format, before and after the gauge is chosen.

    python -m benchmarks.smollm2
    python -m benchmarks.head_formats [--write]
    python -m benchmarks.head_formats --random      layer 23 of SmolLM2 beside random operators

The operators of all heads of a layer, head x input x output without biases, are one array. The error is relative to its
Frobenius norm, the parameters to those of the two weights. SVD, tensor train, Tucker and CP do not depend on the basis
of the residual stream or on the gauge of the heads. A TT-matrix and a sum of Kronecker products depend on the basis of
the stream, and formats of the stacked weights (projection x head x d_model x d_head) on the gauge of the heads: these
are shown in the trained basis and in that of `choose_gauge`. Writes docs/pictures/head-formats.png with --write.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np
import tnlib_adapters
from tnlib_adapters import Attention, Checkpoint
from tnlib_adapters.checkpoints import weight_stacks

import tnlib
from benchmarks.calibrated import folder_of
from benchmarks.smollm2 import smollm2_or_exit
from tnlib._typing import Array

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PICTURE = Path(__file__).parent.parent / "docs" / "pictures" / "head-formats.png"
SPLITS = {384: (16, 24), 576: (24, 24)}  # of the stream, for TT-matrices and Kronecker products
TOLERANCES = (0.96, 0.9, 0.8, 0.65, 0.5, 0.35, 0.2)
CP_RANKS = (16, 64, 192, 384)
LARGEST = 1.3  # of the parameters of the weights
STYLES = {
    "SVD per group of heads": ("black", "o"),
    "SVD, heads side by side": ("0.6", "s"),
    "tensor train": ("#0072b2", "^"),
    "Tucker": ("#c8553d", "v"),
    "CP": ("#8a6bb1", "D"),
    "TT-matrix": ("#5b8c5a", "<"),
    "Kronecker sum": ("#d9a441", ">"),
    "Tucker of stacked weights": ("#cc79a7", "P"),
}
Point = tuple[float, float]  # parameters relative to the weights, error


@dataclass(frozen=True)
class Heads:
    """Left (groups, d, d_head) and right (groups, d_head, n) factors of a circuit of a layer, by key-value group."""

    left: Array
    right: Array

    @classmethod
    def of(cls, layer: Attention, circuit: str) -> Heads:
        """Return W_V and the W_O that read it, or W_K and the W_Q, without rotary embeddings."""
        per_head = layer.W_O if circuit == "OV" else layer.W_Q.transpose(0, 2, 1)
        left = layer.W_V if circuit == "OV" else layer.W_K
        grouped = per_head.reshape(layer.kv_heads, layer.group_size, *per_head.shape[1:])
        right = grouped.transpose(0, 2, 1, 3).reshape(layer.kv_heads, per_head.shape[1], -1)
        return cls(left.astype(np.float64), right.astype(np.float64))

    @property
    def n_parameters(self) -> int:
        """Parameters of the weights."""
        return self.left.size + self.right.size

    def operators(self) -> Array:
        """Return the operators, head x input x output."""
        products = self.left @ self.right  # g d n
        groups, d, _ = products.shape
        return np.ascontiguousarray(products.reshape(groups, d, -1, d).swapaxes(1, 2)).reshape(-1, d, d)

    def stacked(self) -> Array:
        """Return left and right weights of every head, projection x head x d_model x d_head."""
        groups, d, r = self.left.shape
        right = self.right.reshape(groups, r, -1, d).transpose(0, 2, 3, 1)
        left = np.broadcast_to(self.left[:, None], right.shape)
        return np.stack([left, right]).reshape(2, -1, d, r)


def invariant(heads: Heads) -> Iterator[tuple[str, list[Point]]]:
    """Yield the curves of formats that do not depend on the gauge."""
    x, n = heads.operators(), heads.n_parameters
    norm, (_, d, _) = np.linalg.norm(x), x.shape
    spectra = np.linalg.svd(heads.left @ heads.right, compute_uv=False)[:, : heads.left.shape[2]]  # g r
    width = d + heads.right.shape[2]
    values = np.sort(spectra.ravel())[::-1]  # ranks differ between groups: the largest of all singular values
    ranks = np.linspace(values.size // 16, values.size, 16).astype(int)
    yield "SVD per group of heads", [(int(r) * width / n, _tail(values[r:], norm)) for r in ranks]
    spectrum = np.linalg.svd(x.transpose(1, 0, 2).reshape(d, -1), compute_uv=False)
    ranks = range(8, d, 8)
    yield "SVD, heads side by side", [(r * (d + x.size // d) / n, _tail(spectrum[r:], norm)) for r in ranks]
    train = tnlib.tt_svd(x.transpose(1, 0, 2)).value
    yield "tensor train", _rounded(train, n)
    yield "Tucker", _rounded(tnlib.tucker(x).value, n)
    fits = [tnlib.cp(x, rank, n_iter=20) for rank in CP_RANKS if rank * (sum(x.shape) + 1) <= LARGEST * n]
    yield "CP", [(fit.value.n_parameters / n, fit.error) for fit in fits]


def dependent(heads: Heads) -> Iterator[tuple[str, list[Point]]]:
    """Yield the curves of formats that depend on the gauge."""
    x, n = heads.operators(), heads.n_parameters
    (h, d, _), norm = x.shape, np.linalg.norm(x)
    a, b = SPLITS[d]
    split = x.reshape(h, a, b, a, b)
    outer = np.linalg.svd(split.transpose(0, 1, 3, 2, 4).reshape(h * a * a, b * b), compute_uv=False)
    ranks = np.unique(np.geomspace(4, b * b, 24).astype(int))
    yield "Kronecker sum", [(int(r) * (h * a * a + b * b) / n, _tail(outer[r:], norm)) for r in ranks]
    matrix = tnlib.ttm_svd(x.reshape(h * d, d), (h, a, b), (1, a, b)).value
    yield "TT-matrix", _rounded(matrix, n)
    stack = heads.stacked()
    points = []
    for rtol in TOLERANCES:
        fit = tnlib.tucker(stack, rtol=rtol)
        left, right = fit.value.full()
        error = np.linalg.norm(left @ right.transpose(0, 2, 1) - x) / norm
        points.append((fit.value.n_parameters / n, float(error)))
    yield "Tucker of stacked weights", points


def _tail(values: Array, norm: float) -> float:
    return float(np.linalg.norm(values) / norm)


def _rounded(exact: Any, n: int) -> list[Point]:
    fits = [tnlib.round(exact, rtol=rtol) for rtol in TOLERANCES]
    return [(fit.value.n_parameters / n, fit.error) for fit in fits]


def panels() -> Iterator[tuple[str, dict[str, list[Point]], dict[str, list[Point]], dict[str, list[Point]]]]:
    """Yield title, invariant curves, and the others in the trained and in the chosen gauge."""
    source = smollm2_or_exit()
    for name, model, layer in (("MiniLM", folder_of("minilm"), 3), ("SmolLM2", source, 15)):
        trained: Checkpoint = tnlib_adapters.open_checkpoint(model)
        trained = trained if name == "MiniLM" else tnlib_adapters.fold(trained).checkpoint
        chosen = tnlib_adapters.choose_gauge(trained).checkpoint
        for circuit in ("QK", "OV"):
            before, after = (Heads.of(one.attention(layer), circuit) for one in (trained, chosen))
            title = f"{name}, {circuit} of layer {layer}"
            yield title, dict(invariant(before)), dict(dependent(before)), dict(dependent(after))


def error_at(curve: list[Point], size: float) -> float:
    """Return the error of a curve at a number of parameters, interpolated; infinite below the smallest size."""
    points = sorted(curve)
    if not points or size < points[0][0]:
        return math.inf
    sizes, errors = zip(*points, strict=True)
    return float(np.exp(np.interp(size, sizes, np.log(np.maximum(errors, 1e-9)))))


def beside_random() -> Iterator[str]:
    """Yield the errors of formats of the operators of layer 23 of SmolLM2, and those of random operators."""
    source = smollm2_or_exit()
    layer = tnlib_adapters.open_checkpoint(source).attention(23)
    for circuit, distance in (("ov", None), ("qk", 1)):
        view = weight_stacks.operators(layer, circuit, distance=distance)  # type: ignore[arg-type]
        table = tnlib_adapters.compare_formats(view.array[:, :-1, :-1], keep=0.1, beside_random=True)
        yield f"{circuit}: {table!r}"


@click.command()
@click.option("--write", is_flag=True)
@click.option("--random", is_flag=True)
def main(write: bool, random: bool) -> None:
    if random:
        print("\n".join(beside_random()))
        return
    warnings.simplefilter("ignore", tnlib.ConvergenceWarning)
    warnings.simplefilter("ignore", tnlib.DegenerateCutWarning)
    rows = ["| format | gauge | " + "MiniLM QK | MiniLM OV | SmolLM2 QK | SmolLM2 OV |", "|---|---|---|---|---|---|"]
    cells: dict[tuple[str, str], list[float]] = {}
    measured = []
    for panel in panels():
        measured.append(panel)
        for gauge, curves in zip(("any", "trained", "chosen"), panel[1:], strict=True):
            for name, curve in curves.items():
                cells.setdefault((name, gauge), []).append(error_at(curve, 0.5))
        print(panel[0], {key: f"{values[-1]:.3f}" for key, values in cells.items()}, flush=True)
    for (name, gauge), errors in cells.items():
        shown = ("" if math.isinf(e) else f"{e:.3f}" for e in errors)
        rows.append(f"| {name} | {gauge} | {' | '.join(shown)} |")
    print("\n".join(rows))
    if write:
        draw(measured).savefig(PICTURE, dpi=150)


def draw(measured: list[Any]) -> Figure:
    """Draw one panel per circuit; dashed lines are in the trained gauge where that matters."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    figure = Figure(figsize=(8.2, 7.6), layout="constrained")
    axes = figure.subplots(2, 2, sharex=True, sharey=True)
    for ax in axes[:, 0]:
        ax.set_ylabel("relative error, all heads")
    for ax in axes[1]:
        ax.set_xlabel("parameters / parameters of the two weights")
    for ax, (title, free, before, after) in zip(axes.ravel(), measured, strict=True):
        for curves, line in ((free, "-"), (before, "--"), (after, "-")):
            for name, curve in curves.items():
                colour, marker = STYLES[name]
                points = sorted(point for point in curve if point[0] <= LARGEST)
                if points:
                    ax.plot(*zip(*points, strict=True), ls=line, marker=marker, ms=4, color=colour, lw=1.2)
        ax.set(title=title, xscale="log", ylim=(0, 1), xlim=(0.03, LARGEST))
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(lw=0.3)
    handles = [Line2D([], [], color=c, marker=m, ms=4, label=name) for name, (c, m) in STYLES.items()]
    handles.append(Line2D([], [], color="0.3", ls="--", label="in the trained gauge"))
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False)
    return figure


if __name__ == "__main__":
    main()
