r"""Difference of a fine-tuned checkpoint and its base, as a LoRA adapter in the format of PEFT.

The difference D of every weight of attention and feed-forward layers is truncated by its singular values,

    D ~ B A,      A (r, in),  B (out, r),

with ranks of its own, which adapter_config.json lists (`rank_pattern`, and `alpha_pattern` for a factor of 1). Error is
the Frobenius norm of what the adapter lacks, relative to that of the difference of all tensors.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import tnlib
from tnlib import ArgumentError
from tnlib._typing import Array
from tnlib._validate import as_count, as_path
from tnlib_adapters.checkpoints.checkpoint import open_checkpoint
from tnlib_adapters.compression.adapter.adapted_checkpoint import CONFIG, WEIGHTS
from tnlib_adapters.compression.adapter.checkpoint_difference import CheckpointDifference
from tnlib_adapters.compression.adapter.rank_choice import equal_ranks, ranks_within
from tnlib_adapters.compression.methods.out_of_core import StoredArrays, Workspace
from tnlib_adapters.compression.request import Progress, quiet
from tnlib_adapters.files.atomic_folder import check_target, scratch_folder, whole_folder
from tnlib_adapters.files.folder import path_text
from tnlib_adapters.files.tensor_file import Entry, write_tensor_file


@dataclass(frozen=True)
class Adapter:
    """A written adapter.

    Parameters
    ----------
    ranks
        Rank of every adapted module; modules of equal weights are not adapted.
    error
        Relative Frobenius error of the adapter, as stored, among all tensors that differ.
    n_numbers
        Stored numbers.
    outside
        Tensors that differ and that the adapter does not hold, such as norms and embeddings, with the norm of their
        difference relative to that of all.
    """

    ranks: Mapping[str, int]
    error: float
    n_numbers: int
    outside: Mapping[str, float] = field(default_factory=dict)


def extract_adapter(
    base: str | os.PathLike[str],
    tuned: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    rank: int | None = None,
    max_error: float | None = None,
    force: bool = False,
    progress: Progress = quiet,
) -> Adapter:
    """Write the difference of a fine-tuned checkpoint and its base as a LoRA adapter that peft loads and merges.

    Parameters
    ----------
    base, tuned
        Checkpoint folders of one model. `base` may hold the rounded weights of `tuned`, in the dense layout.
    out
        Folder to create; it appears complete or not at all.
    rank
        Rank of every weight.
    max_error
        Largest relative Frobenius error, instead of `rank`; ranks are chosen to store few numbers.
    force
        Replace `out` if it is not empty.
    progress
        Called with (stage, done, total).

    Raises
    ------
    ArgumentError
        If the models differ in more than numbers, or not at all, or if an adapter cannot meet the error.

    Examples
    --------
    >>> import os, tempfile, tnlib_adapters
    >>> folder, original = tempfile.mkdtemp(), tnlib_adapters.builtin_path("llama")
    >>> rounded, out = os.path.join(folder, "rounded"), os.path.join(folder, "adapter")
    >>> options = {"keep": 1.0, "method": "matrix", "layout": "dense", "store": "int4"}
    >>> report = tnlib_adapters.compress(original, rounded, **options)
    >>> tnlib_adapters.extract_adapter(rounded, original, out, rank=8).ranks["model.layers.0.self_attn.q_proj"]
    8
    """
    _check_budget(rank, max_error)
    target = as_path("extract_adapter", "out", out)
    difference = CheckpointDifference(open_checkpoint(base), open_checkpoint(tuned))
    for checkpoint in (difference.base, difference.tuned):
        check_target("extract_adapter", target, checkpoint.folder.path, force=force)
    with scratch_folder(target) as scratch:
        factors, spectra = _decompose(difference, Workspace(folder=scratch), progress)
        outside = difference.squares_outside()
        total = sum(float(np.sum(s**2)) for s in spectra.values()) + sum(outside.values())
        if total == 0:
            raise ArgumentError("extract_adapter: BASE and TUNED must differ, got equal weights; check the paths.")
        if rank is not None:
            ranks = equal_ranks(spectra, rank)
        else:
            discarded = (max_error or 0.0) ** 2 * total - sum(outside.values())
            _check_reachable(discarded, max_error, total, outside)
            costs = {module: sum(difference.of_weight(module).shape) for module in spectra}
            ranks = ranks_within(spectra, costs, discarded)
        stored = {m: (factors[f"{m}.A"][:r].copy(), factors[f"{m}.B"][:, :r].copy()) for m, r in ranks.items()}
        lacking = sum(outside.values())
        for module, (a, b) in stored.items():
            lacking += float(np.sum(np.square(difference.of_weight(module) - b.astype(np.float64) @ a)))  # out [r] in
        adapter = Adapter(
            ranks,
            float(np.sqrt(lacking / total)),
            sum(a.size + b.size for a, b in stored.values()),
            {name: float(np.sqrt(square / total)) for name, square in outside.items()},
        )
        with whole_folder(target) as partial:
            _write(partial, difference, adapter, stored)
            check_target("extract_adapter", target, difference.base.folder.path, force=force)
    return adapter


def _decompose(
    difference: CheckpointDifference, workspace: Workspace, progress: Progress
) -> tuple[StoredArrays, dict[str, Array]]:
    """Return A and B of full rank of every weight that differs, as stored, and the singular values."""
    factors, spectra, n = StoredArrays(workspace), dict[str, Array](), len(difference.weights)
    for done, module in enumerate(difference.weights):
        progress("decomposing differences", done, n)
        own = difference.of_weight(module)
        if not own.any():
            continue  # for example feed-forward layers, if attention alone was rounded
        u, s, vh = tnlib.svd(own).value
        spectra[module] = s
        root = np.sqrt(s)  # both factors have the size of the difference's root, far from the ends of any range
        factors.add({f"{module}.A": (root[:, None] * vh).astype("f4"), f"{module}.B": (u * root).astype("f4")})
    progress("decomposing differences", n, n)
    return factors, spectra


def _write(
    folder: Path, difference: CheckpointDifference, adapter: Adapter, stored: Mapping[str, tuple[Array, Array]]
) -> None:
    """Write the files of an adapter."""
    entries = [
        Entry(f"base_model.model.{module}.lora_{part}.weight", "F32", np.ascontiguousarray(values))
        for module, pair in stored.items()
        for part, values in zip("AB", pair, strict=True)
    ]
    for _ in write_tensor_file(folder / WEIGHTS, entries, {"format": "pt"}):
        pass
    content = _config(difference, adapter.ranks)
    (folder / CONFIG).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    base, tuned = (path_text(own.folder.path) for own in (difference.base, difference.tuned))
    note = (
        f"> LoRA adapter by tnlib: {tuned} minus {base}, relative error {adapter.error:.4g}, ranks "
        f"{min(adapter.ranks.values())} to {max(adapter.ranks.values())}.\n"
    )
    (folder / "README.md").write_text(note, encoding="utf-8")


def _config(difference: CheckpointDifference, ranks: Mapping[str, int]) -> dict[str, Any]:
    """Return the content of adapter_config.json."""
    largest = max(ranks.values())
    own = {module: rank for module, rank in ranks.items() if rank < largest}
    return {
        "peft_type": "LORA",
        "task_type": None if difference.base.wiring.unembedding is None else "CAUSAL_LM",
        "base_model_name_or_path": path_text(difference.base.folder.path),
        "r": largest,
        "lora_alpha": largest,
        "rank_pattern": own,
        "alpha_pattern": own,
        "target_modules": _target_modules(difference, ranks),
        "fan_in_fan_out": any(linear.stored == "in_out" for linear in difference.weights.values()),
        "lora_dropout": 0.0,
        "bias": "none",
        "use_dora": False,
        "use_rslora": False,
        "inference_mode": True,
    }


def _target_modules(difference: CheckpointDifference, adapted: Collection[str]) -> list[str]:
    """Return the last parts of the names of the modules; whole names where other modules end in the same part."""
    weights = [name for name in difference.base.folder.tensors if name.endswith(".weight")]
    others = {name.removesuffix(".weight") for name in weights} - set(adapted)
    ambiguous = {module.rpartition(".")[2] for module in others}
    kinds = {module: module.rpartition(".")[2] for module in adapted}
    return sorted({module if kind in ambiguous else kind for module, kind in kinds.items()})


# ------------------------------------------------------------------------------------------------------- refusals


def _check_budget(rank: int | None, max_error: float | None) -> None:
    if (rank is None) == (max_error is None):
        raise ArgumentError(
            f"extract_adapter: either rank or max_error must be given, got {'neither' if rank is None else 'both'}; "
            "pass for example rank=16 (--rank 16)."
        )
    if rank is not None:
        as_count("extract_adapter", "rank", rank)
    elif not isinstance(max_error, int | float) or isinstance(max_error, bool) or not 0 <= max_error < 1:
        raise ArgumentError(
            f"extract_adapter: max_error must lie in [0, 1), got {max_error!r}; it is the relative error of the "
            "difference, for example 0.1."
        )


def _check_reachable(discarded: float, max_error: float | None, total: float, outside: Mapping[str, float]) -> None:
    if discarded < 0:
        share, worst = np.sqrt(sum(outside.values()) / total), max(outside, key=lambda name: outside[name])
        raise ArgumentError(
            f"extract_adapter: max_error must be at least {share:.4g}, the share of tensors that an adapter does not "
            f"hold, such as {worst!r}, got {max_error}; raise it."
        )
