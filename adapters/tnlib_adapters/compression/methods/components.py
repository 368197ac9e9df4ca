r"""A matrix as a sum of components, in the order in which what it reads and what its output matters to miss them.

With A = E[x x^T] of what a matrix W reads and P = E[p p^T] = R^T R of the gradient p at what it writes, the expected
square of x (W' - W) p, as if x and p were independent, is |A^1/2 (W' - W) R^T|^2, least among all W' of rank r for

    W' = W R^T V_r V_r^T R^-T,        V diag(s^2) V^T = R W^T A W R^T,

so that component c is the column c of W R^T V times the row c of V^T R^-T, and all of them together are W, whatever A
and P are. Without gradients R is the identity: the truncation of Wang et al., SVD-LLM (ICLR 2025). The change of a
scalar L of the output that a gate on component c makes is

    dL/d gate_c = sum_t (x_t . left_c)(right_c . p_t),

whose mean square over texts and probes is what dropping the component costs, in one unit for all matrices and layers;
no independence is assumed there.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tnlib._typing import Array
from tnlib_adapters.compression.allocate import Curve
from tnlib_adapters.compression.calibration.moments import triangular_root


@dataclass(frozen=True)
class Components:
    """Left (m, r) and right (r, n), whose product is a matrix, and what is lost without each of the r components."""

    left: Array
    right: Array
    losses: Array

    def weighed(self, losses: Array) -> Components:
        """Return the same with other losses, the largest first."""
        order = np.argsort(-losses, kind="stable")
        return Components(self.left[:, order], self.right[order], losses[order])

    @property
    def lost(self) -> Array:
        """What is lost of all components with the first 0, 1, ... kept."""
        return np.append(np.cumsum(self.losses[::-1])[::-1], 0.0)

    def curve(self, whole: int, *, gauged: bool) -> Curve:
        """Return what 0, 1, ... components cost and lose as long as they are smaller than `whole` numbers, then these.

        `gauged` says that the r^2 numbers which the gauge of a product frees are not stored, but r places of rows.
        """
        r = np.arange(len(self.losses) + 1)
        costs = r * (len(self.left) + self.right.shape[1]) + (r - r**2 if gauged else 0)
        smaller = costs < whole
        return Curve(np.append(costs[smaller], whole), np.append(self.lost[smaller], 0.0))

    def first(self, rank: int) -> tuple[Array, Array]:
        """Return the factors of so many components."""
        return self.left[:, :rank], self.right[:rank]


def components(weight: Array, reads: Array | None = None, slopes: Array | None = None) -> Components:
    """Return the components of a matrix, those first that are missed most.

    Parameters
    ----------
    weight
        (m, n), acting on rows; the components are of its dtype.
    reads
        (m, m), second moments of what it reads, or (m,) where they are diagonal; None for the identity.
    slopes
        (n, n), second moments of the gradient at what it writes, None for the identity.
    """
    if len(weight) < weight.shape[1]:
        other = components(weight.T, slopes, reads)
        return Components(other.right.T, other.left.T, other.losses)
    dtype, weight = weight.dtype, weight.astype(np.float64)
    reads, slopes = (None if a is None else a.astype(np.float64) for a in (reads, slopes))
    root, inverse = (None, None) if slopes is None else _roots(slopes)
    onto = weight if root is None else _times(root, weight.T).T  # m n
    # in the precision of the weight, half the time if that is single: what it cannot tell apart matters little
    seen = (onto / (np.linalg.norm(onto) or 1.0)).astype(dtype)
    gram = seen.T @ (seen if reads is None else _times((reads / (reads.max() or 1.0)).astype(dtype), seen))
    values, v = (a.astype(np.float64) for a in np.linalg.eigh(gram))
    losses, v = np.maximum(values[::-1], 0.0), v[:, ::-1]
    left, right = onto @ v, v.T if inverse is None else _times(inverse, v).T
    sizes = np.linalg.norm(left, axis=0), np.linalg.norm(right, axis=1)
    balance = np.sqrt(np.divide(sizes[1], sizes[0], out=np.ones_like(losses), where=sizes[0] > 0))
    whole = losses.sum()
    left, right = (left * balance).astype(dtype), (right / balance[:, None]).astype(dtype)
    return Components(left, right, losses / whole if whole > 0 else losses)


def _roots(moments: Array) -> tuple[Array, Array]:
    if moments.ndim == 1:
        root = np.sqrt(np.maximum(moments, 1e-12 * moments.max(initial=1e-300)))
        return root, 1 / root
    return triangular_root(moments)


def _times(matrix: Array, x: Array) -> Array:
    """Return a matrix, or one of which only the diagonal is given, times another."""
    found: Array = matrix[:, None] * x if matrix.ndim == 1 else matrix @ x
    return found
