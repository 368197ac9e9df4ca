"""Truncated decompositions: of one weight, SVD and TT-matrix; of a layer, Tucker and CP, or the products of heads."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np

import tnlib
from tnlib._typing import Array
from tnlib.linalg.thin_svd import product_svd
from tnlib.linalg.threads import run_parallel, single_threaded_blas, split_range, thread_count
from tnlib.linalg.truncation import tail_norms
from tnlib_adapters.checkpoints.checkpoint import Checkpoint
from tnlib_adapters.compression.allocate import Curve
from tnlib_adapters.compression.methods.components import components
from tnlib_adapters.compression.methods.factorisation import Factorised, ModuleWeights, WeightOptions
from tnlib_adapters.compression.methods.method_table import Method, resolve
from tnlib_adapters.factors.factored_matrix import FactoredMatrix, whole_part
from tnlib_adapters.factors.projections import NAMES, Projections, Sizes, stack

PAIRS = (("q", "k"), ("v", "o"))
_STACKED = "qkvo"  # projections (projection, key head, d_model, d_head)
_CANDIDATES = 128  # ranks considered per leg of the stack
_SWEEPS = 20  # of alternating least squares; more reduce the error of a trained layer by less than 1 %
_LONG = 8  # ratio of the legs from which the Gram matrix is used: a table of embeddings costs an eighth of its SVD
_SVD = tuple[Array, Array, Array]


class FactorisedWeight:
    """Options of a factorised weight: its factors while smaller than the weight, then the dense weight."""

    def __init__(self, weight: Array, factorised: WeightOptions, of: str = "", bias: Array | None = None) -> None:
        self._weight, self._factorised, self._of, self._bias = weight, factorised, of, bias
        curve = factorised.curve
        self._smaller = np.flatnonzero(curve.costs < weight.size)
        costs = np.append(curve.costs[self._smaller], weight.size) + (0 if bias is None else bias.size)
        self.curve = Curve(costs, np.append(curve.errors[self._smaller], 0.0))

    def at(self, option: int) -> FactoredMatrix:
        """Return the factors of one option."""
        if option == len(self._smaller):
            factorised = FactoredMatrix("dense", self._of, {whole_part(self._of): self._weight})
        else:
            factorised = replace(self._factorised.at(int(self._smaller[option])), of=self._of)
        bias = {} if self._bias is None else {"bias": self._bias}
        return replace(factorised, arrays={**factorised.arrays, **bias})


def factorise_projections(
    projections: Projections, factorise: Callable[[Array], WeightOptions], of: Sequence[str] = NAMES
) -> ModuleWeights:
    """Factorise projections of an attention layer one by one; biases unchanged.

    If they are not all four, their biases are stored among the factors, because one tensor may hold biases of several
    projections.
    """
    biases = {name: bias for name, bias in projections.biases.items() if name in of}
    stored = biases if set(of) != set(NAMES) else {}
    weights = {
        name: FactorisedWeight(weight, factorise(weight), name, stored.get(name))
        for name, weight in projections.weights.items()
        if name in of
    }
    return ModuleWeights(weights, 0 if stored else sum(bias.size for bias in biases.values()))


def factorise_layer(method: Method, projections: Projections, sizes: Sizes, *, rotary: bool = False) -> Factorised:
    """Factorise the attention of a layer by a row of unit "matrix" or "layer".

    `rotary` is True if rotary embeddings or norms act between queries and keys.
    """
    if method.unit == "matrix":
        return factorise_projections(projections, resolve(method.factorise))
    return cast(Factorised, resolve((method.rotary if rotary else None) or method.factorise)(projections, sizes))


class TruncatedSVD:
    """The truncated singular value decomposition of a weight."""

    def __init__(self, weight: Array) -> None:
        if max(weight.shape) > _LONG * min(weight.shape):
            gram = components(weight)
            self._left, self._right, lost = gram.left, gram.right, gram.lost
        else:
            u, s, vh = tnlib.svd(weight).value
            root = np.sqrt(s)
            self._left, self._right = u * root, root[:, None] * vh
            lost = _lost(s)
        self.curve = Curve(np.arange(1, len(lost)) * sum(weight.shape), lost[1:])

    def at(self, option: int) -> FactoredMatrix:
        """Return the factors of rank option + 1."""
        rank = option + 1
        return FactoredMatrix("low_rank", "", {"left": self._left[:, :rank], "right": self._right[:rank]})


class TruncatedTTMatrix:
    """A weight as a TT-matrix of two cores, rows and columns each split as evenly as possible.

    With W[(i1 i2), (j1 j2)] this is the singular value decomposition over the pairs (i1 j1) | (i2 j2): a sum of
    Kronecker products, the best one of that many terms (Van Loan and Pitsianis, 1993).
    """

    def __init__(self, weight: Array) -> None:
        rows, columns = (split_evenly(n) for n in weight.shape)
        self._first, self._last = tnlib.ttm_svd(weight, rows, columns).value.cores
        # the first core is isometric and the rows of the last are orthogonal, so their lengths are the spectrum
        s = np.linalg.norm(self._last.reshape(len(self._last), -1).astype(np.float64), axis=1)  # squares leave float32
        self.curve = Curve(np.arange(1, len(s) + 1) * (self._first[..., 0].size + self._last[0].size), _lost(s)[1:])

    def at(self, option: int) -> FactoredMatrix:
        """Return the cores of rank option + 1."""
        rank = option + 1
        return FactoredMatrix("ttm", "", {"core0": self._first[..., :rank], "core1": self._last[:rank]})


def _lost(s: Array) -> Array:
    """Return the squared relative errors with the first 0, 1, ... singular values kept."""
    squares = tail_norms(s) ** 2
    return squares / (squares[0] if squares[0] > 0 else 1.0)


def split_evenly(n: int) -> tuple[int, int]:
    """Return the two closest factors of `n`, the smaller one first.

    >>> split_evenly(384)
    (16, 24)
    """
    small = next(k for k in range(math.isqrt(n), 0, -1) if n % k == 0)
    return small, n // small


def refuse_unsplittable(sizes: Sizes) -> str | None:
    """Return why a model of prime width has no TT-matrix, or None."""
    if split_evenly(sizes.d_model)[0] > 1:
        return None
    return f"its width {sizes.d_model} is prime and does not split into two legs"


def refuse_unequal_widths(sizes: Sizes) -> str | None:
    """Return why the projections of a layer do not form one array, or None."""
    if sizes.d_value == sizes.d_head:
        return None
    return f"its values of width {sizes.d_value} do not form one array with queries and keys of width {sizes.d_head}"


class TuckerStack:
    """Truncations of the higher-order SVD of the stack; biases unchanged.

    The core of the untruncated decomposition is all-orthogonal, so keeping its leading block (r0, r1, r2, r3)
    gives the squared error norm(core)^2 - norm(block)^2. Cumulative sums give it for all blocks at once; the options
    are the Pareto-optimal blocks.
    """

    def __init__(self, projections: Projections, sizes: Sizes) -> None:
        self._stack = stack(projections, sizes)
        self._tucker = tnlib.tucker(self._stack).value
        self.fixed = sum(bias.size for bias in projections.biases.values())
        self._ranks, curve = _best_blocks(self._tucker, self._stack.size)
        self.curves = [curve]

    def matrices(self, choice: Sequence[int]) -> list[FactoredMatrix]:
        """Return the factors of one option; the last option is the dense stack."""
        (option,) = choice
        if option == len(self._ranks):
            return [FactoredMatrix("stack", _STACKED, {"stack": self._stack})]
        ranks = self._ranks[option]
        core = self._tucker.core[tuple(slice(r) for r in ranks)]
        factors = {f"factor{k}": f[:, :r] for k, (f, r) in enumerate(zip(self._tucker.factors, ranks, strict=True))}
        return [FactoredMatrix("tucker", _STACKED, {"core": core, **factors})]


def _best_blocks(tucker: tnlib.Tucker, size: int) -> tuple[list[tuple[int, ...]], Curve]:
    """Return the ranks of the Pareto-optimal blocks with fewer than `size` numbers, and their curve."""
    energy = np.square(tucker.core, dtype=np.float64)
    for leg in range(energy.ndim):
        energy = np.cumsum(energy, axis=leg)
    total = energy[(-1,) * energy.ndim]

    candidates = [np.unique(np.linspace(1, n, min(n, _CANDIDATES)).astype(int)) for n in tucker.ranks]
    ranks = np.stack(np.meshgrid(*candidates, indexing="ij"), axis=-1).reshape(-1, energy.ndim)
    costs = ranks.prod(axis=1) + ranks @ np.array(tucker.shape)
    errors = 1 - energy[tuple(ranks.T - 1)] / total if total > 0 else np.zeros(len(ranks))

    order = np.lexsort((errors, costs))
    order = order[costs[order] < size]
    least = np.minimum.accumulate(errors[order])
    best = order[np.append(True, least[1:] < least[:-1])]
    curve = Curve(np.append(costs[best], size), np.append(np.maximum(errors[best], 0.0), 0.0))
    return [tuple(int(r) for r in row) for row in ranks[best]], curve


class CPStack:
    """A CP decomposition of the stack by alternating least squares; biases unchanged.

    The error of a rank is not known before the fit. The curve is a placeholder, convex and equal for all layers, so
    that the budget is distributed evenly; the reported error is measured.
    """

    def __init__(self, projections: Projections, sizes: Sizes) -> None:
        self._stack = stack(projections, sizes)
        self.fixed = sum(bias.size for bias in projections.biases.values())
        unit = sum(self._stack.shape) + 1
        ranks = np.arange(1, (self._stack.size - 1) // unit + 1)
        self.curves = [Curve(np.append(ranks * unit, self._stack.size), 1.0 / np.arange(1, len(ranks) + 2))]

    def matrices(self, choice: Sequence[int]) -> list[FactoredMatrix]:
        """Fit rank choice[0] + 1; the last option is the dense stack."""
        (option,) = choice
        if option == len(self.curves[0].costs) - 1:
            return [FactoredMatrix("stack", _STACKED, {"stack": self._stack})]
        with warnings.catch_warnings():
            # converged or not, the report measures the result
            warnings.simplefilter("ignore", tnlib.ConvergenceWarning)
            value = tnlib.cp(self._stack, option + 1, n_iter=_SWEEPS).value
        factors = {f"factor{k}": factor for k, factor in enumerate(value.factors)}
        return [FactoredMatrix("cp", _STACKED, {"weights": value.weights, **factors})]


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
        every = (operator for operators in self._operators for operator in operators)
        self.curves = [Curve(np.arange(len(s) + 1) * (len(u) + vh.shape[1]), _lost(s)) for u, s, vh in every]
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
    stacked = []
    for name in pair:
        count, width = sizes.group_size if name in "qo" else 1, sizes.of_head(name)
        columns = (slice(k * width, (k + 1) * width) for k in range(group * count, (group + 1) * count))
        stacked.append(np.concatenate([_with_bias(projections, name, of_head) for of_head in columns]))
    first, second = stacked
    return first.astype(np.float64), second.astype(np.float64).T


def _with_bias(projections: Projections, name: str, columns: slice) -> Array:
    """Return one head's part of a projection, (d_model, d_head), with its bias, if any, as the last row."""
    weight = projections.weights[name]
    if name == "o":  # the output bias belongs to the layer, not to a head
        return weight[columns].T
    bias = projections.biases.get(name)
    part = weight[:, columns]
    return part if bias is None else np.concatenate([part, bias[None, columns]])


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
