r"""One attention layer whose pattern is not fixed, and what it makes of a stream in parts.

Scores are bilinear and split exactly, a term for every pair of parts, one on the side of the query and one on that of
the key; what the layer writes is linear in the values and splits by part. Softmax is not additive: what a term of the
scores is worth is the change when it is taken out and the pattern computed anew. With softmax replaced by the identity
on the positions that are seen, the same change is the term itself, and all terms add up.
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
    """An attention layer that reads a stream in parts, patterns computed from what is there.

    The first part carries the constant coordinate: biases of queries, keys and values count as its own, and so does
    ALiBi where both sides are the first part. The output bias belongs to no term.

    Parameters
    ----------
    attention
        The layer.
    parts
        What it reads, (parts, n, d_model), see `split_stream`.
    softmax
        False: weights are the scores themselves, without a soft cap, 0 where a position is not seen.

    Raises
    ------
    ArgumentError
        If queries and keys are normalised, which makes scores other than bilinear, or the widths differ.

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
                "pass attention.numerator(), which leaves the two divisions out."
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
        """Return the scores (heads, n, n) that some parts in the queries and some in the keys make of each other.

        Scale and positions included, before a soft cap. None stands for all parts.
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
        """Return the term of every pair of parts, (query parts, key parts, heads, n, n); they sum to the scores."""
        names = self.parts.names
        return np.stack([np.stack([self.scores([a], [b]) for b in names]) for a in names])

    def pattern(self, scores: Array | None = None) -> Array:
        """Return the weights (heads, n, n) for scores (heads, n, n), by default those of all parts."""
        s = self.scores() if scores is None else self._of_heads("pattern", "scores", scores)
        seen = self.attention.mask(s.shape[-1])
        if not self.softmax:
            return np.where(seen, s, 0)
        cap = self.attention.softcap
        return softmax(np.where(seen, s if cap is None else cap * np.tanh(s / cap), -np.inf))

    def output(self, value: Names = None, *, pattern: Array | None = None) -> Array:
        """Return what each head writes of some parts in the values, (heads, n, d_model), by default of all.

        This is V-composition: under one pattern the outputs of all parts add up.
        """
        v = self._sides[2][self.parts.index("OpenLayer.output", value)].sum(axis=0)
        a = self.pattern() if pattern is None else self._of_heads("output", "pattern", pattern)
        return np.asarray(a @ v @ self.attention.W_O)  # h n [n'] [dh] d

    def removed(self, query: Names = None, key: Names = None, value: Names = None) -> Array:
        """Return how the heads' outputs change by a term of the scores, (heads, n, d_model).

        What they write with all scores, less what they write when those between `query` and `key` are taken out and
        patterns computed anew, in both cases of the parts `value`. None stands for all parts.
        """
        scores = self.scores()
        change = self.pattern(scores) - self.pattern(scores - self.scores(query, key))
        return self.output(value, pattern=change)

    def _of_heads(self, method: str, parameter: str, given: Array) -> Array:
        a = as_array(f"OpenLayer.{method}", parameter, given)
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
    """Return what every part of the stream is worth to every head by Q-, K- or V-composition, in some directions.

    Parameters
    ----------
    layer
        A layer on a stream in parts.
    kind
        "Q" and "K": the part is taken out of the queries or keys and patterns computed anew. "V": out of the values.
    directions
        (d_model,) or (directions, d_model), of the output: for example columns of the unembedding.
    position
        Where the output is read.

    Returns
    -------
    tuple
        Names of the parts, and (directions, parts, heads), without the first leg where one direction was given.

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
        one = layer.output([name]) if kind == "V" else layer.removed(**{"query" if kind == "Q" else "key": [name]})
        effects.append(one[:, position] @ np.atleast_2d(w).T)  # h [d] k
    found = np.moveaxis(np.stack(effects), 2, 0)  # k part h
    return layer.parts.names, found if w.ndim == 2 else found[0]


def _project(parts: Array, weight: Array, bias: Array | None) -> Array:
    """Return (part, h, n, dh); the first part carries the bias."""
    out: Array = parts[:, None] @ weight  # part h n [d] dh
    if bias is not None:
        out[0] += bias[:, None]
    return out
