"""Demonstration on the built-in model: compression beside rounding, a picture, findings about its heads."""

from __future__ import annotations

import math
import os
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tnlib._typing import Array
from tnlib._validate import as_path
from tnlib_adapters.checkpoints.checkpoint import Checkpoint, open_checkpoint
from tnlib_adapters.checkpoints.modified import wide, with_tensors
from tnlib_adapters.checkpoints.weight_stacks import embedding
from tnlib_adapters.compression.compress import compress
from tnlib_adapters.compression.compressed_part import compressed_weights
from tnlib_adapters.compression.options import Budget
from tnlib_adapters.compression.progress import Progress, quiet
from tnlib_adapters.compression.request import PAGE as REPORT_PAGE
from tnlib_adapters.data import builtin_path
from tnlib_adapters.data.repeats import repeated_segments
from tnlib_adapters.factors.integers import GROUP, IntegerFormat
from tnlib_adapters.factors.model_weights import tensors_of
from tnlib_adapters.factors.rounding import round_to_nearest
from tnlib_adapters.files.atomic_folder import check_target, whole_folder
from tnlib_adapters.files.folder import path_text
from tnlib_adapters.files.safetensors_file import TensorInfo
from tnlib_adapters.inspection import PAGE as INSPECT_PAGE
from tnlib_adapters.inspection.findings import Finding, findings
from tnlib_adapters.inspection.inspect import inspect
from tnlib_adapters.reference.model import loss

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STORE = "int4"
_SEQUENCES = 200  # on which the loss is measured


@dataclass(frozen=True)
class SizeAndLoss:
    """Bytes, bits per original parameter and multiplications per token of the attention; loss in nats per token."""

    label: str
    n_bytes: int
    bits: float
    multiplications: int
    loss: float


def loss_on_repeats(checkpoint: Checkpoint) -> float:
    """Return the loss in nats on the predictable part of held-out sequences."""
    tokens, repeated = repeated_segments(_SEQUENCES, rng=np.random.default_rng(2_000_000))
    return loss(checkpoint, tokens, repeated)


def original(checkpoint: Checkpoint) -> SizeAndLoss:
    """Return the size and loss of the model itself."""
    tensors = _attention(checkpoint)
    n_bytes = sum(info.end - info.begin for info in tensors)
    return _measured("original, float32", n_bytes, checkpoint, checkpoint)


def rounded(checkpoint: Checkpoint, n_bits: int) -> SizeAndLoss:
    """Round the attention weights to nearest, in groups of 64 that share a scale; biases stay as they are."""
    changes, n_bytes = {}, 0
    for info in _attention(checkpoint):
        if len(info.shape) == 1:
            n_bytes += info.end - info.begin
            continue
        form = IntegerFormat(n_bits, 1, 0 if n_bits == 8 else GROUP)
        changes[info.name] = partial(_values, checkpoint, info.name, form)
        n_bytes += form.n_bits(info.shape) // 8
    after = with_tensors(checkpoint, changes)
    return _measured(f"rounded to {n_bits} bits", n_bytes, checkpoint, after)


def low_rank(checkpoint: Checkpoint, keep: float, out: Path) -> SizeAndLoss:
    """Compress the model to a folder: the QK and OV operator of every head as factors in 4 bits."""
    report = compress(checkpoint.folder.path, out, Budget(keep=keep, store=STORE), what="attention")
    label = f"low rank, {100 * keep:.0f} % of the parameters, in 4 bits"
    return _measured(label, report.compressed(report.bytes_after), checkpoint, open_checkpoint(out))


def _values(checkpoint: Checkpoint, name: str, form: IntegerFormat) -> Array:
    return round_to_nearest(wide(checkpoint, name), form, search=False).values()


def _attention(checkpoint: Checkpoint) -> list[TensorInfo]:
    return list(tensors_of(compressed_weights(checkpoint, "attention")).values())


def _measured(label: str, n_bytes: int, before: Checkpoint, after: Checkpoint) -> SizeAndLoss:
    bits = 8 * n_bytes / sum(info.size for info in _attention(before))
    return SizeAndLoss(label, n_bytes, bits, _multiplications(after), loss_on_repeats(after))


def _multiplications(checkpoint: Checkpoint) -> int:
    """Return the multiplications per token: one for every number of a weight or factor, none for biases."""
    if checkpoint.factored is None:
        return sum(info.size for info in _attention(checkpoint) if len(info.shape) == 2)
    return 2 * checkpoint.sizes.d_model * sum(sum(layer.ranks) for layer in checkpoint.factored)


_GREEN, _GREY = "#00602b", "#777777"


def loss_against_size(original: SizeAndLoss, rounded: Sequence[SizeAndLoss], low_rank: Sequence[SizeAndLoss]) -> Figure:
    """Draw the losses of both series over the bytes of the attention, and that of the original as a line."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.0, 4.4), layout="constrained")
    ax = figure.subplots()
    for points, colour, marker, label in (
        (rounded, _GREY, "s", "rounded to nearest, groups of 64"),
        (low_rank, _GREEN, "o", "low rank, factors in 4 bits"),
    ):
        ax.plot([p.n_bytes / 1e3 for p in points], [p.loss for p in points], color=colour, marker=marker, label=label)
        for point in points:
            ax.annotate(
                f"{point.bits:.1f}", (point.n_bytes / 1e3, point.loss), (5, 5), textcoords="offset points",
                color=colour, fontsize=8,
            )  # fmt: skip
    ax.axhline(original.loss, color="black", lw=0.8, ls=":", label=f"original, {original.n_bytes / 1e3:.0f} kB")
    ax.set(
        xscale="log", yscale="log", xlabel="kB of the attention (labels: bits per parameter)",
        ylabel="loss on held-out sequences (nats)", title="Attention of the built-in model; lower left is better",
    )  # fmt: skip
    for axis, ticks in ((ax.xaxis, (10, 15, 20, 30)), (ax.yaxis, (0.5, 1, 2))):
        axis.set_ticks(ticks, [f"{tick:g}" for tick in ticks])
        axis.set_ticks([], minor=True)
    ax.legend(frameon=False)
    return figure


KEEP = 0.7  # of the compression that is written
_KEEPS = (0.9, KEEP, 0.6, 0.5)
_ROUNDED_BITS = (8, 6, 4, 3, 2)
PICTURE, SMALLER, INSIDE = "loss_against_size.png", "smaller", "inside"


@dataclass(frozen=True)
class Demo:
    """Results of the demonstration.

    Parameters
    ----------
    folder
        Where the picture, the compressed model and the inspection page are.
    original, rounded, low_rank
        Bytes and losses of the model itself, rounded, and compressed; the second of `low_rank` is written.
    chance
        Loss of a uniform guess: the logarithm of the number of tokens.
    findings
        What the inspection found.
    """

    folder: Path
    original: SizeAndLoss
    rounded: tuple[SizeAndLoss, ...]
    low_rank: tuple[SizeAndLoss, ...]
    chance: float
    findings: tuple[Finding, ...]

    @property
    def written(self) -> SizeAndLoss:
        """Bytes and loss of the compressed model in the folder."""
        return self.low_rank[_KEEPS.index(KEEP)]

    @property
    def files(self) -> tuple[Path, ...]:
        """Files to open, the most telling first."""
        return tuple(self.folder / name for name in (PICTURE, f"{INSIDE}/{INSPECT_PAGE}", f"{SMALLER}/{REPORT_PAGE}"))


def run_demo(out: str | os.PathLike[str], *, force: bool = False, progress: Progress = quiet) -> Demo:
    """Compress the built-in model, compare it with rounding on held-out sequences, and inspect it.

    Parameters
    ----------
    out
        Folder for the picture, the compressed model and the inspection page, created atomically.
    force
        Replace `out` if it is not empty.
    progress
        Called as progress(stage, done, total).

    Returns
    -------
    Demo
        Sizes, losses and findings.

    Raises
    ------
    ArgumentError
        If `out` exists and is not empty, or cannot be a folder.
    """
    target = as_path("demo", "out", out)
    checkpoint = open_checkpoint(builtin_path())
    check_target("demo", target, checkpoint.folder.path, force=force)
    with whole_folder(target) as partial:
        compressed = _compressions(checkpoint, partial, progress)
        uncompressed, roundings = _roundings(checkpoint, progress)
        loss_against_size(uncompressed, roundings, compressed).savefig(partial / PICTURE, dpi=150)
        inspection = inspect(checkpoint.folder.path, partial / INSIDE, progress=progress)
        check_target("demo", target, checkpoint.folder.path, force=force)
    chance = math.log(len(embedding(checkpoint).array))
    return Demo(target, uncompressed, roundings, compressed, chance, tuple(findings(inspection)))


def _compressions(checkpoint: Checkpoint, partial: Path, progress: Progress) -> tuple[SizeAndLoss, ...]:
    """Compress to every size; only that of `KEEP` stays."""
    import tempfile

    points = []
    with tempfile.TemporaryDirectory() as scratch:
        for done, keep in enumerate(_KEEPS):
            progress("compressing", done, len(_KEEPS))
            folder = partial / SMALLER if keep == KEEP else Path(scratch) / str(keep)
            points.append(low_rank(checkpoint, keep, folder))
    progress("compressing", len(_KEEPS), len(_KEEPS))
    return tuple(points)


def _roundings(checkpoint: Checkpoint, progress: Progress) -> tuple[SizeAndLoss, tuple[SizeAndLoss, ...]]:
    """Measure the model itself and its roundings."""
    points = []
    for done, n_bits in enumerate(_ROUNDED_BITS):
        progress("rounding", done, len(_ROUNDED_BITS))
        points.append(rounded(checkpoint, n_bits))
    progress("rounding", len(_ROUNDED_BITS), len(_ROUNDED_BITS))
    return original(checkpoint), tuple(points)


_MODEL = (
    "The model: two attention layers of four heads, 55,936 parameters, trained to continue a sequence of random tokens "
    "that occurs for the second time. In tnlib compress its name is builtin; builtin-llama is one that reads text."
)
_NEXT = (
    "rounds the weights of your model to 4 bits on average, with fewer bits for weights that change its output less. "
    "Measured on SmolLM2-135M-Instruct in onnxruntime: 538 MB (98 as published in 4 bits) -> 116 MB, a quarter of the "
    "divergence of plain rounding."
)
_COMMANDS = """\
Next: pip install '.[torch]'   # in the checkout
      tnlib compress IN OUT --calibrate TEXT\
"""
_MOST_FINDINGS = 4


def story(demo: Demo, width: int = 100) -> list[str]:
    """Return the paragraphs: the model, the compression, its cost beside rounding, the heads, what to open."""
    before, after = demo.original, demo.written
    filled = partial(fill, width=width)
    return [
        filled(_MODEL),
        filled(
            f"The compression: only the attention is compressed, {_kb(before)} -> {_kb(after)}, "
            f"{before.n_bytes / after.n_bytes:.1f} times smaller. {100 * KEEP:.0f} % of its parameters are kept, as "
            "low-rank factors of the QK and OV operators, rounded to 4 bits. Multiplications per token in its weights: "
            f"{before.multiplications:,} -> {after.multiplications:,}, "
            f"{before.multiplications / after.multiplications:.1f} times fewer."
        ),
        _table(demo),
        filled(f"Conclusion: {verdict(after, demo.rounded)}"),
        inside(demo.findings, width),
        _files(demo),
        f"{_COMMANDS}\n{filled(_NEXT)}",
    ]


def verdict(written: SizeAndLoss, rounded: Sequence[SizeAndLoss]) -> str:
    """Return how a compression compares with rounding: at no fewer bytes, and at the next smaller loss."""
    larger = [point for point in rounded if point.n_bytes >= written.n_bytes]
    nearer = min((point for point in rounded if point.loss < written.loss), key=lambda p: p.n_bytes, default=None)
    beside = min(larger, key=lambda point: point.n_bytes, default=None)
    sentences = []
    if beside is not None and beside.loss > written.loss:
        sentences.append(
            f"At {_kb(written)}, low rank has a lower loss than the same model {beside.label} at {_kb(beside)}."
        )
    if nearer is not None:
        sentences.append(
            f"With more bytes rounding has the lower loss: {nearer.loss:.3f} {nearer.label}, at "
            f"{nearer.n_bytes / written.n_bytes:.1f} times the bytes."
            if nearer.n_bytes > written.n_bytes
            else f"Rounding is better here: {nearer.loss:.3f} {nearer.label}, at {_kb(nearer)}."
        )
    return " ".join(sentences)


def fill(text: str, width: int, start: str = "") -> str:
    """Return a paragraph, or an item of a list that begins with `start`, in lines of this width."""
    return textwrap.fill(text, width, initial_indent=start, subsequent_indent=" " * len(start), break_on_hyphens=False)


def inside(findings: Sequence[Finding], width: int) -> str:
    """Return the first findings as a list."""
    items = (fill(finding.text, width, start="  - ") for finding in findings[:_MOST_FINDINGS])
    return "\n".join(["Inside the model:", *items])


def _table(demo: Demo) -> str:
    points = sorted((demo.original, demo.written, *demo.rounded), key=lambda point: -point.n_bytes)
    width = max(len(point.label) for point in points)
    lines = [
        f"  {point.label:<{width}}  {_kb(point):>8}  {point.bits:4.1f} bits  loss {point.loss:.3f}" for point in points
    ]
    head = ["Cost: bits per parameter; loss on held-out sequences, in nats per token;", f"chance is {demo.chance:.3f}."]
    return "\n".join([*head, *lines])


def _files(demo: Demo) -> str:
    first, *others = (path_text(file) for file in demo.files)
    return f"Open first: {first} (loss against size)\nThen:       " + "\n            ".join(others)


def _kb(point: SizeAndLoss) -> str:
    return f"{point.n_bytes / 1e3:.1f} kB"
