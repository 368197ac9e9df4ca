"""Run the demonstration: compress the built-in model, compare it with rounding, inspect its heads."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

from tnlib._validate import as_path
from tnlib_adapters.checkpoints.checkpoint import Checkpoint, open_checkpoint
from tnlib_adapters.checkpoints.weight_stacks import embedding
from tnlib_adapters.compression.request import PAGE as REPORT_PAGE
from tnlib_adapters.compression.request import Progress, quiet
from tnlib_adapters.data import builtin_path
from tnlib_adapters.demo.loss_against_size import loss_against_size
from tnlib_adapters.demo.size_and_loss import SizeAndLoss, low_rank, original, rounded
from tnlib_adapters.files.atomic_folder import check_target, whole_folder
from tnlib_adapters.inspection import PAGE as INSPECT_PAGE
from tnlib_adapters.inspection.findings import Finding, findings
from tnlib_adapters.inspection.inspect import inspect

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
