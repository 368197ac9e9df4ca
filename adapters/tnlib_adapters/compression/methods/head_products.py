"""Each head's QK and OV operator truncated as one product, with the factor that grouped heads share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tnlib._typing import Array
from tnlib.linalg.thin_svd import product_svd
from tnlib.linalg.threads import run_parallel, single_threaded_blas, split_range, thread_count
from tnlib.linalg.truncation import tail_norms
from tnlib_adapters.checkpoints.checkpoint import Checkpoint
from tnlib_adapters.compression.allocate import Curve
from tnlib_adapters.compression.methods.decompositions import TruncatedSVD, factorise_projections
from tnlib_adapters.factors.factored_matrix import FactoredMatrix
from tnlib_adapters.factors.projections import Projections, Sizes

PAIRS = (("q", "k"), ("v", "o"))
_SVD = tuple[Array, Array, Array]


class Heads:
    """Truncated SVD of the products [W_Q; b_Q] [W_K; b_K]^T and [W_V; b_V] W_O of every head.

    Query heads that share a key and value head are one product: the stacked queries times the key, and the value times
    the concatenated outputs, so that the shared factor stays shared. A truncated product is split evenly into
    left sqrt(s) and sqrt(s) right, so that both factors are about as large as the weights they replace. One rank costs
    as many numbers as one of the d_head dimensions: full rank has the size of the source.
    """

    def __init__(self, projections: Projections, sizes: Sizes, pairs: Sequence[tuple[str, str]] = PAIRS) -> None:
        self._pairs, self._n_heads = pairs, sizes.group_size
        self._operators = [
            _product_svds([_factors(projections, pair, group, sizes) for group in range(sizes.kv_heads)])
            for pair in pairs
        ]
        self.curves = [_curve(operator) for operators in self._operators for operator in operators]
        self.fixed = projections.biases["o"].size if "o" in projections.biases else 0
        self._dtype = projections.weights["q"].dtype

    def matrices(self, choice: Sequence[int]) -> list[FactoredMatrix]:
        """Return the factors with rank choice[k] for the k-th operator, all of the first pair first."""
        count = len(choice) // len(self._pairs)
        ranks = [tuple(choice[k * count : (k + 1) * count]) for k in range(len(self._pairs))]
        return [
            self._factored("".join(pair), operators, chosen)
            for pair, operators, chosen in zip(self._pairs, self._operators, ranks, strict=True)
        ]

    def _factored(self, of: str, operators: Sequence[_SVD], ranks: tuple[int, ...]) -> FactoredMatrix:
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
        return FactoredMatrix("heads", of, arrays, ranks)


class ValueHeads:
    """Truncated SVD of the products [W_V; b_V] W_O of every head, and of W_Q and W_K as matrices.

    For models with rotary embeddings, whose QK operator depends on the distance so that no basis truncates it at all
    distances, and for models that normalise queries and keys.
    """

    def __init__(self, projections: Projections, sizes: Sizes) -> None:
        self._matrices = factorise_projections(projections, TruncatedSVD, "qk")
        self._heads = Heads(projections, sizes, PAIRS[1:])
        self.curves = [*self._matrices.curves, *self._heads.curves]
        self.fixed = self._matrices.fixed + self._heads.fixed

    def matrices(self, choice: Sequence[int]) -> list[FactoredMatrix]:
        """Return the factors for one option of W_Q, of W_K, and of every key and value head."""
        count = len(self._matrices.curves)
        return [*self._matrices.matrices(choice[:count]), *self._heads.matrices(choice[count:])]


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
    """Return the inner columns of the heads of a projection that share a key and value head."""
    count = sizes.group_size if name in "qo" else 1
    heads = range(group * count, (group + 1) * count)
    width = sizes.of_head(name)
    return [slice(head * width, (head + 1) * width) for head in heads]


def _with_bias(projections: Projections, name: str, columns: slice) -> Array:
    """Return one head's part of a projection, (d_model, d_head), with its bias, if any, as the last row."""
    weight = projections.weights[name]
    if name == "o":  # the output bias belongs to the layer, not to a head
        return weight[columns].T
    bias = projections.biases.get(name)
    part = weight[:, columns]
    return part if bias is None else np.concatenate([part, bias[None, columns]])


def _curve(operator: _SVD) -> Curve:
    u, s, vh = operator
    squares = tail_norms(s) ** 2
    total = squares[0] if squares[0] > 0 else 1.0
    return Curve(np.arange(len(s) + 1) * (len(u) + vh.shape[1]), squares / total)


def has_rotary_or_norms(checkpoint: Checkpoint) -> bool:
    """Return True if anything but a product acts between queries and keys: rotary embeddings, or norms."""
    attention = checkpoint.wiring.layers[0].attention
    return attention.frequencies(None, "compress") is not None or bool(attention.head_norms)


@single_threaded_blas
def _product_svds(factors: Sequence[tuple[Array, Array]]) -> list[_SVD]:
    """Return the SVD of every product, in parallel.

    Several threads of BLAS do not speed up the factorization of a small matrix, and often slow it down; several
    factorizations in parallel are faster.
    """
    results: list[Any] = [None] * len(factors)

    def work(first: int, last: int) -> None:
        for k in range(first, last):
            results[k] = product_svd(*factors[k])

    run_parallel(work, split_range(len(factors), thread_count()))
    return results
