"""Each head's QK and OV operator truncated as one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tnlib._typing import Array
from tnlib.linalg.batch import each
from tnlib.linalg.product import product_svd
from tnlib.linalg.rank import tails
from tnlib_adapters.checkpoints.factored import Piece
from tnlib_adapters.checkpoints.projections import Projections, Sizes
from tnlib_adapters.compression.allocate import Curve

PAIRS = (("q", "k"), ("v", "o"))


class Heads:
    """The products [W_Q; b_Q] [W_K; b_K]^T and [W_V; b_V] W_O of every head, by singular values.

    A truncated product is split evenly again, left sqrt(s) and sqrt(s) right, so that each side keeps a size
    like that of the weights it replaces. A rank of one costs what one of the d_head dimensions costs, so full
    rank is what the model had.
    """

    def __init__(self, projections: Projections, sizes: Sizes) -> None:
        self._operators = [
            each(product_svd, [_factors(projections, pair, head, sizes) for head in range(sizes.n_heads)])
            for pair in PAIRS
        ]
        self.curves = [_curve(one) for operators in self._operators for one in operators]
        self.fixed = projections.biases["o"].size if "o" in projections.biases else 0
        self._dtype = projections.weights["q"].dtype

    def pieces(self, choice: Sequence[int]) -> list[Piece]:
        """Return the factors with rank choice[k] for the k-th operator, all QK first."""
        count = len(choice) // len(PAIRS)
        ranks = [tuple(choice[:count]), tuple(choice[count:])]
        return [
            _piece("".join(pair), operators, chosen, self._dtype)
            for pair, operators, chosen in zip(PAIRS, self._operators, ranks, strict=True)
        ]


_SVD = tuple[Array, Array, Array]


def _factors(projections: Projections, pair: tuple[str, str], head: int, sizes: Sizes) -> tuple[Array, Array]:
    """Return the two factors of one head's operator, (d, d_head) and (d_head, d), in float64."""
    d_head = sizes.d_head
    columns = slice(head * d_head, (head + 1) * d_head)
    first, second = (_with_bias(projections, name, columns).astype(np.float64) for name in pair)  # d~ dh
    return first, second.T


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
    squares = tails(s) ** 2
    whole = squares[0] if squares[0] > 0 else 1.0
    return Curve(np.arange(len(s) + 1) * (len(u) + vh.shape[1]), squares / whole)


def _piece(of: str, operators: Sequence[_SVD], ranks: tuple[int, ...], dtype: np.dtype[Any]) -> Piece:
    left = [u[:, :r] * np.sqrt(s[:r]) for (u, s, _), r in zip(operators, ranks, strict=True)]
    right = [np.sqrt(s[:r])[:, None] * vh[:r] for (_, s, vh), r in zip(operators, ranks, strict=True)]
    arrays = {"left": np.concatenate(left, axis=1).astype(dtype), "right": np.concatenate(right).astype(dtype)}
    return Piece("heads", of, arrays, ranks)
