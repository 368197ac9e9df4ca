r"""Expectation values and correlations of operators in a train, divided by its norm squared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tnlib._errors import ArgumentError
from tnlib._typing import Array
from tnlib._validate import as_array, is_list
from tnlib.formats.train.canonicalize import move_center
from tnlib.formats.train.format import TensorTrain
from tnlib.formats.train.legs import embed
from tnlib.formats.train.operations import inner_between
from tnlib.formats.train.tt_matrix import TTMatrix, as_train
from tnlib.linalg.threads import single_threaded_blas


@single_threaded_blas
def expectation(
    tt: TensorTrain, operator: TTMatrix | npt.ArrayLike, legs: int | Sequence[int] | None = None
) -> float | complex:
    """Return the expectation value ``<tt| operator |tt> / <tt|tt>``.

    Parameters
    ----------
    tt
        A TensorTrain, not zero.
    operator
        A TTMatrix with square cores, or a square matrix on `legs`. The product with `tt` is not formed.
    legs
        Legs on which it acts, in any order, the identity on all others (`tnlib.embed`); None for all.

    Raises
    ------
    ArgumentError
        If the operator does not fit these legs, or `tt` is zero.

    References
    ----------
    U. Schollwoeck, "The density-matrix renormalization group in the age of matrix product states", Annals of Physics
    326 (2011), section 4.2.

    Examples
    --------
    >>> import numpy as np, tnlib
    >>> z = np.diag([1.0, -1.0])
    >>> bell = tnlib.tt_svd(np.eye(2)).value
    >>> f"{abs(tnlib.expectation(bell, z, 0)):.3f}", f"{tnlib.expectation(bell, np.kron(z, z), (0, 1)):.3f}"
    ('0.000', '1.000')
    """
    as_train("expectation", "tt", tt, TensorTrain)
    if legs is not None or not isinstance(operator, TTMatrix):
        operator = embed(operator, range(len(tt.cores)) if legs is None else legs, tt.shape)
    if operator.row_shape != tt.shape or operator.col_shape != tt.shape:
        raise ArgumentError(
            f"expectation: operator must act on legs of sizes {tt.shape}, got rows {operator.row_shape} and columns "
            f"{operator.col_shape}; name its legs."
        )
    moved = _normalized(tt, "expectation")
    return inner_between(moved, operator, moved).item()


@single_threaded_blas
def correlation(
    tt: TensorTrain,
    a: npt.ArrayLike | Sequence[npt.ArrayLike],
    b: npt.ArrayLike | Sequence[npt.ArrayLike] | None = None,
) -> Array:
    """Return ``<tt| a_i b_j |tt> / <tt|tt>`` for all pairs of legs, (d, d).

    Parameters
    ----------
    tt
        A TensorTrain, not zero.
    a, b
        (n, n), the operators on legs i and j; on the diagonal their product. None: b = a^H. For legs of different sizes
        a sequence of d matrices, one for each leg.

    Returns
    -------
    ndarray
        (d, d). Connected correlations follow by subtraction of the products of `expectation` values.

    Examples
    --------
    >>> import numpy as np, tnlib
    >>> z = np.diag([1.0, -1.0])
    >>> ghz = tnlib.zeros((2,) * 4) + tnlib.product_state([[1, 0]] * 4) + tnlib.product_state([[0, 1]] * 4)
    >>> tnlib.correlation(ghz, z).round(12).tolist()[1]
    [1.0, 1.0, 1.0, 1.0]
    """
    as_train("correlation", "tt", tt, TensorTrain)
    first = _on_every_leg("a", a, tt)
    second = [matrix.conj().T for matrix in first] if b is None else _on_every_leg("b", b, tt)
    d, dtype = len(tt.cores), np.result_type(tt.dtype, *first, *second)
    out = np.zeros((d, d), dtype)
    moved = _normalized(tt, "correlation")
    for i in range(d):  # with the centre at i nothing on its left counts
        moved = move_center(moved, i)
        norm_squared = float(np.linalg.norm(moved.cores[i]) ** 2)
        out[i, i] = _between(moved.cores[i], first[i] @ second[i]).trace() / norm_squared
        lefts = [_between(moved.cores[i], matrix) for matrix in (first[i], second[i])]
        for j in range(i + 1, d):
            core = moved.cores[j]
            out[i, j], out[j, i] = (
                np.sum(left * _between(core, matrix, right=True)) / norm_squared
                for left, matrix in zip(lefts, (second[j], first[j]), strict=True)
            )
            lefts = [np.tensordot(core.conj(), np.tensordot(left, core, 1), axes=([0, 1], [0, 1])) for left in lefts]
    return out


def _on_every_leg(name: str, operators: Any, tt: TensorTrain) -> list[Array]:
    """Return one matrix for each leg, from one for all or a sequence."""
    single = not is_list(operators) or len(operators) == 0 or np.ndim(operators[0]) < 2
    each = [operators] * len(tt.cores) if single else list(operators)
    matrices = [as_array("correlation", name, matrix, ndim=2) for matrix in each]
    if [matrix.shape for matrix in matrices] != [(n, n) for n in tt.shape]:
        raise ArgumentError(
            f"correlation: {name} must be (n, n) for each leg of size n, got {matrices[0].shape} for legs of sizes "
            f"{tt.shape}; pass a sequence of one matrix for each leg."
        )
    return matrices


def _between(core: Array, matrix: Array, *, right: bool = False) -> Array:
    """Return sum over n, m of conj(C)[a, m, r'] matrix[m, n] C[a, n, r], (r', r); `right`: of the right bond."""
    applied = np.tensordot(core, matrix, axes=([1], [1])).transpose(0, 2, 1)  # a m r
    axes = ([1, 2], [1, 2]) if right else ([0, 1], [0, 1])
    return np.tensordot(core.conj(), applied, axes=axes)


def _normalized(tt: TensorTrain, function: str) -> TensorTrain:
    """Return the train of norm 1, its centre at core 0."""
    moved = move_center(tt, 0)
    size = float(np.linalg.norm(moved.cores[0]))
    if size == 0:
        raise ArgumentError(f"{function}: tt must not be zero, got norm 0; its expectation values are not defined.")
    return TensorTrain.from_sweep([moved.cores[0] / size, *moved.cores[1:]], 0)
