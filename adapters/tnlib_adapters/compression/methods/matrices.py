r"""Low-rank factors of one weight: truncated SVD, TT-matrix, and TT-matrix weighted by the inputs.

With C = E[x x^T] and both legs of W split in two, a sum of Kronecker products has the error on the inputs

    E |x (W - sum_r A_r (x) B_r)|^2 = |C^1/2 (W - sum_r A_r (x) B_r)|^2.

The product of C^1/2 with such a sum is again such a sum only if the root is one product R_1 (x) R_2. Truncation with
the roots of the two partial traces of C is therefore only the start, near the optimum if C is nearly a product; that of
a trained model is not. From there both cores descend together (L-BFGS) on the error with the whole of C.
"""

from __future__ import annotations

import math

import numpy as np

import tnlib
from tnlib._typing import Array
from tnlib.linalg.thin_svd import product_svd, thin_svd
from tnlib.linalg.truncation import tail_norms
from tnlib_adapters.compression.allocate import Curve
from tnlib_adapters.compression.methods.components import components, triangular_root
from tnlib_adapters.factors.factored_matrix import FactoredMatrix
from tnlib_adapters.factors.projections import Sizes

_LONG = 8  # ratio of the legs from which the Gram matrix is used: a table of embeddings costs an eighth of its SVD
_STEPS = 100  # of the descent at the chosen rank; the error after 40 is 3 to 8 % larger
_SAMPLES, _SAMPLE_STEPS = 6, 10  # ranks at which the curve is measured, and steps of the descent at each


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


class WeightedTTMatrix:
    """A weight as a TT-matrix of two cores with a small error on inputs of second moments `moments`.

    The error is measured at a few ranks after a short descent, and interpolated between them.
    """

    def __init__(self, weight: Array, moments: Array) -> None:
        self._dtype = weight.dtype
        self._truncation = truncation = _WeightedTruncation(weight.astype(np.float64), moments)
        ranks = np.arange(1, min(truncation.full_rank, max(1, (weight.size - 1) // truncation.unit)) + 1)
        sampled = np.unique(np.geomspace(1, ranks[-1], _SAMPLES).astype(int))
        measured = [truncation.descended(int(rank), _SAMPLE_STEPS)[2] for rank in sampled]
        falling = np.minimum.accumulate(np.maximum(measured, np.finfo(float).tiny))
        errors = np.exp(np.interp(ranks, sampled, np.log(falling)))  # about a constant factor per rank
        self.curve = Curve(ranks * truncation.unit, errors)

    def at(self, option: int) -> FactoredMatrix:
        """Return the cores of rank option + 1."""
        cores = self._truncation.cores(option + 1)
        return FactoredMatrix("ttm", "", {f"core{k}": core.astype(self._dtype) for k, core in enumerate(cores)})


class _WeightedTruncation:
    """One weight in the coordinates of its start: target and moments, and truncations of the target."""

    def __init__(self, weight: Array, moments: Array) -> None:
        self._legs = (*split_evenly(weight.shape[0]), *split_evenly(weight.shape[1]))
        self._size = float(np.linalg.norm(weight)) or 1.0
        trace = float(np.trace(moments))
        scaled = moments / trace if trace > 0 else np.eye(len(moments))
        m1, m2 = self._legs[:2]
        legs = scaled.reshape(m1, m2, m1, m2)
        (root1, back1), (root2, back2) = (triangular_root(np.einsum(t, legs)) for t in ("iaja->ij", "iaib->ab"))
        self._back = back1, back2
        self._target = _on_rows(root1, root2, weight / self._size)
        self._moments = _on_rows(back1.T, back2.T, _on_rows(back1.T, back2.T, scaled).T)  # both legs of the moments
        self._norm2 = float(np.sum(self._target * (self._moments @ self._target))) or 1.0
        self._svd = thin_svd(self._pair_legs(self._target))

    @property
    def full_rank(self) -> int:
        """Rank of the exact representation."""
        return len(self._svd[1])

    @property
    def unit(self) -> int:
        """Numbers per rank."""
        m1, m2, n1, n2 = self._legs
        return m1 * n1 + m2 * n2

    def cores(self, rank: int) -> tuple[Array, Array]:
        """Return both cores of a rank, the first isometric, the second with orthogonal rows."""
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
        minimum = minimize(self._loss, start, args=(rank,), jac=True, method="L-BFGS-B", options=options)
        return *self._factors(minimum.x, rank), float(minimum.fun)

    def _loss(self, x: Array, rank: int) -> tuple[float, Array]:
        """Return the squared relative error on the inputs, and its gradient with respect to both factors."""
        a, b = self._factors(x, rank)
        difference = self._unpair_legs(a @ b) - self._target  # (m1 m2) (n1 n2)
        weighted = self._moments @ difference / self._norm2
        slope = 2 * self._pair_legs(weighted)  # (m1 n1) (m2 n2)
        by_a, by_b = slope @ b.T, a.T @ slope  # (m1 n1) [m2 n2] r, r [m1 n1] (m2 n2)
        return float(np.sum(difference * weighted)), np.concatenate([by_a.ravel(), by_b.ravel()])

    def _factors(self, x: Array, rank: int) -> tuple[Array, Array]:
        a, b = np.split(x, [self._svd[0].shape[0] * rank])
        return a.reshape(-1, rank), b.reshape(rank, -1)

    def _pair_legs(self, matrix: Array) -> Array:
        m1, m2, n1, n2 = self._legs
        return matrix.reshape(m1, m2, n1, n2).transpose(0, 2, 1, 3).reshape(m1 * n1, m2 * n2)

    def _unpair_legs(self, pairs: Array) -> Array:
        m1, m2, n1, n2 = self._legs
        return pairs.reshape(m1, n1, m2, n2).transpose(0, 2, 1, 3).reshape(m1 * m2, n1 * n2)


def _on_rows(first: Array, second: Array, x: Array) -> Array:
    """Return (first (x) second) x."""
    legs = x.reshape(first.shape[1], second.shape[1], -1)
    product: Array = np.einsum("ki,la,iaj->klj", first, second, legs, optimize=True)  # m1 [m1], m2 [m2], [m1 m2] n
    return product.reshape(x.shape)
