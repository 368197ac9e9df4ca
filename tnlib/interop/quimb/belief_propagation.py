r"""Belief propagation by quimb: the gauge of networks with loops, truncation in it, and graphical models.

Gauge. A tensor T together with its conjugate sends through bond b the message

    M_b  =  T (all other bonds weighted by their messages) T^H

In this gauge every message is diag(weights of b), the same from both sides. On a tree or a chain the weights are the
Schmidt values; with loops they are the estimate of them from the neighbourhood of the bond. Simple updates without any
gate have the same fixed point, and take no square roots of squares: quimb's `gauge_all_simple` does the sweeps.

Graphical models. Factors f_a and a network with non-negative tensors f_a are dual descriptions of one function:
variables are indices, and an index may join any number of tensors,

    Z  =  sum over all indices of prod_a f_a        p(i)  =  the same with index i kept, over Z

Messages m(a -> i) and m(i -> a), vectors over the values of an index, are iterated to a fixed point by quimb's `HD1BP`,

    m(i -> a)  =  prod over other factors b of m(b -> i)      m(a -> i)  =  f_a contracted with the m(j -> a), j != i

At the fixed point the marginals are the products of all incoming messages, and Z is the Bethe value. Both are exact on
trees. With loops they are approximations, and usually good ones where correlations around a loop are weak.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import quimb.tensor as qtn

from tnlib._errors import ArgumentError, ArgumentTypeError, ConvergenceWarning
from tnlib._fit import Fit, report
from tnlib._typing import Array
from tnlib._validate import as_count, as_max_rank, as_real, as_rtol, refuse_foreign_keywords
from tnlib.interop.quimb.network_arguments import as_arrays, as_network
from tnlib.interop.quimb.network_format import Network
from tnlib.linalg.scaling import normalize, rescale
from tnlib.linalg.threads import single_threaded_blas
from tnlib.linalg.truncation import TruncationBudget

_TOL = 1000.0  # default tolerance of the gauge in eps
_TINY = 1e-300  # added to divisors of messages, so that impossible values, 0 / 0, keep weight 0
_NOISE = 16.0  # eps of the largest weight of a bond, below which a weight is roundoff

Weights = dict[str, Array]


@dataclass(frozen=True, eq=False)
class Gauged:
    """A network in the gauge of belief propagation, and the weights of its bonds.

    `network` equals the argument up to roundoff; the tensors at both ends of a bond hold the square roots of its
    weights. `weights` are by the name of the index: positive, descending, of Euclidean norm 1. `error` is the largest
    change of the weights of a bond in the last of `n_iter` sweeps, in this norm; `converged` is False if it exceeds the
    tolerance.

    References
    ----------
    R. Alkabetz and I. Arad, "Tensor networks contraction and the belief propagation algorithm", Phys. Rev. Research 3
    (2021); J. Tindall and M. Fishman, "Gauging tensor networks with belief propagation", SciPost Phys. 15 (2023).

    Examples
    --------
    A chain, whose weights are its Schmidt values:

    >>> import numpy as np, tnlib
    >>> from tnlib.interop.quimb import gauge_loops, to_network
    >>> found = gauge_loops(to_network(tnlib.tt_svd(np.eye(4) / 2).value))
    >>> found.converged, found.weights["bond1"].round(9)
    (True, array([0.5, 0.5, 0.5, 0.5]))
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
        Largest change of the weights of a bond in the last sweep; 1000 eps by default.
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
            f"gauge_loops: the weights still change by {error:.3g} after {count} sweeps; raise n_iter.",
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
    """Gauge one connected part in place and add its weights; return their last change (NaN for zero) and the sweeps.

    `eps` is that of the data; the work is done in double precision.
    """
    if not part.inner_inds():
        return 0.0, 0
    loops, gauges, change = _has_loops(part), Weights(), math.inf
    # a sweep leads away from the first tensor; sweeps back and forth settle a chain in three
    backward = qtn.TensorNetwork(list(part)[::-1], virtual=True)
    with np.errstate(all="ignore"):  # a zero network divides by zero
        for sweep in range(1, n_iter + 1):
            # small weights may matter around a loop: only the first sweep removes those that two tensors do not need
            cutoff, info = 0.0 if loops and sweep > 1 else _NOISE * eps, dict[str, float]()
            try:
                (part if sweep % 2 else backward).gauge_all_simple_(
                    max_iterations=1,
                    tol=np.finfo(float).tiny,  # positive: measure the change
                    smudge=np.finfo(float).eps,
                    gauges=gauges,
                    info=info,
                    compress_opts={"cutoff": cutoff, "cutoff_mode": "rel"},
                )
            except (np.linalg.LinAlgError, ValueError):  # the SVD met NaN
                return math.nan, sweep
            if not all(np.isfinite(s).all() for s in gauges.values()):
                return math.nan, sweep
            change = float(info["max_sdiff"])
            if change <= tol:
                break
    weights.update(gauges)
    return change, sweep


def _has_loops(part: qtn.TensorNetwork) -> bool:
    return bool(len(part.inner_inds()) >= part.num_tensors)


@refuse_foreign_keywords
def truncate_gauged(gauged: Gauged, *, rtol: float | None = None, max_rank: int | None = None) -> Fit[Network]:
    """Return the network with the largest weights of every bond, and an error estimate from those left out.

    Parameters
    ----------
    gauged
        The result of `gauge_loops`. The weights estimate the Schmidt values of a bond, exactly on trees.
    rtol, max_rank
        Estimated relative Frobenius error of the whole network, distributed over the bonds, and maximal rank of every
        bond; the smaller rank is used. If both are None, weights above roundoff are kept.

    Returns
    -------
    Fit
        Of a `Network`. `error` is the root of the sum of all squared weights that were left out, at most 1; not
        certified: on a tree of which one bond was truncated it is exact, with loops an estimate.

    References
    ----------
    J. Tindall and M. Fishman, "Gauging tensor networks with belief propagation", SciPost Phys. 15 (2023).

    Examples
    --------
    >>> import numpy as np, tnlib
    >>> from tnlib.interop.quimb import gauge_loops, to_network, truncate_gauged
    >>> train = tnlib.tt_svd(np.diag([4.0, 3.0])).value
    >>> fit = truncate_gauged(gauge_loops(to_network(train)), max_rank=1)
    >>> fit.value.ranks, f"{fit.error:.3f}"
    ((1,), '0.600')
    """
    if not isinstance(gauged, Gauged):
        raise ArgumentTypeError(
            f"truncate_gauged: gauged must be the result of gauge_loops, got a {type(gauged).__name__}; gauge the "
            "network first."
        )
    rtol, max_rank = as_rtol("truncate_gauged", rtol), as_max_rank("truncate_gauged", max_rank)
    dtype = np.result_type(*(tensor.data for tensor in gauged.network))
    sizes = [len(weights) for weights in gauged.weights.values()]
    budget = TruncationBudget(1.0, rtol, sizes, dtype, max_rank)
    ranks = {index: budget.truncate(weights) for index, weights in gauged.weights.items()}
    out = gauged.network.copy()
    for tensor in out:
        kept = tuple(slice(ranks.get(index)) for index in tensor.inds)
        tensor.modify(data=np.ascontiguousarray(tensor.data[kept]), left_inds=None)
    error = min(1.0, budget.error)
    return report("truncate_gauged", Network(out), error=error, rtol=rtol, estimate="", notes=budget.notes("bond"))


@dataclass(frozen=True, eq=False)
class Beliefs:
    """Marginals and partition function of a graphical model, returned by `propagate_beliefs`.

    Parameters
    ----------
    log_partition
        Natural logarithm of the partition function, the full contraction of the network.
    marginals
        Index to probabilities (n,), which sum to one.
    error
        Largest change of a message in the last sweep.
    converged
        False if `error` exceeds the tolerance.
    n_iter
        Number of sweeps.

    References
    ----------
    E. Robeva and A. Seigal, "Duality of graphical models and tensor networks", Information and Inference 8 (2019); J.
    Yedidia, W. Freeman and Y. Weiss, "Constructing free-energy approximations and generalized belief propagation
    algorithms", IEEE Trans. Inf. Theory 51 (2005).

    Examples
    --------
    A biased coin, and a second one that always equals it:

    >>> import numpy as np, quimb.tensor as qtn
    >>> from tnlib.interop.quimb import propagate_beliefs
    >>> factors = [qtn.Tensor(np.array([3.0, 1.0]), "a"), qtn.Tensor(np.eye(2), "ab")]
    >>> found = propagate_beliefs(qtn.TensorNetwork(factors))
    >>> found.marginals["b"].round(9), f"{np.exp(found.log_partition):.6f}"
    (array([0.75, 0.25]), '4.000000')
    """

    log_partition: float
    marginals: Mapping[str, Array] = field(repr=False)
    error: float
    converged: bool
    n_iter: int


def propagate_beliefs(
    tn: qtn.TensorNetwork, *, tol: float = 1e-12, damping: float = 0.0, n_iter: int = 1000
) -> Beliefs:
    """Return the marginals of all indices and the partition function of a network of non-negative tensors.

    Parameters
    ----------
    tn
        A quimb TensorNetwork with real non-negative entries, the factors. Indices are variables: each may belong to any
        number of tensors, and all are summed over, open ones too.
    tol
        Largest change of a normalised message.
    damping
        Share of the old message in the new one, from 0 to below 1; helps where messages oscillate.
    n_iter
        Largest number of sweeps; where they do not reach `tol`, a ConvergenceWarning is issued.

    Returns
    -------
    Beliefs
        Exact on trees; with loops, the Bethe approximation. An index that a tensor repeats stands for its diagonal.

    Raises
    ------
    ArgumentError
        If an entry is negative or complex, or all configurations have weight zero; with loops, factors that contradict
        each other may go unnoticed.

    References
    ----------
    E. Robeva and A. Seigal, "Duality of graphical models and tensor networks", Information and Inference 8 (2019); J.
    Yedidia, W. Freeman and Y. Weiss, "Constructing free-energy approximations and generalized belief propagation
    algorithms", IEEE Trans. Inf. Theory 51 (2005).

    Examples
    --------
    A chain of three spins with a field on the first one:

    >>> import numpy as np, quimb.tensor as qtn
    >>> from tnlib.interop.quimb import propagate_beliefs
    >>> bond, field = np.exp([[1.0, -1.0], [-1.0, 1.0]]), np.exp([0.5, -0.5])
    >>> factors = [qtn.Tensor(field, "a"), qtn.Tensor(bond, "ab"), qtn.Tensor(bond, "bc")]
    >>> found = propagate_beliefs(qtn.TensorNetwork(factors))
    >>> f"{found.log_partition:.6f}", found.marginals["c"].round(4)
    ('3.067118', array([0.634, 0.366]))
    """
    as_network("propagate_beliefs", tn)
    n_iter = as_count("propagate_beliefs", "n_iter", n_iter)
    tol = as_real("propagate_beliefs", "tol", tol, "tol=1e-12")
    damping = as_real("propagate_beliefs", "damping", damping, "damping=0.5")
    if not (tol > 0 and 0 <= damping < 1):  # NaN too
        raise ArgumentError(
            f"propagate_beliefs: tol must be positive and damping from 0 to below 1, got {tol} and {damping}; leave "
            "them out."
        )
    factors, log_scale = _factors(tn)
    from quimb.tensor.belief_propagation import HD1BP
    from quimb.tensor.belief_propagation.hd1bp import compute_all_index_marginals_from_messages

    info: dict[str, Any] = {}
    with warnings.catch_warnings(), np.errstate(all="ignore"):  # if all weights are zero; refused below
        warnings.simplefilter("ignore")
        messages = HD1BP(factors, damping=damping, smudge_factor=_TINY)
        messages.run(max_iterations=n_iter, tol=tol, tol_rolling_diff=0.0, info=info)
        mantissa, exponent = messages.contract(strip_exponent=True)
        marginals = compute_all_index_marginals_from_messages(factors, messages.messages)
    if not (np.isfinite(exponent) and mantissa > 0 and all(np.isfinite(p).all() for p in marginals.values())):
        raise ArgumentError(
            "propagate_beliefs: some configuration must have a positive weight, got messages of zero; remove a factor "
            "that contradicts the others, or entries that are more than 150 orders of magnitude smaller than others."
        )
    error = float(info["max_mdiff"])
    if not info["converged"]:
        warnings.warn(
            f"propagate_beliefs: messages still change by {error:.3g} after {info['iterations']} sweeps; raise n_iter "
            "or damping.",
            ConvergenceWarning,
            stacklevel=2,
        )
    log_partition = math.log(mantissa) + float(exponent) * math.log(10) + log_scale
    return Beliefs(log_partition, marginals, error, bool(info["converged"]), int(info["iterations"]))


def _factors(tn: qtn.TensorNetwork) -> tuple[qtn.TensorNetwork, float]:
    """Return a copy in float64 with entries up to 1, and the logarithm of the scale that was removed."""
    out = tn.copy()
    log_scale = float(out.exponent) * math.log(10)
    out.exponent = 0.0
    for tensor, data in zip(out, as_arrays("propagate_beliefs", tn), strict=True):
        if data.dtype.kind == "c" or data.min(initial=0.0) < 0:
            raise ArgumentError(
                "propagate_beliefs: tn must hold real non-negative entries, got others in the tensor of indices "
                f"{', '.join(tensor.inds)}; its squared moduli are a graphical model, or use gauge_loops."
            )
        scaled, e = normalize(data.astype(np.float64))
        tensor.modify(data=scaled, left_inds=None)
        tensor.collapse_repeated_()
        log_scale += e * math.log(2)
    return out, log_scale
