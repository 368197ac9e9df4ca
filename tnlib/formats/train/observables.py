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
from tnlib.formats.train.legs import embed_for
from tnlib.formats.train.operations import inner_between
from tnlib.formats.train.tt_matrix import TTMatrix, as_train
from tnlib.linalg.threads import single_threaded_blas


@single_threaded_blas
def expectation(
    tt: TensorTrain,
    operator: TTMatrix | npt.ArrayLike | Sequence[npt.ArrayLike],
    legs: int | Sequence[int] | None = None,
) -> float | complex | Array:
    r"""Return the expectation value of an operator A, or those of a one-leg operator at all legs, (d,).

    .. math:: \langle t | A | t \rangle / \langle t | t \rangle

    Parameters
    ----------
    tt
        A TensorTrain, not zero.
    operator
        A TTMatrix with square cores, or a square matrix on `legs`. The product with `tt` is not formed.
    legs
        Legs on which it acts, in any order, the identity on all others (`tnlib.embed`). None: a matrix (n, n) that fits
        every leg, or a sequence of d matrices, is evaluated at each leg in one sweep; anything else acts on all legs.

    Returns
    -------
    float | complex | ndarray
        Real if the train is real, or the operator is a matrix, or matrices, equal to the adjoint in every digit.

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
    >>> one = tnlib.expectation(bell, z, 0)
    >>> both = tnlib.expectation(bell, np.kron(z, z), (0, 1))
    >>> f"{abs(one):.3f}", f"{both:.3f}"
    ('0.000', '1.000')
    >>> tnlib.expectation(tnlib.product_state(np.eye(2)[[0, 1, 1]]), z)
    array([ 1., -1., -1.])
    """
    as_train("expectation", "tt", tt, TensorTrain)
    if legs is None and _is_of_one_leg(operator, tt):
        return _at_every_leg(tt, _on_every_leg("expectation", "operator", operator, tt))
    hermitian = False
    if not isinstance(operator, TTMatrix | TensorTrain):
        operator = as_array("expectation", "operator", operator, ndim=2)
        hermitian = _is_hermitian(operator)
        if isinstance(legs, Sequence) and len(legs) > 1 and set(tt.shape) == {len(operator)}:
            raise ArgumentError(
                f"expectation: operator must act on legs {tuple(legs)} together, got a matrix {operator.shape} of one "
                "leg; leave legs out for its values at all legs."
            )
    if legs is not None or not isinstance(operator, TTMatrix):
        operator = embed_for("expectation", operator, range(len(tt.cores)) if legs is None else legs, tt.shape)
    if operator.row_shape != tt.shape or operator.col_shape != tt.shape:
        raise ArgumentError(
            f"expectation: operator must act on legs of sizes {tt.shape}, got rows {operator.row_shape} and columns "
            f"{operator.col_shape}; name its legs."
        )
    moved = _normalized(tt, "expectation")
    value: complex = inner_between(moved, operator, moved).item()
    return value.real if hermitian else value


@single_threaded_blas
def correlation(
    tt: TensorTrain,
    a: npt.ArrayLike | Sequence[npt.ArrayLike],
    b: npt.ArrayLike | Sequence[npt.ArrayLike] | None = None,
    *,
    string: npt.ArrayLike | Sequence[npt.ArrayLike] | None = None,
) -> Array:
    r"""Return correlations of all pairs of legs, (d, d), not connected; for fermions pass `string`.

    .. math:: \langle t | a_i b_j | t \rangle / \langle t | t \rangle

    Parameters
    ----------
    tt
        A TensorTrain, not zero.
    a, b
        (n, n), the operators on legs i and j; on the diagonal their product. None: :math:`b = a^H`. For legs of
        different sizes a sequence of d matrices, one for each leg.
    string
        (n, n) or d matrices, the operator S on the legs from min(i, j) to max(i, j) - 1:
        :math:`a_i S_i S_{i+1} \cdots S_{j-1} b_j` for i < j, :math:`S_j b_j S_{j+1} \cdots S_{i-1} a_i` for i > j, as
        `correlation_function` of TeNPy. With :math:`S = (-1)^n` these are fermions in the Jordan-Wigner transformation.
        None: the identity.

    Returns
    -------
    ndarray
        (d, d). Connected correlations are these minus `np.outer(expectation(tt, a), expectation(tt, b))`.

    References
    ----------
    U. Schollwoeck, "The density-matrix renormalization group in the age of matrix product states", Annals of Physics
    326 (2011), section 4.2.

    Examples
    --------
    >>> import numpy as np, tnlib
    >>> z = np.diag([1.0, -1.0])
    >>> ghz = tnlib.product_state([[1, 0]] * 4) + tnlib.product_state([[0, 1]] * 4)
    >>> tnlib.correlation(ghz, z).round(12).tolist()[1]
    [1.0, 1.0, 1.0, 1.0]

    Two fermions, one on the middle leg and one on either end, and the hopping between the ends:

    >>> c, parity = np.array([[0, 1.0], [0, 0]]), np.diag([1.0, -1.0])
    >>> # of legs (n_0, n_1, n_2)
    >>> pair = tnlib.tt_svd(np.array([[[0, 0], [0, -1.0]], [[0, 0], [1.0, 0]]])).value
    >>> [f"{tnlib.correlation(pair, c.T, c, string=s)[0, 2]:.2f}" for s in (None, parity)]
    ['-0.50', '0.50']
    """
    as_train("correlation", "tt", tt, TensorTrain)
    first = _on_every_leg("correlation", "a", a, tt)
    second = [matrix.conj().T for matrix in first] if b is None else _on_every_leg("correlation", "b", b, tt)
    strings = [] if string is None else _on_every_leg("correlation", "string", string, tt)
    d, dtype = len(tt.cores), np.result_type(tt.dtype, *first, *second, *strings)
    out = np.zeros((d, d), dtype)
    moved = move_center(_normalized(tt, "correlation"), 0)
    later = list(moved.cores)  # right-isometric, but for the first
    inner = [_applied(core, matrix) for core, matrix in zip(later, strings, strict=True)] if strings else later
    rights = [
        [_between(core, matrix, right=True) for core, matrix in zip(later, matrices, strict=True)]
        for matrices in (second, first)
    ]
    for i in range(d):  # with the centre at i nothing on its left counts
        moved = move_center(moved, i)
        core = moved.cores[i]
        norm_squared = float(np.linalg.norm(core) ** 2)
        out[i, i] = _between(core, first[i] @ second[i]).trace() / norm_squared
        pair = (first[i] @ strings[i], strings[i] @ second[i]) if strings else (first[i], second[i])
        lefts = [_between(core, matrix) for matrix in pair]
        for j in range(i + 1, d):
            out[i, j], out[j, i] = (
                np.sum(left * of_leg[j]) / norm_squared for left, of_leg in zip(lefts, rights, strict=True)
            )
            lefts = [
                np.tensordot(later[j].conj(), np.tensordot(left, inner[j], 1), axes=([0, 1], [0, 1])) for left in lefts
            ]
    return out


def _is_of_one_leg(operator: Any, tt: TensorTrain) -> bool:
    """Test if `operator` is a matrix for each leg: a sequence of matrices, or one that fits all of several legs."""
    if isinstance(operator, TTMatrix | TensorTrain) or not is_list(operator) or len(operator) == 0:
        return False
    if np.ndim(operator[0]) > 1:
        return True
    return len(tt.cores) > 1 and set(tt.shape) == {len(operator)}


def _at_every_leg(tt: TensorTrain, operators: Sequence[Array]) -> Array:
    """Return the expectation value of operators[k] on leg k, for all k."""
    moved = _normalized(tt, "expectation")
    center = moved.center or 0
    after = _density_matrices(moved.cores[center:])
    before = _density_matrices([core.transpose(2, 1, 0) for core in moved.cores[center::-1]])[1:]  # r n l
    values = np.array(
        [np.sum(matrix * density) for matrix, density in zip(operators, [*before[::-1], *after], strict=True)]
    )
    return values.real if all(map(_is_hermitian, operators)) else values


def _density_matrices(cores: Sequence[Array]) -> list[Array]:
    """Return sum over all other legs of conj(x)[m] x[n], (m, n), for each leg of a train with its centre at core 0."""
    densities, left = list[Array](), np.eye(len(cores[0]), dtype=cores[0].dtype)
    for core in cores:
        bra, ket = core.conj(), np.tensordot(left, core, 1)  # l n r
        densities.append(np.tensordot(bra, ket, axes=([0, 2], [0, 2])))
        left = np.tensordot(bra, ket, axes=([0, 1], [0, 1]))
    return densities


def _is_hermitian(matrix: Array) -> bool:
    """Test if a matrix is its adjoint in every digit, so that its expectation values are real."""
    return np.array_equal(matrix, matrix.conj().T)


def _on_every_leg(function: str, name: str, operators: Any, tt: TensorTrain) -> list[Array]:
    """Return one matrix for each leg, from one for all or a sequence."""
    single = not is_list(operators) or len(operators) == 0 or np.ndim(operators[0]) < 2
    each = [operators] * len(tt.cores) if single else list(operators)
    matrices = [as_array(function, name, matrix, ndim=2) for matrix in each]
    if [matrix.shape for matrix in matrices] != [(n, n) for n in tt.shape]:
        raise ArgumentError(
            f"{function}: {name} must be (n, n) for each leg of size n, got {matrices[0].shape} for legs of sizes "
            f"{tt.shape}; pass a sequence of one matrix for each leg."
        )
    return matrices


def _applied(core: Array, matrix: Array) -> Array:
    """Return sum over n of matrix[m, n] C[l, n, r], (l, m, r)."""
    return np.tensordot(core, matrix, axes=([1], [1])).transpose(0, 2, 1)


def _between(core: Array, matrix: Array, *, right: bool = False) -> Array:
    """Return sum over n, m of conj(C)[a, m, r'] matrix[m, n] C[a, n, r], (r', r); `right`: of the right bond."""
    axes = ([1, 2], [1, 2]) if right else ([0, 1], [0, 1])
    return np.tensordot(core.conj(), _applied(core, matrix), axes=axes)


def _normalized(tt: TensorTrain, function: str) -> TensorTrain:
    """Return the train of norm 1, with its own centre, core 0 if it has none."""
    center = tt.center or 0
    moved = move_center(tt, center)
    size = float(np.linalg.norm(moved.cores[center]))
    if size == 0:
        raise ArgumentError(f"{function}: tt must not be zero, got norm 0; its expectation values are not defined.")
    cores = list(moved.cores)
    cores[center] = cores[center] / size
    return TensorTrain.from_sweep(cores, center)
