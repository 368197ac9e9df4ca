"""Token and patch embeddings: the initial residual stream."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tnlib import ArgumentError, ArgumentTypeError
from tnlib._typing import Array
from tnlib._validate import as_array, is_list, to_numpy
from tnlib_adapters.files.tokenizer import tokenizer_or_none
from tnlib_adapters.reference.layers import Norm


class Padding(NamedTuple):
    """Padding token and its position embedding (d_model,)."""

    token: int
    position: Array


@dataclass(frozen=True)
class TokenEmbedding:
    """Token embeddings plus learned positions and the first segment embedding, if any."""

    tokens: Array  # (vocab, d_model), scaled as in the residual stream
    positions: Array | None  # (context, d_model), from the first position on, or None
    segment: Array | None  # (d_model,), or None
    norm: Norm | None  # norm of the sum, or None
    padding: Padding | None = None  # the token that takes no position, in RoBERTa, or None
    folder: Path | None = None  # of the checkpoint, with the tokenizer for texts

    @property
    def context(self) -> int | None:
        """Number of learned positions, None if there are none."""
        return None if self.positions is None else len(self.positions)

    def __call__(self, tokens: Array) -> Array:
        """Return the stream (batch, n, d_model) for tokens (batch, n)."""
        x: Array = sum(self.parts(tokens).values())  # type: ignore[assignment]
        return x if self.norm is None else self.norm(x)

    def parts(self, tokens: Array) -> dict[str, Array]:
        """Return the terms of the sum before the norm, (batch, n, d_model) each, by name."""
        parts = {"tokens": self.tokens[tokens]}
        if self.positions is not None:
            parts["positions"] = self._positions(self.positions, tokens)
        if self.segment is not None:
            parts["segment"] = np.broadcast_to(self.segment, parts["tokens"].shape)
        return parts

    def parts_of_stream(self, tokens: Array) -> dict[str, Array]:
        """Return the stream as a sum: `parts` behind the norm, whose bias is the part "norm embedding"."""
        parts = self.parts(tokens)
        return parts if self.norm is None else self.norm.of_sum(parts, "norm embedding")

    def _positions(self, table: Array, tokens: Array) -> Array:
        """Return the position embeddings (batch, n, d_model) of tokens (batch, n)."""
        if self.padding is None or not (is_padding := tokens == self.padding.token).any():
            return np.broadcast_to(table[: tokens.shape[1]], (*tokens.shape, table.shape[1]))
        rows = np.maximum((~is_padding).cumsum(axis=1) - 1, 0)  # counts the tokens that are no padding
        return np.where(is_padding[..., None], self.padding.position, table[rows])

    def check(self, function: str, tokens: Any, context: int | None, parameter: str = "tokens") -> Array:
        """Return token numbers (batch, n), validated, also of what a tokenizer returned and of one or several texts.

        `parameter` is their name in messages. Texts are split by the tokenizer in the folder of the checkpoint.
        """
        texts = [tokens] if isinstance(tokens, str) else tokens
        if is_list(texts) and len(texts) and all(isinstance(text, str) for text in texts):
            tokens = self._split(function, list(texts), parameter)
        a = np.atleast_2d(as_token_ids(function, tokens, len(self.tokens), parameter))
        if context is not None and a.shape[1] > context:
            raise ArgumentError(
                f"{function}: {parameter} must hold at most {context} per sequence, as many as the model has positions"
                f", got {a.shape[1]}; shorten them."
            )
        return a

    def _split(self, function: str, texts: list[str], parameter: str) -> list[Any]:
        """Return the token numbers of texts, or the texts where there is no tokenizer."""
        tokenizer = None if self.folder is None else tokenizer_or_none(function, self.folder)
        if tokenizer is None:
            return texts
        rows: list[Any] = tokenizer(texts, verbose=False)["input_ids"]
        if len(lengths := {len(row) for row in rows}) > 1:
            raise ArgumentError(
                f"{function}: {parameter} must be texts of equally many tokens, got {min(lengths)} to {max(lengths)}; "
                "pass one at a time, or align them."
            )
        return rows


def as_token_ids(function: str, tokens: Any, vocab: int | None, parameter: str = "tokens") -> Array:
    """Return token numbers (n,) or (batch, n), validated, also of a BatchEncoding; any number if `vocab` is None."""
    if isinstance(tokens, Mapping) and "input_ids" in tokens:
        if "attention_mask" in tokens and not to_numpy(function, parameter, tokens["attention_mask"]).all():
            raise ArgumentError(
                f"{function}: {parameter} must be without padding, got an attention_mask with zeros; pass sequences of "
                "one length."
            )
        tokens = tokens["input_ids"]
    a = to_numpy(function, parameter, tokens)
    if a.dtype.kind == "U":
        raise ArgumentTypeError(
            f"{function}: {parameter} must be token numbers, got the text {str(a.flat[0])!r:.60}; pass "
            'tokenizer(text)["input_ids"].'
        )
    if a.dtype.kind not in "iu" or a.ndim not in (1, 2) or a.size == 0:
        raise ArgumentError(
            f"{function}: {parameter} must be integers of shape (n,) or (batch, n), got {a.dtype} of shape {a.shape}; "
            "pass the input_ids of the tokenizer."
        )
    if vocab is not None and (a.min() < 0 or a.max() >= vocab):
        raise ArgumentError(
            f"{function}: {parameter} must lie between 0 and {vocab - 1}, got {a[(a < 0) | (a >= vocab)][0]}; "
            "use the tokenizer that belongs to the model."
        )
    return a


@dataclass(frozen=True)
class PatchEmbedding:
    """Square image patches in row order after a learned first vector, plus learned positions."""

    kernel: Array  # (d_model, channels, p, p), the patch projection
    bias: Array  # (d_model,)
    first: Array  # (d_model,)
    positions: Array  # (1 + patches, d_model)

    @property
    def context(self) -> int | None:
        """Number of patches plus the first vector."""
        return len(self.positions)

    def __call__(self, images: Array) -> Array:
        """Return the stream (batch, 1 + patches, d_model) for images (batch, channels, height, width)."""
        parts = self.parts(images)
        return np.asarray(parts["patches"] + parts["positions"])

    def parts(self, images: Array) -> dict[str, Array]:
        """Return the terms of the sum, (batch, 1 + patches, d_model) each, by name."""
        p, (batch, channels, height, width) = self.kernel.shape[-1], images.shape
        patches = images.reshape(batch, channels, height // p, p, width // p, p).transpose(0, 2, 4, 1, 3, 5)
        flat = patches.reshape(batch, -1, channels * p * p)
        x = flat @ self.kernel.reshape(len(self.kernel), -1).T + self.bias  # batch patch [c p p] d_model
        first = np.broadcast_to(self.first, (batch, 1, len(self.first)))
        patches_and_first = np.concatenate([first, x], axis=1)
        return {"patches": patches_and_first, "positions": np.broadcast_to(self.positions, patches_and_first.shape)}

    def parts_of_stream(self, images: Array) -> dict[str, Array]:
        """Return the stream as a sum: `parts`, which no norm follows."""
        return self.parts(images)

    def check(self, function: str, images: Any, context: int | None) -> Array:
        """Return images (batch, channels, height, width) in float64, validated."""
        a = as_array(function, "images", images).astype(np.float64)
        a = a[None] if a.ndim == 3 else a
        p, channels = self.kernel.shape[-1], self.kernel.shape[1]
        fits = a.ndim == 4 and a.shape[1] == channels and not (a.shape[2] % p or a.shape[3] % p)
        if not fits or 1 + (a.shape[2] // p) * (a.shape[3] // p) != len(self.positions):
            raise ArgumentError(
                f"{function}: images must have shape (batch, {channels}, height, width) with "
                f"{len(self.positions) - 1} patches of {p} x {p}, got {a.shape}; resize them."
            )
        return a
