"""Grouped-query attention: query heads that share key and value heads; sizes of attention in a config."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tnlib import FileFormatError
from tnlib._typing import Array
from tnlib_adapters.architectures.architecture import Architecture, Settings


class GroupedHeads:
    """Query heads in groups: those of one group share a key and value head."""

    n_heads: int
    kv_heads: int

    @property
    def group_size(self) -> int:
        """Number of query heads that share a key and value head."""
        return self.n_heads // self.kv_heads

    def kv_head(self, head: int) -> int:
        """Return the key and value head of a query head."""
        return head // self.group_size

    def query_heads(self, kv_head: int) -> range:
        """Return the query heads of a key and value head."""
        return range(kv_head * self.group_size, (kv_head + 1) * self.group_size)

    def repeated(self, a: Array) -> Array:
        """Return an array of key or value heads (kv_heads, ...) with one entry for every query head, (heads, ...)."""
        return a if self.group_size == 1 else np.repeat(a, self.group_size, axis=0)


@dataclass(frozen=True)
class Sizes(GroupedHeads):
    """Sizes of the attention layers of a model; a block of a decoder has two, its own and the one to the encoder.

    Without `kv_heads` there are as many as query heads, without `d_head` it is d_model / heads, without `d_value`, the
    width of the values of a head, it is `d_head`.
    """

    n_layers: int
    n_heads: int
    d_model: int
    kv_heads: int = 0
    d_head: int = 0
    d_value: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "kv_heads", self.kv_heads or self.n_heads)
        object.__setattr__(self, "d_head", self.d_head or self.d_model // self.n_heads)
        object.__setattr__(self, "d_value", self.d_value or self.d_head)

    @property
    def widths(self) -> dict[str, int]:
        """Width of the inner dimension of every projection."""
        return {
            "q": self.n_heads * self.d_head,
            "k": self.kv_heads * self.d_head,
            "v": self.kv_heads * self.d_value,
            "o": self.n_heads * self.d_value,
        }

    def sides(self, letters: str) -> tuple[int, int]:
        """Return input and output width of a module with these projections."""
        if letters == "o":
            return self.widths["o"], self.d_model
        return self.d_model, sum(self.widths[name] for name in letters)

    def of_head(self, name: str) -> int:
        """Return the width of one head of a projection."""
        return self.d_value if name in "vo" else self.d_head


def read_sizes(row: Architecture, settings: Settings, where: str, function: str) -> Sizes:
    """Return the sizes stated in a config, checked against each other."""
    n_layers, n_heads, d_model = settings[row.n_layers], settings[row.n_heads], settings[row.d_model]
    if row.decoder is not None and settings["is_encoder_decoder"]:
        n_layers += 2 * (settings[row.decoder.stack.n_layers] or n_layers)
    if row.latent is not None:
        keys = (row.latent.d_plain, row.latent.d_rotated, row.latent.d_value)
        plain, rotated, d_value = (settings[key] for key in keys)
        return Sizes(n_layers, n_heads, d_model, n_heads, plain + rotated, d_value)
    d_head = None if row.d_head is None else settings[row.d_head]
    if d_head is None and d_model % n_heads:
        raise FileFormatError(
            f"{function}: {row.d_model} must be a multiple of {row.n_heads} in {where}, "
            f"got {d_model} and {n_heads}; repair it."
        )
    kv_heads = _kv_heads(row, settings, n_heads)
    if n_heads % kv_heads:
        raise FileFormatError(
            f"{function}: {row.n_heads} must be a multiple of the count of key and value heads in {where}, "
            f"got {n_heads} and {kv_heads}; repair it."
        )
    d_value = 0 if row.d_value is None else settings[row.d_value]
    return Sizes(n_layers, n_heads, d_model, kv_heads, d_head or d_model // n_heads, d_value)


def _kv_heads(row: Architecture, settings: Settings, n_heads: int) -> int:
    if row.kv_heads is None:
        return n_heads
    return (settings[row.kv_heads] or n_heads) if isinstance(row.kv_heads, str) else row.kv_heads(settings, n_heads)
