r"""Gates on one leg of a train, or on two neighbouring legs with a truncation of the bond between them.

The centre moves to the nearer leg of the gate. There the two cores are contracted with it,

    (C)--<|            (theta)
     |    |      =      |   |       theta[l, m, m', r] = sum over n, n', b of gate[m, m', n, n'] C[l, n, b] B[b, n', r]
    [gate ]
     |    |

and the singular values of theta are the Schmidt values of the whole train at this bond. Their truncation is therefore
optimal for any gate, unitary or not, and its error is the true one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tnlib._errors import ArgumentError
from tnlib._fit import Fit, report
from tnlib._typing import Array
from tnlib._validate import as_array, as_legs, as_max_rank, as_rtol, refuse_foreign_keywords
from tnlib.formats.train.apply import truncated_product
from tnlib.formats.train.canonicalize import move_center
from tnlib.formats.train.format import TensorTrain
from tnlib.formats.train.legs import embed
from tnlib.formats.train.tt_matrix import as_column, as_train
from tnlib.formats.train.tt_rounding import change_pair
from tnlib.formats.train.tt_svd import ttm_svd
from tnlib.linalg.scaling import rescale
from tnlib.linalg.threads import single_threaded_blas
from tnlib.linalg.truncation import TruncationBudget


@single_threaded_blas
@refuse_foreign_keywords
def apply_gate(
    tt: TensorTrain,
    gate: npt.ArrayLike,
    legs: int | Sequence[int],
    *,
    rtol: float | None = None,
    max_rank: int | None = None,
) -> Fit[TensorTrain]:
    """Apply `gate` to one or two legs of a train such that norm(gate tt - fit.value) <= rtol * norm(gate tt).

    Parameters
    ----------
    tt
        A TensorTrain, real or complex, 32 or 64 bits a component. If its centre is one of the legs, the cost is one SVD
        of a matrix (l m, m' r), with l and r the ranks on the left and on the right of both legs.
    gate
        For one leg of size n, a matrix (m, n), applied as `gate @ x`. For two legs of sizes n and n', a matrix
        (n n', n n') whose slower index belongs to the first of `legs`, or an array (m, m', n, n'). It need not be
        unitary.
    legs
        One leg, or two legs in either order, neighbours or not. On distant legs the gate is applied as an operator, by
        `tnlib.embed` and `tnlib.apply`.
    rtol, max_rank
        Relative Frobenius error of the whole tensor, and maximal rank of the bond between two neighbours, of distant
        legs of every bond; the smaller rank is used. If both are None, the numerical rank. A gate on one leg changes no
        rank.

    Returns
    -------
    Fit[TensorTrain]
        In the common dtype of `tt` and `gate`, not normalized. The centre is the leg of the gate, of two neighbours the
        right one; the bond between them is in the basis of left singular vectors, with fixed signs. For distant legs it
        is that of `tnlib.apply`.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        If there are more than two legs, the shape of `gate` does not fit them, or an argument is invalid.

    References
    ----------
    G. Vidal, "Efficient simulation of one-dimensional quantum many-body systems", Phys. Rev. Lett. 93 (2004).

    Examples
    --------
    >>> import numpy as np, tnlib
    >>> hadamard = np.array([[1, 1], [1, -1]]) / np.sqrt(2)
    >>> cnot = np.eye(4)[[0, 1, 3, 2]]
    >>> plus = tnlib.apply_gate(tnlib.product_state(np.eye(2)[[0, 0]]), hadamard, 0).value
    >>> bell = tnlib.apply_gate(plus, cnot, (0, 1)).value
    >>> (
    ...     f"{tnlib.entropy(bell, 1, base=2):.6f}",
    ...     f"{tnlib.apply_gate(plus, cnot, (0, 1), rtol=0.8).error:.4f}",
    ... )
    ('1.000000', '0.7071')
    """
    rtol, max_rank = as_rtol("apply_gate", rtol), as_max_rank("apply_gate", max_rank)
    as_train("apply_gate", "tt", tt, TensorTrain)
    sites = as_legs("apply_gate", "legs", legs, len(tt.cores), proper=False)
    if len(sites) not in (1, 2):
        raise ArgumentError(
            f"apply_gate: legs must be one leg or two, got {sites}; for more pass tnlib.embed(gate, legs, tt.shape) to "
            "tnlib.apply."
        )
    if len(sites) == 1:
        value = _on_one_leg(tt, _one_leg_gate(gate, tt.shape[sites[0]]), sites[0])
        return report("apply_gate", value, error=0.0, rtol=rtol)
    four = _two_leg_gate(gate, [tt.shape[k] for k in sites])
    ordered = four if sites[0] < sites[1] else four.transpose(1, 0, 3, 2)
    if abs(sites[0] - sites[1]) > 1:
        rows, columns = ordered.shape[:2], ordered.shape[2:]
        matrix = ordered.reshape(math.prod(rows), math.prod(columns))
        operator = embed(ttm_svd(matrix, rows, columns).value, sorted(sites), tt.shape)
        product, budget = truncated_product(operator, as_column(tt), rtol, max_rank)
        value, first = product.fused(), 1
    else:
        value, budget = _on_two_legs(tt, ordered, min(sites), rtol, max_rank)
        first = max(sites)
    return report("apply_gate", value, error=budget.error, rtol=rtol, notes=budget.notes("bond", first=first))


def _one_leg_gate(gate: npt.ArrayLike, n: int) -> Array:
    """Return a gate (m, n) on a leg of size n."""
    matrix = as_array("apply_gate", "gate", gate, ndim=2)
    if matrix.shape[1] != n:
        raise ArgumentError(
            f"apply_gate: gate must have {n} columns for this leg, got shape {matrix.shape}; name two legs for a gate "
            "on two."
        )
    return matrix


def _two_leg_gate(gate: npt.ArrayLike, sizes: Sequence[int]) -> Array:
    """Return a gate (m, m', n, n') on two legs of `sizes` (n, n'), from that or from a square matrix (n n', n n')."""
    array = as_array("apply_gate", "gate", gate)
    side = math.prod(sizes)
    if array.shape == (side, side):
        return array.reshape(*sizes, *sizes)
    if array.ndim == 4 and array.shape[2:] == tuple(sizes):
        return array
    raise ArgumentError(
        f"apply_gate: gate must have shape ({side}, {side}) or (m, m', {sizes[0]}, {sizes[1]}), got {array.shape}; "
        "reshape it."
    )


def _on_one_leg(tt: TensorTrain, gate: Array, site: int) -> TensorTrain:
    """Return the train with `gate` (m, n) on leg `site`, its centre there."""
    moved = move_center(_widened(tt, gate.dtype), site)
    cores, scaled = list(moved.cores), rescale(gate)
    product = np.tensordot(cores[site], scaled.array, axes=([1], [1])).transpose(0, 2, 1)  # l [n] m r
    cores[site], exponent = rescale(np.ascontiguousarray(product), moved.exponent + scaled.exponent)
    return TensorTrain.from_sweep(cores, site, exponent).folded()


def _on_two_legs(
    tt: TensorTrain, gate: Array, site: int, rtol: float | None, max_rank: int | None
) -> tuple[TensorTrain, TruncationBudget]:
    """Return the train with `gate` (m, m', n, n') on legs `site` and `site` + 1, and its truncation."""
    scaled = rescale(gate)

    def contract(pair: Array) -> Array:
        return np.tensordot(pair, scaled.array, axes=([1, 2], [2, 3])).transpose(0, 2, 3, 1)  # l [n n'] m m' r

    out, budget = change_pair(_widened(tt, gate.dtype), site, contract, rtol, max_rank)
    return TensorTrain.from_sweep(out.cores, out.center, out.exponent + scaled.exponent).folded(), budget


def _widened(tt: TensorTrain, dtype: np.dtype[Any]) -> TensorTrain:
    """Return the train in the common dtype with a gate, without a centre that is right to fewer digits."""
    wide = tt.astype(np.result_type(tt.dtype, dtype))
    more_digits = np.finfo(wide.dtype).eps < np.finfo(tt.dtype).eps
    return TensorTrain.from_sweep(wide.cores, None, wide.exponent) if more_digits else wide
