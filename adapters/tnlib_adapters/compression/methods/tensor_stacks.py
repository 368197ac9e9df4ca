"""Weights of a layer as one array (projection, key head, d_model, d_head), in the Tucker or the CP format."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import numpy as np

import tnlib
from tnlib_adapters.compression.allocate import Curve
from tnlib_adapters.factors.attention_factors import Piece, stack
from tnlib_adapters.factors.projections import Projections, Sizes

OF = "qkvo"
_CANDIDATES = 128  # ranks considered for one leg
_SWEEPS = 20  # of the alternating least squares; more lower the error of a trained layer by less than 1 %


class TuckerStack:
    """Truncations of the higher-order SVD of the stack, the biases as they are.

    The core of the untruncated decomposition is all-orthogonal, so keeping its leading block (r0, r1, r2, r3)
    leaves the squared error norm(core)^2 - norm(block)^2. Cumulative sums give it for all blocks at once; those
    that no smaller block beats are the options.
    """

    def __init__(self, projections: Projections, sizes: Sizes, of: str = OF) -> None:
        self._of, self._stack = of, stack(projections, sizes, of)
        self._found = tnlib.tucker(self._stack).value
        self.fixed = sum(bias.size for name, bias in projections.biases.items() if name in of)
        self._ranks, curve = _best_blocks(self._found, self._stack.size)
        self.curves = [curve]

    def pieces(self, choice: Sequence[int]) -> list[Piece]:
        """Return the factors at one option; the last option is the stack as it is."""
        (option,) = choice
        if option == len(self._ranks):
            return [Piece("stack", self._of, {"stack": self._stack})]
        ranks = self._ranks[option]
        core = self._found.core[tuple(slice(r) for r in ranks)]
        factors = {f"factor{k}": f[:, :r] for k, (f, r) in enumerate(zip(self._found.factors, ranks, strict=True))}
        return [Piece("tucker", self._of, {"core": core, **factors})]


def _best_blocks(found: tnlib.Tucker, size: int) -> tuple[list[tuple[int, ...]], Curve]:
    """Return the ranks of all blocks smaller than `size` that no smaller block beats, and what they cost and err."""
    energy = np.square(found.core, dtype=np.float64)
    for leg in range(energy.ndim):
        energy = np.cumsum(energy, axis=leg)
    whole = energy[(-1,) * energy.ndim]

    candidates = [np.unique(np.linspace(1, n, min(n, _CANDIDATES)).astype(int)) for n in found.ranks]
    ranks = np.stack(np.meshgrid(*candidates, indexing="ij"), axis=-1).reshape(-1, energy.ndim)
    costs = ranks.prod(axis=1) + ranks @ np.array(found.shape)
    errors = 1 - energy[tuple(ranks.T - 1)] / whole if whole > 0 else np.zeros(len(ranks))

    order = np.lexsort((errors, costs))
    order = order[costs[order] < size]
    beaten_by = np.minimum.accumulate(errors[order])
    best = order[np.append(True, beaten_by[1:] < beaten_by[:-1])]
    curve = Curve(np.append(costs[best], size), np.append(np.maximum(errors[best], 0.0), 0.0))
    return [tuple(int(r) for r in row) for row in ranks[best]], curve


class CPStack:
    """A CP decomposition of the stack by alternating least squares, the biases as they are.

    What a rank errs is not known before it is fitted. The curve is a stand-in, convex and the same for every
    layer, which shares the budget out evenly; the error that is reported is measured.
    """

    def __init__(self, projections: Projections, sizes: Sizes) -> None:
        self._stack = stack(projections, sizes)
        self.fixed = sum(bias.size for bias in projections.biases.values())
        unit = sum(self._stack.shape) + 1
        ranks = np.arange(1, (self._stack.size - 1) // unit + 1)
        self.curves = [Curve(np.append(ranks * unit, self._stack.size), 1.0 / np.arange(1, len(ranks) + 2))]

    def pieces(self, choice: Sequence[int]) -> list[Piece]:
        """Fit rank choice[0] + 1; the last option is the stack as it is."""
        (option,) = choice
        if option == len(self.curves[0].costs) - 1:
            return [Piece("stack", OF, {"stack": self._stack})]
        with warnings.catch_warnings():
            # whether or not the iteration has settled, the report measures what it reached
            warnings.simplefilter("ignore", tnlib.ConvergenceWarning)
            value = tnlib.cp(self._stack, option + 1, n_iter=_SWEEPS).value
        factors = {f"factor{k}": factor for k, factor in enumerate(value.factors)}
        return [Piece("cp", OF, {"weights": value.weights, **factors})]
