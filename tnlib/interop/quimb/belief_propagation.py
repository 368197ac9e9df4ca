r"""The gauge of belief propagation, for networks with or without loops.

A tensor T together with its conjugate sends through bond b the message

    M_b  =  T (all other bonds weighted by their messages) T^H

In this gauge every message is diag(weights of b), the same from both sides. On a tree or a chain the weights are the
Schmidt values; with loops they are the estimate of them from the neighbourhood of the bond. Simple updates without any
gate have the same fixed point, and take no square roots of squares: quimb's `gauge_all_simple` does the sweeps.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import quimb.tensor as qtn

from tnlib._errors import ArgumentError, ConvergenceWarning
from tnlib._typing import Array
from tnlib._validate import as_count, as_real
from tnlib.interop.quimb.network_arguments import as_arrays, as_network
from tnlib.linalg.scaling import rescale
from tnlib.linalg.threads import single_threaded_blas

_TOL = 1000.0  # default tolerance in eps
_NOISE = 16.0  # eps of the largest weight of a bond, below which a weight is roundoff

Weights = dict[str, Array]


@dataclass(frozen=True, eq=False)
class Gauged:
    """A network in the gauge of belief propagation, and the weights of its bonds.

    `network` equals the argument up to roundoff; the tensors at both ends of a bond hold the square roots of its
    weights. `weights` are by the name of the index: positive, descending, of Euclidean norm 1. `error` is the largest
    relative distance of a message from the fixed point after `n_iter` sweeps over all bonds, `converged` is False if it
    exceeds the tolerance.
    """

    network: qtn.TensorNetwork = field(repr=False)
    weights: Mapping[str, Array] = field(repr=False)
    error: float
    converged: bool
    n_iter: int


@single_threaded_blas
def gauge_loops(tn: qtn.TensorNetwork, *, tol: float | None = None, n_iter: int = 1000) -> Gauged:
    """Gauge a network so that all messages of belief propagation are diagonal.

    Parameters
    ----------
    tn
        A quimb TensorNetwork; every index joins at most two tensors (see `spell_out`).
    tol
        Largest relative distance of a message from the fixed point; 1000 eps by default.
    n_iter
        Largest number of sweeps over all bonds; where they do not reach `tol`, a ConvergenceWarning is issued.

    Returns
    -------
    Gauged
        Tensors have the common dtype of `tn`; several indices between two tensors are fused. Directions of a bond that
        the tensors at its two ends do not need are removed, and in networks without loops all weights below roundoff.
        A zero network comes back unchanged, with equal weights.

    Raises
    ------
    ArgumentError
        If an index joins more than two tensors, or a part with loops has no open index.

    References
    ----------
    R. Alkabetz and I. Arad, "Tensor networks contraction and the belief propagation algorithm", Phys. Rev. Research 3
    (2021); J. Tindall and M. Fishman, "Gauging tensor networks with belief propagation", SciPost Phys. 15 (2023).

    Examples
    --------
    >>> import numpy as np, tnlib
    >>> from tnlib.interop.quimb import gauge_loops, to_network
    >>> bell = to_network(tnlib.tt_svd(np.diag([4.0, 3.0])).value)
    >>> gauge_loops(bell).weights["bond1"].round(12)
    array([0.8, 0.6])
    """
    as_network("gauge_loops", tn)
    n_iter = as_count("gauge_loops", "n_iter", n_iter)
    if tol is not None and not (tol := as_real("gauge_loops", "tol", tol, "tol=1e-10")) >= 0:  # NaN too
        raise ArgumentError(f"gauge_loops: tol must not be negative, got {tol}; leave it out for roundoff.")
    for index, ids in tn.ind_map.items():
        if len(ids) > 2:
            raise ArgumentError(
                f"gauge_loops: tn must have no index on more than two tensors, got {index} on {len(ids)}; "
                "store its copy tensor with spell_out."
            )
    out, dtype = _in_double_precision(tn)
    parts = out.subgraphs(virtual=True)
    if any(_has_loops(part) and not part.outer_inds() for part in parts):
        raise ArgumentError(
            "gauge_loops: tn must have open indices where it has loops, got a closed part; messages between tensors "
            "without open legs have rank one and leave nothing of a bond, so contract it instead."
        )
    eps = float(np.finfo(dtype).eps)
    tol = _TOL * eps if tol is None else tol
    weights: Weights = {}
    errors, sweeps = zip(*(_gauge_part(part, weights, eps, tol, n_iter) for part in parts), strict=True)
    if any(map(math.isnan, errors)):  # a bond without weight: the network is zero
        equal = {i: np.full(tn.ind_size(i), tn.ind_size(i) ** -0.5) for i in tn.inner_inds()}
        return Gauged(tn.copy(), equal, 0.0, True, 0)
    out.gauge_simple_insert(weights)
    out.apply_to_arrays(lambda a: a.astype(dtype))
    weights = {i: s.astype(np.empty(0, dtype).real.dtype) for i, s in weights.items()}
    error, count = max(errors), max(sweeps)
    if error > tol:
        warnings.warn(
            f"gauge_loops: the messages miss the fixed point by {error:.3g} after {count} sweeps; raise n_iter.",
            ConvergenceWarning,
            stacklevel=3,
        )
    return Gauged(out, weights, error, error <= tol, count)


def _in_double_precision(tn: qtn.TensorNetwork) -> tuple[qtn.TensorNetwork, np.dtype[Any]]:
    """Return a copy in double precision, multiple bonds fused, whose arrays can be squared; and the dtype of `tn`.

    A tensor is divided by the weights of all its bonds at once, which can leave the range of single precision.
    """
    out, arrays = tn.copy(), as_arrays("gauge_loops", tn)
    for tensor, data in zip(out, arrays, strict=True):
        scaled, e = rescale(data.astype(np.result_type(data, np.float64)), dtype=data.dtype)
        tensor.modify(data=scaled, left_inds=None)  # the gauge does not keep isometries
        out.exponent = float(out.exponent) + e * math.log10(2)
    out.fuse_multibonds_()
    return out, np.result_type(*arrays)


def _gauge_part(part: qtn.TensorNetwork, weights: Weights, eps: float, tol: float, n_iter: int) -> tuple[float, int]:
    """Gauge one connected part in place and add its weights; return the error (NaN for zero) and the sweeps.

    `eps` is that of the data; the work is done in double precision.
    """
    if not part.inner_inds():
        return 0.0, 0
    error, smudge, loops = math.inf, float(np.finfo(np.float64).eps), _has_loops(part)
    gauges: Weights = {}
    # a sweep leads away from the first tensor; sweeps back and forth settle a chain in three
    backward = qtn.TensorNetwork(list(part)[::-1], virtual=True)
    with np.errstate(all="ignore"):  # a zero network divides by zero
        for sweep in range(1, n_iter + 1):
            # small weights may matter around a loop: only the first sweep removes those that two tensors do not need
            cutoff = 0.0 if loops and sweep > 1 else _NOISE * eps
            try:
                (part if sweep % 2 else backward).gauge_all_simple_(
                    max_iterations=1,
                    smudge=smudge,
                    gauges=gauges,
                    compress_opts={"cutoff": cutoff, "cutoff_mode": "rel"},
                )
            except (np.linalg.LinAlgError, ValueError):  # the SVD met NaN
                return math.nan, sweep
            error = max(_fixed_point_error(tensor, gauges) for tensor in part)
            if not error > tol:
                break
    weights.update(gauges)
    return error, sweep


def _has_loops(part: qtn.TensorNetwork) -> bool:
    return bool(len(part.inner_inds()) >= part.num_tensors)


def _fixed_point_error(tensor: qtn.Tensor, weights: Weights) -> float:
    """Return the largest distance from diag(weights) of the messages of a tensor that holds no weights itself."""
    error = 0.0
    bonds = [k for k, i in enumerate(tensor.inds) if i in weights]
    for k in bonds:
        a, s = tensor.data, weights[tensor.inds[k]]
        for j in bonds:  # the root of this bond's weights, the weights of all others
            factor = weights[tensor.inds[j]]
            a = a * (np.sqrt(factor) if j == k else factor).reshape(-1, *[1] * (a.ndim - j - 1))
        rows = np.moveaxis(a, k, 0).reshape(len(s), -1)
        message = rows @ rows.conj().T  # b [others] b'
        size = float(np.linalg.norm(message))
        if math.isnan(size) or size == 0:
            return math.nan
        error = max(error, float(np.linalg.norm(message / size - np.diag(s / np.linalg.norm(s)))))
    return error
