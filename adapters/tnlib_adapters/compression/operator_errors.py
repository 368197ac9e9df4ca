"""Relative errors of factors: of the QK and OV operators between two layers, biases included, and of weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tnlib import LowRank
from tnlib._typing import Array
from tnlib.linalg.thin_svd import product_svd
from tnlib_adapters.attention.attention import Attention
from tnlib_adapters.attention.layer_arguments import per_head
from tnlib_adapters.checkpoints.checkpoint import Checkpoint
from tnlib_adapters.compression.compressed_part import compressed_weights, error_weight
from tnlib_adapters.compression.methods.factorisation import RELATIVE, Plan
from tnlib_adapters.compression.progress import Progress
from tnlib_adapters.compression.report import HeadReport, LayerReport
from tnlib_adapters.factors.factored_matrix import Description
from tnlib_adapters.factors.model_weights import count_parameters, weights_of
from tnlib_adapters.factors.projections import Projections, Sizes

_NO_BIASES: dict[str, Any] = dict.fromkeys(("b_Q", "b_K", "b_V", "b_O"))


def compare_layer(
    layer: int,
    before: Attention,
    after: Attention,
    kept: Sequence[tuple[int | None, int | None]] | None = None,
) -> tuple[list[HeadReport], float, float]:
    """Return the report of every head, and the errors over all QK and over all OV operators of the layer."""
    before, after = before.numerator(), after.numerator()  # without the divisions by norms inside the attention
    heads, totals = [], np.zeros((2, 2))  # (qk, ov) x (squared difference, squared norm)
    for head in range(before.n_heads):
        errors, spectra = [], []
        for kind in (0, 1):
            a, b = (attention.ov(head) if kind else attention.qk(head, 0) for attention in (before, after))
            spectrum = product_svd(a.left.astype(np.float64), a.right.astype(np.float64))[1]  # product exceeds float32
            difference, size = _difference(a, b), float(np.linalg.norm(spectrum))
            totals[kind] += difference**2, size**2
            errors.append(difference / size if size > 0 else 0.0)
            spectra.append([float(s) for s in spectrum])
        (qk_error, ov_error), (qk_spectrum, ov_spectrum) = errors, spectra
        ranks = kept[head] if kept else (None, None)
        heads.append(HeadReport(layer, head, qk_error, ov_error, qk_spectrum, ov_spectrum, *ranks))
    qk, ov = (float(np.sqrt(d / n)) if n > 0 else 0.0 for d, n in totals)
    return heads, qk, ov


def _difference(a: LowRank, b: LowRank) -> float:
    """Return norm(a - b) from the stacked factors, without cancellation for close operators."""
    left = np.concatenate([a.left, -b.left], axis=1, dtype=np.float64)
    return LowRank(left, np.concatenate([a.right, b.right], dtype=np.float64)).norm()


def compare_attention(
    before: Checkpoint, after: Checkpoint, plan: Plan, progress: Progress
) -> tuple[list[LayerReport], list[HeadReport], list[float]]:
    """Return the reports of layers and heads, and the squared relative errors of the blocks of attention."""
    layers, heads, squares = [], [], list[float]()
    weights = compressed_weights(before, "attention")
    for layer, module in enumerate(before.wiring.attention_modules):
        progress("measuring errors", layer, before.n_layers)
        described = plan.descriptions.get(module, ())
        of_layer = [own for own in weights if own.group == layer]
        modules, n_before = {own.module for own in of_layer}, count_parameters(of_layer)
        is_compressed = any(name in plan.descriptions for name in modules)
        # scale, rotary embeddings, head norms and attention that is not compressed are copied: equal in OUT
        old = (before if is_compressed else after).projections(layer)
        compressed = after.attention(layer)
        original = replace(compressed, **(_NO_BIASES | per_head(old, before.sizes)))
        reports, qk, ov = compare_layer(layer, original, compressed, _ranks(described, before.sizes.n_heads))
        if plan.forecast.measure == RELATIVE:
            squares += _squared_errors(reports, old, after.projections(layer), described, before.sizes)
        worst = max(max(head.qk_error, head.ov_error) for head in reports)
        n_after = sum(plan.numbers.get(name, 0) for name in modules) if is_compressed else n_before
        layers.append(LayerReport(layer, qk, ov, worst, n_before, n_after))
        heads += reports
    progress("measuring errors", before.n_layers, before.n_layers)
    return layers, heads, squares


def _ranks(described: Sequence[Description], n_heads: int) -> list[tuple[int | None, int | None]]:
    """Return each query head's QK and OV rank if the factors are per head, else None."""
    ranks: dict[str, list[int | None]] = {"qk": [None] * n_heads, "vo": [None] * n_heads}
    for description in described:
        if description.ranks:
            times = n_heads // len(description.ranks)
            ranks[description.of] = [rank for rank in description.ranks for _ in range(times)]
    return list(zip(ranks["qk"], ranks["vo"], strict=True))


def root_mean_square(squares: Sequence[float]) -> float | None:
    """Return the root mean square over blocks of the relative error, which a plan without text predicts, or None.

    A block is a unit of truncation: the operators of a head, or the weights that a factored matrix replaces.
    """
    return float(np.sqrt(np.mean(squares))) if squares else None


def _squared_errors(
    heads: Sequence[HeadReport], old: Projections, new: Projections, described: Sequence[Description], sizes: Sizes
) -> list[float]:
    """Return the squared relative error of every block of one layer's attention."""
    squares, n_shared = list[float](), sizes.group_size
    for description in described:
        if description.kind == "heads":
            groups = [heads[start : start + n_shared] for start in range(0, sizes.n_heads, n_shared)]
            squares += [_of_group(group, description.of) for group in groups]
        else:
            squares.append(_of_weights(old.weights, new.weights, description.of))
    return squares


def compare_modules(before: Checkpoint, after: Checkpoint, plan: Plan) -> list[float]:
    """Return the squared relative errors of the weights outside the attention, 0 for those that are copied.

    An error is repeated as often as it counts.
    """
    squares = []
    for own in (own for own in weights_of(before.wiring, before.folder.tensors) if not own.of):
        if any(description.is_rewritten for description in plan.descriptions.get(own.module, ())):
            # the compressed weight first: multiplying it out takes the most memory
            new, old = ({"": checkpoint.read(f"{own.module}.weight")} for checkpoint in (after, before))
            squares += [_of_weights(old, new, [""])] * error_weight(before, own)
        elif own.module in plan.descriptions:
            squares += [0.0] * error_weight(before, own)
    return squares


def _of_group(heads: Sequence[HeadReport], operator: str) -> float:
    """Return the squared relative error of the operators of all query heads of one key and value head."""
    errors = [(h.qk_error, h.qk_spectrum) if operator == "qk" else (h.ov_error, h.ov_spectrum) for h in heads]
    sizes = np.array([np.linalg.norm(spectrum) for _, spectrum in errors])
    largest = float(sizes.max())
    if largest == 0:
        return 0.0
    shares = (sizes / largest) ** 2
    return float(np.sum([error**2 for error, _ in errors] * shares) / np.sum(shares))


def _of_weights(old: Mapping[str, Array], new: Mapping[str, Array], names: Sequence[str]) -> float:
    """Return the squared relative error of these weights, concatenated."""
    sizes, distances = [], []
    for name in names:
        wide = old[name].astype(np.float64)
        sizes.append(np.linalg.norm(wide))
        # in place for a table of embeddings, the largest array of a model; norms sum in the order of the memory
        in_place = wide.flags.c_contiguous and new[name].flags.c_contiguous
        distances.append(np.linalg.norm(np.subtract(wide, new[name], out=wide if in_place else None)))
    size, distance = np.linalg.norm(sizes), np.linalg.norm(distances)
    return float((distance / size) ** 2) if size > 0 else 0.0
