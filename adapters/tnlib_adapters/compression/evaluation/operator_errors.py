"""How far the QK and OV operators of two layers lie apart, biases included."""

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
        (qk_error, ov_error), (qk_spectrum, ov_spectrum) = errors, spectra
        ranks = kept[head] if kept else (None, None)
        heads.append(HeadReport(layer, head, qk_error, ov_error, qk_spectrum, ov_spectrum, *ranks))
    qk, ov = (float(np.sqrt(d / n)) if n > 0 else 0.0 for d, n in totals)
    return heads, qk, ov


def _qk(layer: Attention, head: int) -> LowRank:
    """Return the QK operator, at distance 0 where it depends on it, without the divisions by norms of heads."""
    return (layer if layer.head_norm is None else layer.numerator()).qk(head, distance=0)


def _difference(a: LowRank, b: LowRank) -> float:
    """Return norm(a - b) from the stacked factors, so that close operators do not cancel."""
    left = np.concatenate([a.left, -b.left], axis=1, dtype=np.float64)
    return LowRank(left, np.concatenate([a.right, b.right], dtype=np.float64)).norm()
