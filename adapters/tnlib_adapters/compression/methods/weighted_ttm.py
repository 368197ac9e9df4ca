r"""TT-matrices fitted where the inputs of a weight are.

With C = E[x x^T] and both legs of W split in two, a sum of Kronecker products errs on the inputs by

    E |x (W - sum_r A_r (x) B_r)|^2 = |C^1/2 (W - sum_r A_r (x) B_r)|^2,

and no root of C keeps such a sum what it is, unless it is itself one product R_1 (x) R_2. The roots of the two partial
traces of C are, so that in these coordinates truncation is a start: near the best where C is nearly a product, which
that of a trained model is not. From there both cores descend together (L-BFGS) on the error with the whole of C.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from tnlib._typing import Array
from tnlib.linalg.thin_svd import product_svd, thin_svd
from tnlib_adapters.compression.allocate import Curve
from tnlib_adapters.compression.calibration.moments import triangular_root
from tnlib_adapters.compression.methods.matrices import split_evenly
from tnlib_adapters.factors.attention_factors import Piece
from tnlib_adapters.factors.projections import NAMES, Projections

_STEPS = 100  # of the descent at the rank that is chosen; 40 err by 3 to 8 % more
_SAMPLES, _SAMPLE_STEPS = 6, 10  # ranks at which the curve is measured, and steps of the descent at each


class WeightedTTMatrices:
    """Every weight matrix as a TT-matrix of two cores that err little on its inputs, the biases as they are.

    `moments` holds the second moments of what each projection reads. What a rank errs is measured at a few ranks after
    a short descent, and interpolated in between.
    """

    def __init__(self, projections: Projections, moments: Mapping[str, Array]) -> None:
        self._weights = projections.weights
        self._found = {name: _Fit(self._weights[name].astype(np.float64), moments[name]) for name in NAMES}
        self.curves = [self._curve(name) for name in NAMES]
        self.fixed = sum(bias.size for bias in projections.biases.values())

    def pieces(self, choice: Sequence[int]) -> list[Piece]:
        """Return the cores with rank choice[k] + 1 for weight k; its last option is the weight as it is."""
        pieces = []
        for name, option, curve in zip(NAMES, choice, self.curves, strict=True):
            weight = self._weights[name]
            if option == len(curve.costs) - 1:
                pieces.append(Piece("dense", name, {"weight": weight}))
                continue
            cores = self._found[name].cores(option + 1)
            pieces.append(Piece("ttm", name, {f"core{k}": core.astype(weight.dtype) for k, core in enumerate(cores)}))
        return pieces

    def _curve(self, name: str) -> Curve:
        found, size = self._found[name], self._weights[name].size
        ranks = np.arange(1, min(found.full_rank, (size - 1) // found.unit) + 1)
        sampled = np.unique(np.geomspace(1, ranks[-1], _SAMPLES).astype(int))
        measured = [found.descended(int(rank), _SAMPLE_STEPS)[2] for rank in sampled]
        falling = np.minimum.accumulate(np.maximum(measured, np.finfo(float).tiny))
        errors = np.exp(np.interp(ranks, sampled, np.log(falling)))  # they fall by about a factor a rank
        return Curve(np.append(ranks * found.unit, size), np.append(errors, 0.0))


class _Fit:
    """One weight in the coordinates of its start: target and moments, and truncations of the target."""

    def __init__(self, weight: Array, moments: Array) -> None:
        self._legs = (*split_evenly(weight.shape[0]), *split_evenly(weight.shape[1]))
        self._size = float(np.linalg.norm(weight)) or 1.0
        trace = float(np.trace(moments))
        seen = moments / trace if trace > 0 else np.eye(len(moments))
        m1, m2 = self._legs[:2]
        legs = seen.reshape(m1, m2, m1, m2)
        (root1, back1), (root2, back2) = (triangular_root(np.einsum(t, legs)) for t in ("iaja->ij", "iaib->ab"))
        self._back = back1, back2
        self._target = _on_rows(root1, root2, weight / self._size)
        self._seen = _on_rows(back1.T, back2.T, _on_rows(back1.T, back2.T, seen).T)  # both legs of the moments
        self._whole = float(np.sum(self._target * (self._seen @ self._target))) or 1.0
        self._svd = thin_svd(self._apart(self._target))

    @property
    def full_rank(self) -> int:
        """The rank at which nothing is lost."""
        return len(self._svd[1])

    @property
    def unit(self) -> int:
        """What a rank costs."""
        m1, m2, n1, n2 = self._legs
        return m1 * n1 + m2 * n2

    def cores(self, rank: int) -> tuple[Array, Array]:
        """Return both cores at a rank, the first one isometric and the rows of the second orthogonal."""
        (m1, m2, n1, n2), (back1, back2) = self._legs, self._back
        a, b, _ = self.descended(rank, _STEPS)
        first = np.einsum("ki,ijr->kjr", back1, a.reshape(m1, n1, rank))  # m [m], [m] n r
        second = np.einsum("ki,rij->rkj", back2, b.reshape(rank, m2, n2))  # m [m], r [m] n
        u, s, vh = product_svd(first.reshape(-1, rank), second.reshape(rank, -1))
        last = self._size * s[:, None] * vh
        return u.reshape(1, m1, n1, -1), last.reshape(-1, m2, n2, 1)

    def descended(self, rank: int, steps: int) -> tuple[Array, Array, float]:
        """Return factors of (m1 n1) | (m2 n2), and the squared relative error on the inputs."""
        from scipy.optimize import minimize

        u, s, vh = (self._svd[0][:, :rank], self._svd[1][:rank], self._svd[2][:rank])
        root = np.sqrt(s)
        start = np.concatenate([(u * root).ravel(), (root[:, None] * vh).ravel()])
        options = {"maxiter": steps, "maxfun": 2 * steps, "gtol": 0.0, "ftol": 1e-9}
        found = minimize(self._loss, start, args=(rank,), jac=True, method="L-BFGS-B", options=options)
        return *self._factors(found.x, rank), float(found.fun)

    def _loss(self, x: Array, rank: int) -> tuple[float, Array]:
        """Return the squared relative error on the inputs, and its derivatives by all entries of both factors."""
        a, b = self._factors(x, rank)
        off = self._together(a @ b) - self._target  # (m1 m2) (n1 n2)
        seen = self._seen @ off / self._whole
        slope = 2 * self._apart(seen)  # (m1 n1) (m2 n2)
        by_a, by_b = slope @ b.T, a.T @ slope  # (m1 n1) [m2 n2] r, r [m1 n1] (m2 n2)
        return float(np.sum(off * seen)), np.concatenate([by_a.ravel(), by_b.ravel()])

    def _factors(self, x: Array, rank: int) -> tuple[Array, Array]:
        a, b = np.split(x, [self._svd[0].shape[0] * rank])
        return a.reshape(-1, rank), b.reshape(rank, -1)

    def _apart(self, matrix: Array) -> Array:
        m1, m2, n1, n2 = self._legs
        return matrix.reshape(m1, m2, n1, n2).transpose(0, 2, 1, 3).reshape(m1 * n1, m2 * n2)

    def _together(self, pairs: Array) -> Array:
        m1, m2, n1, n2 = self._legs
        return pairs.reshape(m1, n1, m2, n2).transpose(0, 2, 1, 3).reshape(m1 * m2, n1 * n2)


def _on_rows(first: Array, second: Array, x: Array) -> Array:
    """Return (first (x) second) x."""
    legs = x.reshape(first.shape[1], second.shape[1], -1)
    found: Array = np.einsum("ki,la,iaj->klj", first, second, legs, optimize=True)  # m1 [m1], m2 [m2], [m1 m2] n
    return found.reshape(x.shape)
