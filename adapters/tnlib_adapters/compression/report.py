"""What a compression did: errors of every head's operators, numbers and bytes, as data."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from tnlib import LowRank
from tnlib._typing import Array
from tnlib.linalg.product import product_svd
from tnlib_adapters.attention.attention import Attention
from tnlib_adapters.attention.checkpoint import Checkpoint
from tnlib_adapters.checkpoints.projections import module_names
from tnlib_adapters.compression.plan import RELATIVE, Plan

SUBJECTS = {"attention": "attention", "mlp": "feed-forward layers", "all": "attention, feed-forward and embeddings"}


@dataclass(frozen=True)
class HeadReport:
    """One head: relative Frobenius errors of its operators, biases included, and their spectra.

    `kept` is the rank that the head's own factors have, None where factors are not per head.
    """

    layer: int
    head: int
    qk_error: float
    ov_error: float
    qk_spectrum: list[float]
    ov_spectrum: list[float]
    qk_kept: int | None = None
    ov_kept: int | None = None


@dataclass(frozen=True)
class LayerReport:
    """One layer: relative Frobenius errors over all heads' operators together, and its numbers."""

    layer: int
    qk_error: float
    ov_error: float
    worst: float  # the largest error of any operator of any head
    n_before: int
    n_after: int


@dataclass(frozen=True)
class Report:
    """A compression from end to end. Errors are measured on what was written, rounding to its dtype included.

    `n_after` counts the numbers of the factors. In the dense layout they are multiplied out, and `n_before` numbers
    are stored as before.
    """

    source: str
    model_type: str
    method: str
    layout: str
    keep: float | None  # what was asked for, None where an error was
    kept: float
    n_before: int
    n_after: int
    n_other: int  # numbers in all other tensors
    bytes_before: dict[str, int]  # of the weight files: "attention", "other", and "matrices" outside the attention
    bytes_after: dict[str, int]
    seconds: float
    peak_memory: int  # bytes, of the whole process
    layers: list[LayerReport]
    heads: list[HeadReport]
    left_out: list[str] = field(default_factory=list)  # files of IN that OUT does not have
    quality: dict[str, float] = field(default_factory=dict)  # what was measured on the model as a whole
    max_error: float | None = None  # what was asked for
    store: str = "float"
    what: str = "attention"  # what `keep` is a fraction of
    plain_bytes: int = 0  # of the attention, its weights rounded to int8 as they are
    plain_measured: float | None = None  # the error of that, where `measured` is of a text
    measure: str = RELATIVE  # what an error is here; see `Forecast`
    predicted: float | None = None  # error of these factors by the method, without a fit; None: it cannot tell
    measured: float | None = None  # the same of what was written: of the weights, or on held-out text
    curve: dict[str, list[float]] = field(default_factory=dict)  # "kept" and "predicted": every size of this method

    @property
    def subject(self) -> str:
        """What was compressed, in words."""
        return SUBJECTS[self.what]

    def compressed(self, sizes: Mapping[str, int]) -> int:
        """Return the bytes of what was compressed, of `bytes_before` or `bytes_after`."""
        return sizes.get("matrices", 0) + (0 if self.what == "mlp" else sizes["attention"])

    @property
    def n_stored(self) -> int:
        """Numbers that it holds in OUT."""
        return self.n_before if self.layout == "dense" else self.n_after

    def to_json(self) -> str:
        """Return the report as JSON text."""
        return json.dumps(asdict(self), indent=1)

    def write(self, file: Path) -> None:
        """Write the JSON text to a file."""
        file.write_text(self.to_json() + "\n", encoding="utf-8")


def compare_layer(
    layer: int,
    before: Attention,
    after: Attention,
    kept: Sequence[tuple[int | None, int | None]] | None = None,
) -> tuple[list[HeadReport], float, float]:
    """Return the report of every head, and the errors of all QK and of all OV operators of the layer together."""
    heads, totals = [], np.zeros((2, 2))  # (qk, ov) x (squared difference, squared norm)
    for head in range(before.n_heads):
        errors, spectra = [], []
        for kind in (0, 1):
            a, b = (one.ov(head) if kind else _qk(one, head) for one in (before, after))
            spectrum = product_svd(a.left.astype(np.float64), a.right.astype(np.float64))[1]  # products leave float32
            difference, size = _difference(a, b), float(np.linalg.norm(spectrum))
            totals[kind] += difference**2, size**2
            errors.append(difference / size if size > 0 else 0.0)
            spectra.append([float(s) for s in spectrum])
        heads.append(
            HeadReport(
                layer, head, errors[0], errors[1], spectra[0], spectra[1], *(kept[head] if kept else (None, None))
            )
        )
    qk, ov = (float(np.sqrt(d / n)) if n > 0 else 0.0 for d, n in totals)
    return heads, qk, ov


def _qk(layer: Attention, head: int) -> LowRank:
    """Return the QK operator, at distance 0 where it depends on it, without the divisions by norms of heads."""
    return (layer if layer.head_norm is None else layer.numerator()).qk(head, distance=0)


def _difference(a: LowRank, b: LowRank) -> float:
    """Return norm(a - b) from the stacked factors, so that close operators do not cancel."""
    left = np.concatenate([a.left, -b.left], axis=1, dtype=np.float64)
    return LowRank(left, np.concatenate([a.right, b.right], dtype=np.float64)).norm()


def measured_error(before: Checkpoint, after: Checkpoint, plan: Plan, heads: Sequence[HeadReport]) -> float | None:
    """Return the root mean square over blocks of the relative error, as a plan without a text predicts it.

    Blocks are what the method truncates as one: operators of heads, or the weights that a piece stands for.
    """
    if plan.forecast.measure != RELATIVE:
        return None
    n_groups, per_layer = before.sizes.kv_heads, len(heads) // before.n_layers
    squares: list[float] = []
    for layer, pieces in enumerate(plan.layers):
        found = heads[layer * per_layer : (layer + 1) * per_layer]
        old, new = (one.projections(layer).weights for one in (before, after))
        for piece in pieces:
            if piece.of in ("qk", "vo"):
                size = per_layer // n_groups
                squares += [_of_group(found[k * size : (k + 1) * size], piece.of) for k in range(n_groups)]
            else:
                squares.append(_of_weights(old, new, piece.of))
    for piece in plan.modules:
        one, other = ({"w": checkpoint.read(f"{piece.of}.weight")} for checkpoint in (before, after))
        squares.append(_of_weights(one, other, "w"))
    return float(np.sqrt(np.mean(squares)))


def _of_group(heads: Sequence[HeadReport], of: str) -> float:
    """Return the squared relative error of the operators of all query heads that share a key and value head."""
    found = [(h.qk_error, h.qk_spectrum) if of == "qk" else (h.ov_error, h.ov_spectrum) for h in heads]
    sizes = np.array([np.linalg.norm(spectrum) for _, spectrum in found])
    largest = float(sizes.max())
    if largest == 0:
        return 0.0
    shares = (sizes / largest) ** 2
    return float(np.sum([error**2 for error, _ in found] * shares) / np.sum(shares))


def _of_weights(old: Mapping[str, Array], new: Mapping[str, Array], of: str) -> float:
    """Return the squared relative error of these projections together."""
    size = np.linalg.norm([np.linalg.norm(old[name].astype(np.float64)) for name in of])
    apart = np.linalg.norm([np.linalg.norm(old[name].astype(np.float64) - new[name]) for name in of])
    return float((apart / size) ** 2) if size > 0 else 0.0


def count_attention(checkpoint: Checkpoint, layer: int) -> int:
    """Return the numbers in the weights and biases of one layer's attention, as it came."""
    tensors = checkpoint.folder.tensors
    modules = module_names(checkpoint.architecture, checkpoint.prefix, layer)
    stored = [tensors.get(f"{module}.{kind}") for module in modules for kind in ("weight", "bias")]
    return sum(info.size for info in stored if info is not None)


def stored_bytes(
    checkpoint: Checkpoint, what: str = "attention", modules: Sequence[str] = ()
) -> tuple[dict[str, int], int]:
    """Return the bytes of the attention's tensors, of those of these modules and of all others, and numbers in others.

    Bytes of modules are there only where there are such; of `what` "mlp", attention is one of the others.
    """
    row = checkpoint.architecture
    bases = tuple(
        f"{checkpoint.prefix}{row.attention.format(layer=layer)}.{module}"
        for layer in range(checkpoint.n_layers)
        for module in (*(f"{name}." for name in row.projections), "tnlib.")
    )
    elsewhere = tuple(f"{checkpoint.prefix}{name}." for name in modules)
    sums, n_other = {"attention": 0, "other": 0} | ({"matrices": 0} if modules else {}), 0
    for name, info in checkpoint.folder.tensors.items():
        kind = "matrices" if name.startswith(elsewhere) else "attention" if name.startswith(bases) else "other"
        sums[kind] += info.end - info.begin
        n_other += info.size if kind == "other" or (kind == "attention" and what == "mlp") else 0
    return sums, n_other
