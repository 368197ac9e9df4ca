r"""Decomposition of attention by parts of the input stream, with patterns recomputed: one layer, and two in ten terms.

Scores are bilinear: they split exactly into one term per pair of parts, query side and key side. The output is linear
in the values and splits by part. Softmax is not additive, so the effect of a score term is the change of the output
when the term is removed and the pattern recomputed. With softmax replaced by the identity on the unmasked positions,
this change is the term itself, and all terms add up. A path integral of the softmax attributes the pattern to the terms
of the scores so that they add up with softmax, see `softmax_attributions`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike

from tnlib import ArgumentError, ArgumentTypeError
from tnlib._typing import Array
from tnlib._validate import as_array, as_flag, as_position, check_choice, is_list, is_one_of
from tnlib_adapters.attention.attention import Attention
from tnlib_adapters.attention.softmax import soft_capped
from tnlib_adapters.attention.validation import as_index
from tnlib_adapters.checkpoints.checkpoint import Checkpoint, accepts_models
from tnlib_adapters.circuits.arguments import Kind, as_directions, check_self_attention
from tnlib_adapters.circuits.paths.softmax_integral import SoftmaxAttributions, softmax_attributions
from tnlib_adapters.circuits.paths.stream_parts import StreamParts, normed_parts, split_before
from tnlib_adapters.frozen.frozen_heads import FrozenNorm
from tnlib_adapters.reference.weights import Weights, as_weights

LARGEST_TERMS = 2**31  # bytes of all score terms
Names = Sequence[str] | None
Method = Literal["ablation", "path_integral"]
NAMES = ("direct", "first", "second", "Q", "K", "V", "QK", "QV", "KV", "QKV")


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
    >>> layer.pattern()[:, 30, 11].round(2)  # what followed the same token the first time
    array([0.8 , 0.99, 0.87, 0.01])
    >>> keys = layer.scores(key=["0.3"])  # what keys hold from the previous-token head
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
        check_self_attention("OpenLayer", [layer])
        d = parts.arrays.shape[2]
        if not layer.is_bilinear:
            raise ArgumentError(
                "OpenLayer: attention must have scores that are bilinear, got normalised queries and keys or latent "
                "vectors; pass attention.numerator(), which omits the divisions."
            )
        if d != layer.d_model:
            raise ArgumentError(
                f"OpenLayer: parts must have {layer.d_model} features, got {d}; split the stream of the same model."
            )

    @functools.cached_property
    def _sides(self) -> tuple[Array, Array, Array]:
        """Queries, keys and values of every part, (h, part, n, dh) each; the first part carries the biases."""
        layer, x = self.attention, self.parts.arrays[None]  # 1 part n d
        constant = np.zeros((x.shape[1], 1, 1), x.dtype)
        constant[0] = 1
        positions = np.arange(x.shape[2])
        return (
            layer.queries(x, positions, constant),
            layer.keys(x, positions, constant),
            layer.values(x, constant),
        )

    def __repr__(self) -> str:
        return f"OpenLayer({self.attention!r} on {self.parts!r})"

    def scores(self, query: Names = None, key: Names = None) -> Array:
        """Return the scores (heads, n, n) of some query parts with some key parts.

        Scale and positions are included, a soft cap is not. None stands for all parts.
        """
        q, k, _ = self._sides
        some_q, some_k = (self.parts.index("OpenLayer.scores", names) for names in (query, key))
        positions = np.arange(q.shape[2])
        distances = positions[:, None] - positions if 0 in some_q and 0 in some_k else None
        return self.attention.bilinear_scores(q[:, some_q].sum(axis=1), k[:, some_k].sum(axis=1), distances)

    def score_terms(self, *, head: int | None = None, query: int | None = None) -> Array:
        """Return the score terms of all pairs of parts, (query parts, key parts, heads, n, n); sum: the scores.

        With `head`, of this head alone, one in place of heads; with `query`, of this position alone, one in place of
        the first n. ArgumentError is raised if they take more than 2 GiB.
        """
        heads, queries = self._chosen("OpenLayer.score_terms", head, query)
        q, k, _ = self._sides
        q, k = q[heads][:, :, queries], self.attention.repeated(k)[heads]  # h part m dh, h part n dh
        keys = self.attention.scale * k.transpose(1, 0, 3, 2)  # part h dh n
        terms = np.empty((q.shape[1], len(keys), len(heads), len(queries), k.shape[2]), q.dtype)
        for part, out in enumerate(terms):
            np.matmul(q[:, part], keys, out=out)  # part' h m [dh] n
        offsets = self.attention.offsets(queries[:, None] - np.arange(k.shape[2]))
        if offsets is not None:
            terms[0, 0] += offsets[heads]
        return terms

    def _chosen(self, function: str, head: int | None, query: int | None) -> tuple[Array, Array]:
        """Return the heads and the query positions, all for None, whose terms fit into memory."""
        n_parts, n, _ = self.parts.arrays.shape
        heads, queries = (
            np.arange(size) if at is None else np.array([as_position(function, name, at, size, several)])
            for name, at, size, several in (
                ("head", head, self.attention.n_heads, "heads"),
                ("query", query, n, "positions"),
            )
        )
        n_bytes = 8 * n_parts**2 * len(heads) * len(queries) * n
        if n_bytes > LARGEST_TERMS:
            raise ArgumentError(
                f"{function}: terms must take at most {LARGEST_TERMS / 2**30:.0f} GiB, got {n_bytes / 2**30:.1f} GiB "
                f"for {n_parts} parts; pass head and query, or merge parts by StreamParts.merge."
            )
        return heads, queries

    def pattern(self, scores: Array | None = None) -> Array:
        """Return the attention weights (heads, n, n) for scores (heads, n, n), by default those of all parts."""
        s = self.scores() if scores is None else self._of_heads("pattern", "scores", scores)
        if not self.softmax:
            return np.where(self.attention.mask(s.shape[-1]), s, 0)
        return self.attention.patterns_of(soft_capped(s, self.attention.softcap))

    def output(self, value: Names = None, *, pattern: Array | None = None) -> Array:
        """Return the outputs of the heads for some value parts, (heads, n, d_model), by default for all.

        This is V-composition: for a fixed pattern the outputs of the parts add up.
        """
        v = self._sides[2][:, self.parts.index("OpenLayer.output", value)].sum(axis=1)
        a = self.pattern() if pattern is None else self._of_heads("output", "pattern", pattern)
        return self.attention.head_outputs(a, v)

    def pattern_terms(
        self, *, head: int | None = None, query: int | None = None, rtol: float = 1e-10
    ) -> SoftmaxAttributions:
        """Return the pattern as uniform attention plus one term per pair of parts, by a path integral of the softmax.

        The `terms` (query parts * key parts, heads, n, n) are in the order of `score_terms`, query part first, and
        restricted by `head` and `query` in the same way. Memory grows with the square of the number of parts: merge
        parts by `StreamParts.merge` in models of many heads.

        Examples
        --------
        >>> import tnlib_adapters
        >>> from tnlib_adapters.circuits import split_stream
        >>> model = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path())
        >>> layer = OpenLayer(model.attention(1), split_stream(model, [5, 6, 7, 5, 6], layer=1))
        >>> found = layer.pattern_terms()
        >>> total = found.baseline + found.terms.sum(axis=0)
        >>> found.terms.shape, bool(np.allclose(total, layer.pattern(), atol=1e-9))
        ((36, 4, 5, 5), True)
        """
        if not self.softmax:
            raise ArgumentError(
                "OpenLayer.pattern_terms: softmax must be True, because scores are the pattern without it, got False; "
                "use score_terms."
            )
        _, queries = self._chosen("OpenLayer.pattern_terms", head, query)
        scores = self.score_terms(head=head, query=query)
        terms = scores.reshape(-1, *scores.shape[2:])  # pair h m n
        visible = self.attention.mask(terms.shape[-1])[queries]
        return softmax_attributions(terms, visible, softcap=self.attention.softcap, rtol=rtol)

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

    References
    ----------
    N. Elhage et al., "A Mathematical Framework for Transformer Circuits" (2021).

    Examples
    --------
    >>> import tnlib_adapters
    >>> from tnlib_adapters.circuits import split_stream
    >>> model = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path())
    >>> layer = OpenLayer(model.attention(1), split_stream(model, [5, 6, 7, 5, 6], layer=1))
    >>> names, found = pair_effects(layer, "K", model.read("unembed.weight")[7])
    >>> names[found.sum(axis=1).argmax()]
    '0.3'
    """
    check_choice("pair_effects", "kind", kind, get_args(Kind))
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


@dataclass(frozen=True, eq=False, repr=False)
class TenTerms:
    """Ten terms of two attention layers of a model, and the softmax remainder.

    Parameters
    ----------
    names
        Without composition "direct" (the stream without both layers), "first" (the first layer alone) and "second" (the
        second layer alone). "Q", "K", "V": the second layer reads the first through one side; "QK", "QV", "KV", "QKV":
        through two or all sides.
    arrays
        (10, n, d_model). The direct term includes the biases of the output of the second layer.
    by_head
        (8, heads, n, d_model): the last eight terms, by head of the second layer.
    by_pair
        (3, writers, heads, n, d_model): "Q", "K" and "V" by pairs of an output of the first layer and a head of the
        second. With softmax replaced by the identity, or by the path integral, the sum over writers is the term. By
        ablation this holds for "V"; in "Q" and "K" an entry is the change on removal of that pair alone.
    writers
        Names of the outputs of the first layer: its heads, and its biases if it has any.
    remainder
        (n, d_model): the stream after the second layer minus all ten terms. Zero to roundoff if softmax is replaced by
        the identity, and the error of the quadrature for the path integral.

    Examples
    --------
    >>> import tnlib_adapters
    >>> model = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path())
    >>> found = ten_terms(model, [5, 6, 7, 8, 5, 6])
    >>> logits = found.arrays[:, -1] @ model.read("unembed.weight")[7]  # 7 followed 6
    >>> found.names[logits.argmax()], f"{logits.max():.1f}"
    ('K', '2.7')
    """

    names: tuple[str, ...]
    arrays: Array
    by_head: Array
    by_pair: Array
    writers: tuple[str, ...]
    remainder: Array

    def __repr__(self) -> str:
        n, d = self.remainder.shape
        lengths = zip(("remainder", *self.names), map(np.linalg.norm, (self.remainder, *self.arrays)), strict=True)
        norms = ", ".join(f"{name} {length:.3g}" for name, length in lengths)
        return f"TenTerms({n} positions x {d} features; norms: {norms})"

    def __getitem__(self, name: str) -> Array:
        if not is_one_of(name, self.names):
            raise ArgumentError(f"TenTerms: name must be one of {', '.join(self.names)}, got {name!r}; choose one.")
        array: Array = self.arrays[self.names.index(name)]
        return array


@accepts_models
def ten_terms(
    model: Checkpoint | Weights,
    tokens: ArrayLike,
    *,
    layers: tuple[int, int] = (0, 1),
    softmax: bool = True,
    method: Method = "ablation",
) -> TenTerms:
    """Decompose the stream after an attention layer into ten terms of this layer and an earlier one.

    The stream that the second layer reads is the output of the first layer plus the rest: the embedding, and what all
    other layers before the second write. Queries, keys and values of the second layer read one or the other: eight
    terms, one per choice for scores and values. The pattern of the first layer and the divisors of all norms are
    frozen.

    Parameters
    ----------
    model
        A checkpoint, a transformers model or loaded `Weights`, with one residual stream.
    tokens
        (n,), integers, or a text: one sequence.
    layers
        Two attention layers, the earlier one first. Effects of the first through layers between them belong to the
        rest.
    softmax
        If False, the attention weights of the second layer are its scores, and the ten terms sum to the output.
    method
        "ablation": under softmax a term is the change when its part of the scores is removed and the pattern
        recomputed, so the ten terms leave a remainder. "path_integral": a term is the part of the pattern that an
        integral of the softmax attributes to its part of the scores (`softmax_attributions`), and the ten terms sum to
        the output; uniform attention, the pattern of zero scores, is part of "second", and of "V" for values of the
        first layer.

    Returns
    -------
    TenTerms
        With the remainder the terms sum to the stream before the second layer plus what this layer writes. This is the
        final stream of a model of two attention layers without norms.

    Raises
    ------
    ArgumentError
        If `layers` are not two attention layers in their order, or the second one normalises queries and keys.

    References
    ----------
    N. Elhage et al., "A Mathematical Framework for Transformer Circuits" (2021); M. Sundararajan et al., "Axiomatic
    Attribution for Deep Networks" (2017).

    Examples
    --------
    >>> import tnlib_adapters
    >>> llama = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path("llama"))
    >>> found = ten_terms(llama, [5, 6, 7, 8, 5, 6], layers=(1, 3), method="path_integral")
    >>> f"{abs(found.remainder).max():.4f}"
    '0.0000'
    """
    check_choice("ten_terms", "method", method, get_args(Method))
    weights = as_weights("ten_terms", model)
    first, second = _as_two_layers(layers, weights.n_attention_layers)
    branch: Any
    branch, stream = split_before("ten_terms", weights, tokens, second)
    parts = normed_parts(branch.before, stream, second)
    writers = [name for name in stream if name.startswith(f"{first}.")]
    rest = [name for name in parts.names if name not in writers]
    merged = parts.merge({"rest": rest} | {name: [name] for name in writers})
    layer = OpenLayer(branch.layer, merged, softmax=softmax)
    term = _integrated(layer) if softmax and method == "path_integral" else functools.partial(composed, layer)
    by_head = np.stack([term(letters, writers) for letters in ("", *NAMES[3:])])
    by_pair = np.stack([[term(letter, [writer]) for writer in writers] for letter in "QKV"])
    bias = np.zeros(by_head.shape[2:]) + (0 if layer.attention.b_O is None else layer.attention.b_O)
    written = layer.output().sum(axis=0) + bias
    if branch.behind is not None:
        norm = FrozenNorm.on(branch.behind, written)
        written, bias = norm.apply(written), norm.apply(bias)
        by_head, by_pair = norm.linear(by_head), norm.linear(by_pair)
    of_first = np.sum([stream[name] for name in writers], axis=0)
    total = np.sum([*stream.values()], axis=0)
    arrays = np.concatenate([[total - of_first + bias, of_first], by_head.sum(axis=1)])
    return TenTerms(NAMES, arrays, by_head, by_pair, tuple(writers), total + written - arrays.sum(axis=0))


def _as_two_layers(layers: Any, n_layers: int) -> tuple[int, int]:
    """Return the indices of two attention layers, the earlier one first."""
    if not is_list(layers) or len(layers) != 2:
        raise ArgumentTypeError(f"ten_terms: layers must be two indices, got {layers!r:.80}; pass for example (0, 1).")
    first, second = (as_index("ten_terms", "layers", layer, n_layers) for layer in layers)
    if first >= second:
        raise ArgumentError(
            f"ten_terms: layers must be an earlier and a later one, got {first} and {second}; exchange them."
        )
    return first, second


def composed(layer: OpenLayer, letters: str, writers: Sequence[str]) -> Array:
    """Return head outputs (heads, n, d_model) if the sides in `letters` read `writers`, the others the rest."""
    rest = layer.parts.names[:1]
    return layer.removed(*(writers if letter in letters else rest for letter in "QKV"))


def _integrated(layer: OpenLayer) -> Callable[[str, Sequence[str]], Array]:
    """Return a function as `composed` is, with the path integral of the softmax in place of ablation.

    Uniform attention belongs to the terms in which neither queries nor keys read the writers.
    """
    attributions, n_parts = layer.pattern_terms(), len(layer.parts.names)
    terms = attributions.terms.reshape(n_parts, n_parts, *attributions.baseline.shape)  # query part, key part, h n n

    def _term(letters: str, writers: Sequence[str]) -> Array:
        query, key, value = (list(writers) if letter in letters else [layer.parts.names[0]] for letter in "QKV")
        rows, columns = (layer.parts.index("ten_terms", names) for names in (query, key))
        pattern = terms[np.ix_(rows, columns)].sum(axis=(0, 1))
        uniform = attributions.baseline if "Q" not in letters and "K" not in letters else 0
        return layer.output(value, pattern=pattern + uniform)

    return _term
