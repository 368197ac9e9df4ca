r"""Spectra and gauge freedom of attention heads.

Schmidt values are the singular values of an operator, those of the bond between its two sides. The effective rank is
the participation ratio (sum s^2)^2 / sum s^4.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tnlib import LowRank
from tnlib._typing import Array
from tnlib.linalg.thin_svd import product_svd
from tnlib.linalg.threads import single_threaded_blas
from tnlib_adapters.attention.attention import Attention
from tnlib_adapters.attention.gauge.scores import Columns
from tnlib_adapters.transforms.gauge_fixing import head_order


@dataclass(frozen=True, eq=False)
class Spectra:
    """Singular values (Schmidt values) of the operators of all heads, descending.

    Parameters
    ----------
    qk
        Maps a distance (None where scores do not depend on it) to values (layers, heads, rank).
    ov
        (layers, heads, d_head).
    """

    qk: Mapping[int | None, Array]
    ov: Array


@single_threaded_blas
def spectra(layers: Sequence[Attention], distances: Sequence[int | None]) -> Spectra:
    """Return the singular values of the QK operators at some distances and of the OV operators, biases included."""

    def of(distance: int | None) -> Array:
        return np.array([[_values(layer.qk(h, distance)) for h in range(layer.n_heads)] for layer in layers])

    ov = np.array([[_values(layer.ov(h)) for h in range(layer.n_heads)] for layer in layers])
    return Spectra({distance: of(distance) for distance in distances}, ov)


def effective_rank(values: Array) -> Array:
    """Return (sum s^2)^2 / sum s^4 over the last axis; 0 for a zero operator.

    >>> effective_rank(np.array([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0]]))
    array([2., 1., 0.])
    """
    largest = values.max(axis=-1, keepdims=True)
    squares = np.square(values / np.where(largest > 0, largest, 1))
    total, of_squares = squares.sum(axis=-1), np.square(squares).sum(axis=-1)
    return np.asarray(np.where(total > 0, total**2 / np.where(total > 0, of_squares, 1), 0.0))


@dataclass(frozen=True)
class GaugeReport:
    """Gauge degrees of freedom and norms of the weights of a layer.

    Parameters
    ----------
    n_numbers, n_free
        Number of weights and biases of the layer, and number of gauge degrees of freedom among them.
    queries_to_keys, values_to_outputs
        Smallest and largest quotient of norms over key and value heads: 1 in the balanced gauge.
    order
        Heads in the order of `fix_gauge`, by descending norm.
    """

    n_numbers: int
    n_free: int
    queries_to_keys: tuple[float, float]
    values_to_outputs: tuple[float, float]
    order: tuple[int, ...]


@single_threaded_blas
def gauge_report(layer: Attention) -> GaugeReport:
    """Return the gauge degrees of freedom of a layer and how far it is from the balanced gauge."""
    group = layer.n_heads // layer.kv_heads
    queries, outputs = (_by_key_head(w, group) for w in (layer.W_Q, layer.W_O))
    keys, values = (_by_key_head(w, 1) for w in (layer.W_K, layer.W_V))
    arrays = (getattr(layer, name) for name in ("W_Q", "W_K", "W_V", "W_O", "b_Q", "b_K", "b_V", "b_O"))
    return GaugeReport(
        sum(a.size for a in arrays if a is not None),
        layer.kv_heads * (_free_scores(layer) + _free_values(layer)),
        _range(queries, keys),
        _range(values, outputs),
        tuple(int(head) for head in head_order(layer)),
    )


def _values(operator: LowRank) -> Array:
    return product_svd(operator.left.astype(np.float64), operator.right.astype(np.float64))[1]


def _by_key_head(weights: Array, group: int) -> Array:
    """Return the norms of all groups of heads that share a key and value head, (kv_heads,)."""
    squares = np.square(weights.astype(np.float64)).sum(axis=(1, 2)).reshape(-1, group)
    return np.asarray(np.sqrt(squares.sum(axis=1)))


def _range(a: Array, b: Array) -> tuple[float, float]:
    ratio = np.where(b > 0, a / np.where(b > 0, b, 1), np.inf)
    return float(ratio.min()), float(ratio.max())


def _free_scores(layer: Attention) -> int:
    """Count the gauge freedom of the scores of one key head: GL on unrotated columns, a complex factor per plane."""
    columns = Columns.of(layer.rotary, layer.d_head)
    if layer.head_norm is not None:
        return 0  # only signs and quarter turns, a discrete group
    still = len(columns.still)
    bias = still if layer.b_K is not None and layer.softcap is None else 0
    return still**2 + 2 * len(columns.planes[0]) + sum(2 * len(a) ** 2 for a, _ in columns.alike) + bias


def _free_values(layer: Attention) -> int:
    bias = layer.d_head if layer.b_V is not None and layer.b_O is not None else 0
    return layer.d_head**2 + bias
