r"""Additive attribution of attention weights to terms of the scores, by a path integral of the softmax.

For scores s = sum_t s_t, on the line from zero scores (uniform attention) to s, with p_a = softmax(a s):

    p(s) - p(0) = int_0^1 (d/da) p(a s) da = sum_t int_0^1 p_a * (s_t - <p_a, s_t>) da

so the integrals of the terms sum exactly to the pattern less uniform attention. With a soft cap c, s_t is multiplied by
c'(a s), and p_a = softmax(c(a s)).

Quadrature. [0, 1] is split into P panels of m Gauss-Legendre nodes. With R the largest range of the scores of a query
and |Im z| R <= pi / 2, all e^(z s_k) lie in a sector of angle pi / 2, so that |p_z| <= sqrt(2) p_x with x = Re z. The
integrand, summed over keys, is then at most M = sqrt(2) (1 + sqrt(2)) r_t / 2 in modulus, with r_t the range of the
term over the keys. It is analytic in the Bernstein ellipse of every panel with rho - 1 / rho = 2 pi P / R, and the
error of all panels together is at most

    (32 / 15) M rho^(-2 m) / (1 - rho^-2)

With a soft cap c the same holds for rho - 1 / rho = min(pi^2 / 4, pi c) P / U, with U the largest |score|, and M =
2 sqrt(2) (1 + sqrt(2)) max |s_t|: where the imaginary part y of its argument is at most pi / 4, |tanh| <= 1 and the
imaginary part of tanh is at most tan(y) <= 4 y / pi.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log, pi, sqrt
from typing import Any, ClassVar

import numpy as np

from tnlib import ArgumentError
from tnlib._html import heat_image
from tnlib._typing import Array
from tnlib._validate import as_array, as_real
from tnlib_adapters.attention.softmax import softmax
from tnlib_adapters.result_table import Columns, Table, descending

_RANGE = 4.0  # range of the scores on one panel: wider panels need more nodes, narrower ones more panels
_MOST = 5e6  # numbers of one array of a chunk of rows
_DRAWN = 64  # terms of the picture in a notebook
_STRIP = sqrt(2) * (1 + sqrt(2))  # bound of the integrand for terms of modulus 1


@dataclass(frozen=True, eq=False, repr=False)
class SoftmaxAttributions(Table):
    """Attention weights as a sum over terms of the scores, returned by `softmax_attributions`.

    Parameters
    ----------
    terms
        (terms, ..., n, n'): the part of the attention weights that is due to each term.
    baseline
        (..., n, n'): the weights for zero scores, uniform attention over the visible keys.
    remainder
        (..., n, n'): the weights minus `baseline` and all terms, the error of the quadrature.
    bound
        (terms, ..., n): bound of the quadrature error of every term and query, summed over keys.
    n_nodes
        Number of nodes of the quadrature.

    Notes
    -----
    In the table, "change" is the sum over keys of the moduli of a term, averaged over queries; "bound" is the largest
    one of the term.

    References
    ----------
    M. Sundararajan et al., "Axiomatic Attribution for Deep Networks" (2017), for integrated gradients; L. N. Trefethen,
    "Approximation Theory and Approximation Practice" (2013), theorem 19.3, for the bound.

    Examples
    --------
    A term that is zero for all keys has no part in the weights:

    >>> import numpy as np
    >>> found = softmax_attributions(np.array([[[1.0, 0.0]], [[0.0, 0.0]]]))
    >>> found.terms[:, 0].round(3), float(abs(found.remainder).max()) < 1e-9
    (array([[ 0.231, -0.231],
           [ 0.   ,  0.   ]]), True)
    """

    terms: Array
    baseline: Array
    remainder: Array
    bound: Array
    n_nodes: int

    _FORMATS: ClassVar = {"bound": ".0e"}
    _SHOWN = 6

    @property
    def _changes(self) -> Array:
        """Sum over keys of the moduli of every term, averaged over queries, (terms,)."""
        return np.asarray(self._of_terms(np.abs(self.terms).sum(axis=-1)).mean(axis=1))

    def _of_terms(self, by_query: Array) -> Array:
        return by_query.reshape(len(self.terms), -1)

    @property
    def _title(self) -> str:
        return f"SoftmaxAttributions of {len(self.terms)} terms of weights {self.baseline.shape}"

    def _columns(self, rows: Any) -> Columns:
        bounds = self._of_terms(self.bound).max(axis=1)
        return {"term": np.arange(len(self.terms))[rows], "change": self._changes[rows], "bound": bounds[rows]}

    def _printed(self) -> Array:
        return descending(self._changes, self._SHOWN)

    def _notes(self) -> list[str]:
        return [f"remainder at most {np.abs(self.remainder).max():.1g}, {self.n_nodes} nodes"]

    def _picture(self) -> str:
        label = "mean change of the weights by the terms, largest first"
        return heat_image(np.sort(self._changes)[::-1][None, :_DRAWN], label, width=320)


def softmax_attributions(
    score_terms: Array, visible: Array | None = None, *, softcap: float | None = None, rtol: float = 1e-10
) -> SoftmaxAttributions:
    """Return attention weights as a sum over terms of the scores, by integrated gradients along a straight line.

    Parameters
    ----------
    score_terms
        (terms, ..., n, n'), whose sum are the scores, before a soft cap; for example `OpenLayer.score_terms`, reshaped.
    visible
        (n, n'), bool: the mask of attention; every query needs a visible key. None: all keys are visible.
    softcap
        Soft cap of the scores, or None.
    rtol
        Bound of the quadrature error of every term and query, summed over keys, relative to the range of the term over
        the keys (its largest modulus with a soft cap).

    Returns
    -------
    SoftmaxAttributions
        `baseline` plus the sum of `terms` is the pattern, up to `remainder`.

    Raises
    ------
    ArgumentError
        If shapes do not match, or rtol is not between 0 and 1.

    References
    ----------
    M. Sundararajan et al., "Axiomatic Attribution for Deep Networks" (2017), for integrated gradients; L. N. Trefethen,
    "Approximation Theory and Approximation Practice" (2013), theorem 19.3, for the bound.

    Examples
    --------
    Both terms raise the score of the first key; the weights are those of softmax([3, 0]):

    >>> import numpy as np
    >>> found = softmax_attributions(np.array([[[2.0, 0.0]], [[1.0, 0.0]]]))
    >>> found.terms[:, 0, 0].round(3), found.baseline[0]
    (array([0.302, 0.151]), array([0.5, 0.5]))
    >>> f"{found.baseline[0, 0] + found.terms[:, 0, 0].sum():.6f}"
    '0.952574'
    """
    terms = as_array("softmax_attributions", "score_terms", score_terms)
    if terms.ndim < 3 or terms.dtype.kind == "c":
        raise ArgumentError(
            f"softmax_attributions: score_terms must be real, (terms, ..., n, n'), got {terms.dtype} of shape "
            f"{terms.shape}; pass a leg of terms first."
        )
    mask = np.ones(terms.shape[-2:], bool) if visible is None else np.asarray(visible)
    if mask.shape != terms.shape[-2:] or mask.dtype != np.bool_ or not mask.any(axis=-1).all():
        raise ArgumentError(
            f"softmax_attributions: visible must be bool of shape {terms.shape[-2:]} with a visible key for every "
            f"query, got {mask.dtype} of shape {mask.shape}; pass Attention.mask(n)."
        )
    rtol = as_real("softmax_attributions", "rtol", rtol, "rtol=1e-10")
    if not 0 < rtol < 1:
        raise ArgumentError(f"softmax_attributions: rtol must lie between 0 and 1, got {rtol!r}; pass 1e-10.")
    scores = terms.sum(axis=0)
    width = np.abs(np.where(mask, scores, 0)).max() if softcap is not None else _ranges(scores, mask).max()
    nodes, weights, error = _quadrature(float(width), rtol, softcap)
    out = _through_mean_derivative(terms, scores, mask, softcap, nodes, weights)
    baseline, _ = _weights(np.zeros_like(scores), mask, softcap)
    pattern, _ = _weights(scores, mask, softcap)
    sizes = _ranges(terms, mask) if softcap is None else np.abs(np.where(mask, terms, 0)).max(axis=-1)
    return SoftmaxAttributions(out, baseline, pattern - baseline - out.sum(axis=0), error * sizes, len(nodes))


def _through_mean_derivative(
    terms: Array, scores: Array, mask: Array, softcap: float | None, nodes: Array, weights: Array
) -> Array:
    """Return the terms times the derivative of the softmax averaged over the line, with the shape of `terms`.

    Row by row, the average of diag(p) - p p^T is a matrix (n', n'), so that the cost of the nodes does not grow with
    the number of terms.
    """
    n_terms, n_keys = len(terms), terms.shape[-1]
    rows, of_rows = scores.reshape(-1, n_keys), terms.reshape(n_terms, -1, n_keys)
    visible = np.broadcast_to(mask, scores.shape).reshape(-1, n_keys)
    out = np.empty_like(of_rows)
    size = max(1, int(_MOST / (n_keys * max(n_keys, n_terms, len(nodes)))))
    for start in range(0, len(rows), size):
        some = slice(start, start + size)
        p, slope = _weights(nodes[:, None, None] * rows[some], visible[some], softcap)  # node row key
        weighted = weights[:, None, None] * p
        mean = (weighted * slope).sum(axis=0)  # row key
        products = weighted.transpose(1, 2, 0) @ (p * slope).transpose(1, 0, 2)  # row key [node] key
        change = of_rows[:, some].transpose(1, 0, 2)  # row term key
        out[:, some] = (mean[:, None] * change - change @ products.swapaxes(-1, -2)).transpose(1, 0, 2)
    return out.reshape(terms.shape)


def _weights(scores: Array, mask: Array, softcap: float | None) -> tuple[Array, Array]:
    """Return attention weights, and the derivative of the soft cap."""
    if softcap is None:
        return softmax(scores, mask), np.ones(())
    t = np.tanh(scores / softcap)
    return softmax(softcap * t, mask), 1 - t * t


def _ranges(scores: Array, mask: Array) -> Array:
    """Return the range of the scores of every query over its visible keys, (..., n)."""
    ranges: Array = np.where(mask, scores, -np.inf).max(axis=-1) - np.where(mask, scores, np.inf).min(axis=-1)
    return ranges


def _quadrature(width: float, rtol: float, softcap: float | None) -> tuple[Array, Array, float]:
    """Return nodes and weights on [0, 1], and the bound of the error for terms of size 1."""
    n_panels = max(1, ceil(width / _RANGE))
    strip = (2 * pi if softcap is None else min(pi**2 / 4, pi * softcap)) * n_panels / max(width, 1.0)
    rho = (strip + sqrt(strip**2 + 4)) / 2
    factor = 32 / 15 * _STRIP * (0.5 if softcap is None else 2) / (1 - rho**-2)
    n = max(2, ceil(log(factor / rtol) / (2 * log(rho))))  # the bound is that of at least two nodes
    x, w = np.polynomial.legendre.leggauss(n)
    nodes = (np.arange(n_panels)[:, None] + (1 + x) / 2) / n_panels  # panel node
    return nodes.ravel(), np.tile(w / (2 * n_panels), n_panels), factor * rho ** (-2 * n)
