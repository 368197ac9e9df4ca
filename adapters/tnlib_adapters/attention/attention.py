"""`Attention`, one attention layer as QK and OV operators, biases included."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from tnlib import ArgumentError, KroneckerTerms, LowRank, Tucker
from tnlib._typing import Array
from tnlib_adapters.attention.attention_weights import AttentionWeights
from tnlib_adapters.attention.frozen_attention import FrozenAttention, as_divisors, as_patterns
from tnlib_adapters.attention.layer_arguments import module_arguments
from tnlib_adapters.attention.query_key import PositionParts, form, forms, position_parts
from tnlib_adapters.attention.validation import as_distances, as_index


@dataclass(frozen=True, eq=False, repr=False)
class Attention(AttentionWeights):
    r"""The weights of one attention layer, per head, acting on rows: :math:`q = x W_Q + b_Q`.

    In homogeneous coordinates :math:`\tilde x = [x, 1]` every head is two bilinear forms without biases: its scores are

    .. math:: \mathtt{scale} \cdot \tilde x{}_i \Omega \tilde x{}_j^T

    with :math:`\Omega = [W_Q; b_Q] R(i - j) [W_K; b_K]^T`, and its values :math:`\tilde x{}_j \mathrm{OV}` with
    :math:`\mathrm{OV} = [W_V; b_V] [W_O, 0]`.

    R rotates the planes of a head by the distance for rotary embeddings, and is the identity otherwise.

    Parameters
    ----------
    W_Q
        (heads, d_model, d_head).
    W_K, W_V
        (kv_heads, d_model, d_head); kv_heads divides heads, head h reads key head h // (heads / kv_heads). W_V may have
        another width, d_value.
    W_O
        (heads, d_value, d_model).
    scale
        Factor of the scores, never folded into an operator.
    b_Q
        (heads, d_head), None where absent.
    b_K, b_V
        (kv_heads, d_head), None where absent.
    b_O
        (d_model,), None where absent.
    rotary
        Rotary embeddings of queries and keys, or None.
    alibi
        (heads,), ALiBi slopes: a score falls by slope * distance. None without ALiBi.
    relative_bias
        Bias of the scores by binned distance, or None.
    head_norm
        Norm of each head's queries and keys, or None.
    latent_norm
        Norm of the latent vectors from which queries, keys and values are made, or None.
    softcap
        Soft cap c: a score s becomes :math:`c \tanh(s / c)`. None for no cap.
    causal
        Whether a position attends only to itself and earlier positions.
    window
        Attention window in positions, the query's own included; None if unlimited.
    context
        Largest number of positions; None if unlimited.
    cross
        Whether this is cross-attention: keys and values read another sequence, `memory`, than the queries. Then there
        is no mask, and the form of the scores is one of positions of both.

    Raises
    ------
    ArgumentError
        If a shape contradicts W_Q, or a window, context or soft cap is not positive.

    References
    ----------
    A. Vaswani et al., "Attention Is All You Need" (2017); N. Elhage et al., "A Mathematical Framework for Transformer
    Circuits" (2021), for QK and OV circuits.

    Examples
    --------
    >>> import tnlib_adapters
    >>> layer = tnlib_adapters.open_checkpoint(tnlib_adapters.builtin_path()).attention(0)
    >>> layer.qk(0)
    LowRank(shape 65 x 65, ranks (16,), 2,080 parameters, float32)
    """

    @classmethod
    def from_module(cls, model: Any, layer: int, *, length: int | None = None) -> Attention:
        """Return one attention layer of a loaded transformers model.

        Parameters
        ----------
        model
            Model of a supported architecture, with or without a task head; its weights are copied to the CPU, half
            precision as float32.
        layer
            Index, from 0.
        length
            Sequence length, for rotary embeddings that depend on it.

        Raises
        ------
        ArgumentError
            If a parameter is missing, has no data or an unexpected shape, or there is no such layer.
        FileFormatError
            If the architecture or the variant is not supported.

        Examples
        --------
        ::

            model = transformers.AutoModelForCausalLM.from_pretrained(folder)
            Attention.from_module(model, 0).qk(3, distance=1)
        """
        return cls(**module_arguments(model, layer, length))

    def qk(self, head: int, distance: int | None = None, *, plane: int | None = None) -> LowRank:
        r"""Return Omega (d_model + 1, d_model + 1) of a head at one distance, biases included.

        The score of positions i and j is :math:`\mathtt{scale} \cdot \tilde x{}_i \Omega \tilde x{}_j^T` with
        :math:`\tilde x = [x, 1]`, before a soft cap. The rank is at most d_head, d_head + 1 with ALiBi or a relative
        bias.

        Parameters
        ----------
        head
            Index of the query head, from 0.
        distance
            Query position minus key position. Required if `depends_on_distance`.
        plane
            Index of a frequency of the rotary embeddings: return the part of its plane only, of rank at most 2.

        Raises
        ------
        ArgumentError
            If there is no such head or plane, the distance is missing or outside the context, or queries and keys are
            normalised (scores are then not bilinear, see `numerator`).

        Examples
        --------
        >>> from tnlib_adapters import Rotary
        >>> rng = np.random.default_rng(0)
        >>> w = rng.standard_normal((4, 1, 6, 4))
        >>> rotary = Rotary([1.0, 0.1])
        >>> layer = Attention(*w[:3], w[3].transpose(0, 2, 1), scale=0.5, rotary=rotary)
        >>> layer.qk(0, distance=3).ranks, layer.qk(0, distance=3, plane=1).ranks
        ((4,), (2,))
        """
        return self._form("qk", head, distance, plane)

    def qk_tensor(self, head: int, distances: ArrayLike, *, plane: int | None = None) -> Tucker:
        r"""Return Omega at many distances as one array (distances, d_model + 1, d_model + 1), in exact Tucker form.

        Nothing of size :math:`d_\mathrm{model}^2` is formed. The multilinear rank is at most d_head in the two modes of
        the stream. In the mode of distances it is, for rotary embeddings, at most the number of rotated columns, plus 1
        if some columns are not rotated. ALiBi and relative biases give d_head + 1 and 2; otherwise all distances are
        equal.

        Parameters
        ----------
        head
            Index of the query head, from 0.
        distances
            (distances,), integers: query position minus key position.
        plane
            Index of a frequency of the rotary embeddings: the part of its plane only, of multilinear rank (2, 2, 2).

        Raises
        ------
        ArgumentError
            As for `qk`.

        Examples
        --------
        >>> from tnlib_adapters import Rotary
        >>> rng = np.random.default_rng(0)
        >>> w = rng.standard_normal((4, 1, 6, 4))
        >>> layer = Attention(*w[:3], w[3].transpose(0, 2, 1), scale=0.5, rotary=Rotary([1.0]))
        >>> layer.qk_tensor(0, range(50))  # two of four columns turn
        Tucker(shape 50 x 7 x 7, ranks (3, 4, 4), 254 parameters, float64)
        """
        q, k = self._query_key("qk_tensor", head)
        checked = as_distances("Attention.qk_tensor", "distances", distances, self.context)
        plane = self._plane("qk_tensor", plane)
        return forms(q, k, checked, rotary=self.rotary, offsets=self._offsets(head, checked), plane=plane)

    def qk_group(self, kv_head: int, distance: int | None = None) -> LowRank:
        """Return Omega of all query heads with a common key head, stacked as rows.

        Shape (group * (d_model + 1), d_model + 1), rank at most d_head, d_head + 1 as for `qk`. The keys are a common
        factor, so one truncated SVD gives the best keys for all these queries.
        """
        heads = [self._form("qk_group", head, distance) for head in self._group("qk_group", kv_head)]
        return LowRank(np.concatenate([head.left for head in heads]), heads[0].right)

    def ov_group(self, kv_head: int) -> LowRank:
        """Return OV of all query heads with a common value head, side by side.

        Shape (d_model + 1, group * (d_model + 1)), rank at most d_head: the values are a common factor.
        """
        heads = [self.ov(head) for head in self._group("ov_group", kv_head)]
        return LowRank(heads[0].left, np.concatenate([head.right for head in heads], axis=1))

    def qk_positions(self, head: int, positions: Array) -> PositionParts:
        """Split Omega of a head by learned positions into content and position parts.

        Parameters
        ----------
        head
            Index of the query head, from 0.
        positions
            (n, d_model), the position embeddings in the stream: `Checkpoint.positions()` for the first layer.

        Returns
        -------
        PositionParts
            Four forms of rank at most d_head that sum to the scores.

        Raises
        ------
        ArgumentError
            If scores depend on the distance, or `positions` has the wrong shape.
        """
        if self.depends_on_distance:
            by = "rotary embeddings" if self.rotary else "ALiBi" if self.relative_bias is None else "a relative bias"
            raise ArgumentError(
                "Attention.qk_positions: positions must be part of the stream, but this layer knows the distance "
                f"({by}); use qk with a distance, or qk_tensor."
            )
        return position_parts(self._form("qk_positions", head), self._input("qk_positions", positions, "positions"))

    def numerator(self) -> Attention:
        """Return the layer without norms of queries and keys or of latent vectors, with their weights folded in.

        Its scores are the bilinear part of the model's scores: these times the root mean squares of query and key, each
        over its head. With latent vectors, divide queries by the root mean square of theirs, and values and unrotated
        columns of keys by that of theirs (`latent_norm`). The layer itself if there is no such norm.
        """
        if self.latent_norm is not None:
            return replace(self, latent_norm=None).numerator()
        if self.head_norm is None:
            return self
        by_query, by_key = self.head_norm.query, self.head_norm.key
        return replace(
            self,
            W_Q=self.W_Q * by_query,
            W_K=self.W_K * by_key,
            b_Q=None if self.b_Q is None else self.b_Q * by_query,
            b_K=None if self.b_K is None else self.b_K * by_key,
            head_norm=None,
        )

    def ov(self, head: int) -> LowRank:
        r"""Return OV (d_model + 1, d_model + 1) of a head, rank at most d_head, value bias included.

        :math:`\tilde x \mathrm{OV}` is the output of the head for a position that attends to x alone. The last column
        is zero: no head writes the homogeneous coordinate. The output bias belongs to the layer, not to a head.

        Raises
        ------
        ArgumentError
            If there is no such head, or values are made from normalised latent vectors (see `numerator`).
        """
        h, v = self._head("ov", head)
        if self.latent_norm is not None:
            raise ArgumentError(
                "Attention.ov: values must be linear in the stream, but are made from normalised latent vectors here; "
                "use numerator(), which leaves the divisions out."
            )
        left = self.with_bias("V", v)  # d~ dh
        right = np.concatenate([self.W_O[h], np.zeros_like(self.W_O[h][:, :1])], axis=1)  # dh d~
        return LowRank(left, right)

    def frozen(self, patterns: Array, *, divisors: Array | None = None) -> FrozenAttention:
        r"""Return the layer as an affine map of the whole sequence, with frozen patterns.

        Parameters
        ----------
        patterns
            (heads, n, n'), attention weights of output position i on input position j; rows need not sum to one.
        divisors
            (n',), divisors of the preceding norm at each position (see `norm_divisors`). With them frozen as well, the
            map acts on the residual stream instead of the output of the norm; the rest of the norm must be folded into
            the weights (see `fold`). Required where values are made from normalised latent vectors, then times
            `value_divisors`.

        Returns
        -------
        FrozenAttention
            `terms` with right factors held as `LowRank`, and the `constant` of the biases: row i of it is
            :math:`\sum_h (\sum_j A^h_{ij}) b_V^h W_O^h + b_O`.

        Raises
        ------
        ArgumentError
            If there is not one matrix per head, the context is exceeded, a divisor is not positive, or divisors are
            missing where values are made from normalised latent vectors.
        """
        if self.latent_norm is not None and divisors is None:
            raise ArgumentError(
                "Attention.frozen: divisors must be given, because values are made from normalised latent vectors, got "
                "None; pass value_divisors(x)."
            )
        patterns = as_patterns("frozen", patterns, self.n_heads)
        if self.context is not None and max(patterns.shape[1:]) > self.context:
            raise ArgumentError(
                f"Attention.frozen: patterns must be of at most {self.context} positions, as many as the model was "
                f"made for, got {patterns.shape}; shorten them."
            )
        dtype = np.result_type(patterns, self.W_V, self.W_O)  # of the products of heads
        values, out = (w.astype(dtype, copy=False) for w in (self.W_V, self.W_O))
        right = [LowRank(out[h].T, values[self.kv_head(h)].T) for h in range(self.n_heads)]  # d [dh] d
        constant = np.zeros((patterns.shape[1], self.d_model), dtype)
        if self.b_V is not None:
            for a, b, w in zip(patterns, self.repeated(self.b_V), out, strict=True):
                constant += np.outer(a.sum(axis=1), b.astype(dtype) @ w)  # n [n'], [dh] d
        if self.b_O is not None:
            constant += self.b_O
        weights = patterns if divisors is None else patterns / as_divisors("frozen", divisors, patterns.shape[2])
        return FrozenAttention(KroneckerTerms(weights, tuple(right)), constant)

    def stacked(self) -> Array:
        """Return all weights as one array (projection, head, d_model, d_head), projections in the order Q, K, V, O.

        Shared key and value heads are repeated; W_O is transposed. Raises `ArgumentError` if values have another width
        than queries and keys.
        """
        if self.d_value != self.d_head:
            raise ArgumentError(
                f"Attention.stacked: values must be as wide as queries and keys, got {self.d_value} and {self.d_head}; "
                "stack W_Q with W_K, and W_V with W_O."
            )
        return np.stack([self.W_Q, self.repeated(self.W_K), self.repeated(self.W_V), self.W_O.transpose(0, 2, 1)])

    def _head(self, method: str, head: int) -> tuple[int, int]:
        """Return the indices of the query head and of its key head."""
        head = as_index(f"Attention.{method}", "head", head, self.n_heads)
        return head, self.kv_head(head)

    def _group(self, method: str, kv_head: int) -> range:
        """Return the query heads of a key head."""
        return self.query_heads(as_index(f"Attention.{method}", "kv_head", kv_head, self.kv_heads))

    def _form(self, method: str, head: int, distance: int | None = None, plane: int | None = None) -> LowRank:
        q, k = self._query_key(method, head)
        checked = self.distance(f"Attention.{method}", distance)
        offsets = self._offsets(head, np.array([checked]))
        offset = None if offsets is None else float(offsets[0])
        return form(q, k, checked, rotary=self.rotary, offset=offset, plane=self._plane(method, plane))

    def _query_key(self, method: str, head: int) -> tuple[Array, Array]:
        """Return [W_Q; b_Q] and [W_K; b_K] of a head."""
        q, k = self._head(method, head)
        if not self.is_bilinear:
            normalised = "queries and keys" if self.latent_norm is None else "latent vectors"
            raise ArgumentError(
                f"Attention.{method}: scores of this layer are no bilinear form, because its {normalised} are "
                "normalised; use numerator(), which leaves the divisions out."
            )
        return self.with_bias("Q", q), self.with_bias("K", k)  # d~ dh

    def _offsets(self, head: int, distances: Array) -> Array | None:
        """Return what is added to the scores of a head at distances, divided by the score scale."""
        offsets = self.offsets(distances)
        return None if offsets is None else offsets[head].astype(np.float64) / self.scale

    def _plane(self, method: str, plane: int | None) -> int | None:
        if plane is None:
            return None
        if self.rotary is None:
            raise ArgumentError(
                f"Attention.{method}: plane must be None without rotary embeddings, got {plane!r}; leave it out."
            )
        return as_index(f"Attention.{method}", "plane", plane, len(self.rotary.frequencies))
