"""Attention scores by writer of the query and writer of the key, for all heads of a model on a text.

A score is bilinear in the stream once divisors are frozen, so it is an exact sum over pairs of writers. For a whole
head the pairs are summed over the text with the weights

    m_ij = (A_ij - 1 / |visible_i|) / n

the difference of the attention A and uniform attention over the visible keys: how much the score of the keys that are
attended to exceeds that of the average key. A term that is the same for all keys of a query, to which softmax is
invariant, adds nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from tnlib import ArgumentTypeError
from tnlib._html import heat_image
from tnlib._typing import Array
from tnlib._validate import as_count
from tnlib_adapters.attention.validation import as_index
from tnlib_adapters.checkpoints.checkpoint import Checkpoint, accepts_models
from tnlib_adapters.circuits.attribution.query_key_factors import (
    ScoreForm,
    query_key_factors,
    score_form,
    writer_names,
    writers_before_attention,
)
from tnlib_adapters.frozen.frozen_model import FrozenModel, freeze_weights
from tnlib_adapters.reference.weights import Weights, as_weights, read_weights
from tnlib_adapters.result_table import Columns, Table, descending

PairRow = tuple[str, str, float]  # writer of the query, writer of the key, contribution


@dataclass(frozen=True, eq=False, repr=False)
class PairAttribution(Table):
    """A score of a head, or a sum of scores, by writer of the query and writer of the key.

    Parameters
    ----------
    title
        Head and positions.
    names
        Writers of the stream: "tokens", "positions", heads "0.3", "0.bias", "mlp 0"; "bias" for biases of queries and
        keys and of the norm before them.
    pairs
        (writers, writers): contribution of a writer of the query with a writer of the key.
    offset
        What the distance adds: ALiBi or a relative bias.

    References
    ----------
    H. Kamath et al., "Tracing Attention Computation Through Feature Interactions" (2025).

    Examples
    --------
    >>> import tnlib_adapters
    >>> model = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path())
    >>> found = qk_attributions(model, [5, 6, 7, 8, 5, 6]).head(1, 2)
    >>> query, key, contribution = found.top(1)[0]
    >>> query, key, f"{contribution:.2f} of {found.total:.2f}"
    ('tokens', '0.3', '2.90 of 6.54')
    """

    title: str
    names: tuple[str, ...]
    pairs: Array
    offset: float

    _SHOWN = 6

    @property
    def total(self) -> float:
        """The score, which is the sum of all pairs and of the offset."""
        return float(self.pairs.sum()) + self.offset

    @property
    def _title(self) -> str:
        return f"{self.title}: {self.total:.3f}"

    def _columns(self, rows: Any) -> Columns:
        queries, keys, contributions = zip(*self.top(self.pairs.size)[rows], strict=True)
        return {"query": queries, "key": keys, "contribution": contributions}

    def _notes(self) -> list[str]:
        others = self.total - sum(value for *_, value in self.top(self._SHOWN))
        return [f"all others {others:.3f}" + (f", of them {self.offset:.3f} by the distance" if self.offset else "")]

    def _picture(self) -> str:
        return heat_image(self.pairs, "contributions; writers of the query as rows, of the key as columns", width=160)

    def top(self, count: int = 10) -> list[PairRow]:
        """Return the pairs of the largest modulus as rows (writer of the query, writer of the key, contribution)."""
        n = len(self.names)
        largest = descending(np.abs(self.pairs), as_count("PairAttribution.top", "count", count))
        return [(self.names[at // n], self.names[at % n], float(self.pairs.flat[at])) for at in largest]


@dataclass(frozen=True, eq=False, repr=False)
class ScoreAttribution(PairAttribution):
    """One score of a head by pairs of writers, and further by singular component of its form.

    Parameters
    ----------
    head
        (layer, head).
    query, key
        Positions.
    weight
        The attention weight of the model.
    form
        Bilinear form of the score at these positions.
    inputs
        (2, writers, d_model + 1): what the writers add to the input of the layer at the two positions, and the
        constant coordinate.

    References
    ----------
    H. Kamath et al., "Tracing Attention Computation Through Feature Interactions" (2025).

    Examples
    --------
    The second token 6 attends to token 7, which followed the first:

    >>> import tnlib_adapters
    >>> model = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path())
    >>> found = qk_attributions(model, [5, 6, 7, 8, 5, 6]).score(1, 2, query=5, key=2)
    >>> f"{found.total:.1f}", f"{found.weight:.3f}", found.components()[0].shape
    ('11.9', '0.999', (16, 8, 8))
    """

    head: tuple[int, int]
    query: int
    key: int
    weight: float
    form: ScoreForm
    inputs: Array

    def components(self) -> tuple[Array, Array]:
        r"""Return the pairs by singular component of the form, (components, writers, writers), and its singular values.

        The form is :math:`U S V^T` at these positions, with rotations, scale and divisors of norms of heads; a
        component is :math:`s_c \langle x_i, u_c \rangle \langle v_c, x_j \rangle`. The sum over components is `pairs`.
        """
        (q_basis, q), (k_basis, k) = (np.linalg.qr(side) for side in (self.form.query, self.form.key))
        u, s, vh = np.linalg.svd(self.form.scale * q @ k.T)
        left, right = self.inputs[0] @ q_basis @ u, self.inputs[1] @ k_basis @ vh.T  # writer [d~] c
        return np.einsum("pc,c,qc->cpq", left, s, right), s


@dataclass(frozen=True, eq=False)
class LayerPairs:
    """Attributions of the heads of one attention layer."""

    names: tuple[str, ...]  # writers of its input
    pairs: Array  # (heads, writers, writers), summed over the text
    offsets: Array  # (heads,): what ALiBi or a relative bias adds


@dataclass(frozen=True, eq=False, repr=False)
class QKAttributions(Table):
    """Scores of all heads on a text by writer of the query and writer of the key, returned by `qk_attributions`.

    Parameters
    ----------
    model
        The model on the text.
    layers
        One for every attention layer.

    References
    ----------
    H. Kamath et al., "Tracing Attention Computation Through Feature Interactions" (2025).

    Examples
    --------
    >>> import tnlib_adapters
    >>> model = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path())
    >>> found = qk_attributions(model, [5, 6, 7, 8, 5, 6])
    >>> head, query, key, contribution = found.top(1)[0]
    >>> head, query, key, f"{contribution:.2f}"
    ('1.1', '0.0', 'tokens', '2.99')
    """

    model: FrozenModel
    layers: tuple[LayerPairs, ...]

    _SHOWN = 10

    @property
    def _title(self) -> str:
        heads = sum(len(layer.pairs) for layer in self.layers)
        return f"QKAttributions of {heads} heads on {len(self.model.embedding)} tokens"

    @cached_property
    def _contributions(self) -> Array:
        """Contributions of all pairs of all heads, layer by layer."""
        return np.concatenate([layer.pairs.ravel() for layer in self.layers])

    def _columns(self, rows: Any) -> Columns:
        row = np.arange(len(self._contributions))[rows]
        names = np.array([name for layer in self.layers for name in layer.names], dtype=object)
        counts = np.array([len(layer.names) for layer in self.layers])
        ends = np.array([layer.pairs.size for layer in self.layers]).cumsum()
        number = np.searchsorted(ends, row, side="right")
        n, first_row, first_name = counts[number], np.append(0, ends)[number], np.append(0, counts.cumsum())[number]
        head, pair = np.divmod(row - first_row, n * n)
        query, key = np.divmod(pair, n)
        return {
            "layer": number,
            "head": head,
            "query": names[first_name + query],
            "key": names[first_name + key],
            "contribution": self._contributions[row],
        }

    def _printed(self) -> Array:
        return descending(np.abs(self._contributions), self._SHOWN)

    def _picture(self) -> str:
        totals = np.stack([layer.pairs.sum(axis=(1, 2)) + layer.offsets for layer in self.layers])  # layer head
        return heat_image(totals, "sums of all pairs and the offset; layers as rows, heads as columns", width=160)

    def top(self, count: int = 10) -> list[tuple[str, str, str, float]]:
        """Return the largest contributions as rows (head, writer of the query, writer of the key, contribution)."""
        largest = descending(np.abs(self._contributions), as_count("QKAttributions.top", "count", count))
        layer, head, query, key, value = self._columns(largest).values()
        return [(f"{a}.{b}", c, d, float(e)) for a, b, c, d, e in zip(layer, head, query, key, value, strict=True)]

    def head(self, layer: int, head: int) -> PairAttribution:
        """Return the contributions to the scores of a head, by which attended keys exceed the average visible key."""
        number, h, pairs = self._indices("head", layer, head)
        return PairAttribution(f"scores of head {number}.{h}", pairs.names, pairs.pairs[h], float(pairs.offsets[h]))

    def score(self, layer: int, head: int, query: int, key: int) -> ScoreAttribution:
        """Return one score, before a soft cap, by writers and singular components.

        Parameters
        ----------
        layer, head
            Indices, from 0.
        query, key
            Positions.

        Raises
        ------
        ArgumentError
            If there is no such head or position.
        """
        number, h, _ = self._indices("score", layer, head)
        i, j = (
            as_index("QKAttributions.score", name, at, len(self.model.embedding))
            for name, at in (("query", query), ("key", key))
        )
        heads, writers = next(itertools.islice(writers_before_attention(self.model), number, None))
        groups = (group.through(heads.before).at(np.array([i, j])) for group in writers)
        inputs = np.concatenate([group.outputs() for group in groups])  # writer 2 d
        names, (p, _, d) = writer_names(heads, writers), inputs.shape
        homogeneous = np.zeros((2, len(names), d + 1), inputs.dtype)
        homogeneous[:, :p, :d] = inputs.transpose(1, 0, 2)
        homogeneous[:, p:, d] = 1
        form = score_form(heads, h, i, j)
        queries, keys = homogeneous[0] @ form.query, homogeneous[1] @ form.key  # writer [d~] dh
        offsets = heads.layer.offsets(np.array([i - j]))
        return ScoreAttribution(
            title=f"score of head {number}.{h}, query {i}, key {j}",
            names=names,
            pairs=form.scale * queries @ keys.T,  # writer [dh] writer
            offset=0.0 if offsets is None else float(offsets[h, 0]),
            head=(number, h),
            query=i,
            key=j,
            weight=float(heads.patterns[h, i, j]),
            form=form,
            inputs=homogeneous,
        )

    def _indices(self, method: str, layer: int, head: int) -> tuple[int, int, LayerPairs]:
        number = as_index(f"QKAttributions.{method}", "layer", layer, len(self.layers))
        pairs = self.layers[number]
        return number, as_index(f"QKAttributions.{method}", "head", head, len(pairs.pairs)), pairs


@accepts_models
def qk_attributions(model: FrozenModel | Checkpoint | Weights, tokens: ArrayLike | None = None) -> QKAttributions:
    """Return the attention scores of all heads on a text as sums over writers of the query and writers of the key.

    Parameters
    ----------
    model
        A model on a text, from `freeze(model, tokens)`; or a checkpoint, a transformers model or loaded `Weights`, with
        `tokens`. Checkpoints and models are read in single precision.
    tokens
        (n,), integers, or a text: one sequence.

    Returns
    -------
    QKAttributions
        `head` for a whole head and `score` for one score; norms, rotary embeddings, biases, shared key heads, norms of
        heads and latent vectors are included. Scores are those before a soft cap.

    Raises
    ------
    ArgumentError
        If `tokens` are given with a frozen model, or are not one sequence that fits the model.

    References
    ----------
    H. Kamath et al., "Tracing Attention Computation Through Feature Interactions" (2025).

    Examples
    --------
    >>> import numpy as np, tnlib_adapters
    >>> model = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path())
    >>> tokens = np.tile(np.random.default_rng(0).permutation(128)[:20], 2)
    >>> found = qk_attributions(model, tokens)
    >>> found.head(1, 2).top(1)[0][:2]  # queries read tokens, keys the previous-token head
    ('tokens', '0.3')
    >>> score = found.score(1, 2, query=30, key=11)
    >>> components, singular_values = score.components()
    >>> bool(np.allclose(components.sum(axis=0), score.pairs, atol=1e-4))
    True
    """
    if isinstance(model, Checkpoint | Weights) and tokens is None:
        raise ArgumentTypeError("qk_attributions: tokens must be given with a model, got None; pass one sequence.")
    if isinstance(model, FrozenModel) and tokens is not None:
        raise ArgumentTypeError("qk_attributions: tokens must be None with a frozen model, got others; leave them out.")
    if not isinstance(model, FrozenModel):
        weights = read_weights(model, dtype=np.float32) if isinstance(model, Checkpoint) else model
        model = freeze_weights("qk_attributions", as_weights("qk_attributions", weights), tokens, "secant")
    return QKAttributions(model, tuple(_layer_pairs(model)))


def _layer_pairs(model: FrozenModel) -> Iterator[LayerPairs]:
    for heads, writers in writers_before_attention(model):
        names, positions = writer_names(heads, writers), np.arange(len(heads.input))
        visible = heads.layer.mask(len(positions)).astype(heads.patterns.dtype)
        weights = (heads.patterns - visible / visible.sum(axis=1, keepdims=True)) / len(positions)  # h n n
        pairs = np.empty((heads.layer.n_heads, len(names), len(names)), heads.input.dtype)
        for kv_head in range(heads.layer.kv_heads):
            queries, of_writers = query_key_factors(heads, writers, kv_head)
            for head, q in zip(heads.layer.query_heads(kv_head), queries, strict=True):
                keys = weights[head] @ of_writers  # writer n [n'] dh
                pairs[head] = q.reshape(len(q), -1) @ keys.reshape(len(q), -1).T  # writer [n dh] writer
        offsets = heads.layer.offsets(positions[:, None] - positions)  # h n n
        added = np.zeros(len(weights)) if offsets is None else (weights * offsets).sum(axis=(1, 2))
        yield LayerPairs(names, pairs, added)
