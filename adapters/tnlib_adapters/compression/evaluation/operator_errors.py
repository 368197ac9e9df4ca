"""Relative errors of the QK and OV operators between two layers, biases included."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tnlib import LowRank
from tnlib.linalg.thin_svd import product_svd
from tnlib_adapters.attention.attention import Attention
from tnlib_adapters.compression.report.report import HeadReport


def compare_layer(
    layer: int,
    before: Attention,
    after: Attention,
    kept: Sequence[tuple[int | None, int | None]] | None = None,
) -> tuple[list[HeadReport], float, float]:
    """Return the report of every head, and the errors over all QK and over all OV operators of the layer."""
    heads, totals = [], np.zeros((2, 2))  # (qk, ov) x (squared difference, squared norm)
    for head in range(before.n_heads):
        errors, spectra = [], []
        for kind in (0, 1):
            a, b = (attention.ov(head) if kind else _qk(attention, head) for attention in (before, after))
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


def _qk(layer: Attention, head: int) -> LowRank:
    """Return the QK operator, at distance 0 if it depends on distance, without the divisions by head norms."""
    return (layer if layer.head_norm is None else layer.numerator()).qk(head, distance=0)


def _difference(a: LowRank, b: LowRank) -> float:
    """Return norm(a - b) from the stacked factors, without cancellation for close operators."""
    left = np.concatenate([a.left, -b.left], axis=1, dtype=np.float64)
    return LowRank(left, np.concatenate([a.right, b.right], dtype=np.float64)).norm()
