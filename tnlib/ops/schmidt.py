"""What a bond of a train carries: Schmidt values, entropies, correlation lengths; and the best cut of one bond."""

from __future__ import annotations

import math
import numbers

import numpy as np

from tnlib._errors import ArgumentError, ArgumentTypeError
from tnlib._fit import Fit, report
from tnlib._typing import Array
from tnlib._validate import as_array, as_count, as_max_rank, as_rtol
from tnlib.formats.kronecker import KroneckerTerms
from tnlib.formats.train import TensorTrain, TTMatrix
from tnlib.gauge.train import move_center
from tnlib.linalg.groups import equal_values, fix_basis, resolution
from tnlib.linalg.orthogonal import triangle
from tnlib.linalg.rank import noise_level
from tnlib.linalg.scale import norm
from tnlib.linalg.svd import thin_svd
from tnlib.linalg.threads import own_threads
from tnlib.ops.operator_schmidt import terms_spectrum
from tnlib.ops.trains import T, as_bond, as_train, put_together, take_apart
from tnlib.sweeps.budget import Budget

_DENSE = 32  # bond size up to which a transfer matrix is formed


@own_threads
def schmidt_values(tt: TensorTrain | TTMatrix | KroneckerTerms, bond: int) -> Array:
    """Return the singular values of the tensor cut at `bond`, descending.

    Values, not their squares; for a state of norm 1 their squares sum to 1. All bonds at once, in one sweep: `vidal`.

    Parameters
    ----------
    tt
        A TensorTrain or TTMatrix; next to its centre this costs one small factorisation. Or KroneckerTerms, whose one
        bond lies between positions and features.
    bond
        1 ... d - 1; bond k lies between cores k - 1 and k.

    Returns
    -------
    ndarray
        (min of the bond's size and its core's rows,), real.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        If `tt` is no train, has no such bond, or a value leaves the range of its dtype.

    Examples
    --------
    >>> import numpy as np, tnlib
    >>> tnlib.schmidt_values(tnlib.tt_svd(np.diag([4.0, 3.0])).value, 1)
    array([4., 3.])
    """
    s, twos, factor = _spectrum("schmidt_values", tt, bond)
    with np.errstate(over="ignore"):
        values = np.asarray(np.ldexp(s * factor, twos))
    if not np.isfinite(values).all():
        raise ArgumentError(
            f"schmidt_values: every value must lie in the range of {values.dtype}, got one beyond; "
            "use tnlib.entanglement_spectrum or tnlib.vidal, which leave the norm aside."
        )
    return values


@own_threads
def entropy(
    tt: TensorTrain | TTMatrix | KroneckerTerms, bond: int, *, order: float = 1.0, base: float = math.e
) -> float:
    """Return the entanglement entropy across `bond`: of p[k] = s[k]^2 / sum(s^2), -sum(p log p).

    Parameters
    ----------
    tt
        A TensorTrain or TTMatrix; its norm does not matter.
    bond
        1 ... d - 1; bond k lies between cores k - 1 and k.
    order
        1 for von Neumann, another a >= 0 for Renyi's log(sum(p^a)) / (1 - a): 0 gives the logarithm of the Schmidt
        rank, inf that of 1 / max(p).
    base
        Of the logarithm: nats by default, 2 for bits.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        If `tt` is no train, has no such bond, or `order` or `base` is off.

    Examples
    --------
    >>> import numpy as np, tnlib
    >>> bell = tnlib.tt_svd(np.eye(2) / np.sqrt(2)).value
    >>> f"{tnlib.entropy(bell, 1, base=2):.6f}"
    '1.000000'
    """
    order, base = _as_real("entropy", "order", order, least=0.0), _as_real("entropy", "base", base, least=0.0)
    if base <= 1.0 or math.isinf(base):
        raise ArgumentError(f"entropy: base must be finite and larger than 1, got {base}; pass for example base=2.")
    s = _spectrum("entropy", tt, bond)[0]
    s = s[s > noise_level(float(np.linalg.norm(s)), s.dtype, len(s))]
    if len(s) == 0:
        return 0.0  # of a zero tensor
    p = np.square(s, dtype=np.float64)
    return max(0.0, _renyi(p / p.sum(), order)) / math.log(base)


def _renyi(p: Array, order: float) -> float:
    """Return log(sum(p^a)) / (1 - a) of probabilities `p` > 0, and its limits at a = 1 and a = inf."""
    logs = np.log(p)
    if order == 1.0:
        return -float(np.sum(p * logs))
    top = float(logs.max())
    if math.isinf(order):
        return -top
    if abs(order - 1.0) < 0.5:  # sum(p^a) is close to 1, and only what it lacks counts: terms of one sign
        return math.log1p(float(np.sum(p * np.expm1((order - 1.0) * logs)))) / (1.0 - order)
    return (order * top + math.log(float(np.sum(np.exp(order * (logs - top)))))) / (1.0 - order)


def entanglement_spectrum(tt: TensorTrain | TTMatrix | KroneckerTerms, bond: int) -> Array:
    """Return -log(s[k]^2 / sum(s^2)) of the Schmidt values at `bond`, ascending; roundoff is left out.

    Parameters
    ----------
    tt
        A TensorTrain or TTMatrix; its norm does not matter.
    bond
        1 ... d - 1; bond k lies between cores k - 1 and k.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        If `tt` is no train, or has no such bond.

    References
    ----------
    H. Li, F. D. M. Haldane, "Entanglement spectrum as a generalization of entanglement entropy", Phys. Rev. Lett. 101
    (2008).

    Examples
    --------
    >>> import numpy as np, tnlib
    >>> tnlib.entanglement_spectrum(tnlib.tt_svd(np.eye(2)).value, 1).round(4)
    array([0.6931, 0.6931])
    """
    s = _spectrum("entanglement_spectrum", tt, bond)[0].astype(np.float64)
    s = s[s > noise_level(float(np.linalg.norm(s)), tt.dtype, len(s))]
    return np.abs(2.0 * np.log(s / np.linalg.norm(s)))  # and not -0.0 for a product


@own_threads
def truncate_bond(tt: T, bond: int, *, rtol: float | None = None, max_rank: int | None = None) -> Fit[T]:
    """Lower the rank of one bond, optimally: norm(tt - fit.value) <= rtol * norm(tt), and no other train does better.

    Parameters
    ----------
    tt
        A TensorTrain or TTMatrix.
    bond
        1 ... d - 1; bond k lies between cores k - 1 and k.
    rtol
        Relative Frobenius error of the whole. Without it and `max_rank`: the numerical rank.
    max_rank
        Cap on the rank; the smaller one wins.

    Returns
    -------
    Fit
        The train with core `bond` as its centre, and the discarded weight as `error ** 2`.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        If `tt` is no train, has no such bond, or a tolerance is off.

    Examples
    --------
    >>> import numpy as np, tnlib
    >>> fit = tnlib.truncate_bond(tnlib.tt_svd(np.diag([4.0, 3.0])).value, 1, max_rank=1)
    >>> f"{fit.error:.3f}", fit.value.ranks
    ('0.600', (1, 1, 1))
    """
    rtol, max_rank = as_rtol("truncate_bond", rtol), as_max_rank("truncate_bond", max_rank)
    as_train("truncate_bond", "tt", tt)
    bond = as_bond("truncate_bond", tt, bond)
    cores, twos, factor = take_apart(tt)
    cores, more = move_center(cores, tt.center, bond - 1)
    left, n, right = cores[bond - 1].shape
    u, s, vh = thin_svd(cores[bond - 1].reshape(left * n, right))
    budget = Budget(norm(s), rtol, [max(right, len(cores))], tt.dtype)
    rank = budget.choose(s, max_rank=max_rank)
    turn = fix_basis(u[:, :rank], equal_values(s[:rank], resolution(s[:rank], tt.dtype)))
    following = cores[bond]
    carry = turn.rows(s[:rank, None] * vh[:rank])  # r' r
    cores[bond - 1] = turn.columns(u[:, :rank]).reshape(left, n, rank)
    cores[bond] = (carry @ following.reshape(right, -1)).reshape(rank, *following.shape[1:])  # r' [r] n r''
    notes = (
        (f"max_rank separates equal singular values at bond {bond}; another rank would be unique",)
        if budget.cuts
        else ()
    )
    value = put_together(tt, cores, bond, twos + more, factor)
    return report("truncate_bond", value, error=budget.error, rtol=rtol, notes=notes)


def correlation_length(core: Array) -> float:
    """Return the correlation length, in sites, of the uniform train that repeats `core`.

    Correlations fall as exp(-distance / length), length = -1 / log|e[1] / e[0]|, of the two largest eigenvalues in
    modulus of the transfer matrix sum over n of conj(A[:, n]) (x) A[:, n].

    Parameters
    ----------
    core
        (r, n, r), in any gauge and of any norm.

    Returns
    -------
    float
        0 for a product state; inf where two eigenvalues have the same modulus, as for a GHZ state.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        If `core` is not a finite array with equal first and last legs, or one of large bonds whose powers vanish, so
        that no eigenvalue of the transfer matrix leads.

    Examples
    --------
    >>> import numpy as np, tnlib
    >>> mix = np.sqrt(np.array([[0.9, 0.1], [0.1, 0.9]]))  # a classical chain that flips once in ten sites
    >>> f"{tnlib.correlation_length(mix[:, :, None] * np.eye(2)):.4f}, {-1 / np.log(0.8):.4f}"
    '4.4814, 4.4814'
    """
    a = as_array("correlation_length", "core", core, ndim=3)
    if a.shape[0] != a.shape[-1]:
        raise ArgumentError(
            f"correlation_length: core must have equal first and last legs, got shape {a.shape}; pass one unit cell."
        )
    first, second = _largest_transfer_eigenvalues(a.astype(np.result_type(a, np.float64)) / (norm(a) or 1.0))
    if second <= np.finfo(np.float64).eps * first:
        return 0.0
    ratio = second / first
    return math.inf if ratio >= 1.0 - 1e-12 else -1.0 / math.log(ratio)


def _largest_transfer_eigenvalues(a: Array) -> tuple[float, float]:
    """Return the two largest moduli of eigenvalues of the transfer matrix of `a` (r, n, r); 0 for what is not there."""
    r = len(a)
    if r <= _DENSE:
        transfer = np.einsum("anb,cnd->acbd", a.conj(), a).reshape(r * r, r * r)
        sizes = np.sort(np.abs(np.linalg.eigvals(transfer)))[::-1]
        return float(sizes[0]), float(sizes[1]) if r > 1 else 0.0
    if not a.any():
        return 0.0, 0.0
    from scipy.sparse.linalg import ArpackError, LinearOperator, eigs

    def push(x: Array) -> Array:
        right = np.tensordot(a, x.reshape(r, r), ([2], [1]))  # c n [d] b
        return np.tensordot(a.conj(), right, ([1, 2], [1, 2])).reshape(-1)  # a [n] [b] c

    transfer = LinearOperator((r * r, r * r), matvec=push, dtype=a.dtype)
    start = np.random.default_rng(0).standard_normal(r * r).astype(a.dtype)  # the same one every time
    # Asked for two alone, it may stop at the third: of moduli that are close, one that it has not met yet is left out.
    try:
        sizes = np.sort(np.abs(eigs(transfer, k=4, ncv=40, v0=start, return_eigenvectors=False)))[::-1]
    except ArpackError:
        raise ArgumentError(
            "correlation_length: core must have a transfer matrix with a leading eigenvalue, got one without; "
            "check that the train is not zero."
        ) from None
    return float(sizes[0]), float(sizes[1])


def _spectrum(function: str, tt: TensorTrain | TTMatrix | KroneckerTerms, bond: int) -> tuple[Array, int, float]:
    """Return s, e and f: 2**e * f * s are the singular values at `bond`."""
    if isinstance(tt, KroneckerTerms):
        if as_count(function, "bond", bond) != 1:
            raise ArgumentError(
                f"{function}: bond must be 1, got {bond}; KroneckerTerms have one bond, between positions and features."
            )
        return *terms_spectrum(tt), 1.0
    as_train(function, "tt", tt)
    bond = as_bond(function, tt, bond)
    cores, twos, factor = take_apart(tt)
    on_the_right = tt.center is not None and tt.center >= bond
    cores, more = move_center(cores, tt.center, bond if on_the_right else bond - 1)
    core = cores[bond] if on_the_right else cores[bond - 1]
    matrix = core.reshape(len(core), -1).T if on_the_right else core.reshape(-1, core.shape[-1])
    return thin_svd(triangle(matrix))[1], twos + more, factor


def _as_real(function: str, parameter: str, value: float, *, least: float) -> float:
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        raise ArgumentTypeError(f"{function}: {parameter} must be a real number, got {value!r}; pass a float.")
    if not value >= least:  # false for NaN too
        raise ArgumentError(f"{function}: {parameter} must be at least {least}, got {value}; raise it.")
    return float(value)
