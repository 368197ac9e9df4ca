r"""How much the data see of every direction inside a head, and what a truncation in these directions costs.

Between q and k, and between y and W_O, stands an identity of size d_head. A truncated head has a matrix T of rank r in
its place, and what that changes in a scalar L of the output is, to lowest order,

    q_t k_u -> q_t T k_u :      dL = sum_t q_t (T - 1) p_t,      p_t = dL/dq_t = sum_u (dL/ds_tu) k_u
    y_t W_O -> y_t T W_O :      dL = sum_t y_t (T - 1) p_t,      p_t = dL/dy_t = W_O dL/do_t

so that both cases are one: activations a_t and gradients p_t in d_head dimensions. Of all T of rank r,

    T = A^-1/2 [A^1/2 P^1/2]_r P^-1/2,        A = E[a a^T],  P = E[p p^T],

[.]_r the truncated singular value decomposition, has the least E[|a (T - 1)|^2 in the metric of p] (as if a and p were
independent). With components c = left[:, c] right[:, c]^T of T, in that basis, the mean square of

    dL/d gate_c = sum_t (a_t . left_c) (right_c . p_t)

over texts and probes is what dropping component c costs, in one unit for every head, kind and layer: no independence
is assumed there.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tnlib._typing import Array

KINDS = ("qk", "vo")
# Directions that the texts do not reach count as reached a little: they are cut first, and kept where nothing is cut.
_FLOOR = 1e-9


@dataclass(frozen=True)
class Moments:
    """Second moments inside the heads of one layer, by kind ("qk", "vo"): two arrays of shape (heads, d_head, d_head).

    `activations` hold sums of a a^T over tokens, `gradients` sums of p p^T over tokens and probes.
    """

    activations: dict[str, Array]
    gradients: dict[str, Array]

    @classmethod
    def zeros(cls, n_heads: int, d_head: int) -> Moments:
        """Return moments of no text."""
        shape = (n_heads, d_head, d_head)
        return cls({kind: np.zeros(shape) for kind in KINDS}, {kind: np.zeros(shape) for kind in KINDS})

    def components(self, kind: str, group: int = 1) -> tuple[Array, Array]:
        """Return left and right (heads, d_head, d_head), left @ right^T = 1 for every head, by descending weight.

        Every `group` query heads share one key and value head, and so for "qk" the right side, for "vo" the left.
        """
        own, common = self.activations[kind], self.gradients[kind]
        if kind == "vo":
            own, common = common, own
        own_sides, common_sides = [], []
        for start in range(0, len(own), group):
            heads = slice(start, start + group)
            root, inverse = root_and_inverse(common[heads].sum(0)[None])
            roots, inverses = root_and_inverse(own[heads])
            u, s, vh = np.linalg.svd(root[0] @ np.concatenate(roots, axis=1), full_matrices=False)  # d r, r (head d)
            common_sides += [inverse[0] @ u * np.sqrt(s)] * group
            per_head = np.split(vh.T, group)  # d r
            own_sides += [one @ v * np.sqrt(s) for one, v in zip(inverses, per_head, strict=True)]
        found = np.stack(own_sides), np.stack(common_sides)
        return found if kind == "qk" else found[::-1]


def root_and_inverse(moments: Array) -> tuple[Array, Array]:
    """Return the square roots of positive matrices (heads, d, d), and their inverses.

    They are scaled together, which is of no account, and small eigenvalues are raised to a floor.
    """
    values, vectors = np.linalg.eigh(moments)
    top = float(values.max())
    values = np.maximum(values / top, _FLOOR) if top > 0 else np.ones_like(values)
    roots, adjoints = np.sqrt(values)[:, None, :], vectors.transpose(0, 2, 1)
    return vectors * roots @ adjoints, vectors / roots @ adjoints


def triangular_root(moments: Array) -> tuple[Array, Array]:
    """Return R with R^T R = C, and its inverse: for large matrices in a tenth of the time that eigenvalues take.

    A C that is singular is raised, in all directions, by as little as its rounding errors ask for.
    """
    size = float(np.trace(moments)) / len(moments)
    if size <= 0:
        return np.eye(len(moments)), np.eye(len(moments))
    for raised in (1e-12, 1e-10, 1e-8, 1e-6, 1e-4):
        try:
            lower = np.linalg.cholesky(moments / size + raised * np.eye(len(moments)))
        except np.linalg.LinAlgError:
            continue
        return lower.T, np.linalg.inv(lower).T
    raise ArithmeticError(f"triangular_root: moments of size {len(moments)} have eigenvalues far below zero")
