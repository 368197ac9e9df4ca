"""Schmidt values at a bond, entropies, entanglement spectra, the truncation of one bond; correlation lengths."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from tnlib._errors import ArgumentError
from tnlib._fit import Fit, report
from tnlib._format import Format
from tnlib._registry import implementation
from tnlib._typing import Array
from tnlib._validate import as_array, as_max_rank, as_real, as_rtol, refuse_foreign_keywords
from tnlib.formats.train.canonicalize import move_center, scaled_bond_matrix
from tnlib.formats.train.cores import attach_left, rows
from tnlib.formats.train.format import TensorTrain
from tnlib.formats.train.tt_matrix import T, TTMatrix, as_bond, as_train
from tnlib.formats.train.tt_rounding import truncate_bonds
from tnlib.linalg.eigenvalues import leading_moduli
from tnlib.linalg.orthogonal import r_factor
from tnlib.linalg.scaling import Scaled, norm, rescale, shift_in_range
from tnlib.linalg.thin_svd import singular_values
from tnlib.linalg.threads import single_threaded_blas
from tnlib.linalg.truncation import TruncationBudget, noise_level


@single_threaded_blas
def schmidt_values(tt: TensorTrain | TTMatrix | Format, bond: int) -> Array:
    """Return the singular values (k,) of the tensor cut at `bond`, descending, not squared.

    k is the smaller of the bond's size and the rows of its core. A value beyond the range of the dtype raises
    ArgumentError. `vidal` returns all bonds.

    Parameters
    ----------
    tt
        A TensorTrain or TTMatrix; next to its centre the cost is one small factorization. Or KroneckerTerms, with one
        bond between positions and features.
    bond
        1 ... d - 1; bond k lies between cores k - 1 and k and has size tt.ranks[k], also for negative k.

    References
    ----------
    U. Schollwoeck, "The density-matrix renormalization group in the age of matrix product states", Annals of Physics
    326 (2011), section 4.1.

    Examples
    --------
    >>> import numpy as np, tnlib
    >>> tnlib.schmidt_values(tnlib.tt_svd(np.diag([4.0, 3.0])).value, 1)
    array([4., 3.])
    """
    advice = "use tnlib.entanglement_spectrum or tnlib.vidal, which do not contain the norm"
    return shift_in_range(*_spectrum("schmidt_values", tt, bond), "schmidt_values: every value", advice)


@single_threaded_blas
def entropy(tt: TensorTrain | TTMatrix | Format, bond: int, *, order: float = 1.0, base: float = math.e) -> float:
    r"""Return the entanglement entropy of the Schmidt values :math:`s_k` at `bond`.

    .. math:: S = -\sum_k p_k \log p_k, \quad p_k = s_k^2 / \sum_j s_j^2

    Parameters
    ----------
    tt, bond
        As for `schmidt_values`; the norm of `tt` has no effect.
    order
        1 for von Neumann, another :math:`a \ge 0` for Renyi's :math:`\log(\sum_k p_k^a) / (1 - a)`: 0 gives the
        logarithm of the Schmidt rank, inf that of :math:`1 / \max_k p_k`.
    base
        Of the logarithm: nats by default, 2 for bits.

    References
    ----------
    U. Schollwoeck, "The density-matrix renormalization group in the age of matrix product states", Annals of Physics
    326 (2011), section 4.1.

    Examples
    --------
    >>> import numpy as np, tnlib
    >>> bell = tnlib.tt_svd(np.eye(2) / np.sqrt(2)).value
    >>> f"{tnlib.entropy(bell, 1, base=2):.6f}"
    '1.000000'
    """
    order, base = _checked("entropy", order, base)
    return _entropy_of(_spectrum("entropy", tt, bond).array, order, base)


@single_threaded_blas
def entropies(tt: TensorTrain | TTMatrix, *, order: float = 1.0, base: float = math.e) -> Array:
    """Return the entropies (d - 1,) across all bonds in one sweep, as `entropy` does for one.

    Parameters
    ----------
    tt
        A TensorTrain or TTMatrix.
    order, base
        As for `entropy`.

    References
    ----------
    U. Schollwoeck, "The density-matrix renormalization group in the age of matrix product states", Annals of Physics
    326 (2011), section 4.1.

    Examples
    --------
    >>> import numpy as np, tnlib
    >>> ghz = tnlib.tt_svd(np.diag([1.0, 0.0, 0.0, 1.0]).reshape((2,) * 4)).value
    >>> tnlib.entropies(ghz, base=2).round(6)
    array([1., 1., 1.])
    """
    order, base = _checked("entropies", order, base)
    train = as_train("entropies", "tt", tt).fused()
    first, *others = move_center(train, 0).cores
    values, carry = np.zeros(len(others)), first
    for k, core in enumerate(others):
        r = r_factor(rows(carry))  # the singular values of the cut: all cores behind it are right-isometric
        values[k] = _entropy_of(singular_values(r), order, base)
        carry, _ = rescale(attach_left(r, core), 0)  # r' [r] n r''
    return values


def _checked(function: str, order: float, base: float) -> tuple[float, float]:
    order, base = as_real(function, "order", order, "order=2.0"), as_real(function, "base", base, "base=2")
    if not order >= 0.0:  # NaN too
        raise ArgumentError(f"{function}: order must be at least 0.0, got {order}; raise it.")
    if not 1.0 < base < math.inf:
        raise ArgumentError(f"{function}: base must be finite and larger than 1, got {base}; pass for example base=2.")
    return order, base


def _entropy_of(s: Array, order: float, base: float) -> float:
    """Return the entropy of singular values, without those at roundoff."""
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
    if abs(order - 1.0) < 0.5:  # sum(p^a) is close to 1, and the difference is a sum of terms of one sign
        return math.log1p(float(np.sum(p * np.expm1((order - 1.0) * logs)))) / (1.0 - order)
    return (order * top + math.log(float(np.sum(np.exp(order * (logs - top)))))) / (1.0 - order)


def entanglement_spectrum(tt: TensorTrain | TTMatrix | Format, bond: int) -> Array:
    r"""Return the entanglement spectrum at `bond`, ascending, without Schmidt values :math:`s_k` at roundoff.

    .. math:: -\log(s_k^2 / \sum_j s_j^2)

    Arguments as for `schmidt_values`; the norm of `tt` has no effect.

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
    s = _spectrum("entanglement_spectrum", tt, bond).array.astype(np.float64)
    s = s[s > noise_level(float(np.linalg.norm(s)), tt.dtype, len(s))]
    return np.abs(2.0 * np.log(s / np.linalg.norm(s)))  # and not -0.0 for a product


@single_threaded_blas
@refuse_foreign_keywords
def truncate_bond(tt: T, bond: int, *, rtol: float | None = None, max_rank: int | None = None) -> Fit[T]:
    """Truncate one bond optimally: norm(tt - fit.value) <= rtol * norm(tt), with the smallest error at its rank.

    Parameters
    ----------
    tt, bond
        A TensorTrain or TTMatrix, and the bond as for `schmidt_values`.
    rtol, max_rank
        Relative Frobenius error of the whole tensor, and maximal rank; the smaller rank is used. If both are None, the
        numerical rank.

    Returns
    -------
    Fit
        The train with core `bond` as its centre, and the discarded weight as `error ** 2`.

    References
    ----------
    U. Schollwoeck, "The density-matrix renormalization group in the age of matrix product states", Annals of Physics
    326 (2011), section 4.5.

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
    train = move_center(tt.fused(), bond - 1)
    cores = list(train.cores)
    pair = TensorTrain.from_sweep(cores[bond - 1 : bond + 1], 0)
    budget = TruncationBudget(norm(pair.cores[0]), rtol, [max(pair.ranks[1], len(cores))], tt.dtype, max_rank)
    cores[bond - 1 : bond + 1] = truncate_bonds(pair, budget)[0].cores
    value = tt.unfused(TensorTrain.from_sweep(cores, bond, train.exponent))
    return report("truncate_bond", value, error=budget.error, rtol=rtol, notes=budget.notes("bond", first=bond))


def _spectrum(function: str, tt: TensorTrain | TTMatrix | Format, bond: int) -> Scaled:
    """Return the singular values at `bond`, descending."""
    of_format = implementation("schmidt_values", type(tt))
    if of_format is not None:
        spectrum: Scaled = of_format(tt, function, bond)
        return spectrum
    train = as_train(function, "tt", tt).fused()
    matrix, exponent = scaled_bond_matrix(train, as_bond(function, train, bond))
    return Scaled(singular_values(matrix), exponent)


def correlation_length(core: npt.ArrayLike) -> float:
    r"""Return the correlation length, in sites, of the uniform train that repeats `core`.

    Correlations at distance r fall as :math:`e^{-r / \xi}`, with the correlation length

    .. math:: \xi = -1 / \log |e_1 / e_0|

    of the two largest eigenvalues in modulus of the transfer matrix :math:`\sum_n A_n^* \otimes A_n`, where
    :math:`A_n` is ``core[:, n]``. The length is 0 for a product state, and inf if the two eigenvalues have the same
    modulus, as for a GHZ state. If too many eigenvalues are close in modulus to be separated, ArgumentError is raised.

    Parameters
    ----------
    core
        (r, n, r), in any gauge and of any norm.

    References
    ----------
    U. Schollwoeck, "The density-matrix renormalization group in the age of matrix product states", Annals of Physics
    326 (2011), section 4.2.

    Examples
    --------
    A classical chain that flips once in ten sites:

    >>> import numpy as np, tnlib
    >>> core = np.sqrt([[0.9, 0.1], [0.1, 0.9]])[:, :, None] * np.eye(2)
    >>> f"{tnlib.correlation_length(core):.4f}, {-1 / np.log(0.8):.4f}"
    '4.4814, 4.4814'
    """
    a = as_array("correlation_length", "core", core, ndim=3)
    if a.shape[0] != a.shape[-1]:
        raise ArgumentError(
            f"correlation_length: core must have equal first and last legs, got shape {a.shape}; pass one unit cell."
        )
    a = a.astype(np.result_type(a, np.float64)) / (norm(a) or 1.0)
    r = len(a)

    def transfer(x: Array) -> Array:
        right = np.tensordot(a, x.reshape(r, r), ([2], [1]))  # c n [d] b
        return np.tensordot(a.conj(), right, ([1, 2], [1, 2])).reshape(-1)  # a [n] [b] c

    try:
        # A product of 2 r - 1 nilpotent r x r matrices on either side of x vanishes.
        first, second = leading_moduli(transfer, r * r, a.dtype, nilpotency_bound=2 * r - 1)
    except np.linalg.LinAlgError:
        raise ArgumentError(
            "correlation_length: core must have a transfer matrix with a leading eigenvalue, got one without; "
            "block several sites to one."
        ) from None
    if second <= np.finfo(np.float64).eps * first:
        return 0.0
    ratio = second / first
    return math.inf if ratio >= 1.0 - 1e-12 else -1.0 / math.log(ratio)
