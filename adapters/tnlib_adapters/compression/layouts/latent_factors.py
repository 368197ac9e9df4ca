r"""Multi-head latent attention that is nearest to an attention layer: one rotated key, and one latent for all heads.

Plane f of the key of key-value head g is the complex number k_gf = x (W_a + i W_b), of its two columns. Rotations are
factors exp(i w_f t) of it, so that linear combinations of planes of one frequency commute with them, and a score is

    s_ij = Re sum_f q_f conj(k_gf) exp(i w_f (i - j)).

DeepSeek's key has one plane for each of few frequencies. All planes of nearby frequencies (`frequency_groups`) are
replaced by a combination c = k a of them, k -> c b with row vectors k and b, so that queries become q conj(b)^T. With
the second moments K = E[k^H k] of the keys and P = E[conj(p) p^T] of the gradients p at them, the error

    E |k (1 - a b) conj(p)|^2 = tr K (1 - a b) P (1 - a b)^H,        as if k and p were independent,

is smallest for a b = L v v^H L^-1, P = L L^H, v the leading right singular vector of K^1/2 L.

The remainder of the keys, k (1 - a b), loses its rotation. It is decomposed together with the values, [K', V] = C U,
into `rank` components of smallest error by the same moments (`components`); C is the map to the latent vector.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tnlib._typing import Array
from tnlib_adapters.compression.methods.components import components
from tnlib_adapters.factors.projections import Projections, Sizes


@dataclass(frozen=True)
class KeyMoments:
    """Second moments of the input, (d_model,) * 2, and of the gradients at keys and values, (kv_heads * width,) * 2."""

    inputs: Array
    keys: Array
    values: Array


@dataclass(frozen=True)
class LatentFactors:
    """Weights of multi-head latent attention that act on rows; rotated columns come last, in pairs.

    Parameters
    ----------
    query
        (d_model, heads, d_head + n_rotated).
    down
        (d_model, rank + n_rotated).
    up
        (rank, heads, d_head + d_value).
    """

    query: Array
    down: Array
    up: Array


def frequency_groups(radians: Array, kept: Array) -> list[Array]:
    """Return, for every frequency that is kept, the indices of the planes whose nearest one it is, by their ratio."""
    nearest = np.abs(np.log(radians[:, None] / kept)).argmin(1)
    return [np.flatnonzero(nearest == m) for m in range(len(kept))]


def latent_factors(
    projections: Projections, sizes: Sizes, moments: KeyMoments, groups: Sequence[Array], rank: int
) -> LatentFactors:
    """Return the factors of one layer with one rotated plane for every group of planes, for the same scale of scores.

    Parameters
    ----------
    projections, sizes
        Of the layer; plane f of a head of n rotated columns is columns f and n / 2 + f.
    moments
        Of the layer.
    groups
        Indices of planes; every plane is in one group.
    rank
        Width of the latent vector, at most that of all keys and values.
    """
    planes, n_heads = _Planes(sum(map(len, groups)), sizes), sizes.n_heads
    queries, keys = (projections.weights[name].astype(np.float64) for name in "qk")
    query_planes, remainder = planes.of(queries), planes.of(keys)
    slopes, shared, rotated = planes.gradients(moments.keys), [], []
    for group in groups:
        own = remainder[:, :, group].reshape(sizes.d_model, -1)  # d (g f)
        at = np.add.outer(np.arange(sizes.kv_heads) * planes.count, group).ravel()
        left, right = _leading(own.conj().T @ moments.inputs @ own, slopes[np.ix_(at, at)])
        key = own @ left
        by_head = np.repeat(right.conj().reshape(sizes.kv_heads, -1), n_heads // sizes.kv_heads, axis=0)  # h f
        rotated.append(np.einsum("dhf,hf->dh", query_planes[:, :, group], by_head))
        shared.append(key)
        remainder[:, :, group] -= (key[:, None] * right).reshape(sizes.d_model, sizes.kv_heads, -1)
    down, up = _latent(planes.put(keys, remainder), projections, sizes, moments, rank)
    plain = queries.reshape(sizes.d_model, n_heads, -1)
    return LatentFactors(
        np.concatenate([plain, _pairs(np.stack(rotated, -1))], -1),
        np.concatenate([down, _pairs(np.stack(shared, -1))], -1),
        up,
    )


def _latent(keys: Array, projections: Projections, sizes: Sizes, moments: KeyMoments, rank: int) -> tuple[Array, Array]:
    """Return C (d_model, rank) and U (rank, heads, d_head + d_value) for keys without rotation, and the values."""
    values = projections.weights["v"].astype(np.float64)
    n, m = keys.shape[1], values.shape[1]
    slopes = np.zeros((n + m, n + m))
    slopes[:n, :n], slopes[n:, n:] = moments.keys, moments.values
    left, right = components(np.concatenate([keys, values], 1), moments.inputs, slopes).first(rank)
    parts = (right[:, :n], right[:, n:])
    by_head = np.concatenate([part.reshape(len(right), sizes.kv_heads, -1) for part in parts], -1)
    return left, np.repeat(by_head, sizes.group_size, axis=1)


def _leading(keys: Array, gradients: Array) -> tuple[Array, Array]:
    """Return a (n,) and b (n,) for K and P."""
    size = float(np.trace(gradients).real) / len(gradients) or 1.0
    lower = np.linalg.cholesky(gradients / size + 1e-9 * np.eye(len(gradients)))
    values, vectors = np.linalg.eigh(keys)
    root = (vectors * np.sqrt(np.maximum(values, 0))) @ vectors.conj().T
    v = np.linalg.svd(root @ lower)[2][0].conj()
    return lower @ v, np.linalg.solve(lower.conj().T, v).conj()


def _pairs(planes: Array) -> Array:
    """Return complex numbers (..., f) as real ones in pairs, (..., 2 f)."""
    return np.stack([planes.real, planes.imag], -1).reshape(*planes.shape[:-1], -1)


class _Planes:
    """Rotated planes of the heads of a layer, as complex numbers."""

    def __init__(self, count: int, sizes: Sizes) -> None:
        self.count, self._sizes = count, sizes

    def of(self, weight: Array) -> Array:
        """Return the planes (d_model, heads, f) of a weight (d_model, heads * d_head)."""
        by_head = weight.reshape(len(weight), -1, self._sizes.d_head)
        return by_head[..., : self.count] + 1j * by_head[..., self.count : 2 * self.count]

    def put(self, weight: Array, planes: Array) -> Array:
        """Return a weight with other planes."""
        new = weight.reshape(len(weight), -1, self._sizes.d_head).copy()
        new[..., : self.count], new[..., self.count : 2 * self.count] = planes.real, planes.imag
        return new.reshape(weight.shape)

    def gradients(self, moments: Array) -> Array:
        """Return E[conj(p) p^T], (kv_heads * f,) * 2, for second moments of gradients at all columns."""
        by_plane = self.of(self.of(moments).reshape(len(moments), -1).T.conj())
        return by_plane.reshape(len(by_plane), -1)
