r"""Upper bounds on the sum of squares of the values of all paths through at least two heads, of a frozen model.

Let path p write s_p (positions, features) to a stream, and let G_i = sum_p s_p,i^T s_p,i be the second moments at
position i. By Minkowski's inequality the values <r, s_p> of all paths to a readout r obey

    ( sum_p <r, s_p>^2 )^(1/2)  <=  sum_i ( r_i G_i r_i^T )^(1/2),

which bounds the largest of them. Second moments pass a linear map M_i between heads exactly, G_i -> M_i^T G_i M_i, and
those of distinct paths add up. A head sums values v_j over keys with weights a_j: by Cauchy-Schwarz, for any c_j > 0,

    sum_p (sum_j a_j v_p,j)^T (sum_j a_j v_p,j)  <=  (sum_j a_j c_j) sum_j (a_j / c_j) C_j,     C_j = W_V^T G_j W_V

as quadratic forms. With c_j = tr(C_j)^(1/2) a key whose values are small, such as that of an attention sink, costs
little. The sums start with the paths through two heads, whose second moments behind the second head are exact.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from tnlib._typing import Array
from tnlib_adapters.circuits.paths.path_layers import PathLayer
from tnlib_adapters.frozen.frozen_heads import FrozenHeads, FrozenNorm


class PathEnergies(NamedTuple):
    """Bounds before one block, of all paths through at least two heads.

    Parameters
    ----------
    streams
        (n, d, d), second moments of the stream.
    values
        Of every attention layer, (heads, n, d_value, d_value): second moments of its weighted values.
    """

    streams: Array
    values: list[Array]


def path_energies(layers: Sequence[PathLayer], below: Sequence[Array]) -> Iterator[PathEnergies]:
    """Yield the bounds before every block, and after the last; `below` are the streams of at most one head."""
    _, n, d = below[0].shape
    moments = np.zeros((n, d, d), below[0].dtype)
    for layer, streams in zip(layers, below, strict=True):
        values = [_value_moments(heads, moments) for _, heads in layer.attentions]
        yield PathEnergies(moments, values)
        if layer.others:
            maps = layer.maps()
            moments = maps.swapaxes(1, 2) @ moments @ maps  # n d [d] [d] d
        for (_, heads), of_values in zip(layer.attentions, values, strict=True):
            second = heads.values_of(streams[1:]).transpose(1, 2, 3, 0)  # h n dh m
            moments = moments + _output_moments(heads, of_values + second @ second.swapaxes(2, 3))
        moments = moments if layer.after is None else _normed(layer.after, moments)
    yield PathEnergies(moments, [])


def norm_bound(readouts: Array, moments: Array) -> Array:
    """Return the bound on the root of the sum of squares, (..., m), for readouts (..., m, n, d)."""
    by_position = readouts.swapaxes(-3, -2)
    squares = ((by_position @ moments) * by_position).sum(axis=-1)  # ... n m
    return np.asarray(np.sqrt(np.maximum(squares, 0)).sum(axis=-2))


def _value_moments(heads: FrozenHeads, moments: Array) -> Array:
    """Return the bound behind the weighted sum over keys, (heads, n, d_value, d_value)."""
    W_V, weights = heads.layer.W_V[:, None], np.abs(heads.weights)
    normed = moments if heads.before is None else _normed(heads.before, moments)
    of_keys = heads.layer.repeated(W_V.swapaxes(2, 3) @ normed @ W_V)  # h n dh [d] [d] dh
    scales = np.sqrt(np.einsum("hnii->hn", of_keys))[..., None]  # h n' 1
    sizes = weights @ scales  # h n [n'] 1
    shares = weights * sizes * np.divide(1, scales, out=np.zeros_like(scales), where=scales > 0).swapaxes(1, 2)
    return np.asarray((shares @ of_keys.reshape(*shares.shape[:2], -1)).reshape(of_keys.shape))  # h n [n'] (dh dh)


def _output_moments(heads: FrozenHeads, values: Array) -> Array:
    """Return the second moments of what all heads write, (n, d, d)."""
    W_O = heads.output_weights
    n_heads, width, d = W_O.shape
    half = (values @ W_O[:, None]).transpose(1, 0, 2, 3).reshape(-1, n_heads * width, d)  # n (h dh) d
    out: Array = W_O.reshape(-1, d).T @ half  # n d [h dh] d
    return out if heads.behind is None else out / heads.behind.divisors[..., None] ** 2


def _normed(norm: FrozenNorm, moments: Array) -> Array:
    """Return second moments (n, d, d) behind the linear part of a norm."""
    for _ in range(2):
        moments = norm.linear(moments.transpose(1, 0, 2)).transpose(2, 1, 0).transpose(1, 0, 2)  # n d d, transposed
    return moments
