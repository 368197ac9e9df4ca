"""All weights of a model in memory, in float64, wired as its row of the table of architectures says."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tnlib import ArgumentError, FileFormatError
from tnlib._typing import Array
from tnlib_adapters.attention.attention import Attention
from tnlib_adapters.attention.checkpoint import Checkpoint
from tnlib_adapters.checkpoints.architectures import Mlp
from tnlib_adapters.forward.layers import ACTIVATIONS, Affine, FeedForward, Norm

Shape = tuple[int | None, ...]

# A few checkpoints, bert-base-uncased among them, keep the older names.
_NORM_NAMES = (("weight", "bias"), ("gamma", "beta"))


@dataclass(frozen=True)
class Branch:
    """What stands beside the residual stream: x -> after(x + layer(before(x))), norms None where there is none."""

    layer: Attention | FeedForward
    before: Norm | None
    after: Norm | None


@dataclass(frozen=True, repr=False)
class Weights:
    """A model in memory; made by `read_weights`, so that many batches read the files once."""

    architecture: str
    causal: bool
    embeddings: tuple[Array, ...]  # of tokens (vocab, d_model), of positions, and of segments where there are any
    embedding_norm: Norm | None
    branches: tuple[Branch, ...]
    final_norm: Norm | None
    unembed: Affine | None

    @property
    def vocab(self) -> int:
        """Count of tokens."""
        return len(self.embeddings[0])

    @property
    def context(self) -> int:
        """Length of the longest sequence."""
        return len(self.embeddings[1])

    def __repr__(self) -> str:
        return f"Weights({self.architecture}, vocab {self.vocab}, context {self.context})"


def read_weights(checkpoint: Checkpoint) -> Weights:
    """Read a checkpoint for the forward pass; attention that is stored as factors is multiplied out.

    Parameters
    ----------
    checkpoint
        Any that `open_checkpoint` returns.

    Returns
    -------
    Weights
        Everything in float64.

    Raises
    ------
    ArgumentError
        If the activation function that its config names is not known.
    FileFormatError
        If a tensor is missing, has an impossible shape, or holds NaN or inf.

    Examples
    --------
    >>> import tnlib_adapters
    >>> read_weights(tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path()))
    Weights(tnlib_attention_only, vocab 128, context 96)
    """
    row = checkpoint.architecture
    d = checkpoint.sizes.d_model
    return Weights(
        architecture=row.model_type,
        causal=row.causal,
        embeddings=tuple(_tensor(checkpoint, f"{name}.weight", (None, d)) for name in row.embeddings),
        embedding_norm=_norm(checkpoint, row.embedding_norm),
        branches=tuple(branch for layer in range(checkpoint.n_layers) for branch in _layer(checkpoint, layer)),
        final_norm=_norm(checkpoint, row.final_norm),
        unembed=_unembed(checkpoint),
    )


def _layer(checkpoint: Checkpoint, layer: int) -> list[Branch]:
    row = checkpoint.architecture
    branches = [_branch(checkpoint, _attention(checkpoint, layer), row.attention_norm, layer)]
    if row.mlp is not None:
        branches.append(_branch(checkpoint, _feed_forward(checkpoint, row.mlp, layer), row.mlp.norm, layer))
    return branches


def _branch(checkpoint: Checkpoint, inner: Attention | FeedForward, norm: str | None, layer: int) -> Branch:
    found, place = _norm(checkpoint, norm and norm.format(layer=layer)), checkpoint.architecture.norm_place
    return Branch(inner, before=found if place == "before" else None, after=found if place == "after" else None)


def _attention(checkpoint: Checkpoint, layer: int) -> Attention:
    found = checkpoint.attention(layer)
    wide: dict[str, Any] = {name: a.astype(np.float64) for name, a in vars(found).items() if isinstance(a, np.ndarray)}
    return replace(found, **wide)


def _feed_forward(checkpoint: Checkpoint, names: Mlp, layer: int) -> FeedForward:
    d, flip = checkpoint.sizes.d_model, checkpoint.architecture.stored == "out_in"
    up = _affine(checkpoint, names.up.format(layer=layer), (d, None), flip=flip)
    down = _affine(checkpoint, names.down.format(layer=layer), (up.weight.shape[1], d), flip=flip)
    name = checkpoint.config.get(names.activation)
    if name not in tuple(ACTIVATIONS):
        raise ArgumentError(
            f"read_weights: {names.activation} in config.json must be one of {', '.join(ACTIVATIONS)}, got {name!r}; "
            "the forward pass knows no other."
        )
    return FeedForward(up, down, ACTIVATIONS[name])


def _unembed(checkpoint: Checkpoint) -> Affine | None:
    names = checkpoint.architecture.unembed
    if not names:
        return None
    name = next((n for n in names if checkpoint.locate(f"{n}.weight")), names[-1])
    return _affine(checkpoint, name, (checkpoint.sizes.d_model, None), flip=True)


def _affine(checkpoint: Checkpoint, name: str, shape: Shape, *, flip: bool) -> Affine:
    """Read an affine map whose weight has `shape` (in, out), stored (out, in) if it is to be flipped."""
    weight = _tensor(checkpoint, f"{name}.weight", shape[::-1] if flip else shape)
    weight = weight.T if flip else weight
    bias = _tensor(checkpoint, f"{name}.bias", weight.shape[1:]) if checkpoint.locate(f"{name}.bias") else None
    return Affine(weight, bias)


def _norm(checkpoint: Checkpoint, name: str | None) -> Norm | None:
    if name is None:
        return None
    key = checkpoint.architecture.norm_eps
    eps = None if key is None else checkpoint.config.get(key)
    if not isinstance(eps, float) or not 0 < eps < 1:
        raise FileFormatError(f"read_weights: {key} in config.json must lie between 0 and 1, got {eps!r}; repair it.")
    names = next((n for n in _NORM_NAMES if checkpoint.locate(f"{name}.{n[0]}")), _NORM_NAMES[0])
    weight, bias = (_tensor(checkpoint, f"{name}.{n}", (checkpoint.sizes.d_model,)) for n in names)
    return Norm(weight, bias, eps)


def _tensor(checkpoint: Checkpoint, name: str, shape: Shape) -> Array:
    """Read a tensor in float64; None in `shape` stands for any size."""
    found = checkpoint.read(name)
    if len(found.shape) != len(shape) or any(n not in (None, m) for m, n in zip(found.shape, shape, strict=True)):
        wanted = ", ".join("any" if n is None else str(n) for n in shape)
        raise FileFormatError(
            f"read_weights: tensor {name!r} must have shape ({wanted}) by config.json, got {found.shape}; "
            "one of the two belongs to another model."
        )
    return found.astype(np.float64)
