"""Weights of a layer as one array (projection, key head, d_model, d_head), in the Tucker or the CP format.

`SharedBases` is the Tucker variant for whitened weights, with an input basis shared by W_Q and W_K.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

import tnlib
from tnlib_adapters.compression.allocate import Curve
from tnlib_adapters.compression.methods.factorise import PerWeight
from tnlib_adapters.compression.methods.matrices import TruncatedSVD
from tnlib_adapters.factors.factored_matrix import FactoredMatrix
from tnlib_adapters.factors.projections import Projections, Sizes, rows_of_stack, stack

OF = "qkvo"
_CANDIDATES = 128  # ranks considered per leg
_SWEEPS = 20  # of alternating least squares; more reduce the error of a trained layer by less than 1 %
_STACKED = "qk"  # projections in one stack


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

    def __init__(self, projections: Projections, sizes: Sizes, of: str = OF) -> None:
        self._of, self._stack = of, stack(projections, sizes, of)
        self._tucker = tnlib.tucker(self._stack).value
        self.fixed = sum(bias.size for name, bias in projections.biases.items() if name in of)
        self._ranks, curve = _best_blocks(self._tucker, self._stack.size)
        self.curves = [curve]

    def matrices(self, choice: Sequence[int]) -> list[FactoredMatrix]:
        """Return the factors of one option; the last option is the dense stack."""
        (option,) = choice
        if option == len(self._ranks):
            return [FactoredMatrix("stack", self._of, {"stack": self._stack})]
        ranks = self._ranks[option]
        core = self._tucker.core[tuple(slice(r) for r in ranks)]
        factors = {f"factor{k}": f[:, :r] for k, (f, r) in enumerate(zip(self._tucker.factors, ranks, strict=True))}
        return [FactoredMatrix("tucker", self._of, {"core": core, **factors})]


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
            return [FactoredMatrix("stack", OF, {"stack": self._stack})]
        with warnings.catch_warnings():
            # converged or not, the report measures the result
            warnings.simplefilter("ignore", tnlib.ConvergenceWarning)
            value = tnlib.cp(self._stack, option + 1, n_iter=_SWEEPS).value
        factors = {f"factor{k}": factor for k, factor in enumerate(value.factors)}
        return [FactoredMatrix("cp", OF, {"weights": value.weights, **factors})]


class SharedBases:
    """Tucker decomposition of W_Q and W_K, stacked and each scaled to norm 1; truncated SVD of W_V and W_O.

    Queries and keys enter only the scores and their weights use similar input directions, so one input basis serves
    both. Adding W_V to the stack, or a Tucker decomposition of W_O, gives larger errors at the same count of numbers.
    The stack counts as one block, with the mean of its two squared relative errors. Biases are unchanged.
    """

    def __init__(self, projections: Projections, sizes: Sizes) -> None:
        self.fixed = sum(bias.size for bias in projections.biases.values())
        self._norms = {name: float(np.linalg.norm(projections.weights[name])) or 1.0 for name in _STACKED}
        scaled = {name: projections.weights[name] / norm for name, norm in self._norms.items()}
        weights = Projections({**projections.weights, **scaled}, {})
        self._stack = TuckerStack(weights, sizes, _STACKED)
        self._matrices = PerWeight(weights, lambda _, weight: TruncatedSVD(weight), "vo")
        self.curves = [*self._stack.curves, *self._matrices.curves]

    def matrices(self, choice: Sequence[int]) -> list[FactoredMatrix]:
        """Return the factors for one option of the stack, of W_V and of W_O."""
        (stacked,) = self._stack.matrices(choice[:1])
        part = "stack" if stacked.kind == "stack" else "factor0"
        rows = stacked.arrays[part].copy()
        for name, own in rows_of_stack(len(rows), _STACKED).items():
            rows[own] *= self._norms[name]
        return [replace(stacked, arrays={**stacked.arrays, part: rows}), *self._matrices.matrices(choice[1:])]
