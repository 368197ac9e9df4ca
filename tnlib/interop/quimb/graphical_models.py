r"""Graphical models as tensor networks: marginals and partition functions by belief propagation.

A graphical model with factors f_a and a network with non-negative tensors f_a are dual descriptions of one function:
variables are indices, and an index may join any number of tensors,

    Z  =  sum over all indices of prod_a f_a        p(i)  =  the same with index i kept, over Z

Messages m(a -> i) and m(i -> a), vectors over the values of an index, are iterated to a fixed point,

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

from tnlib._errors import ArgumentError, ConvergenceWarning
from tnlib._typing import Array
from tnlib._validate import as_count, as_real
from tnlib.interop.quimb.network_arguments import as_arrays, as_network
from tnlib.linalg.scaling import normalize

_TOL = 1e-12  # default of the largest change of a message
_TINY = 1e-300  # added to divisors, so that impossible values, 0 / 0, keep weight 0


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
    """

    log_partition: float
    marginals: Mapping[str, Array] = field(repr=False)
    error: float
    converged: bool
    n_iter: int


def propagate_beliefs(tn: qtn.TensorNetwork, *, tol: float = _TOL, damping: float = 0.0, n_iter: int = 1000) -> Beliefs:
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
