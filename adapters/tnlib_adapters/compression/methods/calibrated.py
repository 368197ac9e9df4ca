"""The weights of one layer's attention as far as a text needs them, the output of the layer fitted again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from tnlib._typing import Array
from tnlib_adapters.compression.allocate import Curve
from tnlib_adapters.compression.calibration.moments import Moments
from tnlib_adapters.compression.methods.components import Components, components
from tnlib_adapters.factors.attention_factors import Piece
from tnlib_adapters.factors.interpolative import pack
from tnlib_adapters.factors.products import Products
from tnlib_adapters.factors.projections import NAMES, Projections, Sizes


class CalibratedLayer:
    """W_Q, W_K, W_V and W_O, each with as many of its components as are chosen, without what the gauge frees.

    All heads of a weight share its components, which is why they may be queries and keys that rotary embeddings turn,
    or norms divide, before they meet. Biases are rows of their weights, but for those that `fold_biases` has made 0.
    """

    fixed = 0

    def __init__(self, folded: Projections, moments: Moments) -> None:
        self._weights = {name: with_bias_row(folded, name) for name in NAMES}
        self._biased, self._output_bias = frozenset(folded.biases), folded.biases.get("o")
        self._dtype = folded.weights["q"].dtype
        self.components: Mapping[str, Components] = {
            name: components(weight, moments.reads(name, len(weight)), moments.slopes[name])
            for name, weight in self._weights.items()
        }

    def weigh(self, losses: Mapping[str, Array]) -> None:
        """Take the loss by every component, from gates, in the place of squared singular values."""
        self.components = {name: one.weighed(losses[name]) for name, one in self.components.items()}

    @property
    def curves(self) -> list[Curve]:
        """What every weight costs and loses by its components, and whole."""
        return [self._curve(name) for name in NAMES]

    def pieces(self, choice: Sequence[int]) -> list[Piece]:
        """Return the factors with choice[k] components of the k-th projection; the last option is the whole of it."""
        return self.packed(self.products(choice))

    def products(self, choice: Sequence[int]) -> Products:
        """Return the same as matrices to be multiplied."""
        factors = {}
        for name, rank, curve in zip(NAMES, choice, self.curves, strict=True):
            whole = rank == len(curve.costs) - 1
            factors[name] = (self._weights[name],) if whole else self.components[name].first(rank)
        return Products(factors, self._biased, self._output_bias)

    def packed(self, products: Products) -> list[Piece]:
        """Return the pieces that hold products of these shapes."""
        return [self._piece(name, products.factors[name], products.output_bias) for name in NAMES]

    def _piece(self, name: str, factors: Sequence[Array], output_bias: Array | None) -> Piece:
        bias = {"bias": output_bias} if name == "o" and output_bias is not None else {}
        if len(factors) == 2:
            left, right, rows = pack(*(one.astype(np.float64) for one in factors))
            arrays = {"left": left, "right": right} | bias
            held = name if name in self._biased else ""
            return Piece("interpolative", name, self._cast(arrays), rows=rows, biases=held)
        (whole,) = factors
        if name in self._biased and name != "o":
            n_in = self._n_in(name)
            bias = {"bias": whole[n_in] if len(whole) > n_in else np.zeros(whole.shape[1])}
            whole = whole[:n_in]
        return Piece("dense", name, self._cast({"weight": whole} | bias))

    def _cast(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        return {part: a.astype(self._dtype) for part, a in arrays.items()}

    def _curve(self, name: str) -> Curve:
        m, n = self._n_in(name), self._weights[name].shape[1]
        whole = m * n + (n if name in self._biased and name != "o" else 0)
        curve = self.components[name].curve(whole, gauged=True)
        return curve if name != "o" or self._output_bias is None else Curve(curve.costs + n, curve.errors)

    def _n_in(self, name: str) -> int:
        return len(self._weights["o"]) if name == "o" else self._weights["o"].shape[1]


class UntouchedLayer:
    """The attention of a layer that stays as it is, and that no budget counts."""

    curves: Sequence[Curve] = ()
    fixed = 0

    def pieces(self, choice: Sequence[int]) -> list[Piece]:
        """Return no factors."""
        return []

    def products(self, choice: Sequence[int]) -> Products:
        """Return no matrices."""
        return Products({})

    def packed(self, products: Products) -> list[Piece]:
        """Return no factors."""
        return []


def with_bias_row(folded: Projections, name: str) -> Array:
    """Return a weight with its bias as a last row where that is not 0; the output bias stays apart."""
    weight, bias = folded.weights[name], folded.biases.get(name)
    if name == "o" or bias is None or not np.any(bias):
        return weight
    return np.concatenate([weight, bias[None]])


def fold_biases(projections: Projections, sizes: Sizes, *, keys: bool) -> Projections:
    """Return projections with b_K = 0 if `keys`, and, where the layer has an output bias, b_V in it.

    Softmax does not see a constant that b_K adds to all scores of a query, and the rows of a pattern sum to 1.
    """
    biases = dict(projections.biases)
    if keys and "k" in biases:
        biases["k"] = np.zeros_like(biases["k"])
    if "v" in biases and "o" in biases:
        by_head = np.repeat(biases["v"].reshape(sizes.kv_heads, -1), sizes.n_heads // sizes.kv_heads, axis=0)
        added = by_head.ravel().astype(np.float64) @ projections.weights["o"]
        biases["o"] = (biases["o"] + added).astype(biases["o"].dtype)
        biases["v"] = np.zeros_like(biases["v"])
    return Projections(projections.weights, biases)
