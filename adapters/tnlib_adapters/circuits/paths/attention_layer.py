r"""Decomposition of one attention layer by parts of its input stream, with patterns recomputed.

Scores are bilinear: they split exactly into one term per pair of parts, query side and key side. The output is linear
in the values and splits by part. Softmax is not additive, so the effect of a score term is the change of the output
when the term is removed and the pattern recomputed. With softmax replaced by the identity on the unmasked positions,
this change is the term itself, and all terms add up.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tnlib import ArgumentError, ArgumentTypeError
from tnlib._typing import Array
from tnlib._validate import as_array, as_flag
from tnlib_adapters.attention.attention import Attention
from tnlib_adapters.attention.indices import as_index
from tnlib_adapters.circuits.arguments import Kind, as_kind
from tnlib_adapters.circuits.paths.stream_parts import StreamParts
from tnlib_adapters.circuits.tokens.targets import as_directions
from tnlib_adapters.reference.layers import softmax

Names = Sequence[str] | None


@dataclass(frozen=True, eq=False, repr=False)
class OpenLayer:
    """An attention layer on a stream in parts, with patterns computed from the parts.

    The first part carries the constant coordinate: it includes the biases of queries, keys and values, and ALiBi where
    both sides are the first part. The output bias belongs to no term.

    Parameters
    ----------
    attention
        The layer.
    parts
        Its input, (parts, n, d_model), see `split_stream`.
    softmax
        If False, the weights are the scores, without a soft cap, and 0 at masked positions.

    Raises
    ------
    ArgumentError
        If queries and keys are normalised (scores are then not bilinear), or the widths differ.

    Examples
    --------
    >>> import numpy as np, tnlib_adapters
    >>> from tnlib_adapters.circuits import split_stream
    >>> model = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path())
    >>> tokens = np.tile(np.random.default_rng(0).permutation(128)[:20], 2)
    >>> layer = OpenLayer(model.attention(1), split_stream(model, tokens, layer=1))
    >>> layer.pattern()[:, 30, 11].round(2)                       # what followed the same token the first time
    array([0.8 , 0.99, 0.87, 0.01])
    >>> keys = layer.scores(key=["0.3"])                          # what keys hold from the previous-token head
    >>> layer.pattern(layer.scores() - keys)[:, 30, 11].round(2)
    array([0.01, 0.17, 0.  , 0.  ])
    """

    attention: Attention
    parts: StreamParts
    softmax: bool = True

    def __post_init__(self) -> None:
        layer, parts = self.attention, self.parts
        object.__setattr__(self, "softmax", as_flag("OpenLayer", "softmax", self.softmax))
        if not isinstance(layer, Attention) or not isinstance(parts, StreamParts):
            raise ArgumentTypeError(
                f"OpenLayer: attention and parts must be an Attention and StreamParts, got {type(layer).__name__} and "
                f"{type(parts).__name__}; pass checkpoint.attention(1) and split_stream(checkpoint, tokens, layer=1)."
            )
        d = parts.arrays.shape[2]
        if layer.head_norm is not None:
            raise ArgumentError(
                "OpenLayer: attention must have scores that are bilinear, got normalised queries and keys; "
                "pass attention.numerator(), which omits the two divisions."
            )
        if d != layer.d_model:
            raise ArgumentError(
                f"OpenLayer: parts must have {layer.d_model} features, got {d}; split the stream of the same model."
            )

    @functools.cached_property
    def _sides(self) -> tuple[Array, Array, Array]:
        """Queries, keys and values of every part, (part, h, n, dh) each."""
        layer, x = self.attention, self.parts.arrays
        group = layer.n_heads // layer.kv_heads
        q = _project(x, layer.W_Q, layer.b_Q)
        k, v = (
            np.repeat(_project(x, w, b), group, axis=1) for w, b in ((layer.W_K, layer.b_K), (layer.W_V, layer.b_V))
        )
        if layer.rotary is not None:
            q, k = (layer.rotary.rotate(columns, np.arange(q.shape[2])) for columns in (q, k))
        return q, k, v

    def __repr__(self) -> str:
        return f"OpenLayer({self.attention!r} on {self.parts!r})"

    def scores(self, query: Names = None, key: Names = None) -> Array:
        """Return the scores (heads, n, n) of some query parts with some key parts.

        Scale and positions are included, a soft cap is not. None stands for all parts.
        """
        q, k, _ = self._sides
        some_q, some_k = (self.parts.index("OpenLayer.scores", names) for names in (query, key))
        left, right = q[some_q].sum(axis=0), k[some_k].sum(axis=0)
        scores: Array = self.attention.scale * (left @ right.transpose(0, 2, 1))  # h n [dh] n
        if self.attention.alibi is not None and 0 in some_q and 0 in some_k:
            positions = np.arange(scores.shape[1])
            scores = scores - self.attention.alibi[:, None, None] * (positions[:, None] - positions)
        return scores

    def score_terms(self) -> Array:
        """Return the score terms of all pairs of parts, (query parts, key parts, heads, n, n); sum: the scores."""
        names = self.parts.names
        return np.stack([np.stack([self.scores([a], [b]) for b in names]) for a in names])

    def pattern(self, scores: Array | None = None) -> Array:
        """Return the attention weights (heads, n, n) for scores (heads, n, n), by default those of all parts."""
        s = self.scores() if scores is None else self._of_heads("pattern", "scores", scores)
        visible = self.attention.mask(s.shape[-1])
        if not self.softmax:
            return np.where(visible, s, 0)
        cap = self.attention.softcap
        return softmax(np.where(visible, s if cap is None else cap * np.tanh(s / cap), -np.inf))

    def output(self, value: Names = None, *, pattern: Array | None = None) -> Array:
        """Return the outputs of the heads for some value parts, (heads, n, d_model), by default for all.

        This is V-composition: for a fixed pattern the outputs of the parts add up.
        """
        v = self._sides[2][self.parts.index("OpenLayer.output", value)].sum(axis=0)
        a = self.pattern() if pattern is None else self._of_heads("output", "pattern", pattern)
        return np.asarray(a @ v @ self.attention.W_O)  # h n [n'] [dh] d

    def removed(self, query: Names = None, key: Names = None, value: Names = None) -> Array:
        """Return the change of the head outputs due to a score term, (heads, n, d_model).

        The output with all scores minus the output without the scores between `query` and `key`, patterns recomputed,
        both for the value parts `value`. None stands for all parts.
        """
        scores = self.scores()
        change = self.pattern(scores) - self.pattern(scores - self.scores(query, key))
        return self.output(value, pattern=change)

    def _of_heads(self, method: str, parameter: str, matrices: Array) -> Array:
        a = as_array(f"OpenLayer.{method}", parameter, matrices)
        n = self.parts.arrays.shape[1]
        if a.shape != (self.attention.n_heads, n, n):
            raise ArgumentError(
                f"OpenLayer.{method}: {parameter} must have shape (heads, n, n) = "
                f"({self.attention.n_heads}, {n}, {n}), got {a.shape}; pass one matrix per head."
            )
        return a


def pair_effects(
    layer: OpenLayer, kind: Kind, directions: Array, *, position: int = -1
) -> tuple[tuple[str, ...], Array]:
    """Return the effect of every part of the stream on every head by Q-, K- or V-composition, in some directions.

    Parameters
    ----------
    layer
        Attention layer on a stream in parts.
    kind
        "Q", "K": the part is removed from the queries or keys and patterns are recomputed. "V": from the values.
    directions
        (d_model,) or (directions, d_model), in output space, for example columns of the unembedding.
    position
        Output position.

    Returns
    -------
    tuple
        Names of the parts, and (directions, parts, heads), without the first axis for a single direction.

    Examples
    --------
    >>> import tnlib_adapters
    >>> from tnlib_adapters.circuits import split_stream
    >>> model = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path())
    >>> layer = OpenLayer(model.attention(1), split_stream(model, [5, 6, 7, 8, 5, 6], layer=1))
    >>> names, found = pair_effects(layer, "K", model.read("unembed.weight")[7])
    >>> names[found.sum(axis=1).argmax()]
    '0.3'
    """
    as_kind("pair_effects", kind)
    if not isinstance(layer, OpenLayer):
        raise ArgumentTypeError(
            f"pair_effects: layer must be an OpenLayer, got {type(layer).__name__}; pass OpenLayer(attention, parts)."
        )
    _, n, d = layer.parts.arrays.shape
    w = as_directions("pair_effects", directions, d)
    position = as_index("pair_effects", "position", position, n)
    effects = []
    for name in layer.parts.names:
        outputs = layer.output([name]) if kind == "V" else layer.removed(**{"query" if kind == "Q" else "key": [name]})
        effects.append(outputs[:, position] @ np.atleast_2d(w).T)  # h [d] k
    by_direction = np.moveaxis(np.stack(effects), 2, 0)  # k part h
    return layer.parts.names, by_direction if w.ndim == 2 else by_direction[0]


def _project(parts: Array, weight: Array, bias: Array | None) -> Array:
    """Return (part, h, n, dh); the first part carries the bias."""
    out: Array = parts[:, None] @ weight  # part h n [d] dh
    if bias is not None:
        out[0] += bias[:, None]
    return out
