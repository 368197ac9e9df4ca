"""Residual-stream decomposition of one sequence into named parts: embedding, heads, biases, feed-forward layers.

Attention layers split exactly by head with their patterns frozen. Nonlinear layers are not split: a feed-forward layer
is one part. A norm is linear once its divisors are frozen: it applies to every part, and its bias is a separate part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from tnlib import ArgumentError, ArgumentTypeError
from tnlib._typing import Array
from tnlib._validate import is_list
from tnlib_adapters.attention.attention import Attention
from tnlib_adapters.attention.validation import as_index
from tnlib_adapters.checkpoints.checkpoint import Checkpoint, accepts_models
from tnlib_adapters.reference.layers import Norm, normed
from tnlib_adapters.reference.weights import Branch, Weights, as_weights, named_blocks


@dataclass(frozen=True, eq=False, repr=False)
class StreamParts:
    """Residual-stream decomposition: a stream (n, d_model) as a sum of named parts, returned by `split_stream`.

    Parameters
    ----------
    names
        "embedding"; "0.3" for head 3 of layer 0; "0.bias" for the output bias of that attention layer; "mlp 0" for the
        following feed-forward layer. Biases of norms: "norm 0" or "norm mlp 0" before one of these layers, "norm behind
        ..." on its output, "norm after ..." on the stream after it, "norm final" at the end.
    arrays
        (parts, n, d_model).

    References
    ----------
    N. Elhage et al., "A Mathematical Framework for Transformer Circuits" (2021).

    Examples
    --------
    >>> import numpy as np, tnlib_adapters
    >>> model = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path())
    >>> found = split_stream(model, [5, 6, 7, 5], layer=1)
    >>> merged = found.merge({"embedding": ["embedding"], "layer 0": found.names[1:]})
    >>> merged.arrays.shape, bool(np.allclose(merged.total, found.total))
    ((2, 4, 64), True)
    """

    names: tuple[str, ...]
    arrays: Array

    def __repr__(self) -> str:
        _, n, d = self.arrays.shape
        names = self.names if len(self.names) < 12 else (*self.names[:5], "...", *self.names[-2:])
        return f"StreamParts({n} positions x {d} features: {', '.join(names)})"

    def __getitem__(self, name: str) -> Array:
        array: Array = self.arrays[self.index("StreamParts", [name])[0]]
        return array

    @property
    def total(self) -> Array:
        """The sum of all parts, (n, d_model)."""
        return np.asarray(self.arrays.sum(axis=0))

    def merge(self, groups: Mapping[str, Sequence[str]]) -> StreamParts:
        """Return fewer parts, each the sum of a group; every part must be in exactly one group.

        Raises
        ------
        ArgumentError
            If a name is unknown, missing, or in two groups.
        """
        if not isinstance(groups, Mapping):
            raise ArgumentTypeError(
                f"StreamParts.merge: groups must be a dict from names to lists of parts, got {type(groups).__name__}; "
                "pass for example {'layer 0': ['0.0', '0.1', '0.bias'], ...}."
            )
        listed = [name for names in groups.values() for name in _as_names("StreamParts.merge", names)]
        if sorted(listed) != sorted(self.names):
            off = sorted(set(listed) ^ set(self.names)) or sorted({name for name in listed if listed.count(name) > 1})
            raise ArgumentError(
                f"StreamParts.merge: groups must hold each of the {len(self.names)} parts once, got {', '.join(off)} "
                "missing, twice or not known; compare with names."
            )
        sums = [self.arrays[self.index("StreamParts.merge", names)].sum(axis=0) for names in groups.values()]
        return StreamParts(tuple(groups), np.stack(sums))

    def index(self, function: str, names: Sequence[str] | None) -> list[int]:
        """Return the indices of parts by name, all indices for None."""
        if names is None:
            return list(range(len(self.names)))
        for name in _as_names(function, names):
            if name not in self.names:
                raise ArgumentError(
                    f"{function}: part must be one of {', '.join(self.names)}, got {name!r}; "
                    "heads are called layer.head."
                )
        return [self.names.index(name) for name in names]


def _as_names(function: str, names: Any) -> Sequence[str]:
    if not is_list(names) or not all(isinstance(name, str) for name in names):
        raise ArgumentTypeError(
            f"{function}: parts must be a list of names, got {names!r:.80}; heads are called layer.head, "
            "pass for example ['embedding', '0.3']."
        )
    return names  # type: ignore[no-any-return]


@accepts_models
def split_stream(model: Checkpoint | Weights, tokens: ArrayLike, layer: int | None = None) -> StreamParts:
    """Return the input of an attention layer as a sum of the outputs before it, patterns and norm divisors frozen.

    Parameters
    ----------
    model
        A checkpoint or transformers model, whose weights are loaded, or loaded `Weights`.
    tokens
        (n,), integers, or a text: one sequence. One image if the model reads images.
    layer
        Index of the attention layer; its input is taken after its norm, if any. None: the final stream, after the final
        norm, if any.

    Returns
    -------
    StreamParts
        Its `total` is `run(model, tokens).inputs[layer][0]`, or `.hidden[0]`, to roundoff.

    Raises
    ------
    ArgumentError
        If there is no such layer, or `tokens` holds more than one sequence.

    References
    ----------
    N. Elhage et al., "A Mathematical Framework for Transformer Circuits" (2021).

    Examples
    --------
    >>> import tnlib_adapters
    >>> model = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path())
    >>> split_stream(model, [5, 6, 7, 5], layer=1)
    StreamParts(4 positions x 64 features: embedding, 0.0, 0.1, 0.2, 0.3, 0.bias)
    """
    weights = as_weights("split_stream", model)
    index = None if layer is None else as_index("split_stream", "layer", layer, weights.n_attention_layers)
    branch, parts = split_before("split_stream", weights, tokens, index)
    return normed_parts(weights.final_norm if branch is None else branch.before, parts, index)


def split_before(
    function: str, weights: Weights, tokens: Any, layer: int | None
) -> tuple[Branch | None, dict[str, Array]]:
    """Return an attention layer with its norms, and the parts of the stream before both; None for the final stream."""
    parts = {"embedding": weights.embedding(weights.one_sequence(function, tokens))[0]}  # n d
    for block, names in named_blocks(weights.blocks):
        added: dict[str, Array] = {}
        for name, branch in zip(names, block.branches, strict=True):
            if name == str(layer):
                return branch, parts
            added |= _written(branch, parts, name)
        parts = _through(block.after, parts | added, f"norm after {names[-1]}")
    return None, parts


def normed_parts(norm: Norm | None, parts: dict[str, Array], layer: int | None) -> StreamParts:
    """Return the parts behind the norm before a layer, None for the final norm, with the divisors of their sum."""
    behind = _through(norm, parts, f"norm {'final' if layer is None else layer}")
    return StreamParts(tuple(behind), np.stack(list(behind.values())))


def _written(branch: Branch, parts: dict[str, Array], name: str) -> dict[str, Array]:
    """Return the output of a layer as parts: one per head and one for the output bias, or a single one."""
    inputs = normed(branch.before, np.sum(list(parts.values()), axis=0))
    if isinstance(branch.layer, Attention):
        return _through(branch.behind, _heads(branch.layer, inputs, name), f"norm behind {name}")
    return {name: normed(branch.behind, branch.layer(inputs))}


def _heads(layer: Attention, x: Array, name: str) -> dict[str, Array]:
    values = layer.weighted_values(layer.patterns_of(layer.scores(x)), x)  # h n dh
    parts = {f"{name}.{h}": v @ w for h, (v, w) in enumerate(zip(values, layer.W_O, strict=True))}  # n [dh] d
    if layer.b_O is not None:
        parts[f"{name}.bias"] = np.tile(layer.b_O, (len(x), 1))
    return parts


def _through(norm: Norm | None, parts: dict[str, Array], name: str) -> dict[str, Array]:
    """Apply a norm to every part, with the divisors of their sum; its bias is the part `name`."""
    return parts if norm is None else norm.of_sum(parts, name)
