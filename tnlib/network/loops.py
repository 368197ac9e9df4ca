"""A gauge for networks with loops: the fixed point of belief propagation."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

import numpy as np

from tnlib._errors import ArgumentError, ArgumentTypeError, ConvergenceWarning
from tnlib._typing import Array
from tnlib._validate import as_count
from tnlib.linalg.scale import exponent, shift
from tnlib.linalg.threads import own_threads
from tnlib.network.arguments import arrays_of, as_network, need

_TOL = 1000.0  # eps by which a message may miss the fixed point
_NOISE = 16.0  # eps of the largest weight of a bond below which a weight is roundoff

Weights = dict[str, Array]


@dataclass(frozen=True, eq=False)
class Gauged:
    """A network in the gauge of belief propagation, and the weights on its bonds.

    Parameters
    ----------
    network
        The same network up to roundoff, the root of every weight in the tensors on both sides of its bond.
    weights
        Of every bond, by the name of its index: positive, descending, of Euclidean norm 1.
    error
        Largest distance of a message from the fixed point, relative to the message.
    converged
        False where the sweeps ran out before `error` was small.
    n_iter
        Sweeps over all bonds.
    """

    network: Any = field(repr=False)
    weights: Mapping[str, Array] = field(repr=False)
    error: float
    converged: bool
    n_iter: int


@own_threads
def gauge_loops(tn: Any, *, tol: float | None = None, n_iter: int = 1000) -> Gauged:
    r"""Bring a network, with loops or without, into the gauge in which all messages of belief propagation are diagonal.

    A tensor T together with its conjugate sends through bond b the message

        M_b  =  T (all other bonds weighted by their messages) T^H

    and in this gauge every message is diag(weights of b), the same from both sides. On a tree or a chain the weights
    are the Schmidt values; with loops they are their best guess from the neighbourhood. The sweeps are those of quimb's
    `gauge_all_simple`: simple updates without any gate have the same fixed point, and take no square roots of squares.

    Parameters
    ----------
    tn
        A TensorNetwork of quimb; every index joins at most two tensors (see `spell_out`). It is not changed.
    tol
        Largest distance from the fixed point; by default a thousand eps.
    n_iter
        Most sweeps over all bonds.

    Returns
    -------
    Gauged
        Of one dtype; several indices between two tensors are fused to one. Bonds lose what the two tensors at their
        ends do not need, and without loops all that is roundoff. A network that is zero comes back as it is, with equal
        weights.

    Raises
    ------
    ArgumentTypeError, ArgumentError
        If `tn` is no network, an index joins more than two tensors, or a part with loops has no open index.
    ModuleNotFoundError
        If quimb is not installed.

    Warns
    -----
    ConvergenceWarning
        If the sweeps ran out.

    References
    ----------
    R. Alkabetz and I. Arad, "Tensor networks contraction and the belief propagation algorithm", Phys. Rev. Research 3
    (2021); J. Tindall and M. Fishman, "Gauging tensor networks with belief propagation", SciPost Phys. 15 (2023).

    Examples
    --------
    >>> import numpy as np, tnlib
    >>> bell = tnlib.network.to_network(tnlib.tt_svd(np.diag([4.0, 3.0])).value)
    >>> tnlib.network.gauge_loops(bell).weights["bond1"].round(12)
    array([0.8, 0.6])
    """
    as_network("gauge_loops", tn)
    tol, n_iter = _as_tol(tol), as_count("gauge_loops", "n_iter", n_iter)
    if many := [i for i, holders in tn.ind_map.items() if len(holders) > 2]:
        raise ArgumentError(
            f"gauge_loops: tn must have no index on more than two tensors, got {many[0]} on "
            f"{len(tn.ind_map[many[0]])}; store its copy tensor with spell_out."
        )
    out, dtype = _in_range(tn)
    eps = float(np.finfo(dtype).eps)
    limit = _TOL * eps if tol is None else tol
    if any(_has_loops(part) and not part.outer_inds() for part in out.subgraphs(virtual=True)):
        raise ArgumentError(
            "gauge_loops: tn must have open indices where it has loops, got a closed part; messages between tensors "
            "without open legs have rank one and leave nothing of a bond, so contract it instead."
        )
    weights: Weights = {}
    parts = [_gauge_part(part, weights, eps, limit, n_iter) for part in out.subgraphs(virtual=True)]
    if any(math.isnan(error) for error, _ in parts):  # a bond without weight: the network is zero
        inner = {i: np.ones(tn.ind_size(i)) / math.sqrt(tn.ind_size(i)) for i in tn.inner_inds()}
        return Gauged(tn.copy(), inner, 0.0, True, 0)
    out.gauge_simple_insert(weights)
    error, sweeps = (max(column) for column in zip(*parts, strict=True))
    for tensor in out:
        tensor.modify(data=tensor.data.astype(dtype))
    weights = {i: s.astype(np.zeros(0, dtype).real.dtype) for i, s in weights.items()}
    if error > limit:
        warnings.warn(
            f"gauge_loops: the messages miss the fixed point by {error:.3g} after {sweeps} sweeps; raise n_iter.",
            ConvergenceWarning,
            stacklevel=3,
        )
    return Gauged(out, weights, error, error <= limit, sweeps)


def _as_tol(tol: Any) -> float | None:
    if tol is not None and (not isinstance(tol, Real) or isinstance(tol, bool)):
        raise ArgumentTypeError(f"gauge_loops: tol must be a real number, got {tol!r}; pass for example tol=1e-10.")
    if tol is not None and not float(tol) >= 0:
        raise ArgumentError(f"gauge_loops: tol must not be negative, got {tol}; leave it out for roundoff.")
    return None if tol is None else float(tol)


def _in_range(tn: Any) -> tuple[Any, np.dtype[Any]]:
    """Return a copy in double precision whose arrays can be squared, powers of two in its exponent; and the dtype.

    Weights are divided by, as many in one product as a tensor has bonds: single precision would not hold that.
    """
    out = tn.copy()
    tensors = list(out.tensor_map.values())
    arrays, twos = arrays_of("gauge_loops", tensors), 0
    for tensor, data in zip(tensors, arrays, strict=True):
        e = exponent(data)
        double = np.result_type(data, np.float64)
        # a gauge does not respect isometries
        tensor.modify(data=shift(data, -e).astype(double, copy=False), left_inds=None)
        twos += e
    out.exponent = float(out.exponent) + twos * math.log10(2)
    out.fuse_multibonds_()
    return out, np.result_type(*arrays)


def _gauge_part(part: Any, weights: Weights, eps: float, limit: float, n_iter: int) -> tuple[float, int]:
    """Gauge one connected part in place; return how far its messages are from the fixed point, and the sweeps.

    `eps` is that of the data; the work is done in double precision.
    """
    if not part.inner_inds():
        return 0.0, 0
    error, smudge = math.inf, float(np.finfo(np.float64).eps)
    mine: Weights = {}
    loops = _has_loops(part)
    # a sweep runs away from the first tensor; back and forth, it is done with a chain in three
    backward = need("gauge_loops").TensorNetwork(list(part.tensor_map.values())[::-1], virtual=True)
    with np.errstate(all="ignore"):  # of a network that is zero
        for sweep in range(1, n_iter + 1):
            # around a loop small weights may matter: there only what a pair of tensors does not need may go
            cut = {"cutoff": 0.0 if loops and sweep > 1 else _NOISE * eps, "cutoff_mode": "rel"}
            try:
                direction = part if sweep % 2 else backward
                direction.gauge_all_simple_(max_iterations=1, smudge=smudge, gauges=mine, compress_opts=cut)
            except (np.linalg.LinAlgError, ValueError):  # NaN met the SVD
                return math.nan, sweep
            error = max(_miss(tensor, mine) for tensor in part)
            if not error > limit:
                break
    weights.update(mine)
    return error, sweep


def _has_loops(part: Any) -> bool:
    return bool(len(part.inner_inds()) >= part.num_tensors)


def _miss(tensor: Any, weights: Weights) -> float:
    """Return how far the messages that a tensor (without any weights in it) sends are from diag(weights)."""
    bonds = [k for k, i in enumerate(tensor.inds) if i in weights]
    found = 0.0
    for k in bonds:
        s, a = weights[tensor.inds[k]], tensor.data
        for j in bonds:  # the root of this bond's weights, all of the others'
            other = weights[tensor.inds[j]]
            a = a * (np.sqrt(other) if j == k else other).reshape(-1, *[1] * (a.ndim - j - 1))
        rows = np.moveaxis(a, k, 0).reshape(len(s), -1)
        message = rows @ rows.conj().T
        found = max(found, float(np.linalg.norm(message / np.linalg.norm(message) - np.diag(s / np.linalg.norm(s)))))
        if math.isnan(float(np.linalg.norm(message))) or not message.any():
            return math.nan
    return found
