"""Weights of a layer as one array (projection, key head, d_model, d_head), in the Tucker or the CP format."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import numpy as np

import tnlib
from tnlib_adapters.compression.allocate import Curve
from tnlib_adapters.factors.factored_matrix import FactoredMatrix
from tnlib_adapters.factors.projections import Projections, Sizes, stack

OF = "qkvo"
_CANDIDATES = 128  # ranks considered per leg
_SWEEPS = 20  # of alternating least squares; more reduce the error of a trained layer by less than 1 %


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
            return [FactoredMatrix("stack", OF, {"stack": self._stack})]
        ranks = self._ranks[option]
        core = self._tucker.core[tuple(slice(r) for r in ranks)]
        factors = {f"factor{k}": f[:, :r] for k, (f, r) in enumerate(zip(self._tucker.factors, ranks, strict=True))}
        return [FactoredMatrix("tucker", OF, {"core": core, **factors})]


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
