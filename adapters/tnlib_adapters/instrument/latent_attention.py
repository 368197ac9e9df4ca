r"""Multi-head latent attention in place of the attention of a running block, with its weights as tensors.

With the latent c_t = x_t W_DKV, the rotated key r_t = x_t W_KR of all heads, and R_t the rotation at position t,

    s_ij^h = scale * (q_i^h . c_j W_UK^h + R_i p_i^h . R_j r_j),      y_i^h = sum_j softmax(s^h)_ij c_j W_UV^h.

The norm of the latent, which engines compute, is left out: written weights make it linear (`latent_norm.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tnlib_adapters.factors.projections import Products, Projections
from tnlib_adapters.instrument.block import Block, Weights

QUERY, DOWN, UP = "latent_query", "latent_down", "latent_up"  # names of the weights among the products of a block


@dataclass(frozen=True)
class LatentShape:
    """Sizes of multi-head latent attention, the frequencies of its rotated columns and the scale of its scores."""

    n_heads: int
    rank: int
    d_plain: int
    d_value: int
    frequencies: tuple[float, ...]
    scale: float

    @property
    def n_rotated(self) -> int:
        """Number of rotated columns, which are in pairs."""
        return 2 * len(self.frequencies)


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention, called as the attention of a decoder layer of transformers.

    Parameters
    ----------
    shape
        Its sizes.
    query
        (d_model, heads * (d_plain + n_rotated)).
    down
        (d_model, rank + n_rotated), of the latent and the shared rotated key.
    up
        (rank, heads * (d_plain + d_value)), of the plain keys and the values of every head.
    output
        Module of W_O.
    """

    shape: LatentShape
    query: Tensor
    down: Tensor
    up: Tensor
    output: nn.Module

    def __call__(
        self, hidden_states: Tensor, *_: Any, attention_mask: Tensor | None = None, **__: Any
    ) -> tuple[Tensor, None]:
        """Return the output for hidden states (texts, tokens, d_model), and no attention patterns."""
        shape, x = self.shape, hidden_states
        texts, tokens, _width = x.shape
        heads = (texts, tokens, shape.n_heads, -1)
        turning = self._rotation(tokens, x)
        queries, both = (x @ self.query.to(x)).view(heads), x @ self.down.to(x)
        keys = (both[..., : shape.rank] @ self.up.to(x)).view(heads)
        shared = _rotate(both[:, :, None, shape.rank :], turning).expand(-1, -1, shape.n_heads, -1)
        q = torch.cat([queries[..., : shape.d_plain], _rotate(queries[..., shape.d_plain :], turning)], -1)
        k, v = torch.cat([keys[..., : shape.d_plain], shared], -1), keys[..., shape.d_plain :]
        y = nn.functional.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            attn_mask=attention_mask,
            is_causal=attention_mask is None,
            scale=shape.scale,
        )
        return self.output(y.transpose(1, 2).reshape(texts, tokens, -1)), None

    @property
    def requires_grad(self) -> bool:
        """True if gradients flow to a weight."""
        return any(weight.requires_grad for weight in (self.query, self.down, self.up))

    def _rotation(self, tokens: int, x: Tensor) -> Tensor:
        """Return the cosines and sines of every position, (2, tokens, 1, planes)."""
        frequencies = torch.tensor(self.shape.frequencies, device=x.device)
        angles = torch.arange(tokens, device=x.device)[:, None, None] * frequencies
        return torch.stack([angles.cos(), angles.sin()]).to(x)


def _rotate(x: Tensor, turning: Tensor) -> Tensor:
    """Return x (..., tokens, heads, 2 * planes) with columns 2f and 2f + 1 rotated by plane f."""
    cos, sin = turning
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)


@dataclass(frozen=True)
class LatentBlock(Block):
    """A block whose attention is replaced by latent attention wherever it runs with other weights than its own."""

    shape: LatentShape

    def weights(self, products: Products, *, factored: bool = False) -> Weights:
        """Return the latent attention and the parameters of the block for products of tensors."""
        matrices = products.modules()
        query, down, up = (matrices.pop(name) for name in (QUERY, DOWN, UP))
        output = self.layer.projections["o"].module
        parameters: Mapping[str, Any] = self.of_weights(Projections({"o": products.product("o")}, {}), matrices)
        attention = next(name for name, module in self.layer.block.named_modules() if output in module.children())
        return {attention: LatentAttention(self.shape, query, down, up, output), **parameters}
