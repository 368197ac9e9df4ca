r"""Heads of one attention layer, each of whose queries, keys and values reads a stream of its own.

With p = softmax(s) by rows and dz the gradient of z = p v, one backward pass gives the gradients of the inputs:

    dv = p^T dz      dp = dz v^T      ds = p * (dp - sum_j p_ij dp_ij)      dq = scale ds k      dk = scale ds^T q

then back through a soft cap, rotations, norms of heads or of latent vectors, and the projections. A norm behind the
layer divides all heads by the root mean square of their sum.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tnlib._typing import Array
from tnlib_adapters.attention.attention import Attention
from tnlib_adapters.reference.adjoints import norm_adjoint, rms_adjoint
from tnlib_adapters.reference.layers import Norm, softmax
from tnlib_adapters.reference.weights import Branch

SIDES = ("Q", "K", "V")


@dataclass(frozen=True, eq=False)
class HeadValues:
    """Values of a forward pass of some heads.

    Parameters
    ----------
    reads
        (3, h, b, n, d_model), streams that queries, keys and values read, before any norm.
    columns
        (h, b, n, d_head) three times: queries, keys and values as projected, before norms of heads and rotations.
    q, k, v
        The same as they enter the products.
    scores, pattern
        (h, b, n, n): scores before a soft cap and the mask, and attention weights.
    """

    reads: Array
    columns: tuple[Array, Array, Array]
    q: Array
    k: Array
    v: Array
    scores: Array
    pattern: Array


@dataclass(frozen=True, eq=False)
class GatedHeads:
    """An attention layer with its norms, weights repeated so that every query head has its own keys and values."""

    layer: Attention
    before: Norm | None
    behind: Norm | None
    weights: tuple[Array, Array, Array]  # h d dh, for queries, keys and values
    biases: tuple[Array | None, Array | None, Array | None]  # h dh

    @classmethod
    def of(cls, branch: Branch) -> GatedHeads | None:
        """Return the heads of an attention layer, None for another layer."""
        layer = branch.layer
        if not isinstance(layer, Attention):
            return None
        group = layer.n_heads // layer.kv_heads
        weights = (layer.W_Q, np.repeat(layer.W_K, group, axis=0), np.repeat(layer.W_V, group, axis=0))
        k, v = (None if b is None else np.repeat(b, group, axis=0) for b in (layer.b_K, layer.b_V))
        return cls(layer, branch.before, branch.behind, weights, (layer.b_Q, k, v))

    @property
    def n_heads(self) -> int:
        """Number of query heads."""
        return self.layer.n_heads

    @property
    def has_bias(self) -> bool:
        """True if the layer writes a constant beside its heads."""
        return self.layer.b_O is not None or (self.behind is not None and self.behind.bias is not None)

    # ------------------------------------------------------------------------------------------------------- forward

    def values(self, reads: Array, heads: slice = slice(None)) -> HeadValues:
        """Return the values of some heads for the streams (3, h, b, n, d_model) that they read."""
        layer = self.layer
        x = reads if self.before is None else self.before(reads)
        columns = [self._project(side, x[side], heads) for side in range(3)]
        q, k, v = columns
        if layer.head_norm is not None:
            q, k = layer.head_norm.queries(q), layer.head_norm.keys(k)
        if layer.latent_norm is not None:
            q, k, v = (self._divided(side, columns[side], x[side])[0] for side in range(3))
        if layer.rotary is not None:
            positions = np.arange(q.shape[-2])
            q, k = (layer.rotary.rotate(a, positions) for a in (q, k))
        scores = layer.scale * (q @ k.swapaxes(-1, -2))  # h b n [dh] n
        offsets = self._offsets(scores.shape[-1])
        if offsets is not None:
            scores += offsets[heads, None]
        capped = scores if layer.softcap is None else layer.softcap * np.tanh(scores / layer.softcap)
        pattern = softmax(np.where(layer.mask(scores.shape[-1]), capped, -np.inf))
        return HeadValues(reads, (columns[0], columns[1], columns[2]), q, k, v, scores, pattern)

    def outputs(self, values: HeadValues, heads: slice = slice(None)) -> Array:
        """Return what some heads write before a norm behind them, (h, b, n, d_model)."""
        return np.asarray((values.pattern @ values.v) @ self.layer.W_O[heads, None])  # h b n [n'] [dh] d

    def written(self, outputs: Array) -> Array:
        """Return the outputs of all heads behind the norm, then that of the biases, (writers, b, n, d_model)."""
        if not self.has_bias and self.behind is None:
            return outputs
        bias = np.zeros(outputs.shape[-1], outputs.dtype) if self.layer.b_O is None else self.layer.b_O
        constant = np.broadcast_to(bias, outputs[:1].shape)
        writers = np.concatenate([outputs, constant])
        if self.behind is None:
            return writers
        norm = self.behind
        centred = norm.centre(writers)
        y: Array = centred / norm.divisors(centred.sum(axis=0)) * norm.weight
        if norm.bias is not None:
            y[-1] += norm.bias
        return y if self.has_bias else y[:-1]

    # ------------------------------------------------------------------------------------------------------ backward

    def written_adjoint(self, outputs: Array, grad: Array) -> Array:
        """Return the gradients of head outputs (h, b, n, d_model) from those of all writers."""
        norm, n = self.behind, self.n_heads
        if norm is None:
            return grad[:n]
        bias = 0 if self.layer.b_O is None else self.layer.b_O
        centred, weighted = norm.centre(outputs), grad * norm.weight
        constant = norm.centre(np.broadcast_to(bias, outputs[:1].shape)) if self.has_bias else centred[:0]
        total = centred.sum(axis=0) + constant.sum(axis=0)
        divisors = norm.divisors(total)  # b n 1
        writers = np.concatenate([centred, constant])
        of_divisors = -(weighted * writers).sum(axis=(0, -1))[..., None] / divisors**2  # b n 1
        of_total = of_divisors * total / (divisors * total.shape[-1])
        return norm.centre(weighted[:n] / divisors + of_total)

    def adjoint(self, values: HeadValues, grad: Array) -> Array:
        """Return the gradients of the streams (3, h, b, n, d_model) from those of the outputs of all heads."""
        layer, p = self.layer, values.pattern
        dz = grad @ layer.W_O.transpose(0, 2, 1)[:, None]  # h b n [d] dh
        dp = dz @ values.v.swapaxes(-1, -2)  # h b n [dh] n'
        ds = layer.scale * p * (dp - (p * dp).sum(axis=-1, keepdims=True))
        if layer.softcap is not None:
            ds = ds * (1 - np.tanh(values.scores / layer.softcap) ** 2)
        columns = [ds @ values.k, ds.swapaxes(-1, -2) @ values.q, p.swapaxes(-1, -2) @ dz]  # h b n dh
        if layer.rotary is not None:  # the adjoint of a rotation is the one to the negative position
            positions = -np.arange(p.shape[-1])
            columns[:2] = [layer.rotary.rotate(a, positions) for a in columns[:2]]
        x = values.reads if self.before is None else self.before(values.reads)
        return np.stack([self._side_adjoint(side, values, x[side], columns[side]) for side in range(3)])

    def _side_adjoint(self, side: int, values: HeadValues, x: Array, grad: Array) -> Array:
        """Return the gradient of one stream (h, b, n, d_model) from that of its columns (h, b, n, d_head)."""
        norm, extra = self.layer.head_norm, None
        if norm is not None and side < 2:
            weight = norm.query if side == 0 else norm.key
            grad = rms_adjoint(values.columns[side], grad * weight, norm.eps)
        if self.layer.latent_norm is not None:
            grad, extra = self._divided_adjoint(side, values.columns[side], x, grad)
        dx = grad @ self.weights[side].transpose(0, 2, 1)[:, None]  # h b n [dh] d
        dx = dx if extra is None else dx + extra
        return dx if self.before is None else norm_adjoint(self.before, values.reads[side], dx)

    # --------------------------------------------------------------------------------------------------------- parts

    def _project(self, side: int, x: Array, heads: slice) -> Array:
        weight, bias = self.weights[side][heads], self.biases[side]
        columns: Array = x @ weight[:, None]  # h b n [d] dh
        return columns if bias is None else columns + bias[heads, None, None]

    def _offsets(self, n: int) -> Array | None:
        positions = np.arange(n)
        return self.layer.offsets(positions[:, None] - positions)

    def _latent(self, side: int, width: int) -> tuple[Array | None, slice]:
        """Return the down map of the latent vectors of a side, and the columns that are divided."""
        norm = self.layer.latent_norm
        if norm is None:
            return None, slice(0)
        return (norm.query if side == 0 else norm.key_value), slice(norm.n_rotated if side == 1 else 0, width)

    def _divided(self, side: int, columns: Array, x: Array) -> tuple[Array, Array | None]:
        """Return columns divided by the root mean square of their latent vectors, and these divisors (h, b, n, 1)."""
        down, some = self._latent(side, columns.shape[-1])
        if down is None or self.layer.latent_norm is None:
            return columns, None
        latent = x @ down  # h b n [d] r
        divisors = np.sqrt(np.square(latent).mean(-1, keepdims=True) + self.layer.latent_norm.eps)
        divided = columns.copy()
        divided[..., some] /= divisors
        return divided, divisors

    def _divided_adjoint(self, side: int, columns: Array, x: Array, grad: Array) -> tuple[Array, Array | None]:
        """Return the gradient of the columns before the division, and that of x through the divisors."""
        down, some = self._latent(side, columns.shape[-1])
        _, divisors = self._divided(side, columns, x)
        if down is None or divisors is None:
            return grad, None
        latent, undivided = x @ down, grad.copy()
        undivided[..., some] /= divisors
        of_divisors = -(grad[..., some] * columns[..., some]).sum(-1, keepdims=True) / divisors**2
        return undivided, (of_divisors * latent / (divisors * latent.shape[-1])) @ down.T  # h b n [r] d
