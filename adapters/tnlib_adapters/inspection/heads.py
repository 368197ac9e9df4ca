r"""What every head holds: Schmidt values of its operators, and what its weights leave to convention.

Schmidt values are the singular values of an operator, those of the bond between its two sides. The effective rank is
(sum s^2)^2 / sum s^4, how many of them share the operator.
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
    """Schmidt values of all heads, descending.

    Parameters
    ----------
    qk
        From a distance (None where scores do not depend on it) to values (layers, heads, rank).
    ov
        (layers, heads, d_head).
    """

    qk: Mapping[int | None, Array]
    ov: Array


@single_threaded_blas
def spectra(layers: Sequence[Attention], distances: Sequence[int | None]) -> Spectra:
    """Return the Schmidt values of the QK operators at some distances and of the OV operators, biases included."""

    def of(distance: int | None) -> Array:
        return np.array([[_values(one.qk(h, distance)) for h in range(one.n_heads)] for one in layers])

    ov = np.array([[_values(one.ov(h)) for h in range(one.n_heads)] for one in layers])
    return Spectra({distance: of(distance) for distance in distances}, ov)


def effective_rank(values: Array) -> Array:
    """Return (sum s^2)^2 / sum s^4 over the last leg; 0 for an operator that is zero.

    >>> effective_rank(np.array([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0]]))
    array([2., 1., 0.])
    """
    largest = values.max(axis=-1, keepdims=True)
    squares = np.square(values / np.where(largest > 0, largest, 1))
    total, of_squares = squares.sum(axis=-1), np.square(squares).sum(axis=-1)
    return np.asarray(np.where(total > 0, total**2 / np.where(total > 0, of_squares, 1), 0.0))


@dataclass(frozen=True)
class GaugeReport:
    """What the weights of a layer hold beyond what it computes.

    Parameters
    ----------
    n_numbers, n_free
        Numbers in the weights and biases of the layer, and how many of them can be chosen at will.
    queries_to_keys, values_to_outputs
        The smallest and the largest quotient of norms of any key and value head: 1 where weights are balanced.
    order
        Heads as `fix_gauge` puts them, the strongest first.
    """

    n_numbers: int
    n_free: int
    queries_to_keys: tuple[float, float]
    values_to_outputs: tuple[float, float]
    order: tuple[int, ...]


@single_threaded_blas
def gauge_report(layer: Attention) -> GaugeReport:
    """Return what is convention in the weights of a layer."""
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
    """Return the norms of all heads that share a key and value head, (kv_heads,)."""
    squares = np.square(weights.astype(np.float64)).sum(axis=(1, 2)).reshape(-1, group)
    return np.asarray(np.sqrt(squares.sum(axis=1)))


def _range(a: Array, b: Array) -> tuple[float, float]:
    ratio = np.where(b > 0, a / np.where(b > 0, b, 1), np.inf)
    return float(ratio.min()), float(ratio.max())


def _free_scores(layer: Attention) -> int:
    """Count what scores of one key head leave open: any G on columns that do not turn, a complex number on a plane."""
    columns = Columns.of(layer.rotary, layer.d_head)
    if layer.head_norm is not None:
        return 0  # signs and quarter turns, which are no continuum
    still = len(columns.still)
    bias = still if layer.b_K is not None and layer.softcap is None else 0
    return still**2 + 2 * len(columns.planes[0]) + sum(2 * len(a) ** 2 for a, _ in columns.alike) + bias


def _free_values(layer: Attention) -> int:
    bias = layer.d_head if layer.b_V is not None and layer.b_O is not None else 0
    return layer.d_head**2 + bias
