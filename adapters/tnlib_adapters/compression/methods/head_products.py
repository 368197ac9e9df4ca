"""Each head's QK and OV operator truncated as one, with the shared factor of heads that share keys and values."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tnlib._typing import Array
from tnlib.linalg.thin_svd import product_svd
from tnlib.linalg.truncation import tail_norms
from tnlib_adapters.compression.allocate import Curve
from tnlib_adapters.compression.methods.matrices import Matrices
from tnlib_adapters.compression.methods.parallel_map import parallel_map
from tnlib_adapters.factors.attention_factors import Piece
from tnlib_adapters.factors.projections import Projections, Sizes

PAIRS = (("q", "k"), ("v", "o"))


class Heads:
    """The products [W_Q; b_Q] [W_K; b_K]^T and [W_V; b_V] W_O of every head, by singular values.

    Query heads that share a key and value head are one product: the queries one below the other times the key, and the
    value times the outputs side by side, so that the shared factor stays shared. A truncated product is split evenly
    again, left sqrt(s) and sqrt(s) right, so that each side keeps a size like that of the weights it replaces. A rank
    of one costs what one of the d_head dimensions costs, so full rank is what the model had.
    """

    def __init__(self, projections: Projections, sizes: Sizes, pairs: Sequence[tuple[str, str]] = PAIRS) -> None:
        self._pairs, self._n_heads = pairs, sizes.n_heads // sizes.kv_heads
        self._operators = [
            parallel_map(product_svd, [_factors(projections, pair, group, sizes) for group in range(sizes.kv_heads)])
            for pair in pairs
        ]
        self.curves = [_curve(one) for operators in self._operators for one in operators]
        self.fixed = projections.biases["o"].size if "o" in projections.biases else 0
        self._dtype = projections.weights["q"].dtype

    def pieces(self, choice: Sequence[int]) -> list[Piece]:
        """Return the factors with rank choice[k] for the k-th operator, all of the first pair first."""
        count = len(choice) // len(self._pairs)
        ranks = [tuple(choice[k * count : (k + 1) * count]) for k in range(len(self._pairs))]
        return [
            self._piece("".join(pair), operators, chosen)
            for pair, operators, chosen in zip(self._pairs, self._operators, ranks, strict=True)
        ]

    def _piece(self, of: str, operators: Sequence[_SVD], ranks: tuple[int, ...]) -> Piece:
        lefts, rights = [], []
        for (u, s, vh), r in zip(operators, ranks, strict=True):
            root = np.sqrt(s[:r])
            # queries have their group on the left, outputs on the right
            lefts += np.split(u[:, :r] * root, self._n_heads if of[0] == "q" else 1, axis=0)
            rights += np.split(root[:, None] * vh[:r], self._n_heads if of[1] == "o" else 1, axis=1)
        arrays = {
            "left": np.concatenate(lefts, axis=1).astype(self._dtype),
            "right": np.concatenate(rights).astype(self._dtype),
        }
        return Piece("heads", of, arrays, ranks)


class ValueHeads:
    """The products [W_V; b_V] W_O of every head by singular values, W_Q and W_K as matrices.

    For models in which queries and keys are no one product: rotary embeddings turn them before they meet, by every
    distance differently, so that a basis in which the product at one distance is short is none at the others; and norms
    divide them.
    """

    def __init__(self, projections: Projections, sizes: Sizes) -> None:
        self._matrices = Matrices(projections, sizes, of="qk")
        self._heads = Heads(projections, sizes, PAIRS[1:])
        self.curves = [*self._matrices.curves, *self._heads.curves]
        self.fixed = self._matrices.fixed + self._heads.fixed

    def pieces(self, choice: Sequence[int]) -> list[Piece]:
        """Return the factors at one option of W_Q, of W_K, and of every key and value head."""
        count = len(self._matrices.curves)
        return [*self._matrices.pieces(choice[:count]), *self._heads.pieces(choice[count:])]


_SVD = tuple[Array, Array, Array]


def _factors(projections: Projections, pair: tuple[str, str], group: int, sizes: Sizes) -> tuple[Array, Array]:
    """Return the two factors of the operators that share a key and value head, in float64.

    For QK (heads * d, d_head) and (d_head, d), for OV (d, d_head) and (d_head, heads * d).
    """
    first, second = (
        np.concatenate([_with_bias(projections, name, columns) for columns in _columns(name, group, sizes)])
        for name in pair
    )
    return first.astype(np.float64), second.astype(np.float64).T


def _columns(name: str, group: int, sizes: Sizes) -> list[slice]:
    """Return where the heads of a projection that share a key and value head lie in the inner dimension."""
    count = sizes.n_heads // sizes.kv_heads if name in "qo" else 1
    heads = range(group * count, (group + 1) * count)
    return [slice(head * sizes.d_head, (head + 1) * sizes.d_head) for head in heads]


def _with_bias(projections: Projections, name: str, columns: slice) -> Array:
    """Return one head's part of a projection, (d_model, d_head), with its bias, if it has one, as the last row."""
    weight = projections.weights[name]
    if name == "o":  # the output bias belongs to the layer, not to a head
        return weight[columns].T
    bias = projections.biases.get(name)
    part = weight[:, columns]
    return part if bias is None else np.concatenate([part, bias[None, columns]])


def _curve(operator: _SVD) -> Curve:
    u, s, vh = operator
    squares = tail_norms(s) ** 2
    whole = squares[0] if squares[0] > 0 else 1.0
    return Curve(np.arange(len(s) + 1) * (len(u) + vh.shape[1]), squares / whole)
